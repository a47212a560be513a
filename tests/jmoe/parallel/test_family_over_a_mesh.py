import math
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jmoe
from jmoe.parallel.placement import check, of_tables
from tests.on_devices import run_on_devices


@pytest.mark.deep
def test_families_over_a_mesh_are_their_models_by_themselves():
    run_on_devices(Path(__file__).with_name("family_steps.py"), 8)


def test_a_mesh_that_is_not_jmoes_is_named():
    where, mesh = Path(__file__).parents[2] / "golden" / "qwen2_moe", jax.make_mesh((1,), ("x",))
    for load, model in ((jmoe.load, where), (jmoe.load_family, {"one": where})):
        with pytest.raises(ValueError, match=r"mesh is .*; it must be made by jmoe\.make_mesh"):
            load(model, mesh=mesh)


@given(
    models=st.integers(1, 4),
    experts=st.integers(1, 9),
    united=st.integers(0, 3),
    devices=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_models_experts_are_even_and_what_two_share_is_once(
    models, experts, united, devices, seed
):
    rng, layers = np.random.default_rng(seed), 2
    owner = np.sort(rng.integers(0, models, (models, layers, experts)), axis=0)
    slots = np.full((models, layers, experts + united), -1, np.int32)
    for layer in range(layers):  # a slot for each (owner, expert) of a layer, then united ones
        base = layer * models * experts
        slots[:, layer, :experts] = base + owner[:, layer] * experts + np.arange(experts)
        first = layers * models * experts + layer * models * united
        own = first + np.arange(models)[:, None] * united + np.arange(united)
        slots[:, layer, experts:] = own
    placement, columns = of_tables(slots, experts, devices)
    for layer in range(layers):
        of_slot = dict(zip(slots[:, layer].flat, columns[:, layer].flat, strict=True))
        assert len(set(of_slot.values())) == len(of_slot)  # a column for each distinct expert
        hosts = np.asarray(placement.hosts)[layer]
        assert (hosts.sum(axis=1)[[*of_slot.values()]] == 1).all()
        held = hosts.sum(axis=0)
        most = len(set(slots[:, layer, :experts].flat)) / devices
        if not (slots[1:, layer, :experts] == slots[:1, layer, :experts]).any():
            per_model = hosts[columns[:, layer, :experts]].sum(axis=1)
            assert per_model.max() <= math.ceil(experts / devices)
        assert held.max() <= math.ceil(most) + models * (1 + math.ceil(united / devices))
        assert held.max() <= placement.room
    for own in columns:
        part = placement.part(own)
        check(part, placement.room * layers)
        assert part.spare == 0
