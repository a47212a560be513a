"""Workers' processes are killed and stopped, and their connections reset, under load: nobody hangs,
nobody gets a wrong token (AMoE).
"""

import asyncio
import ctypes
import json
import os
import random
import re
import signal
import socket
import urllib.request
from collections import Counter
from pathlib import Path

import grpc
import pytest

import jmoe
from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

from .conftest import serving

pytestmark = pytest.mark.deep

CODES = grpc.StatusCode
KILLS = int(os.environ.get("JMOE_KILLS", "4"))
FAULTS = (signal.SIGSTOP, "reset", signal.SIGKILL, signal.SIGKILL, "reset", signal.SIGKILL)
"""Faults in turn. A stopped worker falls silent: it counts as gone after a while, and is killed."""
BURST, PIDFD_GETFD, ESTABLISHED = 25, 438, "01"
SETTINGS = (
    "engine.mode=aep",
    "engine.asynchronous.workers=processes",
    "engine.asynchronous.attention=1",
    "engine.asynchronous.experts=2",
    "engine.asynchronous.worker_timeout_s=6",
    "engine.max_num_seqs=8",
    "engine.decode_buckets=8",
    "engine.prefill_buckets=128",
    "engine.salc.controller=algorithm2",
    "engine.brownout.salc=false",
)
NEW_TOKENS, ANSWERS_WITHIN_S = 24, 180
WAYS = (2, 4, 8)


def workers_of(server):
    """Returns the names of a server's workers by process id."""
    found = {}
    for task in Path(f"/proc/{server.pid}/task").iterdir():
        for pid in _read(task / "children").split():
            line = _read(Path(f"/proc/{pid}/cmdline")).split("\0")
            if "serving.startup.worker" in line:
                found[int(pid)] = line[line.index("serving.startup.worker") + 1]
    return found


def num_up(port):
    """Returns the number of workers that are up."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return len(re.findall(rb"(?m)^jmoe_worker_up\{.*\} 1\.0$", answer.read()))


def reset_connections(pid):
    """Has the kernel drop a process's connections, and what is under way on them, with an RST;
    returns how many. Raises OSError where that is not permitted.
    """
    table = [line.split() for line in _read(Path("/proc/net/tcp")).splitlines()[1:]]
    connections = {f"socket:[{row[9]}]" for row in table if row[3] == ESTABLISHED}
    libc, process, count = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid), 0
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if os.readlink(link) not in connections:
                    continue
            except FileNotFoundError:
                continue
            if (fd := libc.syscall(PIDFD_GETFD, process, int(link.name), 0)) < 0:
                raise OSError(ctypes.get_errno(), "pidfd_getfd")
            count += libc.connect(fd, bytes(16), 16) == 0  # to AF_UNSPEC: to nowhere
            os.close(fd)
    finally:
        os.close(process)
    return count


def _read(path):
    """Reads a file; empty where the thread or process has just ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Load:
    """Clients that each send one request after another, and check the answers."""

    def __init__(self, address, prompts, want):
        self.address, self.prompts, self.want = address, prompts, want
        self.seen, self.answered, self.done = Counter(), 0, False

    async def caller(self, seed):
        rng = random.Random(seed)
        async with Client(self.address) as client:
            while not self.done:
                at = rng.randrange(len(self.prompts))
                await asyncio.wait_for(self.ask(client, at), ANSWERS_WITHIN_S)

    async def ask(self, client, at):
        sampling, got, failed = pb.SamplingParams(max_new_tokens=NEW_TOKENS), [], None
        sampling.ignore_eos = True
        call = client.generate(self.prompts[at], sampling, allow_brownout=False)
        try:
            async for message in call:
                got += message.token_ids
        except grpc.aio.AioRpcError as error:
            failed = error
        assert got == self.want[at][: len(got)]  # what has come by then, too
        if failed is None:
            self.seen["OK"] += 1
            assert len(got) == NEW_TOKENS
            return
        self.seen[failed.code().name] += 1
        assert failed.code() is CODES.UNAVAILABLE, failed
        assert "gone" in failed.details() or "no worker" in failed.details(), failed
        assert dict(failed.trailing_metadata())["grpc-retry-pushback-ms"]
        await asyncio.sleep(0.2)

    async def until(self, condition):
        for _ in range(10 * ANSWERS_WITHIN_S):
            if condition():
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"nothing more came: {self.seen}")


