"""Layers as a GPU's server has them, on a CPU: one after another rather than scanned."""

from pathlib import Path

import pytest

import jmoe
from jmoe.brownout import Brownout
from serving import programs
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.request import SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_moe_mixed_yarn"
PROMPT = [5, 60, 17, 33, 8, 59, 2, 44, 13, 7, 21, 3]


@pytest.mark.parametrize("eager", [False, True])
async def test_a_gpus_server_unstacks_its_layers_unless_eager(eager, monkeypatch):
    unstacked = []

    def watched(params, unstack=programs.unstack):
        unstacked.append(params)
        return unstack(params)

    monkeypatch.setattr(programs, "backend", lambda: "gpu")
    monkeypatch.setattr(programs, "unstack", watched)
    brownout = Brownout("full", 40)
    engine = await Engine.start(
        EngineConfig(
            model=str(GOLDEN),
            dtype="float32",
            max_num_seqs=2,
            max_model_len=32,
            page_size=8,
            max_prefill_tokens=8,  # two chunks
            decode_buckets=(2,),
            prefill_buckets=(8,),
            threshold_buckets_percent=(100,),
            compilation_cache="",
            enforce_eager=eager,
            brownout=BrownoutConfig(
                strategy="full",
                prefill_threshold_percent=100,
                decode_threshold_percent=brownout.threshold_percent,
                salc=False,
            ),
        )
    )
    try:
        assert len(unstacked) == (not eager)
        tokens, degraded = [], 0
        async for out in engine.generate(PROMPT, SamplingParams(max_new_tokens=6, ignore_eos=True)):
            tokens += out.token_ids
            degraded = out.usage.degraded_visits
    finally:
        await engine.stop()
    # Prefill is exact here; decode alone is degraded, of which the first token knows nothing.
    exact = jmoe.generate(jmoe.load(GOLDEN, "float32"), [PROMPT], 1, stop_token_ids=())
    assert tokens[:1] == exact.tokens[0]
    assert len(tokens) == 6
    assert degraded > 0
