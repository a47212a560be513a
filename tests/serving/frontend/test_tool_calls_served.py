"""Calls that have to be, of a checkpoint of random weights with 16k positions: OpenAI's own client
against a real server and engine, in loops of three turns, over every format.
"""

import asyncio
import json
import shutil

import numpy as np
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai_served import NO_CERTIFICATES
from served import Setup
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jmoe.api import resolve
from serving.config import BrownoutConfig, EngineConfig, ServerConfig
from serving.engine import Engine
from tests.serving.families import GOLDEN
from tests.variants import change

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

POSITIONS, VOCAB, CONVERSATIONS = 16_384, 640, 44
MARKERS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "mistral": ["[TOOL_CALLS]"],
    "mistral, arguments": ["[TOOL_CALLS]", "[ARGS]"],
    "glm45": ["<tool_call>", "</tool_call>"]
    + [f"<{slash}{name}>" for slash in ("", "/") for name in ("arg_key", "arg_value")],
    "deepseek_v3": [
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ],
    "kimi_k2": [
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
    "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>"],
    "openai": ["<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>"],
    "in text": [],
}
"""Special tokens of each format; of the last none: markers are in the text."""
TEMPLATE = (
    "{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}{{% for m in messages %}}"
    "[{{{{ m.role }}}}|{{{{ m.content or '' }}}}{{% for call in m.tool_calls or [] %}}"
    "{{{{ call.function | tojson }}}}{{% endfor %}}]{{% endfor %}}{{# {} #}}"
)
DAYS = {"type": "integer", "minimum": 1, "maximum": 14}
WEATHER = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ['C"', "</x>"]},
        "days": DAYS,
        "hot": {"type": "boolean"},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Makes the weights once; returns a function that gives them a format's tokens and template."""
    where = tmp_path_factory.mktemp("checkpoints")
    weights, rng = shutil.copytree(GOLDEN, where / "weights"), np.random.default_rng(0)

    def drawn(name, tensor):
        shape = (VOCAB, *tensor.shape[1:]) if "embed" in name or "head" in name else tensor.shape
        spread = 1.0 if "embed" in name else shape[-1] ** -0.5
        plain = spread * rng.standard_normal(shape).astype(np.float32)
        return np.ones_like(tensor) if "norm" in name else plain

    change(weights, drawn)
    cfg = json.loads((weights / "config.json").read_text())
    cfg |= {"vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "eos_token_id": 0}
    (weights / "config.json").write_text(json.dumps(cfg))

    def made(name):
        folder = shutil.copytree(weights, where / name.replace(", ", "-").replace(" ", "-"))
        backend = Backend.from_file(str(resolve("bundled") / "tokenizer.json"))
        backend.add_special_tokens([AddedToken(text, special=True) for text in MARKERS[name]])
        assert backend.get_vocab_size() <= VOCAB
        backend.save(str(folder / "tokenizer.json"))
        text = ["<parameter="] if name == "qwen3_coder" else []  # no token, and tells the format
        marks = " ".join(text + (MARKERS[name] or MARKERS["hermes"]))
        told = {"chat_template": TEMPLATE.format(marks), "eos_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(told))
        return folder, {str(backend.token_to_id(text)): 4.0 for text in MARKERS[name]}

    return made, str(where / "programs")


def fits(name, arguments):
    """Returns whether a call is of a tool, and its arguments of the tool's schema."""
    given = json.loads(arguments)
    if name == "now":
        return given == {}
    return (
        name == "weather"
        and {"unit", "days"} <= set(given) <= {"unit", "days", "hot"}
        and given["unit"] in WEATHER["properties"]["unit"]["enum"]
        and type(given["days"]) is int
        and 1 <= given["days"] <= 14
        and isinstance(given.get("hot", True), bool)
    )


@pytest.mark.parametrize("name", MARKERS)
async def test_calls_that_have_to_be_are_valid(checkpoint, name):
    made, cache = checkpoint
    folder, bias = made(name)  # markers are likelier: harmony's thoughts before a call end
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        max_model_len=POSITIONS,
        max_num_seqs=8,
        page_size=64,
        max_prefill_tokens=256,
        decode_buckets=(8,),
        prefill_buckets=(256,),
        threshold_buckets_percent=(100,),
        brownout=BrownoutConfig(strategy="zero"),
        compilation_cache=cache,
    )
    engine = await Engine.start(config, progress=lambda *_: None)
    calls, lengths = [], []

    async def loop(client, number):
        """Has three turns: calls, one call of a named function, a text."""
        words = "far and " * (4200 if number == 0 else 2)
        messages = [{"role": "user", "content": f"{words}cold in Paris? {number}"}]
        for choice, most in (("required", 3000), (NAMED, 1000), ("none", 8)):
            given = {
                **{"model": served, "messages": messages, "tools": TOOLS, "tool_choice": choice},
                **{"max_tokens": most, "temperature": 1.0, "seed": number, "logit_bias": bias},
            }
            if number % 2 and choice != "none":  # the client raises at a length it has asked for
                usage = {"include_usage": True}
                async with client.chat.completions.stream(**given, stream_options=usage) as stream:
                    got = await stream.get_final_completion()
            else:
                got = await client.chat.completions.create(**given)
            message, reason = got.choices[0].message, got.choices[0].finish_reason
            lengths.append(got.usage.total_tokens)
            found = [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
            assert (reason == "tool_calls") == bool(found), (choice, reason, message)
            assert bool(found) == (choice != "none")
            assert choice != NAMED or [called for called, _ in found] == ["weather"]
            calls.extend(found)
            messages.append(message.model_dump(exclude_none=True))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "12"}
                for call in message.tool_calls or []
            ]

    async with Setup(ServerConfig(port=0, engine=config)) as s:
        await s.server.attach(engine)
        (served,) = s.server.model_names
        async with AsyncOpenAI(
            base_url=f"http://{s.web.address}/v1",
            api_key="any",
            max_retries=0,
            timeout=300,
            http_client=DefaultAsyncHttpxClient(verify=NO_CERTIFICATES),
        ) as client:
            await asyncio.gather(*(loop(client, number) for number in range(CONVERSATIONS)))
    assert len(calls) >= 2 * CONVERSATIONS  # more than a thousand of all formats together
    assert {called for called, _ in calls} == {"weather", "now"}
    assert [call for call in calls if not fits(*call)] == []
    assert max(lengths) > 12_000
    print(f"{name}: {len(calls)} calls, the longest of {max(lengths)} positions")