async def use_way(address, way):
    async with Client(address) as client:
        assert (await client.set_brownout(way=way)).way == way


async def check_ways(address, model, prompt):
    """Checks that a request under brownout visits the united experts of the way in force, and then
    those of each.
    """
    sampling = pb.SamplingParams(max_new_tokens=6, ignore_eos=True)
    async with Client(address) as client:
        fixed = {"prefill_threshold_percent": 30, "decode_threshold_percent": 30}
        state = await client.set_brownout(strategy="partial", **fixed)
        for way in (state.way, *WAYS):
            await client.set_brownout(way=way)
            outs = [out async for out in client.generate(prompt, sampling, reuse_prefix=False)]
            brownout = jmoe.Brownout("partial", 30, way, "weight")
            want = jmoe.generate(model, [prompt], 6, brownout, stop_token_ids=())
            assert [token for out in outs for token in out.token_ids] == want.tokens[0]
            assert outs[-1].usage.degraded_visits == want.degraded_visits[0] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("copies", [2, 1])
async def test_workers_are_killed_and_come_back(copies):
    """With an expert on both workers, one of them may go and nobody notices. The way of united
    experts changes meanwhile; in the end all have the last one.
    """
    model, rng = jmoe.load("bundled", "float32"), random.Random(copies)
    lines = (model.path / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [model.tokenizer.encode(json.loads(line)["prompt"]) for line in lines[:12]]
    want = jmoe.generate(model, prompts, NEW_TOKENS, stop_token_ids=()).tokens
    settings = [*SETTINGS, f"engine.asynchronous.copies={copies}"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(*settings, f"metrics_port={port}", hurry=True) as (server, address):
        load = Load(address, prompts, want)
        callers = [asyncio.create_task(load.caller(seed)) for seed in range(6)]
        await load.until(lambda: load.seen["OK"] > 6)
        before = workers_of(server)
        for process in (*before, server.pid):
            os.kill(process, signal.SIGHUP)
        await load.until(lambda: load.seen["OK"] > 12)
        assert workers_of(server) == before
        for number in range(KILLS):
            victim, name = rng.choice(sorted(workers_of(server).items()))
            refused = load.seen["UNAVAILABLE"]
            changing = asyncio.create_task(use_way(address, WAYS[number % len(WAYS)]))
            await asyncio.sleep(rng.uniform(0, 0.03))
            fault = FAULTS[number % len(FAULTS)]
            if fault == "reset":
                count = 0
                for _ in range(BURST):
                    count += reset_connections(victim)
                    await asyncio.sleep(rng.uniform(0, 0.08))
                assert count >= BURST
            else:
                os.kill(victim, fault)
                await asyncio.sleep(rng.uniform(0, 1))
                await load.until(lambda gone=victim: gone not in workers_of(server))
                await load.until(lambda: len(workers_of(server)) == 3)
            if copies == 2:  # or the next might take the other host of an expert
                await load.until(lambda: num_up(port) == 3)
            await asyncio.wait_for(changing, ANSWERS_WITHIN_S)
            before = load.seen["OK"]
            await load.until(lambda before=before: load.seen["OK"] > before + 6)
            if fault == "reset":
                assert victim in workers_of(server)
            if fault == "reset" or (copies == 2 and name.startswith("experts")):
                assert load.seen["UNAVAILABLE"] == refused
            assert all(not caller.done() for caller in callers), [c for c in callers if c.done()]
        load.done = True
        await asyncio.wait_for(asyncio.gather(*callers), ANSWERS_WITHIN_S)
        await load.until(lambda: num_up(port) == 3)
        await check_ways(address, model, prompts[0])
        async with Client(address) as client:
            stats = await client.stats()
            assert (stats.num_running, stats.num_waiting, stats.kv_pages_used) == (0, 0, 0)
            assert stats.compilations_since_ready == 0
        print(dict(load.seen))
        server.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait, 30) == 0
        assert load.seen["OK"] > 6 * KILLS
