"""Log-probabilities in quantity: no step of the event loop formats or writes many, and a call has a
bound.
"""

import asyncio
import itertools
import json

import httpx2
import orjson
import pytest
from counting import counting_engine, model_with
from kserve_requests import infer, outputs
from openai_served import NO_CERTIFICATES, serving_http
from served import CODE, Setup, collect, failure, request
from tokenizers_of_kinds import characters
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from serving.config import EngineConfig, ServerConfig
from serving.frontend import kserve_tensors
from serving.frontend.openai import answers, logprobs
from serving.proto.inference import inference_pb2_grpc as infer_rpc
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

FORMATTED_BYTES, WRITTEN_BYTES = 16 << 10, 128 << 10
"""The most that one step may format, and write."""


@pytest.fixture
def sizes(monkeypatch):
    """Records the bytes of everything that is formatted as JSON, and that HTTP writes."""
    formatted, written = [], []
    dumps, send = orjson.dumps, RequestResponseCycle.send

    def dumped(*args):
        formatted.append(len(data := dumps(*args)))
        return data

    async def sent(self, message):
        written.append(len(message.get("body", b"")))
        await send(self, message)

    monkeypatch.setattr(orjson, "dumps", dumped)
    monkeypatch.setattr(RequestResponseCycle, "send", sent)
    return formatted, written


