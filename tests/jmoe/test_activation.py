"""Activations of experts, against loops in NumPy, on every path that computes experts."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpy_forward
import pytest

import jmoe
from jmoe import layout
from jmoe.checkpoint import load_native, load_united, save_native, weights_digest
from jmoe.config import ConfigError, from_hf, read_config
from jmoe.experts import ExpertPool, QuantizedPool
from jmoe.moe import compute
from jmoe.weights import ResidentWeights
from pallas_kernels.activation import SILU, ClampedSwiglu, Gelu, Relu2, gated, up_matrices
from pallas_kernels.backend import KERNEL, batched_only, noting, traced_for
from training.distill.run import write_united

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen2_moe"


@dataclass(frozen=True)
class Squared:
    """An activation from outside the package."""

    def __call__(self, gate, up):
        return jnp.maximum(gate, 0) ** 2 * up


def by_hand(activation, gate, up=None):
    """Joins two numbers, or makes one of one."""
    if activation == Relu2():
        return max(gate, 0) ** 2
    if activation == SILU:
        return gate / (1 + math.exp(-gate)) * up
    if activation == Gelu():
        return gate * 0.5 * (1 + math.erf(gate / math.sqrt(2))) * up
    if activation == Gelu(tanh=True):
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + math.tanh(inner)) * up
    if isinstance(activation, ClampedSwiglu):
        alpha, limit = activation.alpha, activation.limit
        gate, up = min(gate, limit), max(min(up, limit), -limit)
        return gate / (1 + math.exp(-alpha * gate)) * (up + 1)
    return max(gate, 0) ** 2 * up


GATED = [SILU, Gelu(), Gelu(tanh=True), ClampedSwiglu(), ClampedSwiglu(1.3, 0.5), Squared()]
ALL = [*GATED, Relu2()]
EACH = pytest.mark.parametrize("activation", ALL, ids=repr)


def case(seed=0):
    """Returns rows, gate weights, experts (-1: none), and a pool of seven slots."""
    rng = np.random.default_rng(seed)
    h, gate_up, down = rng.normal(size=(6, 8)), rng.normal(size=(7, 8, 12)), rng.random((7, 6, 8))
    ids = np.array([rng.permutation(5)[:2] for _ in range(6)])
    ids[2, 1] = -1
    return h, rng.random((6, 2)), ids, gate_up, down


def loops(activation, h, weights, ids, gate_up, down):
    out = np.zeros(h.shape)
    for row, picks in enumerate(ids):
        for weight, expert in zip(weights[row], picks, strict=True):
            if expert >= 0:
                halves = np.split(h[row] @ gate_up[expert], up_matrices(activation))
                act = [by_hand(activation, *each) for each in zip(*halves, strict=True)]
                out[row] += weight * (np.array(act) @ down[expert])
    return out


@EACH
@pytest.mark.parametrize("form", ["reference", "batched"])
def test_experts_are_those_of_loops(activation, form):
    h, weights, ids, gate_up, down = case()
    gate_up = gate_up[:, :, : 6 * up_matrices(activation)]
    pool = jmoe.experts.ExpertPool(*(jnp.asarray(a, jnp.float32) for a in (gate_up, down)))

    def run():
        slots = jnp.arange(7, dtype=jnp.int32)
        rows, picks = jnp.asarray(h, jnp.float32), jnp.asarray(ids, jnp.int32)
        given = {"max_active": 7, "activation": activation}
        return compute(pool, rows, jnp.asarray(weights, jnp.float32), picks, slots, **given)[0]

    if form == "batched":
        with batched_only():
            got = run()
    else:
        got = run()
    want = loops(activation, h, weights, ids, gate_up, down)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


@EACH
def test_gradient_is_that_of_its_formula(activation):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 8)), jnp.float32)

    def formula(x):
        return activation(*jnp.split(x, up_matrices(activation), axis=1))

    grads = (
        jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))(x)
        for f in (lambda x: gated(x, activation), formula)
    )
    np.testing.assert_allclose(*grads, atol=1e-5)


@pytest.mark.deep
@pytest.mark.parametrize("activation", GATED, ids=repr)
def test_steps_and_the_whole_forward_pass_agree(activation):
    model, prompt = jmoe.load(GOLDEN, "float32"), [5, 9, 2, 40, 7]
    plain = np.asarray(jmoe.forward(model, [prompt]))
    model.config = replace(model.config, activation=activation)
    got = jmoe.generate(model, [prompt], 6, stop_token_ids=())
    logits = np.asarray(jmoe.forward(model, [[*prompt, *got.tokens[0]]]))[0]
    assert got.tokens[0] == logits[len(prompt) - 1 : -1].argmax(axis=1).tolist()
    assert (np.abs(logits[:5] - plain[0]).max() > 1e-3) == (activation != SILU)


def biased(model):
    """Returns the model with biases of its experts, united ones too, drawn at random."""
    cfg, rng = replace(model.config, expert_bias=True), np.random.default_rng(2)

    def drawn(lead):
        shapes = {k: s for k, s in layout.expert_shapes(cfg).items() if k.endswith("bias")}
        return {key: rng.normal(size=(*lead, *s)).astype(np.float32) for key, s in shapes.items()}

    united = {
        way: replace(own, **drawn(own.gate_up.shape[:2])) for way, own in model.united.items()
    }
    pool = jax.tree.map(jnp.copy, model.pool)  # loading a way donates it
    pool = pool._replace(**jax.tree.map(jnp.asarray, drawn((pool.num_slots,))))
    resident = ResidentWeights(model.weights._replace(pool=pool), united)
    return replace(model, config=cfg, resident=resident)


def test_experts_with_biases_are_those_of_numpy(united_models):
    model = biased(united_models("qwen3_moe"))
    model.config = replace(model.config, activation=ClampedSwiglu(1.3, 0.5))
    tokens = np.random.default_rng(4).integers(0, 40, (2, 9))
    got = jmoe.forward(model, tokens)[:, -1]
    np.testing.assert_allclose(got, numpy_forward.forward(model, tokens), atol=2e-4)
    plain = replace(model, config=replace(model.config, expert_bias=False))
    without = plain.with_weights(pool=ExpertPool(*model.pool[:2]))
    assert np.abs(numpy_forward.forward(without, tokens) - got).max() > 1e-2


def test_united_biases_are_loaded_with_their_experts(united_models, tmp_path):
    """Into slots, and back from both formats of files."""
    model = biased(united_models("qwen3_moe"))
    united = model.united_of(3)
    model.use_way(3)
    slots = np.asarray(model.table.slots)[:, model.config.num_experts :]
    held = model.pool.read(slots[:, : united.down.shape[1]])
    jax.tree.map(np.testing.assert_array_equal, held, united.experts)
    elements = sum(leaf[0].size for leaf in model.pool.arrays.values())
    assert model.pool.slot_bytes == 4 * elements == 4 * layout.expert_parameters(model.config)
    save_native(tmp_path, model.config, model.weights)
    _, back = load_native(tmp_path, jnp.dtype("float32"))
    jax.tree.map(np.testing.assert_array_equal, back.pool, model.pool)
    own = {way: {**one.experts.arrays, "groups": one.groups} for way, one in model.united.items()}
    write_united(tmp_path, own, weights_digest(tmp_path))
    found = load_united(tmp_path, model.config)
    jax.tree.map(np.testing.assert_array_equal, found[3].experts, united.experts)


def test_the_mosaic_kernels_are_chosen_for_the_activations_that_they_know():
    sizes = {"rows": 16, "d": 128, "f": 128}
    bf16 = jnp.bfloat16
    pool = jmoe.experts.ExpertPool(
        jnp.zeros((4, sizes["d"], 2 * sizes["f"]), bf16), jnp.zeros((4, sizes["f"], 128), bf16)
    )
    wide = pool._replace(down=jnp.zeros((4, 2 * sizes["f"], 128), bf16))
    h, ids = jnp.zeros((16, 128), bf16), jnp.zeros((16, 1), jnp.int32)
    for activation, is_kernel in (
        (SILU, True),
        (Gelu(), False),
        (ClampedSwiglu(), True),
        (Relu2(), True),  # of a network of twice that width
    ):
        given = {"max_active": 4, "activation": activation}

        def run(h, ids, given=given):
            own = wide if up_matrices(given["activation"]) == 1 else pool
            return compute(own, h, jnp.ones((16, 1)), ids, jnp.arange(4, dtype=jnp.int32), **given)

        with traced_for("cuda"), noting() as noted:
            jax.jit(run).trace(h, ids)
        assert (noted["grouped GEMM"] == KERNEL) == is_kernel


def test_two_activations_are_two_configurations():
    cfg = read_config(GOLDEN)
    shown = {repr(replace(cfg, activation=one)) for one in [*ALL, Gelu()]}
    assert len(shown) == len(ALL)


def test_what_has_no_room_for_one_refuses_it_by_name(tmp_path):
    model = jmoe.load(GOLDEN, "float32")
    cfg = replace(model.config, activation=Squared())
    with pytest.raises(ValueError, match=r"activation is Squared\(\); jmoe's own format can name"):
        jmoe.checkpoint.save_native(tmp_path, cfg, model.weights)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="hidden_act"):
        from_hf({**_raw(), "hidden_act": "gelu"})


def _raw():
    import json

    return json.loads((GOLDEN / "config.json").read_text())


@pytest.mark.parametrize("fmt", ["fp8", "int4", "mxfp4"])
def test_experts_without_a_gate_are_kept_in_fewer_bits(fmt):
    """Of a width that fp8 fills up to whole blocks."""
    rng = np.random.default_rng(5)
    up, down = (rng.normal(size=(3, *of)).astype(np.float32) for of in ((128, 96), (96, 128)))
    pool = jmoe.experts.ExpertPool(jnp.asarray(up), jnp.asarray(down))
    kept = QuantizedPool.of(pool, "float32", fmt)
    plain = kept.plain()
    assert (plain.gate_up.shape, plain.down.shape) == (up.shape, down.shape)
    step = {"fp8": 0.07, "int4": 0.2, "mxfp4": 0.3}[fmt]
    assert np.abs(plain.gate_up - up).max() < step * np.abs(up).max()
    h, ids = jnp.asarray(rng.normal(size=(4, 128)), jnp.float32), jnp.arange(4)[:, None] % 3
    given = {"max_active": 3, "activation": Relu2()}
    slots, ones = jnp.arange(3, dtype=jnp.int32), jnp.ones((4, 1))
    got, want = (compute(one, h, ones, ids, slots, **given)[0] for one in (kept, plain))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-2)
