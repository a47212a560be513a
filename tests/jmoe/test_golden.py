"""Logits and greedy tokens against Hugging Face transformers (tests/golden)."""

from pathlib import Path

import numpy as np
import pytest

import jmoe

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
# Fed eight tokens at a time instead of whole: dense layers between, all kinds of grouping.
CHUNKED = {"qwen2_moe_mlp_only_tied", "qwen3_moe_mixed_yarn", "mixtral_top1_head_dim"}


pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


@pytest.fixture(scope="module", params=CASES)
def case(request):
    directory = GOLDEN / request.param
    model = jmoe.load(directory, dtype="float32")
    return request.param, model, np.load(directory / "golden.npz")


def test_every_case_is_there():
    assert len(CASES) >= 12
    assert set(CASES) >= CHUNKED


def test_forward_equals_transformers(case):
    _, model, golden = case
    logits = np.asarray(jmoe.forward(model, golden["tokens"]))
    assert logits.dtype == np.float32
    assert np.abs(logits - golden["logits"]).max() < 1e-4


def test_paged_generation_equals_transformers_greedy(case):
    name, model, golden = case
    prompts = [row.tolist() for row in golden["tokens"]]
    n = golden["greedy"].shape[1]
    chunk_size = 8 if name in CHUNKED else 256  # one of them: each is more programs to compile
    out = jmoe.generate(model, prompts, n, stop_token_ids=(), chunk_size=chunk_size, page_size=4)
    assert out.tokens == golden["greedy"].tolist()
    assert out.degraded_visits == [0, 0]
