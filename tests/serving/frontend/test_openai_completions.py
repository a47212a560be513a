"""Completions, through OpenAI's own client. The engine counts up: behind "ab" come "c", "d", ..."""

import asyncio

import orjson
import pytest
from openai_served import CHAT, TEMPLATE, HttpSetup, saying, serving_an_engine, serving_http
from tokenizers_of_kinds import byte_fallback
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from serving.config import EngineConfig, ServerConfig
from serving.frontend.access import Access
from serving.frontend.openai import answers, logprobs
from serving.request import Output, Priority, Usage

SPANS = {"prefill_threshold_percent": None, "decode_threshold_percent": [40, 70]}


async def test_models_are_listed_and_found():
    async with serving_http() as s:
        listed = await s.client.models.list()
        assert [model.id for model in listed.data] == ["counter"]
        one = await s.client.models.retrieve("counter")
        told = (await s.http.get("/v1/models/counter")).json()
    assert one == listed.data[0]
    answers.Model.model_validate(told)
    assert told["max_model_len"] == 64


async def test_a_text_and_its_usage():
    async with serving_http() as s:
        got = await s.complete("ab", max_tokens=3)
        (call,) = s.engine.calls
    answers.Completion.model_validate(got.model_dump(exclude_unset=True))
    assert [(c.index, c.text, c.finish_reason, c.logprobs) for c in got.choices] == [
        (0, "cde", "length", None)
    ]
    assert got.id.startswith("cmpl-")
    assert got.model == "counter"
    # The engine counts 8 visits for each of the 2 + i tokens before the i-th new one.
    assert got.usage.model_dump(exclude_unset=True) == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
        "degraded_share": 4 / 32,
        "expected_loss": pytest.approx(1 / 3),
        **SPANS,
    }
    assert call["prompt"] == "ab"
    assert call["priority"] is Priority.LATENCY_SENSITIVE
    assert call["allow_brownout"] is True
    assert call["timeout_s"] is None
    assert call["sampling"].temperature == 1  # OpenAI's default


async def test_a_stream_has_an_event_a_token():
    async with serving_http() as s:
        stream = await s.complete("ab", max_tokens=3, stream=True)
        got = [event async for event in stream]
    assert [event.choices[0].text for event in got] == ["c", "d", "e"]
    assert [event.choices[0].finish_reason for event in got] == [None, None, "length"]
    assert len({event.id for event in got}) == 1
    assert all(event.usage is None for event in got)


async def test_a_token_whose_text_is_held_back_has_its_event():
    texts = ["", "c", "", "", "\u4e2d", ""]
    async with saying(texts, TEMPLATE) as s:
        events = [event async for event in await s.complete(stream=True)]
        chunks = [chunk.choices[0].delta async for chunk in await s.chat(stream=True)]
    assert [event.choices[0].text for event in events] == texts
    assert [delta.content for delta in chunks] == texts


