"""`jmoe bench priority`: two classes of requests over request rate, under several policies.

QLLM's workload (its section 5): a fifth of the requests is latency-sensitive, arrivals are Poisson.
Every variant gets the same server but for its policy, the same slots and the same arrivals; the
latency-sensitive requests alone are the yardstick. A heartbeat in the client marks the times at
which the machine stood still, and requests that overlap one are left out on every side.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from serving.bench import workload
from serving.bench.facts import facts
from serving.bench.launch import ready_server, set_flags
from serving.bench.loadgen import play, saturate
from serving.bench.rate_plot import Line, Panel, draw_over_rate
from serving.bench.results import Record
from serving.bench.workload import BUNDLED_TASKS, Arrival
from serving.client import Client

STALL_S = 0.02  # a heartbeat that comes so late marks a stall of the machine
BEAT_S = 0.005
WHOLE = "1000000"  # layers at once: every step whole


class Variant(NamedTuple):
    """One way to serve both classes."""

    name: str
    words: str
    settings: dict[str, str]
    ls_only: bool = False


VARIANTS = (
    Variant(
        "alone",
        "latency-sensitive requests alone",
        {"policy": "ls_first", "prefill_company": "false"},
        ls_only=True,
    ),
    Variant("fcfs", "first come, first served", {"policy": "fcfs"}),
    Variant("iteration", "priority a step", {"policy": "ls_first", "part_layers": WHOLE}),
    Variant("ls_first", "priority inside the model", {"policy": "ls_first"}),
    Variant("qllm", "QLLM's Algorithm 1", {"policy": "qllm"}),
)


@dataclass(frozen=True)
class PriorityConfig:
    """What is played. Loads are shares of the rate at which first come, first served is saturated.

    Raises ValueError for counts and shares that leave nothing to play.
    """

    num_requests: int = 2500
    loads: tuple[float, ...] = (0.4, 0.8, 1.2)
    ls_share: float = 0.2
    part_layers: int = 0  # layers at once where steps run in parts; 0: as measured
    saturation_s: float = 8.0
    seed: int = 0
    tasks: Path = BUNDLED_TASKS
    out: Path = Path("out")  # table, picture, JSON, server logs and timelines
    server: tuple[str, ...] = ("-m", "serving.cli", "serve", "--config", "demo", "--port", "0")
    server_args: tuple[str, ...] = ()  # more flags for the server
    startup_timeout_s: float = 900.0

    def __post_init__(self) -> None:
        """Checks ranges."""
        if self.num_requests < 10:
            raise ValueError(f"num_requests is {self.num_requests}; it must be 10 or more")
        if not 0 < self.ls_share < 1:
            raise ValueError(f"ls_share is {self.ls_share}; it must be between 0 and 1")
        if not self.loads or not all(load > 0 for load in self.loads):
            raise ValueError(f"loads is {self.loads}; it must hold shares above 0")


def run_priority(config: PriorityConfig, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Plays every variant at every load; prints and stores table, picture and JSON.

    Raises LaunchError where a server does not come up, or WorkloadError for a bad task file.
    """
    return uvloop.run(_run(config, say))


async def _run(config: PriorityConfig, say: Callable[[str], None]) -> dict[str, Any]:
    tasks = workload.shuffled(workload.load_tasks(config.tasks), config.seed)
    config.out.mkdir(parents=True, exist_ok=True)
    async with _server(config, VARIANTS[1]) as client:
        known = await facts(client)
        most, saturation_s = 2 * known["server"]["max_num_seqs"], config.saturation_s
        run = await saturate(client, tasks, concurrency=most, duration_s=saturation_s)
    rate = len([r for r in run.records if r.ok]) / run.duration_s
    say(f"first come, first served is saturated at {rate:.1f} requests/s")
    arrivals = by_load(config, tasks, rate)
    played: dict[str, dict[float, Played]] = {}
    for variant in VARIANTS:
        async with _server(config, variant) as client:
            info = await client.server_info()
            known.setdefault("part_layers", {})[variant.name] = dict(info.part_layers)
            played[variant.name] = {}
            for load in config.loads:
                say(f"{variant.words}, at {load:g} of capacity")
                played[variant.name][load] = await _play(client, variant, arrivals[load])
    result = {
        **known,
        "date": datetime.now().isoformat(timespec="seconds"),
        "config": {
            key: value
            for key, value in asdict(config).items()
            if key in ("num_requests", "loads", "ls_share", "part_layers", "seed")
        },
        "saturated_rate_per_s": rate,
        "points": points(played, arrivals),
    }
    (config.out / "priority.json").write_text(json.dumps(result, indent=1) + "\n")
    say(table(result))
    draw(result, config.out / "priority.png")
    say(f"picture: {config.out / 'priority.png'}")
    return result


