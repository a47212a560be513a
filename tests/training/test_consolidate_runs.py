"""Whole runs of `consolidate` on tiny models, by every rule."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jmoe.family import load_family
from jmoe.sharing import MERGED, WEIGHTS_FILE
from tests.variants import variant
from training.consolidate.run import ALL, ConsolidateConfig, consolidate

pytestmark = pytest.mark.deep

NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def family(tiny_dir, tiny_family):
    paths = dict(zip(NAMES, tiny_family, strict=False))
    return SimpleNamespace(paths=paths, data=tiny_dir.path / "tasks.jsonl")


def settings(family, **changed):
    return ConsolidateConfig(
        **{"share": 50, "data": {ALL: [family.data]}, "rows": 400, "length": 64, **changed}
    )


@pytest.mark.parametrize("rule", ["functional", "paper", "random", "average"])
def test_a_map_is_written_and_serves_the_models(family, tmp_path, rule):
    out = tmp_path / "maps" / "family.json"
    done = consolidate(family.paths, out, settings(family, rule=rule))
    loaded = load_family(family.paths, out, "float32")
    assert np.array_equal(loaded.sharing.owners, done.sharing.owners)
    assert loaded.sharing.num_slots == 32  # of 48; 16 are the least
    assert loaded.sharing.facts["rule"] == rule
    merged = rule == "average"
    assert (done.sharing.owners == MERGED).any() == merged == (out.parent / WEIGHTS_FILE).exists()
    assert (done.losses is None) == merged


def test_all_that_can_be_shared_is_and_the_worst_model_loses_less_than_by_the_papers_rule(
    family, tmp_path
):
    losses = {}
    for rule in ("functional", "paper"):
        out = tmp_path / f"{rule}.json"
        done = consolidate(family.paths, out, settings(family, rule=rule, share=75))
        assert done.losses is not None
        losses[rule] = max(done.losses.values())
    assert losses["functional"] < losses["paper"]


def test_biases_are_merged_with_their_experts(tmp_path, request):
    golden = request.config.rootpath / "tests" / "golden" / "gpt_oss"
    paths = {name: variant(golden, tmp_path / name, seed) for seed, name in enumerate(NAMES)}
    out = tmp_path / "family.json"
    consolidate(paths, out, ConsolidateConfig(rule="average", share=100))
    loaded = load_family(paths, out, "float32")
    assert (loaded.sharing.owners == MERGED).all()
    files = [load_file(path / "model.safetensors") for path in paths.values()]
    held = loaded[0].pool.read(np.asarray(loaded[0].table.slots)[1])
    for key, got in (("gate_up_proj_bias", held.gate_up_bias), ("down_proj_bias", held.down_bias)):
        want = np.mean([tensors[f"model.layers.1.mlp.experts.{key}"] for tensors in files], axis=0)
        if key == "gate_up_proj_bias":  # in the file gate and up are in turn
            want = np.concatenate([want[:, ::2], want[:, 1::2]], axis=1)
        np.testing.assert_allclose(got, want, atol=0.01)  # kept in bfloat16
    with pytest.raises(ValueError, match="residual_rank is 2; differences of experts with biases"):
        consolidate(paths, out, ConsolidateConfig(share=50, residual_rank=2, rule="random"))


def test_merged_experts_are_means(family, tmp_path):
    out = tmp_path / "family.json"
    consolidate(family.paths, out, settings(family, rule="average", share=100, data={}))
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    files = [load_file(path / "model.safetensors") for path in family.paths.values()]
    found = [tensors[name].astype(np.float32) for tensors in files]
    got = load_file(tmp_path / WEIGHTS_FILE)["layers.0.experts.3.down"].astype(np.float32)
    np.testing.assert_allclose(got, np.mean(found, axis=0).T, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("rule", ["paper", "average"])
def test_differences_of_full_rank_give_every_model_its_own_experts_back(family, tmp_path, rule):
    """Of the matrices whose smaller side is that rank, but for rounding of factors to 16 bits."""
    errors, sizes = [], []
    for rank in (4, 16):
        out = tmp_path / str(rank) / "family.json"
        config = settings(family, rule=rule, share=100, data={}, residual_rank=rank)
        sizes.append(consolidate(family.paths, out, config).residual_bytes)
        shared = load_family(family.paths, out, "float32", spare_experts=48)
        experts = sorted(shared.offloaded.users)
        assert len(experts) == (48 if rule == "average" else 32)
        shared.fetch(dict(zip(experts, shared.offloaded.spare, strict=False)))
        whole = load_family(family.paths, dtype="float32")
        error = 0.0
        for got, want in zip(shared, whole, strict=True):
            there, own = (np.asarray(m.pool.down)[np.asarray(m.table.slots)] for m in (got, want))
            error = max(error, float(np.abs(there - own).max() / own.std()))
        errors.append(error)
    assert errors[1] < 0.05 < 0.5 < errors[0]
    assert sizes[1] == 4 * sizes[0]


def test_a_rank_above_all_is_refused(family, tmp_path):
    with pytest.raises(ValueError, match=r"residual_rank is 999; it must be at most \d+"):
        consolidate(family.paths, tmp_path / "family.json", settings(family, residual_rank=999))


def test_a_run_is_the_same_again(family, tmp_path):
    for name in ("a", "b"):
        consolidate(family.paths, tmp_path / f"{name}.json", settings(family, rows=100))
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_each_model_may_have_texts_of_its_own(family, tmp_path):
    lines = family.data.read_text().splitlines()
    own = {}
    for at, name in enumerate(NAMES):
        own[name] = [tmp_path / f"{name}.jsonl"]
        own[name][0].write_text("\n".join(lines[at::3]) + "\n")
    done = consolidate(family.paths, tmp_path / "own.json", settings(family, data=own))
    assert done.sharing.facts["data"].keys() == {f"{name}={name}.jsonl" for name in NAMES}
    del own["two"]
    with pytest.raises(ValueError, match="no texts are given for two; add --data two=FILE"):
        consolidate(family.paths, tmp_path / "own.json", settings(family, data=own))


def test_a_budget_above_all_models_shares_nothing_and_says_so(family, tmp_path):
    told = []
    config = settings(family, share=None, budget="1GiB")
    done = consolidate(family.paths, tmp_path / "family.json", config, say=told.append)
    assert done.sharing.num_slots == 48
    assert "nothing is shared" in told[0]
    config = settings(family, share=0, residual_rank=4)
    done = consolidate(family.paths, tmp_path / "family.json", config)
    assert done.residual_bytes == 0  # nothing differs, and nothing has to be there
    assert load_family(family.paths, tmp_path / "family.json", "float32").offloaded is None


def test_a_bound_on_loss_holds_for_every_model(family, tmp_path):
    bound = settings(family, share=None, max_loss=0.02)
    done = consolidate(family.paths, tmp_path / "a.json", bound)
    assert done.losses is not None
    assert 0 < max(done.losses.values()) <= 0.02
    assert 16 < done.sharing.num_slots < 48
    wider = consolidate(
        family.paths, tmp_path / "b.json", settings(family, share=None, max_loss=0.2)
    )
    assert wider.sharing.num_slots < done.sharing.num_slots


def test_lossless_shares_what_is_stored_alike(family, tmp_path):
    paths = {name: shutil.copytree(path, tmp_path / name) for name, path in family.paths.items()}
    files = {name: load_file(path / "model.safetensors") for name, path in paths.items()}
    alike = [key for key in files["one"] if ".1.mlp.experts.3." in key]
    assert len(alike) == 3
    for key in alike:
        files["three"][key] = files["one"][key]
    save_file(files["three"], paths["three"] / "model.safetensors")
    done = consolidate(paths, tmp_path / "a.json", ConsolidateConfig(lossless=True))
    assert done.sharing.num_slots == 47
    assert done.sharing.owners[2, 1, 3] == 0
    assert load_family(paths, tmp_path / "a.json", "float32").sharing.facts["rule"] == "lossless"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_loss": -1.0}, "max_loss is -1.0"),
        ({"max_loss": float("nan")}, "max_loss is nan"),
        ({"max_loss": 0.1, "rule": "paper"}, "only the functional rule knows"),
        ({"max_loss": 0.1, "lossless": True}, "give one of"),
        ({"lossless": True}, "leave out --data"),
    ],
)
def test_bounds_that_cannot_be_are_named(family, changes, message):
    with pytest.raises(ValueError, match=message):
        settings(family, share=None, **changes)
