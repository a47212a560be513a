"""`jmoe bench family`: several fine-tuned models served from one pool, and the alternatives.

The shape of Multi-MoE's Figure 4 and Tables 1 and 2. Poisson arrivals, each of the paper's length
and to a model drawn by seed, are played against each way to serve the models, one right after
another, in an order that changes; load 0 is one client that sends one request at a time.

- *alone*: all requests go to the first model, which has the machine to itself.
- *pool*, *half*: one server has all models; with `half` the weights beside the experts of only half
  of the models are on the device (`engine.resident_sets`), and may have to be copied first.
- *time*: a server for each model, of which one works at a time, for half a second or until it has
  nothing to do. All stay started; before another model's turn the benchmark copies as many bytes as
  the model's weights take, in place of the server. What starting would take is not counted.
- *space*: a server for each model, held to an equal part of the cores and of the slots. With fewer
  cores than models several share a core. Memory bandwidth and caches are not split.

The load generator takes processor time from what it measures, as much from each alternative.
"""

import asyncio
import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from serving.bench import workload
from serving.bench.calibrate import full_batch
from serving.bench.facts import facts
from serving.bench.launch import ready_server
from serving.bench.loadgen import play, saturate
from serving.bench.rate_plot import Line, Panel, draw_over_rate
from serving.bench.results import Run, latency_summary
from serving.bench.scrape import free_port, scrape, value
from serving.client import Client

LENGTHS = workload.Lengths(20, 25, sigma=0)  # the paper's
PATIENCE_S = 120.0  # after the last arrival; a request without an answer by then has failed
QUANTUM_S = 0.5  # of a model's turn, where time is shared
CAPACITY_S, WARM_S, PAUSE_S = 5.0, 0.5, 0.2
KEPT = ("loads", "duration_s", "rounds", "singles", "slots", "seed")
WAYS = {
    "alone": "one model alone",
    "pool": "one pool, all sets resident",
    "half": "one pool, half of the sets resident",
    "time": "time sharing: one model at a time",
    "space": "space sharing: a part of the machine each",
}

# Few programs, so that starts are quick; no brownout: every request gets its own model.
SETTINGS = (
    "engine.prefill_buckets=32,128 engine.threshold_buckets_percent=100 engine.part_layers=1000 "
    "engine.brownout.strategy=zero engine.brownout.way=0 engine.brownout.salc=false "
    "engine.admission=queue max_concurrent_calls=100000 status_interval_s=0"
)


@dataclass(frozen=True)
class FamilyConfig:
    """What is played. Raises ValueError for settings that leave nothing to play."""

    model: tuple[str, ...]  # NAME=DIR of each, as `jmoe serve` takes them
    family: Path | None = None  # the map that `jmoe consolidate` wrote; none: no expert is shared
    loads: tuple[float, ...] = (0.3, 0.6, 0.9, 1.2)  # shares of one model's capacity
    duration_s: float = 5.0  # of arrivals, for each alternative, load and round
    rounds: int = 2  # a trace each; figures are over all of them
    singles: int = 80  # requests one at a time
    slots: int = 32  # sequences decoded together by a server that has the machine to itself
    seed: int = 0
    dry_run: bool = False
    out: Path = Path("out")
    server_args: tuple[str, ...] = ()
    startup_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Checks ranges and names."""
        if len(self.models) < max(2, len(self.model)):
            raise ValueError(f"model is {self.model}; it must be NAME=DIR of two models or more")
        least = {"rounds": 1, "singles": 1, "slots": len(self.model), "seed": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {bound} or more")
        if not all(0 < number < math.inf for number in (self.duration_s, *self.loads)):
            raise ValueError(f"loads {self.loads} and duration_s must be above 0")

    @property
    def models(self) -> dict[str, str]:
        """Directories by name."""
        named = (one.partition("=") for one in self.model)
        return {name: path for name, _, path in named if name and path}


def run_family(config: FamilyConfig, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Plays every alternative at every load; prints and stores table, picture and JSON.

    A dry run plays one small load, with the bundled weights for each model. Raises LaunchError
    where a server does not come up, CalibrationError where capacity cannot be measured.
    """
    if config.dry_run:
        model = tuple(f"{name}=bundled" for name in config.models)
        config = replace(config, model=model, family=None, loads=(0.5,), duration_s=0.5)
        config = replace(config, rounds=1, singles=4, slots=max(4, len(model)))
    return uvloop.run(_run(config, say))


