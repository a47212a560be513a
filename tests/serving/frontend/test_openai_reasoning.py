"""Thoughts apart from the answer, through OpenAI's own client."""

import asyncio

import pytest
from counting import counting_engine, model_with
from openai.types.chat import ChatCompletionChunk
from openai_served import CHAT, TOOLS_TEMPLATE, HttpSetup, saying
from served import until
from tokenizers_of_kinds import characters

from serving.config import ServerConfig
from serving.frontend.openai import answers
from serving.frontend.openai.tool_parsers import Delta
from serving.intake.chat_templates import ChatTemplate
from serving.request import Priority

WEATHER = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THINKS = TOOLS_TEMPLATE + "{% if opens %}<think>\n{% endif %}{# </think> #}"
"""As Qwen3's, in short."""
ERNIE = TOOLS_TEMPLATE + "<global_setting>\nthink_mode=True\n</global_setting><think>\n"
MINIMAX = TOOLS_TEMPLATE.replace("<tool_call>", "<minimax:tool_call>") + "{# </think> #}<think>\n"
INVOKE = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
    "</invoke>\n</minimax:tool_call>"
)
KIMI = TOOLS_TEMPLATE.replace(
    "<tool_call>", "<|tool_calls_section_begin|><|tool_call_begin|><think></think>"
)
SECTION = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'
)
GPT_OSS = "{% if tools %}{% endif %}{% for m in messages %}{{ m.thinking }}|{{ m.content }}"
GPT_OSS += "{% endfor %}{# <|channel|> #}"
CHANNELS = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 2."
)
PATH = "/v1/chat/completions"


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("template", "text", "fields", "thoughts", "content", "called"),
    [
        (THINKS, "<think>\nHm.\n</think>\n\nIt is 2.", {}, "Hm.", "It is 2.", 0),
        (THINKS, "It is 2.", {}, None, "It is 2.", 0),
        (THINKS, "<think>\nHm", {}, "Hm", None, 0),
        (
            *(THINKS, "Hm.</think>It is 2.", {"chat_template_kwargs": {"opens": True}}),
            *("Hm.", "It is 2.", 0),
        ),
        (THINKS, f"<think>\nHm.\n</think>\n\n{CALL}", {"tools": [WEATHER]}, "Hm.", None, 1),
        (THINKS, f"<think>{CALL}</think>No.", {"tools": [WEATHER]}, CALL, "No.", 0),
        (
            *(ERNIE, "Hm.\n</think>\n\n<response>\nIt is 2.\n</response>\n", {}),
            *("Hm.", "It is 2.", 0),
        ),
        (ERNIE, f"Hm.\n</think>\n\n\n{CALL}\n", {"tools": [WEATHER]}, "Hm.", None, 1),
        (MINIMAX, "Hm.\n</think>\n\nIt is 2.", {}, "Hm.", "It is 2.", 0),
        (MINIMAX, f"Hm.\n</think>\n\n\n{INVOKE}", {"tools": [WEATHER]}, "Hm.", None, 1),
        (
            *(MINIMAX, f"Hm.</think>I look.\n{INVOKE}", {"tools": [WEATHER]}),
            *("Hm.", "I look.", 1),
        ),
        (KIMI, f"<think>Hm.</think>I look.{SECTION}", {"tools": [WEATHER]}, "Hm.", "I look.", 1),
        (KIMI, f"<think>Hm.{SECTION}", {"tools": [WEATHER]}, "Hm.", None, 1),
        (GPT_OSS, CHANNELS, {}, "Hm.", "It is 2.", 0),
        (GPT_OSS, CHANNELS, {"tools": [WEATHER]}, "Hm.", "It is 2.", 0),
        (TOOLS_TEMPLATE, "<think>Hm.</think>2", {}, None, "<think>Hm.</think>2", 0),
    ],
)
async def test_thoughts_are_apart(template, text, fields, thoughts, content, called, step):
    body = {"model": "counter", "messages": CHAT, **fields}
    async with saying(text, template, step=step) as s:
        whole = (await s.http.post(PATH, json=body)).json()
        raw = (await s.http.post(PATH, json=body | {"stream": True})).text.split("\n\n")[:-2]
    answers.ChatCompletion.model_validate(whole)
    message = whole["choices"][0]["message"]
    assert message.get("reasoning_content") == thoughts
    assert message["content"] == content
    assert len(message.get("tool_calls", ())) == called
    events = [
        ChatCompletionChunk.model_validate_json(event.removeprefix("data: ")).choices[0].delta
        for event in raw
    ]
    assert (
        "".join(getattr(one, "reasoning_content", None) or "" for one in events) or None
    ) == thoughts
    assert ("".join(one.content or "" for one in events) or None) == content
    assert sum(call.id is not None for one in events for call in one.tool_calls or ()) == called
    details = whole["usage"].get("completion_tokens_details")
    if template == TOOLS_TEMPLATE:
        assert details is None
    else:
        assert bool(thoughts) == (0 < details["reasoning_tokens"] <= -(-len(text) // step))


async def test_an_answer_that_is_held_to_a_structure_has_no_thoughts():
    async with saying('{"a": "</think>"}', THINKS) as s:
        got = await s.chat(response_format={"type": "json_object"})
        forced = {"tools": [WEATHER], "tool_choice": "required"}
        body = {"model": "counter", "messages": CHAT, **forced}
        await s.http.post(PATH, json=body | {"chat_template_kwargs": {"opens": True}})
    assert got.choices[0].message.content == '{"a": "</think>"}'


@pytest.mark.parametrize(
    ("template", "name", "calls", "wanted"),
    [
        (THINKS, "reasoning_content", False, "Hm."),
        (GPT_OSS, "thinking", False, "Hm."),
        (GPT_OSS, "thinking", True, None),  # beside content, its template fails
    ],
)
async def test_thoughts_of_earlier_answers_reach_the_template(template, name, calls, wanted):
    function = {"name": "weather", "arguments": "{}"}
    told = {"role": "assistant", "content": "It is 2.", "reasoning_content": "Hm."}
    if calls:
        told["tool_calls"] = [{"id": "abcdefghi", "type": "function", "function": function}]
    async with saying("Fine.", template) as s:
        prompts, tokenize = [], s.engine.tokenize

        async def noted(prompt, *given, **more):
            prompts.append(prompt)
            return await tokenize(prompt, *given, **more)

        s.engine.tokenize = noted
        await s.chat([*CHAT, told, *CHAT])
        refused = await s.http.post(
            PATH, json={"model": "counter", "messages": [CHAT[0] | {"reasoning_content": "Hm."}]}
        )
        (call,) = s.engine.calls
    (prompt,) = prompts
    assert prompt.messages[1].get(name) == wanted
    assert call["prompt"] == await tokenize(prompt)  # it is rendered once
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "messages")
    assert "role user has reasoning_content" in error["message"]


@pytest.mark.parametrize("given", [{"messages": CHAT}, {"input": "hi"}])
async def test_a_chat_waits_for_its_template_in_its_class_and_no_longer_than_it_may(
    monkeypatch, given
):
    going, render, held = asyncio.Event(), ChatTemplate.render, []

    async def hold(self, chat):
        held.append(chat)
        await going.wait()
        return await render(self, chat)

    monkeypatch.setattr(ChatTemplate, "render", hold)
    path = PATH if "messages" in given else "/v1/responses"
    async with HttpSetup(ServerConfig(port=0)) as s:
        engine = s.engine = counting_engine(model=model_with(characters(THINKS)))
        await s.ready()
        body, waiting = {"model": "counter"}, engine.admission.num_tokenizing
        asked = body | given | {"priority": "best_effort"}
        late = await s.http.post(path, json=asked | {"timeout_s": 0.1})
        assert (late.status_code, waiting.total()) == (504, 0)
        assert "not rendered within 0.1 s" in late.json()["error"]["message"]
        calls = [
            s.http.post(path, json=asked),
            s.http.post("/tokenize", json=body | {"messages": CHAT}),
        ]
        both = asyncio.gather(*calls)
        await until(lambda: len(held) == 3)
        assert dict(+waiting) == {Priority.BEST_EFFORT: 1}
        going.set()
        assert [answer.status_code for answer in await both] == [200, 200]


async def test_what_its_template_took_counts_towards_a_chats_time():
    async with saying("2", THINKS) as s:
        await s.chat()
        (call,) = s.engine.calls
    assert call["waited_s"] > 0


class Upper:
    """A format of one's own: what is in capitals is thought."""

    def __init__(self, before):
        self.before = before

    def push(self, text):
        return [Delta(reasoning=char) if char.isupper() else Delta(char) for char in text]

    def finish(self):
        return []


async def test_a_parser_by_its_name_none_and_one_of_ones_own():
    async with saying("<think>Hm.</think>2", reasoning_parser="deepseek_r1") as s:
        got = (await s.chat()).choices[0].message
    assert (got.reasoning_content, got.content) == ("Hm.", "2")
    async with saying("<think>Hm.</think>2", THINKS, reasoning_parser="none") as s:
        got = (await s.chat()).choices[0].message
    assert got.content == "<think>Hm.</think>2"
    called = CHANNELS.partition("It is")[0] + CALL
    mixed = {"tool_call_parser": "hermes", "reasoning_parser": "openai_gptoss"}
    async with saying(called, TOOLS_TEMPLATE, **mixed) as s:
        got = (await s.chat(tools=[WEATHER])).choices[0].message
    assert (got.reasoning_content, len(got.tool_calls)) == ("Hm.", 1)
    async with saying("HMit is 2", reasoning_parser=f"{__file__}:Upper") as s:
        got = (await s.chat()).choices[0].message
    assert (got.reasoning_content, got.content) == ("HM", "it is 2")
    with pytest.raises(ValueError, match=r"reasoning_parser is 'xml'; it must be one of deepseek"):
        async with saying("", reasoning_parser="xml"):
            pass


READS = THINKS + "{{ reasoning_effort or '' }}"


@pytest.mark.parametrize(
    ("path", "fields", "wanted"),
    [
        (PATH, {"messages": CHAT}, None),
        (PATH, {"messages": CHAT, "reasoning_effort": "low"}, "low"),
        (PATH, {"messages": CHAT, "reasoning_effort": None}, None),
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "xhigh"}}, "xhigh"),
        ("/v1/responses", {"input": "hi", "reasoning": {"summary": "auto"}}, None),
    ],
)
async def test_the_effort_reaches_the_template(path, fields, wanted):
    options = {"chat_template_kwargs": {"reasoning_effort": wanted}} if wanted else {}
    async with saying("Fine.", READS, reasoning_parser="none") as s:
        for more in ({}, options):
            answer = await s.http.post(path, json={"model": "counter", **fields, **more})
            assert answer.status_code == 200, answer.text
        told = [call["prompt"].options.get("reasoning_effort") for call in s.engine.calls]
    assert told == [wanted] * 2
    if path != PATH:
        assert answer.json()["reasoning"]["effort"] == wanted


@pytest.mark.parametrize(
    ("template", "fields", "said"),
    [
        (THINKS, {"reasoning_effort": "low"}, "does not read reasoning_effort; leave it out, or"),
        (READS, {"reasoning_effort": "most"}, "reasoning_effort is 'most'; it must be 'none', 'm"),
        (
            READS,
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "is 'low' and in chat_template_kwargs 'high'; leave one of them out",
        ),
    ],
)
async def test_an_effort_without_effect_is_refused(template, fields, said):
    async with saying("Fine.", template) as s:
        answer = await s.http.post(PATH, json={"model": "counter", "messages": CHAT, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "reasoning_effort")
    assert said in error["message"]
