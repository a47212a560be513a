import math
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jmoe
from jmoe.parallel.copies import device_loads, with_copies
from jmoe.parallel.placement import check, of_tables, rehosted, with_spare
from tests.on_devices import run_on_devices

STEPS = Path(__file__).with_name("family_steps.py")
ON_MANY = "4 or 8"  # devices


@pytest.mark.sized(deep=("few",), exhaustive=("many",))
@pytest.mark.parametrize("cases", [f"not ({ON_MANY})", ON_MANY], ids=["few", "many"])
def test_families_over_a_mesh_are_their_models_by_themselves(cases):
    run_on_devices(STEPS, 8, "-k", cases)


def test_a_mesh_that_is_not_jmoes_is_named():
    where, mesh = Path(__file__).parents[2] / "golden" / "qwen2_moe", jax.make_mesh((1,), ("x",))
    for load, model in ((jmoe.load, where), (jmoe.load_family, {"one": where})):
        with pytest.raises(ValueError, match=r"mesh is .*; it must be made by jmoe\.make_mesh"):
            load(model, mesh=mesh)


LAYERS = 2
FAMILIES = {
    "models": st.integers(1, 4),
    "experts": st.integers(1, 9),
    "united": st.integers(0, 3),
    "devices": st.integers(1, 8),
    "seed": st.integers(0, 2**32 - 1),
}


def drawn_slots(rng, models, experts, united):
    """Returns tables of models that share some experts, as on one device."""
    layers = LAYERS
    owner = np.sort(rng.integers(0, models, (models, layers, experts)), axis=0)
    slots = np.full((models, layers, experts + united), -1, np.int32)
    for layer in range(layers):  # a slot for each (owner, expert) of a layer, then united ones
        base = layer * models * experts
        slots[:, layer, :experts] = base + owner[:, layer] * experts + np.arange(experts)
        first = layers * models * experts + layer * models * united
        own = first + np.arange(models)[:, None] * united + np.arange(united)
        slots[:, layer, experts:] = own
    return slots


@given(**FAMILIES)
def test_each_models_experts_are_even_and_what_two_share_is_once(
    models, experts, united, devices, seed
):
    slots, layers = drawn_slots(np.random.default_rng(seed), models, experts, united), LAYERS
    placement, columns = of_tables(slots, experts, devices)
    for layer in range(layers):
        of_slot = dict(zip(slots[:, layer].flat, columns[:, layer].flat, strict=True))
        assert len(set(of_slot.values())) == len(of_slot)  # a column for each distinct expert
        hosts = np.asarray(placement.hosts)[layer]
        assert (hosts.sum(axis=1) == 1).all()  # numbers of no expert, too
        assert hosts.sum(axis=0).max() <= placement.room
        held = hosts[[*of_slot.values()]].sum(axis=0)
        most = len(set(slots[:, layer, :experts].flat)) / devices
        if not (slots[1:, layer, :experts] == slots[:1, layer, :experts]).any():
            per_model = hosts[columns[:, layer, :experts]].sum(axis=1)
            assert per_model.max() <= math.ceil(experts / devices)
        assert held.max() <= math.ceil(most) + models * (1 + math.ceil(united / devices))
    for own in columns:
        part = placement.part(own)
        check(part, placement.room * layers)
        assert part.spare == 0


@given(spare=st.integers(0, 3), kinds=st.integers(1, 3), **FAMILIES)
def test_copies_have_room_and_are_every_models_that_has_the_expert(
    models, experts, united, devices, seed, spare, kinds
):
    """Against loops over the tables of one device, where one slot is one expert."""
    rng = np.random.default_rng(seed)
    slots = drawn_slots(rng, models, experts, united)
    own, numbers = of_tables(slots, experts, devices)
    homes = np.asarray(own.hosts)
    placement = with_spare(own, spare)
    assert (placement.room, placement.spare) == (own.room + spare, spare)
    load = rng.gamma(0.3, size=(LAYERS, kinds, homes.shape[1]))
    for layer in range(LAYERS):
        hosts = with_copies(load[layer], homes[layer], spare)
        placement = rehosted(placement, layer, hosts)
    check(placement, LAYERS * placement.room)
    every = np.stack([with_copies(*one, spare) for one in zip(load, homes, strict=True)])
    at_once = with_spare(own, spare, every)  # as at a start
    check(at_once, LAYERS * placement.room)
    np.testing.assert_array_equal(at_once.hosts, placement.hosts)
    lies = {}  # of an expert, by its slot on one device: where it lies
    for model, part in enumerate(map(placement.part, numbers)):
        check(part, LAYERS * placement.room)
        assert (part.room, part.spare) == (placement.room, spare)
        for layer, expert in np.ndindex(part.hosts.shape[:2]):
            there = part.local[:, layer, expert]
            assert lies.setdefault(slots[model, layer, expert], there.tolist()) == there.tolist()
            assert (part.hosts[layer, expert] == (there >= 0)).all()
            assert (part.hosts[layer, expert] | ~homes[layer, numbers[model, layer, expert]]).all()
    for device in range(devices):
        used = [there[device] for there in lies.values() if there[device] >= 0]
        assert len(set(used)) == len(used)
    # What each model's visits, which an expert's hosts take in turn, come to on each device.
    rows = rng.integers(0, 50, (models, LAYERS, experts + united))
    of_numbers, by_hand = np.zeros((LAYERS, homes.shape[1])), np.zeros((LAYERS, devices))
    for model, layer, expert in np.ndindex(rows.shape):
        of_numbers[layer, numbers[model, layer, expert]] += rows[model, layer, expert]
        there = np.array(lies[slots[model, layer, expert]]) >= 0
        by_hand[layer] += rows[model, layer, expert] / there.sum() * there
    for layer in range(LAYERS):
        found = device_loads(of_numbers[layer], placement.hosts[layer])
        np.testing.assert_allclose(found, by_hand[layer])