def by_load(
    config: PriorityConfig, tasks: Sequence[Arrival], rate_per_s: float
) -> dict[float, list[Arrival]]:
    """Returns requests by load, a share of `rate_per_s`: Poisson arrivals, each of a random
    class.
    """
    times_s = {
        load: workload.poisson_times(config.num_requests, load * rate_per_s, config.seed)
        for load in config.loads
    }
    return {
        load: workload.two_classes(workload.schedule(tasks, due), 1 - config.ls_share, config.seed)
        for load, due in times_s.items()
    }


def _server(config: PriorityConfig, variant: Variant) -> AbstractAsyncContextManager[Client]:
    """Starts a variant's server: its policy, no brownout, room for every request."""
    engine = {"part_layers": config.part_layers, **variant.settings}
    engine |= {"max_queue_len": 1_000_000, "brownout.strategy": "zero"}
    settings = {f"engine.{key}": value for key, value in engine.items()}
    settings["max_concurrent_calls"] = 100_000
    settings["timeline"] = config.out / f"timeline-{variant.name}.json"
    command = [*config.server, *set_flags(settings), *config.server_args]
    log = config.out / f"server-{variant.name}.log"
    return ready_server(command, log, config.startup_timeout_s)


class Played(NamedTuple):
    """One variant at one load."""

    records: dict[int, Record]  # by number of the arrival
    stalls: list[tuple[float, float]]  # when the machine stood still
    duration_s: float
    counts: dict[str, int]  # parks, joins and evictions


async def _play(client: Client, variant: Variant, arrivals: Sequence[Arrival]) -> Played:
    taken = {i: a for i, a in enumerate(arrivals) if not (variant.ls_only and a.best_effort)}
    before = await client.stats()
    stalls: list[tuple[float, float]] = []
    heart = asyncio.create_task(_beat(stalls))
    try:
        run = await play(client, [*taken.values()], time_limit_s=arrivals[-1].at_s + 120)
    finally:
        heart.cancel()
        with suppress(asyncio.CancelledError):
            await heart
    after = await client.stats()
    # Requests are sent in the order in which they are due, and so are their records.
    records = dict(zip(taken, run.records, strict=True))
    counts = {k: getattr(after, k) - getattr(before, k) for k in ("parks", "joins", "evictions")}
    return Played(records, stalls, run.duration_s, counts)


async def _beat(stalls: list[tuple[float, float]]) -> None:
    """Notes when the event loop did not run for longer than it should."""
    start = last = time.monotonic()
    while True:
        await asyncio.sleep(BEAT_S)
        now = time.monotonic()
        if now - last > BEAT_S + STALL_S:
            stalls.append((last - start, now - start))
        last = now


def points(
    played: dict[str, dict[float, Played]], arrivals: dict[float, list[Arrival]]
) -> list[dict[str, Any]]:
    """Returns a record for each variant and load; requests during a stall of any variant count for
    none.
    """
    found = []
    for load, asked in arrivals.items():
        stalled = set().union(*(_stalled(by_load[load]) for by_load in played.values()))
        for name, by_load in played.items():
            one = by_load[load]
            kept = {i: r for i, r in one.records.items() if i not in stalled}
            ls = [r for i, r in kept.items() if not asked[i].best_effort]
            best_effort = [r for i, r in kept.items() if asked[i].best_effort]
            tokens = sum(len(r.token_s) for r in one.records.values())
            ends = [r.end_s for r in one.records.values() if r.ok]
            found.append(
                {
                    "variant": name,
                    "load": load,
                    "failed": sum(not r.ok for r in one.records.values()),
                    "left_out": len(one.records) - len(kept),
                    "num_stalls": len(one.stalls),
                    "tokens_per_s": tokens / max(ends, default=one.duration_s),
                    **one.counts,
                    "ls": _latencies(ls),
                    "best_effort": _latencies(best_effort),
                }
            )
    return found


def _stalled(played: Played) -> set[int]:
    """Returns the requests that were running while the machine stalled."""
    return {
        i
        for i, record in played.records.items()
        if any(start < record.end_s and record.at_s < end for start, end in played.stalls)
    }


def _latencies(records: Sequence[Record]) -> dict[str, float] | None:
    done = [r for r in records if r.ok]
    if not done:
        return None
    ttft_ms = np.array([1e3 * r.ttft_s for r in done])
    turnaround_ms = np.array([1e3 * r.e2el_s for r in done])
    return {
        "num": len(done),
        **{f"ttft_p{p}_ms": float(np.percentile(ttft_ms, p)) for p in (50, 90, 99)},
        "ttft_mean_ms": float(ttft_ms.mean()),
        "turnaround_mean_ms": float(turnaround_ms.mean()),
    }


