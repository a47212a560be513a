"""An executor from outside the package, in one file: whole forward passes, and no pages."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

import jmoe
from jmoe.packed_rows import KV_LEN, Q_LEN, SLOT
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.errors import InvalidRequest, Unavailable
from serving.execution.executor import Completed
from serving.plan import Limits, Phase, StepResult
from serving.request import BrownoutChange, SamplingParams

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen2_moe"


class Recomputing:
    """Keeps each slot's tokens and runs all of them for each next one: an Executor by its methods
    alone, which completes steps whole and in order.
    """

    in_order, compilations_since_ready, num_programs = True, 0, 0
    limits = Limits(4, 64, 8, 16, 4)

    def __init__(self, model):
        self.model, self.contexts, self.breaks = model, {}, False

    def listen(self, tell):
        self.tell = tell

    def submit(self, plan, control):
        if self.breaks:
            self.tell(Completed(RuntimeError("the device is gone")))
            return
        tokens, logprobs, at = [], [], 0
        for row in plan.rows:
            slot, q_len = int(row[SLOT]), int(row[Q_LEN])
            if plan.phase is Phase.PREFILL:
                context = self.contexts.setdefault(slot, [])
                context[int(row[KV_LEN]) - q_len :] = plan.tokens[at : at + q_len].tolist()
                at += q_len
            context = self.contexts[slot]
            padded = context + [0] * (64 - len(context))  # no row reads what follows it
            logits = np.asarray(jmoe.forward(self.model, [padded]))[0, len(context) - 1]
            logits = logits.astype(np.float64)
            tokens.append(int(logits.argmax()))
            logprobs.append(float(logits.max() - np.logaddexp.reduce(logits)))
        for row, token in zip(plan.rows, tokens, strict=True):  # what the next step decodes
            context = self.contexts[int(row[SLOT])]
            context[int(row[KV_LEN]) :] = [token]
        none = np.zeros((0, 0), np.int32)
        self.tell(Completed(StepResult(tokens, logprobs, [0] * len(tokens), none, None)))

    def watch(self, on_failure):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
async def engine():
    model = jmoe.load(GOLDEN, "float32")
    config = EngineConfig(
        max_model_len=64, prefix_reuse="off", brownout=BrownoutConfig("zero"), watchdog_s=0
    )
    engine = Engine(config, Recomputing(model), model)
    engine.run()
    yield engine
    await engine.stop()
    assert engine.executor.closed


async def generate(engine, prompt, count):
    sampling, tokens = SamplingParams(max_new_tokens=count, ignore_eos=True), []
    async for output in engine.generate(prompt, sampling):
        tokens += output.token_ids
    return tokens


@pytest.mark.deep
async def test_it_serves_what_the_notebook_writes(engine):
    """More requests than slots, with a prompt longer than a chunk."""
    prompts = [[5, 9, 2], [7], [30, 4, 22, 8, 1], list(range(1, 24)), [11, 3], [2, 2, 2]]
    got = await asyncio.gather(*(generate(engine, prompt, 5) for prompt in prompts))
    want = jmoe.generate(engine.model, prompts, 5, stop_token_ids=())
    assert got == want.tokens
    assert await engine.drain(10)
    engine.scheduler.check_idle()


async def test_what_it_cannot_do_is_refused_and_what_breaks_it_ends_the_engine(engine):
    with pytest.raises(InvalidRequest, match="way is 4; this server can switch to: none"):
        await engine.set_brownout(BrownoutChange(way=4))
    engine.executor.breaks = True
    with pytest.raises(Unavailable, match="the engine failed: RuntimeError: the device is gone"):
        await generate(engine, [1, 2], 3)
