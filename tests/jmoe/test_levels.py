"""Thresholds by layer: each layer plans with its own, and a table of something else is named."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe import beside, levels
from jmoe.brownout import Brownout, strategy_code
from jmoe.levels import Levels

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

TOKENS = np.random.default_rng(3).integers(1, 60, (4, 12))
LEVEL = 40
ROW = (85, 20)  # of level 40: one layer keeps more, the other less


def rows(low=ROW):
    """Returns rows that go through `low` at the level, to all exact at 100."""
    at = np.interp(np.arange(101), [0, LEVEL, 100], [0, 1, 2])
    each = [np.interp(at, [0, 1, 2], [0, t, 100]).astype(int) for t in low]
    return tuple(zip(*(each.tolist() for each in each), strict=True))


def write(directory, *tables, digest=None):
    levels.write(directory / levels.FILE, tables, digest or beside.digest_of(directory))


@pytest.fixture(scope="module")
def model(united_dirs):
    directory = united_dirs("qwen3_moe")
    write(directory, Levels(2, "visits", rows()), Levels(3, "weight", rows((20, 85))))
    return jmoe.load(directory, dtype="float32")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("way", "keep", "row"), [(2, "visits", ROW), (3, "weight", (20, 85))], ids=["visits", "weight"]
)
def test_each_layer_plans_with_its_own_threshold(model, way, keep, row):
    setting = Brownout("partial", LEVEL, way, keep, levels=True)
    _, stats = jmoe.forward(model, TOKENS, setting, return_stats=True)
    for layer, threshold in enumerate(row):
        plan = jmoe.brownout.plan(
            stats.router_choices[layer],
            num_experts=model.config.num_experts,
            threshold_percent=threshold,
            groups=model.united[way].groups[layer],
            keep=keep,
            weights=stats.gate_weights[layer],
        )
        assert (plan.degraded.sum(axis=-1) == stats.degraded_visits[layer]).all()
    exact = jmoe.forward(model, TOKENS, Brownout("partial", 100, way, keep, levels=True))
    assert (exact == jmoe.forward(model, TOKENS)).all()
    # Without levels, the threshold is every layer's again.
    alike, plain = (
        jmoe.forward(model, TOKENS, Brownout("partial", t, way, keep, levels=each))
        for t, each in ((LEVEL, True), (LEVEL, False))
    )
    assert (alike != plain).any()


@pytest.mark.exhaustive
def test_generate_goes_by_levels(model):
    prompts = TOKENS.tolist()
    at, plain = (
        jmoe.generate(model, prompts, 4, Brownout("partial", LEVEL, 2, levels=each))
        for each in (True, False)
    )
    assert at.degraded_visits != plain.degraded_visits
    write(model.path, Levels(2, "visits", rows((LEVEL, LEVEL))))
    again = jmoe.generate(model, prompts, 4, Brownout("partial", LEVEL, 2, levels=True))
    assert (again.tokens, again.logprobs) == (plain.tokens, plain.logprobs)


def test_programs_read_the_tables_of_their_strategies_and_else_the_level():
    table = Levels(8, "weight", rows())
    found = levels.by_code([table], 2)
    code = strategy_code("partial", "weight")
    assert found[:, code].T.tolist() == [list(row) for row in table.rows]
    assert table.largest(LEVEL) == 85
    others = np.delete(found, code, axis=1)
    assert (others == np.arange(101)).all()


def test_levels_follow_the_way_that_is_loaded(united_dirs):
    model = jmoe.load(united_dirs("qwen2_moe"), dtype="float32")
    by_way = {2: levels.by_code([Levels(2, "visits", rows())], 2), 3: levels.by_code([], 2)}
    held, code = model.resident, strategy_code("partial")
    held.use_levels(by_way)
    assert held.largest_threshold(code, LEVEL) == 85  # none is loaded: of all
    model.use_way(3)
    assert held.largest_threshold(code, LEVEL) == LEVEL
    assert (model.table.levels == by_way[3]).all()
    model.load_way_layer(2, 0)
    assert held.largest_threshold(code, LEVEL) == 85
    assert (model.table.levels == jnp.stack([by_way[2][0], by_way[3][1]])).all()
    with pytest.raises(ValueError, match="an engine serves qwen2_moe by levels; load it once more"):
        model.prepare(None)


def test_a_table_of_something_else_is_named(united_dirs, tmp_path):
    directory = united_dirs("olmoe")
    model = jmoe.load(directory, dtype="float32")
    setting = Brownout("partial", 40, 2, levels=True)

    def refused(words):
        with pytest.raises(ValueError, match=words):
            model.prepare(setting)

    refused(r"has no levels.json; `jmoe evaluate --sensitivity` measures and writes it")
    write(directory, Levels(2, "visits", rows()), digest="of another")
    refused(r"levels.json is of the model 'of another', and this one is .*: weights or united")
    write(directory, Levels(2, "weight", rows()))
    refused(r"levels.json has levels of way 2 by weight, not of way 2 by visits")
    write(directory, Levels(2, "visits", rows()))  # and the other table stays
    model.prepare(setting)
    model.prepare(Brownout("partial", 40, 2, "weight", levels=True))
    path = directory / levels.FILE
    good = json.loads(path.read_text())
    for wrong in (
        good["tables"][0]["rows"][:-1],
        [[101, 0]] * 101,
        good["tables"][0]["rows"][::-1],
        [[0, 0]] * 101,
    ):
        tables = [{"way": 2, "keep": "visits", "rows": wrong}]
        path.write_text(json.dumps(good | {"tables": tables}), encoding="utf-8")
        refused("is no table of levels")
    path.write_text("[", encoding="utf-8")
    refused("levels.json is not readable")
    with pytest.raises(ValueError, match="levels are of partial brownout, and strategy is full"):
        Brownout("full", 40, levels=True)
