"""Token ids with an answer, in vLLM's fields, through OpenAI's own client."""

import pytest
from openai_served import CHAT, TOOLS_TEMPLATE, saying, serving_an_engine, serving_http

from serving.config import EngineConfig
from serving.frontend.openai import answers

IDS = {"return_token_ids": True}
PATHS = {
    "/v1/completions": {"prompt": "ab"},
    "/v1/chat/completions": {"messages": CHAT},
}
THINKS = TOOLS_TEMPLATE + "<think>"


def ids_of(text):
    """As the tests' tokenizer has it: characters, behind one token of its own."""
    return [1, *map(ord, text)]


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
async def test_a_completion_has_the_ids_of_its_prompt_and_of_what_was_drawn(prompt):
    is_text = prompt == "ab"
    told, other = (ids_of("ab"), ids_of("A")) if is_text else (prompt, [65])
    async with serving_http() as s:
        got = await s.complete(
            [prompt, "A" if is_text else [65]], n=2, max_tokens=3, extra_body=IDS
        )
        stream = await s.complete(prompt, n=2, stream=True, max_tokens=3, extra_body=IDS)
        events = [event async for event in stream]
        given = [call["prompt"] for call in s.engine.calls]
    assert [(one.token_ids, one.prompt_token_ids) for one in got.choices] == [
        ([99, 100, 101], told),
        ([99, 100, 101], told),
        ([66, 67, 68], other),
        ([66, 67, 68], other),
    ]
    assert given == [told, told, other, other, told, told]
    for index in (0, 1):
        own = [event.choices[0] for event in events if event.choices[0].index == index]
        assert [one.token_ids for one in own] == [[99], [100], [101]]
        first, *others = own
        assert first.prompt_token_ids == told
        assert not any(hasattr(one, "prompt_token_ids") for one in others)


async def test_a_chat_has_the_prompts_ids_at_its_top():
    async with serving_http() as s:
        got = await s.chat(n=2, extra_body=IDS)
        stream = await s.chat(stream=True, n=2, extra_body=IDS)
        events = [event async for event in stream]
        asked = await s.http.post("/tokenize", json={"messages": CHAT})
    told = asked.json()["tokens"]
    assert got.prompt_token_ids == told
    drawn = got.choices[0].token_ids
    assert drawn == list(range(told[-1] + 1, told[-1] + 3))
    assert all(one.token_ids == drawn for one in got.choices)
    assert not any(hasattr(one, "prompt_token_ids") for one in got.choices)
    for index in (0, 1):
        own = [event for event in events if event.choices[0].index == index]
        assert [token for event in own for token in event.choices[0].token_ids] == drawn
        first, *others = own
        assert first.prompt_token_ids == told
        assert not any(hasattr(event, "prompt_token_ids") for event in others)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_read_as_thoughts_and_calls_has_all_its_ids(stream):
    """Also of events that would have nothing else to say."""
    said = 'Hm.</think><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "f"}}
    async with saying(said, THINKS, step=1) as s:
        got = await s.chat(stream=stream, tools=[tool], extra_body=IDS)
        events = [event async for event in got] if stream else [got]
        (call,) = s.engine.calls
    assert sum(len(event.choices[0].token_ids) for event in events) == len(said)
    assert events[0].prompt_token_ids == call["prompt"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", [{}, {"return_token_ids": False}, {"return_token_ids": None}])
async def test_nobody_gets_ids_who_does_not_ask(path, fields):
    async with serving_http() as s:
        for stream in (False, True):
            got = await s.http.post(path, json=PATHS[path] | fields | {"stream": stream})
            assert got.status_code == 200
            assert "token_ids" not in got.text


async def test_a_prompt_that_is_scored_truncated_or_echoed_has_its_own_ids():
    async with serving_http() as s:
        scored = await s.complete(echo=True, max_tokens=0, logprobs=1, extra_body=IDS)
        cut = await s.complete("abcd", echo=True, extra_body=IDS | {"truncate_prompt_tokens": 2})
        plain = await s.complete("abcd", echo=True, extra_body=IDS)
    assert (scored.choices[0].text, scored.choices[0].token_ids) == ("ab", [])
    assert scored.choices[0].prompt_token_ids == ids_of("ab")
    assert (cut.choices[0].text, cut.choices[0].prompt_token_ids) == ("cdef", [99, 100])
    assert (plain.choices[0].text, plain.choices[0].prompt_token_ids) == ("abcdef", ids_of("abcd"))


@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_says_all_that_it_drew(path):
    """A real one: with the end of the text, and what a stop string holds back or takes away."""
    async with serving_an_engine() as client:
        asked = {"model": "bundled", "ignore_eos": True, "max_tokens": 12, "logprobs": True}
        if path == "/v1/completions":
            asked["logprobs"] = 0
        asked |= PATHS[path] | IDS | {"return_tokens_as_token_ids": True}
        whole = (await client.post(path, json=asked)).json()
        drawn = whole["choices"][0]["token_ids"]
        text = whole["choices"][0].get("text") or whole["choices"][0]["message"]["content"]
        stopped = (await client.post(path, json=asked | {"stop": text[-3:]})).json()
        model = answers.Completion if path == "/v1/completions" else answers.ChatCompletion
        for one in (whole, stopped):
            model.model_validate(one)
            (choice,) = one["choices"]
            assert len(choice["token_ids"]) == one["usage"]["completion_tokens"]
            assert choice["token_ids"] == drawn[: len(choice["token_ids"])]
            lists = choice["logprobs"]
            shown = lists.get("tokens") or [entry["token"] for entry in lists["content"]]
            assert shown == [f"token_id:{token}" for token in choice["token_ids"]]
            prompt = one.get("prompt_token_ids") or choice["prompt_token_ids"]
            assert len(prompt) == one["usage"]["prompt_tokens"]
    assert len(drawn) == 12


async def test_tokens_of_logprobs_are_shown_by_their_ids():
    by_id = {"return_tokens_as_token_ids": True}
    async with serving_http(engine=EngineConfig(max_model_len=64)) as s:
        text = await s.complete(logprobs=2, extra_body=by_id)
        chat = await s.chat(logprobs=True, top_logprobs=2, extra_body=by_id)
        plain = await s.chat(logprobs=True, top_logprobs=2)
    told = text.choices[0].logprobs
    assert told.tokens == ["token_id:99", "token_id:100"]
    assert told.top_logprobs[0] == {"token_id:99": -0.5, "token_id:100": -1.5}
    shown, usual = chat.choices[0].logprobs.content, plain.choices[0].logprobs.content
    assert [one.token for one in shown] == [f"token_id:{ord(one.token)}" for one in usual]
    assert [one.bytes for one in shown] == [one.bytes for one in usual]
    assert [top.token for top in shown[0].top_logprobs] == [
        f"token_id:{ord(top.token)}" for top in usual[0].top_logprobs
    ]
