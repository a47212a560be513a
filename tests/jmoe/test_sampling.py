"""Sampling: the sets that top-k and top-p leave, the distribution within them, and its seeds."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe import steps
from jmoe.config import read_config
from jmoe.packed_rows import TOP_PROMPT, empty_rows, pack_row, sampling_mode
from jmoe.sampling import Sampling, sample
from jmoe.steps import sample_step

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

VOCAB = 50
GOLDEN = Path(__file__).parents[1] / "golden" / "qwen2_moe"
_sample = jax.jit(sample)
_sample_whole = jax.jit(partial(sample, truncate=False))


def draw(logits, *, temperature=1.0, top_k=0, top_p=1.0, seed=0, position=0):
    """Draws tokens for rows `logits`; the other arguments are one value, or one a row."""
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    rows = len(logits)

    def spread(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (rows,)))

    sampling = Sampling(
        spread(temperature, np.float32),
        spread(top_k, np.int32),
        spread(top_p, np.float32),
        spread(seed, np.uint32),
    )
    arrays = jnp.asarray(logits), sampling, spread(position, np.int32)
    tokens, logprobs = _sample(*arrays)
    if np.all(np.asarray(top_k) == 0) and np.all(np.asarray(top_p) == 1):
        for got, want in zip(_sample_whole(*arrays), (tokens, logprobs), strict=True):
            np.testing.assert_array_equal(got, want)
    return np.asarray(tokens), np.asarray(logprobs)


def many(logits, n=20_000, **kwargs):
    """Returns n draws from one distribution, each with a seed of its own."""
    return draw(np.tile(np.float32(logits), (n, 1)), seed=np.arange(n), **kwargs)[0]


@pytest.fixture(scope="module")
def logits():
    return np.random.default_rng(0).normal(size=(64, VOCAB)) * 2


def test_temperature_zero_is_greedy_and_ties_go_to_the_lower_id(logits):
    tokens, logprobs = draw(logits, temperature=0, top_k=3, top_p=0.5)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    norm = np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(logprobs, logits.max(-1) - norm, rtol=0, atol=1e-5)
    assert draw([[1.0, 3.0, 3.0]], temperature=0)[0] == [1]


def test_logprobs_are_of_the_unmodified_distribution(logits):
    tokens, logprobs = draw(logits, temperature=0.7, top_k=5, seed=np.arange(64))
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(logprobs, np.log(p[np.arange(64), tokens]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kwargs", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}])
def test_the_narrowest_cut_is_greedy(logits, kwargs):
    tokens, _ = draw(logits, temperature=5.0, seed=np.arange(64), **kwargs)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def kept_by_hand(logits, temperature, top_k, top_p):
    """Returns the token ids that may be drawn: by probability, ties by id; the crossing token
    included.
    """
    scaled = np.asarray(logits, np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if top_k:
        order = order[:top_k]
    p = np.exp(scaled[order] - max(scaled[order]))
    p /= p.sum()
    kept, mass = [], 0.0
    for token, probability in zip(order, p, strict=True):
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += probability
    return kept


SMALL = np.random.default_rng(3).normal(size=8) * 1.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.6), (5, 0.8), (100, 0.9), (2, 0.1)]
)
def test_distribution(temperature, top_k, top_p):
    """Chi-square against the distribution by hand, and nothing outside the set it leaves."""
    n = 20_000
    tokens = many(SMALL, n, temperature=temperature, top_k=top_k, top_p=top_p)
    kept = kept_by_hand(SMALL, temperature, top_k, top_p)
    p = np.zeros(len(SMALL))
    p[kept] = np.exp(SMALL[kept] / temperature - max(SMALL / temperature))
    p /= p.sum()
    count = np.bincount(tokens, minlength=len(SMALL))
    assert set(np.flatnonzero(count)) <= set(kept)
    expected = n * p[kept]
    common = expected > 5
    chi2 = ((count[kept] - expected)[common] ** 2 / expected[common]).sum()
    # The 99.99 % point for up to 7 degrees of freedom is 29.9; seeds are fixed, so no flakes.
    assert chi2 < 29.9


def test_ties_at_the_cut_go_to_lower_ids():
    tokens = many([1.0, 2.0, 2.0, 2.0, 2.0], 2_000, top_k=3)
    assert set(tokens.tolist()) == {1, 2, 3}
    tokens = many([0.0] * 10, 2_000, top_p=0.35)
    assert set(tokens.tolist()) == {0, 1, 2, 3}


@pytest.mark.deep
def test_top_p_of_one_cuts_nothing():
    """Not even what rounding of the cumulated probabilities would: a long tail of rare tokens."""
    n = 1_500
    logits = np.full(2_000, -12.0, np.float32)
    logits[7] = 0.0
    cut = many(logits, n, temperature=1.0, top_k=2_000)  # goes through the sort, cuts nothing
    whole = many(logits, n, temperature=1.0)
    np.testing.assert_array_equal(cut, whole)
    assert len(set(whole.tolist())) > 5


def test_a_row_draws_the_same_in_any_batch(logits):
    kwargs = {"temperature": 1.3, "top_k": 20, "top_p": 0.9}
    alone = [int(draw(row, seed=i, position=9, **kwargs)[0][0]) for i, row in enumerate(logits[:8])]
    order = np.random.default_rng(1).permutation(64)
    tokens, _ = draw(logits[order], seed=order, position=9, **kwargs)
    assert [int(tokens[np.flatnonzero(order == i)[0]]) for i in range(8)] == alone
    # Nor do neighbours' settings matter: half the rows greedy, half of them uncut.
    mixed = {
        "temperature": np.where(np.arange(64) < 8, 1.3, 0.0),
        "top_k": np.where(np.arange(64) < 8, 20, 0),
        "top_p": np.where(np.arange(64) < 8, 0.9, 1.0),
    }
    tokens, _ = draw(logits, seed=np.arange(64), position=9, **mixed)
    assert tokens[:8].tolist() == alone
    np.testing.assert_array_equal(tokens[8:], logits[8:].argmax(-1))


def test_an_uncut_row_draws_the_same_beside_a_row_that_is_cut(logits):
    alone = draw(logits, temperature=1.0, seed=np.arange(64))[0]
    beside = draw(
        logits, temperature=1.0, seed=np.arange(64), top_k=np.where(np.arange(64) == 0, 2, 0)
    )[0]
    np.testing.assert_array_equal(alone[1:], beside[1:])


def test_seed_and_position_decide(logits):
    first = draw(logits, seed=5, position=3)[0]
    np.testing.assert_array_equal(first, draw(logits, seed=5, position=3)[0])
    assert (first != draw(logits, seed=6, position=3)[0]).any()
    assert (first != draw(logits, seed=5, position=4)[0]).any()
    assert draw(logits, seed=2**32 - 1)[0].shape == (64,)


def test_extreme_temperatures(logits):
    cold, logprobs = draw(logits, temperature=1e-9, seed=np.arange(64))
    np.testing.assert_array_equal(cold, logits.argmax(-1))
    assert np.isfinite(logprobs).all()
    hot = many(SMALL, temperature=1e9)
    count = np.bincount(hot, minlength=8)
    assert abs(count / len(hot) - 1 / 8).max() < 0.01


def test_masked_logits_are_never_drawn():
    logits = np.array([-np.inf, 0.0, -np.inf, 0.5])
    for kwargs in ({}, {"top_k": 3}, {"top_p": 0.99}, {"temperature": 1e6}):
        assert set(many(logits, 2_000, **kwargs).tolist()) <= {1, 3}


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ([{}, {"top_k": 3, "top_p": 0.5}], "greedy"),
        ([{}, {"temperature": 0.5}], "sample"),
        ([{"top_k": 3}, {"temperature": 0.5}], "sample"),
        ([{}, {"temperature": 0.5, "top_k": 2}], "truncate"),
        ([{"temperature": 0.5}, {"temperature": 1e-3, "top_p": 0.99}], "truncate"),
    ],
)
def test_the_host_knows_what_rows_want(settings, want):
    rows = np.stack([pack_row(i, kv_len=3, **own) for i, own in enumerate(settings)])
    packed = empty_rows(4)
    packed[:2] = rows
    assert sampling_mode(packed) == want


def test_a_draw_leaves_greedy_rows_and_other_slots_alone(logits):
    rows = empty_rows(4)
    rows[0] = pack_row(2, kv_len=5, temperature=1.0, seed=7)
    rows[1] = pack_row(0, kv_len=9)
    last = jnp.array([11, 12, 13], jnp.int32)
    four = jnp.asarray(logits[:4], jnp.float32)
    newest, tokens, logprobs = sample_step(last, four, jnp.asarray(rows), truncate=False)
    (want,), (want_logprob,) = draw(logits[0], seed=7, position=5)
    assert tokens[:2].tolist() == [want, logits[1].argmax()]
    assert newest.tolist() == [logits[1].argmax(), 12, want]
    np.testing.assert_allclose(logprobs[0], want_logprob, rtol=1e-6)


@pytest.mark.parametrize("top_k", [0, 2])
def test_the_device_finds_out_whether_a_row_truncates(logits, top_k):
    """One program for both modes has the tokens of the program of either."""
    rows = empty_rows(4)
    for at in range(3):
        rows[at] = pack_row(at, kv_len=5 + at, temperature=2.0, seed=at, top_k=top_k * (at == 1))
    last = jnp.zeros(3, jnp.int32)
    four = jnp.asarray(logits[:4], jnp.float32)
    step = jax.jit(sample_step, static_argnames="truncate")
    found = step(last, four, jnp.asarray(rows), truncate=None)
    want = step(last, four, jnp.asarray(rows), truncate=top_k > 0)
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("rows_at_a_time", [4, 16])
def test_prompts_are_scored_with_their_likeliest_tokens(monkeypatch, logits, rows_at_a_time):
    """Two prompts of 5 and 6 tokens in a step of 16; the head passes on what it gets."""
    monkeypatch.setattr(steps, "SCORED_ROWS", rows_at_a_time)
    monkeypatch.setattr(steps, "head", lambda cfg, params, hidden: hidden)
    tokens = np.arange(16, dtype=np.int32)
    rows = empty_rows(3)
    rows[0], rows[1] = (
        pack_row(0, kv_len=5, q_len=5, next_token=40),
        pack_row(1, kv_len=6, q_len=6, top_prompt=2),  # one asks: all of them are found
    )
    given = logits[:16].astype(np.float32)
    score = jax.jit(partial(steps.score_step, read_config(GOLDEN), {}))
    found = score(given, tokens, rows)
    want = given - np.logaddexp.reduce(given, axis=-1, keepdims=True)
    ids = np.argsort(-given, axis=-1, kind="stable")[:, :5]
    np.testing.assert_array_equal(found.top_ids, ids)
    np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(want, ids, 1), atol=1e-5)
    following = [1, 2, 3, 4, 40, 6, 7, 8, 9, 10, 0]
    np.testing.assert_allclose(found.logprobs[:11, 0], want[range(11), following], atol=1e-5)
    np.testing.assert_array_equal(found.logprobs[:, 1], found.top_logprobs[:, 0])
    rows[1, TOP_PROMPT] = 0
    alone = score(given, tokens, rows)
    np.testing.assert_array_equal(alone.logprobs[:11], found.logprobs[:11])
    assert not alone.top_ids.any()
    assert not alone.top_logprobs.any()
