"""Chats, through OpenAI's own client. The engine counts on from the last character of the text."""

import pytest
from openai.types.chat import ChatCompletionChunk
from openai_served import CHAT, serving_http

from serving.config import EngineConfig
from serving.frontend.openai import answers
from serving.request import Chat, Priority


async def test_an_answer_and_its_usage():
    async with serving_http() as s:
        got = await s.chat()
        (call,) = s.engine.calls
    answers.ChatCompletion.model_validate(got.model_dump(exclude_unset=True))
    (choice,) = got.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "^_")  # behind "]"
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    # The template writes token 1 itself; it is not there twice.
    assert got.usage.prompt_tokens == len("\x01[user|hi]")
    assert call["prompt"] == Chat(CHAT)
    assert got.id.startswith("chatcmpl-")


async def test_a_stream_says_who_speaks_once():
    async with serving_http() as s:
        stream = await s.chat(max_tokens=3, stream=True, stream_options={"include_usage": True})
        got = [event async for event in stream]
        raw = await s.post("/v1/chat/completions", messages=CHAT, stream=True, max_tokens=3)
    deltas = [event.choices[0].delta for event in got[:-1]]
    assert [delta.content for delta in deltas] == ["^", "_", "`"]
    assert [delta.role for delta in deltas] == ["assistant", None, None]
    assert [event.choices[0].finish_reason for event in got[:-1]] == [None, None, "length"]
    assert got[-1].choices == []
    assert got[-1].usage.completion_tokens == 3
    assert raw.status_code == 400  # prompt is no field of a chat


async def test_every_event_of_a_stream_looks_as_described():
    fields = {"logprobs": True, "top_logprobs": 1, "n": 2, "stream": True}
    body = {"model": "counter", "messages": CHAT, "max_tokens": 2, **fields}
    async with serving_http() as s:
        answer = await s.http.post("/v1/chat/completions", json=body)
    *events, done, _ = answer.text.split("\n\n")
    assert done == "data: [DONE]"
    for event in events:
        ChatCompletionChunk.model_validate_json(event.removeprefix("data: "))
    assert len(events) == 4


async def test_roles_parts_and_names_reach_the_template():
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "c", "name": "Ann"},
    ]
    async with serving_http(engine=EngineConfig(max_model_len=128)) as s:
        got = await s.chat(messages, extra_body={"chat_template_kwargs": {"closing": "A"}})
        (call,) = s.engine.calls
        text = s.engine.model.tokenizer.chat(call["prompt"].messages, call["prompt"].options)
    assert text == "\x01[system|be brief][user|ab][assistant|][userAnn|c]A"
    assert got.choices[0].message.content == "BC"
    assert got.usage.prompt_tokens == len(text)


async def test_answers_of_openai_come_back_as_history():
    """With all that its API puts into a message, and vLLM's newer name of thoughts."""
    empty = {"refusal": None, "audio": None, "function_call": None, "tool_calls": []}
    answer = {"role": "assistant", "content": "b", "annotations": [], "reasoning": "Hm.", **empty}
    async with serving_http(engine=EngineConfig(max_model_len=128)) as s:
        await s.post("/v1/chat/completions", messages=[*CHAT, answer, *CHAT], prompt=None)
        await s.post(
            "/v1/chat/completions", messages=[*CHAT, answer | {"tool_calls": None}], prompt=None
        )
        differs = await s.post(
            "/v1/chat/completions", messages=[answer | {"reasoning_content": "No."}], prompt=None
        )
        cites = await s.post(
            "/v1/chat/completions", messages=[answer | {"annotations": [{}]}], prompt=None
        )
        told = [call["prompt"].messages[1] for call in s.engine.calls]
    assert told == [{"role": "assistant", "content": "b", "reasoning_content": "Hm."}] * 2
    assert "reasoning and reasoning_content" in differs.json()["error"]["message"]
    assert "annotations has 1 entries" in cites.json()["error"]["message"]


async def test_logprobs_and_likeliest_tokens():
    async with serving_http() as s:
        got = await s.chat(logprobs=True, top_logprobs=2)
        plain = await s.chat(logprobs=True)
    entries = got.choices[0].logprobs.content
    assert [(e.token, e.logprob, e.bytes) for e in entries] == [
        ("^", -0.5, [94]),
        ("_", -0.5, [95]),
    ]
    assert [[(t.token, t.logprob) for t in e.top_logprobs] for e in entries] == [
        [("^", -0.5), ("_", -1.5)],
        [("_", -0.5), ("`", -1.5)],
    ]
    assert [e.top_logprobs for e in plain.choices[0].logprobs.content] == [[], []]


async def test_several_answers_and_their_seeds():
    async with serving_http() as s:
        got = await s.chat(n=3, seed=5, max_completion_tokens=2)
        seeds = sorted(call["sampling"].seed for call in s.engine.calls)
    assert [choice.index for choice in got.choices] == [0, 1, 2]
    assert seeds == [5, 6, 7]
    assert got.usage.completion_tokens == 6
    assert got.usage.prompt_tokens == len("\x01[user|hi]")


async def test_what_the_template_gets_from_the_server_is_refused():
    async with serving_http() as s:
        with pytest.raises(Exception, match="bos_token from the server"):
            s.engine.model.tokenizer.chat(CHAT, {"bos_token": "x"})


async def test_the_newer_name_goes_before_the_older():
    async with serving_http() as s:
        got = await s.chat(max_tokens=2, max_completion_tokens=3)
    assert got.usage.completion_tokens == 3


async def test_what_agents_send_and_changes_nothing_is_taken():
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    fields = {"store": True, "service_tier": "priority"}
    async with serving_http() as s:
        await s.chat([{"role": "user", "content": [part]}], **fields)
        (call,) = s.engine.calls
    assert call["prompt"] == Chat(CHAT)
    assert call["priority"] is Priority.LATENCY_SENSITIVE


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ({"content": None, "refusal": "No."}, "No."),
        ({"refusal": "No."}, "No."),
        ({"content": "b", "refusal": "No."}, "b"),
        ({"content": "", "refusal": "No."}, ""),
    ],
)
async def test_a_refusal_is_what_was_said_where_nothing_else_was(answer, content):
    async with serving_http() as s:
        await s.chat([*CHAT, {"role": "assistant", **answer}, *CHAT])
        (call,) = s.engine.calls
    assert call["prompt"].messages[1] == {"role": "assistant", "content": content}
