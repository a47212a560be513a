"""Whole models on the GPU: golden checkpoints, the bundled model, and steps with kernels in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jmoe
from pallas_kernels.backend import references_only

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
ON_CPU = """
import json, sys, jmoe
prompts = json.load(sys.stdin)
out = jmoe.generate(jmoe.load("bundled", "float32"), prompts, 24)
json.dump([out.tokens, out.texts], sys.stdout)
"""


def tasks(count):
    lines = (ROOT / "jmoe" / "bundled" / "tasks.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:count]]


@pytest.mark.parametrize("name", CASES)
def test_golden_logits_and_greedy_tokens(name):
    """In float32, which no kernel takes: the XLA references, as a GPU compiles them."""
    golden = np.load(GOLDEN / name / "golden.npz")
    with jax.default_matmul_precision("highest"):
        model = jmoe.load(GOLDEN / name, dtype="float32")
        logits = np.asarray(jmoe.forward(model, golden["tokens"]))
        prompts = [row.tolist() for row in golden["tokens"]]
        out = jmoe.generate(model, prompts, golden["greedy"].shape[1], stop_token_ids=())
    assert np.abs(logits - golden["logits"]).max() < 2e-4
    assert out.tokens == golden["greedy"].tolist()


def test_the_bundled_model_writes_what_it_writes_on_a_cpu():
    prompts = [task["prompt"] for task in tasks(16)]
    done = subprocess.run(
        [sys.executable, "-c", ON_CPU],
        input=json.dumps(prompts),
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    tokens, texts = json.loads(done.stdout)
    with jax.default_matmul_precision("highest"):
        out = jmoe.generate(jmoe.load("bundled", "float32"), prompts, 24)
    assert out.texts == texts
    assert out.tokens == tokens


@pytest.mark.parametrize(
    "brownout", [None, jmoe.Brownout("partial", threshold_percent=40, way=8)], ids=["exact", "40"]
)
def test_the_bundled_model_solves_its_tasks_in_bfloat16(brownout):
    """Through whatever kernels take its sizes; 99 % are right in float32 on a CPU."""
    asked = tasks(64)
    model = jmoe.load("bundled", "bfloat16")
    out = jmoe.generate(model, [task["prompt"] for task in asked], 64, brownout)
    assert out.texts is not None
    right = [
        text.strip() == task["answer"].strip() for text, task in zip(out.texts, asked, strict=True)
    ]
    assert np.mean(right) >= 0.9


def test_kernels_and_references_make_the_same_model():
    """One layer of Qwen1.5-MoE-A2.7B's geometry in bfloat16, whole sequences."""
    from benchmarks.gpu.sizes import hf_config
    from jmoe.config import from_hf
    from jmoe.random_model import random_model

    config = {**hf_config("qwen1.5-moe-a2.7b", 1), "vocab_size": 1024, "eos_token_id": None}
    model = random_model(from_hf(config), 0, "bfloat16", skew=4.0)
    tokens = np.random.default_rng(0).integers(1024, size=(64, 8))
    kernels = np.asarray(jmoe.forward(model, tokens))
    jax.clear_caches()
    with references_only():
        references = np.asarray(jmoe.forward(model, tokens))
    row_error = np.linalg.norm(kernels - references, axis=-1) / np.linalg.norm(references, axis=-1)
    assert np.median(row_error) < 1e-2
    assert np.mean(row_error > 0.1) < 0.1  # rows in which rounding chose between two experts
