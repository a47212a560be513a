"""Copies that stay, against a search over all of them."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jmoe.parallel.copies import (
    _Search,
    device_loads,
    imbalance,
    spare_that_gains,
    with_copies,
)
from jmoe.parallel.placement import contiguous, rehosted


def homes_of(experts, devices):
    return np.asarray(contiguous(1, experts, devices).hosts)[0]


def all_hosts(homes, spare):
    """Yields the hosts of every way to fill up to `spare` slots of each device."""
    by_device = []
    for own in homes.T:
        others = np.flatnonzero(~own)
        fillings = (c for n in range(spare + 1) for c in combinations(others, n))
        by_device.append([np.isin(np.arange(len(own)), c) | own for c in fillings])
    return (np.stack(chosen, axis=1) for chosen in product(*by_device))


def test_loads_by_hand():
    load = np.array([6.0, 2.0, 1.0])
    hosts = np.array([[True, True], [True, False], [False, True]])
    np.testing.assert_array_equal(device_loads(load, hosts), [5, 4])
    assert imbalance(load, hosts) == 5 / 4.5
    assert imbalance(0 * load, hosts) == 1


def test_spare_slots_that_gain_by_hand():
    """Two experts on each of two devices. One busy expert is level with one slot. Of two on one
    device, of 6 visits each, a slot takes 3 to the other device, and two slots take 6.
    """
    homes = np.stack([homes_of(4, 2)] * 2)
    one, two = np.array([12.0, 0, 0, 0]), np.array([6.0, 6, 0, 0])

    def found(*load, gain=0.02, most=3):
        return spare_that_gains(np.stack(load), homes[: len(load)], most, gain)

    assert found(one) == 1
    assert [imbalance(two, with_copies(two, homes[0], n)) for n in (0, 1, 2)] == [2, 1.5, 1]
    assert found(two) == found(one, two) == 2
    assert found(two, gain=0.5) == 1  # 9 are at most 1.5 times 6
    assert found(one, two, gain=0.24) == 2  # (6 + 9) / (6 + 6) is 1.25
    assert found(one, two, gain=0.25) == 1
    assert found(two, gain=2.0) == found(two, most=0) == found(0 * one) == found(one**0) == 0


@pytest.mark.parametrize("kinds", [(), (2,)])
def test_near_the_best_of_all(kinds):
    """So few experts are the hard case: where one copy alone helps nothing, the rule stops."""
    rng, homes, over = np.random.default_rng(0), homes_of(6, 3), []
    candidates = list(all_hosts(homes, 1))
    for _ in range(40):
        load = rng.gamma(0.5, size=(*kinds, 6)) * 100
        found = imbalance(load, with_copies(load, homes, 1))
        assert found <= imbalance(load, homes) * (1.01 if kinds else 1)  # squares, not the fullest
        over.append(found / min(imbalance(load, hosts) for hosts in candidates))
    assert min(over) >= 1
    assert np.median(over) <= 1.02
    assert max(over) <= 1.4


def squares(load, hosts):
    return (device_loads(load, hosts) ** 2).sum()


def greedy(load, homes, spare):
    """Applies the rule in plain loops, each copy tried by itself."""
    hosts = homes.copy()
    while True:
        tries = []
        for expert, device in np.argwhere(~hosts):
            if (hosts & ~homes)[:, device].sum() < spare:
                one = hosts.copy()
                one[expert, device] = True
                tries.append((squares(load, one), expert, device))
        if not tries or min(tries)[0] >= squares(load, hosts):
            return hosts
        hosts[min(tries)[1:]] = True


@pytest.mark.sized(
    deep=(
        "kinds2-60-8-1-0",
        "kinds2-60-8-1-2",
        "kinds4-60-8-1-0",
    )
)
@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize(
    ("kinds", "experts", "devices", "spare"),
    [((), 12, 4, 1), ((), 12, 4, 2), ((), 60, 8, 1), ((3,), 12, 4, 2), ((2,), 60, 8, 1)],
)
def test_the_rule_is_that_of_plain_loops(monkeypatch, rounds, kinds, experts, devices, spare):
    """Without replacing copies it finds the same hosts; with replacing, none that are worse. Of
    several kinds of steps each one's squares are over its load.
    """
    monkeypatch.setattr("jmoe.parallel.copies.ROUNDS", rounds)
    rng, homes, better = np.random.default_rng(1), homes_of(experts, devices), 0
    for _ in range(8):
        load = rng.lognormal(0, 1.2, (*kinds, experts))
        found = with_copies(load, homes, spare)
        load = load / np.sqrt(load.sum(axis=-1, keepdims=True))
        plain = greedy(load, homes, spare)
        if rounds == 0:
            np.testing.assert_array_equal(found, plain)
        assert squares(load, found) <= squares(load, plain) * (1 + 1e-9)
        better += squares(load, found) < squares(load, plain) * (1 - 1e-9)
    assert (better > 0) == (rounds > 0)


@pytest.mark.parametrize("kinds", [1, 2])
def test_a_copy_is_given_up_for_the_best_other_one(kinds):
    """Every swap is tried by itself; the one that is made is the best of them."""
    rng, homes, made = np.random.default_rng(2), homes_of(9, 3), 0
    for _ in range(30):
        load, hosts = rng.lognormal(0, 1.2, (kinds, 9)), homes.copy()
        search = _Search(load, homes, 1)
        for device in range(3):  # any copies
            expert = int(rng.choice(np.flatnonzero(~hosts[:, device])))
            hosts[expert, device] = True
            search.put(expert, device, True)
        tries = []
        for gone in np.argwhere(hosts & ~homes):
            without = hosts.copy()
            without[tuple(gone)] = False
            for expert, device in np.argwhere(~without):
                if (without & ~homes)[:, device].sum() < 1:
                    one = without.copy()
                    one[expert, device] = True
                    tries.append(squares(load, one))
        if search.swap():
            made += 1
            assert squares(load, search.hosts) == pytest.approx(min(tries))
        else:
            assert min(tries) >= squares(load, hosts) * (1 - 1e-8)
        assert device_loads(load, search.hosts) == pytest.approx(search.loads)
    assert made > 20


def test_kinds_of_steps_do_not_even_each_other_out():
    """Each of two models is busy on one device, in its own steps. Together they are even."""
    homes = homes_of(8, 2)
    load = np.array([[9.0, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 9, 1, 1, 1]])
    assert imbalance(load.sum(axis=0), homes) == 1
    assert imbalance(load, homes) == 2
    assert not (with_copies(load.sum(axis=0), homes, 1) & ~homes).any()
    hosts = with_copies(load, homes, 1)
    assert np.argwhere(hosts & ~homes).tolist() == [[0, 1], [4, 0]]
    assert imbalance(load, hosts) == 15 / 12
    assert imbalance(load, with_copies(load, homes, 4)) == 1
    rare = np.array([load[0], 0 * load[1]])  # a kind without load counts nothing
    np.testing.assert_array_equal(with_copies(rare, homes, 1), with_copies(load[0], homes, 1))
    assert imbalance(rare, hosts) == imbalance(load[0], hosts)


@given(
    arrays(np.float64, (9,), elements=st.floats(0, 1e6)),
    st.integers(2, 4),
    st.integers(0, 3),
)
@example(
    np.array([789972.0, 0, 384842, 470722, 2, 2, 0, 657425, 661370]), 3, 2
)  # some without load
def test_homes_stay_and_slots_suffice(load, devices, spare):
    homes = homes_of(9, devices)
    hosts = with_copies(load, homes, spare)
    assert (hosts >= homes).all()
    assert ((hosts & ~homes).sum(axis=0) <= spare).all()
    placement = contiguous(2, 9, devices, spare=spare)
    after = rehosted(placement, 1, hosts)
    np.testing.assert_array_equal((after.local >= 0).transpose(1, 2, 0), after.hosts)
    np.testing.assert_array_equal(after.local[:, 0], placement.local[:, 0])
    for slots in after.local[:, 1]:
        used = slots[slots >= 0]
        assert len(set(used)) == len(used)
        assert ((used >= placement.room) & (used < 2 * placement.room)).all()
    stays = (placement.local[:, 1] >= 0) & (after.local[:, 1] >= 0)
    assert (placement.local[:, 1] == after.local[:, 1])[stays].all()


def test_hosts_without_room_are_refused():
    placement = contiguous(1, 4, 2, spare=1)
    with pytest.raises(ValueError, match="device 0 would host 4 experts of MoE layer 0 and has 3"):
        rehosted(placement, 0, np.ones((4, 2), bool))
    with pytest.raises(ValueError, match="no device hosts expert 0 of MoE layer 0"):
        rehosted(placement, 0, np.zeros((4, 2), bool))
    with pytest.raises(ValueError, match=r"hosts must be \(4, 2\) of a layer; got \(3, 2\)"):
        rehosted(placement, 0, np.ones((3, 2), bool))
