"""One run: the probes, the load beside them, then the fuzz; what was seen, and what must hold."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from benchmarks.fuzz_http.__main__ import fuzz as fuzz_http
from benchmarks.hostile import probes, report
from benchmarks.hostile.attempts import Facts, learn
from benchmarks.hostile.fuzz import SERVICES, brownout_kept, fuzz, serves
from benchmarks.hostile.load import LoadResult, overload, play
from benchmarks.hostile.over_http import Http
from benchmarks.hostile.protocols import PROTOCOLS
from benchmarks.hostile.report import Line, Marks
from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

_IDLE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Plan:
    """What to send where. `pid` None: the server's memory is not measured."""

    address: str
    admin_address: str | None
    pid: int | None
    num_requests: int
    num_clients: int
    seed: int
    num_fuzzed: int  # messages to each service
    idle_s: float
    limit_s: float  # of the load, and of each service's fuzz
    protocol: str = "grpc"  # of the load; see `protocols.py`
    http_address: str | None = None  # where load and fuzz go over HTTP; None: over gRPC


async def run(plan: Plan) -> tuple[list[Line], dict[str, Any]]:
    """Plays it all; lines of what must hold, and every figure."""
    facts = await learn(plan.address, plan.admin_address)
    if not (facts.texts or PROTOCOLS[plan.protocol].takes_tokens):
        raise ValueError(f"{plan.protocol} has texts alone, and this model has no tokenizer")
    print(f"{facts.model} at {plan.address}, jmoe {facts.version}; idle first", flush=True)
    lines, figures = await _load(plan, facts)
    if plan.http_address and plan.num_fuzzed:
        await _fuzz_http(plan, plan.http_address, facts, lines, figures)
    over_grpc = plan.num_fuzzed and not plan.http_address
    for service in SERVICES.values() if over_grpc else ():
        if not await serves(plan.address):
            lines.append(Line(f"serving before the fuzz of {service.name}", "yes", "no", False))
            break
        await _fuzz(plan, facts, service, lines, figures)
    if plan.num_fuzzed:
        lines += report.stats_lines("the fuzz", await _stats(plan.address, facts))
        figures["resident_bytes_after_fuzz"] = plan.pid and probes.resident_bytes(plan.pid)
    told = {"plan": asdict(plan), "server": asdict(facts) | {"texts": len(facts.texts)}}
    verdicts = {"lines": [asdict(line) for line in lines]}
    return lines, {**verdicts, **figures, **told, **report.surroundings()}


