"""Preempted or not, alone or in company: a request's tokens and log-probabilities are the same.

On the real engine with a real model, its steps cut after every layer or two.
"""

import asyncio
import random
from pathlib import Path

import pytest

from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.request import Priority, SamplingParams
from tests.traces import num_traces

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_moe_mixed_yarn"
LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT


def config(**changes):
    given = {
        "model": str(GOLDEN),
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_model_len": 48,
        "page_size": 8,
        "reserved_ls_seqs": 4,
        "num_pages": 48,  # enough for eight sequences: nobody is evicted
        "max_prefill_tokens": 16,
        "max_prefill_seqs": 4,
        "decode_buckets": (4,),
        "prefill_buckets": (16,),
        "compilation_cache": "",
        "part_layers": 1,
        "prefix_reuse": "off",  # other buckets change bits
        "brownout": BrownoutConfig(strategy="zero"),
        **changes,
    }
    return EngineConfig(**given)


async def answer(engine, prompt, sampling, priority, wait=0):
    for _ in range(wait):
        await asyncio.sleep(0.0005)
    tokens, logprobs, scores = [], [], ()
    async for out in engine.generate(prompt, sampling, priority=priority):
        tokens += out.token_ids
        logprobs += out.logprobs
        scores = out.prompt_logprobs or scores
    return tokens, logprobs, scores


def requests(rng, count):
    for _ in range(count):
        prompt = [rng.randrange(1, 60) for _ in range(rng.randrange(1, 24))]
        sampling = SamplingParams(
            max_new_tokens=rng.randrange(1, 16),
            temperature=rng.choice((0.0, 0.0, 0.8)),
            seed=rng.randrange(100),
            ignore_eos=True,
            logprobs=True,
            prompt_logprobs=rng.random() < 0.2,
        )
        yield prompt, sampling, rng.choice((LS, BE)), rng.randrange(12)


async def traces(engine, count, seed, *, exact=True):
    """Bit for bit within one bucket; what was evicted and computed again, to 1e-4."""
    rng = random.Random(seed)
    for _ in range(count):
        asked = list(requests(rng, 6))
        together = await asyncio.gather(*(answer(engine, *one) for one in asked))
        alone = [await answer(engine, *one[:3]) for one in asked]
        for got, want in zip(together, alone, strict=True):
            if exact:
                assert got == want
            else:
                assert got[0] == want[0]
                assert got[1] == pytest.approx(want[1], abs=1e-4)
    engine.scheduler.check_idle()
    assert exact == (sum(engine.scheduler.num_evictions.values()) == 0)


@pytest.mark.deep
@pytest.mark.sized(exhaustive=("ls_first",))
@pytest.mark.parametrize("policy", ["ls_first", "restless:Restless"])
async def test_answers_do_not_depend_on_what_went_between(policy):
    engine = await Engine.start(config(policy=policy))
    try:
        await traces(engine, 6, seed=1)
        assert engine.scheduler.num_parks > 0
        assert engine.runner.compilations_since_ready == 0
    finally:
        await engine.stop()


@pytest.mark.deep
async def test_many_more():
    engine = await Engine.start(config(policy="restless:Restless", part_layers=2))
    try:
        count = num_traces(30)
        await traces(engine, count, seed=2)
        assert engine.scheduler.num_parks > count
        assert count < 100 or engine.scheduler.num_joins > 10  # too seldom to count on in fewer
    finally:
        await engine.stop()


@pytest.mark.deep
async def test_what_gave_way_answers_alike():
    engine = await Engine.start(config(num_pages=12, reserved_ls_seqs=1))
    try:
        await traces(engine, 6, seed=3, exact=False)
    finally:
        await engine.stop()


@pytest.mark.deep
async def test_layers_at_once_are_measured_and_within_the_model():
    engine = await Engine.start(config(part_layers=0))
    try:
        found = engine.runner.part_layers_by_size
        assert set(found) == {"decode 4", "prefill 16"}
        assert all(1 <= n <= 4 for n in found.values())
    finally:
        await engine.stop()
