"""One run against one server: the load beside its probes, then the fuzz, and what must hold."""

import argparse
import asyncio
import collections
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks.hostile import attempts, over_grpc, over_http, over_kserve, probes, report
from benchmarks.hostile.attempts import GENERATE, GROUPS, Attempt, Ended, Facts, Protocol
from benchmarks.hostile.fuzzing import Answer, Fuzz
from benchmarks.hostile.over_grpc import HUNG
from benchmarks.hostile.report import Line, Spans, must_be
from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

PROTOCOLS = {
    "grpc": Protocol(
        *(GENERATE, True, False, over_grpc.payload, over_grpc.malformed, over_grpc.connect),
        (*over_grpc.FUZZ, *over_kserve.FUZZ),
    ),
    "kserve": Protocol(
        *(over_kserve.STREAM_INFER, False, False, over_kserve.payload, over_kserve.malformed),
        *(over_kserve.connect, over_kserve.FUZZ),
    ),
    "http": Protocol(
        *(over_http.PATH, True, True, over_http.payload, over_http.malformed, over_http.connect),
        over_http.FUZZ,
    ),
}
"""By the name that `--protocol` takes."""

_TIMEOUT_S = 60.0
_LARGE, _MOST_LARGE = 64 << 10, 8  # under way, or this process would be the one to burst
_NUM_HONEST, _NUM_WORKERS, _MOST_EXAMPLES = 8, 32, 20
_SPARE_FILES = 32  # that a server may open once and keep
_NUM_PARTS = 3  # of the load


@dataclass
class Load:
    """All ends. `problems` has, of those that are not as they should be, one of each sort."""

    ended_at: list[float] = field(default_factory=list)  # one a request, rising
    codes: collections.Counter[tuple[str, str, str]] = field(default_factory=collections.Counter)
    num_wrong_codes: int = 0
    num_broken_streams: int = 0
    problems: dict[tuple[str, str], str] = field(default_factory=dict)

    def count(self, *codes: str) -> int:
        """Calls that ended with one of the codes."""
        return sum(number for (_, _, code), number in self.codes.items() if code in codes)

    def add(self, attempt: Attempt, ended: Ended) -> None:
        """Counts one end, and judges it."""
        self.ended_at.append(time.monotonic())
        self.codes[attempt.group, attempt.kind, ended.code] += 1
        if ended.refused:
            return
        if ended.code not in attempt.allowed:
            self.num_wrong_codes += 1
            problem = f"{attempt.kind}: {ended.code} {ended.details[:200]}"
            self.problems.setdefault((attempt.kind, ended.code), problem)
        elif wrong := attempts.flaw(attempt, ended):
            self.num_broken_streams += 1
            self.problems.setdefault((attempt.kind, "broken"), f"{attempt.kind}: {wrong}")

    def lines(self, num_requests: int) -> list[Line]:
        """Everyone is answered, and rightly."""
        return [
            must_be("requests that ended", num_requests, len(self.ended_at) - self.count(HUNG)),
            must_be("UNKNOWN or INTERNAL", 0, self.count("UNKNOWN", "INTERNAL")),
            must_be("codes not allowed", 0, self.num_wrong_codes),
            must_be("broken streams", 0, self.num_broken_streams),
        ]


@dataclass
class Fuzzed:
    """What was answered. `examples` has answers that must not be, and what was sent."""

    num_sent: int = 0
    codes: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    num_bad: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, answers: list[Answer]) -> None:
        """Counts the answers to what was sent at once."""
        self.num_sent += 1
        for kind, code, problem in answers:
            self.codes[kind, code] += 1
            if problem:
                self.num_bad += 1
                self.examples += [f"{kind}, {code}: {problem}"][self.num_bad > _MOST_EXAMPLES :]


