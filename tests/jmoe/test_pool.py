"""A kind of pool that the package does not know: eight bits a weight, and a scale a channel."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.attention import CausalAttention
from jmoe.brownout import Control
from jmoe.experts import ExpertPool, Pool, write_slots
from jmoe.model import StepData, embed, layers_of, run_layers
from jmoe.moe import RoutedRows, route
from jmoe.parallel.home import Home, make_mesh
from jmoe.parallel.placement import contiguous
from jmoe.residuals import Residuals, add_residual
from jmoe.weights import ResidentWeights
from pallas_kernels import routing
from pallas_kernels.activation import SILU

TOKENS = np.array([[5, 60, 17, 33, 8, 2, 71], [41, 12, 3, 9, 40, 90, 7]], np.int32)
SAME = {"rtol": 0, "atol": 2e-5}  # float32 sums in another order
BLOCK = 4

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Pool(Pool):
    """`weight[k, channel] = value[k, channel] * scale[channel]`, so that a product is scaled after
    its sum.
    """

    gate_up: jax.Array  # int8 [slots, d, 2 f]
    down: jax.Array  # int8 [slots, f, d]
    gate_up_scale: jax.Array  # [slots, 2 f], in the dtype of the rows
    down_scale: jax.Array  # [slots, d]

    @classmethod
    def of(cls, experts, dtype=jnp.float32):
        scales = [
            jnp.max(jnp.abs(leaf), axis=-2).astype(dtype) / 127 for leaf in experts.arrays.values()
        ]
        values = [
            jnp.round(leaf / jnp.where(scale > 0, scale, 1)[..., None, :]).astype(jnp.int8)
            for leaf, scale in zip(experts.arrays.values(), scales, strict=True)
        ]
        return cls(*values, *scales)

    @property
    def dtype(self):
        return self.down_scale.dtype

    def plain(self):
        pairs = (self.gate_up, self.gate_up_scale), (self.down, self.down_scale)
        return ExpertPool(*(v.astype(self.dtype) * scale[..., None, :] for v, scale in pairs))

    def kept(self, experts):
        return self.of(experts, self.dtype)

    def block_rows(self, num_visits, max_active):
        return BLOCK

    def mlp(self, h, work, activation):
        slot = jnp.repeat(work.block_slot, BLOCK)
        rows = jnp.take(h, work.row_token, axis=0, mode="fill", fill_value=0)

        def product(rows, values, scale):
            return jnp.einsum("rk,rkc->rc", rows, values[slot].astype(rows.dtype)) * scale[slot]

        gate, up = jnp.split(product(rows, self.gate_up, self.gate_up_scale), 2, axis=1)
        out = product(activation(gate, up), self.down, self.down_scale)
        visits = jnp.take(out, work.visit_row, axis=0, mode="fill", fill_value=0)
        return jnp.einsum("tk,tkd->td", work.visit_weight, visits)


@pytest.fixture
def exact(united_models):
    return united_models("qwen2_moe")


@pytest.fixture
def model(exact):
    return exact.with_weights(pool=Int8Pool.of(exact.pool))


def dequantized(model):
    """Returns the same model over a plain pool."""
    plain = model.with_weights(pool=model.pool.plain())
    if model.way:
        plain.use_way(model.way)  # in floats
    plain.resident.weights = plain.weights._replace(pool=model.pool.plain())
    return plain


def test_its_op_equals_the_plain_pools_on_the_same_weights(model):
    cfg, rng = model.config, np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(9, cfg.d_model)), jnp.float32)
    ids = jnp.asarray([rng.permutation(7)[:3] for _ in range(9)], jnp.int32)
    weights = jnp.asarray(rng.random((9, 3)), jnp.float32)
    slots = model.table.slots[1]
    work = routing.dispatch(ids, weights, slots, block_m=model.pool.block_rows(27, 7), max_active=7)
    want = model.pool.plain().mlp(h, work, SILU)
    assert float(jnp.abs(want).max()) > 0.1
    np.testing.assert_allclose(model.pool.mlp(h, work, SILU), want, **SAME)


@pytest.mark.deep
def test_forward_and_generate_run_over_it(model):
    plain, brownout = dequantized(model), jmoe.Brownout("full", 40)
    got, want = (jmoe.forward(m, TOKENS) for m in (model, plain))
    np.testing.assert_allclose(got, want, **SAME)
    prompts = TOKENS.tolist()
    got, want = (jmoe.generate(m, prompts, 6, brownout, page_size=4) for m in (model, plain))
    assert got.tokens == want.tokens
    np.testing.assert_allclose(got.logprobs, want.logprobs, **SAME)
    assert got.degraded_visits == want.degraded_visits
    assert sum(got.degraded_visits) > 0


@pytest.mark.deep
def test_logits_are_off_by_what_the_scales_say(exact, model):
    """Where only the last layer's experts are rounded, the error of logits is known by hand.

    An element of a weight is off by up to half its channel's scale, evenly and by itself, so that
    its variance is scale^2 / 12; to first order, all of them add up in each logit.
    """
    cfg, params = exact.config, exact.params
    slots = exact.table.slots[-1, : cfg.num_experts]
    floats = exact.pool.read(slots)
    want_model = exact.with_weights(pool=model.pool.plain().with_experts(slots, floats))
    got_model = exact.with_weights(pool=Int8Pool.of(want_model.pool))  # of others no bit is lost
    want, stats = jmoe.forward(want_model, TOKENS, return_stats=True, return_hidden=True)
    got = jmoe.forward(got_model, TOKENS)

    rows = RoutedRows(jnp.tile(jnp.arange(7), 2), jnp.ones(14, bool), jnp.zeros(14, bool))
    step = StepData(rows, CausalAttention(*TOKENS.shape), Control.of(None))
    x = embed(cfg, params, jnp.asarray(TOKENS).reshape(-1))
    before_experts = range(2 * cfg.num_layers - 1)
    x, _, _ = run_layers(
        cfg, want_model.weights, x, None, step, halves=before_experts, max_active=7
    )
    last, _ = layers_of(cfg, params)[-1]
    h, weights, ids = (np.asarray(leaf) for leaf in route(cfg, last, x))
    gate_up, down = (np.asarray(leaf, np.float64) for leaf in floats.arrays.values())
    x = np.asarray(stats.hidden_states[-1], np.float64).reshape(14, -1)
    head = np.asarray(params["final_norm"])[:, None] * np.asarray(params["lm_head"])
    variance = np.zeros((14, cfg.vocab_size))
    for t, k in np.ndindex(ids.shape):
        rms = np.sqrt((x[t] ** 2).mean())  # how logits follow the residual stream, [d, vocabulary]:
        slope = (head - np.outer(x[t], x[t] @ head) / (cfg.d_model * rms**2)) / rms
        up_weights, down_weights = gate_up[ids[t, k]], down[ids[t, k]]
        of_up, of_down = (
            (np.abs(leaf).max(0) / 127) ** 2 / 12 for leaf in (up_weights, down_weights)
        )
        gate, up = np.split(h[t] @ up_weights, 2)
        of_gate, of_up = np.split((h[t] ** 2).sum() * of_up, 2)
        sigmoid = 1 / (1 + np.exp(-gate))
        silu, silu_slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
        of_inner = (silu_slope * up) ** 2 * of_gate + silu**2 * of_up
        added = of_inner @ (down_weights @ slope) ** 2
        added += ((silu * up) ** 2).sum() * (of_down @ slope**2)
        variance[t] += weights[t, k] ** 2 * added
    ratio = (np.asarray(got) - np.asarray(want)).reshape(variance.shape) / np.sqrt(variance)
    assert np.abs(ratio).max() < 6
    assert 0.8 < np.sqrt((ratio**2).mean()) < 1.25


def test_slots_are_written_read_and_counted(exact, model):
    cfg, pool = model.config, model.pool
    assert pool.num_slots == exact.pool.num_slots == exact.table.slots.size
    elements, channels = 3 * cfg.d_model * cfg.d_ff_expert, 2 * cfg.d_ff_expert + cfg.d_model
    assert pool.slot_bytes == elements + 4 * channels
    assert exact.pool.slot_bytes == 4 * elements
    assert pool.empty(3).num_slots == 3
    assert f"{pool.slot_bytes * cfg.num_moe_layers * 7:,} bytes" in model._repr_html_()

    before, others = pool.plain(), np.delete(np.arange(pool.num_slots), [2, 4])
    new = exact.pool.read(jnp.array([5, 3]))  # floating point, as from a file
    pool = write_slots(pool, jnp.array([2, 4]), new)
    assert type(pool) is Int8Pool
    read = pool.read(jnp.array([2, 4]))
    scales = read.gate_up_scale, read.down_scale
    for got, want, scale in zip(read.plain()[:2], new[:2], scales, strict=True):
        assert (np.abs(got - want) <= 0.501 * scale[:, None, :]).all()
    jax.tree.map(np.testing.assert_array_equal, pool.plain().read(others), before.read(others))
    pool = write_slots(pool, jnp.array([0]), pool.read(jnp.array([4])))  # as it is kept
    jax.tree.map(np.testing.assert_array_equal, pool.read(np.array([0])), pool.read(np.array([4])))
    zeros = [jnp.zeros((1, *shape)) for shape in ((32, 1), (1, 38), (19, 1), (1, 32))]
    pool = add_residual(pool, Residuals(*zeros), *map(jnp.int32, (0, 4, 6)))
    both = (pool.plain().read(np.array([slot])).arrays.values() for slot in (6, 4))
    for got, want in zip(*both, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.deep
@pytest.mark.parametrize("spread", [False, True])
def test_united_experts_are_loaded_into_it(exact, model, spread):
    """Also over a mesh, if only of one device."""
    shape = model.config.num_moe_layers, exact.table.slots.shape[1]
    if spread:
        home = Home(make_mesh(1), contiguous(*shape, 1, num_united=model.num_united_slots))
        resident = ResidentWeights(home.spread(model.weights), model.united, home=home)
        model = replace(model, resident=resident)
    model.use_way(2)
    assert model.way == 2
    assert type(model.pool) is Int8Pool
    slots = np.asarray(model.table.slots).reshape(shape)
    united = model.united_of(2)
    for layer in range(len(slots)):
        want = united.layer(layer)
        read = model.pool.read(slots[layer, 7 : 7 + want.num_slots])
        scales = read.gate_up_scale, read.down_scale
        for got, exactly, scale in zip(read.plain()[:2], want[:2], scales, strict=True):
            assert (np.abs(got - exactly) <= 0.501 * scale[:, None, :]).all()
    setting = jmoe.Brownout("partial", 30)
    got, stats = jmoe.forward(model, TOKENS, setting, return_stats=True)
    assert stats.expert_rows[:, 7:].sum() > 0
    if not spread:
        np.testing.assert_allclose(got, jmoe.forward(dequantized(model), TOKENS, setting), **SAME)
