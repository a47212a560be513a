"""Probes: fitted, kept beside a model, refused where they are another's."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.config import read_config
from jmoe.parallel.probe import PROBE_FILE, Probe, Sums, load_probes, save_probes

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

GOLDEN = Path(__file__).parents[2] / "golden"


def test_a_probe_finds_a_linear_router_and_ignores_the_rows_scale():
    rng = np.random.default_rng(1)
    weight, x = rng.normal(size=(16, 10)), rng.normal(size=(400, 16))
    normed = x / np.sqrt((x * x).mean(axis=1, keepdims=True))
    logits = normed @ weight + rng.normal(size=10)
    scaled = jnp.asarray(x * rng.uniform(0.1, 9, (400, 1)), jnp.float32)
    probe = Sums.of(scaled, jnp.asarray(logits, jnp.float32), jnp.ones(400)).fit(1e-6)
    np.testing.assert_allclose(probe.logits(jnp.asarray(x, jnp.float32)), logits, atol=1e-3)


def test_rows_in_parts_are_rows_at_once_and_padding_does_not_count():
    rng = np.random.default_rng(2)
    x, y = (jnp.asarray(rng.normal(size=(60, n)), jnp.float32) for n in (8, 5))
    once = Sums.of(x, y, jnp.ones(60, jnp.float32)).fit(1e-3)
    garbage = 1e3 * jnp.ones((4, 8), jnp.float32), 1e3 * jnp.ones((4, 5), jnp.float32)
    ones, none = jnp.ones(30, jnp.float32), jnp.zeros(4, jnp.float32)
    parts = [Sums.of(x[:30], y[:30], ones), Sums.of(x[30:], y[30:], ones), Sums.of(*garbage, none)]
    sums = Sums(*(sum(some) for some in zip(*parts, strict=True)))
    for got, want in zip(sums.fit(1e-3), once, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_probes_beside_a_model(tmp_path):
    cfg = read_config(GOLDEN / "qwen2_moe")
    assert load_probes(tmp_path, cfg) is None
    rng, layers = np.random.default_rng(3), cfg.num_moe_layers - 1
    shapes = (layers, cfg.d_model, cfg.num_experts), (layers, cfg.num_experts)
    probes = Probe(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes))
    save_probes(tmp_path, probes)
    assert (tmp_path / PROBE_FILE).stat().st_mode & 0o777 == 0o644  # a server may be another user
    found = load_probes(tmp_path, cfg)
    assert found is not None
    for got, want in zip(found, probes, strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match=f"{PROBE_FILE} holds .*; probes of this model are"):
        load_probes(tmp_path, read_config(jmoe.api.resolve("bundled")))
    save_probes(tmp_path, probes._replace(bias=probes.bias.at[0, 0].set(jnp.nan)))
    with pytest.raises(ValueError, match="not finite"):
        load_probes(tmp_path, cfg)
    (tmp_path / PROBE_FILE).write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=f"{PROBE_FILE} is not readable"):
        load_probes(tmp_path, cfg)
