"""Grammars of tool calls: whatever they let a model write is read as calls that fit the schemas."""

import json
import random

import numpy as np
import pytest
from held_texts import END, lets_write, tokenizer_of
from tokenizers import AddedToken

from serving.errors import InvalidRequest
from serving.frontend.openai.chats import Tools
from serving.frontend.openai.schemas import ChatRequest
from serving.frontend.openai.tool_parsers import ToolParser
from serving.intake.grammars import Vocabulary
from serving.intake.structure import Matcher
from serving.request import Structure, StructureKind

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
    "kimi_k2": [
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
    # The last is none of the model's tokens; it is one here so that texts drawn at random end.
    "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>", "</parameter>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "</parameter>"],
}
MARKERS["glm47"] = MARKERS["glm45"]
TEMPLATES = [
    *(("hermes", "tools <tool_call>"), ("mistral", "tools [TOOL_CALLS]"), ("glm45", "<arg_key>")),
    *(("mistral", "[TOOL_CALLS] [ARGS]"), ("openai", "<|channel|>")),
    *(("deepseek_v3", "<｜tool▁call▁begin｜>```"), ("deepseek_v3", "<｜tool▁call▁begin｜>")),
    *(("kimi_k2", "<|tool_call_begin|>"), ("minimax_m2", "<minimax:tool_call>")),
    ("qwen3_coder", "<tool_call><parameter="),
]
TEMPLATE = {"glm47": "<arg_key>", **dict(reversed(TEMPLATES))}
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
        tokenizer, schemas=dict.fromkeys(names[:29], {"type": "object", **said} | schema)
    )
    ((name, arguments), *_) = calls_in(tools, writer(tools, tokenizer, rng)())[1]
    assert name in names
    assert set(arguments) == set(properties)
    assert arguments["description"] in ["a", {"title": "t"}]


def follows(tools, tokenizer, text, wanted=None):
    """Returns whether the grammar lets a model write a text, and end there."""
    return lets_write(tools.structure(wanted), tokenizer, text)


HARMONY = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
IN_TEXT = {
    "hermes": (
        ["Hi.", "a < b <tool_cal\n", "<think>Hm.</think>\n2"],
        '<tool_call>\n{{"name": "{0}", "arguments": {1}}}\n</tool_call>',
    ),
    "mistral": (["Hi.", "[TOOL_CALL"], '[TOOL_CALLS][{{"name": "{0}", "arguments": {1}}}]'),
    "openai": (
        ["<|channel|>final<|message|>Hi.", HARMONY + "final<|message|>Hi."],
        HARMONY + "commentary to=functions.{0} <|constrain|>json<|message|>{1}",
    ),
    "deepseek_v3": (
        ["Hi.", "<｜tool"],
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{0}<｜tool▁sep｜>{1}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        ["Hi.", "<|tool_call"],
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{0}:3"
        "<|tool_call_argument_begin|>{1}<|tool_call_end|><|tool_calls_section_end|>",
    ),
}
TAGGED = {
    "glm45": (
        "<tool_call>{0}\n{1}</tool_call>",
        "<arg_key>{0}</arg_key>\n<arg_value>{1}</arg_value>\n",
    ),
    "glm47": (
        "<tool_call>{0}{1}</tool_call>",
        "<arg_key>{0}</arg_key><arg_value>{1}</arg_value>",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="{0}">\n{1}</invoke>\n</minimax:tool_call>',
        '<parameter name="{0}">{1}</parameter>\n',
    ),
    "qwen3_coder": (
        "<tool_call>\n<function={0}>\n{1}</function>\n</tool_call>",
        "<parameter={0}>\n{1}\n</parameter>\n",
    ),
}
RIGHT, WRONG = '{"unit": "</x>", "days": 3}', '{"unit": "K", "days": 3}'


@pytest.mark.parametrize("kind", ["special", "added", "text"])
@pytest.mark.parametrize("parser", [*IN_TEXT, *TAGGED])
def test_beside_text_a_call_is_held_from_its_marker_on(parser, kind):
    texts, form = IN_TEXT.get(
        parser, (["Hi.", "<arg_key>", '<invoke name="x">', "<function=x>"], "")
    )

    def called(name, arguments):
        if parser not in TAGGED:
            return form.format(name, arguments)
        call, argument = TAGGED[parser]
        told = [argument.format(*one) for one in json.loads(arguments).items()]
        return call.format(name, "".join(told))

    template = TEMPLATE[parser].replace("```", "")
    tokenizer = tokenizer_of(f"tools {template}", MARKERS[parser] if kind == "special" else [])
    if kind == "added":
        added = ["<think>", "</think>", *MARKERS[parser]]
        tokenizer.backend.add_tokens([AddedToken(text) for text in added])
    tools = tools_of(tokenizer, choice="auto")
    if parser == "openai" and kind == "text":
        assert tools.structure() is None  # nothing tells where a message ends
        return
    calls = called("weather", RIGHT), called("now", "{}")
    for text in texts:
        assert follows(tools, tokenizer, text), text
    for call in calls:
        assert follows(tools, tokenizer, call), call
        assert calls_in(tools, call)[1]
    assert not follows(tools, tokenizer, called("weather", WRONG))
    assert not follows(tools, tokenizer, called("then", "{}"))
    if parser != "openai":
        assert follows(tools, tokenizer, f"I look.\n{calls[0]}\n{calls[1]}\nSo.")
        assert not follows(tools, tokenizer, calls[0] + called("weather", WRONG))