async def _load(plan: Plan, facts: Facts) -> tuple[list[Line], dict[str, Any]]:
    async with _probing(plan, facts) as measured:
        idle_from = time.monotonic()
        await asyncio.sleep(plan.idle_s)
        print(f"{plan.num_requests} requests of {plan.num_clients} clients", flush=True)
        load = await _play(plan, facts, plan.num_requests)
        load_to = time.monotonic()
        # The same again without hostility: what of the latencies is the load's, and what is not.
        polite = await _play(plan, facts, max(1, plan.num_requests // 10), polite=True)
        marks = Marks(
            (idle_from, load.started_at),
            (load.started_at, load_to),
            (polite.started_at, time.monotonic()),
        )
    stats = await _stats(plan.address, facts)
    try:
        refusal_s = await overload(plan.address, facts)
    except grpc.aio.AioRpcError:
        refusal_s = None
    lines = report.load_lines(load, plan.num_requests) + report.stats_lines("the load", stats)
    figures = _measured(measured, marks, load, lines)
    figures["refusals"] = _refusals("under the load", load.refusal_s)
    figures["refusals_of_a_full_server"] = _refusals("of a full server", refusal_s or [])
    for text in report.code_table(load):
        print(text)
    for problem in load.problems.values():
        print(f"not as it should be: {problem}")
    return lines, figures


async def _play(plan: Plan, facts: Facts, count: int, polite: bool = False) -> LoadResult:
    return await play(
        plan.address,
        facts,
        num_requests=count,
        num_clients=plan.num_clients,
        seed=plan.seed,
        limit_s=plan.limit_s,
        spoken=Http() if plan.http_address else PROTOCOLS[plan.protocol],
        polite=polite,
        http_address=plan.http_address,
    )


@contextlib.asynccontextmanager
async def _probing(plan: Plan, facts: Facts) -> AsyncIterator[dict[str, Any]]:
    """Measures while its block runs; what was measured is there when the block is left."""
    started = {
        "stalls": probes.Probe(probes.stalls),
        "health": probes.Probe(probes.health, plan.address),
        "stream": probes.Probe(probes.stream, plan.address, facts.max_model_len),
    }
    if plan.pid is not None:
        started["memory"] = probes.Probe(probes.memory, plan.pid)
    measured: dict[str, Any] = {"memory": []}
    try:
        for probe in started.values():
            await probe.ready()
        yield measured
        for name, probe in started.items():
            measured[name] = await probe.finish()
    finally:
        for probe in started.values():
            probe.kill()


def _measured(
    measured: dict[str, Any], marks: Marks, load: LoadResult, lines: list[Line]
) -> dict[str, Any]:
    """Returns the figures of load and probes; what must hold of them is added to `lines`."""
    stalled = measured["stalls"]

    def latencies(samples: probes.Samples) -> dict[str, Any]:
        spans = asdict(marks)
        return {
            name: report.latency_figures(probes.between(samples, *span), stalled)
            for name, span in spans.items()
        }

    (checks, failed_checks), (gaps, failed_streams) = measured["health"], measured["stream"]
    memory = report.memory_figures(measured["memory"], marks, load.ended_at)
    health, stream = latencies(checks), latencies(gaps)
    lines += report.memory_lines(memory)
    lines += report.health_lines(health["load"], failed_checks)
    lines += report.stream_lines(stream["idle"], stream["load"], stream["polite"])
    codes: dict[str, dict[str, int]] = {}
    for (group, kind, code), number in sorted(load.codes.items()):
        codes.setdefault(f"{group}: {kind}", {})[code] = number
    during = probes.between(stalled, *marks.load)
    figures = {
        "load_s": marks.load[1] - marks.load[0],
        "codes": codes,
        "problems": list(load.problems.values()),
        "memory": memory,
        "health": health | {"failures": failed_checks[:20]},
        "stream": stream | {"failures": failed_streams[:20], "num_failures": len(failed_streams)},
        "machine_stalls": {
            "count": len(during),
            "total_s": sum(end - begin for begin, end in during),
            "max_s": max((end - begin for begin, end in during), default=0.0),
        },
    }
    _say(figures)
    return figures


def _say(figures: dict[str, Any]) -> None:
    for name in ("health", "stream"):
        for when in ("idle", "load", "polite"):
            found = figures[name][when]
            words = ", ".join(
                f"{key[:-2]} {found[key] * 1e3:.1f} ms"
                for key in ("p50_s", "p99_s", "p999_s", "max_s")
                if key in found
            )
            print(
                f"{name}, {when}: {found['count']} samples, {words}; {found['in_stalls']} in stalls"
            )
    print(f"stalls of the machine under load: {figures['machine_stalls']}")
    print(f"memory: {figures['memory']}")


def _refusals(when: str, seconds: list[float]) -> dict[str, Any]:
    found = {"count": len(seconds)}
    if seconds:
        found |= {f"p{q}_s": probes.percentile(seconds, q) for q in (50, 99)}
        print(f"refusals {when}: {found}")
    return found


async def _stats(address: str, facts: Facts) -> pb.Stats | None:
    """The server's counters once it has nothing more to do, or after a minute."""
    stats, give_up_at = None, time.monotonic() + _IDLE_TIMEOUT_S
    async with Client(address, facts.admin_address) as client:
        while time.monotonic() < give_up_at:
            try:
                stats = await client.stats()
            except grpc.aio.AioRpcError:
                return None
            if stats.num_running == stats.num_waiting == stats.kv_pages_used == 0:
                break
            await asyncio.sleep(0.1)
    return stats


async def _fuzz_http(
    plan: Plan, address: str, facts: Facts, lines: list[Line], figures: dict[str, Any]
) -> None:
    """Fuzzes the routes over HTTP; adds to what must hold, and to the figures."""
    started_at = time.monotonic()
    found = await fuzz_http(address, facts.model, plan.num_fuzzed, plan.num_clients, plan.seed)
    problems = len(found.problems)
    lines.append(Line("fuzzed requests answered wrongly", "0", f"{problems}", not problems))
    codes = {f"{kind}: {code}": number for (kind, code), number in sorted(found.statuses.items())}
    print(f"fuzz over HTTP: {codes}", flush=True)
    for problem in found.problems[:3]:
        print(f"  {problem[:300]}")
    took_s = time.monotonic() - started_at
    told = {"codes": codes, "examples": found.problems, "duration_s": took_s}
    figures.setdefault("fuzz", {})["HTTP"] = told


async def _fuzz(
    plan: Plan, facts: Facts, service: ServiceDescriptor, lines: list[Line], figures: dict[str, Any]
) -> None:
    """Fuzzes one service; adds to what must hold, and to the figures."""
    address = facts.admin_address if service.name == "Admin" else plan.address
    async with Client(plan.address, facts.admin_address) as client, brownout_kept(client):
        result = await fuzz(
            service, address, num_messages=plan.num_fuzzed, seed=plan.seed, limit_s=plan.limit_s
        )
    lines += report.fuzz_lines(result, plan.num_fuzzed)
    codes = {f"{method}: {code}": number for (method, code), number in sorted(result.codes.items())}
    print(f"fuzz {service.name}, {result.duration_s:.0f} s: {codes}", flush=True)
    for example in result.examples[:3]:
        print(f"  {example['method']}: {example['code']} {example['details'][:200]}")
    found = {"codes": codes, "examples": result.examples, "duration_s": result.duration_s}
    figures.setdefault("fuzz", {})[service.name] = found
