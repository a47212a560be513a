"""Layers that attend to a sliding window, beside others that attend to all: against NumPy loops,
and against transformers where `config_changes.npz` has a window.
"""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy_forward
import pytest

import jmoe
from jmoe.attention import FULL, ByKind, Paged, page_bytes, page_windows
from jmoe.config import read_config
from jmoe.model import unstack
from jmoe.packed_rows import empty_deltas, pack_row
from jmoe.steps import decode_step, make_state, prefill_step

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

RNG = np.random.default_rng(3)
TOKENS = RNG.integers(0, 40, (2, 40)).astype(np.int32)
SLIDES = {"use_sliding_window": True, "sliding_window": 5}
QWEN2 = {**SLIDES, "layer_types": ["sliding_attention", "full_attention"]}
QWEN3 = "qwen3_moe_mixed_yarn"  # four layers, dense and MoE ones


@pytest.fixture
def windowed(copy, edit_config):
    """Loads a golden model with other keys, or with other attention of its layers."""

    def load(case, attention=(), **keys):
        directory = copy(case)
        edit_config(directory, **keys)
        model = jmoe.load(directory, dtype="float32")
        if not attention:
            return model
        model = replace(model, config=replace(model.config, layer_attention=attention))
        return with_sinks(model)

    return load


def with_sinks(model):
    """Returns the model with drawn sinks, of both signs, where its layers have any."""
    cfg, segments = model.config, []
    for (_, first, count), segment in zip(cfg.segments(), model.params["segments"], strict=True):
        sinks = 3 * np.random.default_rng(first).normal(size=(count, cfg.num_heads))
        more = {"sinks": jnp.asarray(sinks, jnp.float32)} if cfg.has_sinks(first) else {}
        segments.append(segment | more)
    return model.with_weights(params={**model.params, "segments": tuple(segments)})


CASES = {
    "one kind": ("qwen3_moe", (), SLIDES),
    "mixtral": ("mixtral", (), {"sliding_window": 7}),
    "first layer": ("qwen2_moe", (), QWEN2),
    "in turn": (QWEN3, (Paged(4), FULL, Paged(4), FULL), {}),
    "three kinds": (QWEN3, (FULL, Paged(3), Paged(3), Paged(9)), {}),
    "sinks": (QWEN3, (Paged(4, True), Paged(0, True), Paged(4), Paged(0, True)), {}),
}


@pytest.fixture(params=CASES, ids=str)
def model(request, windowed):
    case, attention, keys = CASES[request.param]
    return windowed(case, attention, **keys)


@pytest.mark.sized(
    deep=(
        "first layer",
        "in turn",
    )
)
def test_whole_sequences_see_what_numpy_sees(model):
    want = numpy_forward.forward(model, TOKENS)
    got = jmoe.forward(model, TOKENS)[:, -1]
    np.testing.assert_allclose(got, want, atol=2e-4)
    full = replace(model, config=replace(model.config, layer_attention=()))
    assert np.abs(numpy_forward.forward(full, TOKENS) - want).max() > 1e-2


@pytest.mark.sized(
    deep=(
        *(f"{name}-64" for name in CASES),
        "in turn-7",
        "three kinds-7",
        "one kind-7",
        "sinks-7",
        "first layer-7",
    )
)
@pytest.mark.parametrize("chunk_size", [7, 64])
def test_chunks_and_decode_steps_over_pages_are_whole_sequences(model, chunk_size):
    prompts = [TOKENS[0].tolist(), TOKENS[1, :3].tolist()]
    out = jmoe.generate(model, prompts, 12, stop_token_ids=[], chunk_size=chunk_size, page_size=4)
    for prompt, tokens, logprobs in zip(prompts, out.tokens, out.logprobs, strict=True):
        for at in (0, 5, 11):
            logits = numpy_forward.forward(model, [prompt + tokens[:at]])[0]
            assert tokens[at] == np.argmax(logits)
            assert logprobs[at] == pytest.approx(
                float(jax.nn.log_softmax(logits)[tokens[at]]), abs=2e-4
            )