def ratios(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns each variant's ratios to its baselines at the same load."""
    by = {(p["variant"], p["load"]): p for p in result["points"]}
    found = []
    for point in result["points"]:
        alone, fcfs, step = (by[name, point["load"]] for name in ("alone", "fcfs", "iteration"))
        sides = (point["ls"], alone["ls"], step["ls"], fcfs["ls"])
        if point["variant"] == "alone" or not all(sides):
            continue  # a stall may leave a side without requests
        p99 = point["ls"]["ttft_p99_ms"]
        turnaround, of_fcfs = (
            (one["best_effort"] or {}).get("turnaround_mean_ms", np.nan) for one in (point, fcfs)
        )
        found.append(
            {
                "variant": point["variant"],
                "load": point["load"],
                "ttft_p99_to_alone": p99 / alone["ls"]["ttft_p99_ms"],
                "ttft_p99_to_iteration": p99 / step["ls"]["ttft_p99_ms"],
                "ttft_mean_of_fcfs": fcfs["ls"]["ttft_mean_ms"] / point["ls"]["ttft_mean_ms"],
                "throughput_to_fcfs": point["tokens_per_s"] / fcfs["tokens_per_s"],
                "be_turnaround_to_fcfs": turnaround / of_fcfs,
                "ls_turnaround_of_fcfs": fcfs["ls"]["turnaround_mean_ms"]
                / point["ls"]["turnaround_mean_ms"],
            }
        )
    return found


def table(result: dict[str, Any]) -> str:
    """Returns tables of the figures and of the ratios, a line for each variant and load."""
    head = f"{'load':>4} {'variant':10} {'LS TTFT P50':>11} {'P90':>8} {'P99 ms':>8}"
    head += f" {'LS mean':>8} {'BE mean ms':>10} {'tokens/s':>9} {'parks':>6} {'joins':>6}"
    head += f" {'evicted':>7} {'left out':>8}"
    lines = ["", head]
    for point in sorted(result["points"], key=lambda p: p["load"]):
        ls, best_effort = point["ls"] or {}, point["best_effort"] or {}
        lines.append(
            f"{point['load']:4g} {point['variant']:10}"
            f" {ls.get('ttft_p50_ms', np.nan):11.1f} {ls.get('ttft_p90_ms', np.nan):8.1f}"
            f" {ls.get('ttft_p99_ms', np.nan):8.1f} {ls.get('turnaround_mean_ms', np.nan):8.1f}"
            f" {best_effort.get('turnaround_mean_ms', np.nan):10.1f} {point['tokens_per_s']:9.1f}"
            f" {point['parks']:6} {point['joins']:6} {point['evictions']:7} {point['left_out']:8}"
        )
    head = f"{'load':>4} {'variant':10} {'LS P99: to alone':>16} {'to a step':>9}"
    head += f" {'mean, fcfs over it':>18} {'tokens/s to fcfs':>16} {'BE time to fcfs':>15}"
    lines += ["", head]
    for one in sorted(ratios(result), key=lambda r: r["load"]):
        lines.append(
            f"{one['load']:4g} {one['variant']:10} {one['ttft_p99_to_alone']:16.2f}"
            f" {one['ttft_p99_to_iteration']:9.2f} {one['ttft_mean_of_fcfs']:18.1f}"
            f" {one['throughput_to_fcfs']:16.3f} {one['be_turnaround_to_fcfs']:15.2f}"
        )
    sizes = result.get("part_layers", {}).get("ls_first", {})
    if sizes:
        lines += ["", "layers at once: " + ", ".join(f"{k}: {n}" for k, n in sizes.items())]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws QLLM's three figures: TTFT, throughput and turnaround over request rate."""
    rate = result["saturated_rate_per_s"]

    def panel(title: str, value: Callable[[dict], float | None], log: bool = True) -> Panel:
        lines = []
        for variant in VARIANTS:
            own = [p for p in result["points"] if p["variant"] == variant.name]
            pairs = [(p["load"] * rate, v) for p in own if (v := value(p)) is not None]
            shown = log or not variant.ls_only
            lines.append(Line(variant.words, pairs if shown else [], variant.ls_only))
        return Panel(title, lines, log)

    ttft, turnaround = "ttft_p99_ms", "turnaround_mean_ms"
    panels = [
        panel("TTFT of latency-sensitive, P99, ms", lambda p: (p["ls"] or {}).get(ttft)),
        panel("throughput, tokens/s", lambda p: p["tokens_per_s"], log=False),
        panel(
            "turnaround of best effort, mean, ms",
            lambda p: (p["best_effort"] or {}).get(turnaround),
        ),
    ]
    draw_over_rate(panels, path)
