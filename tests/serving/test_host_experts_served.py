"""A family whose experts have not all a slot: stand-ins serve, and who refuses gets exact ones."""

import asyncio
import random

import numpy as np
import pytest

from jmoe.config import read_config
from jmoe.family import load_family
from serving.config import ServerConfig
from serving.engine import Engine
from serving.request import SamplingParams
from serving.settings import SettingsError, check
from tests.jmoe.family_oracles import oracle
from tests.serving.families import GOLDEN, NAMES, answer, requests, settings_of
from tests.variants import variant
from training.consolidate.run import ConsolidateConfig, consolidate

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    where = tmp_path_factory.mktemp("host")
    return {name: variant(GOLDEN, where / name, seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("programs"))
    return lambda directories, **changes: settings_of(directories, cache, **changes)


def room(directories, more=0, **changes):
    """Settings with room for the first model's experts and `more`."""
    cfg = read_config(directories["base"])
    positions = cfg.num_moe_layers * cfg.num_experts
    per_row = cfg.num_moe_layers * cfg.experts_per_token
    return {"resident_experts": positions + more, "spare_experts": per_row, **changes}


@pytest.mark.deep
@pytest.mark.sized(exhaustive=("changes0",))
@pytest.mark.parametrize("changes", [{}, {"policy": "restless:Restless"}, {"resident_sets": 2}])
async def test_who_refuses_brownout_gets_its_models_experts(config, directories, changes):
    rng = random.Random(3)
    asked = [(*r, rng.random() < 0.6) for r in requests(rng, 24)]
    engine = await Engine.start(config(directories, **room(directories, **changes)))
    try:
        found = await asyncio.gather(
            *(answer(engine, *r[:3], priority=r[3], allow_brownout=not r[4]) for r in asked)
        )
        engine.scheduler.check_idle()
        assert engine.runner.compilations_since_ready == 0
        assert engine.fetcher.num_reruns > 0
        assert engine.fetcher.fetches["miss"] > 0
    finally:
        await engine.stop()
    whole = await Engine.start(config(directories))
    try:
        for request, (tokens, logprobs, degraded) in zip(asked, found, strict=True):
            prompt, sampling, model, _, refuses = request
            if refuses or model == "base":
                expected = await answer(whole, prompt, sampling, model, allow_brownout=False)
                assert tokens == expected[0]
                np.testing.assert_allclose(logprobs, expected[1], atol=2e-4)
                assert not degraded
            else:
                assert degraded > 0
    finally:
        await whole.stop()


@pytest.mark.deep
async def test_passes_of_a_token_are_bounded_by_the_moe_layers(config, directories):
    cfg = read_config(directories["law"])
    engine = await Engine.start(config(directories, **room(directories)))
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    try:
        tokens, _, degraded = await answer(
            engine, [5, 9, 33], sampling, "law", allow_brownout=False
        )
        positions = 3 + len(tokens) - 1  # a position a pass: spare slots are as few as may be
        assert 0 < engine.fetcher.num_reruns <= positions * cfg.num_moe_layers
        assert not degraded
    finally:
        await engine.stop()


@pytest.mark.deep
async def test_what_is_asked_most_is_fetched_ahead(config, directories):
    """Degradable requests alone: fewer visits are degraded once experts are there."""
    engine = await Engine.start(config(directories, **room(directories)))
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    try:
        shares = []
        for _ in range(12):
            _, _, degraded = await answer(engine, [5, 9, 33], sampling, "law")
            shares.append(degraded)
        assert engine.fetcher.fetches["ahead"] > 0
        assert engine.fetcher.fetches["miss"] == 0
        assert engine.fetcher.num_reruns == 0
        assert shares[-1] < shares[0]
        assert engine.runner.compilations_since_ready == 0
    finally:
        await engine.stop()


@pytest.mark.deep
async def test_who_refuses_gets_what_a_difference_makes_of_a_siblings_expert(
    config, directories, tmp_path
):
    """All positions shared, and differences of rank 4 kept: the oracle has them added, in files."""
    run = ConsolidateConfig(rule="random", share=100, residual_rank=4)
    sharing = consolidate(directories, tmp_path / "family.json", run).sharing
    everywhere = {tuple(at) for at in np.argwhere(sharing.differs).tolist()}
    made = {
        name: oracle(directories, sharing, number, everywhere, tmp_path / name)
        for number, name in enumerate(directories)
    }
    rng = random.Random(5)
    asked, found = list(requests(rng, 16)), {}
    per_row = room(directories)["spare_experts"]
    one_pool = {"family": str(tmp_path / "family.json"), "spare_experts": per_row}
    for served, changes in ((directories, one_pool), (made, {})):
        engine = await Engine.start(config(served, **changes))
        try:
            check(ServerConfig(engine=engine.config))
            answers = (answer(engine, *r[:3], priority=r[3], allow_brownout=False) for r in asked)
            found[bool(changes)] = await asyncio.gather(*answers)
            engine.scheduler.check_idle()
            assert engine.runner.compilations_since_ready == 0
            assert bool(engine.fetcher.num_reruns) == bool(changes)
        finally:
            await engine.stop()
    for (tokens, logprobs, degraded), expected in zip(found[True], found[False], strict=True):
        assert tokens == expected[0]
        np.testing.assert_allclose(logprobs, expected[1], atol=2e-4)
        assert not degraded


def test_settings_that_cannot_work(config, directories):
    for changes, message in (
        (
            {"spare_experts": 0},
            r"engine.resident_experts is \d+.*engine.spare_experts is 1 or more",
        ),
        ({"resident_experts": 0}, r"engine.spare_experts is 6.*leaves experts in host memory"),
    ):
        with pytest.raises(SettingsError, match=message):
            check(ServerConfig(engine=config(directories, **room(directories, **changes))))
    given = room(directories)
    with pytest.raises(ValueError, match=r"spare_experts is 3; .* set it to 6 or more"):
        load_family(directories, dtype="float32", **given | {"spare_experts": 3})
    with pytest.raises(ValueError, match=r"do not hold one model's"):
        load_family(directories, dtype="float32", **given | {"resident_experts": 3})


async def test_a_family_known_by_differences_needs_spare_slots(config, directories, tmp_path):
    run = ConsolidateConfig(rule="random", share=100, residual_rank=2)
    consolidate(directories, tmp_path / "family.json", run)
    told = []
    with pytest.raises(ValueError, match=r"spare_experts is 0; .* set it to 6 or more"):
        await Engine.start(
            config(directories, family=str(tmp_path / "family.json")),
            progress=lambda what, *_: told.append(what),
        )
    assert set(told) == {"loading"}  # and nothing was compiled for it
