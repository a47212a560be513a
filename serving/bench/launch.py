"""A server as a child process: started, waited for, and ended when its block is left. No jax."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc

from serving.client import Client

_READY = re.compile(rb"jmoe ready on (\S+:\d+)")
_PAGE = re.compile(rb"jmoe page on (\S+:\d+)")


class LaunchError(RuntimeError):
    """A server did not come up, or failed its caller; the message has the end of its log."""


@contextlib.asynccontextmanager
async def running_server(
    command: Sequence[str],
    log_path: Path,
    timeout_s: float,
    say: Callable[[str], None] = lambda text: None,
    failures: tuple[type[Exception], ...] = (),
    on_page: Callable[[str], None] = lambda url: None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[tuple[str, int]]:
    """Starts Python with `command`, and `environment` beside this process's; yields the address it
    prints as ready, and its pid.

    `log_path` takes all its output; `say` is told the newest line while it starts, `on_page` where
    its live page is. An exception of the kinds `failures` that leaves the block is raised as
    LaunchError.

    Raises ValueError for a setting that the server refuses, LaunchError where it ends otherwise or
    is not ready in time.
    """
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command),
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment},
        )
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        reader = asyncio.create_task(_read_stdout(process, log, address, on_page))
        try:
            yield await _wait_for_address(address, timeout_s, log_path, say), process.pid
        except failures as error:
            raise LaunchError(f"{error}; the end of {log_path}:\n{tail(log_path, 25)}") from error
        finally:
            reader.cancel()
            await _stop(process)


def set_flags(settings: Mapping[str, object]) -> list[str]:
    """Returns the flags of `jmoe serve` for settings by their dotted keys."""

    def text(value: object) -> str:
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    return [f"--set={key}={text(value)}" for key, value in settings.items()]


@contextlib.asynccontextmanager
async def ready_server(
    command: Sequence[str],
    log_path: Path,
    timeout_s: float,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[Client]:
    """Starts Python with `command`, and `environment` beside this process's; yields a client once
    the server is ready.

    Raises LaunchError also where a call to the server fails in the block.
    """
    failures = (grpc.aio.AioRpcError, TimeoutError, OSError)
    how = {"failures": failures, "environment": environment}
    async with (
        running_server(command, log_path, timeout_s, **how) as (address, _),
        Client(address) as client,
    ):
        await client.wait_ready(timeout_s)
        yield client


async def _read_stdout(
    process: asyncio.subprocess.Process,
    log: Any,
    address: "asyncio.Future[str]",
    on_page: Callable[[str], None],
) -> None:
    assert process.stdout is not None
    async for line in process.stdout:  # to its end, or the child would block on a full pipe
        log.write(line)
        log.flush()
        if page := _PAGE.search(line):
            on_page(page[1].decode())
        if (ready := _READY.search(line)) and not address.done():
            address.set_result(ready[1].decode())
    if address.done():
        return
    status = await process.wait()
    log.flush()
    said = tail(Path(log.name), 1)
    if status == 2 and said.startswith("jmoe: "):  # bad input, which it names in one line
        address.set_exception(ValueError(said.removeprefix("jmoe: ")))
    else:
        address.set_exception(LaunchError(f"the server ended with status {status}"))


async def _wait_for_address(
    address: "asyncio.Future[str]", timeout_s: float, log_path: Path, say: Callable[[str], None]
) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            while not address.done():
                await asyncio.wait([address], timeout=0.5)
                say(tail(log_path, 1).strip())
        return address.result()
    except TimeoutError:
        reason = f"the server was not ready after {timeout_s:g} s"
    except LaunchError as error:
        reason = str(error)
    raise LaunchError(f"{reason}; the end of {log_path}:\n{tail(log_path, 25)}")


def tail(path: Path, num_lines: int) -> str:
    """Returns the last lines of a log."""
    return "\n".join(path.read_text(errors="replace").rstrip().splitlines()[-num_lines:])


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout=15)
        except TimeoutError:
            process.kill()
            await process.wait()