async def test_an_answer_is_formatted_token_by_token_and_written_in_parts(sizes):
    formatted, written = sizes
    asked = {"model": "counter", "max_tokens": 60, "n": 8, "logprobs": True, "top_logprobs": 20}
    asked["messages"] = [{"role": "user", "content": "0"}]
    async with serving_http(template="{{ messages[0].content }}") as s:
        got = await s.http.post("/v1/chat/completions", json=asked)
        lists = await s.post(prompt="0", max_tokens=60, n=8, logprobs=5)
    assert len(got.content) > 2 * WRITTEN_BYTES
    assert (len(got.content), len(lists.content)) == tuple(
        int(answer.headers["content-length"]) for answer in (got, lists)
    )
    chat = answers.ChatCompletion.model_validate_json(got.content)
    assert [choice.index for choice in chat.choices] == list(range(8))
    for choice in chat.choices:
        assert choice.logprobs is not None
        content = choice.logprobs.content
        assert "".join(entry.token for entry in content) == choice.message.content
        # The engine's token after "0" is "1"; the likeliest are it and those that follow.
        top = [(chr(49 + n), -0.5 - n, [49 + n]) for n in range(20)]
        assert [(one.token, one.logprob, one.bytes) for one in content[0].top_logprobs] == top
    text = answers.Completion.model_validate_json(lists.content)
    for choice in text.choices:
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens) == choice.text
        assert [len(top) for top in choice.logprobs.top_logprobs or ()] == [5] * 60
    assert max(formatted) < FORMATTED_BYTES
    assert max(written) < WRITTEN_BYTES


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_echo_is_formatted_in_parts_between_which_others_run(monkeypatch, stream):
    prompt = [48 + i % 10 for i in range(4000)]
    turns, at = itertools.count(), []
    of_tokens = logprobs.Completion.of_tokens

    async def turn():
        while True:
            next(turns)
            await asyncio.sleep(0)

    def noted(*args):
        at.append(next(turns))
        return of_tokens(*args)

    monkeypatch.setattr(logprobs.Completion, "of_tokens", noted)
    async with serving_http(engine=EngineConfig(max_model_len=4096)) as s:
        turning = asyncio.create_task(turn())
        got = await s.post(prompt=prompt, max_tokens=1, echo=True, logprobs=0, stream=stream)
        turning.cancel()
    assert len(at) == 4000 // logprobs.PROMPT_PIECE + 2  # and the new token's
    assert all(later - sooner > 1 for sooner, later in itertools.pairwise(at[:-1]))
    told = orjson.loads(got.text.split("\n\n")[0].removeprefix("data: ") if stream else got.text)
    (choice,) = told["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, *[-0.25] * 3999, -0.5]
    assert choice["logprobs"]["text_offset"] == list(range(4001))
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


async def test_kserve_formats_token_by_token(monkeypatch):
    formatted = []

    def dumps(value):
        formatted.append(len(text := json.dumps(value)))
        return text

    monkeypatch.setattr(kserve_tensors, "json", type("", (), {"dumps": dumps, "loads": json.loads}))
    async with serving_http() as s:
        stub = infer_rpc.GRPCInferenceServiceStub(s.channel)
        sampling = {"max_tokens": 60, "logprobs": 20}
        got = await stub.ModelInfer(infer("0", sampling=sampling, return_logprobs=True))
    told = json.loads(outputs(got)["logprobs"])
    assert len(told) == len(formatted) == 60
    assert told[0]["50"] == {"logprob": -1.5, "rank": 2, "decoded_token": "2"}


@pytest.mark.deep
async def test_one_bound_holds_over_every_protocol():
    engine = counting_engine(model=model_with(characters()), max_logprobs_per_call=1000)
    config = ServerConfig(port=0, http_port=0, engine=engine.config)
    async with Setup(config) as s:
        await s.server.attach(engine)
        stub = infer_rpc.GRPCInferenceServiceStub(s.channel)

        async def http(**fields):
            given = {"model": "counter", "prompt": "0"} | fields
            return await client.post("/v1/completions", json=given)

        def grpc(**fields):
            return s.stub.Generate(request([1] * 90, sampling=pb.SamplingParams(**fields)))

        def kserve(**sampling):
            return stub.ModelInfer(infer("0", sampling=sampling, return_logprobs=True))

        base = f"http://{s.web.address}"
        async with httpx2.AsyncClient(base_url=base, verify=NO_CERTIFICATES) as client:
            # Prompts times n times max_tokens times 1 + top_logprobs, and the prompt where echoed.
            refused = [
                (await http(max_tokens=180, logprobs=5), 180 * 6),
                (await http(max_tokens=40, logprobs=5, n=5), 5 * 40 * 6),
                (await http(prompt=["0", "1"], max_tokens=30, logprobs=5, n=3), 6 * 30 * 6),
                (await http(prompt=[1] * 90, max_tokens=11, logprobs=0, echo=True, n=10), 1010),
                (await http(prompt=[1] * 90, max_tokens=11, logprobs=1, echo=True, n=5), 1010),
                (await http(logprobs=5, max_tokens=500), 199 * 6),
            ]
            served = [
                await http(max_tokens=160, logprobs=5),
                await http(max_tokens=90, logprobs=0, n=11),
                await http(prompt=[1] * 90, max_tokens=10, logprobs=0, echo=True, n=10),
                await http(max_tokens=50, n=30),
            ]
        for answer, count in refused:
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert f"asks for {count} log-prob" in error["message"], error
            assert "has 1000 at most (engine.max_logprobs_per_call)" in error["message"]
        assert [answer.status_code for answer in served] == [200] * 4
        for call in (
            grpc(max_new_tokens=48, logprobs=True, top_logprobs=20),
            grpc(max_new_tokens=48, top_logprobs=20),
            grpc(max_new_tokens=44, prompt_logprobs=True, logprobs=True, top_logprobs=20),
            kserve(max_tokens=48, logprobs=20),
        ):
            error = await failure(call)
            assert error.code() == CODE.INVALID_ARGUMENT
            assert "engine.max_logprobs_per_call" in error.details()
        assert len(await collect(grpc(max_new_tokens=100, logprobs=True))) == 100
        assert engine.scheduler.idle
        assert engine.stats().requests_aborted == 0
    await engine.stop()


def test_ids_that_no_vocabulary_has_are_told_apart():
    texts = logprobs.Texts(characters())
    names = [texts.text(token) for token in (700, 701)]
    assert names == ["token_id:700", "token_id:701"]
