"""What clients get of calls that are cut, never close or are none: in every format, and alike in
all kinds of answers.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from openai_served import saying

from serving.frontend.openai.tool_parsers import PARSERS

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTIONS = {"name": "weather", "parameters": PARAMETERS}, {"name": "now"}
Call = tuple[str, str]
"""Name and arguments, as a model writes JSON."""

PARIS, NOW, LIST = ("weather", '{"city": "Paris"}'), ("now", "{}"), ("now", "[1, 2]")
OPEN, IN_STRING = ("weather", '{"city": "Paris"'), ("weather", '{"city": "Paris')
"""Calls that never close. Between tags both lack the tag behind the value."""
SPOKEN = ' Say "so", {then}.'


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {args}{"}\n" * (args[-1] in "}]")}'
        "</tool_call>"
        for name, args in calls
    )


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{args}" for name, args in calls)


def mistral_list(calls: Sequence[Call]) -> str:
    return "".join(
        f'[TOOL_CALLS][{{"name": "{name}", "arguments": {args}{"}]" * (args[-1] in "}]")}'
        for name, args in calls
    )


def harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{args}<|call|>"
        for name, args in calls
    )


def deepseek(calls: Sequence[Call]) -> str:
    told = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{args}\n```<｜tool▁call▁end｜>"
        for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{told}<｜tool▁calls▁end｜>"


def deepseek_plain(calls: Sequence[Call]) -> str:
    told = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{args}<｜tool▁call▁end｜>"
        for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{told}<｜tool▁calls▁end｜>"


def kimi(calls: Sequence[Call]) -> str:
    told = "".join(
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{args}"
        "<|tool_call_end|>"
        for at, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{told}<|tool_calls_section_end|>"


def glm(calls: Sequence[Call]) -> str:
    argument = "<arg_key>city</arg_key>\n<arg_value>Paris"
    told = {PARIS: f"{argument}</arg_value>\n", OPEN: argument, IN_STRING: argument, LIST: LIST[1]}
    return "\n".join(f"<tool_call>{call[0]}\n{told.get(call, '')}</tool_call>" for call in calls)


def minimax(calls: Sequence[Call]) -> str:
    argument = '<parameter name="city">Paris'
    told = {PARIS: f"{argument}</parameter>\n", OPEN: argument, IN_STRING: argument, LIST: LIST[1]}
    invokes = "".join(
        f'<invoke name="{call[0]}">\n{told.get(call, "")}</invoke>\n' for call in calls
    )
    return f"<minimax:tool_call>\n{invokes}</minimax:tool_call>"


def qwen3_coder(calls: Sequence[Call]) -> str:
    argument = "<parameter=city>\nParis\n"
    told = {PARIS: f"{argument}</parameter>\n", OPEN: argument, IN_STRING: argument, LIST: LIST[1]}
    return "\n".join(
        f"<tool_call>\n<function={call[0]}>\n{told.get(call, '')}</function>\n</tool_call>"
        for call in calls
    )


FORMATS = {
    "hermes": hermes,
    "ernie45": hermes,
    "mistral": mistral,
    "mistral list": mistral_list,
    "openai": harmony,
    "deepseek_v3": deepseek,
    "deepseek_v3 plain": deepseek_plain,
    "kimi_k2": kimi,
    "glm45": glm,
    "glm47": lambda calls: glm(calls).replace("\n", ""),
    "minimax_m2": minimax,
    "qwen3_coder": qwen3_coder,
    "qwen3_xml": qwen3_coder,
}
ENDLESS = "mistral", "mistral list"
"""Formats whose calls have no marker behind them."""
TAGGED = "glm45", "glm47", "minimax_m2", "qwen3_coder", "qwen3_xml"


class Cell(NamedTuple):
    """What a model writes, and what a client gets of it."""

    said: str
    calls: list[Call]
    content: str = ""
    reason: str = "stop"


def cells(name: str) -> dict[str, Cell]:
    """Returns the cases of a format."""
    write = FORMATS[name]
    behind = {
        "deepseek_v3": "\n```",  # of a code block, which the string goes on with
        "deepseek_v3 plain": "",
    }.get(name, "")
    opened, unclosed = OPEN, (IN_STRING[0], IN_STRING[1] + behind)
    if name in TAGGED:  # a call's end is a value's, too
        opened = unclosed = PARIS
    elif name == "deepseek_v3":
        opened = OPEN[0], OPEN[1] + behind
    more = SPOKEN if name in ENDLESS else ""
    said = "" if more else SPOKEN
    head = "I look.\n"
    if name == "openai":
        head = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    whole = write([PARIS])
    no_object = {
        **dict.fromkeys(("glm45", "glm47"), Cell(write([LIST, PARIS]), [PARIS], write([LIST]))),
        **dict.fromkeys(TAGGED[2:], Cell(write([LIST, PARIS]), [NOW, PARIS], LIST[1])),
    }
    found = {
        "well formed": Cell(head + write([PARIS, NOW]), [PARIS, NOW], "I look."),
        "cut": Cell(whole[: whole.index("ris")], [("weather", '{"city": "Pa')], reason="length"),
        "text behind a bracket": Cell(
            write([OPEN]) + SPOKEN, [(opened[0], opened[1] + more)], said
        ),
        "text behind a string": Cell(
            write([IN_STRING]) + SPOKEN, [(unclosed[0], unclosed[1] + more)], said
        ),
        "first bracket": Cell(write([OPEN, PARIS]), [opened, PARIS]),
        "first string": Cell(write([IN_STRING, NOW, PARIS]), [unclosed, NOW, PARIS]),
        "second string": Cell(write([NOW, IN_STRING]), [NOW, unclosed]),
        "unknown function": Cell(write([("else", "{}"), PARIS]), [("else", "{}"), PARIS]),
        "no object": no_object.get(name, Cell(write([LIST, PARIS]), [LIST, PARIS])),
    }
    if name not in ENDLESS:
        read = OPEN if name.startswith("glm4") else PARIS  # whose end marker closes the object
        found["cut marker"] = Cell(whole[:-3], [read], reason="length")
    return found


def joined(parts) -> list[Call]:
    """Returns the calls that a stream's parts are of."""
    calls: list[Call] = []
    for part in parts:
        if part.id:
            assert part.index == len(calls)
            calls.append((part.function.name, ""))
        name, args = calls[part.index]
        calls[part.index] = name, args + (part.function.arguments or "")
    return calls


