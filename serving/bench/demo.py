"""`jmoe demo`: short bursts in pairs, without and with brownout; a table and a picture."""

import asyncio
import contextlib
import json
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import uvloop
from rich.console import Console

from serving.bench import report, results, workload
from serving.bench.calibrate import Calibration, CalibrationError, calibrate, run_all_steps
from serving.bench.facts import facts
from serving.bench.launch import running_server
from serving.bench.loadgen import Steered, play
from serving.bench.machine import Watch
from serving.bench.results import Record, Run, Sample, Slo
from serving.bench.variants import ALL, PAIR, VARIANTS, Variant, use_variant
from serving.bench.workload import BUNDLED_TASKS, Arrival
from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

if TYPE_CHECKING:
    from serving.bench.simulator.server import Machine

MOVED = 0.12
"""A pair does not count if the machine's speed moved by more than this share within it, and by more
than chance moves what is seen of it."""
OTHERS = 0.15
"""Nor if other programs took more than this share of the processors."""
LOOK_S = 1.0
"""For so long it looks whether other programs leave the machine alone, before a pair."""
LEFT_LATE_S = 0.25
"""Nor if a request left so late: this process was held up."""
NATIVE = "JMOE_NATIVE"
"""Off, unless the environment says otherwise: experts in C++ take so little of a step of this model
that a burst on two cores meets the server's own work, of which brownout saves nothing."""


