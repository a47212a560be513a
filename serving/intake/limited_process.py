"""A process for what strangers wrote: structures and chat templates are compiled in one that has
limits on time and memory, which may end without harm. See `serving.intake.limited_child`.
"""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import orjson


class LimitExceeded(Exception):
    """A question took too much time or memory, or crashed the process."""


class LimitedProcess:
    """Answers one question at a time; starts with the first one, and again after its end."""

    def __init__(
        self, kind: str, facts: Callable[[], dict[str, Any]], limit_s: float, room_bytes: int
    ) -> None:
        """`kind` is one of `limited_child`, which gets `facts` when it starts. Each answer may take
        `limit_s`, and `room_bytes` beyond what the process has then.
        """
        self._kind, self._facts = kind, facts
        self._limit_s, self._room_bytes = limit_s, room_bytes
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a question.

        Raises TypeError for a question that is not JSON, LimitExceeded, and OSError if no process
        can be started.
        """
        message = orjson.dumps(question)
        async with self._turn:
            for again in (False, True):
                try:
                    return await self._asked(message)
                except TimeoutError:
                    await self.close()
                    raise LimitExceeded(f"it takes more than {self._limit_s:g} s") from None
                except (EOFError, ConnectionError):
                    await self.close()
                    if again:
                        raise LimitExceeded(
                            "it takes too much memory, or is nested too deeply"
                        ) from None
                    # Something else may have ended the process, so this may not be to blame.
                except BaseException:  # cancelled: the next caller must not get this answer
                    await self.close()
                    raise
        raise AssertionError("not reached")

    async def close(self) -> None:
        """Ends the process; another question starts a new one."""
        process, self._process = self._process, None
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def _asked(self, message: bytes) -> dict[str, Any]:
        if self._process is None or self._streams is None or self._process.poll() is not None:
            await self.close()
            await self._start()
        async with asyncio.timeout(self._limit_s):
            return await self._told(message)

    async def _start(self) -> None:
        own, others = socket.socketpair()
        own.setblocking(False)
        with others:
            self._streams = await asyncio.open_unix_connection(sock=own)
            # In a thread, since a large process takes long to start another.
            self._process = await asyncio.to_thread(self._spawn, others)
        limits = {"limit_s": self._limit_s, "room_bytes": self._room_bytes}
        await self._told(orjson.dumps(self._facts() | limits))

    def _spawn(self, end: socket.socket) -> "subprocess.Popen[bytes]":
        """Starts a process that inherits `end` alone, and ends when the other end is closed."""
        command = sys.executable, "-m", "serving.intake.limited_child", self._kind
        number = end.fileno()
        return subprocess.Popen(command, stdin=number, stdout=number, stderr=subprocess.DEVNULL)

    async def _told(self, message: bytes) -> dict[str, Any]:
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(len(message).to_bytes(4) + message)
        await writer.drain()
        head = await reader.readexactly(4)
        return orjson.loads(await reader.readexactly(int.from_bytes(head)))