# -- ways to serve several models ------------------------------------------------------------------


class Way:
    """Several servers as one target of the load generator: requests go to their model's server."""

    def __init__(self, routes: Mapping[str, tuple[Client, str]], metrics_port: int = 0) -> None:
        """`routes` have, for each model, the client and the name that the server knows it by."""
        self._routes, self._metrics_port = routes, metrics_port
        first, _ = next(iter(routes.values()))
        self.get_brownout, self.stats = first.get_brownout, first.stats

    def generate(self, *args: Any, model: str = "", **options: Any) -> AsyncIterable[Any]:
        """See Client."""
        client, name = self._routes[model]
        return client.generate(*args, model=name, **options)

    async def changes(self) -> int:
        """Returns how often weights of a model were copied to the device since the start."""
        if not self._metrics_port:
            return 0
        return int(value(await scrape(self._metrics_port), "model_swaps_total"))


class TimeShared(Way):
    """A server for each model, of which one has requests at a time.

    A model's turn ends when it has no request left, or when it has lasted QUANTUM_S and another
    model waits: no more of its requests start, and those that run finish. The next turn is that of
    the model whose request has waited longest, after `change`.
    """

    def __init__(
        self, routes: Mapping[str, tuple[Client, str]], change: Callable[[], Awaitable[Any]]
    ) -> None:
        """The first model has the first turn."""
        super().__init__(routes)
        self._active, self._running, self._changes = next(iter(routes)), 0, 0
        self._change, self._now = change, asyncio.get_running_loop().time
        self._began_at = self._now()
        self._waiting: list[str] = []  # models of waiting requests, in order of arrival
        self._free = asyncio.Condition()

    async def generate(self, *args: Any, model: str = "", **options: Any) -> AsyncIterator[Any]:
        """See Client; the wait for the model's turn counts."""
        async with self._turn(model):
            async for message in super().generate(*args, model=model, **options):
                yield message

    async def changes(self) -> int:
        """Returns how many turns began with another model's weights."""
        return self._changes

    @contextlib.asynccontextmanager
    async def _turn(self, model: str) -> AsyncIterator[None]:
        async with self._free:
            self._waiting.append(model)
            try:
                await self._free.wait_for(lambda: self._may_start(model))
                if model != self._active:  # nobody comes or goes meanwhile
                    await self._change()
                    self._active, self._began_at = model, self._now()
                    self._changes += 1
                    self._free.notify_all()
            except BaseException:
                self._free.notify_all()
                raise
            finally:
                self._waiting.remove(model)
            self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                async with self._free:
                    self._free.notify_all()

    def _may_start(self, model: str) -> bool:
        others = [one for one in self._waiting if one != self._active]
        over = bool(others) and self._now() - self._began_at >= QUANTUM_S
        if model == self._active:
            return not over
        is_next = others[0] == model and (over or self._active not in self._waiting)
        return is_next and not self._running


