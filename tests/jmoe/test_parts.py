"""A step that runs in parts is the step that runs whole, wherever it is cut, parked and joined."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.brownout import strategy_code
from jmoe.model import unstack
from jmoe.packed_rows import empty_deltas, empty_rows, pack_row
from jmoe.steps import decode_step, make_state, prefill_step

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

CASES = ["qwen2_moe", "qwen3_moe_mixed_yarn"]  # the mixed one has runs of dense and of MoE layers
SLOTS, PAGE, BLOCKS, TOKENS, CHUNKS = 4, 4, 4, 16, 3
PROMPTS = ([5, 60, 17, 33, 8], [41, 12, 3], [9, 40, 2, 7, 11, 30])


@cache
def served(root, case):
    """Returns the model, and its two steps compiled as a server does."""
    model = jmoe.load(root / "tests" / "golden" / case, dtype="float32")
    options = {"max_active": model.config.num_experts}
    prefill = jax.jit(partial(prefill_step, model.config, **options))
    decode = jax.jit(partial(decode_step, model.config, **options))
    return model, prefill, decode


@pytest.fixture(params=CASES)
def setup(request):
    return served(request.config.rootpath, request.param)


def empty(model, num_hidden=SLOTS + 2 * TOKENS):
    state = make_state(
        model.config,
        num_slots=SLOTS,
        num_pages=SLOTS * BLOCKS,
        page_size=PAGE,
        max_blocks=BLOCKS,
        dtype=model.dtype,
        num_hidden=num_hidden,
    )
    pages = jnp.arange(SLOTS * BLOCKS, dtype=jnp.int32).reshape(SLOTS, BLOCKS)
    return state._replace(block_table=pages)


def control(model, first=0, stop=None, percent=50):
    stop = model.config.num_layers if stop is None else stop
    return np.array([percent, strategy_code("full"), first, stop], np.int32)


def prefill_arrays(prompts, place=SLOTS):
    """Returns tokens, rows, deltas and places of prompts by slot."""
    tokens, rows = np.zeros(TOKENS, np.int32), empty_rows(CHUNKS)
    places = np.full(TOKENS, SLOTS + 2 * TOKENS, np.int32)
    at = 0
    for row, (slot, prompt) in enumerate(prompts.items()):
        tokens[at : at + len(prompt)] = prompt
        places[at : at + len(prompt)] = place + at + np.arange(len(prompt))
        rows[row] = pack_row(slot, kv_len=len(prompt), q_len=len(prompt))
        at += len(prompt)
    return tokens, rows, empty_deltas(1), places


def prefill(setup, state, arrays, first=0, stop=None, percent=50):
    model, step, _ = setup
    tokens, rows, deltas, places = arrays
    told = control(model, first, stop, percent)
    return step(model.weights, state, tokens, rows, deltas, told, places)


def decode(setup, state, rows, first=0, stop=None):
    model, _, step = setup
    return step(model.weights, state, rows, empty_deltas(1), control(model, first, stop))


def decode_rows(lengths):
    rows = empty_rows(SLOTS)
    for row, (slot, kv_len) in enumerate(lengths.items()):
        rows[row] = pack_row(slot, kv_len=kv_len)
    return rows


def same(state, other):
    """Returns whether pages (but for the padding page) and newest tokens have the same bits."""
    for a, b in zip(state.pages, other.pages, strict=True):
        np.testing.assert_array_equal(a[:, :-1], b[:, :-1])
    np.testing.assert_array_equal(state.last_token, other.last_token)


@pytest.mark.deep
@pytest.mark.sized(exhaustive=("qwen3_moe_mixed_yarn",))
def test_parts_are_the_whole_wherever_it_is_cut(setup):
    model, layers = setup[0], setup[0].config.num_layers
    arrays = prefill_arrays(dict(enumerate(PROMPTS)))
    whole, want = prefill(setup, empty(model), arrays)
    rows = decode_rows({slot: len(prompt) + 1 for slot, prompt in enumerate(PROMPTS)})
    decoded, wanted = decode(setup, whole, rows)
    assert int(want.degraded.sum()) > 0
    for cuts in ([0, 1, layers], [0, layers - 1, layers], list(range(layers + 1))):
        state, degraded, expert_rows = empty(model), 0, 0
        for first, stop in itertools.pairwise(cuts):
            state, out = prefill(setup, state, arrays, first, stop)
            degraded, expert_rows = degraded + out.degraded, expert_rows + out.expert_rows
            if stop < layers:  # a token comes of the last layer only
                assert not np.any(state.last_token)
        same(state, whole)
        np.testing.assert_array_equal(out.tokens, want.tokens)
        np.testing.assert_array_equal(out.logprobs, want.logprobs)
        np.testing.assert_array_equal(degraded, want.degraded)
        np.testing.assert_array_equal(expert_rows, want.expert_rows)
        for first, stop in itertools.pairwise(cuts):
            state, out = decode(setup, state, rows, first, stop)
        same(state, decoded)
        np.testing.assert_array_equal(out.logprobs[:3], wanted.logprobs[:3])


@pytest.mark.deep
@pytest.mark.sized(exhaustive=("qwen3_moe_mixed_yarn",))
def test_the_program_for_parts_is_the_one_without(setup):
    model = setup[0]
    arrays = prefill_arrays(dict(enumerate(PROMPTS)))
    _, out = prefill(setup, empty(model), arrays)
    _, want = prefill(setup, empty(model, num_hidden=0), arrays)
    np.testing.assert_array_equal(out.tokens[:3], want.tokens[:3])
    np.testing.assert_allclose(out.logprobs[:3], want.logprobs[:3], atol=2e-5)
    np.testing.assert_array_equal(out.expert_rows, want.expert_rows)


@pytest.mark.sized(
    deep=(
        "qwen3_moe_mixed_yarn",
        "qwen2_moe",
    )
)
def test_a_parked_step_goes_on_after_another_and_they_may_join(setup):
    model = setup[0]
    both = prefill_arrays({0: PROMPTS[0], 1: PROMPTS[1]})
    want, wanted = prefill(setup, empty(model), both)
    parked = prefill_arrays({0: PROMPTS[0]})
    other = prefill_arrays({1: PROMPTS[1]}, place=SLOTS + TOKENS)
    state, _ = prefill(setup, empty(model), parked, 0, 1)
    # The other one overtakes it, whole.
    state, _ = prefill(setup, state, other)
    state, _ = prefill(setup, state, parked, 1)
    # Or they meet at layer 1: the rows of both, each where it waits.
    joined, _ = prefill(setup, empty(model), parked, 0, 1)
    joined, _ = prefill(setup, joined, other, 0, 1)
    tokens, rows, deltas, places = both
    n = len(PROMPTS[0])
    places[n : n + len(PROMPTS[1])] = other[3][: len(PROMPTS[1])]
    joined, met = prefill(setup, joined, (tokens, rows, deltas, places), 1)
    np.testing.assert_array_equal(met.tokens[:2], wanted.tokens[:2])
    assert np.asarray(joined.last_token)[:2].tolist() == np.asarray(want.last_token)[:2].tolist()


@pytest.mark.deep
def test_exempt_rows_have_the_same_bits_in_any_company(setup):
    model = setup[0]
    alone = prefill_arrays({0: PROMPTS[0]})
    alone[1][0] = pack_row(0, kv_len=5, q_len=5, exempt=True)
    other = prefill_arrays({1: PROMPTS[2]}, place=SLOTS + TOKENS)
    _, want = prefill(setup, empty(model), alone)
    state, _ = prefill(setup, empty(model), other, 0, 1)
    state, _ = prefill(setup, state, alone, 0, 1)
    tokens, rows, deltas, places = prefill_arrays({0: PROMPTS[0], 1: PROMPTS[2]})
    rows[0] = alone[1][0]
    places[5:11] = other[3][:6]
    state, out = prefill(setup, state, (tokens, rows, deltas, places), 1)
    assert out.logprobs[0] == want.logprobs[0]
    assert out.tokens[0] == want.tokens[0]


@pytest.mark.sized(deep=("qwen3_moe_mixed_yarn",))
def test_a_row_that_left_writes_nothing_more_and_changes_no_other(setup):
    """Its slot and pages may be another's by then."""
    model = setup[0]
    both = prefill_arrays({0: PROMPTS[0], 1: PROMPTS[1]})
    state, _ = prefill(setup, empty(model), both, 0, 1)
    tokens, rows, deltas, places = prefill_arrays({1: PROMPTS[1]}, place=SLOTS + len(PROMPTS[0]))
    after, _ = prefill(setup, state, (tokens, rows, deltas, places), 1)
    for now, before in zip(after.pages, state.pages, strict=True):
        np.testing.assert_array_equal(now[:, :BLOCKS], before[:, :BLOCKS])  # slot 0's pages
    assert after.last_token[0] == state.last_token[0]
    _, wanted = prefill(setup, empty(model), prefill_arrays({1: PROMPTS[1]}), percent=100)
    exact, _ = prefill(setup, empty(model), both, 0, 1, percent=100)
    _, out = prefill(setup, exact, (tokens, rows, deltas, places), 1, percent=100)
    assert out.logprobs[0] == wanted.logprobs[0]


