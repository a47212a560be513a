"""Answers over a socket, judged as in tests/serving/test_served_equals_notebook.py."""

import asyncio
import json

from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.request import SamplingParams
from tests.serving.notebook import Answer, Asked, check


def prompts(model):
    lines = (model.path / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


async def check_exact_answers(address, model) -> None:
    """Sends prompts that refuse brownout while it is strongest, and checks the answers."""
    asked = [Asked(text, SamplingParams(max_new_tokens=24)) for text in prompts(model)[:24]]
    async with Client(address) as client:
        await client.set_brownout(strategy="partial", decode_threshold_percent=0)

        async def served(one):
            sampling = pb.SamplingParams(max_new_tokens=24)
            call = client.generate(one.prompt, sampling, allow_brownout=False)
            messages = [message async for message in call]
            tokens = [token for m in messages for token in m.token_ids]
            text = "".join(m.text for m in messages)
            return Answer(tokens, [], text, (), [], messages[-1].usage, messages[-1].finish_reason)

        got = await asyncio.gather(*map(served, asked))
    assert not any(one.usage.degraded_visits for one in got)
    check(model, asked, got)
