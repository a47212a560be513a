"""Shaped rows and structured outputs over a mesh; run by test_shaped.py on several devices."""

import asyncio

import pytest
from shaped import PROMPTS, SHAPED, STRUCTURES, check, config, matches, texts

import jmoe
from serving.engine import Engine

pytestmark = pytest.mark.asyncio


async def test_rows_of_every_rank_are_shaped_as_on_one_device() -> None:
    model = jmoe.load("bundled", "float32")
    engine = await Engine.start(config(mesh="ep=4", max_num_seqs=16))
    try:
        plain = {"max_new_tokens": 16, "ignore_eos": True}
        asked = [(p, plain | s) for p in PROMPTS for s in (*SHAPED[:4], {})]
        wanted = [(PROMPTS[1], {"structure": s, "max_new_tokens": 90}) for s in STRUCTURES.values()]
        found = await asyncio.gather(*(texts(engine, p, **s) for p, s in asked + wanted))
        for name, (text, _, reason) in zip(STRUCTURES, found[len(asked) :], strict=True):
            assert reason == "length" or matches(name, text)
        assert engine.stats().compilations_since_ready == 0
        for (prompt, sampling), (_, outputs, _) in zip(asked, found, strict=False):
            check(model, prompt, outputs, sampling)
    finally:
        await engine.stop()
