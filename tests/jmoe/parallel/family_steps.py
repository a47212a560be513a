"""Families over a mesh against each model by itself on one device. Run by
test_family_over_a_mesh.py.
"""

from dataclasses import replace
from functools import partial
from itertools import count

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import jmoe
from jmoe.family import load_family
from jmoe.mixed import MixedWeights, by_model, mixed_decode_step
from jmoe.packed_rows import empty_deltas
from jmoe.parallel import steps as on
from jmoe.parallel.copies import with_copies
from jmoe.parallel.placement import with_spare
from jmoe.sharing import WEIGHTS_FILE, Sharing
from tests.jmoe.conftest import GOLDEN
from tests.jmoe.family_oracles import alone, drawn_map, three_models, with_owners_experts
from tests.jmoe.mixed_rows import control, random_state, rows_of

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

TOKENS = np.random.default_rng(5).integers(1, 80, (8, 7)).astype(np.int32)
TOLERANCE = 5e-5  # of logits in float32: devices add a row's parts in another order


def logits(model, brownout=None):
    return np.asarray(jmoe.forward(model, TOKENS, brownout=brownout))


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return three_models(GOLDEN / "qwen2_moe", tmp_path_factory.mktemp("family"))


def merged_map(directories, to):
    """A map that has a third of the experts merged, and those in a folder."""
    cfg = jmoe.config.read_config(directories["base"])
    sharing = drawn_map(directories, cfg, seed=1, merged=True)
    shapes = {"gate_up": (cfg.d_model, 2 * cfg.d_ff_expert), "down": (cfg.d_ff_expert, cfg.d_model)}
    rng, merged = np.random.default_rng(2), {}
    for layer in range(cfg.num_moe_layers):
        for expert in range(cfg.num_experts):
            for key, shape in shapes.items():
                drawn = 0.1 * rng.normal(size=shape)
                merged[f"layers.{layer}.experts.{expert}.{key}"] = drawn.astype(np.float32)
    save_file(merged, to / WEIGHTS_FILE)
    return replace(sharing, directory=to), merged


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_family_over_a_mesh_is_each_model_by_itself(directories, tmp_path, devices):
    sharing, merged = merged_map(directories, tmp_path)
    family = load_family(directories, sharing, "float32", mesh=jmoe.make_mesh(devices))
    cfg, pool = family.config, family[0].pool
    assert all(model.pool is pool for model in family)
    brownout = jmoe.Brownout("partial", way=2, threshold_percent=30)
    for number, name in enumerate(directories):
        one = alone(with_owners_experts(directories, sharing, number, tmp_path / name, merged))
        for asked in (None, brownout):
            expected = logits(one, asked)
            np.testing.assert_allclose(logits(family[number], asked), expected, atol=TOLERANCE)
    hosts = np.stack([model.home.placement.hosts for model in family])
    held = hosts[..., : cfg.num_experts, :].sum(axis=2)  # of each model, by layer and device
    assert held.max() <= np.ceil(cfg.num_experts / devices) + 1


def test_ways_and_what_lenders_have_lie_with_them(directories):
    cfg = jmoe.config.read_config(directories["base"])
    plain = Sharing.none(tuple(directories), cfg.num_moe_layers, cfg.num_experts)
    sharing, mesh = replace(plain, united=(2, 1, 2)), jmoe.make_mesh(4)
    family = load_family(directories, sharing, "float32", mesh=mesh)
    single = load_family(directories, sharing, "float32")
    for way in (2, 3, 2):
        brownout = jmoe.Brownout("partial", way=way, threshold_percent=30)
        for spread, one in zip(family, single, strict=True):
            expected = logits(one, brownout)
            np.testing.assert_allclose(logits(spread, brownout), expected, atol=TOLERANCE)
            assert spread.way == way


def test_models_of_a_family_generate_as_by_themselves(directories):
    family = load_family(directories, None, "float32", mesh=jmoe.make_mesh(2))
    for model, directory in zip(family, directories.values(), strict=True):
        found, expected = (
            jmoe.generate(one, [[5, 9, 3], [7, 7]], 6, stop_token_ids=())
            for one in (model, alone(directory))
        )
        assert found.tokens == expected.tokens


SPARE = 2


def copied(family, seed):
    """Gives the experts of every layer copies by a drawn load; returns how many serve several
    models.
    """
    rng, numbers, shared = np.random.default_rng(seed), family.spread.numbers, 0
    for layer, own in enumerate(family.spread.own):
        hosts = with_copies(rng.gamma(0.3, size=len(own)), own, SPARE)
        family.host_layer(layer, hosts)
        users = (numbers[:, layer, :, None] == np.arange(len(own))).any(axis=1).sum(axis=0)
        shared += ((users > 1) & (hosts.sum(axis=1) > 1)).sum()
    return shared


def check_copies(family):
    """Every host of an expert has its weights, in a slot that every model's table names."""
    pool = jax.tree.map(np.asarray, family[0].pool)
    assert all(model.pool is family[0].pool for model in family)
    size, devices = pool.num_slots // family.home.mesh.size, range(family.home.mesh.size)
    for model, numbers in zip(family, family.spread.numbers, strict=True):
        slots, hosts = np.asarray(model.table.slots), np.asarray(model.table.hosts)
        for layer, expert in np.ndindex(numbers.shape):
            there = [device for device in devices if slots[device, layer, expert] >= 0]
            assert there == np.flatnonzero(hosts[layer, expert]).tolist()
            assert there == np.flatnonzero(model.home.placement.hosts[layer, expert]).tolist()
            at = np.array([device * size + slots[device, layer, expert] for device in there])
            for leaf in jax.tree.leaves(pool.read(at)):
                assert (leaf == leaf[:1]).all()