@pytest.mark.deep
def test_generating_keeps_no_more_of_a_window_than_what_a_step_reads(windowed):
    model, kept = windowed(*CASES["three kinds"][:2]), []

    def note(done, most):
        pages = [x for x in jax.live_arrays() if x.ndim == 5 and x.shape[3] == 3]
        kept.append(sorted((x.shape[0], x.shape[1] - 1) for x in pages))

    prompts = [TOKENS[0, :11].tolist(), [7]]
    sizes = {"chunk_size": 8, "page_size": 3}
    out = jmoe.generate(model, prompts, 40, stop_token_ids=[], progress=note, **sizes)
    # Of the full layer 51 positions each; of windows of 9 and 3 the 16 and 10 that a chunk reaches.
    assert kept[-1] == [(1, 2 * 6), (1, 2 * 6), (1, 2 * 17), (1, 2 * 17), (2, 2 * 4), (2, 2 * 4)]
    logits = numpy_forward.forward(model, [prompts[0] + out.tokens[0][:-1]])[0]
    assert out.tokens[0][-1] == np.argmax(logits)


jitted = partial(jax.jit, static_argnums=0, static_argnames="max_active")
PROGRAMS = jitted(prefill_step), jitted(decode_step)


def steps(model, *, parts=(), weights=None):
    """Returns logits of a prompt's last row, and of a decode row behind it, run in parts."""
    cfg, weights = model.config, weights or model.weights
    blocks = 12
    state = make_state(
        cfg,
        num_slots=2,
        num_pages=2 * blocks,
        page_size=4,
        max_blocks=blocks,
        dtype=jnp.float32,
        num_hidden=64 if parts else 0,
    )
    table = jnp.arange(2 * blocks, dtype=jnp.int32)[::-1].reshape(2, blocks)
    state = state._replace(block_table=jnp.repeat(table, len(page_windows(cfg)), axis=1))
    prompt = jnp.asarray(TOKENS[0])
    rows = jnp.asarray(np.stack([pack_row(1, kv_len=40, q_len=40)]))
    deltas, found = jnp.asarray(empty_deltas(1)), []
    places = (jnp.arange(40, dtype=jnp.int32) + 2,) if parts else ()
    for step, args in (
        (PROGRAMS[0], (prompt, rows, deltas)),
        (PROGRAMS[1], (jnp.asarray(np.stack([pack_row(1, kv_len=41)])), deltas)),
    ):
        for first, stop in parts or [(0, cfg.num_layers)]:
            control = jnp.asarray([100, 0, first, stop], jnp.int32)
            own = places if step is PROGRAMS[0] else ()
            state, out = step(cfg, weights, state, *args, control, *own, max_active=cfg.num_experts)
        found.append(out.logits)
    return np.concatenate(found)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["in turn", "three kinds"])
def test_parts_and_layers_in_arrays_of_their_own_are_the_same_steps(windowed, name):
    model = windowed(*CASES[name][:2])
    want = steps(model)
    np.testing.assert_allclose(want[0], numpy_forward.forward(model, TOKENS[:1])[0], atol=2e-4)
    for parts in ([(0, 4)], [(0, 1), (1, 3), (3, 4)]):
        np.testing.assert_allclose(steps(model, parts=parts), want, atol=2e-5)
    apart = model.weights._replace(params=unstack(model.params))
    np.testing.assert_allclose(steps(model, weights=apart), want, atol=2e-5)


def test_each_kind_has_a_cache_of_its_own_layers_and_each_window_pages_of_its_own(windowed):
    model = windowed(*CASES["three kinds"][:2])
    assert page_windows(model.config) == (0, 9, 3)
    sizes = {"num_slots": 1, "num_pages": (7, 5, 3), "page_size": 4, "max_blocks": 2}
    state = make_state(model.config, **sizes, dtype=jnp.float32)
    assert isinstance(state.pages, ByKind)
    assert [pages.k.shape[:2] for pages in state.pages.each] == [(1, 8), (2, 4), (1, 6)]
    assert state.block_table.tolist() == [[7, 5, 3, 7, 5, 3]]  # where nobody owns anything
    of_a_layer = page_bytes(replace(model.config, layer_attention=()), 4, jnp.dtype(jnp.float32))
    each = page_bytes(model.config, 4, jnp.dtype(jnp.float32))
    assert [4 * size for size in each] == [of_a_layer[0], of_a_layer[0], 2 * of_a_layer[0]]


