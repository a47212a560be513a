"""Requests that change logits, and plain loops that say which tokens are right."""

import json
import re

import numpy as np
import pytest

import jmoe
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.request import SamplingParams, Structure, StructureKind

PROMPTS = ("add 47 + 38", "sort 4 1 3", "say it", "add 2 + 2 and 5 + 5 then say it")
NEAR_TIE = 1e-3


def config(**sizes) -> EngineConfig:
    given = {"max_num_seqs": 8, "max_model_len": 128, "page_size": 16, "max_prefill_tokens": 32}
    return EngineConfig(
        dtype="float32", brownout=BrownoutConfig(strategy="zero"), **(given | sizes)
    )


async def texts(engine: Engine, prompt: str, **sampling) -> tuple[str, list, str]:
    """Text, outputs' tokens, and why it ended."""
    params = SamplingParams(**({"max_new_tokens": 40} | sampling))
    outputs = [o async for o in engine.generate(prompt, params)]
    text = "".join(output.text for output in outputs)
    return text, outputs, outputs[-1].finish_reason


def changed(logits, prompt, output, sampling) -> np.ndarray:
    """Logits of the next token as a request wants them."""
    logits = np.array(logits, np.float64)
    for token, bias in sampling.get("logit_bias", ()):
        logits[token] += bias
    penalty = sampling.get("repetition_penalty", 1.0)
    for token in {*prompt, *output}:
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= sampling.get("frequency_penalty", 0.0) * output.count(token)
        logits[token] -= sampling.get("presence_penalty", 0.0)
    return logits


def check(model, prompt: str, outputs, sampling) -> None:
    """Each token is the likeliest of changed logits; log-probabilities are of those unchanged."""
    prompt, tokens = model.tokenizer.encode(prompt), [o.token_ids[0] for o in outputs]
    every = np.asarray(jmoe.forward(model, np.array([prompt + tokens])))[0].astype(np.float64)
    logprobs = every - np.log(np.exp(every - every.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logprobs -= every.max(-1, keepdims=True)
    for at, (token, output) in enumerate(zip(tokens, outputs, strict=True)):
        position = len(prompt) + at - 1
        left = changed(every[position], prompt, tokens[:at], sampling)
        assert left[token] >= left.max() - NEAR_TIE
        if sampling.get("logprobs"):
            assert output.logprobs[0] == pytest.approx(logprobs[position, token], abs=1e-3)
        count = sampling.get("top_logprobs", 0)
        if count:
            (top,) = output.top_logprobs
            best = np.sort(logprobs[position])[::-1][:count]
            np.testing.assert_allclose([value for _, value in top], best, atol=1e-3)
            for likely, value in top:
                assert value == pytest.approx(logprobs[position, likely], abs=1e-3)


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
    """By other means than the masks."""
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
