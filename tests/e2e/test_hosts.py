"""One server over two processes of two devices each: its answers, and how it ends."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from pathlib import Path

import grpc
import pytest
import zmq

import jmoe
from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from tests.jmoe.conftest import add_united
from tests.variants import variant

from .conftest import FEW_PROGRAMS
from .exact_answers import check_exact_answers, check_shaped_answers, prompts

pytestmark = pytest.mark.deep

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen2_moe"

PEER_TIMEOUT_S = 4.0
EXIT_S = 10.0
"""Time for an exit beside what it waits for: two cores, and jax to shut down."""
ENDLESS = pb.SamplingParams(max_new_tokens=200, ignore_eos=True)
STRUCTURED = pb.SamplingParams(max_new_tokens=200, regex="[a-z]{400}")
LONG = pb.SamplingParams(max_new_tokens=24, ignore_eos=True)


class Hosts:
    """Two processes, and what they have printed."""

    def __init__(self, folder, ports, changes, flags=()):
        self.processes, self._folder, self.started_at = [], folder, time.monotonic()
        coordinator, port = ports
        for index in (0, 1):
            settings = (*FEW_PROGRAMS, f"engine.peer_timeout_s={PEER_TIMEOUT_S}", *changes[index])
            command = [sys.executable, "-m", "serving.cli", "serve", "--config", "demo"]
            command += ["--mesh", "ep=4"]
            if not any(value.startswith("engine.coordinator=") for value in settings):
                command += ["--coordinator", f"127.0.0.1:{coordinator}"]
            command += ["--num-processes", "2", "--process-index", str(index), "--port", str(port)]
            command += ["--secret-file", str(self._secret(index))]
            command += ["--set", f"engine.compilation_cache={folder.parent / 'programs'}"]
            command += [part for value in settings for part in ("--set", value)] + [*flags]
            with self._out(index).open("w") as out, self._err(index).open("w") as err:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        stdout=out,
                        stderr=err,
                        cwd=Path(__file__).parents[2],
                        env={
                            **os.environ,
                            "JAX_PLATFORMS": "cpu",
                            "JAX_NUM_CPU_DEVICES": "2",
                            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling is most of it
                        },
                    )
                )

    def _secret(self, index):
        """Writes the secret; each process has a copy of its own."""
        path = self._folder / f"secret{index}"
        path.touch(0o600)
        path.write_text("5ec2e7" * 10 + "\n" * index)
        return path

    def _out(self, index):
        return self._folder / f"out{index}"

    def _err(self, index):
        return self._folder / f"err{index}"

    def log(self, index):
        return self._err(index).read_text()

    def wait_for(self, index, pattern, timeout_s=300):
        """Waits until a process has printed a pattern; returns the match."""
        until = time.monotonic() + timeout_s
        while (found := re.search(pattern, self._out(index).read_text())) is None:
            ended = [process.poll() for process in self.processes]
            assert ended == [None, None], f"{ended}: {self.log(0)[-2000:]} {self.log(1)[-2000:]}"
            assert time.monotonic() < until, f"{self.log(0)[-2000:]} {self.log(1)[-2000:]}"
            time.sleep(0.1)
        return found

    def address(self):
        """Returns the address once requests are served."""
        return self.wait_for(0, r"jmoe ready on (\S+)").group(1)

    def served(self, index):
        """Returns the process of `jmoe serve --restart` that serves or follows now."""
        children = Path(f"/proc/{self.processes[index].pid}/task/{self.processes[index].pid}")
        (child,) = (children / "children").read_text().split()
        return int(child)

    def ready_times(self):
        """Returns how often process 0 has got ready."""
        return self._out(0).read_text().count("jmoe ready on")

    def ended(self, timeout_s):
        """Waits for both processes to end; returns their exit statuses."""
        return [process.wait(timeout_s) for process in self.processes]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def ports():
    """Returns two free ports: every server of this module uses the same, one after another."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory, ports):
    """Yields a function that starts two processes with changed settings."""
    folder = tmp_path_factory.mktemp("hosts")

    @contextmanager
    def start(leaders=(), followers=(), *flags):
        own = folder / f"run{len(list(folder.iterdir()))}"
        own.mkdir()
        started = Hosts(own, ports, (leaders, followers), flags)
        try:
            yield started
        finally:
            started.kill()

    return start


