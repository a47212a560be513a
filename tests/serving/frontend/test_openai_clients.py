"""Clients that others wrote, unmodified, each in an environment of its own: a loop of tools."""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest
from openai_served import TOOLS_TEMPLATE, saying

from tests.environments import OWN, interpreter_with, modules_with

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

CLIENTS = {
    "openai": ("openai==3.54.0",),
    "langchain": ("langchain-openai==1.7.4",),
    "litellm": ("litellm==1.110.2",),
    "agents": ("openai-agents==0.24.0",),
    "instructor": ("instructor==1.17.0",),
}
NODE = "openai@6.30.1"
LOOPS = {"openai": 4, "node": 4, "langchain": 4, "litellm": 1, "agents": 4}
PARIS, ROME = ("temperature", '{"city": "Paris"}'), ("temperature", '{"city": "Rome"}')
TEXT = "It has 12 and 21 C."


def hermes(*calls):
    told = (f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in told)


def mistral(*calls):
    told = (f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    return f"[TOOL_CALLS][{', '.join(told)}]"


def glm(*calls):
    found = []
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in json.loads(arguments).items()
        )
        found.append(f"<tool_call>{name}\n{pairs}</tool_call>")
    return "\n".join(found)


def deepseek(*calls):
    told = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{''.join(told)}<｜tool▁calls▁end｜>"


def harmony(*calls):
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
        for name, arguments in calls
    )


def kimi(*calls):
    told = (
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>"
        for at, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(told)}<|tool_calls_section_end|>"


def minimax(*calls):
    found = []
    for name, arguments in calls:
        pairs = "".join(
            f'<parameter name="{key}">{value}</parameter>\n'
            for key, value in json.loads(arguments).items()
        )
        found.append(f'<invoke name="{name}">\n{pairs}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(found)}</minimax:tool_call>"


def qwen3_coder(*calls):
    found = []
    for name, arguments in calls:
        pairs = "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n"
            for key, value in json.loads(arguments).items()
        )
        found.append(f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>")
    return "\n".join(found)


FORMATS = {
    "<tool_call>": hermes,
    "[TOOL_CALLS]": mistral,
    "<arg_key>": glm,
    "<｜tool▁call▁begin｜>": deepseek,
    "<|channel|>": harmony,
    "<|tool_call_begin|>": kimi,
    "<minimax:tool_call>": minimax,
    "<parameter=": qwen3_coder,
}


HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def client(request):
    """Returns a client's name, and the command that runs it in its environment, which is made
    once.
    """
    if request.param == "node":
        return "node", ["node", HERE / "tool_clients.mjs", modules_with(NODE)]
    python = interpreter_with(*CLIENTS[request.param])
    return request.param, [python, HERE / "tool_clients.py", request.param]


async def told(command, s):
    """Returns what a client prints."""
    process = await asyncio.create_subprocess_exec(
        *(*command, f"http://{s.address}/v1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=OWN,
    )
    printed, failed = await process.communicate()
    assert process.returncode == 0, failed.decode()[-2000:]
    return json.loads(printed)


@pytest.mark.parametrize("marker", FORMATS)
@pytest.mark.parametrize("client", LOOPS, indirect=True)
async def test_a_loop_of_tools(client, marker):
    written = FORMATS[marker]

    def said(prompt):
        """Returns two calls, then one, then a text."""
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        count = text.count("[tool")
        if count == 3:
            assert "[tool" in text
            return f"<|channel|>final<|message|>{TEXT}" if written is harmony else TEXT
        return written(("unit", "{}")) if count else written(PARIS, ROME)

    template = TOOLS_TEMPLATE.replace("<tool_call>", marker).replace("</tool_call>", "")
    template += "{# </think> #}"  # so that the engine gets the text
    async with saying(said, template) as s:
        got = await told(client[1], s)
        count = len(s.engine.calls)
        held = all(call["sampling"].structure is not None for call in s.engine.calls)
    loops = LOOPS[client[0]]
    assert got["texts"] == [TEXT] * loops
    one = [["temperature", "Paris"], ["temperature", "Rome"]]
    cities = [sorted(part) for part in zip(got["asked"][0::3], got["asked"][1::3], strict=True)]
    assert cities == [one] * loops
    assert got["asked"][2::3] == [["unit"]] * loops
    assert count == 3 * loops
    assert held == (written is not harmony)


@pytest.mark.parametrize("client", ["instructor"], indirect=True)
async def test_an_answer_with_a_type(client):
    arguments = '{"city": "Paris", "degrees": 12}'

    def said(prompt):
        return hermes(("Weather", arguments)) if prompt.options.get("tools") else arguments

    async with saying(said) as s:
        got = await told(client[1], s)
        held = [call["sampling"].structure is not None for call in s.engine.calls]
    assert got["texts"] == [{"city": "Paris", "degrees": 12}] * 3
    assert held == [True] * 3
