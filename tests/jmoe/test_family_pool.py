"""Models over one pool: each equals, bit for bit, one loaded with its owners' experts."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jmoe
from jmoe.checkpoint import weights_digest
from jmoe.config import ConfigError
from jmoe.family import Family, load_family
from jmoe.sharing import Sharing, SharingError, write_sharing
from tests.jmoe.conftest import GOLDEN
from tests.jmoe.family_oracles import (
    alone,
    drawn_map,
    logits,
    three_models,
    with_owners_experts,
)
from tests.variants import variant

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

CASE = "qwen2_moe"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return three_models(GOLDEN / CASE, tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def unshared(directories):
    return load_family(directories, dtype="float32")


@pytest.mark.deep
def test_unshared_every_model_is_what_it_is_alone(directories, unshared):
    for name, model in zip(directories, unshared, strict=True):
        assert model.name == name
        np.testing.assert_array_equal(logits(model), logits(alone(directories[name])))
    cfg = unshared.config
    count = cfg.num_moe_layers * (3 * cfg.num_experts + 3 * unshared[0].num_united_slots)
    assert unshared[0].pool.down.shape[0] == count


def test_a_shared_expert_is_its_owners(directories, tmp_path):
    sharing = drawn_map(directories, jmoe.config.read_config(directories["base"]))
    family = load_family(directories, sharing, dtype="float32")
    assert family[0].pool is family[2].pool
    routed = {int(s) for m in family for s in m.table.slots[:, : family.config.num_experts].ravel()}
    assert len(routed) == sharing.num_slots
    for number, name in enumerate(directories):
        oracle = with_owners_experts(directories, sharing, number, tmp_path / name)
        np.testing.assert_array_equal(logits(family[number]), logits(alone(oracle)))


def test_united_experts_are_each_models_own(directories, unshared):
    for way in (2, 3, 2):
        brownout = jmoe.Brownout("partial", way=way, threshold_percent=30)
        for name, model in zip(directories, unshared, strict=True):
            expected = logits(alone(directories[name]), brownout)
            np.testing.assert_array_equal(logits(model, brownout), expected)
            assert model.way == way


def test_what_two_models_have_alike_is_there_once(unshared):
    base, law, code = unshared
    assert law.params["embed"] is base.params["embed"]
    assert code.params["embed"] is not base.params["embed"]
    assert law.params["segments"][0]["wqkv"] is not base.params["segments"][0]["wqkv"]


def test_a_file_says_what_is_shared_and_holds_what_was_merged(directories, tmp_path):
    cfg = jmoe.config.read_config(directories["base"])
    prints = tuple(map(weights_digest, directories.values()))
    owners = drawn_map(directories, cfg, seed=3, merged=True).owners
    sharing = Sharing(tuple(directories), owners, prints)
    write_sharing(tmp_path / "family.json", sharing)
    with pytest.raises(jmoe.CheckpointError, match=r"family\.safetensors is not readable"):
        load_family(directories, tmp_path / "family.json", dtype="float32")
    rng, merged, (d, f) = np.random.default_rng(5), {}, (cfg.d_model, cfg.d_ff_expert)
    for layer, expert in np.ndindex(owners.shape[1:]):
        at = f"layers.{layer}.experts.{expert}."
        merged[at + "gate_up"] = rng.normal(size=(d, 2 * f)).astype(np.float32) * d**-0.5
        merged[at + "down"] = rng.normal(size=(f, d)).astype(np.float32) * f**-0.5
    save_file(merged, tmp_path / "family.safetensors")
    family = load_family(directories, tmp_path / "family.json", dtype="float32")
    for number, name in enumerate(directories):
        oracle = with_owners_experts(directories, sharing, number, tmp_path / name, merged)
        np.testing.assert_array_equal(logits(family[number]), logits(alone(oracle)))


@pytest.mark.parametrize("part", ["experts.3.down_proj", "experts.5.gate_proj", "q_proj"])
def test_experts_stored_alike_lie_in_one_slot(directories, tmp_path, part):
    """A copy shares all, one that differs in the last element of a tensor all but that expert."""
    paths = {"base": directories["base"]}
    for name in ("copy", "edited"):
        paths[name] = variant(directories["base"], tmp_path / name, 0, scale=0.0)
    tensors = load_file(paths["edited"] / "model.safetensors")
    name = next(name for name in tensors if part in name and name.startswith("model.layers.1."))
    tensors[name].flat[-1] += 1
    save_file(tensors, paths["edited"] / "model.safetensors")
    family = load_family(paths, dtype="float32")
    want = np.zeros_like(family.sharing.owners)
    if "experts" in part:
        want[2, 1, int(part.split(".")[1])] = 2
    np.testing.assert_array_equal(family.sharing.owners, want)
    for name, model in zip(paths, family, strict=True):
        np.testing.assert_array_equal(logits(model), logits(alone(paths[name])))


def with_united_of(directories, sharing, number, to):
    """Makes the oracle: a model's directory with its lender's united experts beside it."""
    names = list(directories)
    path = variant(directories[names[number]], to, 0, scale=0.0)
    tensors = load_file(directories[names[sharing.lenders[number]]] / "united.safetensors")
    save_file(tensors, path / "united.safetensors")
    return path


@pytest.mark.sized(deep=("(0, 0, 0)",))
@pytest.mark.parametrize("united", [(0, 0, 0), (2, 1, 2)], ids=str)
def test_who_borrows_united_experts_has_its_lenders(directories, tmp_path, united):
    """Also of ways that it has not itself; they take host memory and slots once for both."""
    bare = variant(directories["law"], tmp_path / "bare", 0, scale=0.0)
    paths = directories | ({"law": bare} if united[1] != 1 else {})
    if united[1] != 1:
        (bare / "united.safetensors").unlink()
    cfg = jmoe.config.read_config(directories["base"])
    plain = Sharing.none(tuple(paths), cfg.num_moe_layers, cfg.num_experts)
    sharing = replace(plain, united=united)
    family = load_family(paths, sharing, dtype="float32")
    oracles = [
        alone(with_united_of(paths, sharing, number, tmp_path / name))
        for number, name in enumerate(paths)
    ]
    num_united = family[0].num_united_slots
    experts = cfg.num_moe_layers * (3 * cfg.num_experts + len(set(united)) * num_united)
    assert family[0].pool.num_slots == experts
    for model, lender in zip(family, sharing.lenders, strict=True):
        assert all(model.united[way] is family[lender].united[way] for way in (2, 3))
    for way in (2, 3, 2):
        brownout = jmoe.Brownout("partial", way=way, threshold_percent=30)
        for model, oracle in zip(family, oracles, strict=True):
            np.testing.assert_array_equal(logits(model, brownout), logits(oracle, brownout))
            assert model.way == way


def test_a_lender_and_its_borrowers_change_their_way_together(directories):
    """Layer by layer, whoever is asked: groups never name what another way has in the slots."""
    cfg = jmoe.config.read_config(directories["base"])
    plain = Sharing.none(tuple(directories), cfg.num_moe_layers, cfg.num_experts)
    base, law, code = load_family(directories, replace(plain, united=(0, 0, 2)), dtype="float32")
    law.use_way(3)
    assert (base.way, law.way, code.way) == (3, 3, None)
    law.load_way_layer(2, 0)
    assert (base.way, law.way) == (None, None)
    for layer, way in enumerate((2, 3)):
        want = base.united[way].groups[layer]
        for model in (base, law):
            np.testing.assert_array_equal(model.table.groups[layer], want)
            at = np.asarray(model.table.slots)[layer, cfg.num_experts :][: want.max() + 1]
            held = np.asarray(model.pool.down)[at]
            np.testing.assert_array_equal(held, base.united[way].down[layer])
    assert (np.asarray(code.table.groups) == -1).all()
    written = base.pool
    base.load_way_layer(2, 1)
    assert (base.way, law.way) == (2, 2)
    assert base.pool is not written  # by its own writer, while a borrower has nothing to write
    written = base.pool
    law.use_way(2)
    law.load_way_layer(2, 1)
    assert base.pool is written


def test_united_experts_that_nobody_has_to_lend(directories, tmp_path):
    bare = variant(directories["base"], tmp_path / "bare", 0, scale=0.0)
    (bare / "united.safetensors").unlink()
    paths = directories | {"base": bare}
    cfg = jmoe.config.read_config(bare)
    plain = Sharing.none(tuple(paths), cfg.num_moe_layers, cfg.num_experts)
    lending = replace(plain, united=(0, 0, 2))
    with pytest.raises(ValueError, match="law is to use the united experts of base, which has no"):
        load_family(paths, lending)
    with pytest.raises(ValueError, match=r"ways are \[5\]; base has united experts for: 2, 3"):
        load_family(directories, lending, ways=[5])
    measured = replace(lending, united_ways=(3,))
    with pytest.raises(
        ValueError, match=r"ways are \[2\]; by this family's map .* of ways 3 alone"
    ):
        load_family(directories, measured, ways=[2])
    for model in load_family(directories, measured):
        assert list(model.united) == [3]


def test_a_model_is_a_family_of_one(unshared):
    one = Family.of(unshared[1])
    assert (one.names, len(one), one[0]) == (("law",), 1, unshared[1])
    assert Family.of(unshared) is unshared
    assert "3 models" not in repr(one)
    assert "0 % shared" in repr(unshared)
    assert "base, law, code" in unshared._repr_html_()


def test_progress_counts_the_layers_of_all(directories):
    told = []
    load_family(
        {name: directories[name] for name in ("base", "law")},
        dtype="float32",
        progress=lambda done, total: told.append((done, total)),
    )
    layers = jmoe.config.read_config(directories["base"]).num_layers
    assert told == [(done + 1, 2 * layers) for done in range(2 * layers)]


# ---- what is refused, before weights are read ----


@pytest.fixture
def edited(directories, tmp_path):
    """Returns a function that makes a family of the base and a copy with another config.json."""

    def edit(**changes):
        path = variant(directories["base"], tmp_path / "edited", 0, scale=0.0)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))
        (path / "model.safetensors").unlink()  # nobody is to look for it
        return {"base": directories["base"], "other": path}

    return edit


def test_another_architecture_or_vocabulary(edited):
    with pytest.raises(ConfigError, match=r"other and base .*rms_norm_eps is 0\.5 and 1e-06"):
        load_family(edited(rms_norm_eps=0.5))


def test_end_of_sequence_tokens_may_differ(directories, tmp_path):
    path = variant(directories["base"], tmp_path / "chat", 0, scale=0.0)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": [5, 7]}))
    family = load_family({"base": directories["base"], "chat": path}, dtype="float32")
    assert family[1].config.eos_token_ids == (5, 7)
    assert family[0].config.eos_token_ids != (5, 7)


def test_a_map_of_other_models(directories, tmp_path):
    cfg = jmoe.config.read_config(directories["base"])
    with pytest.raises(SharingError, match="those to load are base, law"):
        load_family(
            {name: directories[name] for name in ("base", "law")}, drawn_map(directories, cfg)
        )


def test_ways_that_one_of_them_lacks(directories, tmp_path):
    bare = variant(directories["law"], tmp_path / "bare", 0, scale=0.0)
    united = load_file(bare / "united.safetensors")
    only = {name: tensor for name, tensor in united.items() if name.startswith("way2")}
    save_file(only, bare / "united.safetensors")
    two = {"base": directories["base"], "bare": bare}
    assert list(load_family(two, dtype="float32")[0].united) == [2]
    with pytest.raises(ValueError, match=r"ways are \[3\]; bare has united experts for: 2"):
        load_family(two, ways=[3])


def test_names_and_directories(directories):
    with pytest.raises(ValueError, match="no directory is named"):
        load_family({})
    with pytest.raises(ValueError, match="a model's name is ' a'"):
        load_family({" a": directories["base"]})
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        load_family(directories, dtype="int8")


def test_jmoes_own_format(directories, unshared, tmp_path):
    jmoe.save(alone(directories["base"]), tmp_path / "saved")
    with pytest.raises(ConfigError, match="saved is in jmoe's own format"):
        load_family({"base": tmp_path / "saved"})


def test_another_vocabulary(tmp_path):
    bundled = jmoe.api.resolve("bundled")
    other = variant(bundled, tmp_path / "other", 0, scale=0.0)
    path = other / "tokenizer.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    vocab = found["model"]["vocab"]
    (one, first), (two, second) = list(vocab.items())[-2:]
    vocab[one], vocab[two] = second, first
    path.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"one vocabulary.* is token \d+ of other and \d+ of b"):
        load_family({"base": bundled, "other": other})


def test_writing_one_models_united_experts_leaves_the_others_alone(directories, unshared):
    base, law, _ = unshared
    brownout = jmoe.Brownout("partial", way=2, threshold_percent=0)
    before = logits(law, brownout)
    base.use_way(3)
    np.testing.assert_array_equal(logits(law, brownout), before)
    assert isinstance(law.pool.down, jnp.ndarray)
