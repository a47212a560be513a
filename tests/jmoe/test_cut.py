"""The model cut between layers, inside them and into stages is the same model."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.attention import CausalAttention, causal_attention
from jmoe.brownout import Control, strategy_code
from jmoe.experts import ExpertTable
from jmoe.model import StepData, embed, layers_of, run_layers, unstack
from jmoe.moe import RoutedRows, Wanted, compute, moe, route, shared_expert
from pallas_kernels import routing
from pallas_kernels.kv_write import split_heads

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

TOKENS = np.array([[5, 60, 17, 33, 8], [41, 12, 3, 9, 40]], np.int32)
CASES = ["qwen2_moe", "qwen3_moe_mixed_yarn"]  # the mixed one has runs of dense and of MoE layers


@pytest.fixture(autouse=True)
def op_by_op():
    """Runs op by op, where a cut must change no bit; compiled together, rounding may differ."""
    with jax.disable_jit():
        yield


@cache
def golden(root, case):
    return jmoe.load(root / "tests" / "golden" / case, dtype="float32")


@pytest.fixture(params=CASES)
def model(request):
    with jax.disable_jit(False):
        return golden(request.config.rootpath, request.param)


def step_of(attention, tokens=TOKENS, percent=50):
    length = tokens.shape[1]
    rows = RoutedRows(
        jnp.tile(jnp.arange(length, dtype=jnp.int32), len(tokens)),
        jnp.ones(tokens.size, bool),
        jnp.zeros(tokens.size, bool).at[0].set(True),
    )
    return StepData(rows, attention, Control(jnp.int32(percent), jnp.int32(strategy_code("full"))))


def run(model, halves=None, x=None, weights=None, attention=None):
    """Returns the rows after some half layers, and the stats."""
    cfg, weights = model.config, weights or model.weights
    x = embed(model.config, weights.params, jnp.asarray(TOKENS).reshape(-1)) if x is None else x
    step = step_of(attention or CausalAttention(*TOKENS.shape))
    x, cache, stats = run_layers(
        cfg, weights, x, None, step, halves=halves, max_active=cfg.num_experts
    )
    assert cache is None
    return x, stats


def together(*stats):
    parts = [one for one in stats if one is not None]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


@pytest.mark.deep
@pytest.mark.sized(exhaustive=("qwen2_moe-True", "qwen3_moe_mixed_yarn-True"))
@pytest.mark.parametrize("stacked", [True, False])
def test_two_parts_are_the_whole_wherever_it_is_cut(model, stacked):
    params = model.params if stacked else unstack(model.params)
    weights = model.weights._replace(params=params)
    want, wanted = run(model, weights=weights)
    last = 2 * model.config.num_layers
    assert int(jnp.sum(wanted.degraded)) > 0
    for cut in (3,) if stacked else range(last + 1):  # op by op a scan takes its time
        x, first = run(model, range(cut), weights=weights)
        x, second = run(model, range(cut, last), x, weights=weights)
        np.testing.assert_array_equal(x, want)
        for got, leaf in zip(together(first, second)[:2], wanted[:2], strict=True):
            np.testing.assert_array_equal(got, leaf)


@pytest.mark.deep
def test_half_layers_one_by_one_are_the_whole(model):
    want, _ = run(model)
    x = None
    for half in range(2 * model.config.num_layers):
        x, stats = run(model, range(half, half + 1), x)
        has_experts = half % 2 == 1 and bool(model.config.moe_layers[half // 2])
        assert (stats is not None) == has_experts
    np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("halves", [range(3, 1), range(0, 99), range(0, 4, 2), range(-1, 2)])
def test_halves_that_are_not_there_are_refused(model, halves):
    with pytest.raises(ValueError, match=r"halves is range.*half layers"):
        run(model, halves)


def test_hidden_rows_of_a_part_are_refused(model):
    step = step_of(CausalAttention(*TOKENS.shape))
    x = embed(model.config, model.params, jnp.asarray(TOKENS).reshape(-1))
    with pytest.raises(ValueError, match="hidden rows are of the whole model"):
        run_layers(
            model.config,
            model.weights,
            x,
            None,
            step,
            halves=range(2),
            max_active=7,
            wanted=Wanted(hidden=True),
        )


@pytest.mark.deep
def test_the_fused_stage_has_the_bits_of_the_stages_it_is_made_of(model):
    cfg = model.config
    x = embed(model.config, model.params, jnp.asarray(TOKENS).reshape(-1))
    step = step_of(CausalAttention(*TOKENS.shape))
    index = 0
    for layer, is_moe in layers_of(cfg, model.params):
        if not is_moe:
            continue
        slots, groups = model.table.slots[index], model.table.groups[index]
        want, stats, _ = moe(
            cfg,
            layer,
            model.pool,
            ExpertTable(slots, groups),
            x,
            step.rows,
            step.control,
            max_active=cfg.num_experts,
        )
        h, weights, ids = route(cfg, layer, x)
        plan = routing.brownout_plan(
            ids,
            groups=groups,
            threshold_percent=step.control.threshold_percent,
            strategy=step.control.strategy,
            valid=step.rows.valid,
            exempt=step.rows.exempt,
        )
        out, rows = compute(
            model.pool,
            h,
            weights,
            plan.expert_ids,
            slots,
            max_active=cfg.num_experts,
            activation=cfg.activation,
        )
        if cfg.d_ff_shared:
            out = out + shared_expert(cfg, layer, h)
        np.testing.assert_array_equal(x + out, want)
        np.testing.assert_array_equal(rows, stats.expert_rows)
        np.testing.assert_array_equal(np.sum(plan.degraded, axis=-1), stats.degraded)
        index += 1
    assert index == cfg.num_moe_layers


@pytest.mark.deep
def test_layers_that_turn_differently_may_share_their_attention(request):
    model = golden(request.config.rootpath, "mellum")
    kinds = tuple(replace(kind, window=0) for kind in model.config.layer_attention)
    model = replace(model, config=replace(model.config, layer_attention=kinds))
    by_kind = causal_attention(model.config, *TOKENS.shape)
    assert len(by_kind.each) == 2
    want, _ = run(model, attention=by_kind)
    np.testing.assert_array_equal(run(model)[0], want)
    plain = tuple(replace(kind, rotary=None) for kind in kinds)
    other = replace(model, config=replace(model.config, layer_attention=plain))
    assert np.abs(np.asarray(run(other)[0] - want)).max() > 1e-3


class OwnRowAlone(NamedTuple):
    """A toy attention kind from outside the package: a row reads its own value, times a scale."""

    scale: jax.Array

    def __call__(self, projection, layer, cache):
        q, _, v = split_heads(projection)
        return jnp.repeat(v * self.scale, q.shape[1] // v.shape[1], axis=1), cache


@pytest.mark.deep
def test_an_attention_kind_of_ones_own(model):
    """A row that reads only itself is a sequence of one token; the step is a pytree."""
    want, _ = run(model, attention=CausalAttention(TOKENS.size, 1))
    kind = OwnRowAlone(jnp.float32(1))
    got, _ = run(model, attention=kind)
    np.testing.assert_allclose(got, want, atol=1e-5)
    other, _ = run(model, attention=OwnRowAlone(jnp.float32(0.5)))
    assert np.abs(np.asarray(other) - want).max() > 1e-3
    leaves, tree = jax.tree.flatten(step_of(kind))
    again = jax.tree.unflatten(tree, leaves)
    assert isinstance(again.attention, OwnRowAlone)
    same, _ = run(model, attention=again.attention)
    np.testing.assert_array_equal(same, got)
