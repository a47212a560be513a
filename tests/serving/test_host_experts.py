"""A family whose experts do not all have a slot: what is fetched when, and what is refused."""

import pytest

from jmoe.config import read_config
from jmoe.family import load_family
from serving.config import ServerConfig
from serving.engine import Engine
from serving.errors import SettingsError
from serving.request import SamplingParams
from serving.settings.reading import check
from tests.serving.families import GOLDEN, NAMES, answer, settings_of
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
    """Returns settings with room for the first model's experts and `more`."""
    cfg = read_config(directories["base"])
    positions = cfg.num_moe_layers * cfg.num_experts
    per_row = cfg.num_moe_layers * cfg.experts_per_token
    return {"resident_experts": positions + more, "spare_experts": per_row, **changes}


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
        assert engine.executor.compilations_since_ready == 0
    finally:
        await engine.stop()


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
