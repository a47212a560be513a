"""OpenAI's API of the real server: the same tokens as over gRPC, texts, chats and refusals."""

import asyncio
import re
import shlex
import subprocess
from pathlib import Path
from typing import Literal

import openai
import pydantic
import pytest

from serving.bench.scrape import free_port
from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

from .conftest import serving

PROMPTS = ["add 47 + 38 and 12 + 9 then say it", "what is 1+2", "é"]


@pytest.fixture(scope="module")
def log_path(tmp_path_factory):
    return tmp_path_factory.mktemp("http") / "log"


@pytest.fixture(scope="module")
def addresses(log_path):
    """Yields the gRPC and HTTP addresses of a server with default settings but fewer programs."""
    port = free_port()
    fewer = ("engine.decode_buckets=64", "engine.prefill_buckets=512", "engine.max_model_len=256")
    own = {"preset": "default", "log_path": log_path, "hurry": True}
    with serving(*fewer, f"http_port={port}", **own) as (_, address):
        yield address, f"http://127.0.0.1:{port}/v1"


def test_a_default_start_warns_of_nothing(addresses, log_path):
    starting, ready, _ = log_path.read_text().partition(f"ready on {addresses[0]}")
    assert ready
    lines = starting.splitlines()
    assert sum(" INFO " in line for line in lines) >= 5
    expected = r"\d{4}-\d\d-\d\d [\d:,]+ INFO |(loading|compiling|warming): \d+ of \d+ after "
    assert not [line for line in lines if not re.match(expected, line)]


@pytest.fixture
async def client(addresses):
    async with openai.AsyncOpenAI(base_url=addresses[1], api_key="any", max_retries=0) as found:
        yield found


async def over_grpc(address, prompt, num_tokens):
    sampling = pb.SamplingParams(max_new_tokens=num_tokens)
    async with Client(address) as client:
        call = client.generate(prompt, sampling, allow_brownout=False)
        return "".join([message.text async for message in call])


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_texts_are_those_over_grpc(addresses, client, prompt):
    fields = {"model": "bundled", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    own = {"extra_body": {"allow_brownout": False}}
    want = await over_grpc(addresses[0], prompt, 24)
    whole = await client.completions.create(**fields, **own)
    stream = await client.completions.create(**fields, **own, stream=True)
    streamed = "".join([event.choices[0].text async for event in stream])
    assert whole.choices[0].text == streamed == want
    assert whole.usage.completion_tokens <= 24


async def test_a_chat_is_its_templates_text_over_grpc(addresses, client):
    want = await over_grpc(addresses[0], "<|im_start|>what is 1+2<|im_end|>", 16)
    messages = [{"role": "user", "content": "what is 1+2"}]
    got = await client.chat.completions.create(
        model="bundled",
        messages=messages,
        max_tokens=16,
        temperature=0,
        extra_body={"allow_brownout": False},
    )
    assert got.choices[0].message.content == want


def test_the_pages_examples_get_the_answers_beside_them(addresses, capfd):
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
    here = page.replace("http://127.0.0.1:8000/v1", addresses[1])
    examples = re.findall(r"^```(sh|python)\n(.*?)^```", here, re.DOTALL | re.MULTILINE)
    assert [language for language, _ in examples] == ["sh", "sh", "python"]
    for language, text in examples:
        if language == "sh":
            subprocess.run(shlex.split(text.replace("\\\n", "")), check=True, timeout=60)
        else:
            exec(compile(text, "http.md", "exec"), {})
        printed = capfd.readouterr().out
        pieces = re.findall(r'"(?:content|text)":"([^"]*)"', printed)
        said = "".join(pieces) if pieces else printed
        assert said.count(" Bedrin") == (2 if language == "python" else 1), printed


async def test_prompts_are_scored(client):
    fields = {"model": "bundled", "prompt": PROMPTS[0], "max_tokens": 1, "temperature": 0}
    got = await client.completions.create(**fields, echo=True, logprobs=0)
    told = got.choices[0].logprobs
    assert "".join(told.tokens).startswith(PROMPTS[0])
    assert len(told.token_logprobs) == got.usage.prompt_tokens + 1
    assert told.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in told.token_logprobs[1:])
    again = await client.completions.create(**fields, echo=True, logprobs=1)
    told_again = again.choices[0].logprobs
    assert told_again.token_logprobs == told.token_logprobs
    assert told_again.top_logprobs[0] is None
    for token, own, top in zip(
        told.tokens[1:], told.token_logprobs[1:], told_again.top_logprobs[1:], strict=True
    ):
        assert top[token] == own
        assert len(top) == 1 + (own < max(top.values()))  # with the token that is likeliest


