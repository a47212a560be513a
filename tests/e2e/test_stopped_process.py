"""A server that was stopped for a while (SIGSTOP, a suspended machine) goes on where it was."""

import asyncio
import signal
import time

import pytest

from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

from .conftest import FEW_PROGRAMS, serving

pytestmark = pytest.mark.deep

WATCHDOG_S = 2.0


async def test_a_stop_longer_than_the_watchdogs_limit_is_no_step_that_hangs():
    with serving(*FEW_PROGRAMS, f"engine.watchdog_s={WATCHDOG_S}") as (process, address):
        async with Client(address) as client:
            sampling = pb.SamplingParams(max_new_tokens=100, ignore_eos=True)
            stream = aiter(client.generate([1, 2, 3], sampling))
            first = await anext(stream)
            process.send_signal(signal.SIGSTOP)
            await asyncio.to_thread(time.sleep, 2.5 * WATCHDOG_S)  # the length is what is tested
            process.send_signal(signal.SIGCONT)
            rest = [message async for message in stream]
            assert len(first.token_ids) + sum(len(m.token_ids) for m in rest) == 100
            assert (await client.server_info()).status == "ready"
            stats = await client.stats()
            assert (stats.requests_finished, stats.kv_pages_used) == (1, 0)
