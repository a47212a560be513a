"""Workers that Ray starts: they answer, and one that is killed comes back."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import grpc
import pytest

import jmoe
from serving.client import Client
from serving.errors import SettingsError
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

from .conftest import serving

pytestmark = pytest.mark.deep

pytest.importorskip("ray")

SETTINGS = (
    "engine.mode=aep",
    "engine.asynchronous.workers=ray",
    "engine.asynchronous.attention=1",
    "engine.asynchronous.experts=1",
    "engine.max_num_seqs=8",
    "engine.decode_buckets=8",
    "engine.prefill_buckets=128",
    "engine.salc.controller=algorithm2",
    "drain_timeout_s=120",  # for 200 tokens on a busy machine
)
PROMPT, NEW_TOKENS = [5, 9, 40, 3], 12


def actors():
    """Returns the process ids of the workers on this machine."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and b"ray::_Actor" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # it has just ended
    return found


async def answer(client):
    """Returns a request's tokens; None while a worker is gone."""
    sampling = pb.SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    try:
        call = client.generate(PROMPT, sampling, allow_brownout=False)
        return [token async for message in call for token in message.token_ids]
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error  # noqa: PT017
        return None


@pytest.mark.exhaustive
async def test_a_killed_actor_is_replaced_and_a_drain_waits(tmp_path):
    log = tmp_path / "log"
    want = jmoe.generate(jmoe.load("bundled", "float32"), [PROMPT], NEW_TOKENS, stop_token_ids=())
    with serving(*SETTINGS, log_path=log, hurry=True) as (server, address):
        async with Client(address) as client:
            assert await answer(client) == want.tokens[0]
            before = actors()
            assert len(before) == 2
            os.kill(before[0], signal.SIGKILL)
            for _ in range(1800):  # an actor loads its part of the model, on a busy machine too
                if before[0] not in actors() and await answer(client) is not None:
                    break
                await asyncio.sleep(0.1)
            assert await answer(client) == want.tokens[0]
            assert len(actors()) == 2
            # A drain lasts as long as its streams do: here one waits for a worker that is held up
            # for longer than the 3 s after which Ray's own handler of SIGTERM aborts a process.
            sampling = pb.SamplingParams(max_new_tokens=200, ignore_eos=True)
            call = client.generate(PROMPT, sampling, allow_brownout=False)
            stream = aiter(call)
            told = [*(await anext(stream)).token_ids]
            held = actors()[0]
            os.kill(held, signal.SIGSTOP)
            server.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                await asyncio.to_thread(server.wait, 4)
            os.kill(held, signal.SIGCONT)
            async for message in stream:
                told += message.token_ids
            assert len(told) == 200
        code = await asyncio.to_thread(server.wait, 30)
        assert code == 0, log.read_text()[-4000:]
    for _ in range(100):
        if not actors():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"workers outlive their server: {actors()}")


def test_a_cluster_that_is_not_there_is_named():
    from serving.startup.ray_starter import RayStarter

    with pytest.raises(SettingsError, match=r"ray_address is '127\.0\.0\.1:1', and no cluster"):
        RayStarter("127.0.0.1:1")