async def test_what_does_not_fit_is_refused_and_what_fits_is_found(client):
    with pytest.raises(
        openai.BadRequestError, match="up to 500 new ones are asked for: 700 in all"
    ):
        await client.completions.create(model="bundled", prompt=[5] * 200, max_tokens=500)
    for num_tokens, fits in ((200, 16), (250, 6)):
        got = await client.completions.create(
            model="bundled", prompt=[5] * num_tokens, extra_body={"ignore_eos": True}
        )
        assert got.choices[0].finish_reason == "length"
        assert got.usage.completion_tokens == fits


async def test_deadlines_end_requests(client):
    with pytest.raises(openai.InternalServerError) as late:
        await client.completions.create(
            model="bundled", prompt=[5], max_tokens=200, extra_body={"timeout_s": 1e-3}
        )
    assert late.value.status_code == 504
    answers = await asyncio.gather(
        *(client.completions.create(model="bundled", prompt=[5], max_tokens=4) for _ in range(8))
    )
    assert all(answer.usage.completion_tokens for answer in answers)


class Answer(pydantic.BaseModel):
    """The wanted structure, as a user of the client writes it."""

    sum: int = pydantic.Field(ge=0, le=999)  # a small model ends no number by itself
    digits: list[Literal[1, 2, 3]] = pydantic.Field(min_length=1, max_length=2)
    kind: Literal["even", "odd"]


async def test_structured_outputs_are_what_was_described(client):
    """By the client's own `parse`, which makes the schema and reads the answer."""
    asked = [{"role": "user", "content": "add 47 + 38"}]
    parsed = [
        client.chat.completions.parse(
            model="bundled",
            messages=asked,
            response_format=Answer,
            max_tokens=120,
            temperature=1.0,
            seed=seed,
        )
        for seed in range(6)
    ]
    whole = 0
    for got in await asyncio.gather(*parsed, return_exceptions=True):
        if isinstance(got, openai.LengthFinishReasonError):
            continue  # cut off by max_tokens, which the client says
        assert isinstance(got.choices[0].message.parsed, Answer)
        whole += 1
    assert whole >= 3
    one = await client.completions.create(
        model="bundled",
        prompt="say it",
        max_tokens=20,
        temperature=2.0,
        extra_body={"structured_outputs": {"choice": ["left", "right (both)"]}},
    )
    assert one.choices[0].text in ("left", "right (both)")
    assert one.choices[0].finish_reason == "stop"
    events = await client.completions.create(
        model="bundled",
        prompt="say it",
        max_tokens=20,
        stream=True,
        extra_body={"guided_regex": "[0-9]{3}-[a-f]{2}"},
    )
    text = "".join([event.choices[0].text async for event in events])
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", text)


async def test_a_structure_that_cannot_be_read_is_refused_with_the_reason(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="nonsense"):
        await client.chat.completions.create(
            model="bundled", messages=[{"role": "user", "content": "a"}], response_format=form
        )


async def test_likeliest_tokens_and_biases(client):
    fields = {"model": "bundled", "prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0}
    own = {"extra_body": {"allow_brownout": False}}
    plain = await client.completions.create(**fields, logprobs=3, **own)
    told = plain.choices[0].logprobs
    assert all(len(likely) >= 3 for likely in told.top_logprobs)
    for token, logprob, likely in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert max(likely.values()) == pytest.approx(logprob)  # greedy
        assert likely[token] == pytest.approx(logprob)
    forced = await client.completions.create(**fields, logit_bias={"77": 100}, **own)
    assert forced.choices[0].text != plain.choices[0].text
    with pytest.raises(openai.BadRequestError, match="no token of this model"):
        await client.completions.create(**fields, logit_bias={"100000": 1})
