"""Schemas as pydantic makes them, of which llguidance does not know everything, over HTTP."""

import json
from pathlib import Path
from typing import Annotated, Literal

import pytest
from held_texts import lets_write, tokenizer_of
from openai_served import CHAT, serving_an_engine
from pydantic import BaseModel, Field, SecretStr, TypeAdapter

from serving.frontend.openai import sampling
from serving.frontend.openai.schemas import CompletionRequest


class _Cat(BaseModel):
    name: str


class _Dog(BaseModel):
    name: str
    age: int = 0


def _schema(kind):
    return {
        "type": "object",
        "properties": {"x": TypeAdapter(kind).json_schema()},
        "required": ["x"],
        "additionalProperties": False,
    }


def _overlapping():
    schema = _schema(_Cat | _Dog)
    x = schema["properties"]["x"]
    schema["$defs"] = x.pop("$defs")
    schema["properties"]["x"] = {"oneOf": x["anyOf"]}
    return schema


KINDS = {
    "uniqueItems": (_schema(set[str]), ["a", "b"], [1]),
    "propertyNames": (_schema(dict[Literal["a"], int]), {"a": 1}, {"a": "b"}),
    "path": (_schema(Path), "a/b", 1),
    "password": (_schema(Annotated[SecretStr, Field(min_length=2)]), "abc", "a"),
    "binary": (_schema(bytes), "abc", ["a"]),
    "decimal": ({"properties": {"x": {"type": "string", "format": "decimal"}}}, "1.5", 1.5),
    "uri-reference": (
        {"properties": {"x": {"type": "string", "format": "uri-reference", "pattern": "^/"}}},
        "/a",
        "a",
    ),
    "contains": (
        {"properties": {"x": {"type": "array", "contains": {"const": 1}, "maxItems": 2}}},
        [1, 2],
        [1, 2, 3],
    ),
    "dependentRequired": (
        {
            "properties": {
                "x": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                    "dependentRequired": {"a": ["b"]},
                }
            }
        },
        {"a": 1, "b": 2},
        {"a": "1"},
    ),
    "oneOf": (_overlapping(), {"name": "a", "age": 1}, {"name": 1}),
}
"""By what llguidance does not know: a schema, and a value of `x` that fits it, and one that does
not by what else the schema says."""


def _tool(schema, strict):
    described = {"name": "f", "parameters": schema}
    return described if strict is None else described | {"strict": strict}


def _tools(choice):
    def body(schema, strict):
        tools = [{"type": "function", "function": _tool(schema, strict)}]
        return {"messages": CHAT, "tools": tools, "tool_choice": choice}

    return "/v1/chat/completions", body


def _response_format(schema, strict):
    wanted = {"name": "x", "schema": schema}
    wanted |= {} if strict is None else {"strict": strict}
    return {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": wanted}}


def _both(schema, strict):
    chat = _response_format(schema, strict) | _tools("auto")[1](schema, None)
    del chat["prompt"]
    return chat


def _text(schema, strict):
    wanted = {"type": "json_schema", "name": "x", "schema": schema}
    wanted |= {} if strict is None else {"strict": strict}
    return {"input": "a", "text": {"format": wanted}}


def _flat(schema, strict):
    tool = {"type": "function", **_tool(schema, strict)}
    return {"input": "a", "tools": [tool], "tool_choice": "required"}


ASKED = {
    "required": _tools("required"),
    "named": _tools({"type": "function", "function": {"name": "f"}}),
    "response_format": ("/v1/completions", _response_format),
    "response_format beside tools": ("/v1/chat/completions", _both),
    "text.format": ("/v1/responses", _text),
    "tools of a response": ("/v1/responses", _flat),
}
UNSTRICT = {
    "guided_json": lambda schema: {"guided_json": schema},
    "guided_json as text": lambda schema: {"guided_json": json.dumps(schema)},
    "structured_outputs": lambda schema: {"structured_outputs": {"json": schema}},
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"


async def test_what_a_grammar_does_not_know_is_refused_of_strict_schemas_alone():
    async with serving_an_engine(TEMPLATE) as client:

        async def post(path, body):
            most = "max_output_tokens" if "input" in body else "max_tokens"
            return await client.post(path, json={"model": "bundled", most: 2} | body)

        for kind, (schema, _, _) in KINDS.items():
            for way, (path, body) in ASKED.items():
                for strict, status in ((None, 200), (False, 200), (True, 400)):
                    got = await post(path, body(schema, strict))
                    assert got.status_code == status, (kind, way, strict, got.text)
            for way, fields in UNSTRICT.items():
                got = await post("/v1/completions", {"prompt": "a", **fields(schema)})
                assert got.status_code == 200, (kind, way, got.text)


@pytest.mark.parametrize("kind", KINDS)
def test_what_else_a_schema_says_is_held_to(kind):
    schema, right, wrong = KINDS[kind]
    body = CompletionRequest.model_validate(_response_format(schema, None))
    structure, tokenizer = sampling.structure(body), tokenizer_of("", [])
    assert lets_write(structure, tokenizer, json.dumps({"x": right}))
    assert not lets_write(structure, tokenizer, json.dumps({"x": wrong}))