def items_of(response) -> tuple[list[Call], str]:
    """Returns the calls and the text of a response."""
    calls = [(one.name, one.arguments) for one in response.output if one.type == "function_call"]
    return calls, response.output_text


@pytest.mark.sized(
    deep=(
        "ernie45-1",
        "mistral list-1",
        "deepseek_v3 plain-1",
        "glm47-1",
        "minimax_m2-1",
        "qwen3_xml-1",
        "hermes-1000",
        "mistral-1000",
        "openai-1000",
        "deepseek_v3-1000",
        "kimi_k2-1000",
        "glm45-1000",
        "qwen3_coder-1000",
    )
)
@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("name", FORMATS)
async def test_streams_and_whole_answers_have_all_that_was_said(name, step):
    table = cells(name)

    def cell(prompt) -> Cell:
        return table[prompt.messages[-1]["content"]]

    tools = [{"type": "function", "function": one} for one in FUNCTIONS]
    flat = [{"type": "function", **one} for one in FUNCTIONS]
    parser = name.partition(" ")[0]
    async with saying(
        lambda prompt: cell(prompt).said,
        reason=lambda prompt: cell(prompt).reason,
        step=step,
        tool_call_parser=parser,
    ) as s:
        for kind, want in table.items():
            chat = [{"role": "user", "content": kind}]
            (whole,) = (await s.chat(chat, tools=tools)).choices
            called = [(c.function.name, c.function.arguments) for c in whole.message.tool_calls]
            assert (called, whole.message.content or "") == (want.calls, want.content), kind
            events = [e.choices[0] async for e in await s.chat(chat, tools=tools, stream=True)]
            parts = [part for one in events for part in one.delta.tool_calls or []]
            assert joined(parts) == want.calls, kind
            assert "".join(one.delta.content or "" for one in events) == want.content, kind
            reason = "tool_calls" if want.reason == "stop" else "length"
            assert [whole.finish_reason, events[-1].finish_reason] == [reason, reason], kind
            asked = {"model": "counter", "input": kind, "tools": flat}
            response = await s.client.responses.create(**asked)
            streamed = [e async for e in await s.client.responses.create(**asked, stream=True)]
            assert items_of(response) == (want.calls, want.content), kind
            assert items_of(streamed[-1].response) == (want.calls, want.content), kind


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.deep), 1000])
@pytest.mark.parametrize("name", FORMATS)
async def test_what_a_stop_string_cuts_is_no_call_to_run(name, step):
    """The engine's text ends before the stop string, of which nothing tells but the request."""
    whole, told = FORMATS[name]([NOW, PARIS]), "\n" + FORMATS[name]([PARIS])
    cut = whole[: whole.rindex("ris")]
    if name == "openai":
        told = "<|channel|>commentary<|message|>I<|end|><|start|>assistant" + told[1:]
    cases = {  # what is said: what is called, and whether the last call is whole
        cut: ([NOW, ("weather", '{"city": "Pa')], False),
        whole: ([NOW, PARIS], True),
        told: ([PARIS], True),
    }
    if name not in ENDLESS:  # content behind a call
        cases[FORMATS[name]([PARIS]) + " So"] = ([PARIS], True)
        cases[FORMATS[name]([IN_STRING]) + " So"] = (
            cells(name)["text behind a string"].calls,
            True,
        )
    tools = [{"type": "function", "function": one} for one in FUNCTIONS]
    flat = [{"type": "function", **one} for one in FUNCTIONS]
    asked = {"model": "counter", "tools": flat, "extra_body": {"stop": ["ris"]}}
    parser = name.partition(" ")[0]
    async with saying(
        lambda prompt: prompt.messages[-1]["content"], step=step, tool_call_parser=parser
    ) as s:
        for said, (calls, is_whole) in cases.items():
            chat = [{"role": "user", "content": said}]
            for stop in (["ris"], None):
                given = {"messages": chat, "tools": tools, "stop": stop}
                want = "tool_calls" if is_whole or stop is None else "stop"
                (answer,) = (await s.chat(**given)).choices
                made = answer.message.tool_calls
                assert [(c.function.name, c.function.arguments) for c in made] == calls, said
                events = [e.choices[0] async for e in await s.chat(**given, stream=True)]
                parts = [part for one in events for part in one.delta.tool_calls or []]
                assert joined(parts) == calls, said
                assert [answer.finish_reason, events[-1].finish_reason] == [want, want], said
            response = await s.client.responses.create(**asked, input=said)
            stream = await s.client.responses.create(**asked, input=said, stream=True)
            last = [event async for event in stream][-1]
            for one in (response, last.response):
                assert items_of(one)[0] == calls, said
                *_, of_last = (i.status for i in one.output if i.type == "function_call")
                assert of_last == ("completed" if is_whole else "incomplete"), said
                assert one.status == "completed", said


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("name", FORMATS)
async def test_half_a_marker_at_the_end_is_what_was_said(name, step):
    """An answer that its length has cut may end in text that only looks like one: `x = [`."""
    tools = [{"type": "function", "function": one} for one in FUNCTIONS]
    asked = {"model": "counter", "tools": [{"type": "function", **one} for one in FUNCTIONS]}
    parser = name.partition(" ")[0]
    async with saying(
        lambda prompt: prompt.messages[-1]["content"],
        reason="length",
        step=step,
        tool_call_parser=parser,
    ) as s:
        for count in (1, 6, 10):
            said = "x = " + FORMATS[name]([PARIS])[:count]
            given = {"messages": [{"role": "user", "content": said}], "tools": tools}
            (whole,) = (await s.chat(**given)).choices
            events = [e.choices[0] async for e in await s.chat(**given, stream=True)]
            text = "".join(one.delta.content or "" for one in events)
            assert [whole.message.content, text] == [said, said]
            assert [whole.finish_reason, events[-1].finish_reason] == ["length", "length"]
            response = await s.client.responses.create(**asked, input=said)
            stream = await s.client.responses.create(**asked, input=said, stream=True)
            streamed = [event async for event in stream][-1].response
            assert [items_of(response), items_of(streamed)] == [([], said)] * 2


def test_every_format_is_here():
    assert {name.partition(" ")[0] for name in FORMATS} == set(PARSERS)


def test_a_string_may_have_markers_in_it():
    """Where the value closes as JSON, wherever else it might end."""
    for name, write in FORMATS.items():
        marker = write([NOW])[-9:]
        if name in TAGGED:
            continue
        call = "weather", json.dumps({"city": f"{marker} said {marker}", "days": 3})
        parser = PARSERS[name.partition(" ")[0]]({"weather": PARAMETERS})
        deltas = [*parser.push(write([call])), *parser.finish()]
        assert "".join(delta.arguments for delta in deltas) == call[1], name
        assert not any(delta.content for delta in deltas), name
