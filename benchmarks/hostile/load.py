"""The attempts, sent by many clients at once, and how each of them ended."""

import asyncio
import collections
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks.hostile import over_http
from benchmarks.hostile.attempts import GENERATE, Attempt, Facts, draw
from benchmarks.hostile.protocols import PROTOCOLS, Refusal, Spoken
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

HUNG = "HUNG"
"""What stands for a code where a call did not end in time."""

_TIMEOUT_S = 60.0
_MOST_BYTES = 32 << 20  # of large messages under way, all clients together
_LARGE = 64 << 10
_OWN_SOCKET = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
_SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
_MOST_FILLERS, _NUM_REFUSALS = 2000, 200


@dataclass
class Ended:
    """One call's end. `refused`: the server is full and said when to come back."""

    code: str
    details: str = ""
    refused: bool = False
    messages: list[pb.GenerateResponse] = field(default_factory=list)
    flaw: str = ""  # of a stream that should be whole
    seconds: float = 0.0


@dataclass
class LoadResult:
    """All ends. `problems` has, of those that are not as they should be, one of each sort."""

    started_at: float
    ended_at: list[float] = field(default_factory=list)  # one a request, rising
    codes: collections.Counter[tuple[str, str, str]] = field(default_factory=collections.Counter)
    num_wrong_codes: int = 0
    num_broken_streams: int = 0
    problems: dict[tuple[str, str], str] = field(default_factory=dict)
    refusal_s: list[float] = field(default_factory=list)

    def count(self, *codes: str) -> int:
        """Calls that ended with one of the codes."""
        return sum(number for (_, _, code), number in self.codes.items() if code in codes)

    def add(self, attempt: Attempt, ended: Ended) -> None:
        """Counts one end, and judges it."""
        self.ended_at.append(time.monotonic())
        self.codes[attempt.group, attempt.kind, ended.code] += 1
        if ended.refused:
            self.refusal_s.append(ended.seconds)
        elif ended.code not in attempt.allowed:
            self.num_wrong_codes += 1
            problem = f"{attempt.kind}: {ended.code} {ended.details[:200]}"
            self.problems.setdefault((attempt.kind, ended.code), problem)
        elif ended.flaw:
            self.num_broken_streams += 1
            self.problems.setdefault((attempt.kind, "broken"), f"{attempt.kind}: {ended.flaw}")


