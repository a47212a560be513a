"""Answers over a socket, judged as in tests/serving/test_served_equals_notebook.py."""

import asyncio
import json

import grpc
import pytest

from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.request import SamplingParams
from tests.serving.notebook import Answer, Asked, check
from tests.serving.shaped import PROMPTS, SHAPED, STRUCTURES, matches


def prompts(model):
    lines = (model.path / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def as_message(sampling):
    """Returns sampling parameters as a client sends them."""
    given = {k: v for k, v in vars(sampling).items() if v != getattr(SamplingParams, k)}
    if structure := given.pop("structure", None):
        given[structure.kind] = structure.text
    return pb.SamplingParams(**given | {"logit_bias": dict(sampling.logit_bias)})


async def answer(client, one):
    """Sends a request that refuses brownout; returns what it got."""
    call = client.generate(one.prompt, as_message(one.sampling), allow_brownout=False)
    messages = [message async for message in call]
    top = [top for m in messages for top in m.top_logprobs]
    return Answer(
        [token for m in messages for token in m.token_ids],
        [logprob for m in messages for logprob in m.logprobs],
        "".join(m.text for m in messages),
        (),
        [tuple(zip(one.token_ids, one.logprobs, strict=True)) for one in top],
        messages[-1].usage,
        messages[-1].finish_reason,
    )


async def check_exact_answers(address, model) -> None:
    """Sends prompts that refuse brownout while it is strongest, and checks the answers."""
    asked = [Asked(text, SamplingParams(max_new_tokens=24)) for text in prompts(model)[:24]]
    async with Client(address) as client:
        await client.set_brownout(strategy="partial", decode_threshold_percent=0)
        got = await asyncio.gather(*(answer(client, one) for one in asked))
    assert not any(one.usage.degraded_visits for one in got)
    check(model, asked, got)


async def check_shaped_answers(address, model) -> None:
    """Sends requests whose logits are changed beside others, and one that cannot be served."""
    asked = [
        Asked(prompt, SamplingParams(max_new_tokens=16, ignore_eos=True, **more))
        for prompt in PROMPTS
        for more in (*SHAPED, {"min_p": 0.5}, {})
    ]
    structured = [
        Asked(PROMPTS[1], SamplingParams(max_new_tokens=90, structure=one))
        for one in STRUCTURES.values()
    ]

    async def is_refused(client):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(aiter(client.generate("say it", pb.SamplingParams(regex="("))))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    async with Client(address) as client:
        calls = (answer(client, one) for one in asked + structured)
        *found, _ = await asyncio.gather(*calls, is_refused(client))
    for name, got in zip(STRUCTURES, found[len(asked) :], strict=True):
        assert got.reason == "length" or matches(name, got.text)
    check(model, asked, found[: len(asked)])
