"""Costs against models with an expert swapped, and whole runs of `consolidate` on tiny models."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

import jmoe
from jmoe.family import load_family
from jmoe.layers import Layers
from jmoe.sharing import MERGED, MERGED_FILE, Sharing
from training.consolidate.measure import differences
from training.consolidate.run import ALL, ConsolidateConfig, consolidate
from training.packing import Encoded, to_arrays

NAMES = ("one", "two", "three")
SHAPE = (2, 8)  # MoE layers, experts of the tiny model
LENGTH, SEQUENCES = 12, 20


@pytest.fixture(scope="module")
def family(tiny_dir, tiny_family):
    paths = dict(zip(NAMES, tiny_family, strict=False))
    return SimpleNamespace(paths=paths, data=tiny_dir.path / "tasks.jsonl")


def rows_of(seed):
    """A batch of one item a row, which is what `jmoe.forward` takes, and the same as an array."""
    tokens = np.random.default_rng(seed).integers(0, 512, (SEQUENCES, LENGTH + 1))
    batch = to_arrays([[Encoded(row.tolist(), 1, "")] for row in tokens], LENGTH)
    return batch, tokens[:, :LENGTH].astype(np.int32)


def models_of(family, owners):
    return load_family(family.paths, Sharing(NAMES, owners), "float32")


def hidden(model, tokens):
    """The residual stream behind each layer."""
    _, stats = jmoe.forward(model, tokens, return_stats=True, return_hidden=True)
    assert stats.hidden_states is not None
    return np.asarray(stats.hidden_states[1:]), np.asarray(stats.router_choices)


@pytest.fixture(scope="module")
def measured(family):
    batches = [rows_of(seed)[0] for seed in range(3)]
    models = [Layers(path, "float32") for path in family.paths.values()]
    seen = []
    layers = list(differences(models, batches, seen.append))
    assert sum(seen) == 3 * SHAPE[0]
    return layers


@pytest.mark.parametrize(("i", "j", "layer"), [(0, 1, 0), (1, 2, 0), (2, 0, 1), (0, 2, 1)])
def test_costs_are_what_a_model_with_one_expert_swapped_differs_by(family, measured, i, j, layer):
    own = Sharing.none(NAMES, *SHAPE).owners
    tokens = rows_of(i)[1]
    exact, choices = hidden(models_of(family, own)[i], tokens)
    expert = int(np.bincount(choices[layer].ravel(), minlength=SHAPE[1]).argmax())
    swapped = own.copy()
    swapped[i, layer, expert] = j
    other, _ = hidden(models_of(family, swapped)[i], tokens)
    if layer:
        assert np.array_equal(other[0], exact[0])
    error = ((other[layer] - exact[layer]) ** 2).sum(axis=-1) / (exact[layer] ** 2).sum(axis=-1)
    assert error.mean() > 1e-6
    assert measured[layer].costs[i, j, expert] == pytest.approx(error.mean(), rel=2e-3)


def test_an_expert_that_no_row_visits_costs_nothing(family, measured):
    tokens = rows_of(0)[1]
    _, choices = hidden(models_of(family, Sharing.none(NAMES, *SHAPE).owners)[0], tokens)
    for layer in range(SHAPE[0]):
        visited = np.bincount(choices[layer].ravel(), minlength=SHAPE[1]) > 0
        assert (measured[layer].costs[0, 1] > 0).tolist() == visited.tolist()
        assert (measured[layer].costs[range(3), range(3)] == 0).all()


def test_distances_are_those_of_the_files(family, measured):
    found = [load_file(path / "model.safetensors") for path in family.paths.values()]
    parts = []
    for tensors in (found[0], found[2]):
        at = "model.layers.1.mlp.experts.5."
        names = sorted(name for name in tensors if name.startswith(at))
        assert len(names) == 3
        parts.append(np.concatenate([tensors[n].astype(np.float64).ravel() for n in names]))
    want = np.linalg.norm(parts[0] - parts[1])
    assert measured[1].distances[0, 2, 5] == pytest.approx(want, rel=1e-5)
    assert measured[1].distances[2, 0, 5] == pytest.approx(want, rel=1e-5)


# -- whole runs ----------------------------------------------------------------------------------


def settings(family, **changed):
    return ConsolidateConfig(
        **{"share": 50, "data": {ALL: [family.data]}, "rows": 400, "length": 64, **changed}
    )


@pytest.mark.parametrize("rule", ["functional", "paper", "random", "average"])
def test_a_map_is_written_and_serves_the_models(family, tmp_path, rule):
    out, seen = tmp_path / "maps" / "family.json", []
    done = consolidate(
        family.paths,
        out,
        settings(family, rule=rule),
        lambda what, done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1]
    loaded = load_family(family.paths, out, "float32")
    assert np.array_equal(loaded.sharing.owners, done.sharing.owners)
    assert loaded.sharing.num_slots == 32  # of 48; 16 are the least
    facts = json.loads(out.read_text())["facts"]
    assert (facts["rule"], facts["slots"], facts["shared_percent"]) == (rule, 32, 50.0)
    assert facts["rows"].keys() == set(NAMES)
    merged = rule == "average"
    assert (done.sharing.owners == MERGED).any() == merged == (out.parent / MERGED_FILE).exists()
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


def test_merged_experts_are_means(family, tmp_path):
    out = tmp_path / "family.json"
    consolidate(family.paths, out, settings(family, rule="average", share=100, data={}))
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    files = [load_file(path / "model.safetensors") for path in family.paths.values()]
    found = [tensors[name].astype(np.float32) for tensors in files]
    got = load_file(tmp_path / MERGED_FILE)["layers.0.experts.3.down"].astype(np.float32)
    np.testing.assert_allclose(got, np.mean(found, axis=0).T, rtol=1e-2, atol=1e-4)


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


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rule": "closest"}, "must be one of functional, paper, random, average"),
        ({"share": None}, "either --share PERCENT or --budget"),
        ({"budget": "20"}, "either --share PERCENT or --budget"),
        ({"data": {}}, "functional rule measures"),
        ({"rows": 0}, "rows is 0; it must be at least 1"),
        ({"share": 101}, "share is 101 %"),
        ({"share": None, "budget": "15"}, "one model alone has 16 experts"),
        ({"data": {"four": []}}, "--data is given for four; the models are one, two, three"),
    ],
)
def test_settings_that_cannot_be_are_refused(family, tmp_path, changed, words):
    with pytest.raises(ValueError, match=words):
        consolidate(family.paths, tmp_path / "family.json", settings(family, **changed))
    assert not list(tmp_path.iterdir())


def test_models_that_make_no_family_are_refused(family, tmp_path):
    out, paths = tmp_path / "family.json", family.paths
    with pytest.raises(ValueError, match="one is one model, which has nobody"):
        consolidate({"one": paths["one"]}, out, settings(family))
    with pytest.raises(ValueError, match="copy and one have the same weights"):
        consolidate({"one": paths["one"], "copy": paths["one"]}, out, settings(family))
    with pytest.raises(ValueError, match="not of one architecture"):
        consolidate({"one": paths["one"], "other": "bundled"}, out, settings(family))
    with pytest.raises(ValueError, match=r"name a file such as .*family\.json"):
        consolidate(paths, tmp_path / "out", settings(family))
