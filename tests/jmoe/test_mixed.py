"""A decode step of several models' rows gives each row what a step of its model alone gives it."""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.attention import FULL, Paged
from jmoe.brownout import Control, strategy_code
from jmoe.experts import ABSENT, FETCHED, ExpertTable
from jmoe.family import load_family
from jmoe.mixed import JoinedTable, MixedWeights, by_model, mixed_decode_step, mixed_moe
from jmoe.model import layers_of, unstack
from jmoe.moe import RoutedRows, route, shared_expert
from jmoe.packed_rows import DELTA_PAGE, empty_deltas
from jmoe.sharing import Sharing
from jmoe.steps import decode_step
from pallas_kernels.routing import max_active_experts
from tests.jmoe.conftest import GOLDEN, add_united
from tests.jmoe.mixed_rows import ROWS, control, random_state, rows_of
from tests.jmoe.plan_oracle import plan as expected_plan
from tests.variants import variant

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

# A shared expert and no norm of gate weights; biases and QK norm; dense layers between others.
CASES = ["qwen2_moe", "qwen3_moe_attention_bias", "qwen3_moe_mixed_yarn"]
NAMES = ("base", "law", "code")
SHARED = {"none": 0.0, "some": 0.6, "all": 1.0}


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Returns a family of a golden case that shares a part of its experts, with united ones."""

    @cache
    def directories(case):
        where = tmp_path_factory.mktemp(case)
        found = {name: variant(GOLDEN / case, where / name, at) for at, name in enumerate(NAMES)}
        for seed, directory in enumerate(found.values()):
            add_united(directory, ways=(2,), seed=seed)
        return found

    @cache
    def load(case, shared="some", way=0):
        found = directories(case)
        cfg = load_family(dict([*found.items()][:1]), dtype="float32").config
        sharing = Sharing.none(NAMES, cfg.num_moe_layers, cfg.num_experts)
        rng = np.random.default_rng(3)
        joined = rng.random(sharing.owners.shape[1:]) < SHARED[shared]
        sharing.owners[:, joined] = rng.integers(len(NAMES), size=int(joined.sum()))
        loaded = load_family(found, sharing, dtype="float32")
        if way:
            for model in loaded:
                model.use_way(way)
        return loaded

    return load


@cache
def steps(cfg):
    """Returns the two steps, compiled once a configuration."""
    alone = partial(decode_step, cfg, max_active=cfg.num_experts)

    @cache
    def mixed(count, capacity):
        return jax.jit(partial(mixed_decode_step, cfg, max_active=capacity))

    return SimpleNamespace(alone=jax.jit(alone), mixed=mixed)


def run_mixed(models, rows, told=None, capacity=None):
    cfg, weights = models[0].config, MixedWeights.of([model.weights for model in models])
    capacity = capacity or len(models) * cfg.num_experts
    deltas = empty_deltas(len(rows))
    step = steps(cfg).mixed(len(models), capacity)
    return step(weights, random_state(cfg), rows, deltas, told if told is not None else control())


def run_alone(model, rows):
    cfg = model.config
    return steps(cfg).alone(model.weights, random_state(cfg), rows, empty_deltas(ROWS), control())


def segment(number):
    return slice(ROWS * number, ROWS * (number + 1))


def check_segments(models, counts, state, out):
    """Checks that every row returns and writes what it does in a step of its model alone."""
    rows, expert_rows = rows_of(counts), 0
    before = [*map(np.asarray, jax.tree.leaves(random_state(models[0].config).pages))]
    pages = [leaf.copy() for leaf in before]
    for number, (model, count) in enumerate(zip(models, counts, strict=True)):
        own = segment(number)
        state_alone, alone = run_alone(model, rows[own])
        expert_rows = expert_rows + np.asarray(alone.expert_rows)
        part = slice(ROWS * number, ROWS * number + count)
        np.testing.assert_allclose(out.logits[part], alone.logits[:count], atol=2e-5)
        np.testing.assert_array_equal(out.tokens[part], alone.tokens[:count])
        np.testing.assert_allclose(out.logprobs[part], alone.logprobs[:count], atol=2e-5)
        slots = rows[own, 0][:count]
        np.testing.assert_array_equal(
            np.asarray(state.last_token)[slots], np.asarray(state_alone.last_token)[slots]
        )
        for leaf, old, got in zip(pages, before, jax.tree.leaves(state_alone.pages), strict=True):
            changed = np.asarray(got) != old
            leaf[changed] = np.asarray(got)[changed]
    found = by_model(np.asarray(out.expert_rows), len(models), models[0].config.num_experts)
    np.testing.assert_array_equal(found.sum(axis=0), expert_rows)
    assert not np.asarray(out.degraded).any()
    for want, got in zip(pages, jax.tree.leaves(state.pages), strict=True):
        np.testing.assert_allclose(got[:, :-1], want[:, :-1], atol=2e-5)  # but the padding page


@pytest.mark.deep
@pytest.mark.sized(exhaustive=("unshared", "padding", "attention_bias", "dense_layers"))
@pytest.mark.parametrize(
    ("case", "shared", "numbers", "counts"),
    [
        ("qwen2_moe", "none", (0, 1), (4, 3)),
        ("qwen2_moe", "some", (0, 1, 2), (4, 1, 2)),
        ("qwen2_moe", "all", (2, 0), (3, 4)),
        ("qwen2_moe", "some", (1, 2), (0, 3)),  # a segment of padding alone
        ("qwen3_moe_attention_bias", "some", (0, 2), (2, 4)),
        ("qwen3_moe_mixed_yarn", "some", (0, 1), (4, 2)),
        ("mellum", "some", (0, 1), (4, 2)),
        ("qwen3_next", "some", (0, 1), (4, 2)),
    ],
    ids=[
        "unshared",
        "three",
        "shared",
        "padding",
        "attention_bias",
        "dense_layers",
        "rope_by_kind",
        "recurrent",
    ],
)
def test_rows_are_those_of_each_model_alone(family, case, shared, numbers, counts):
    loaded = family(case, shared)
    models = [loaded[number] for number in numbers]
    check_segments(models, counts, *run_mixed(models, rows_of(counts)))


@pytest.mark.deep
def test_layers_of_several_attention_kinds_are_those_of_each_model_alone(family):
    kinds = (Paged(4, sinks=True), FULL, Paged(3), Paged(sinks=True))
    models = []
    for number, model in enumerate(family("qwen3_moe_mixed_yarn")[:2]):
        model = replace(model, config=replace(model.config, layer_attention=kinds))
        segments = list(model.params["segments"])  # a layer each
        for layer in (0, 3):
            sinks = np.random.default_rng([number, layer]).normal(size=(1, model.config.num_heads))
            segments[layer] = segments[layer] | {"sinks": jnp.asarray(2 * sinks, jnp.float32)}
        params = {**model.params, "segments": tuple(segments)}
        models.append(model.with_weights(params=params))
    counts = 4, 2
    full = run_mixed(family("qwen3_moe_mixed_yarn")[:2], rows_of(counts))[1]
    state, out = run_mixed(models, rows_of(counts))
    assert np.abs(out.logits - full.logits).max() > 1e-2
    check_segments(models, counts, state, out)


@pytest.mark.deep
def test_queries_that_grow_with_their_position_do_so_in_each_segment(family):
    """But for its router, of which no step has several."""
    plain, models = [], []
    for model in family("mistral4")[:2]:
        models.append(replace(model, config=replace(model.config, router=None)))
        rope = replace(model.config.rope, query_scaling=0.0)
        plain.append(replace(model, config=replace(models[-1].config, rope=rope)))
    counts = 4, 2
    state, out = run_mixed(models, rows_of(counts))
    check_segments(models, counts, state, out)
    without = run_mixed(plain, rows_of(counts))[1]
    assert np.abs(out.logits - without.logits).max() > 1e-2


@pytest.mark.deep
def test_norms_of_what_half_layers_add_are_those_of_each_model_alone(family):
    models, counts = [], (4, 2)
    for number, model in enumerate(family("qwen3_moe_mixed_yarn")[:2]):
        rng, segments = np.random.default_rng(number), []
        for segment in model.params["segments"]:
            like = segment["mlp_norm"]
            drawn = rng.normal(1, 0.5, (2, *like.shape)).astype(np.float32)
            names = "attn_post_norm", "mlp_post_norm"
            own = dict(zip(names, map(jnp.asarray, drawn), strict=True))
            segments.append(segment | own)
        params = {**model.params, "segments": tuple(segments)}
        model = replace(model, config=replace(model.config, post_norms=True))
        models.append(model.with_weights(params=params))
    check_segments(models, counts, *run_mixed(models, rows_of(counts)))


@pytest.mark.exhaustive
def test_layers_in_arrays_of_their_own_are_the_same_step(family):
    models = family("qwen3_moe_mixed_yarn")[:2]
    rows, cfg = rows_of((4, 2)), models[0].config
    weights = MixedWeights.of([m.weights._replace(params=unstack(m.params)) for m in models])
    step = jax.jit(partial(mixed_decode_step, cfg, max_active=2 * cfg.num_experts))
    _, out = step(weights, random_state(cfg), rows, empty_deltas(len(rows)), control())
    _, scanned = run_mixed(models, rows)
    np.testing.assert_allclose(out.logits, scanned.logits, atol=1e-5)


@pytest.mark.deep
def test_pages_that_rows_were_given_are_written(family):
    """Deltas cover all segments."""
    models, rows = family("qwen2_moe")[:2], rows_of((1, 1))
    deltas = empty_deltas(len(rows))
    deltas[0], deltas[1] = (0, 2, 7), (1, 3, 5)
    cfg = models[0].config
    step = steps(cfg).mixed(2, 2 * cfg.num_experts)
    weights = MixedWeights.of([model.weights for model in models])
    state, _ = step(weights, random_state(cfg), rows, deltas, control())
    assert (int(state.block_table[0, 2]), int(state.block_table[1, 3])) == (7, 5)
    assert deltas[0][DELTA_PAGE] == 7


@pytest.mark.sized(
    deep=(
        "full",
        "partial",
    )
)
@pytest.mark.parametrize("strategy", ["partial", "full"])
def test_rows_that_refuse_brownout_are_exact(family, strategy):
    """While others are degraded."""
    models = family("qwen2_moe", "some", 2)[:2]
    counts, exempt = (4, 4), (1, 6)
    rows = rows_of(counts, exempt)
    _, out = run_mixed(models, rows, control(strategy, 0))
    assert np.asarray(out.degraded).sum() > 0
    for number, model in enumerate(models):
        _, alone = run_alone(model, rows[segment(number)])
        for at in range(ROWS):
            if number * ROWS + at in exempt:
                assert out.degraded[ROWS * number + at] == 0
                np.testing.assert_allclose(
                    out.logits[ROWS * number + at], alone.logits[at], atol=2e-5
                )


def expert(pool, slot, h):
    gate, up = np.split(h @ np.asarray(pool.gate_up[slot], np.float64), 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ np.asarray(pool.down[slot], np.float64)


def expected_moe(cfg, models, layer_index, xs, valid, exempt, told):
    """Computes one layer from its definition: distinct experts are known by their slots, and each
    degraded visit goes to the united expert of the first of the step's models that has the expert.
    """
    strategy, percent = told
    m, first = cfg.num_experts, {}
    tables = [np.asarray(model.weights.table.slots[layer_index]) for model in models]
    groups, owner = [], []
    num_united = len(tables[0]) - m
    for number, (model, slots) in enumerate(zip(models, tables, strict=True)):
        own = np.asarray(model.weights.table.groups[layer_index])
        for e in range(m):
            first.setdefault(int(slots[e]), number * m + e)
            groups.append(int(own[e]) + number * num_united if own[e] >= 0 else -1)
            owner.append(first[int(slots[e])])
    united = np.concatenate([slots[m:] for slots in tables])
    slot_of = np.concatenate([slots[:m] for slots in tables] + [united])
    layers = [layers_of(cfg, model.params)[layer_index][0] for model in models]
    hs, gates, ids = zip(*map(route, [cfg] * len(models), layers, xs), strict=True)
    columns = np.concatenate(
        [np.take(owner, number * m + np.asarray(one)) for number, one in enumerate(ids)]
    )
    planned, degraded, _ = expected_plan(
        columns.tolist(), groups, percent, strategy, valid.tolist(), exempt.tolist()
    )
    outs = []
    weights, h = np.concatenate(gates), np.concatenate(hs).astype(np.float64)
    for row in range(len(h)):
        out = np.zeros(h.shape[1])
        for column, weight in zip(planned[row], weights[row], strict=True):
            if column >= 0:
                out += weight * expert(models[0].pool, slot_of[column], h[row])
        outs.append(out)
    return np.stack(outs), np.sum(degraded, axis=1), layers, hs


def test_an_expert_that_a_substitute_serves_has_a_column_of_its_own():
    """Two models share slots 0 and 1; the second one's expert 0 is away, 1 is fetched for both."""
    groups = jnp.full((1, 3), -1, jnp.int32)

    def table(slots, offloaded):
        both = (jnp.asarray([values], jnp.int32) for values in (slots, offloaded))
        slots, offloaded = both
        return ExpertTable(slots, groups, offloaded=offloaded)

    joined = JoinedTable.of(
        [table([0, 1, 2], [0, FETCHED, 0]), table([0, 1, 3], [ABSENT, FETCHED, 0])]
    )
    assert joined.owner.tolist() == [[[0, 0, 0], [1, 0, 1]]]
    assert joined.offloaded.tolist() == [[0, FETCHED, 0, ABSENT, FETCHED, 0]]