@pytest.mark.deep
@pytest.mark.sized(
    exhaustive=("qwen2_moe-cuts0", "qwen3_moe_mixed_yarn-cuts0", "qwen3_moe_mixed_yarn-cuts1")
)
@pytest.mark.parametrize("cuts", [(0, 1, 3, 4), (0, 2, 4)])
def test_a_program_for_each_part_is_the_whole_too(setup, cuts):
    """As a GPU has them: its layers are known when it is compiled, and in arrays of their own."""
    model, layers = setup[0], setup[0].config.num_layers
    cuts = sorted({min(cut, layers) for cut in cuts})
    weights = model.weights._replace(params=unstack(model.params))
    options = {"max_active": model.config.num_experts}

    def run(step, state, arrays, part):
        tokens, rows, deltas, places = arrays
        args = (tokens, rows, deltas) if step is prefill_step else (rows, deltas)
        last = (places,) if step is prefill_step else ()
        jitted = jax.jit(partial(step, model.config, layers=part, **options))
        return jitted(weights, state, *args, control(model, 9, 9), *last)

    def run_all(cuts):
        """Runs a prefill and a decode step, both cut at these layers."""
        state, arrays, found = empty(model), prefill_arrays(dict(enumerate(PROMPTS))), []
        rows = decode_rows({slot: len(prompt) + 1 for slot, prompt in enumerate(PROMPTS)})
        decoded = None, rows, empty_deltas(1), None
        for step, given in ((prefill_step, arrays), (decode_step, decoded)):
            rows, degraded, out = [], 0, None
            for first, stop in itertools.pairwise(cuts):
                state, out = run(step, state, given, range(first, stop))
                assert (out.tokens is None) == (stop < layers)
                rows.append(out.expert_rows)
                degraded = degraded + out.degraded
            found.append((out.tokens[:3], out.logprobs[:3], jnp.concatenate(rows), degraded[:3]))
        return state, found

    (state, found), (whole, wanted) = run_all(cuts), run_all((0, layers))
    same(state, whole)
    for got, want in zip(found, wanted, strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
