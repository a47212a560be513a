"""Requests that change logits, and independent checks of what matches a structure."""

import json
import re

from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.request import SamplingParams, Structure, StructureKind

PROMPTS = ("add 47 + 38", "sort 4 1 3", "say it", "add 2 + 2 and 5 + 5 then say it")


def config(**sizes) -> EngineConfig:
    given = {
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_model_len": 128,
        "page_size": 16,
        "max_prefill_tokens": 32,
        "brownout": BrownoutConfig(strategy="zero"),
    }
    return EngineConfig(**(given | sizes))


async def texts(engine: Engine, prompt: str, **sampling) -> tuple[str, list, str]:
    """Sends a request; returns its text, its outputs' tokens, and why it ended."""
    params = SamplingParams(**({"max_new_tokens": 40} | sampling))
    outputs = [o async for o in engine.generate(prompt, params)]
    text = "".join(output.text for output in outputs)
    return text, outputs, outputs[-1].finish_reason


SHAPED = (
    {"frequency_penalty": 1.5, "logprobs": True},
    {"presence_penalty": 2.0, "top_logprobs": 3, "logprobs": True},
    {"repetition_penalty": 1.8},
    {"logit_bias": ((40, 8.0), (41, -100.0)), "frequency_penalty": 0.3},
    {"top_logprobs": 20},
    {"repetition_penalty": 0.7, "presence_penalty": -1.0},
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}
STRUCTURES = {
    "regex": Structure(StructureKind.REGEX, r"[a-f]{3}-(0|[1-9][0-9]?)!"),
    "schema": Structure(StructureKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "grammar": Structure(StructureKind.GRAMMAR, 'start: "(" start ")" | "x"'),
}


def matches(name: str, text: str) -> bool:
    """Returns whether a text matches a structure, by other means than the masks."""
    if name == "regex":
        return re.fullmatch(r"[a-f]{3}-(0|[1-9][0-9]?)!", text) is not None
    if name == "grammar":
        depth = text.count("(")
        return text == "(" * depth + "x" + ")" * depth
    found = json.loads(text)
    return (
        set(found) == {"name", "ages", "kind"}
        and isinstance(found["name"], str)
        and len(found["name"]) <= 8
        and 1 <= len(found["ages"]) <= 3
        and all(isinstance(age, int) for age in found["ages"])
        and found["kind"] in ("small", "large")
    )
