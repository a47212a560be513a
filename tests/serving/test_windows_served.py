"""Models whose layers have windows, alone or beside full attention, served over few pages."""

import asyncio
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from notebook import Asked, answer

import jmoe
from jmoe.attention import FULL, Paged
from serving.config import AsynchronousConfig, EngineConfig
from serving.engine import Engine
from serving.errors import SettingsError
from serving.execution.fitting import fit_to_model
from serving.plan import Limits
from serving.request import SamplingParams
from serving.scheduling.places import Places
from tests.answers import logits_after

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = EngineConfig(
    max_num_seqs=2,
    max_model_len=64,
    page_size=4,
    max_prefill_tokens=16,
    threshold_buckets_percent=(100,),
    mode="steps",
    compilation_cache="",
)


@pytest.fixture(scope="module")
def model():
    model = jmoe.load(GOLDEN / "qwen3_moe", dtype="float32")
    return replace(model, config=replace(model.config, layer_attention=(FULL, Paged(6))))


@pytest.mark.sized(exhaustive=("aep",))
@pytest.mark.deep
@pytest.mark.parametrize("mode", ["steps", "aep"])
async def test_answers_with_and_without_a_shared_prefix_are_the_whole_model_s(model, mode):
    prompt = np.random.default_rng(1).integers(0, 40, 30).tolist()
    asked = Asked(prompt, SamplingParams(max_new_tokens=8, ignore_eos=True))
    config = replace(SIZES, mode=mode)
    if mode == "aep":
        crew = AsynchronousConfig(attention=1, experts=1)
        config = replace(config, asynchronous=crew, threshold_buckets_percent=())
    engine = await Engine.start(config, model=model)
    try:
        first, again = [await answer(engine, asked) for _ in range(2)]
    finally:
        await engine.stop()
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 28)
    logits = jmoe.forward(model, [prompt + first.tokens[:-1]])[0, len(prompt) - 1 :]
    assert first.tokens == again.tokens == np.argmax(logits, axis=-1).tolist()
    full = replace(model, config=replace(model.config, layer_attention=()))
    assert np.abs(jmoe.forward(full, [prompt])[0, -1] - logits[0]).max() > 1e-2


MIX = {
    "a window": ((Paged(6), Paged(6)), 16),
    "beside full": ((FULL, Paged(6)), 44),
    "two windows": ((Paged(21), Paged(5)), 24),
}
FEW = replace(SIZES, max_model_len=128, max_num_seqs=3, decode_buckets=(4,), prefill_buckets=(16,))


@pytest.fixture(scope="module", params=MIX, ids=str)
def mix(request):
    kinds, num_pages = MIX[request.param]
    model = jmoe.load(GOLDEN / "qwen3_moe", dtype="float32")
    config = replace(FEW, num_pages=num_pages)
    return replace(model, config=replace(model.config, layer_attention=kinds)), config


def requests():
    """Long ones of odd lengths, two of which begin alike, and one that goes away."""
    rng = np.random.default_rng(5)
    shared, *others = (rng.integers(0, 40, count).tolist() for count in (50, 87, 3, 61))
    prompts = [[*shared, *others[1]], *others, [*shared, *others[2][:20]]]
    greedy = SamplingParams(max_new_tokens=37, ignore_eos=True, logprobs=True)
    return [Asked(prompt, greedy) for prompt in prompts]


async def served(model, config, asked):
    """Returns the answers to requests that come at once, but for the second, which leaves."""
    engine = await Engine.start(config, model=model)
    try:
        gone = asked[1]
        tasks = [asyncio.create_task(answer(engine, one)) for one in asked if one is not gone]
        async for output in engine.generate(gone.prompt, gone.sampling):
            if output.usage.completion_tokens == 9:
                break  # aborts it
        answers = await asyncio.gather(*tasks)
        stats = engine.stats()
        engine.scheduler.check_idle()
    finally:
        await engine.stop()
    assert stats.compilations_since_ready == 0
    return answers, stats


@pytest.mark.sized(deep=("beside full",), exhaustive=("two windows", "a window"))
async def test_over_few_pages_everyone_gets_the_whole_model_s_tokens(mix):
    """Twenty windows long, in chunks, with preemption where a layer keeps all, and cancellation."""
    model, config = mix
    asked = requests()
    answers, stats = await served(model, config, asked)
    prompts = [one.prompt for one in (asked[0], *asked[2:])]
    every = logits_after(model, prompts, [got.tokens for got in answers])
    for logits, got in zip(every, answers, strict=True):
        assert got.tokens == np.argmax(logits, axis=-1).tolist()
        best = jax.nn.log_softmax(logits)[np.arange(37), np.asarray(got.tokens)]
        np.testing.assert_allclose(got.logprobs, best, atol=2e-4)
    assert (stats.evictions > 0) == (FULL in model.config.layer_attention)


@pytest.mark.exhaustive
@pytest.mark.deep
@pytest.mark.parametrize("mix", ["a window"], indirect=True)
async def test_workers_give_back_pages_too(mix):
    model, config = mix
    own = AsynchronousConfig(attention=1, experts=1)
    config = replace(config, mode="aep", asynchronous=own, threshold_buckets_percent=())
    asked = requests()
    answers, stats = await served(model, config, asked)
    prompts = [one.prompt for one in (asked[0], *asked[2:])]
    every = logits_after(model, prompts, [got.tokens for got in answers])
    for logits, got in zip(every, answers, strict=True):
        assert got.tokens == np.argmax(logits, axis=-1).tolist()
    assert not stats.evictions


@pytest.mark.sized(
    exhaustive=(
        "a window",
        "beside full",
    )
)
@pytest.mark.deep
async def test_tokens_are_bit_for_bit_those_where_nothing_is_given_back(mix, monkeypatch):
    model, config = mix
    alone = [requests()[at] for at in (0, 4)]

    async def one_after_another(config):
        engine = await Engine.start(config, model=model)
        try:
            return [await answer(engine, one) for one in alone]
        finally:
            await engine.stop()

    few = await one_after_another(replace(config, prefix_reuse="off"))
    monkeypatch.setattr(Places, "slide", lambda *_: None)
    each = property(lambda own: (own.pages_per_rank,) * len(own.windows))
    monkeypatch.setattr(Limits, "group_pages", each)
    monkeypatch.setattr(Limits, "blocks", lambda own, group, start, end: range(own.pages_for(end)))
    ample = await one_after_another(replace(config, prefix_reuse="off", num_pages=200))
    assert [(one.tokens, one.logprobs) for one in few] == [
        (one.tokens, one.logprobs) for one in ample
    ]


class WithoutPages(Paged):
    shares_pages = False


def test_prefixes_of_layers_that_share_no_pages_are_refused(model):
    cfg = replace(model.config, layer_attention=(FULL, WithoutPages()))
    model = replace(model, config=cfg)
    with pytest.raises(SettingsError, match=r"prefix_reuse is 'on'.*set it to 'auto' or 'off'"):
        fit_to_model(replace(SIZES, prefix_reuse="on"), model)
    assert not fit_to_model(SIZES, model).reuses_prefixes
    assert not fit_to_model(replace(SIZES, prefix_reuse="off"), model).reuses_prefixes
