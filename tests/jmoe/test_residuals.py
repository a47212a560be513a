"""Experts known by a low-rank difference from another model's: what is made of them, and when."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jmoe
from jmoe.checkpoint import CheckpointError, weights_digest
from jmoe.family import load_family
from jmoe.residuals import tensor_name
from jmoe.sharing import MERGED, WEIGHTS_FILE, SharingError, write_sharing
from tests.jmoe.conftest import GOLDEN
from tests.jmoe.family_oracles import alone, drawn_map, logits, oracle
from tests.variants import variant

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

RANK = 3


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    where = tmp_path_factory.mktemp("residuals")
    base = variant(GOLDEN / "qwen2_moe", where / "base", 0, scale=0.0)
    return {"base": base, "law": variant(base, where / "law", 1)}


@pytest.fixture(scope="module")
def cfg(directories):
    return jmoe.config.read_config(directories["base"])


@pytest.fixture(scope="module")
def written(directories, cfg, tmp_path_factory):
    """Returns a map with random owners, and random differences that are exact in bfloat16."""
    folder, rng = tmp_path_factory.mktemp("map"), np.random.default_rng(5)
    prints = tuple(weights_digest(path) for path in directories.values())
    drawn = drawn_map(directories, cfg, seed=3)
    sharing = replace(drawn, fingerprints=prints, residual_rank=RANK, directory=folder)
    d, f = cfg.d_model, cfg.d_ff_expert
    shapes = {"gate_up": ((d, RANK), (RANK, 2 * f)), "down": ((f, RANK), (RANK, d))}
    found = {}
    for model, layer, expert in np.argwhere(sharing.differs).tolist():
        for key, pair in shapes.items():
            for side, shape in zip(("left", "right"), pair, strict=True):
                name = tensor_name(prints[model], layer, expert, key, side)
                found[name] = (0.2 * rng.standard_normal(shape)).astype(jnp.bfloat16)
    save_file(found, folder / WEIGHTS_FILE)
    write_sharing(folder / "family.json", sharing)
    return sharing


@pytest.mark.deep
def test_models_are_their_siblings_experts_and_their_own_differences(
    directories, cfg, written, tmp_path
):
    offloaded = list(map(tuple, np.argwhere(written.differs).tolist()))
    family = load_family(
        directories,
        written.directory / "family.json",
        dtype="float32",
        spare_experts=len(offloaded),
    )
    assert family.sharing.num_slots == cfg.num_moe_layers * cfg.num_experts + sum(
        len(set(written.owners[:, layer, expert])) - 1
        for layer in range(cfg.num_moe_layers)
        for expert in range(cfg.num_experts)
    )
    assert sorted(family.offloaded.users) == offloaded
    assert family.weight_bytes > family.offloaded.source.device_bytes > 0
    half = dict(zip(offloaded[::2], family.offloaded.spare, strict=False))
    others = dict(zip(offloaded[1::2], family.offloaded.spare[len(half) :], strict=True))
    for turn, fetched in enumerate(({}, half, others)):
        family.fetch(fetched)
        for number in range(len(directories)):
            path = oracle(
                directories, written, number, family.offloaded.fetched, tmp_path / f"{turn}{number}"
            )
            np.testing.assert_allclose(logits(family[number]), logits(alone(path)), atol=1e-5)
    assert len(family.offloaded.fetched) == len(offloaded)
    with pytest.raises(KeyError):
        family.offloaded.of(0, *np.argwhere(~written.differs[0])[0].tolist())


def test_a_row_that_meets_a_shared_expert_counts_as_degraded(directories, written):
    family = load_family(directories, written, dtype="float32")
    tokens = np.array([[3, 17, 60, 5]], np.int32)
    for number, model in enumerate(family):
        _, stats = jmoe.forward(model, tokens, return_stats=True)
        layers = np.arange(len(stats.router_choices))[:, None, None, None]
        met = written.differs[number][layers, stats.router_choices]
        assert met.any()
        np.testing.assert_array_equal(stats.degraded_visits, met.sum(axis=-1))


def test_models_may_be_named_otherwise_and_in_another_order(directories, written):
    sharing = written.directory / "family.json"
    turned = {"statutes": directories["law"], "chat": directories["base"]}
    count = int(written.differs.sum())
    found = []
    for named in (directories, turned):
        family = load_family(named, sharing, dtype="float32", spare_experts=count)
        family.fetch(dict(zip(sorted(family.offloaded.users), family.offloaded.spare, strict=True)))
        found.append(list(map(logits, family)))
    np.testing.assert_array_equal(found[0], found[1][::-1])


def test_what_cannot_be_loaded_is_named(directories, cfg, written, tmp_path):
    with pytest.raises(ValueError, match=r"resident_experts is 14, and .* set it to 0"):
        load_family(directories, written, dtype="float32", resident_experts=14)
    with pytest.raises(ValueError, match=r"spare_experts is 1; .* set it to \d+ or more"):
        load_family(directories, written, dtype="float32", spare_experts=1)
    with pytest.raises(ValueError, match=r"spare_experts is 9, and all 28 experts"):
        load_family(directories, dtype="float32", spare_experts=9)
    with pytest.raises(CheckpointError, match="no directory that holds them"):
        load_family(directories, replace(written, directory=None), dtype="float32")
    with pytest.raises(CheckpointError, match="is not readable"):
        load_family(directories, replace(written, directory=tmp_path), dtype="float32")
    found = load_file(written.directory / WEIGHTS_FILE)
    name = min(found)
    for tensor, words in (
        (found[name][:-1], r"is \[\d+, \d+\], expected"),
        (np.full_like(found[name], np.nan), "not finite"),
    ):
        save_file(found | {name: tensor}, tmp_path / WEIGHTS_FILE)
        with pytest.raises(CheckpointError, match=words):
            load_family(directories, replace(written, directory=tmp_path), dtype="float32")
    text = (written.directory / "family.json").read_text()
    (tmp_path / "family.json").write_text(text.replace('"residual_rank": 3', '"residual_rank": -3'))
    with pytest.raises(SharingError, match="residual_rank is -3"):
        load_family(directories, tmp_path / "family.json", dtype="float32")
    assert MERGED not in written.owners
