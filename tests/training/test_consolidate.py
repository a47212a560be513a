"""Costs against models with an expert swapped, and whole runs of `consolidate` on tiny models."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

import jmoe
from jmoe.family import load_family
from jmoe.layers import Layers
from jmoe.sharing import Sharing, read_sharing
from training.consolidate.measure import measure
from training.consolidate.run import ALL, ConsolidateConfig, consolidate
from training.packing import Encoded, to_arrays

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

NAMES = ("one", "two", "three")
SHAPE = (2, 8)  # MoE layers, experts of the tiny model
LENGTH, SEQUENCES = 16, 20


@pytest.fixture(scope="module")
def family(tiny_dir, tiny_family):
    paths = dict(zip(NAMES, tiny_family, strict=False))
    return SimpleNamespace(paths=paths, data=tiny_dir.path / "tasks.jsonl")


def rows_of(seed):
    """Returns a batch of one item a row, which is what `jmoe.forward` takes, and the same as an
    array.
    """
    tokens = np.random.default_rng(seed).integers(0, 512, (SEQUENCES, LENGTH + 1))
    batch = to_arrays([[Encoded(row.tolist(), 1, "")] for row in tokens], LENGTH)
    return batch, tokens[:, :LENGTH].astype(np.int32)


def models_of(family, owners):
    return load_family(family.paths, Sharing(NAMES, owners), "float32")


def hidden(model, tokens):
    """Returns the residual stream behind each layer."""
    _, stats = jmoe.forward(model, tokens, return_stats=True, return_hidden=True)
    assert stats.hidden_states is not None
    return np.asarray(stats.hidden_states[1:]), np.asarray(stats.router_choices)


@pytest.fixture(scope="module")
def measured(family):
    batches = [rows_of(seed)[0] for seed in range(3)]
    models = [Layers(path, "float32") for path in family.paths.values()]
    seen = []
    found = measure(models, batches, seen.append)
    assert sum(seen) == 3 * SHAPE[0]
    return found


@pytest.mark.deep
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
    assert measured.costs[i, j, layer, expert] == pytest.approx(error.mean(), rel=2e-3)


@pytest.mark.deep
def test_an_expert_that_no_row_visits_costs_nothing(family, measured):
    tokens = rows_of(0)[1]
    _, choices = hidden(models_of(family, Sharing.none(NAMES, *SHAPE).owners)[0], tokens)
    for layer in range(SHAPE[0]):
        visited = np.bincount(choices[layer].ravel(), minlength=SHAPE[1]) > 0
        assert (measured.costs[0, 1, layer] > 0).tolist() == visited.tolist()
        assert (measured.costs[range(3), range(3), layer] == 0).all()


@pytest.mark.deep
def test_distances_are_those_of_the_files(family, measured):
    found = [load_file(path / "model.safetensors") for path in family.paths.values()]
    parts = []
    for tensors in (found[0], found[2]):
        at = "model.layers.1.mlp.experts.5."
        names = sorted(name for name in tensors if name.startswith(at))
        assert len(names) == 3
        parts.append(np.concatenate([tensors[n].astype(np.float64).ravel() for n in names]))
    want = np.linalg.norm(parts[0] - parts[1])
    assert measured.distances[0, 2, 1, 5] == pytest.approx(want, rel=1e-5)
    assert measured.distances[2, 0, 1, 5] == pytest.approx(want, rel=1e-5)


# -- whole runs ----------------------------------------------------------------------------------


def settings(family, **changed):
    return ConsolidateConfig(
        **{"share": 50, "data": {ALL: [family.data]}, "rows": 400, "length": LENGTH, **changed}
    )


@pytest.mark.deep
def test_a_map_is_written_and_serves_the_models(family, tmp_path):
    out, seen = tmp_path / "maps" / "family.json", []
    done = consolidate(
        family.paths, out, settings(family), lambda what, done, total: seen.append((done, total))
    )
    assert seen[-1][0] == seen[-1][1]
    facts = json.loads(out.read_text())["facts"]
    assert (facts["rule"], facts["slots"], facts["shared_percent"]) == ("functional", 32, 50.0)
    assert facts["rows"].keys() == set(NAMES)
    loaded = read_sharing(out, family.paths, SHAPE)
    assert np.array_equal(loaded.owners, done.sharing.owners)
    assert loaded.num_slots == 32  # of 48; 16 are the least


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rule": "closest"}, "must be one of functional, paper, random, average"),
        ({"share": None}, "one of --share PERCENT, --budget"),
        ({"budget": "20"}, "one of --share PERCENT, --budget"),
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