@pytest.mark.deep
@pytest.mark.parametrize("name", ["one kind", "in turn", "three kinds"])
def test_pages_behind_the_window_may_be_anybody_s(windowed, name):
    """The table of a window's layers names a page full of NaN where no further row reads."""
    case, attention, keys = CASES[name]
    model = windowed(case, attention, **keys)
    cfg, page, blocks = model.config, 4, 12
    windows = page_windows(cfg)

    def logits(*, poisoned):
        num_pages = blocks + 1
        sizes = {"num_slots": 1, "num_pages": num_pages, "page_size": page, "max_blocks": blocks}
        state = make_state(cfg, **sizes, dtype=jnp.float32)
        pages = jax.tree.map(lambda leaf: leaf.at[:, blocks].set(jnp.nan), state.pages)
        own, found = np.tile(np.arange(blocks)[::-1, None], (1, len(windows))), []
        for start, stop in ((0, 18), (18, 31), (31, 32), (32, 33), (33, 34)):
            for group, window in enumerate(windows):
                if poisoned and window:
                    own[: max(0, start - window + 1) // page, group] = blocks
            table = jnp.asarray(own.reshape(1, -1), jnp.int32)
            state = state._replace(pages=pages, block_table=table)
            rows = jnp.asarray(pack_row(0, kv_len=stop, q_len=stop - start)[None])
            args = (rows, jnp.asarray(empty_deltas(1)), jnp.asarray([100, 0], jnp.int32))
            if stop - start > 1:
                tokens = jnp.asarray(np.resize(TOKENS[0, start:stop], 18))
                args = (tokens, *args)
            step = PROGRAMS[stop - start == 1]
            state, out = step(cfg, model.weights, state, *args, max_active=cfg.num_experts)
            pages = state.pages
            found.append(out.logits)
        return np.concatenate(found), (own == blocks).sum(axis=0)

    (want, _), (got, num_poisoned) = logits(poisoned=False), logits(poisoned=True)
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got).all()
    assert [count > 4 for count in num_poisoned] == [window > 0 for window in windows]


def kinds(copy, edit_config, case, **keys):
    directory = copy(case)
    edit_config(directory, **keys)
    return [kind.window for kind in read_config(directory).layer_attention]


@pytest.mark.parametrize(
    ("case", "keys", "want"),
    [
        ("qwen2_moe", {}, [0, 0]),
        ("qwen2_moe", QWEN2, [5, 0]),
        ("qwen2_moe", SLIDES, [5, 0]),  # as transformers has it without layer_types
        ("qwen2_moe", {**SLIDES, "max_window_layers": 0}, [0, 0]),
        ("qwen2_moe", {**SLIDES, "layer_types": ["sliding_attention"] * 2}, [5, 5]),
        ("qwen2_moe", {**SLIDES, "sliding_window": 128}, [0, 0]),  # never shorter than a sequence
        ("qwen3_moe", SLIDES, [5, 5]),
        ("mixtral", {"sliding_window": 5}, [5, 5]),
        ("mixtral", {"sliding_window": 5, "layer_types": ["sliding_attention"] * 2}, [5, 5]),
    ],
)
def test_the_window_of_each_layer_is_the_one_of_transformers(copy, edit_config, case, keys, want):
    assert kinds(copy, edit_config, case, **keys) == want


def test_a_window_has_the_logits_of_transformers(copy, edit_config, request):
    folder = request.config.rootpath / "tests/golden/mixtral"
    oracle, golden = (np.load(folder / f"{name}.npz") for name in ("config_changes", "golden"))
    row = next(
        outcome
        for path, value, outcome in json.loads(str(oracle["changes"]))
        if (path, value) == (["sliding_window"], 4)
    )
    directory = copy("mixtral")
    edit_config(directory, sliding_window=4)
    got = jmoe.forward(jmoe.load(directory, dtype="float32"), golden["tokens"])[:, -1]
    np.testing.assert_allclose(got, oracle["logits"][row], atol=1e-4)


def test_a_window_below_zero_is_refused():
    with pytest.raises(ValueError, match="window is -1"):
        Paged(-1)