@contextlib.asynccontextmanager
async def _started(config: FamilyConfig) -> AsyncIterator[tuple[dict[str, Way], Client]]:
    """Starts the servers of all alternatives; yields these, and the first model's own server."""
    every, num, port = sorted(os.sched_getaffinity(0)), len(config.models), free_port()
    everything = [*(f"--model={one}" for one in config.model), f"--set=engine.mixed_models={num}"]
    everything += [f"--family={config.family}"] if config.family else []
    resident = [f"--set=engine.resident_sets={num // 2}", f"--set=metrics_port={port}"]
    async with contextlib.AsyncExitStack() as stack:

        async def start(name: str, flags: list[str], slots: int, cores: Sequence[int]) -> Client:
            command = ["-m", "serving.cli", "serve", "--config=demo", "--port=0", *flags]
            command += [f"--set={one}" for one in settings(slots, len(cores))]
            log, limit_s = config.out / f"server-{name}.log", config.startup_timeout_s
            started = ready_server([*command, *config.server_args], log, limit_s)
            os.sched_setaffinity(0, cores)  # which the server inherits
            try:
                return await stack.enter_async_context(started)
            finally:
                os.sched_setaffinity(0, every)

        pool = await start("pool", everything, config.slots, every)
        half = await start("half", everything + resident, config.slots, every)
        own, parts = {}, {}
        for number, (name, path) in enumerate(config.models.items()):
            flags, part = [f"--model={path}"], part_of(every, number, num)
            own[name] = await start(f"own-{name}", flags, config.slots, every), ""
            parts[name] = await start(f"part-{name}", flags, config.slots // num, part), ""
        first, _ = next(iter(own.values()))
        info = await first.model_info()
        weights = np.ones(info.num_parameters, np.float32 if info.dtype == "float32" else np.int16)
        ways = {
            "alone": Way(dict.fromkeys(own, (first, ""))),
            "pool": Way({name: (pool, name) for name in own}),
            "half": Way({name: (half, name) for name in own}, port),
            "time": TimeShared(own, lambda: asyncio.to_thread(weights.copy)),
            "space": Way(parts),
        }
        yield ways, first


def settings(slots: int, cores: int) -> list[str]:
    """Returns settings of a server with so many slots and cores, of which the host gets one."""
    buckets = sorted({max(1, slots // part) for part in (8, 4, 2, 1)})
    own = [f"engine.max_num_seqs={slots}", f"engine.cpu_threads={max(1, cores - 1)}"]
    return [*SETTINGS.split(), *own, f"engine.decode_buckets={','.join(map(str, buckets))}"]


def part_of(cores: Sequence[int], number: int, parts: int) -> Sequence[int]:
    """Returns the cores of one of `parts` equal parts, one at least."""
    begin, end = (at * len(cores) // parts for at in (number, number + 1))
    return cores[begin : max(end, begin + 1)]


# -- what is played --------------------------------------------------------------------------------


async def _run(config: FamilyConfig, say: Callable[[str], None]) -> dict[str, Any]:
    config.out.mkdir(parents=True, exist_ok=True)
    say(f"starting {2 * len(config.models) + 2} servers; their logs are in {config.out}")
    async with _started(config) as (ways, first):
        known, vocab_size = await facts(first), (await first.model_info()).vocab_size

        def prompts(num: int, seed: int) -> list[workload.Arrival]:
            asked = workload.synthetic(LENGTHS, num, seed=seed, vocab_size=vocab_size)
            return workload.several_models(asked, dict.fromkeys(config.models, 1.0), seed)

        def traces(rate_per_s: float, number: int) -> list[list[workload.Arrival]]:
            if not rate_per_s:
                return [[one] for one in prompts(config.singles, config.seed)]
            num = max(1, round(rate_per_s * config.duration_s))
            seeds = [config.seed + 1000 * turn + number for turn in range(config.rounds)]
            times_s = ((seed, workload.poisson_times(num, rate_per_s, seed)) for seed in seeds)
            return [workload.schedule(prompts(num, seed), due) for seed, due in times_s]

        for way in ways.values():
            await saturate(way, prompts(1000, 99), concurrency=config.slots, duration_s=WARM_S)
        asked, full_s = cycle(prompts(1000, 98)), CAPACITY_S
        run = await saturate(ways["alone"], asked, concurrency=config.slots, duration_s=full_s)
        capacity_per_s = full_batch(run, 0.2 * full_s, full_s).capacity_per_s
        points = []
        for number, load in enumerate((0.0, *config.loads)):
            say(f"{load:g} of {capacity_per_s:.1f} requests/s" if load else "one request at a time")
            asked_now, pause_s = traces(load * capacity_per_s, number), bool(load) * PAUSE_S
            played = await _play(ways, asked_now, pause_s, first=number * config.rounds)
            about = {"load": load, "rate_per_s": load * capacity_per_s}
            points += [{"way": name} | about | point(runs) for name, runs in played.items()]
    told = asdict(config)
    result = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "config": {key: told[key] for key in KEPT},
        **known,
        "models": list(config.models),
        "capacity_per_s": capacity_per_s,
        "points": points,
    }
    (config.out / "family.json").write_text(json.dumps(result, indent=1) + "\n")
    say(table(result))
    draw(result, config.out / "family.png")
    return result


async def _play(
    ways: Mapping[str, Way],
    traces: Sequence[Sequence[workload.Arrival]],
    pause_s: float,
    first: int = 0,
) -> dict[str, list[tuple[Run, int]]]:
    """Returns the run of each trace, and changes of weights meanwhile, by alternative. The first
    trace begins with alternative `first`, counted round, and each further one with the next.
    """
    played: dict[str, list[tuple[Run, int]]] = {name: [] for name in ways}
    for turn, trace in enumerate(traces, first):
        at = turn % len(ways)
        for name in [*ways, *ways][at : at + len(ways)]:
            before = await ways[name].changes()
            run = await play(ways[name], trace, time_limit_s=trace[-1].at_s + PATIENCE_S)
            played[name].append((run, await ways[name].changes() - before))
            await asyncio.sleep(pause_s)
    return played


# -- figures ---------------------------------------------------------------------------------------


def point(played: Sequence[tuple[Run, int]]) -> dict[str, Any]:
    """Returns latencies in milliseconds and rates over all runs, each with its changes of weights.

    Where weights changed in some of the runs only, `changed` and `unchanged` have their figures.
    """
    records = [r for run, _ in played for r in run.records]
    done = [r for r in records if r.ok]
    duration_s = sum(run.duration_s for run, _ in played)
    found: dict[str, Any] = {
        "completed": len(done),
        "failures": dict(Counter(r.code for r in records if not r.ok)),
        "requests_per_s": len(done) / duration_s,
        "tokens_per_s": sum(len(r.token_s) for r in done) / duration_s,
        "changes": sum(changes for _, changes in played),
        "latest_send_ms": 1e3 * max(r.sent_s - r.at_s for r in records),
    }
    if done:
        found |= latency_summary(done, ("e2el", "ttft"), (90,))
    if len({bool(changes) for _, changes in played}) == 2:
        found["changed"] = point([one for one in played if one[1]])
        found["unchanged"] = point([one for one in played if not one[1]])
    return found


def table(result: Mapping[str, Any]) -> str:
    """Returns medians by alternative and load, and how the pool compares to the alternatives."""
    by = {(one["way"], one["load"]): one for one in result["points"]}
    zero, *loads = sorted({load for _, load in by})
    heads = [f"{load:g}: {by['pool', load]['rate_per_s']:.1f} req/s" for load in loads]
    lines = ["Medians: turnaround / TTFT in ms; requests answered a second"]
    lines += [f"| | one at a time | {' | '.join(heads)} |", "|---" * (2 + len(loads)) + "|"]
    for name, words in WAYS.items():
        cells = [_cell(by[name, load]) for load in (zero, *loads)]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    half = by["half", zero]
    if "changed" in half:
        there, copied = (half[key]["median_ttft_ms"] for key in ("unchanged", "changed"))
        lines.append(f"Half of the sets: TTFT {there:.1f} ms; {copied:.1f} where one was copied")
    for load in loads:
        pool, *others = (by[name, load]["requests_per_s"] for name in ("pool", "time", "space"))
        time, space = (f"{100 * (pool / other - 1):+.0f} %" for other in others)
        lines.append(f"Pool's req/s at {load:g}: {time} to time sharing, {space} to space sharing")
    failures = sum((Counter(one["failures"]) for one in result["points"]), Counter())
    return "\n".join([*lines, f"Failures: {dict(failures) or 'none'}"])


def _cell(one: Mapping[str, Any]) -> str:
    took = (f"{one.get(f'median_{key}_ms', math.nan):.1f}" for key in ("e2el", "ttft"))
    return f"{' / '.join(took)}; {one['requests_per_s']:.1f}"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws turnaround, TTFT and throughput over request rate."""
    panels = (
        ("median turnaround, ms", "median_e2el_ms", True),
        ("median time to first token, ms", "median_ttft_ms", True),
        ("requests a second that are answered", "requests_per_s", False),
    )
    points = [one for one in result["points"] if one["load"] and one["completed"]]

    def lines(key: str) -> list[Line]:
        found = [(one["way"], (one["rate_per_s"], one[key])) for one in points]
        return [Line(words, [p for way, p in found if way == name]) for name, words in WAYS.items()]

    draw_over_rate([Panel(title, lines(key), log) for title, key, log in panels], path)
