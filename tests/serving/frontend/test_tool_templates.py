"""Models with a chat template for chats with tools: every endpoint takes it where there are tools,
over a real socket.
"""

import openai
import pytest
from openai_served import CHAT, TEMPLATE, TOOLS_TEMPLATE, serving_http
from tokenizers_of_kinds import characters

from serving.errors import SettingsError
from serving.intake.chat_templates import ChatTemplate, check_templates
from serving.request import Bounds, Chat

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
BOTH = {"default": TEMPLATE, "tool_use": "T" + TOOLS_TEMPLATE}


def asked(s):
    """Returns the last call's prompt as text."""
    prompt = s.engine.calls[-1]["prompt"]
    return s.engine.model.tokenizer.chat(prompt.messages, prompt.options)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "\x01[user|hi]"),
        ({"tools": []}, "\x01[user|hi]"),
        ({"chat_template_kwargs": {"tools": None}}, "\x01[user|hi]"),
        ({"chat_template_kwargs": {"tools": ["any"]}}, 'T\x01["any"][user|hi]'),
        ({"chat_template_kwargs": {"tools": []}}, "T\x01[user|hi]"),
        (
            {"tools": [TOOL]},
            'T\x01[{"type": "function", "function": {"name": "look", "parameters": {"type": '
            '"object"}}}][user|hi]',
        ),
    ],
)
async def test_every_endpoint_takes_the_same_template(fields, text):
    async with serving_http(BOTH) as s:
        answer = await s.http.post(
            "/tokenize", json={"model": "counter", "messages": CHAT, **fields}
        )
        assert "".join(map(chr, answer.json()["tokens"])) == text
        await s.chat(extra_body=fields)
        assert asked(s) == text
        flat = {**fields, "tools": [{"type": "function", **TOOL["function"]}]}
        flat = flat if fields.get("tools") else fields
        body = {"model": "counter", "input": CHAT, "max_output_tokens": 2, "store": False, **flat}
        answer = await s.http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        assert asked(s) == text


async def test_who_is_to_call_none_gets_the_chats_template():
    async with serving_http(BOTH) as s:
        await s.chat(tools=[TOOL], tool_choice="none")
        assert asked(s) == "\x01[user|hi]"


async def test_without_a_default_chats_need_tools():
    async with serving_http({"tool_use": TOOLS_TEMPLATE}) as s:
        await s.chat(tools=[TOOL])
        assert asked(s).startswith('\x01[{"type"')
        says = "templates are tool_use, and none is default; send tools"
        for tools in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            with pytest.raises(openai.BadRequestError, match=says):
                await s.chat(**tools)


async def test_tools_need_the_template_that_they_get():
    async with serving_http({"default": TOOLS_TEMPLATE, "tool_use": TEMPLATE}) as s:
        with pytest.raises(openai.BadRequestError, match="has no tools; serve"):
            await s.chat(tools=[TOOL])
        fields = {"model": "counter", "messages": CHAT, "tools": [TOOL]}
        answer = await s.http.post("/tokenize", json=fields)
        assert "template has no tools" in answer.text


async def test_the_process_of_chats_takes_it_too():
    template = ChatTemplate(characters(BOTH), Bounds(10_000, 10_000, 256))
    try:
        assert await template.render(Chat(CHAT)) == "\x01[user|hi]"
        assert await template.render(Chat(CHAT, {"tools": [1]})) == "T\x01[1][user|hi]"
        assert await template.render(Chat(CHAT)) == "\x01[user|hi]"
    finally:
        await template.close()


def test_both_are_compiled_at_the_start(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("fine")
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "rag.jinja").write_text("{% never used")
    check_templates([tmp_path], "")
    (more / "tool_use.jinja").write_text("{% for m in %}")
    with pytest.raises(SettingsError, match=f"tool_use of {tmp_path} is no chat template: line 1"):
        check_templates([tmp_path], "")
