"""Experts without a slot of their own: whose substitute serves, and what fetching one changes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jmoe
from jmoe.experts import ABSENT, FETCHED
from jmoe.family import load_family
from jmoe.offloaded import Homes, choose_resident
from jmoe.sharing import Sharing
from tests.jmoe.conftest import GOLDEN
from tests.jmoe.family_oracles import alone, drawn_map, logits, with_owners_experts
from tests.variants import variant

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    where = tmp_path_factory.mktemp("host")
    base = variant(GOLDEN / "qwen2_moe", where / "base", 0, scale=0.0)
    return {"base": base, "law": variant(base, where / "law", 1)}


@given(st.tuples(*(st.integers(1, n) for n in (4, 3, 4))), st.integers(0, 2**16), st.data())
def test_every_position_has_one_and_nobody_goes_without(shape, seed, data):
    owners = np.random.default_rng(seed).integers(-1, shape[0], shape).astype(np.int32)
    sharing = Sharing(tuple(map(str, range(shape[0]))), owners)
    routed, held = sharing.slots()
    positions = routed[0].size
    count = data.draw(st.integers(positions, len(held)))
    stays = choose_resident(held, positions, count)
    assert stays.sum() == count
    kept = {(layer, expert) for _, layer, expert in held[stays].tolist()}
    assert len(kept) == positions
    if count == len(held):
        assert Homes.of(sharing, count, 0).offloaded is None
        with pytest.raises(ValueError, match="spare_experts is 3, and all"):
            Homes.of(sharing, count, 3)
        return
    homes = Homes.of(sharing, count, spare_slots := 3)
    assert homes.spare == range(count, count + spare_slots)
    slots = homes.slot[stays]
    assert sorted(slots) == list(range(count))
    for model, layer, expert in np.ndindex(routed.shape):
        own = routed[model, layer, expert]
        serves = homes.routed[model, layer, expert]
        assert (homes.offloaded[model, layer, expert] == ABSENT) == (not stays[own])
        if stays[own]:
            assert serves == homes.slot[own]
        else:  # a resident sibling's, of the same position
            (holder,) = np.flatnonzero(homes.slot == serves)
            assert held[holder, 1:].tolist() == [layer, expert]


def test_too_few_to_hold_one_model():
    _, held = Sharing.none(("a", "b"), 2, 4).slots()
    with pytest.raises(ValueError, match=r"7 experts .* must be 8 .* to 16"):
        choose_resident(held, 8, 7)


@pytest.mark.deep
def test_a_stand_in_is_the_siblings_expert_and_a_fetched_one_its_own(directories, tmp_path):
    cfg = jmoe.config.read_config(directories["base"])
    positions = cfg.num_moe_layers * cfg.num_experts
    family = load_family(directories, dtype="float32", resident_experts=positions, spare_experts=6)
    offloaded, law = family.offloaded, family[1]
    assert len(offloaded.users) == positions
    np.testing.assert_array_equal(logits(family[0]), logits(alone(directories["base"])))
    owners = np.zeros((2, cfg.num_moe_layers, cfg.num_experts), np.int32)
    fetched, free = [], list(offloaded.spare[:2])
    for turn, expert in enumerate([None, (1, 0, 3), (1, 1, 2), (1, 0, 1), (1, 1, 2)]):
        if expert is not None and expert not in offloaded.fetched:
            family.fetch({expert: free.pop() if free else offloaded.fetched[fetched[0]]})
            fetched = [e for e in fetched if e in offloaded.fetched] + [expert]
        owners[1] = 0
        for _, layer, number in offloaded.fetched:
            owners[1, layer, number] = 1
        oracle = with_owners_experts(
            directories, Sharing(("base", "law"), owners), 1, tmp_path / str(turn)
        )
        np.testing.assert_array_equal(logits(law), logits(alone(oracle)))
        found = np.where(owners[1] == 1, FETCHED, ABSENT)
        np.testing.assert_array_equal(np.asarray(law.table.offloaded), found)
    assert set(offloaded.fetched) == {(1, 1, 2), (1, 0, 1)}  # the oldest made way


def test_one_that_two_models_share_is_fetched_for_both(directories, tmp_path_factory):
    third = variant(directories["base"], tmp_path_factory.mktemp("third") / "code", 2)
    names = {**directories, "code": third}
    cfg = jmoe.config.read_config(third)
    owners = drawn_map(names, cfg).owners.copy()
    owners[0], owners[1], owners[2] = 0, 1, 1
    positions = owners[0].size
    family = load_family(
        names,
        Sharing(tuple(names), owners),
        dtype="float32",
        resident_experts=positions,
        spare_experts=6,
    )
    family.fetch({(1, 0, 2): family.offloaded.spare[0]})
    for model in family.models[1:]:
        assert model.table.offloaded[0, 2] == FETCHED
        assert model.table.slots[0, 2] == family.offloaded.spare[0]
    assert family.offloaded.needed_by_a_row(2) == 2 * cfg.num_moe_layers
    assert family.offloaded.needed_by_a_row(99) == owners[0].size
    assert not family.offloaded.offloaded_of(0)
