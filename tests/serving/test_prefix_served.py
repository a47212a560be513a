"""Prefix reuse with a real model: answers are those of prompts that are computed whole."""

import asyncio
import random
from collections import Counter

import pytest

import jmoe
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.request import BrownoutChange, Priority, SamplingParams
from tests.traces import num_traces

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT


async def started():
    """Eight slots and few pages, of a model with two ways of united experts."""
    model = jmoe.load("bundled", "float32")
    config = EngineConfig(
        dtype="float32",
        max_num_seqs=6,
        reserved_ls_seqs=2,
        max_model_len=64,
        page_size=8,
        num_pages=30,
        max_prefill_tokens=32,
        max_prefill_seqs=4,
        decode_buckets=(6,),
        prefill_buckets=(32,),
        threshold_buckets_percent=(100,),
        compilation_cache="",
        part_layers=2,
        policy="restless:Restless",
        prefix_reuse="on",
        brownout=BrownoutConfig(
            strategy="partial",
            salc=False,
            prefill_threshold_percent=40,
            decode_threshold_percent=40,
            ways=tuple(sorted(model.united)),
        ),
    )
    return await Engine.start(config, model=model)


async def answer(engine, prompt, sampling, wait=0.0, **how):
    await asyncio.sleep(wait)
    tokens, logprobs, out = [], [], None
    async for out in engine.generate(prompt, sampling, **how):
        tokens += out.token_ids
        logprobs += out.logprobs
    return tokens, logprobs, out.usage


def tree(rng):
    found = [[rng.randrange(500) for _ in range(20)]]
    for _ in range(5):
        start = rng.choice(found)[: rng.randrange(1, 30)]
        found.append(start + [rng.randrange(500) for _ in range(rng.randrange(1, 16))])
    return [prompt[:40] for prompt in found]


async def trace(engine, rng, counts):
    prompts = tree(rng)

    def sampling():
        return SamplingParams(
            max_new_tokens=rng.randrange(1, 16),
            temperature=rng.choice((0.0, 0.0, 0.8)),
            seed=rng.randrange(100),
            ignore_eos=True,
            logprobs=True,
        )

    async def leave(prompt):
        outputs = engine.generate(prompt, SamplingParams(max_new_tokens=16, ignore_eos=True))
        async for _ in outputs:
            break
        await outputs.aclose()

    async def change():
        for _ in range(2):
            await asyncio.sleep(rng.random() * 0.03)
            await engine.set_brownout(
                BrownoutChange(
                    strategy=rng.choice(("full", "partial", "zero")),
                    way=rng.choice(engine.config.brownout.ways),
                    prefill_threshold_percent=rng.choice((20, 60, 100)),
                    decode_threshold_percent=rng.choice((20, 60, 100)),
                )
            )

    asked = [(rng.choice(prompts), sampling()) for _ in range(10)]
    hows = [{"priority": rng.choice((LS, BE)), "allow_brownout": rng.random() < 0.4} for _ in asked]
    waits = [rng.random() * 0.05 for _ in asked]
    found = await asyncio.gather(
        *(
            answer(engine, *one, wait, **how)
            for one, wait, how in zip(asked, waits, hows, strict=True)
        ),
        leave(rng.choice(prompts)),
        change(),
    )
    for one, how, got in zip(asked, hows, found, strict=False):
        counts["cached"] += got[2].cached_tokens
        counts["degraded"] += got[2].degraded_visits
        if how["allow_brownout"]:
            continue
        assert not got[2].degraded_visits
        want = await answer(engine, *one, allow_brownout=False, reuse_prefix=False)
        assert want[2].cached_tokens == 0
        assert got[0] == want[0]
        assert got[1] == pytest.approx(want[1], abs=1e-4)
        counts["exact"] += 1
        counts["exact and cached"] += bool(got[2].cached_tokens)


async def traces(seeds):
    engine, counts = await started(), Counter()
    try:
        for seed in seeds:
            await trace(engine, random.Random(seed), counts)
        engine.scheduler.check_idle()
        stats = engine.stats()
        assert stats.compilations_since_ready == 0
        counts["evictions"], counts["made room"] = stats.evictions, stats.kept_pages_evicted
        counts["parks"] = stats.parks
    finally:
        await engine.stop()
    return counts


@pytest.mark.deep
@pytest.mark.usefixtures("compiled_in_a_hurry")
async def test_answers_are_those_of_prompts_computed_whole():
    counts = await traces([0, 3])
    wanted = ("cached", "degraded", "exact and cached", "parks")
    assert all(counts[what] for what in wanted), counts


@pytest.mark.deep
async def test_many_more():
    count = num_traces(12)
    counts = await traces(range(100, 100 + count))
    wanted = ["cached", "degraded", "exact and cached"]
    if count >= 100:  # too seldom to count on in fewer
        wanted += ["made room", "parks", "evictions"]
    assert all(counts[what] for what in wanted), counts
