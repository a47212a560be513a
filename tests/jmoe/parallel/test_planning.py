"""Replica planning and token sharding: against plain loops, exhaustive optima, and invariants."""

from functools import partial

import balance_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.mesh import balance
from jmoe.parallel import replicas
from pallas_kernels import planning

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

REPLICAS = {(3, 7): 1, (8, 20): 4}  # (devices, experts): few shapes, since every one compiles anew
SHAPES = list(REPLICAS)


@partial(jax.jit, static_argnames=("num_replicas", "per_pair", "alpha"))
def _plan(counts, hosts, **how):
    return planning.plan_replicas(counts, hosts, **how)


@jax.jit
def _shard(counts, hosts, home):
    return planning.shard_visits(counts, hosts, home=home)


_devices = jax.jit(replicas.device_of_visits)
_count = jax.jit(replicas.count_visits, static_argnames=("num_experts", "num_devices"))


def generate(rng, devices, experts):
    """Counts and hosts: flat or skewed, few visits or many, ties, idle devices, second hosts."""
    skew = rng.choice([0.0, 1.0, 2.5])
    popularity = np.exp(skew * rng.normal(size=(1, experts)) + 0.3 * rng.normal(size=(1, experts)))
    own = np.exp(rng.choice([0.0, 1.0]) * rng.normal(size=(devices, experts)))
    counts = rng.poisson(rng.choice([0.3, 3, 100]) * popularity * own)
    counts[rng.random(devices) < 0.1] = 0
    home = rng.permutation(np.arange(experts) * devices // experts)
    if rng.random() < 0.2:
        home = rng.integers(0, devices, experts)
    hosts = home[:, None] == np.arange(devices)
    if rng.random() < 0.3:
        hosts |= rng.random(hosts.shape) < 0.2
    return counts.astype(np.int32), hosts


def cases(num, seed=0):
    rng = np.random.default_rng(seed)
    for n in range(num):
        yield generate(rng, *SHAPES[n % len(SHAPES)])


def home_of(hosts):
    return np.asarray(oracle.homes(hosts.tolist()), np.int32)


def test_shares_equal_algorithm_2_with_own_visits_moved():
    rng = np.random.default_rng(3)
    for counts, hosts in cases(60, seed=4):
        held, home = hosts | (rng.random(hosts.shape) < rng.choice([0.0, 0.2, 0.6])), home_of(hosts)
        kept, remote = _shard(counts, held, home)
        want = oracle.algorithm_2(counts.tolist(), held.tolist(), home.tolist(), move_local=True)
        np.testing.assert_array_equal(np.asarray(kept) + np.asarray(remote), want)
        np.testing.assert_array_equal(kept, np.minimum(want, np.where(held.T, counts, 0)))


@pytest.mark.parametrize("per_pair", [None, 1])
def test_replicas_keep_every_bound(per_pair):
    for counts, hosts in cases(120, seed=5):
        n, home = REPLICAS[counts.shape], home_of(hosts)
        how = {"num_replicas": n, "per_pair": per_pair, "alpha": 0.5}
        replicas = np.asarray(_plan(counts, hosts, **how))
        assert not (replicas & hosts).any()
        assert replicas.sum(axis=0).max() <= n
        pairs = np.array([replicas[home == g].sum(axis=0) for g in range(hosts.shape[1])])
        assert per_pair is None or pairs.max() <= per_pair


@given(st.integers(0, 2**32 - 1), st.sampled_from(SHAPES))
@settings(max_examples=100)
def test_no_visit_is_lost_nor_computed_where_its_expert_is_not(seed, shape):
    counts, hosts = generate(np.random.default_rng(seed), *shape)
    how = {"num_replicas": REPLICAS[shape], "per_pair": None, "alpha": 0.5}
    held = hosts | np.asarray(_plan(counts, hosts, **how))
    kept, remote = map(np.asarray, _shard(counts, held, home_of(hosts)))
    assert kept.min() >= 0
    assert remote.min() >= 0
    np.testing.assert_array_equal((kept + remote).sum(axis=0), counts.sum(axis=0))
    assert not (kept + remote)[~held.T].any()
    assert (kept <= counts).all()
    before = np.add(*oracle.start(counts.tolist(), held.tolist(), oracle.homes(hosts.tolist())))
    assert (kept + remote).sum(axis=1).max() <= before.sum(axis=1).max()


def test_the_modelled_plan_comes_near_the_optimum():
    """Tiny cases, where every choice of replicas can be tried."""
    rng, ours, printed = np.random.default_rng(6), [], []
    home = np.asarray([0, 0, 0, 1, 1, 2, 2], np.int32)
    hosts = home[:, None] == np.arange(3)
    for _ in range(40):
        counts = rng.poisson(np.exp(1.5 * rng.normal(size=(1, 7))) * 8 * np.ones((3, 1)))
        counts, per_pair = counts.astype(np.int32), rng.choice([None, 1])
        best = oracle.best_replicas(counts.sum(axis=0).tolist(), hosts.tolist(), 1, per_pair)
        how = {"num_replicas": 1, "per_pair": per_pair, "alpha": 0.5}
        held = hosts | np.asarray(_plan(counts, hosts, **how))
        shares = _shard(counts, held, home)
        load = (np.asarray(shares.kept) + np.asarray(shares.remote)).sum(axis=1)
        of_paper = balance.printed_shares(
            counts, balance.printed_replicas(counts, hosts, **how), home
        )
        for found, into in ((load, ours), (of_paper.sum(axis=1), printed)):
            assert found.max() >= best
            into.append(found.max() / max(best, 1))
    assert np.mean(ours) < 1.05
    assert np.max(ours) < 1.35
    assert np.mean(ours) < np.mean(printed)


def test_shares_come_near_the_optimum_of_their_hosts():
    rng, ratio = np.random.default_rng(7), []
    for counts, hosts in cases(80, seed=8):
        held = hosts | (rng.random(hosts.shape) < 0.3)
        shares = _shard(counts, held, home_of(hosts))
        load = (np.asarray(shares.kept) + np.asarray(shares.remote)).sum(axis=1)
        best = oracle.least_maximum(counts.sum(axis=0).tolist(), held.tolist())
        assert best <= load.max() <= 1.05 * best + 2
        ratio.append(load.max() / max(best, 1))
    assert np.mean(ratio) < 1.02


def batch(rng, devices, experts, rows, top_k, *, merged):
    ids = np.argsort(rng.gumbel(size=(rows, experts)) + 1.5 * rng.normal(size=experts), axis=1)
    ids = ids[:, :top_k] if not merged else rng.integers(0, experts, (rows, top_k))
    valid = rng.random((rows, 1)) > 0.2
    valid = np.broadcast_to(valid, ids.shape) & (rng.random(ids.shape) > 0.1)
    ranks = np.repeat(np.arange(devices), rows // devices)
    return np.where(valid, ids, 10**6).astype(np.int32), ranks, valid


@pytest.mark.parametrize("merged", [False, True])
def test_devices_of_visits_equal_standing_in_line_and_meet_the_shares(merged):
    rng = np.random.default_rng(9)
    for n in range(40):
        devices, experts = SHAPES[n % len(SHAPES)]
        rows = -(-24 // devices) * devices
        ids, ranks, valid = batch(rng, devices, experts, rows, min(experts, 4), merged=merged)
        counts = np.asarray(_count(ids, valid, num_experts=experts, num_devices=devices))
        pairs = {(r, i) for r, i in zip(*np.nonzero(valid), strict=True) for i in [ids[r, i]]}
        want = np.zeros_like(counts)
        for row, expert in pairs:
            want[ranks[row], expert] += 1
        np.testing.assert_array_equal(counts, want)

        _, hosts = generate(rng, devices, experts)
        held = hosts | (rng.random(hosts.shape) < 0.3)
        shares = _shard(counts, held, home_of(hosts))
        if n % 2:  # others will do
            computed = balance.printed_shares(counts, held, home_of(hosts)).astype(np.int32)
            kept = np.minimum(np.where(held.T, counts, 0), computed)
            shares = planning.Shares(kept, computed - kept)
        got = np.asarray(_devices(ids, valid, shares, held))
        lists = [np.asarray(a).tolist() for a in (ids, ranks, valid, *shares, held)]
        np.testing.assert_array_equal(got, oracle.device_of_visits(*lists))
        computed = np.zeros_like(counts)
        for row, expert in pairs:
            (device,) = {d for d, i in zip(got[row], ids[row], strict=True) if i == expert}
            computed[device, expert] += 1
        np.testing.assert_array_equal(computed, np.asarray(shares.kept) + np.asarray(shares.remote))


def test_visits_that_the_shares_do_not_cover_go_to_a_host():
    ids = np.asarray([[0, 1], [9, 9], [1, 0], [1, 2]], np.int32)
    hosts = np.asarray([[False, True], [True, False], [True, True]])
    none = planning.Shares(*np.zeros((2, 2, 3), np.int32))
    got = _devices(ids, ids < 9, none, hosts)
    np.testing.assert_array_equal(got, [[1, 0], [-1, -1], [0, 1], [0, 0]])


def test_nothing_to_do():
    """No visits at all, one device, no replicas: nothing moves and nothing is copied."""
    hosts = np.ones((5, 1), bool)
    counts = np.arange(5, dtype=np.int32)[None]
    assert not np.any(_plan(counts, hosts, num_replicas=3, per_pair=None, alpha=0.5))
    shares = _shard(counts, hosts, home_of(hosts))
    np.testing.assert_array_equal(shares.kept, counts)
    hosts = np.eye(4, dtype=bool)
    counts = np.zeros((4, 4), np.int32)
    assert not np.any(_plan(counts, hosts, num_replicas=3, per_pair=None, alpha=0.5))
    counts = np.full((4, 4), 7, np.int32)
    assert not np.any(_plan(counts, hosts, num_replicas=0, per_pair=None, alpha=0.5))


def test_large_counts_stay_within_int32():
    """All visits below 2^31 together: 64 devices of 16,384 rows with 8 picks, times some."""
    counts = np.zeros((8, 16), np.int32)
    counts[:, 0] = 2**27  # 2^30 altogether, all for one expert
    hosts = np.arange(16)[:, None] // 2 == np.arange(8)
    how = {"num_replicas": 2, "per_pair": 1, "alpha": 0.0}
    held = hosts | np.asarray(_plan(counts, hosts, **how))
    shares = _shard(counts, held, home_of(hosts))
    load = (np.asarray(shares.kept) + np.asarray(shares.remote)).sum(axis=1)
    np.testing.assert_array_equal(load, 2**27)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_replicas": -1}, "num_replicas is -1; it must be 0 or more"),
        ({"per_pair": 0}, "per_pair is 0; it must be 1 or more, or None for no bound"),
        ({"alpha": 1.5}, "alpha is 1.5; it must be between 0 and 1"),
        ({"alpha": float("nan")}, "alpha is nan; it must be between 0 and 1"),
    ],
)
def test_bad_input_of_a_plan(change, words):
    counts, hosts = jnp.zeros((2, 2), jnp.int32), jnp.eye(2, dtype=bool)
    with pytest.raises(ValueError, match=words):
        planning.plan_replicas(counts, hosts, **{"num_replicas": 1, **change})
