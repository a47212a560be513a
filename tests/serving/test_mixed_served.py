"""Mixed decode steps on the real engine: what each model writes is what it writes alone."""

import asyncio
import itertools
import random
from dataclasses import replace

import pytest

from jmoe.checkpoint import weights_digest
from jmoe.sharing import Sharing, write_sharing
from serving.config import BrownoutConfig
from serving.engine import Engine
from serving.frontend.metrics import Metrics
from serving.settings import SettingsError
from tests.jmoe.conftest import add_united
from tests.serving.families import GOLDEN, NAMES, answer, requests, settings_of
from tests.variants import variant

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

SHAPE = (3, 2, 7)
ALWAYS = 3


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Makes settings of a family of which three quarters are shared, or some other map."""
    where = tmp_path_factory.mktemp("mixed")
    own = {name: variant(GOLDEN, where / name, seed) for seed, name in enumerate(NAMES)}
    for seed, directory in enumerate(own.values()):
        add_united(directory, ways=(2,), seed=seed)
    owners = Sharing.none(NAMES, *SHAPE[1:]).owners
    owners[:, :, :5] = random.Random(0).choices(range(3), k=5)
    path, prints = where / "family.json", tuple(map(weights_digest, own.values()))
    write_sharing(path, Sharing(NAMES, owners, prints))
    cache = str(tmp_path_factory.mktemp("programs"))

    def make(**changes):
        given = {"max_num_seqs": 8, "num_pages": 60, "mixed_models": ALWAYS, **changes}
        given["decode_buckets"] = (8,)
        return settings_of(own, cache, family=str(path), **given)

    return make


async def started(settings, *, mixes=True, observer=None):
    """An engine that mixes whenever it may, or never, whatever is measured."""
    engine = await Engine.start(settings, observer=observer)
    assert engine.runner.mixed.pays([1] * (settings.mixed_models + 1)) is False
    assert engine.runner.mixed.pays([8, 1]) is False  # a step has room for eight rows
    engine.runner.mixed.pays = lambda counts: mixes and 1 < len(counts) <= settings.mixed_models
    return engine


def drawn(seed, count):
    """What is asked for: two tokens or more, so that there is a decode step to be mixed."""
    found = requests(random.Random(seed), count, prompt_below=20, fewest=2, below=16)
    penalties = itertools.cycle((0.0, 0.0, 1.5))  # some rows of a step have changed logits
    return [
        (prompt, replace(sampling, frequency_penalty=next(penalties)), model)
        for prompt, sampling, model, _ in found
    ]


async def interleaved(engine, asked, rng, **options):
    """Answers of requests that come in another order, some of them later."""

    async def later(at):
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)
        return at, await answer(engine, *asked[at], **options)

    order = rng.sample(range(len(asked)), len(asked))
    return dict(await asyncio.gather(*map(later, order)))


def check_alike(got, want):
    """Tokens are the same up to where two were as likely, and so is their likelihood."""
    for token, other, own, others in zip(got[0], want[0], got[1], want[1], strict=True):
        assert own == pytest.approx(others, abs=1e-4)
        if token != other:
            return
    assert got[0] == want[0]


@pytest.mark.deep
async def test_every_model_writes_what_it_writes_alone(served):
    """Alternating, and mixed with two or three in a step, in three interleavings."""
    asked = drawn(1, 18)
    alternating = await started(served(), mixes=False)
    try:
        want = [await answer(alternating, *request) for request in asked]
        assert alternating.scheduler.num_mixed == 0
    finally:
        await alternating.stop()
    metrics = Metrics()
    engine = await started(served(), observer=metrics)
    try:
        for seed in range(3):
            got = await interleaved(engine, asked, random.Random(seed))
            for at, expected in enumerate(want):
                check_alike(got[at], expected)
        engine.scheduler.check_idle()
        assert engine.runner.compilations_since_ready == 0
        assert engine.scheduler.num_mixed > 20
        found = {f.name: f for f in metrics.by_model.collect(engine)}
        assert found["jmoe_mixed_steps"].samples[0].value == engine.scheduler.num_mixed
        cfg, stats = engine.model.config, engine.stats()
        assert metrics.expert_rows.sum() == stats.expert_visits  # nothing is lost or twice
        assert metrics.expert_rows.shape == (cfg.num_moe_layers, cfg.num_experts + 4)
    finally:
        await engine.stop()


@pytest.mark.deep
async def test_who_refuses_brownout_is_exact_beside_others_models(served):
    """In mixed steps whose other rows are degraded."""
    asked = drawn(2, 16)
    exact = await started(served(), mixes=False)
    try:
        want = [await answer(exact, *request) for request in asked]
    finally:
        await exact.stop()
    brownout = BrownoutConfig("partial", 2, (), 20, 20, salc=False)
    engine = await started(served(brownout=brownout))
    try:
        rest = interleaved(engine, asked, random.Random(4))
        refusing = interleaved(engine, asked, random.Random(5), allow_brownout=False)
        degraded, got = await asyncio.gather(rest, refusing)
        assert engine.scheduler.num_mixed > 5
        assert engine.runner.compilations_since_ready == 0
    finally:
        await engine.stop()
    assert sum(found[2] for found in degraded.values()) > 0
    for at, expected in enumerate(want):
        assert got[at][2] == 0
        check_alike(got[at], expected)


@pytest.mark.deep
async def test_sets_that_come_and_go(served):
    """Models whose weights are there mix; a change of sets compiles nothing."""
    asked = drawn(3, 12)
    settings = served(resident_sets=2, model_stay_s=0.01, mixed_models=2)
    engine = await started(settings)
    try:
        got = await interleaved(engine, asked, random.Random(0))
        assert engine.registry.num_swaps > 0
        assert engine.runner.compilations_since_ready == 0
    finally:
        await engine.stop()
    alone = await started(served(), mixes=False)
    try:
        for at, request in enumerate(asked):
            check_alike(got[at], await answer(alone, *request))
    finally:
        await alone.stop()


async def test_a_negative_number_of_models(served):
    with pytest.raises(SettingsError, match=r"engine.mixed_models is -1; it must be 0 or more"):
        await Engine.start(served(mixed_models=-1))