def test_a_united_expert_that_models_are_lent_is_visited_once():
    """The first and the last of three models use the same ones: a device has no more experts to run
    than slots.
    """
    tables = [
        ExpertTable(jnp.asarray([[*routed, *united]]), jnp.asarray([[0, 1, 0]]))
        for routed, united in (([0, 1, 2], [9, -9]), ([3, 4, 5], [7, 8]), ([0, 1, 6], [9, -9]))
    ]
    joined = JoinedTable.of(tables)
    assert joined.groups.tolist() == [[0, 1, 0, 2, 3, 2, 0, 1, 0]]


@cache
def layer_step(cfg, capacity):
    """Returns one layer's MLP half for several models, compiled."""

    def run(layers, pool, table, xs, rows, setting):
        return mixed_moe(cfg, layers, pool, table, xs, rows, setting, max_active=capacity)[:2]

    return jax.jit(run)


@pytest.mark.sized(deep=("0.0-some-told0", "0.0-some-told1", "0.0-none-told4", "0.0-some-told2"))
@pytest.mark.parametrize(
    ("shared", "told"),
    [
        ("some", ("zero", 100)),
        ("some", ("full", 40)),
        ("some", ("partial", 0)),
        ("some", ("partial", 30)),
        ("none", ("partial", 30)),
        ("all", ("partial", 30)),
    ],
)
@pytest.mark.parametrize("exempt_share", [0.0, 0.3])
def test_brownout_is_one_plan_over_distinct_experts(family, shared, told, exempt_share):
    """Against loops; and within the capacity that a threshold has where no row is exempt."""
    models, (strategy, percent) = family("qwen2_moe", shared, 2), told
    cfg, size, layer = models.config, 6, 1
    rng = np.random.default_rng(7)
    xs = [jnp.asarray(rng.standard_normal((size, cfg.d_model)), jnp.float32) for _ in models]
    valid, exempt = rng.random(3 * size) < 0.8, rng.random(3 * size) < exempt_share
    want, degraded, layers, hs = expected_moe(cfg, models, layer, xs, valid, exempt, told)
    table = JoinedTable.of([model.weights.table for model in models])
    table = jax.tree.map(lambda leaf: leaf[layer], table)
    columns, num_united = len(table.groups), len(table.slots) - len(table.groups)
    capacity = columns
    if strategy != "zero" and not exempt.any():
        capacity = max_active_experts(percent, columns, num_united, columns)
    rows = RoutedRows(jnp.zeros(3 * size, jnp.int32), jnp.asarray(valid), jnp.asarray(exempt))
    setting = Control(jnp.int32(percent), jnp.int32(strategy_code(strategy)))
    run = layer_step(cfg, capacity)
    got, stats = run(layers, models[0].pool, table, tuple(xs), rows, setting)
    np.testing.assert_array_equal(stats.degraded, degraded)
    assert exempt.any() or (strategy == "zero") == (not degraded.any())
    for number, of_model in enumerate(zip(layers, xs, hs, got, strict=True)):
        own, x, h, after = of_model
        part = slice(number * size, (number + 1) * size)
        expected = np.asarray(x) + want[part] + np.asarray(shared_expert(cfg, own, h))
        np.testing.assert_allclose(after[valid[part]], expected[valid[part]], atol=2e-4)


def _nothing(projection, layer, cache):
    """Stands in for an attention that is not called."""
    raise AssertionError


def test_what_is_shared_is_one_column(family):
    models = family("qwen2_moe", "some")
    tables = [model.weights.table for model in models]
    table = JoinedTable.of(tables)
    m = models.config.num_experts
    for layer in range(models.config.num_moe_layers):
        for number, own in enumerate(tables):
            for at in range(m):
                column = int(table.owner[layer, number, at]) * m + at
                assert table.slots[layer, column] == own.slots[layer, at]
        used = {int(table.owner[layer, n, e]) * m + e for n in range(len(tables)) for e in range(m)}
        distinct = {int(s) for own in tables for s in own.slots[layer, :m]}
        assert len(used) == len(distinct) < len(tables) * m