async def test_events_are_whole_and_the_last_is_done():
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    async with serving_http() as s:
        answer = await s.post(**fields)
        plain = await s.post(stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    told = [answers.Completion.model_validate_json(e.removeprefix("data: ")) for e in events]
    assert [len(one.choices) for one in told] == [1, 1, 0]
    assert [one.usage is None for one in told] == [True, True, False]
    assert told[-1].usage.total_tokens == 4
    assert '"usage"' not in plain.text


async def test_usage_so_far_in_every_event():
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving_http() as s:
        stream = await s.complete(stream=True, stream_options=options)
        got = [event async for event in stream]
        two = await s.complete(["abcdef", "ab"], n=2, stream=True, stream_options=options)
        so_far = [event async for event in two]
    assert [event.usage.completion_tokens for event in got] == [1, 2, 2]
    begun: set[int] = set()
    for event in so_far:  # each prompt once, as soon as one of its answers has begun
        begun |= {choice.index // 2 for choice in event.choices}
        assert event.usage.prompt_tokens == 6 * (0 in begun) + 2 * (1 in begun)


async def test_several_prompts_and_several_answers():
    async with serving_http() as s:
        got = await s.complete(["ab", "QRS"], n=2, seed=-1)
        tokens = await s.complete([[4, 5], [9]], max_tokens=1)
        one = await s.complete([4, 5], max_tokens=1)
        seeds = [(call["prompt"], call["sampling"].seed) for call in s.engine.calls[:4]]
        ids = [call["request_id"] for call in s.engine.calls[:4]]
    assert [(c.index, c.text) for c in got.choices] == [(0, "cd"), (1, "cd"), (2, "TU"), (3, "TU")]
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (5, 8)
    assert [c.text for c in tokens.choices] == ["\x06", "\x0a"]
    assert [c.text for c in one.choices] == ["\x06"]
    assert sorted(seeds) == [("QRS", 0), ("QRS", 2**64 - 1), ("ab", 0), ("ab", 2**64 - 1)]
    assert ids == [f"{got.id.removeprefix('cmpl-')}-{i}" for i in range(4)]


async def test_streams_of_several_answers_are_told_apart():
    async with serving_http() as s:
        stream = await s.complete(["ab", "QR"], stream=True, stream_options={"include_usage": True})
        texts, reasons, usage = ["", ""], [None, None], []
        async for event in stream:
            usage.append(event.usage)
            for choice in event.choices:
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason
    assert texts == ["cd", "ST"]
    assert reasons == ["length", "length"]
    assert usage[:-1] == [None] * 4
    assert (usage[-1].prompt_tokens, usage[-1].completion_tokens) == (4, 4)


async def test_no_answers_last_event_is_lost_where_another_does_not_wait(monkeypatch):
    send = RequestResponseCycle.send

    async def sent(self, message):
        is_first = b'"index":0' in message.get("body", b"") or "headers" in message
        for _ in range(9 * is_first):  # as for a client that reads slowly
            await asyncio.sleep(0)
        await send(self, message)

    monkeypatch.setattr(RequestResponseCycle, "send", sent)
    async with serving_http() as s:
        stream = await s.complete(n=3, stream=True)
        got = [choice async for event in stream for choice in event.choices]
    for index in range(3):
        own = [(one.text, one.finish_reason) for one in got if one.index == index]
        assert own == [("c", None), ("d", "length")]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_the_text(stream):
    async with serving_http() as s:
        texts = []
        for prompt in ("ab", [67, 68]):
            got = await s.complete(prompt, echo=True, stream=stream)
            events = [event async for event in got] if stream else [got]
            texts.append("".join(event.choices[0].text for event in events))
    assert texts == ["abcd", "CDEF"]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_prompt_and_text(stream):
    async with serving_http() as s:
        got = await s.complete("ab", echo=True, logprobs=0, stream=stream)
        events = [event async for event in got] if stream else [got]
    parts = [event.choices[0].logprobs for event in events]
    # As token ids: with the one that the tokenizer puts before a text.
    assert "".join(one for part in parts for one in part.tokens) == "\x01abcd"
    want = [None, -0.25, -0.25, -0.5, -0.5]
    assert [one for part in parts for one in part.token_logprobs] == want
    assert [one for part in parts for one in part.text_offset] == [0, 1, 2, 3, 4]
    assert all(part.top_logprobs is None for part in parts)


@pytest.mark.parametrize("stream", [False, True])
async def test_likeliest_tokens_of_prompt_and_text(stream):
    async with serving_http() as s:
        got = await s.complete([97, 99], echo=True, logprobs=2, stream=stream)
        events = [event async for event in got] if stream else [got]
    parts = [event.choices[0].logprobs for event in events]
    tops = [one for part in parts for one in part.top_logprobs]
    assert [one for part in parts for one in part.tokens] == ["a", "c", "d", "e"]
    assert tops == [
        None,
        {"c": -0.25, "d": -1.25},
        {"d": -0.5, "e": -1.5},
        {"e": -0.5, "f": -1.5},
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
async def test_a_prompt_alone_is_scored(prompt, stream):
    """With `max_tokens` 0, as OpenAI's API and vLLM have it."""
    options = {"stream_options": {"include_usage": True}} if stream else {}
    first = "\x01" if prompt == "ab" else ""  # what the tokenizer puts before a text
    async with serving_http() as s:
        fields = {"echo": True, "max_tokens": 0, "logprobs": 1, "stop": "c", **options}
        got = await s.complete(prompt, stream=stream, **fields)
        events = [event async for event in got] if stream else [got]
        if stream:
            (event, last) = events
            assert (event.choices[0].finish_reason, last.choices) == ("length", [])
        plain = await s.complete(prompt, echo=True, max_tokens=0, n=2)
        (call, *_) = s.engine.calls
    (choice,), usage = events[0].choices, events[-1].usage
    count = len(first) + 2
    assert (choice.text, choice.finish_reason) == ("ab", "length")
    assert choice.logprobs.tokens == list(first + "ab")
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.text_offset) == count
    assert None not in choice.logprobs.token_logprobs[1:]
    assert choice.logprobs.top_logprobs[0] is None
    assert (usage.prompt_tokens, usage.completion_tokens) == (count, 0)
    assert call["sampling"].max_new_tokens == 1  # the engine draws one, which nobody sees
    assert [(c.text, c.logprobs, c.finish_reason) for c in plain.choices] == [
        ("ab", None, "length")
    ] * 2
    assert plain.usage.completion_tokens == 0


async def test_a_prompt_that_is_scored_is_charged_alone(file):
    file.write(alice={})
    async with serving_http() as s:
        s.server.access = Access(file.path)
        client = s.client.with_options(api_key=file.text("alice"))
        asked = {"model": "counter", "prompt": "ab", "max_tokens": 0, "echo": True}
        await client.completions.create(**asked)
        assert s.server.access.callers["alice"].num_tokens == 2


@pytest.mark.parametrize("num_prompt", [0, 4])
async def test_a_token_begins_where_its_text_does(num_prompt):
    """Of a vocabulary whose characters may be several tokens, and whose first space is no text."""
    tokenizer = byte_fallback()
    word = tokenizer.backend.token_to_id
    sun, byte = "\u2581sun", [f"<0x{byte:02X}>" for byte in "é".encode()]
    tokens = [word(one) for one in ("<s>", sun, *byte, sun, *byte, "</s>", ".")]
    shown = logprobs.Completion(logprobs.Texts(tokenizer), wants_top=False)
    prompt, drawn = tokens[:num_prompt], tokens[num_prompt:]
    lists = [shown.of_tokens(prompt, [-1.0] * num_prompt, [()] * num_prompt)]
    for at, token in enumerate(drawn):
        lists.append(shown.of(Output("a", "", (token,), (-1.0,), Usage(1, at + 1, 0, 0))))
    text = tokenizer.decode(prompt) + tokenizer.decode(drawn)
    offsets = orjson.loads(b"[%b]" % b",".join(one[2] for one in lists if one[2]))
    begins = [0, 0, 3, 3, 4, text.rindex("é"), text.rindex("é"), len(text) - 1, len(text) - 1]
    assert (text.endswith("é."), offsets) == (True, begins)


async def test_of_tokens_with_one_text_the_likelier_counts():
    shown = logprobs.Completion(logprobs.Texts(None), wants_top=True)
    shown._texts.text = lambda token: "?" if token > 5 else str(token)
    *_, tops = shown.of_tokens([6, 1], [-3.0, -1.0], [((7, -0.5), (1, -2.0)), ((1, -1.0),)])
    assert orjson.loads(b"[%b]" % tops) == [{"?": -0.5, "1": -2.0}, {"1": -1.0}]


async def test_likeliest_tokens():
    async with serving_http() as s:
        got = await s.complete("ab", logprobs=2)
    told = got.choices[0].logprobs
    assert told.tokens == ["c", "d"]
    assert told.top_logprobs == [{"c": -0.5, "d": -1.5}, {"d": -0.5, "e": -1.5}]


async def test_as_many_likeliest_tokens_as_vllm_gives():
    async with serving_http() as s:
        got = await s.complete("ab", logprobs=20)
    firsts = got.choices[0].logprobs.top_logprobs[0]
    assert firsts == {chr(ord("c") + n): -0.5 - n for n in range(20)}


async def test_an_engine_that_refuses_one_of_several_prompts_says_which():
    async with serving_an_engine() as client:
        body = {"model": "bundled", "max_tokens": 2, "n": 2, "stream": False}
        for prompts, told in (
            ([[1], [2], [3] * 200], "prompt[2]: the prompt has 200 tokens; the context"),
            ([[1], [10**6]], "prompt[1]: prompt has 1000000, which is no token of"),
            ([[3] * 200], "the prompt has 200 tokens; the context"),
            ([[1], [3] * 127], "prompt[1]: the prompt has 127 tokens and up to 2 new ones"),
        ):
            got = await client.post("/v1/completions", json=body | {"prompt": prompts})
            assert got.status_code == 400
            assert got.json()["error"]["message"].startswith(told)


async def test_absent_max_tokens_is_sixteen_or_what_fits():
    """Of a chat, as many as fit."""
    async with serving_http(engine=EngineConfig(max_model_len=64)) as s:
        got = await s.client.completions.create(model="counter", prompt="ab")
        long = await s.client.completions.create(model="counter", prompt="a" * 60)
        chat = await s.client.chat.completions.create(model="counter", messages=CHAT)
        asked = [call["sampling"] for call in s.engine.calls]
    assert [one.max_new_tokens for one in asked] == [None] * 3
    assert [one.default_new_tokens for one in asked] == [16, 16, None]
    assert [one.usage.completion_tokens for one in (got, long, chat)] == [16, 4, 64 - 10]


async def test_a_stop_token_is_told_as_stop():
    async with serving_http() as s:
        got = await s.complete("ab", max_tokens=9, extra_body={"stop_token_ids": [101]})
    assert (got.choices[0].finish_reason, got.usage.completion_tokens) == ("stop", 3)


async def test_health_and_version_and_the_description():
    async with serving_http() as s:
        health = await s.http.get("/health")
        version = await s.http.get("/version")
        metrics = await s.http.get("/metrics")
        told = (await s.http.get("/openapi.json")).json()
        s.engine.status = "draining"
        s.server.health.set(False)
        draining = await s.http.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ready"})
    assert (draining.status_code, draining.json()) == (503, {"status": "draining"})
    assert set(version.json()) == {"version"}
    assert "jmoe_prompt_tokens" in metrics.text
    bodies = {
        path: operation["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        for path, operation in told["paths"].items()
        if "post" in operation
    }
    schemas = told["components"]["schemas"]
    names = {path: ref.rpartition("/")[2] for path, ref in bodies.items()}
    assert names == {
        "/v1/completions": "CompletionRequest",
        "/v1/chat/completions": "ChatRequest",
        "/v1/responses": "ResponsesRequest",
        "/tokenize": "TokenizeRequest",
        "/detokenize": "DetokenizeRequest",
    }
    assert "prompt" in schemas["CompletionRequest"]["properties"]
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert "422" not in str(told["paths"])


async def test_before_there_is_an_engine():
    config = ServerConfig(port=0, served_model_name="soon")
    async with HttpSetup(config) as s:
        refused = await s.post()
        health = await s.http.get("/health")
        models = await s.http.get("/v1/models")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert (health.status_code, health.json()) == (503, {"status": "starting"})
    assert [(m["id"], m["max_model_len"]) for m in models.json()["data"]] == [("soon", None)]
