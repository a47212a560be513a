"""Placements: every expert somewhere, slots used once, balanced packing, and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmoe.parallel import placement
from tests.jmoe.parallel.placements import at_random, by_load

LAYERS = 3


def makers(layers, experts, devices, spare):
    load = np.random.default_rng(experts).lognormal(size=(layers, experts))
    yield placement.contiguous(layers, experts, devices, spare=spare)
    yield at_random(layers, experts, devices, seed=1, spare=spare)
    yield by_load(load, devices, spare=spare)


@given(st.integers(1, 70), st.integers(1, 12), st.integers(0, 3))
@settings(max_examples=60)
def test_every_expert_has_one_slot_on_one_device(experts, devices, spare):
    room = placement.slots_per_layer(experts, devices, spare)
    for made in makers(LAYERS, experts, devices, spare):
        placement.check(made, LAYERS * room)
        assert (np.asarray(made.hosts).sum(axis=2) == 1).all()
        layer = made.local // room
        held = made.local >= 0
        assert (layer == np.arange(LAYERS)[None, :, None])[held].all()
        assert held.sum(axis=2).max() <= room - spare


def test_sixty_experts_on_eight_devices():
    made = placement.contiguous(2, 60, 8, spare=1)
    assert placement.slots_per_layer(60, 8, 1) == 9
    assert (made.local >= 0).sum(axis=2).tolist() == [[8, 8]] * 4 + [[7, 7]] * 4
    assert made.local[0, 0, :9].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -1]
    assert made.local[4, 1, 32:40].tolist() == [9, 10, 11, 12, 13, 14, 15, -1]


def test_a_device_may_stay_empty():
    made = placement.contiguous(1, 3, 4)
    assert (made.local >= 0).sum(axis=2).ravel().tolist() == [1, 1, 1, 0]


def test_every_device_has_its_part_of_the_united_experts():
    made = placement.contiguous(2, 60 + 30, 8, num_united=30)
    routed, united = made.hosts[0, :60].sum(0), made.hosts[0, 60:].sum(0)
    assert routed.tolist() == [8, 8, 8, 8, 7, 7, 7, 7]
    assert united.tolist() == [3, 3, 4, 4, 4, 4, 4, 4]
    assert made.room == 12
    for device in range(8):
        ids = np.flatnonzero(made.hosts[0, :60, device])
        assert np.diff(ids).tolist() == [1] * (len(ids) - 1)
    for used in range(1, 31):  # a way with fewer of them
        assert made.hosts[0, 60 : 60 + used].sum(0).max() == -(-used // 8)
    with pytest.raises(ValueError, match="num_united is 4; it must be 0 to 3"):
        placement.contiguous(1, 4, 2, num_united=4)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 9))
def test_ranges_fit_the_slots(routed, united, devices):
    made = placement.contiguous(1, routed + united, devices, num_united=united)
    assert (made.hosts.sum(-1) == 1).all()
    assert made.hosts.sum(1).max() <= placement.slots_per_layer(routed + united, devices)


def test_replicas_take_spare_slots():
    hosts = np.array(placement.contiguous(2, 4, 2).hosts)
    hosts[1, 0, 1] = True
    made = placement.from_hosts(hosts, spare=1)
    placement.check(made, 6)
    assert made.local.tolist() == [
        [[0, 1, -1, -1], [3, 4, -1, -1]],
        [[-1, -1, 0, 1], [3, -1, 4, 5]],
    ]
    words = (
        "device 1 hosts 3 experts of MoE layer 1 and has 2 slots for them; spare=1 would be enough"
    )
    with pytest.raises(ValueError, match=words):
        placement.from_hosts(hosts)


def changed(at, value):
    local = placement.contiguous(2, 4, 2, spare=1).local.copy()
    local[at] = value
    return local


@pytest.mark.parametrize(
    ("local", "words"),
    [
        (changed((0, 1, 1), 6), r"expert 1 of MoE layer 1 is in slot 6 of device 0; .* 0 to 5"),
        (changed((0, 1, 1), -2), "is in slot -2 of device 0"),
        (
            changed((0, 1, 1), 0),
            "slot 0 of device 0 holds expert 0 of layer 0 and expert 1 of layer 1; give one",
        ),
    ],
)
def test_slots_that_are_refused(local, words):
    hosts = (local >= 0).transpose(1, 2, 0)
    made = placement.Placement(local, np.where(hosts.any(axis=2, keepdims=True), hosts, True))
    with pytest.raises(ValueError, match=words):
        placement.check(made, 6)


def test_hosts_that_are_refused():
    made = placement.contiguous(2, 4, 2)
    nowhere = np.array(made.hosts)
    nowhere[1, 2] = False
    words = r"no device hosts expert 2 of MoE layer 1 \(1 such experts\); every expert needs one"
    with pytest.raises(ValueError, match=words):
        placement.check(made._replace(hosts=nowhere), 4)
    with pytest.raises(ValueError, match=words):
        placement.from_hosts(nowhere)
    more = np.array(made.hosts)
    more[1, 2] = True
    with pytest.raises(ValueError, match="hosts says True for expert 2 of MoE layer 1 on device 0"):
        placement.check(made._replace(hosts=more), 4)
    with pytest.raises(ValueError, match=r"local is \(2, 2, 4\) and hosts \(2, 2, 4\); they must"):
        placement.check(made._replace(hosts=more.transpose(2, 0, 1)), 4)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((4, 60, 2, 100), "2 devices is too small: .* hold 120 .* room for 100; 3 devices are"),
        ((4, 60, 8, 3), "room for 3 experts; 4 MoE layers .* no mesh is large enough"),
        ((4, 60, 0, 40), "num_devices is 0; it must be 1 or more"),
        ((4, 0, 8, 40), "num_experts is 0; it must be 1 or more"),
    ],
)
def test_what_has_no_room_is_told_what_would_fit(sizes, words):
    with pytest.raises(ValueError, match=words):
        placement.check_room(*sizes)


def test_the_numbers_that_messages_name_do_fit():
    placement.check_room(4, 60, 3, 100)
    placement.check_room(4, 60, 8, 40, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: placement.contiguous(1, 4, 2, spare=-1), "spare is -1; it must be 0 or more"),
        (lambda: placement.from_hosts(np.ones((2, 2), bool)), r"hosts must be bool .* \(2, 2\)"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
