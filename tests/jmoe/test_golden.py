"""Logits and greedy tokens against Hugging Face transformers (tests/golden)."""

from pathlib import Path

import numpy as np
import pytest

import jmoe

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))


@pytest.fixture(scope="module", params=CASES)
def case(request):
    directory = GOLDEN / request.param
    return jmoe.load(directory, dtype="float32"), np.load(directory / "golden.npz")


def test_every_case_is_there():
    assert len(CASES) >= 12


def test_forward_equals_transformers(case):
    model, golden = case
    logits = np.asarray(jmoe.forward(model, golden["tokens"]))
    assert logits.dtype == np.float32
    assert np.abs(logits - golden["logits"]).max() < 1e-4


@pytest.mark.parametrize("chunk_size", [256, 7])
def test_paged_generation_equals_transformers_greedy(case, chunk_size):
    model, golden = case
    prompts = [row.tolist() for row in golden["tokens"]]
    n = golden["greedy"].shape[1]
    out = jmoe.generate(model, prompts, n, stop_token_ids=(), chunk_size=chunk_size, page_size=4)
    assert out.tokens == golden["greedy"].tolist()
    assert out.degraded_visits == [0, 0]
