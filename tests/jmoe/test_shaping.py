"""Changed logits against a plain loop in NumPy, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmoe.packed_rows import (
    NUM_SHAPE_COLUMNS,
    TOP,
    everything,
    num_words,
    pack_seat,
    pack_shape,
)
from jmoe.sampling import Sampling, sample
from jmoe.shaping import draw, make_shaping, seat

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

VOCAB, SLOTS, MAX_LEN = 70, 5, 12
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}

_seat, _draw = jax.jit(seat), jax.jit(draw, static_argnames="truncate")


def sampling_of(*rows: dict) -> Sampling:
    kinds = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "seed": np.uint32}
    return Sampling(*(jnp.array([r[name] for r in rows], kind) for name, kind in kinds.items()))


def bits(allowed: set[int]) -> np.ndarray:
    words = np.zeros(num_words(VOCAB), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)[None]


def by_hand(logits, prompt, output, biases, allowed, shape) -> np.ndarray:
    """Changes the logits of one row as the docstring of `draw` says."""
    found = np.full(VOCAB, -np.inf)
    for token in range(VOCAB):
        if token not in allowed:
            continue
        value = float(logits[token]) + dict(biases).get(token, 0.0)
        if token in prompt or token in output:
            penalty = shape["repetition_penalty"]
            value = value / penalty if value > 0 else value * penalty
        times = output.count(token)
        value -= shape["frequency_penalty"] * times
        value -= shape["presence_penalty"] if times else 0.0
        found[token] = value
    return found


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=5)


@pytest.mark.deep
@settings(max_examples=60)
@given(
    prompt=tokens.filter(bool),
    output=tokens,
    biases=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-20, 20), max_size=6),
    allowed=st.sets(st.integers(0, VOCAB - 1), min_size=1),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.5, 2),
    seed=st.integers(0, 99),
)
def test_greedy_rows_take_the_likeliest_of_what_a_loop_leaves(
    prompt, output, biases, allowed, presence, frequency, repetition, seed
) -> None:
    shape = {
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "repetition_penalty": repetition,
    }
    logits = np.random.default_rng(seed).normal(0, 3, (1, VOCAB)).astype(np.float32)
    biases = list(biases.items())
    shaping = _seat(make_shaping(SLOTS, VOCAB), pack_seat(2, prompt, output, biases, MAX_LEN))
    output = list(output)
    for position in range(4):  # the device counts what it draws
        shaping, drawn = _draw(
            shaping,
            logits,
            sampling_of(GREEDY),
            np.array([position]),
            np.array([2]),
            pack_shape(**shape)[None],
            bits(allowed),
        )
        left = by_hand(logits[0], prompt, output, biases, allowed, shape)
        token = int(drawn.tokens[0])
        assert token in allowed
        assert left[token] >= left.max() - 1e-4
        output.append(token)


@pytest.mark.deep
def test_rows_that_are_not_shaped_get_what_they_would_get_alone() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (4, VOCAB)).astype(np.float32)
    rows = [
        GREEDY,
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3},
        {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "seed": 4},
        GREEDY,
    ]
    positions, slots = np.array([3, 4, 5, 0]), np.array([0, 1, 2, -1])
    shaping = make_shaping(SLOTS, VOCAB)
    for slot in range(3):  # what an earlier sequence left there counts for nothing
        shaping = _seat(shaping, pack_seat(slot, [1], [2, 2], [(9, 50.0)], MAX_LEN))
    shapes = np.zeros((4, NUM_SHAPE_COLUMNS), np.int32)
    nothing = np.zeros((4, num_words(VOCAB)), np.int32)
    after, drawn = _draw(shaping, logits, sampling_of(*rows), positions, slots, shapes, nothing)
    alone, logprobs = sample(jnp.asarray(logits), sampling_of(*rows), jnp.asarray(positions))
    np.testing.assert_array_equal(drawn.tokens, alone)
    np.testing.assert_array_equal(drawn.logprobs, logprobs)
    np.testing.assert_array_equal(after.counts, shaping.counts)


@pytest.mark.parametrize(("min_p", "left"), [(0.0, {0, 1, 2, 3}), (0.2, {0, 1}), (1.0, {0})])
def test_min_p_leaves_out_what_is_unlikely_beside_the_likeliest(min_p, left) -> None:
    logits = np.full((1, VOCAB), -1e9, np.float32)
    logits[0, :4] = np.log([0.6, 0.3, 0.07, 0.03])
    found = set()
    for seed in range(300):
        row = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": seed}
        _, drawn = _draw(
            make_shaping(SLOTS, VOCAB),
            logits,
            sampling_of(row),
            np.array([1]),
            np.array([0]),
            pack_shape(min_p=min_p)[None],
            everything(1, VOCAB),
        )
        found.add(int(drawn.tokens[0]))
    assert found == left


def test_the_likeliest_tokens_come_with_their_log_probabilities() -> None:
    logits = np.random.default_rng(1).normal(0, 2, (2, VOCAB)).astype(np.float32)
    shapes = np.stack([pack_shape(), pack_shape(repetition_penalty=2.0)])
    _, drawn = _draw(
        make_shaping(SLOTS, VOCAB),
        logits,
        sampling_of(GREEDY, GREEDY),
        np.array([1, 1]),
        np.array([0, 1]),
        shapes,
        everything(2, VOCAB),
    )
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    order = np.argsort(-wide, axis=-1, kind="stable")[:, :TOP]
    np.testing.assert_array_equal(drawn.top_ids, order)
    np.testing.assert_allclose(
        drawn.top_logprobs, np.take_along_axis(logprobs, order, -1), atol=1e-5
    )
    np.testing.assert_allclose(drawn.logprobs, drawn.top_logprobs[:, 0])


def test_a_seat_forgets_what_its_slot_held_and_leaves_others_alone() -> None:
    shaping = _seat(make_shaping(SLOTS, VOCAB), pack_seat(1, [5], [6, 6], [(3, 2.0)], MAX_LEN))
    shaping = _seat(shaping, pack_seat(2, [7], [], [], MAX_LEN))
    counts = np.zeros((SLOTS, VOCAB), np.int32)
    counts[1, [5, 6]], counts[2, 7] = [1, 5], 1
    np.testing.assert_array_equal(shaping.counts, counts)
    assert float(shaping.bias[1, 3]) == 2.0
    shaping = _seat(shaping, pack_seat(1, [8], [8], [], MAX_LEN))
    counts[1] = 0
    counts[1, 8] = 3
    np.testing.assert_array_equal(shaping.counts, counts)
    assert not np.any(shaping.bias)
    np.testing.assert_array_equal(
        _seat(shaping, pack_seat(-1, [9], [], [], MAX_LEN)).counts, counts
    )
