"""Shaped rows over a mesh; run by test_served_equals_notebook.py on several devices."""

import asyncio

import pytest
from notebook import Asked, answer, check
from shaped import PROMPTS, SHAPED, STRUCTURES, config, matches

import jmoe
from serving.engine import Engine
from serving.request import SamplingParams

pytestmark = pytest.mark.asyncio


async def test_rows_of_every_rank_are_shaped_as_on_one_device() -> None:
    engine = await Engine.start(config(mesh="ep=4", max_num_seqs=16))
    try:
        asked = [
            Asked(prompt, SamplingParams(max_new_tokens=16, ignore_eos=True, **more))
            for prompt in PROMPTS
            for more in (*SHAPED[:4], {})
        ]
        structured = [
            Asked(PROMPTS[1], SamplingParams(max_new_tokens=90, structure=one))
            for one in STRUCTURES.values()
        ]
        calls = (answer(engine, one) for one in asked + structured)
        found = await asyncio.gather(*calls)
        assert engine.stats().compilations_since_ready == 0
    finally:
        await engine.stop()
    for name, got in zip(STRUCTURES, found[len(asked) :], strict=True):
        assert got.reason == "length" or matches(name, got.text)
    check(jmoe.load("bundled", "float32"), asked, found[: len(asked)])