async def tokens(client, text, **sampling):
    call = client.generate(
        text, pb.SamplingParams(max_new_tokens=24, **sampling), allow_brownout=False
    )
    return [token async for message in call for token in message.token_ids]


async def streams(address, count, begun, *kinds):
    """Runs streams and returns how they end; `begun` is called in the middle of them."""
    samplings, waits_ms = list(islice(cycle(kinds or (ENDLESS,)), count)), list[int]()
    async with Client(address) as client:

        async def one(number):
            seen = 0
            try:
                async for _ in client.generate([number, 2, 3], samplings[number]):
                    seen += 1
                    if number == 0 and seen == 3:
                        begun()
            except grpc.aio.AioRpcError as error:
                if "PeerLost" in error.details():
                    waits_ms.append(int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]))
                return error.code(), error.details()
            return grpc.StatusCode.OK, seen

        ends = await asyncio.gather(*map(one, range(count)))
    assert all(wait_ms > 0 for wait_ms in waits_ms)
    return ends


@contextmanager
def strangers(port):
    """Opens connections that try to join, say nothing, or send nonsense, for the length of the
    block.
    """
    with zmq.Context() as context, context.socket(zmq.PUSH) as one:
        one.linger = 0
        events = one.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        one.connect(f"tcp://127.0.0.1:{port}")
        one.send_multipart([bytes(49), b'["Join", {}]'])
        try:
            assert events.poll(20_000)
        finally:  # or the context waits for ever
            one.disable_monitor()
            events.close()
    with ExitStack() as stack:
        for number in range(200):
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            if number % 2:
                idle.sendall(b"\0nonsense" * 50)
        yield


async def test_two_processes_answer_as_one_and_end_together(hosts, ports):
    model = jmoe.load("bundled", "float32")
    texts = prompts(model)[:24]
    with hosts(leaders=("drain_timeout_s=120",)) as started:
        address = started.address()
        assert "jmoe follows 127.0.0.1" in started.wait_for(1, ".*as process 1 of 2").group(0)
        with strangers(ports[0]):
            await check_exact_answers(address, model)
            await check_shaped_answers(address, model)
        async with Client(address) as client:
            assert (await client.set_brownout(way=2)).way == 2
            sampled = [tokens(client, text, temperature=0.8, top_k=5) for text in texts[:4]]
            best_effort = [
                client.generate(text, LONG, priority=pb.BEST_EFFORT) for text in texts[4:12]
            ]

            async def read(call):
                return sum([len(message.token_ids) async for message in call])

            counts = asyncio.gather(*map(read, best_effort))
            assert all(await asyncio.gather(*sampled))
            assert await counts == [24] * 8
            stats = await client.stats()
            assert (stats.compilations_since_ready, stats.kv_pages_used) == (0, 0)
            assert stats.degraded_visits > 0
        for one in started.processes:
            one.send_signal(signal.SIGHUP)  # ends nobody
        leader = started.processes[0]
        ends = await streams(address, 2, lambda: leader.send_signal(signal.SIGTERM), LONG)
        assert ends == [(grpc.StatusCode.OK, 24)] * 2  # drained
        assert started.ended(EXIT_S) == [0, 0]


@pytest.mark.exhaustive
async def test_two_processes_serve_a_family(hosts, tmp_path):
    found = {name: variant(GOLDEN, tmp_path / name, seed) for seed, name in enumerate(("a", "b"))}
    for path in found.values():
        add_united(path, ways=(2,))
    named = [f"--model={name}={path}" for name, path in found.items()]
    sizes = ("engine.max_model_len=64", "engine.brownout.way=2", "engine.mixed_models=2")
    with hosts(sizes, sizes, *named) as started:
        async with Client(started.address()) as client:
            prompts = [[n + 2, 9, 3 * n + 4] for n in range(12)]

            async def written(prompt, model):
                sampling = pb.SamplingParams(max_new_tokens=12, ignore_eos=True)
                call = client.generate(prompt, sampling, model=model, allow_brownout=False)
                return [token async for message in call for token in message.token_ids]

            models = ["ab"[n % 2] for n in range(12)]
            got = await asyncio.gather(*map(written, prompts, models))
    for name, path in found.items():
        own = [n for n in range(12) if models[n] == name]
        model = jmoe.load(path, "float32")
        want = jmoe.generate(model, [prompts[n] for n in own], 12, stop_token_ids=())
        assert [got[n] for n in own] == want.tokens