@pytest.mark.parametrize("parser", ["minimax_m2", "qwen3_coder"])
def test_a_text_ends_at_its_tag_where_that_is_no_token(parser):
    tokenizer = tokenizer_of(TEMPLATE[parser], MARKERS[parser][:2])
    tools = tools_of(tokenizer, schemas={"say": FREE})
    call, argument = TAGGED[parser]
    text = 'a < b\n</par"</invoke>'
    written = call.format("say", argument.format("text", text))
    assert follows(tools, tokenizer, written)
    assert calls_in(tools, written) == ("", [("say", {"text": text})])
    assert not follows(tools, tokenizer, written.replace("</parameter>", ""))


@pytest.mark.parametrize(("parser", "template"), TEMPLATES)
def test_whatever_is_written_beside_text_has_right_calls(parser, template):
    rng = random.Random(parser + template)
    tokenizer = tokenizer_of(f"tools {template}", MARKERS[parser])
    tools = tools_of(tokenizer, choice="auto")
    write, found = writer(tools, tokenizer, rng), 0
    for _ in range(12):
        for name, arguments in calls_in(tools, write())[1]:
            found += 1
            assert name in ("weather", "now")
            if name == "weather":
                assert arguments["unit"] in SCHEMA["properties"]["unit"]["enum"]
                assert 1 <= arguments["days"] <= 14
    assert found


def test_where_nobody_asks_to_be_held_what_a_grammar_does_not_know_is_left_out():
    unknown = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}
    tokenizer = tokenizer_of("tools <tool_call>", MARKERS["hermes"])
    tools = tools_of(tokenizer, choice="auto", schemas={"f": unknown})
    assert follows(
        tools, tokenizer, '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
    )
    assert tools_of(tokenizer, choice="auto", ignore_eos=True).structure() is None
    large = {f"p{i}": {"type": "string"} for i in range(4000)}
    tools = tools_of(tokenizer, choice="auto", schemas={"f": {"properties": large}})
    assert tools.structure() is None


@pytest.mark.parametrize(("parser", "template"), TEMPLATES)
def test_beside_an_answer_with_a_schema_there_are_calls_or_that(parser, template):
    tokenizer = tokenizer_of(f"tools {template}", MARKERS[parser])
    tools, wanted = (
        tools_of(tokenizer, choice="auto"),
        Structure(StructureKind.JSON_SCHEMA, json.dumps(FREE)),
    )
    call = writer(tools_of(tokenizer), tokenizer, random.Random(5))()
    assert follows(tools, tokenizer, call, wanted)
    assert follows(tools, tokenizer, '{"text": "Hi."}', wanted)
    assert not follows(tools, tokenizer, "Hi.", wanted)
    assert not follows(tools, tokenizer, '{"texts": "Hi."}', wanted)


def test_a_parser_that_does_not_say_how_calls_are_written_has_no_grammar():
    class Own(ToolParser):
        opening = "<own>"

        def read(self):
            yield

    with pytest.raises(NotImplementedError, match="Own does not say"):
        Own({"f": {"type": "object"}}).grammar(["f"], False, str)


def test_json_has_the_spaces_that_json_dumps_writes():
    tokenizer = tokenizer_of("tools", [])
    free = {"type": "object", "properties": {"a": {"type": "array"}, "b": {"type": "null"}}}
    text = json.dumps({"a": [1, {"c": True}], "b": None})
    for options, spaced in (
        ({}, True),
        ({"whitespace_flexible": True}, True),
        ({"item_separator": ",", "key_separator": ":"}, False),
    ):
        schema = json.dumps(free | ({"x-guidance": options} if options else {}))
        structure = Structure(StructureKind.JSON_SCHEMA, schema)
        assert lets_write(structure, tokenizer, text) == spaced
        compact = text.replace(" ", "")
        assert lets_write(structure, tokenizer, compact) != (spaced and options == {})
