"""A front end from outside the package, registered by a setting alone: lines over TCP.

`NUM PROMPT [KEY]` is answered with a line for each token, and a last line that says how it ended.
"""

import asyncio
import logging
import uuid
from collections import Counter
from dataclasses import replace

import pytest
from keyed import WRONG
from served import CODE, Setup, failure, serving, until

from serving.config import ServerConfig
from serving.errors import Overloaded, ServingError
from serving.frontend.access import Access
from serving.frontend.server import Server
from serving.frontend.status import noted
from serving.request import Priority, SamplingParams

MAX_LINE_BYTES = 4096


class Lines:
    """A front end, with a port, limits and refusals of its own protocol."""

    def __init__(self, server: Server) -> None:
        self._server, self._tasks = server, set()
        self._ended = server.metrics.calls.door("lines", ["line"], "RuntimeError")

    async def start(self) -> str:
        host = self._server.config.host
        self._tcp = await asyncio.start_server(self._answer, host, 0, limit=MAX_LINE_BYTES)
        self.port = self._tcp.sockets[0].getsockname()[1]
        return f"{host}:{self.port}"

    async def stop(self) -> None:
        self._tcp.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        how = "cancelled"
        try:
            async with asyncio.timeout(self._server.config.message_timeout_s):
                line = await reader.readline()
            async for out in self._outputs(*line.decode().split()):
                writer.write(f"{out.text}\n".encode())
                await writer.drain()
                how = str(out.finish_reason)
        except (ServingError, ValueError, TypeError, TimeoutError) as error:
            how = type(error).__name__
            writer.write(f"{how}: {error}\n".encode())
        else:
            writer.write(f"{how}\n".encode())
        finally:
            self._ended("line", how)
            self._tasks.discard(task)
            writer.close()

    async def _outputs(self, num: str, prompt: str, key: str = ""):
        server, engine = self._server, self._server.ready_engine()
        engine.check_admission()
        caller = server.access.caller(f"Bearer {key}")
        request_id, priority, model = uuid.uuid4().hex, Priority.BEST_EFFORT, engine.names[0]
        with (
            server.guard.place(),
            caller.request(model, priority),
            server.tracer.request(request_id, model, priority) as span,
        ):
            sampling = SamplingParams(max_new_tokens=int(num))
            outputs = engine.generate(prompt, sampling, request_id=request_id, priority=priority)
            async with noted(outputs, request_id, caller, span) as note:
                async for out in outputs:
                    note(out)
                    yield out


class NeverStops(Lines):
    """One with a fault."""

    async def stop(self) -> None:
        await super().stop()
        raise RuntimeError("on purpose")


NAME = f"{__file__}:Lines"


async def ask(s: Setup, line: str) -> list[str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", s.server.front_ends[NAME].port)
    writer.write(f"{line}\n".encode())
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return answer.decode().splitlines()


def counted(s: Setup) -> dict[str, float]:
    found = Counter[str]()
    for sample in s.server.metrics.calls.collect().samples:
        if sample.labels["protocol"] == "lines" and sample.value:
            found[sample.labels["code"]] += sample.value
    return found


async def test_a_front_end_of_the_settings_generates_beside_the_others() -> None:
    async with serving(frontends=(NAME,)) as s:
        assert await ask(s, "3 abc") == ["d", "e", "f", "length"]
        assert s.server.addresses[NAME] == f"127.0.0.1:{s.server.front_ends[NAME].port}"
        assert list(s.server.addresses)[-1] == NAME  # where the others are is printed first
        assert (counted(s), s.server.guard.num_calls) == ({"length": 1}, 0)
        assert len([message async for message in s.counting(2)]) == 2


async def test_it_obeys_the_limits_that_all_share(file) -> None:
    async with Setup(ServerConfig(port=0, frontends=(NAME,))) as s:
        assert await ask(s, "1 a") == [
            "Unavailable: the server is still loading its model; try again later"
        ]
        await s.ready()
        s.engine.refusal = Overloaded("full", 1.0)
        assert await ask(s, "1 a") == ["Overloaded: full"]
        s.engine.refusal = None
        limits = s.server.guard.limits
        s.server.guard.limits = replace(limits, max_calls=1)
        s.engine.gate.clear()
        running = asyncio.create_task(ask(s, "2 a"))
        await until(lambda: s.server.guard.num_calls == 1)
        (told,) = await ask(s, "1 a")
        assert told.startswith("Overloaded: 1 calls are under way already")
        assert (await failure(s.counting(1))).code() == CODE.RESOURCE_EXHAUSTED
        s.engine.gate.set()
        assert await running == ["b", "c", "length"]
        s.server.guard.limits = limits
        s.server.access = Access(file.path)
        for key in ("", WRONG):
            (told,) = await ask(s, f"1 a {key}")
            assert told.startswith("Unauthenticated: ")
        alice = s.server.access.callers["alice"]
        assert await ask(s, f"1 a {file.text('alice')}") == ["b", "length"]
        assert (alice.num_requests, alice.num_tokens, alice.num_running) == (1, 2, 0)
    assert counted(s) == {"Unavailable": 1, "Overloaded": 2, "Unauthenticated": 2, "length": 2}


async def test_a_drain_waits_for_it_and_a_stop_ends_it() -> None:
    async with serving(frontends=(NAME,)) as s:
        s.engine.gate.clear()
        running = asyncio.create_task(ask(s, "2 a"))
        await until(lambda: s.server.guard.num_calls == 1)
        draining = asyncio.create_task(s.server.drain())
        await asyncio.sleep(0.05)
        assert not draining.done()
        s.engine.gate.set()
        assert await running == ["b", "c", "length"]
        assert await draining
        with pytest.raises(ConnectionRefusedError):
            await ask(s, "1 a")


async def test_one_that_fails_to_stop_does_not_keep_the_others(caplog) -> None:
    name = f"{__file__}:NeverStops"
    async with serving(frontends=(name,)) as s:
        assert s.web.port
    assert f"front end {name} did not stop" in caplog.text
    assert [r.exc_info for r in caplog.records if r.levelno == logging.ERROR]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", s.web.port)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Lines", "front end is 'Lines'; it must be one of module:Class or file.py:Class"),
        ("nowhere:Lines", "front end 'nowhere:Lines' cannot be made: ModuleNotFoundError"),
        ("types:SimpleNamespace", "cannot be made: TypeError"),
        ("builtins:repr", "front end 'builtins:repr' has no start, stop"),
    ],
)
async def test_one_that_is_none_is_named(name, words) -> None:
    with pytest.raises(ValueError, match=words):
        Server(ServerConfig(port=0, frontends=(name,)))
