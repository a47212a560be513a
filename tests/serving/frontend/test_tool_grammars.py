"""Grammars of tool calls: whatever they let a model write is read as calls that fit the schemas."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

import jmoe
from jmoe.tokenizer import Tokenizer
from serving.errors import InvalidRequest
from serving.frontend.openai.chats import Tools
from serving.frontend.openai.schemas import ChatRequest
from serving.intake.grammars import Vocabulary
from serving.intake.structure import Matcher

FOLDER = Path(jmoe.__file__).parent / "bundled"
END = "<|endoftext|>"
MARKERS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "openai": ["<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>"],
    "glm45": [f"<{slash}{name}>" for slash in ("", "/") for name in ("arg_key", "arg_value")]
    + ["<tool_call>", "</tool_call>"],
    "deepseek_v3": [
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ],
}
TEMPLATES = [
    *(("hermes", "tools <tool_call>"), ("mistral", "tools [TOOL_CALLS]"), ("glm45", "<arg_key>")),
    *(("mistral", "[TOOL_CALLS] [ARGS]"), ("openai", "<|channel|>")),
    *(("deepseek_v3", "<｜tool▁call▁begin｜>```"), ("deepseek_v3", "<｜tool▁call▁begin｜>")),
]
SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ['C"', "</x>"]},
        "days": {"$ref": "#/$defs/days"},
        "hot": {"type": "boolean"},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
}
FREE = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}


def tokenizer_of(template: str, markers: list[str]) -> Tokenizer:
    backend = Backend.from_file(str(FOLDER / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, special=True) for text in markers])
    return Tokenizer(backend, {"chat_template": template})


def tools_of(tokenizer, choice="required", schemas=None, **fields):
    schemas = schemas or {"weather": SCHEMA, "now": None}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in schemas.items()
        ],
        "tool_choice": choice,
        **fields,
    }
    return Tools(ChatRequest.model_validate(body), tokenizer, None)


def writer(tools, tokenizer, rng):
    """Returns a function that draws a text that the grammar allows; ends are likely."""
    backend = tokenizer.backend
    size, end = backend.get_vocab_size(), backend.token_to_id(END)
    likely = {*tokenizer.added_tokens.values(), backend.token_to_id('"'), end}
    structure = tools.structure()
    vocabulary = Vocabulary(backend.to_str(), size, [end])
    read, error = vocabulary.read(structure.kind.value, structure.text)
    assert error is None, (error, structure.text)

    def written() -> str:
        matcher, tokens = Matcher(read.deep_copy(), lambda: None), []
        words = np.zeros((size + 31) // 32, np.int32)
        while len(tokens) < 2000:
            words[:] = 0
            matcher.fill(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            ends = [token for token in allowed if token in likely]
            token = int(rng.choice(ends if ends and rng.random() < 0.3 else list(allowed)))
            tokens += [token] if token != end else []
            if token == end or matcher.take(token):
                return tokenizer.decode(tokens, skip_special_tokens=False)
        raise AssertionError("it does not end")

    return written


def calls_in(tools, text):
    parser = tools.parser()
    calls, content = [], ""
    for delta in [*parser.push(text), *parser.finish()]:
        content += delta.content
        if delta.name:
            calls.append([delta.name, ""])
        if delta.arguments:
            calls[-1][1] += delta.arguments
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(("parser", "template"), TEMPLATES)
def test_what_is_written_is_calls_that_fit(parser, template, as_tokens):
    rng = random.Random(parser + template)
    tokenizer = tokenizer_of(template, MARKERS[parser] if as_tokens else [])
    tools = tools_of(tokenizer)
    write, seen = writer(tools, tokenizer, rng), set()
    for _ in range(12):
        text = write()
        content, calls = calls_in(tools, text)
        assert content == "", text
        assert calls
        for name, arguments in calls:
            if name == "now":
                assert arguments == {}
                continue
            assert name == "weather"
            assert {"unit", "days"} <= set(arguments) <= {"unit", "days", "hot"}
            assert arguments["unit"] in SCHEMA["properties"]["unit"]["enum"]
            assert 1 <= arguments["days"] <= 14
            assert isinstance(arguments.get("hot", True), bool)
        seen |= {name for name, _ in calls}
    assert seen == {"weather", "now"}


@pytest.mark.parametrize(("parser", "template"), TEMPLATES)
def test_a_named_function_is_called_once_and_texts_are_free(parser, template):
    rng = random.Random(3)
    tokenizer = tokenizer_of(template, MARKERS[parser])
    choice = {"type": "function", "function": {"name": "say"}}
    tools = tools_of(tokenizer, choice=choice, schemas={"say": FREE, "now": None})
    write = writer(tools, tokenizer, rng)
    for _ in range(5):
        content, ((name, arguments),) = calls_in(tools, write())
        assert (content, name) == ("", "say")
        assert isinstance(arguments["text"], str)


def test_one_call_at_most_where_that_is_asked_for():
    rng = random.Random(1)
    tokenizer = tokenizer_of("<tool_call>", MARKERS["hermes"])
    counts = {}
    for parallel in (True, False):
        tools = tools_of(tokenizer, parallel_tool_calls=parallel)
        write = writer(tools, tokenizer, rng)
        counts[parallel] = {len(calls_in(tools, write())[1]) for _ in range(15)}
    assert max(counts[True]) > 1
    assert counts[False] == {1}


@pytest.mark.parametrize(("parser", "template"), TEMPLATES)
def test_what_schemas_say_to_people_takes_no_room_in_a_grammar(parser, template):
    """Parameters are described at length, and two are named as what is left out."""
    said = {"title": "x" * 100, "description": "y" * 200}
    properties = {
        f"p{i}": {"type": "integer", "maximum": 9, "minimum": 0, **said} for i in range(8)
    }
    properties |= {"title": {"type": "boolean"}, "description": {"enum": ["a", {"title": "t"}]}}
    schema = {"properties": properties, "required": [*properties], "additionalProperties": False}
    tokenizer, rng = tokenizer_of(template, MARKERS[parser]), random.Random(7)
    names = [f"tool{i}" for i in range(100)]
    with pytest.raises(InvalidRequest, match="number of characters of a grammar"):
        tools_of(tokenizer, schemas=dict.fromkeys(names, schema)).structure()
    tools = tools_of(
        tokenizer, schemas=dict.fromkeys(names[:30], {"type": "object", **said} | schema)
    )
    ((name, arguments), *_) = calls_in(tools, writer(tools, tokenizer, rng)())[1]
    assert name in names
    assert set(arguments) == set(properties)
    assert arguments["description"] in ["a", {"title": "t"}]
