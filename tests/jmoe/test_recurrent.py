"""Gated DeltaNet over slots, in any mixture of chunks and single rows, against loops in float64."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe import layout
from jmoe.attention import StepRows, is_recurrent, sequence_bytes
from jmoe.config import ConfigError, from_hf, read_config
from jmoe.kv_cache import CacheSizes
from jmoe.recurrent import MIN_LOG_DECAY, GatedDelta, ScanProjection, log_decay

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")
KIND = GatedDelta(key_heads=2, value_heads=4, key=6, value=5, taps=3)
SLOTS, LENGTH, LAYERS = 4, 90, 2


def drawn(seed, length, kind=KIND):
    """Returns what a layer makes of a sequence's rows, as float32 arrays."""
    rng = np.random.default_rng(seed)
    size, heads = (length, kind.channels), (length, kind.value_heads)
    decay = -np.exp(rng.normal(-1, 1.5, heads))
    beta = 1 / (1 + np.exp(-rng.normal(0, 2, heads)))
    taps = np.random.default_rng(0).normal(0, 0.7, (kind.channels, 1, kind.taps))
    return [np.float32(a) for a in (rng.normal(0, 1, size), decay, beta, taps)]


def loops(qkv, decay, beta, taps, kind=KIND):
    """Returns the heads [T, H, V] of one sequence, row by row."""
    qkv, decay, beta, taps = (a.astype(np.float64) for a in (qkv, decay, beta, taps[:, 0]))
    state = np.zeros((kind.value_heads, kind.key, kind.value))
    out, keys = [], kind.key_heads * kind.key
    for t in range(len(qkv)):
        x = sum(taps[:, -1 - back] * qkv[t - back] for back in range(min(t + 1, kind.taps)))
        q, k, v = np.split(x / (1 + np.exp(-x)), [keys, 2 * keys])
        q, k = (a.reshape(kind.key_heads, -1) for a in (q, k))
        q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
        q, k = (np.repeat(a, kind.value_heads // kind.key_heads, axis=0) for a in (q, k))
        v = v.reshape(kind.value_heads, -1)
        state = state * np.exp(decay[t])[:, None, None]
        error = (v - np.einsum("hdv,hd->hv", state, k)) * beta[t][:, None]
        state = state + k[:, :, None] * error[:, None]
        out.append(np.einsum("hdv,hd->hv", state, q) * kind.key**-0.5)
    return np.stack(out)


SEQUENCES = [drawn(seed, LENGTH) for seed in range(6)]
WANTED = [loops(*rows) for rows in SEQUENCES]


ROWS, DECODES, CHUNKS = 40, 4, 3


@jax.jit
def decode_step(cache, layer, mixed, slots, kv_len):
    position = jnp.maximum(kv_len - 1, 0)
    rows = StepRows(TABLE, slots, position, kv_len > 0, slots, kv_len)
    return KIND.step(None, cache, rows)(projection(*mixed), layer, cache)


@partial(jax.jit, static_argnums=6)
def chunk_step(cache, layer, mixed, slots, kv_len, q_start, num_decodes):
    index = jnp.arange(ROWS, dtype=jnp.int32)
    owner = jnp.sum(q_start[None, 1:] <= index[:, None], axis=1)
    valid, owner = owner < len(slots), jnp.minimum(owner, len(slots) - 1)
    position = index  # which no layer of this kind reads
    rows = StepRows(TABLE, slots[owner], position, valid, slots, kv_len, q_start, num_decodes)
    return KIND.step(None, cache, rows)(projection(*mixed), layer, cache)


TABLE = jnp.zeros((SLOTS, 1), jnp.int32)
TAPS = jnp.asarray(SEQUENCES[0][3])


def projection(qkv, decay, beta):
    return ScanProjection(qkv, {"conv": TAPS}, decay, beta)


def run(cache, layer, decodes, chunks):
    """Runs a step of (slot, sequence, first row, number of rows), those that decode before the
    others, and padding. Returns the rows' heads, and the cache.
    """
    taken = [(s, at) for _, s, at, count in (*decodes, *chunks) for at in range(at, at + count)]
    mixed = [
        np.full((ROWS if chunks else DECODES, *whole[0].shape), np.float32(0.5))  # of padding
        for whole in SEQUENCES[0][:3]
    ]
    for to, (s, at) in enumerate(taken):
        for whole, own in zip(mixed, SEQUENCES[s], strict=False):
            whole[to] = own[at]
    nobody = (0, 0, 0, 0)
    places = [*decodes, *[nobody] * (DECODES - len(decodes))] if decodes else []
    num_decodes = len(places)
    places += [*chunks, *[nobody] * (CHUNKS - len(chunks))] if chunks else []
    slots, _, starts, counts = (np.array(column, np.int32) for column in zip(*places, strict=True))
    given = cache, jnp.int32(layer), mixed, slots, starts + counts
    if not chunks:
        out, cache = decode_step(*given)
    else:
        q_start = np.concatenate([[0], np.cumsum(counts, dtype=np.int32)]).astype(np.int32)
        out, cache = chunk_step(*given, q_start, num_decodes)
    return [(s, at, np.asarray(out)[row]) for row, (s, at) in enumerate(taken)], cache


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_of_steps_is_the_loop(seed):
    rng = np.random.default_rng(seed)
    sizes = CacheSizes(1, 1, SLOTS, 1, jnp.dtype("float32"))
    cache = KIND.cache(None, LAYERS, sizes)
    cache = jax.tree.map(lambda leaf: leaf + 7, cache)  # whoever had the slots has left that
    held, layer = {}, seed % LAYERS
    waiting, num_done = list(range(len(SEQUENCES))), 0
    lengths = rng.integers(1, LENGTH, len(SEQUENCES), endpoint=True).tolist()
    while waiting or held:
        for slot in range(SLOTS):
            if slot not in held and waiting:
                held[slot] = [waiting.pop(), 0]
        decodes, chunks, room = [], [], ROWS
        for slot in rng.permutation(list(held)).tolist():
            s, at = held[slot]
            most = min(lengths[s] - at, room - DECODES, 30)
            count = int(rng.choice([0, 1, 1, rng.integers(0, most, endpoint=True)]))
            if count == 1 and rng.random() < 0.7:
                decodes.append((slot, s, at, 1))
            elif count and len(chunks) < CHUNKS:
                chunks.append((slot, s, at, count))
                room -= count
        if not decodes and not chunks:
            continue
        found, cache = run(cache, layer, decodes, chunks)
        for s, at, heads in found:
            np.testing.assert_allclose(heads, WANTED[s][at], rtol=0, atol=2e-5)
            num_done += 1
        for slot, s, at, count in (*decodes, *chunks):
            held[slot][1] = at + count
            if at + count == lengths[s]:
                del held[slot]
    assert num_done == sum(lengths)
    np.testing.assert_array_equal(cache[1][1 - layer], 7)  # the other layer's
    np.testing.assert_array_equal(cache[0][1 - layer], 7)


@pytest.mark.parametrize("length", [7, 64, 90])
def test_whole_sequences_and_packed_items_are_the_loop(length):
    mixed = [np.concatenate([one[i][:length] for one in SEQUENCES[:2]]) for i in range(3)]
    given = projection(*map(jnp.asarray, mixed))
    want = np.concatenate([one[:length] for one in WANTED[:2]])
    out, cache = KIND.causal(2, length)(given, jnp.int32(0), None)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-5)
    assert cache is None
    starts = jnp.zeros(2 * length, bool).at[jnp.array([0, length])].set(True)
    one_row = KIND.packed(jnp.array([0, 2 * length], jnp.int32), 2 * length, starts)
    np.testing.assert_allclose(one_row(given, jnp.int32(0), None)[0], want, rtol=0, atol=2e-5)


def test_a_decay_is_finite_whatever_the_weights_say():
    rates = jnp.array([95.0, 3e38, -3e38, 0.0])
    dt = jnp.repeat(jnp.array([[0.0], [1e-30], [3e38]]), 4, axis=1)
    found = np.asarray(log_decay(rates, dt))
    assert np.isfinite(found).all()
    assert (found[0] == 0).all()  # a row whose dt is 0 keeps all
    assert (found[2, :2] == MIN_LOG_DECAY).all()
    near = log_decay(jnp.array([0.5]), jnp.array([[0.25]]))
    assert float(near[0, 0]) == pytest.approx(-np.exp(0.5) * 0.25, rel=1e-6)


def test_hard_decays_leave_later_rows_as_they_are():
    """A row that forgets all among such as forget next to nothing."""
    qkv, _, beta = (one[:80].copy() for one in SEQUENCES[1][:3])
    decay = np.full((80, KIND.value_heads), -1e-3, np.float32)
    decay[::7] = MIN_LOG_DECAY
    given = projection(*map(jnp.asarray, (qkv, decay, beta)))
    out, _ = KIND.causal(1, 80)(given, jnp.int32(0), None)
    np.testing.assert_allclose(out, loops(qkv, decay, beta, SEQUENCES[0][3]), rtol=0, atol=2e-5)


def test_gradients_are_those_of_the_loop():
    def of_blocks(qkv, decay, beta):
        rows = KIND.causal(1, len(qkv))
        return jnp.sum(jnp.sin(rows(projection(qkv, decay, beta), jnp.int32(0), None)[0]))

    given = [jnp.asarray(a[:21]) for a in SEQUENCES[3][:3]]
    found = jax.grad(of_blocks, argnums=(0, 1, 2))(*given)

    def of_loops(arrays):
        return np.sin(loops(*arrays, SEQUENCES[0][3])).sum()

    rng, step = np.random.default_rng(1), 1e-6
    arrays = [np.asarray(a, np.float64) for a in given]
    for which, gradient in enumerate(found):
        assert np.isfinite(gradient).all()
        way = rng.normal(size=gradient.shape)
        moved = [
            of_loops([a + sign * step * way if i == which else a for i, a in enumerate(arrays)])
            for sign in (1, -1)
        ]
        slope = (moved[0] - moved[1]) / (2 * step)
        assert float(np.sum(np.asarray(gradient) * way)) == pytest.approx(slope, rel=2e-3, abs=2e-3)


def test_layers_of_two_recurrent_kinds_are_stacked_apart(request):
    cfg = read_config(request.config.rootpath / "tests" / "golden" / "lfm2_moe")
    first = cfg.layer_attention[0]
    kinds = (first, replace(first, taps=first.taps + 1)) * cfg.num_layers
    cfg = replace(cfg, layer_attention=kinds[: cfg.num_layers])
    assert [count for _, _, count in cfg.segments()] == [1] * cfg.num_layers
    assert {layout.layer(cfg, at, True)["conv"].shape[-1] for at in (0, 1)} == {
        first.taps,
        first.taps + 1,
    }


def test_what_a_sequence_keeps_is_told():
    cfg = SimpleNamespace(layer_attention=(KIND, KIND), attention_kinds=(KIND,))
    kept = 2 * (4 * 4 * 6 * 5 + 2 * 2 * KIND.channels)  # float32 states, bfloat16 inputs
    assert sequence_bytes(cfg, jnp.dtype("bfloat16")) == kept
    assert is_recurrent(cfg)


@pytest.mark.parametrize(
    ("case", "key", "value", "wanted"),
    [
        ("qwen3_next", "linear_conv_kernel_dim", 65, "an integer from 2 to 64"),
        ("lfm2_moe", "conv_L_cache", 1, "an integer from 2 to 64"),
        ("granitemoehybrid", "mamba_d_conv", 10**6, "an integer from 2 to 64"),
        ("granitemoehybrid", "time_step_limit", [2.0, 1.0], "the least first"),
        ("granitemoehybrid", "time_step_limit", [float("nan"), 1.0], "the least first"),
        ("qwen3_next", "linear_num_value_heads", 5, "a multiple of linear_num_key_heads"),
        ("nemotron_h", "hybrid_override_pattern", "ME?*E", r"a text of M, \*, E, -"),
        ("nemotron_h", "hybrid_override_pattern", "MEE*E", "follow attention or Mamba; block 2"),
        ("nemotron_h", "hybrid_override_pattern", "M*M*M", r"one block is 'moe' \(E\)"),
        ("nemotron_h", "layers_block_type", [["moe"], "mamba"], "a list of linear_attention"),
        ("nemotron_h", "num_hidden_layers", 4, r"how many blocks .* has \(5\)"),
        ("nemotron_h", "n_groups", 3, r"a divisor of mamba_num_heads \(4\)"),
        ("nemotron_h", "norm_eps", 0.5, "the same as layer_norm_epsilon"),
    ],
)
def test_what_no_program_can_have_is_refused_by_name(request, case, key, value, wanted):
    path = request.config.rootpath / "tests" / "golden" / case / "config.json"
    with pytest.raises(ConfigError, match=f"{key} is .*{wanted}"):
        from_hf(json.loads(path.read_text()) | {key: value})