@dataclass(frozen=True)
class DemoConfig:
    """What the demo does.

    A short burst is played in pairs of segments, with and without brownout, in the order ABBA, so
    that both meet the same machine. `steady_load` is a share of the capacity without brownout,
    which is measured with the next request sent when one is answered. The burst's load is a quarter
    of the way, in ratio, from the capacity without brownout to that with all of it: at half of the
    way a burst of seconds left no time to react.

    Raises ValueError for durations and counts that leave nothing to play, another strategy, and for
    flags of a server that would only be simulated.
    """

    segment_s: float = 15.0  # of arrivals, for each segment
    burst_at: float = 0.25  # share of the time
    steady_load: float = 0.5
    pairs: int = 4  # that count
    spare_pairs: int = 3  # played in place of those that do not count, at most
    strategy: str = "partial"  # or "full"
    controllers: bool = False  # play each of them, not only the server's own
    simulated: bool = False  # on the step times of a server that is only timed
    calibration_s: float = 6.0  # for each of its four full-batch measurements
    pause_s: float = 1.0  # before each segment, once the server is idle
    limit_s: float = 310.0  # after which no pair begins; till then they wait for a quiet machine
    seed: int = 0
    tasks: Path = BUNDLED_TASKS
    out: Path = Path("out")  # picture, JSON, server log
    server: tuple[str, ...] = ("-m", "serving.cli", "serve", "--config", "demo", "--port", "0")
    server_args: tuple[str, ...] = ()  # more flags for the server
    startup_timeout_s: float = 900.0

    @property
    def variants(self) -> tuple[str, ...]:
        """Names in `serving.bench.variants`; the first one is without brownout."""
        return ALL if self.controllers else PAIR

    def __post_init__(self) -> None:
        for name in ("segment_s", "pairs"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.strategy not in ("partial", "full"):
            raise ValueError(f"strategy is {self.strategy!r}; it must be partial or full")
        if self.simulated and self.server_args:
            raise ValueError(
                f"flags for a server are {' '.join(self.server_args)!r}; a simulated demo has the "
                "settings of the preset `demo`: leave them out, or play the demo for real"
            )


def run_demo(config: DemoConfig, console: Console | None = None) -> dict[str, Any]:
    """Runs the demo, prints and stores its results, and returns them.

    Raises LaunchError, or WorkloadError when the task file cannot be used.
    """
    console = console or Console()
    tasks = workload.load_tasks(config.tasks)
    config.out.mkdir(parents=True, exist_ok=True)
    if config.simulated:
        machine, known = timed_machine(config, tasks, console)
        result = known | simulate_demo(config, tasks, machine, console)
    else:
        result = uvloop.run(_live(config, tasks, console))
    _show(result, config.out / "demo.png", console)
    _store(result, config.out / "demo.json", console)
    return result


async def _live(config: DemoConfig, tasks: Sequence[Arrival], console: Console) -> dict[str, Any]:
    async with _server(config, console) as (client, pid):
        return await facts(client) | await _Session(client, config, tasks, pid, console).run()


def timed_machine(
    config: DemoConfig, tasks: Sequence[Arrival], console: Console
) -> "tuple[Machine, dict[str, Any]]":
    """Times a server's steps; returns a machine that takes as long, and facts of the server."""
    timeline = config.out / "timeline.json"
    timeline.unlink(missing_ok=True)  # one of before is not what is timed now

    async def time_steps() -> dict[str, Any]:
        async with _server(config, console, "--timeline", str(timeline)) as (client, pid):
            watch = Watch(pid)
            with console.status("timing the server's steps", refresh_per_second=4):
                asked = workload.shuffled(tasks, config.seed)
                await run_all_steps(client, asked, strategy=config.strategy)
            return {**await facts(client), "others_while_timed": watch.others()}

    known = uvloop.run(time_steps())  # the server writes its timeline when it ends
    from serving.bench.simulator.server import recorded_machine
    from serving.settings import reading as settings

    machine = recorded_machine(timeline, settings.load("demo").engine)
    num_steps, others = len(machine.times.moods), known["others_while_timed"] or 0.0
    busy = f" (other programs took {others:.0%} of the processors)" if others > OTHERS else ""
    console.print(f"simulated from here on, by the times of {num_steps} steps{busy}")
    return machine, known


def simulate_demo(
    config: DemoConfig, tasks: Sequence[Arrival], machine: "Machine", console: Console
) -> dict[str, Any]:
    """Plays the demo on a simulated machine with the preset's settings; returns its results."""
    from serving.bench.simulator.server import SimulatedServer, as_tokens, run_simulated
    from serving.settings import reading as settings

    async def run(server: SimulatedServer) -> dict[str, Any]:
        return await _Session(server, config, as_tokens(tasks), None, console).run()

    return run_simulated(machine, settings.load("demo").engine, run, config.seed)


@contextlib.asynccontextmanager
async def _server(
    config: DemoConfig, console: Console, *flags: str
) -> AsyncIterator[tuple[Client, int]]:
    """Starts a server as a child process; yields its client, once it is ready, and its pid. It is
    ended when the block is left.
    """
    task = asyncio.current_task()
    assert task is not None
    # A demo that is told to stop takes its server with it.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with console.status("starting the server", refresh_per_second=4) as status:

        def say(text: str) -> None:
            shown = text[: max(20, console.width - 25)]
            status.update(f"starting the server: {shown}", spinner_style="green")

        async with running_server(
            [*config.server, *config.server_args, *flags],
            config.out / "server.log",
            config.startup_timeout_s,
            say,
            (grpc.aio.AioRpcError, CalibrationError, TimeoutError),
            lambda url: console.print(f"live page: {url}"),
            {NATIVE: os.environ.get(NATIVE, "0")},
        ) as (address, pid):
            status.stop()
            async with Client(address) as client:
                await client.wait_ready(config.startup_timeout_s)
                yield client, pid


# -- one calibration, and its pairs ----------------------------------------------------------------


@dataclass(frozen=True)
class _Session:
    """Whom requests are sent to, and which ones. `pid` is the server's, if it has a process."""

    client: Steered
    config: DemoConfig
    tasks: Sequence[Arrival]
    pid: int | None
    console: Console

    async def run(self) -> dict[str, Any]:
        """Calibrates, and plays pairs until enough of them count. The result has the runs of the
        median pair.
        """
        config, console = self.config, self.console
        own, began = await self.client.get_brownout(), time.monotonic()
        calibration, _ = await self._undisturbed(self._calibrate, began + config.limit_s / 3)
        step_s = calibration.zero.full_decode_step_s
        console.print(_calibration_text(calibration, config))
        pairs: list[dict[str, Any]] = []
        warm = partial(self._warm_slowness, own, calibration)
        slowness, _ = await self._undisturbed(warm, began + config.limit_s / 2)
        until = began + config.limit_s
        while (
            sum(not pair["why_not"] for pair in pairs) < config.pairs
            and len(pairs) < config.pairs + config.spare_pairs
            and (await _wait_quiet(self.pid, until, console) or not pairs)
        ):
            pair = await self._pair(own, calibration, len(pairs), slowness, until)
            seen = [_slowness(run, step_s) for run in pair["runs"].values()]
            moved = max(abs(one / slowness - 1) for one in seen)
            chance = max(_chance(run, step_s) for run in pair["runs"].values())
            late_s = max(run["latest_send_ms"] for run in pair["runs"].values()) / 1e3
            others = pair["others"] or 0
            why_not = {
                f"the machine's speed moved by {moved:.0%}": moved > MOVED + chance,
                f"other programs took {others:.0%} of the processors": others > OTHERS,
                f"requests left up to {late_s:.2f} s late": late_s > LEFT_LATE_S,
            }
            pair |= {
                "slowness": slowness,
                "moved": moved,
                "why_not": " and ".join(words for words, holds in why_not.items() if holds),
            }
            if others <= OTHERS:
                slowness = float(np.median(seen))
            pairs.append(pair)
            console.print(report.pair_line(len(pairs), pair))
        median = report.median_pair(pairs)
        return {
            "date": datetime.now().isoformat(timespec="seconds"),
            "simulated": config.simulated,
            "config": {key: value for key, value in asdict(config).items() if key in _KEPT},
            "calibration": asdict(calibration),
            "gain": calibration.full.capacity_per_s / calibration.zero.capacity_per_s,
            "duration_s": config.segment_s,
            "burst_at_s": config.segment_s * config.burst_at,
            "controller": own.controller,
            "prefill_company": own.prefill_company,
            "pairs": [{**pair, "runs": _brief(pair["runs"])} for pair in pairs],
            "median_pair": median + 1,
            **{key: pairs[median][key] for key in _OF_MEDIAN},
        }

    async def _calibrate(self) -> Calibration:
        with self.console.status("calibrating", refresh_per_second=4) as status:
            return await calibrate(
                self.client,
                workload.shuffled(self.tasks, self.config.seed),
                strategy=self.config.strategy,
                window_s=self.config.calibration_s,
                say=status.update,
            )

    async def _undisturbed[T](
        self, play_once: Callable[[], Awaitable[T]], until: float
    ) -> tuple[T, float | None]:
        """Plays when the machine is quiet, and again if it was not all the while, until that time
        of `time.monotonic`; returns the result, and the share that other programs took meanwhile.
        """
        while True:
            await _wait_quiet(self.pid, until, self.console)
            watch = None if self.pid is None else Watch(self.pid)
            result = await play_once()
            others = None if watch is None else watch.others()
            if (others or 0) <= OTHERS or time.monotonic() >= until:
                return result, others
            self.console.print(f"played again: other programs took {others:.0%} of the processors")

    async def _segment(self, arrivals: Sequence[Arrival], words: str) -> Run:
        duration_s = self.config.segment_s
        with self.console.status(words, refresh_per_second=4) as status:
            return await play(
                self.client,
                arrivals,
                time_limit_s=2 * duration_s,
                on_sample=_progress(words, duration_s, status.update),
            )

    async def _warm_slowness(self, own: pb.BrownoutState, calibration: Calibration) -> float:
        """Returns the slowness of the machine as it serves a segment that no pair is made of.

        A processor that was idle before the calibration may be faster in it than it will be.
        """
        config = self.config
        arrivals = burst(config, self.tasks, *rates(calibration, config), config.seed)
        variant = VARIANTS[config.variants[0]]
        await use_variant(self.client, variant, own, config.strategy, calibration.slo)
        run = await self._segment(arrivals, "warming up")
        samples = {"full_decode_step_s": [sample.full_decode_step_s for sample in run.samples]}
        return _slowness({"samples": samples}, calibration.zero.full_decode_step_s)

    async def _pair(
        self,
        own: pb.BrownoutState,
        calibration: Calibration,
        number: int,
        slowness: float,
        until: float,
    ) -> dict[str, Any]:
        """Plays the same arrivals under each variant; those of every other pair in reverse order.

        Objectives and load are the calibration's on a machine that takes `slowness` times as long.
        A segment that other programs disturbed is played again until that time of `time.monotonic`.
        """
        config, seed = self.config, self.config.seed + number
        slo = Slo(calibration.slo.ttft_s * slowness, calibration.slo.itl_s * slowness)
        steady_per_s, burst_per_s = (rate / slowness for rate in rates(calibration, config))
        arrivals = burst(config, self.tasks, steady_per_s, burst_per_s, seed)
        runs, others, state = {}, [], own

        async def segment(variant: Variant) -> tuple[Run, pb.BrownoutState]:
            words = f"pair {number + 1}, {variant.label}"
            await wait_idle(self.client, config.pause_s)
            state = await use_variant(self.client, variant, own, config.strategy, slo)
            self.console.print(f"playing: {words}")
            return await self._segment(arrivals, words), state

        for name in config.variants[:: -1 if number % 2 else 1]:
            play_once = partial(segment, VARIANTS[name])
            (run, state), share = await self._undisturbed(play_once, until)
            others.append(share)
            runs[name] = run_result(run, slo, config.segment_s * config.burst_at, config.segment_s)
        return {
            "seed": seed,
            "slo": {**asdict(slo), "warning_factor": state.warning_factor},
            "steady_rate_per_s": steady_per_s,
            "burst_rate_per_s": burst_per_s,
            "num_requests": len(arrivals),
            "others": max(filter(None, others), default=None),
            "runs": {name: runs[name] for name in config.variants},
        }


async def _wait_quiet(pid: int | None, until: float, console: Console) -> bool:
    """Waits until other programs leave the machine alone, or until that time of
    `time.monotonic`; returns whether there is time left. `pid` is the server's, None: of none.
    """
    with console.status("waiting for a quiet machine", refresh_per_second=4):
        while pid is not None and time.monotonic() < until:
            watch = Watch(pid)
            await asyncio.sleep(LOOK_S)
            if (watch.others() or 0) <= OTHERS:
                break
    return time.monotonic() < until


_OF_MEDIAN = ("seed", "slo", "steady_rate_per_s", "burst_rate_per_s", "num_requests", "runs")


def rates(calibration: Calibration, config: DemoConfig) -> tuple[float, float]:
    """Returns the requests a second before the burst and in it."""
    zero, full = calibration.zero.capacity_per_s, calibration.full.capacity_per_s
    return config.steady_load * zero, zero**0.75 * full**0.25


def burst(
    config: DemoConfig, tasks: Sequence[Arrival], steady_per_s: float, burst_per_s: float, seed: int
) -> list[Arrival]:
    """Returns the requests of a segment; the seed draws their order and times."""
    pieces = workload.burst_pieces(config.segment_s, steady_per_s, burst_per_s, config.burst_at)
    times_s = workload.piecewise_poisson_times(pieces, seed)
    return workload.schedule(workload.shuffled(tasks, seed), times_s)


def _slowness(run: dict[str, Any], step_s: float) -> float:
    """Returns the time of a full decode step in a run over the `step_s` that it took at
    calibration; at least 1. A machine that seems faster is not given more load than it was seen to
    carry: the server's estimate is off by a tenth.
    """
    seen = [seconds for seconds in run["samples"]["full_decode_step_s"] if seconds]
    return max(1.0, float(np.median(seen)) / step_s) if seen and step_s > 0 else 1.0


def _chance(run: dict[str, Any], step_s: float) -> float:
    """Returns twice the standard error of `_slowness`, from what it moves by between samples: where
    steps are noisy, their mean is.
    """
    seen = [seconds for seconds in run["samples"]["full_decode_step_s"] if seconds]
    if len(seen) < 3 or not step_s > 0:
        return 0.0
    typical = float(np.median(np.abs(np.diff(seen)))) / step_s
    return 2 * 1.05 * typical / math.sqrt(len(seen))  # 1.05: of normal samples, to their deviation


def _brief(runs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {key: value for key, value in run.items() if key not in ("series", "samples")}
        for name, run in runs.items()
    }


# Settings that shape the result; paths of the machine stay out of stored files.
_KEPT = (
    "segment_s",
    "burst_at",
    "steady_load",
    "pairs",
    "spare_pairs",
    "strategy",
    "calibration_s",
    "seed",
)


async def wait_idle(client: Steered, pause_s: float, timeout_s: float = 60.0) -> None:
    """Waits until nothing runs or waits, and for a pause after that."""
    async with asyncio.timeout(timeout_s):
        while (stats := await client.stats()).num_running or stats.num_waiting:
            await asyncio.sleep(0.2)
    await asyncio.sleep(pause_s)


def _progress(
    words: str, duration_s: float, update: Callable[[str], None]
) -> Callable[[Sample], None]:
    def show(sample: Sample) -> None:
        update(
            f"{words}: {min(sample.at_s, duration_s):.0f} of {duration_s:.0f} s, "
            f"{sample.num_running} running, {sample.num_waiting} waiting, thresholds "
            f"{sample.prefill_threshold_percent:.0f} / {sample.decode_threshold_percent:.0f} %"
        )

    return show


def run_result(run: Run, slo: Slo, burst_at_s: float, duration_s: float) -> dict[str, Any]:
    """Returns what is stored of a run: summaries, whole and by phase, the P90 series, server
    samples.
    """
    samples = [asdict(sample) for sample in run.samples]
    return {
        **results.summarize(run),
        **results.violations(run.records, slo),
        "steady": _phase(run, run.due(0, burst_at_s), slo, 0, burst_at_s),
        "burst": _phase(run, run.due(burst_at_s), slo, burst_at_s, duration_s),
        "series": report.latency_series(run.records, duration_s, window_s=duration_s / 20),
        "samples": {key: [sample[key] for sample in samples] for key in samples[0]},
    }


def _phase(
    run: Run, records: Sequence[Record], slo: Slo, start_s: float, end_s: float
) -> dict[str, Any]:
    samples = [s for s in run.samples if start_s <= s.at_s < end_s]
    return {
        **results.latency_summary(records),
        **results.violations(records, slo),
        **results.quality(records),
        "mean_thresholds_percent": {
            phase: float(np.mean([getattr(s, f"{phase}_threshold_percent") for s in samples]))
            if samples
            else None
            for phase in ("prefill", "decode")
        },
    }


# -- what is shown and stored --------------------------------------------------------------------


def _calibration_text(calibration: Calibration, config: DemoConfig) -> str:
    zero, full, slo = calibration.zero, calibration.full, calibration.slo
    steady_per_s, burst_per_s = rates(calibration, config)
    lines = [
        f"an unloaded first token takes {calibration.unloaded_ttft_s * 1e3:.0f} ms",
        *(
            f"a full batch {words}: {batch.capacity_per_s:.1f} requests/s, P90 of first tokens "
            f"{batch.ttft_p90_s * 1e3:.0f} ms, of others {batch.itl_p90_s * 1e3:.1f} ms"
            for words, batch in (("without brownout", zero), ("with all of it", full))
        ),
        f"SLO (P90): first token {slo.ttft_s * 1e3:.0f} ms, other tokens {slo.itl_s * 1e3:.1f} ms",
        f"load: {steady_per_s:.1f} requests/s, in the burst {burst_per_s:.1f}",
    ]
    if (gain := full.capacity_per_s / zero.capacity_per_s) < report.LEAST_GAIN:
        lines.append(f"note: {report.too_little(gain)}")
    return "\n".join(lines)


def _show(result: dict[str, Any], picture: Path, console: Console) -> None:
    result["verdict"] = report.verdict(result)
    if len(result["pairs"]) > 1:
        console.print(f"pair {result['median_pair']}, the median:")
    console.print(report.table(result))
    report.draw(result, picture)
    console.print(f"picture: {picture}")
    console.print(result["verdict"], style="bold")


def _store(result: dict[str, Any], path: Path, console: Console) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = results.rounded(result, 5)  # more than the clock has
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")
    console.print(f"results: {path}")
