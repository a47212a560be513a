"""Families over a mesh against each model by itself on one device. Run by
test_family_over_a_mesh.py.
"""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

import jmoe
from jmoe.family import load_family
from jmoe.sharing import WEIGHTS_FILE, Sharing
from tests.jmoe.conftest import GOLDEN
from tests.jmoe.family_oracles import alone, drawn_map, three_models, with_owners_experts

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