@pytest.mark.exhaustive
async def test_a_killed_follower_ends_all_and_says_so_and_a_restart_works(hosts, ports, tmp_path):
    load_file = tmp_path / "load.npy"
    alike = tuple(
        f"engine.balance.{setting}"
        for setting in ("spare_slots=1", "interval_s=0.1", f"load_file={load_file}")
    )
    with hosts(alike, alike) as started:
        address = started.address()
        ends = await streams(address, 4, started.processes[1].kill, ENDLESS, STRUCTURED)
        for code, details in ends:
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "PeerLost: process 1 of 2 is gone" in details
        assert started.processes[0].wait(PEER_TIMEOUT_S + EXIT_S) == 1
        assert "health is NOT_SERVING from now on" in started.log(0)
        assert "jmoe: the engine failed: PeerLost: process 1 of 2" in started.log(0)
    assert load_file.exists()
    with hosts((*alike, f"engine.coordinator=0.0.0.0:{ports[0]}"), alike) as started:
        address = started.address()
        await check_exact_answers(address, jmoe.load("bundled", "float32"))
        ends = await streams(address, 1, started.processes[0].kill)
        assert ends[0][0] is grpc.StatusCode.UNAVAILABLE
        assert started.processes[1].wait(PEER_TIMEOUT_S + EXIT_S) == 1
        assert re.search("\njmoe: process 0 at .* is gone; .*\n$", started.log(1))


@pytest.mark.exhaustive
async def test_a_follower_that_falls_silent_is_noticed_within_the_time(hosts):
    with hosts() as started:
        address, begun = started.address(), []

        def stop():
            begun.append(time.monotonic())
            started.processes[1].send_signal(signal.SIGSTOP)

        ends = await streams(address, 2, stop)
        assert time.monotonic() - begun[0] < PEER_TIMEOUT_S + 2.0  # and two busy cores
        for code, details in ends:
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "PeerLost: process 1 of 2 is gone" in details
        assert started.processes[0].wait(EXIT_S) == 1


async def test_other_settings_are_refused_before_anything_is_loaded(hosts):
    with hosts(followers=("engine.page_size=32",), leaders=("engine.join_timeout_s=30",)) as it:
        assert it.processes[1].wait(60) == 2
        assert "engine.page_size is 32 in process 1 of 2 and 16 in process 0" in it.log(1)
        assert "loading" not in it.log(1)
        it.processes[0].send_signal(signal.SIGTERM)  # while it waits for the other one
        assert it.processes[0].wait(EXIT_S) == 0


async def test_a_follower_lost_while_the_server_starts_ends_it(hosts):
    with hosts() as started:
        started.wait_for(1, "jmoe follows")
        started.processes[1].kill()
        assert started.processes[0].wait(PEER_TIMEOUT_S + EXIT_S) == 1
        assert "jmoe: process 1 of 2 is gone" in started.log(0)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kills", "run"), [(2, 1), *((6, run) for run in range(3))])
async def test_a_group_whose_process_was_killed_serves_again_by_itself(hosts, kills, run):
    """A follower is killed, then the leader, in turn, under load: 20 times in all runs."""
    model = jmoe.load("bundled", "float32")
    with hosts((), (), "--restart") as started:
        address, began = started.address(), time.monotonic()
        load_s = began - started.started_at
        for number in range(kills):
            victim = (number + 1) % 2
            pid = started.served(victim)
            killed = []

            def kill(pid=pid, killed=killed):
                killed.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)

            ends = await streams(address, 4, kill)
            assert all(code is grpc.StatusCode.UNAVAILABLE for code, *_ in ends)
            if victim:
                assert all("PeerLost: process 1 of 2 is gone" in details for _, details in ends)
            while started.ready_times() < number + 2:
                assert [each.poll() for each in started.processes] == [None, None]
                assert time.monotonic() - killed[0] < load_s + 30, started.log(0)[-2000:]
                await asyncio.sleep(0.1)
            took_s = time.monotonic() - killed[0]
            print(f"process {victim}: {took_s:.1f} s; the first start: {load_s:.1f} s")
            await check_exact_answers(address, model)
        started.processes[0].send_signal(signal.SIGTERM)
        assert started.ended(EXIT_S) == [0, 0]
