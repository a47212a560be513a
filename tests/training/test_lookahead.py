"""The command that fits probes, on the bundled model."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmoe
from jmoe.api import resolve
from jmoe.model import layers_of
from jmoe.moe import route
from jmoe.parallel.probe import load_probes
from training.distill.data import read_texts
from training.evaluation.quality import moe_inputs
from training.lookahead import fit_probes, main

TASKS = resolve("bundled") / "tasks.jsonl"


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Compiles with all optimization: programs run over thousands of rows."""


@pytest.fixture(scope="module")
def model():
    return jmoe.load("bundled", "float32", ways=[])


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["lookahead", *map(str, arguments)])
    main()


def hit(predicted, made):
    """Returns the share of each row's experts that were predicted for it (Libra, Table 1)."""
    return float(jnp.mean(jnp.any(predicted[:, None, :] == made[:, :, None], axis=-1)))


@pytest.mark.exhaustive
def test_probes_guess_better_than_the_next_router(model, tmp_path, monkeypatch, capsys):
    run(monkeypatch, "--rows", 4000, "--out", tmp_path)
    assert "4 probes" in capsys.readouterr().out
    probes = load_probes(tmp_path, model.config)
    texts = [model.tokenizer.encode(t.prompt + t.answer) for t in list(read_texts(TASKS))[-400:]]
    tokens = np.array([text[:16] for text in texts if len(text) >= 16], np.int32)[:64]
    lengths = jnp.full(len(tokens), tokens.shape[1])
    found = moe_inputs(model.config, model.weights, jnp.asarray(tokens), lengths)
    layers, top_k = layers_of(model.config, model.params), model.config.experts_per_token
    ours, routers = [], []
    for n in range(len(found) - 1):
        probe = type(probes)(probes.weight[n], probes.bias[n])
        made = route(model.config, layers[n + 1][0], found[n + 1])[2]
        guess = lax.top_k(probe.logits(found[n]), top_k)[1]
        ours.append(hit(guess, made))
        guess = route(model.config, layers[n + 1][0], found[n])[2]  # Libra's own predictor
        routers.append(hit(guess, made))
    assert np.mean(ours) > np.mean(routers) + 0.05


@pytest.mark.deep
def test_rows_beyond_the_number_asked_for_do_not_count(model):
    texts = [model.tokenizer.encode(t.prompt + t.answer) for t in list(read_texts(TASKS))[:80]]
    few = fit_probes(model, texts[:40], num_rows=600)
    same = fit_probes(model, texts, num_rows=600)
    np.testing.assert_allclose(few.weight, same.weight, atol=1e-5)
    more = fit_probes(model, texts, num_rows=1200)
    assert np.abs(more.weight - few.weight).max() > 1e-3


@pytest.mark.deep
def test_what_cannot_be_fitted_is_said(model, tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="10 rows are too few: a probe of bundled has"):
        fit_probes(model, [[1] * 10], num_rows=4000)
    for arguments, words in (
        (["--out", tmp_path / "none"], "there is no such folder"),
        (["--data", tmp_path / "none.jsonl", "--out", tmp_path], "cannot read data file"),
        (["--model", tmp_path], "config.json"),
    ):
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, *arguments)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
