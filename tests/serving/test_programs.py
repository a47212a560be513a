"""Layers as a Hopper GPU's server has them, on a CPU: one after another rather than scanned."""

from pathlib import Path

import pytest

from jmoe import steps
from jmoe.model import unstack
from pallas_kernels.backend import traced_for
from serving import programs
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.request import SamplingParams

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_moe_mixed_yarn"
PROMPT = [5, 60, 17, 33, 8, 59, 2, 44, 13, 7, 21, 3]


async def answer(eager):
    """Tokens and degraded visits; prefill in two chunks, decode under brownout."""
    engine = await Engine.start(
        EngineConfig(
            model=str(GOLDEN),
            dtype="float32",
            max_num_seqs=2,
            max_model_len=32,
            page_size=8,
            max_prefill_tokens=8,
            decode_buckets=(2,),
            prefill_buckets=(8,),
            threshold_buckets_percent=(100,),
            compilation_cache="",
            enforce_eager=eager,
            brownout=BrownoutConfig(strategy="full", decode_threshold_percent=40, salc=False),
        )
    )
    try:
        tokens, degraded = [], 0
        async for out in engine.generate(PROMPT, SamplingParams(max_new_tokens=6, ignore_eos=True)):
            tokens += out.token_ids
            degraded = out.usage.degraded_visits
        return tokens, degraded
    finally:
        await engine.stop()


async def test_layers_one_after_another_answer_as_scanned_ones(monkeypatch):
    def as_on_a_gpu(params, *, eager):
        chosen.append(eager)
        return (params if eager else unstack(params)), {}

    chosen = []
    monkeypatch.setattr(programs, "served", as_on_a_gpu)
    tokens, degraded = await answer(eager=False)
    assert (tokens, degraded) == await answer(eager=True)
    assert chosen == [False, True]
    assert len(tokens) == 6
    assert degraded > 0


def test_what_is_served_where():
    """Options of XLA by layout: with the wrong ones a scan copies weights, or a graph breaks up."""
    params = {"segments": ()}
    assert steps.served(params) == (params, {})
    assert steps.served(params, eager=True) == (params, {})
    with traced_for("cuda"):
        _, graph = steps.served(params)
        _, eager = steps.served(params, eager=True)
        scan = steps.compiler_options()
    assert graph == scan | {"xla_gpu_enable_dynamic_slice_fusion": "False"}
    assert eager == scan | {"xla_gpu_enable_command_buffer": ""}