class Run:
    """Collects what must hold, and the figures."""

    def __init__(self, args: argparse.Namespace, facts: Facts, pid: int) -> None:
        self.args, self.facts, self.pid = args, facts, pid
        self.protocol = PROTOCOLS[args.protocol]
        if not (facts.texts or self.protocol.takes_tokens):
            raise ValueError(f"{args.protocol} has texts alone, and this model has no tokenizer")
        self.lines: list[Line] = []
        self.figures: dict[str, Any] = {}

    async def play(self) -> None:
        """Plays load and fuzz; asks after each whether the server is as before."""
        facts = self.facts
        print(f"{facts.model} at {facts.address}, jmoe {facts.version}", flush=True)
        self._honest = await self._answers()
        num_right = sum(code == "OK" for code, *_ in self._honest)
        self.lines.append(must_be("honest requests with right answers", _NUM_HONEST, num_right))
        self._files, before = probes.num_files(self.pid), probes.resident_bytes(self.pid)
        if self.args.requests:
            await self._load()
            await self._is_as_before("the load")
        for fuzz in self.protocol.fuzz if self.args.fuzz else ():
            await self._fuzz(fuzz)
            if not await self._is_as_before(f"the fuzz of {fuzz.name}"):
                break
        after = probes.resident_bytes(self.pid)
        self.figures["resident_bytes"] = {"before": before, "after": after}

    async def _answers(self) -> list[tuple[str, str, str]]:
        """Returns what some greedy requests are answered, one after another."""
        rng, found = random.Random("honest"), []
        async with self.protocol.connect(self.facts) as send:
            for number in range(_NUM_HONEST):
                request = attempts.well_formed(rng, self.facts, self.protocol)
                request.allow_brownout, request.priority = False, pb.LATENCY_SENSITIVE
                request.sampling.temperature, request.request_id = 0.0, f"honest-{number}"
                data = self.protocol.payload(self.facts, request, None)
                path, right = self.protocol.path, frozenset({"OK"})
                attempt = Attempt("fine", "honest", data, right, path=path, request=request)
                ended = await _ended(send, attempt)
                texts = "".join(
                    message.text or f"{[*message.token_ids]}" for message in ended.messages
                )
                found.append((attempts.flaw(attempt, ended) or ended.code, ended.details, texts))
        return found

    async def _is_as_before(self, when: str) -> bool:
        """Waits until the server has nothing more to do, for a minute at most."""
        most_files, give_up_at = self._files + _SPARE_FILES, time.monotonic() + _TIMEOUT_S
        async with Client(self.facts.address, self.facts.admin_address) as client:
            try:
                await client.wait_ready(_TIMEOUT_S)
            except (TimeoutError, grpc.aio.AioRpcError):
                self.lines.append(must_be(f"serving after {when}", "yes", "no"))
                return False
            while True:
                try:
                    stats, files = await client.stats(), probes.num_files(self.pid)
                except grpc.aio.AioRpcError as error:
                    self.lines.append(must_be(f"counters after {when}", "told", error.code().name))
                    return False
                left = stats.num_running + stats.num_waiting
                is_idle = not left and not stats.kv_pages_used and files <= most_files
                if is_idle or time.monotonic() > give_up_at:
                    break
                await asyncio.sleep(0.1)
        answers = await self._answers()
        same = sum(map(tuple.__eq__, answers, self._honest))
        self.lines += [
            must_be(f"requests left after {when}", 0, left),
            must_be(f"KV pages used after {when}", 0, stats.kv_pages_used),
            must_be(f"compilations by the end of {when}", 0, stats.compilations_since_ready),
            must_be(f"honest answers as before, after {when}", _NUM_HONEST, same),
            Line(
                *(f"open files after {when}", f"at most {most_files}", f"{files}"),
                ok=files <= most_files,
            ),
        ]
        return True

    # ---- load ---------------------------------------------------------------------------------

    async def _load(self) -> None:
        facts, args, load, calm = self.facts, self.args, Load(), Load()
        marks: Spans = {"idle": [], "load": [], "polite": []}

        @contextlib.contextmanager
        def marked(name: str) -> Iterator[None]:
            began = time.monotonic()
            yield
            marks[name].append((began, time.monotonic()))

        async with probes.probing(facts.address, facts.max_model_len, self.pid) as measured:
            with marked("idle"):
                await asyncio.sleep(args.idle_s)
            print(f"{args.requests} requests of {args.clients} clients", flush=True)
            # Parts without hostility before, between and after those with it: what of the latencies
            # is the load's, and what a machine's that is slow for a while.
            hostile, polite = random.Random(args.seed), random.Random(f"{args.seed} polite")
            few = max(1, args.requests // 10)
            for part in range(_NUM_PARTS + 1):
                with marked("polite"):
                    await self._requests(few, polite, calm, polite=True)
                first, last = (args.requests * at // _NUM_PARTS for at in (part, part + 1))
                if part < _NUM_PARTS and last > first:
                    with marked("load"):
                        await self._requests(last - first, hostile, load)
        lines, figures = report.probed(measured, marks, load.ended_at)
        self.lines += load.lines(args.requests) + lines
        for name, found in figures.items():
            print(f"{name}: {found}")
        codes: dict[str, dict[str, int]] = {}
        for group, kind, code in sorted(load.codes, key=lambda key: ([*GROUPS].index(key[0]), key)):
            codes.setdefault(f"{group}: {kind}", {})[code] = load.codes[group, kind, code]
        for kind, counts in codes.items():
            print(f"{kind:48} {counts}")
        for problem in load.problems.values():
            print(f"not as it should be: {problem}")
        self.figures |= figures | {"codes": codes, "problems": [*load.problems.values()]}

    async def _requests(
        self, count: int, rng: random.Random, load: Load, *, polite: bool = False
    ) -> None:
        """Sends so many attempts of all clients, and adds their ends to `load`."""
        left, room = iter(range(count)), asyncio.Semaphore(_MOST_LARGE)

        async def one_client() -> None:
            async with self.protocol.connect(self.facts) as send:
                for _ in left:
                    attempt = attempts.draw(rng, self.facts, self.protocol, polite)
                    is_large = len(attempt.payload) > _LARGE
                    async with room if is_large else contextlib.nullcontext():
                        load.add(attempt, await _ended(send, attempt))

        await asyncio.gather(*(one_client() for _ in range(self.args.clients)))

    # ---- fuzz ---------------------------------------------------------------------------------

    async def _fuzz(self, fuzz: Fuzz) -> None:
        args, found, started_at = self.args, Fuzzed(), time.monotonic()
        rng, left = random.Random(f"{args.seed} {fuzz.name}"), iter(range(args.fuzz))

        async def worker(send: Any) -> None:
            for _ in left:
                sent = fuzz.draw(rng, self.facts.model)
                try:
                    async with asyncio.timeout(_TIMEOUT_S):
                        found.add(await send(sent))
                except TimeoutError:
                    found.add([(sent.kind, HUNG, f"no end after {_TIMEOUT_S:g} s; sent {sent}")])
                except OSError as error:
                    found.add([(sent.kind, "UNAVAILABLE", f"{error}")])

        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(_brownout_kept(self.facts))
            senders = [
                await stack.enter_async_context(fuzz.connect(self.facts))
                for _ in range(_NUM_WORKERS // fuzz.per_connection)
            ]
            await asyncio.gather(*(worker(send) for send in senders * fuzz.per_connection))
        took_s = time.monotonic() - started_at
        codes = {f"{kind}: {code}": number for (kind, code), number in sorted(found.codes.items())}
        print(f"fuzz of {fuzz.name}, {took_s:.0f} s: {codes}", flush=True)
        for example in found.examples[:3]:
            print(f"not as it should be: {example[:300]}")
        there = any(code != "UNIMPLEMENTED" for _, code in found.codes)
        self.lines += [
            must_be(f"fuzz of {fuzz.name}: sent", args.fuzz, found.num_sent),
            must_be(f"fuzz of {fuzz.name}: crashes, hangs, lost answers", 0, found.num_bad),
            must_be(f"fuzz of {fuzz.name}: the service is there", "yes", "yes" if there else "no"),
        ]
        told = {"codes": codes, "examples": found.examples, "duration_s": took_s}
        self.figures.setdefault("fuzz", {})[fuzz.name] = told


async def _ended(send: Any, attempt: Attempt) -> Ended:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await send(attempt)
    except TimeoutError:
        return Ended(HUNG, f"no end after {_TIMEOUT_S:g} s")
    except OSError as error:
        return Ended("UNAVAILABLE", str(error))


@contextlib.asynccontextmanager
async def _brownout_kept(facts: Facts) -> AsyncIterator[None]:
    """Puts brownout back as it was; fuzzed messages to Admin change it where they are valid."""
    async with Client(facts.address, facts.admin_address) as client:
        try:
            before = await client.get_brownout()
        except grpc.aio.AioRpcError:  # it has no Admin here
            yield
            return
        try:
            yield
        finally:
            names = ["strategy", "ttft_slo_s", "itl_slo_s"]
            names += ["way"] if before.way else []
            names += ["salc_enabled"] if before.salc_enabled else []
            change: dict[str, Any] = {name: getattr(before, name) for name in names}
            if not before.salc_enabled:
                for name in ("prefill_threshold_percent", "decode_threshold_percent"):
                    change[name] = round(getattr(before, name))
            with contextlib.suppress(grpc.aio.AioRpcError):  # a server that is gone
                await client.set_brownout(**change)
