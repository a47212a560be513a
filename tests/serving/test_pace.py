"""When steps are planned: late, but never so late that the device waits for the host."""

import asyncio
from functools import partial

import pytest
from counting import collect

from serving.bench.fake import FakeRunner
from serving.plan import Limits

LIMITS = Limits(16, 4000, 4, 64, 512)
STEP_S = 0.007
pytestmark = pytest.mark.simulated_time


async def decode_s(start, launch_s, num_tokens=2000, step_s=STEP_S, rows=4):
    """Returns the seconds a step takes, once half of a stream is there."""
    runner = partial(FakeRunner, checks_context=False, launch_s=launch_s)
    engine = start(step_s, LIMITS, runner=runner, prefix_reuse="off", max_model_len=4000)
    clock = asyncio.get_running_loop().time
    streams = [asyncio.create_task(collect(engine, [1], num_tokens)) for _ in range(rows)]
    await asyncio.sleep(num_tokens // 2 * STEP_S)
    at, launched = clock(), len(engine.executor.launches)
    await asyncio.gather(*streams)
    return (clock() - at) / (len(engine.executor.launches) - launched)


@pytest.mark.parametrize("launch_s", [0.0, 0.001, 0.0025, 0.004, 0.006])
async def test_a_device_that_steps_come_to_late_is_kept_busy(start, launch_s):
    assert await decode_s(start, launch_s) < 1.02 * STEP_S
