"""Thresholds by layer in a server: what is served is what the notebook writes."""

import shutil

import numpy as np
import pytest
from families import GOLDEN, answer, settings_of

import jmoe
from jmoe import beside, levels
from jmoe.levels import Levels
from serving.config import BrownoutConfig
from serving.engine import Engine
from serving.errors import SettingsError
from serving.request import BrownoutChange, SamplingParams
from serving.settings.reading import load
from serving.startup.loading import levels_of
from tests.jmoe.conftest import add_united

LEVEL = 50


@pytest.fixture
def directory(tmp_path):
    """Makes a model with levels of way 2 alone."""
    made = tmp_path / "model"
    shutil.copytree(GOLDEN, made)
    add_united(made)
    each = np.stack([np.maximum(np.arange(101), 90), np.arange(101) // 3], axis=1)
    each[100] = 100
    table = Levels(2, "weight", tuple(map(tuple, each.tolist())))
    levels.write(made / levels.FILE, [table], beside.digest_of(made))
    return made


@pytest.mark.deep
@pytest.mark.usefixtures("compiled_in_a_hurry")
async def test_it_serves_what_the_notebook_writes(directory, tmp_path):
    given = BrownoutConfig(
        salc=False,
        way=2,
        keep="weight",
        levels=True,
        prefill_threshold_percent=LEVEL,
        decode_threshold_percent=LEVEL,
    )
    config = settings_of(
        {},
        str(tmp_path / "programs"),
        model=str(directory),
        models=(),
        brownout=given,
        prefix_reuse="off",
        threshold_buckets_percent=(50, 100),
    )
    model, prompt = jmoe.load(directory, "float32"), [1, 2, 3, 9, 8, 7, 6, 5]
    asked = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=True)
    engine = await Engine.start(config)
    try:
        found = []
        for change in ({}, {"keep": "visits"}, {"keep": "weight", "way": 3}, {"way": 2}):
            await engine.set_brownout(BrownoutChange(**change))
            found.append(await answer(engine, prompt, asked))
        stats = engine.stats()
    finally:
        await engine.stop()
    assert stats.compilations_since_ready == 0
    settings = [
        (2, "weight", True),
        (2, "visits", False),
        (3, "weight", False),
        (2, "weight", True),
    ]
    for (tokens, _, degraded), (way, keep, by_layer) in zip(found, settings, strict=True):
        setting = jmoe.Brownout("partial", LEVEL, way, keep, by_layer)
        want = jmoe.generate(model, [prompt], 6, setting, stop_token_ids=())
        assert (tokens, degraded) == (want.tokens[0], want.degraded_visits[0])
    plain = jmoe.generate(
        model, [prompt], 6, jmoe.Brownout("partial", LEVEL, 2, "weight"), stop_token_ids=()
    )
    assert plain.degraded_visits[0] != found[0][2]


def test_a_way_without_levels_ends_the_start(directory):
    model = jmoe.load(directory, "float32")
    with pytest.raises(ValueError, match=r"has levels of way 2 by weight, not of way 3 by weight"):
        levels_of(model, "weight", [3, 2])
    with pytest.raises(ValueError, match=r"not of way 0 by visits"):
        levels_of(model, "visits", [])


def test_levels_are_of_partial_brownout_alone():
    brownout = {"engine.brownout.levels": True, "engine.brownout.strategy": "full"}
    with pytest.raises(SettingsError, match=r"levels is True; it must be false unless .* 'full'"):
        load(None, brownout)