@pytest.mark.parametrize("devices", [2, 4])
def test_copies_serve_every_model_that_has_the_expert(directories, tmp_path, devices):
    """Through changes of way, whose united experts have copies, too; nothing is compiled anew."""
    sharing, _ = merged_map(directories, tmp_path)
    sharing, mesh = replace(sharing, united=(2, 1, 2)), jmoe.make_mesh(devices)
    load = partial(load_family, directories, sharing, "float32", mesh=mesh)
    plain, family = load(), load(placement=partial(with_spare, spare=SPARE))
    brownout = partial(jmoe.Brownout, "partial", threshold_percent=30)
    prompts, compiled = [[5, 9, 3], [7, 7]], []
    shared = copied(family, 0)
    for seed, way in zip(count(1), (2, 3, 2), strict=False):
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, _, **__: compiled.append(event)
        )
        for model in family:
            model.use_way(way)
        if seed > 1:
            shared += copied(family, seed)
            assert "/jax/core/compile/backend_compile_duration" not in compiled
        jax.monitoring.clear_event_listeners()
        compiled.clear()
        check_copies(family)
        for model, one in zip(family, plain, strict=True):
            one.use_way(way)
            for asked in (None, brownout(way=way)):
                np.testing.assert_allclose(logits(model, asked), logits(one, asked), atol=TOLERANCE)
            found, expected = (
                jmoe.generate(each, prompts, 6, brownout(way=way), stop_token_ids=())
                for each in (model, one)
            )
            assert found.tokens == expected.tokens
            assert found.degraded_visits == expected.degraded_visits
    assert shared > 0


@pytest.mark.parametrize("devices", [2, 4])
def test_a_mixed_step_with_copies_is_one_without(directories, tmp_path, devices):
    sharing, mesh = merged_map(directories, tmp_path)[0], jmoe.make_mesh(devices)
    spare = partial(with_spare, spare=SPARE)
    family = load_family(directories, sharing, "float32", mesh=mesh, placement=spare)
    models, cfg = len(family), family.config
    for model in family:
        model.use_way(2)
    step = partial(mixed_decode_step, cfg, max_active=models * cfg.num_experts)
    step = jax.jit(on.spread(mesh, step, on.mixed(models)))
    rows = np.concatenate([rows_of((3, 1, 4), exempt=(1, 5))] * devices)
    deltas = np.concatenate([empty_deltas(1)] * devices)

    def run(told):
        weights = MixedWeights.of([model.weights for model in family])
        state = on.make_states(mesh, lambda: random_state(cfg))
        _, out = step(weights, state, rows, deltas, told)
        every = np.asarray(out.expert_rows).reshape(devices, cfg.num_moe_layers, -1)
        return out, by_model(every.sum(axis=0), models, cfg.num_experts), every.sum(axis=2)

    for told in (control(), control("partial", 30)):
        before, rows_before, loads_before = run(told)
        assert copied(family, 3) > 0
        after, rows_after, loads_after = run(told)
        family.host_layer(0, family.spread.own[0])  # as they were, in one layer
        real = rows[:, 0] >= 0
        np.testing.assert_array_equal(after.tokens[real], before.tokens[real])
        np.testing.assert_array_equal(after.degraded[real], before.degraded[real])
        np.testing.assert_allclose(after.logits[real], before.logits[real], atol=TOLERANCE)
        np.testing.assert_array_equal(rows_after, rows_before)
        assert (loads_after != loads_before).any()  # others computed
        for layer in range(cfg.num_moe_layers):
            family.host_layer(layer, family.spread.own[layer])


def test_a_placement_that_is_no_familys_is_named(directories):
    mesh = jmoe.make_mesh(2)
    with pytest.raises(ValueError, match=r"placement\.hosts is .*; this family on this mesh has"):
        load_family(directories, mesh=mesh, placement=lambda own: own.part(np.zeros((2, 3), int)))
    with pytest.raises(ValueError, match="a placement was given, but no mesh"):
        load_family(directories, placement=lambda own: own)


@pytest.mark.parametrize(
    "given", [{"resident_experts": 8}, {"spare_models": 1}, {"params_on_host": True}]
)
def test_what_is_spread_is_all_there(directories, given):
    with pytest.raises(ValueError, match=rf"{next(iter(given))} is .* and a mesh is given"):
        load_family(directories, mesh=jmoe.make_mesh(2), **given)


def test_experts_known_by_differences_take_one_device(directories):
    cfg = jmoe.config.read_config(directories["base"])
    sharing = replace(drawn_map(directories, cfg), residual_rank=3)
    with pytest.raises(ValueError, match=r"a mesh is given, and .* by their difference"):
        load_family(directories, sharing, "float32", mesh=jmoe.make_mesh(2))


def test_a_saved_model_of_a_spread_family_is_itself(directories, tmp_path):
    family = load_family(directories, None, "float32", mesh=jmoe.make_mesh(4))
    jmoe.save(family[1], tmp_path / "law")
    found = alone(tmp_path / "law")
    np.testing.assert_array_equal(logits(found), logits(alone(directories["law"])))
    assert found.united.keys() == family[1].united.keys()


def test_experts_in_four_bits(directories, tmp_path):
    given = merged_map(directories, tmp_path)[0], "float32"
    family = load_family(directories, *given, quantize="int4", mesh=jmoe.make_mesh(2))
    single = load_family(directories, *given, quantize="int4")
    for spread, one in zip(family, single, strict=True):
        np.testing.assert_allclose(logits(spread), logits(one), atol=TOLERANCE)