class _Budget:
    """Bytes of large messages under way: bounded, or this process would be the one to burst."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def taking(self, count: int) -> AsyncIterator[None]:
        if count < _LARGE:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            async with self._changed:
                self._free += count
                self._changed.notify_all()


async def play(
    address: str,
    facts: Facts,
    *,
    num_requests: int,
    num_clients: int,
    seed: int,
    limit_s: float,
    spoken: Spoken,
    polite: bool = False,
    http_address: str | None = None,
) -> LoadResult:
    """Sends `num_requests` attempts from `num_clients` clients; nothing new after `limit_s`.

    `polite`: well-formed ones alone. `http_address`: they go there, over HTTP.
    """
    result, rng, budget = LoadResult(time.monotonic()), random.Random(seed), _Budget(_MOST_BYTES)
    left = num_requests

    async def one_client() -> None:
        nonlocal left
        async with grpc.aio.insecure_channel(address, _OWN_SOCKET) as channel:
            while left > 0 and time.monotonic() < result.started_at + limit_s:
                left -= 1
                attempt = draw(rng, facts, spoken, polite)
                async with budget.taking(len(attempt.payload)):
                    if http_address is None:
                        ended = await _send(address, channel, attempt, spoken)
                    else:
                        attempt = over_http.as_http(attempt)
                        ended = await _send_http(http_address, facts.model, attempt)
                    result.add(attempt, ended)

    await asyncio.gather(*(one_client() for _ in range(num_clients)))
    return result


async def _send(address: str, channel: Any, attempt: Attempt, spoken: Spoken) -> Ended:
    started_at = time.monotonic()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            if attempt.manner not in ("close", "slow"):
                ended = await _call(channel, attempt, spoken)
            else:
                options = _OWN_SOCKET + (_SMALL_WINDOW if attempt.manner == "slow" else ())
                async with grpc.aio.insecure_channel(address, options) as own:
                    ended = await _call(own, attempt, spoken)
    except TimeoutError:
        ended = Ended(HUNG, f"no end after {_TIMEOUT_S:g} s")
    ended.seconds = time.monotonic() - started_at
    ended.flaw = _flaw(attempt, ended)
    return ended


async def _send_http(address: str, model: str, attempt: Attempt) -> Ended:
    started_at = time.monotonic()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            code, details, refused, events = await over_http.send(address, model, attempt)
            ended = Ended(code, details, refused)
            if (
                attempt.request is not None
                and code == "OK"
                and attempt.manner not in ("cancel", "close")
            ):
                ended.flaw = over_http.flaw(attempt, events)
    except TimeoutError:
        ended = Ended(HUNG, f"no end after {_TIMEOUT_S:g} s")
    except OSError as error:
        ended = Ended("UNAVAILABLE", str(error))
    ended.seconds = time.monotonic() - started_at
    return ended


@contextlib.contextmanager
def left_to_code() -> Iterator[None]:
    """Reads a call to its end without raising; `code()` says how it ended.

    gRPC raises CancelledError for a call that ended with CANCELLED, whoever cancelled it. That of
    the task itself is raised.
    """
    try:
        yield
    except grpc.aio.AioRpcError:
        pass
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise


async def _call(channel: Any, attempt: Attempt, spoken: Spoken) -> Ended:
    if attempt.manner in ("silent", "empty"):
        nothing = iter(()) if attempt.manner == "empty" else None  # None: its side stays open
        call = channel.stream_stream(attempt.path)(nothing, timeout=attempt.timeout_s)
    else:
        call = channel.unary_stream(attempt.path)(attempt.payload, timeout=attempt.timeout_s)
    messages: list[pb.GenerateResponse] = []
    reply, refusal = spoken.replies(), None
    leaves = attempt.manner in ("cancel", "close")
    if not leaves or attempt.stop_after:
        with left_to_code():
            async for payload in call:
                found = reply(payload)
                if isinstance(found, Refusal):
                    refusal = found
                    continue
                messages.append(found)
                if leaves and len(messages) >= attempt.stop_after:
                    break
                if attempt.manner == "slow":
                    await asyncio.sleep(0.05)
    if attempt.manner == "cancel":
        call.cancel()
    elif attempt.manner == "close":
        await channel.close()
    return await _end(call, messages, refusal)


async def _end(call: Any, messages: list[pb.GenerateResponse], refusal: Refusal | None) -> Ended:
    if refusal is not None and await call.code() is grpc.StatusCode.OK:
        refused = refusal.code == "RESOURCE_EXHAUSTED" and refusal.with_time
        return Ended(refusal.code, refusal.details, refused, messages)
    code = (await call.code()).name
    details = await call.details() or ""
    trailing = [] if code == "OK" else [key for key, _ in await call.trailing_metadata() or ()]
    refused = code == "RESOURCE_EXHAUSTED" and "grpc-retry-pushback-ms" in trailing
    return Ended(code, details, refused, messages)


def _flaw(attempt: Attempt, ended: Ended) -> str:
    """Returns what is not right about a stream that should be whole; empty where nothing is."""
    request, messages = attempt.request, ended.messages
    if request is None or ended.code != "OK":
        return ""
    if not messages or messages[-1].finish_reason not in ("stop", "length"):
        return f"{len(messages)} messages, and the last has no finish_reason"
    count, most = sum(len(m.token_ids) for m in messages), request.sampling.max_new_tokens
    usage = messages[-1].usage
    if count != usage.completion_tokens or count > most:
        return f"{count} tokens came, {usage.completion_tokens} were counted, {most} were allowed"
    if request.sampling.ignore_eos and count != most:
        return f"{count} tokens came of {most}"
    if request.HasField("tokens") and usage.prompt_tokens != len(request.tokens.ids):
        return f"{usage.prompt_tokens} prompt tokens were counted of {len(request.tokens.ids)}"
    if any(message.request_id != request.request_id for message in messages):
        return "a message has another request's id"
    return ""


async def overload(address: str, facts: Facts) -> list[float] | None:
    """Returns seconds to a refusal of a server whose queue is full; None where it cannot be filled.

    Its slots and queue are filled with long requests, then others are sent one after another.
    """
    num_fillers = facts.max_num_seqs + facts.max_queue_len + 64
    if num_fillers > _MOST_FILLERS:
        return None
    sampling = pb.SamplingParams(max_new_tokens=facts.max_model_len - 1, ignore_eos=True)
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[1]), sampling=sampling)
    attempt = Attempt("overload", "overload", request.SerializeToString(), frozenset())
    refusal_s = []
    async with (
        grpc.aio.insecure_channel(address, _OWN_SOCKET) as channel,
        grpc.aio.insecure_channel(address, _OWN_SOCKET) as own,
    ):
        start = channel.unary_stream(GENERATE)
        fillers = [start(attempt.payload, timeout=_TIMEOUT_S) for _ in range(num_fillers)]
        await asyncio.sleep(1.0)
        leaving = Attempt(
            "overload", "overload", attempt.payload, frozenset(), "cancel", stop_after=1
        )
        give_up_at = time.monotonic() + _TIMEOUT_S / 6
        for _ in range(_NUM_REFUSALS):
            started_at = time.monotonic()
            ended = await _within(give_up_at, _call(own, leaving, PROTOCOLS["grpc"]))
            if ended is None:
                break
            if ended.refused:
                refusal_s.append(time.monotonic() - started_at)
        for call in fillers:
            call.cancel()
    return refusal_s


async def _within(deadline: float, waiting: Any) -> Ended | None:
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            return await waiting
    except TimeoutError:
        return None
