"""`jmoe demo`: one server, one burst, played without and with brownout; a table and a picture."""

import argparse
import asyncio
import contextlib
import json
import math
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop
from rich.console import Console

from serving.bench.calibrate import Calibration, CalibrationError, calibrate
from serving.bench.facts import facts
from serving.bench.launch import LaunchError, running_server
from serving.bench.loadgen import play
from serving.bench.machine import Watch
from serving.bench.report import draw, latency_series, table, verdict
from serving.bench.results import (
    Record,
    Run,
    Sample,
    Slo,
    latency_summary,
    quality,
    summarize,
    violations,
)
from serving.bench.variants import ALL, PAIR, VARIANTS, use_variant
from serving.bench.workload import (
    BUNDLED_TASKS,
    Arrival,
    burst_pieces,
    load_tasks,
    piecewise_poisson_times,
    schedule,
    shuffled,
)
from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb


@dataclass(frozen=True)
class DemoConfig:
    """What the demo does.

    Rates are shares of the capacity without brownout, which is measured with the next request sent
    when one is answered. No server keeps up with Poisson arrivals at all of it.

    Raises ValueError for durations and counts that leave nothing to play.
    """

    duration_s: float = 75.0  # of arrivals, for each run
    burst_at: float = 0.3  # share of the time
    steady_load: float = 0.5
    burst_load: float = 1.0
    strategy: str = "partial"  # or "full"
    controllers: bool = False  # play each of them, not only the server's own
    calibration_s: float = 6.0  # for each of its four full-batch measurements
    pause_s: float = 2.0  # before each run, once the server is idle
    repeat: int = 1  # more: calibrate and play the runs this often, and store medians
    seed: int = 0
    tasks: Path = BUNDLED_TASKS
    out: Path = Path("out")  # picture, JSON, server log
    benchmarks: Path = Path("benchmarks")  # where repeated results go
    server: tuple[str, ...] = ("-m", "serving.cli", "serve", "--config", "demo", "--port", "0")
    server_args: tuple[str, ...] = ()  # more flags for the server
    startup_timeout_s: float = 900.0

    @property
    def variants(self) -> tuple[str, ...]:
        """Of `serving.bench.variants`; the first one is without brownout."""
        return ALL if self.controllers else PAIR

    def __post_init__(self) -> None:
        for name in ("duration_s", "repeat"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")


def run_demo(config: DemoConfig, console: Console | None = None) -> dict[str, Any]:
    """Runs the demo, prints and stores its results, and returns them.

    Raises LaunchError, or WorkloadError when the task file cannot be used.
    """
    return uvloop.run(_demo(config, console or Console()))


async def _demo(config: DemoConfig, console: Console) -> dict[str, Any]:
    task = asyncio.current_task()
    assert task is not None
    # A demo that is told to stop takes its server with it.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    tasks = shuffled(load_tasks(config.tasks), config.seed)
    config.out.mkdir(parents=True, exist_ok=True)
    results = []
    async with _server(config, console) as (address, pid), Client(address) as client:
        await client.wait_ready(config.startup_timeout_s)
        known, own = await facts(client), await client.get_brownout()
        for number in range(config.repeat):
            suffix = f"-{number + 1}" if config.repeat > 1 else ""
            results.append(known | await _play(client, config, tasks, own, pid, console))
            _show(results[-1], config.out / f"demo{suffix}.png", console)
    if config.repeat == 1:
        _store(results[0], config.out / "demo.json", console)
        return results[0]
    medians = {
        "runs": {name: _medians([r["runs"][name] for r in results]) for name in config.variants}
    }
    repeated = known | {"repeat": config.repeat, "medians": medians, "results": results}
    _store(repeated, config.benchmarks / "demo.json", console)
    return repeated


@contextlib.asynccontextmanager
async def _server(config: DemoConfig, console: Console) -> AsyncIterator[tuple[str, int]]:
    """A server as a child process; yields address and pid. It is gone when the block is left."""
    with console.status("starting the server", refresh_per_second=4) as status:

        def say(text: str) -> None:
            shown = text[: max(20, console.width - 25)]
            status.update(f"starting the server: {shown}", spinner_style="green")

        async with running_server(
            [*config.server, *config.server_args],
            config.out / "server.log",
            config.startup_timeout_s,
            say,
            (grpc.aio.AioRpcError, CalibrationError, TimeoutError),
            lambda url: console.print(f"live page: {url}"),
        ) as found:
            status.stop()
            yield found


# -- one calibration, and its runs -----------------------------------------------------------------


async def _play(
    client: Client,
    config: DemoConfig,
    tasks: Sequence[Arrival],
    own: pb.BrownoutState,
    pid: int,
    console: Console,
) -> dict[str, Any]:
    """Calibrates, and plays each variant; `own` is the state in which the server was started."""
    watch = Watch(pid)
    with console.status("calibrating", refresh_per_second=4) as status:
        calibration = await calibrate(
            client,
            tasks,
            strategy=config.strategy,
            window_s=config.calibration_s,
            say=status.update,
        )
    machine = {"calibration": watch.seen()}
    slo = calibration.slo
    steady_per_s, burst_per_s = (
        load * calibration.zero.capacity_per_s for load in (config.steady_load, config.burst_load)
    )
    console.print(_calibration_text(calibration, steady_per_s, burst_per_s))
    burst_at_s = config.duration_s * config.burst_at
    pieces = burst_pieces(config.duration_s, steady_per_s, burst_per_s, config.burst_at)
    arrivals = schedule(tasks, piecewise_poisson_times(pieces, config.seed))
    runs = {}
    for name in config.variants:
        variant = VARIANTS[name]
        await wait_idle(client, config.pause_s)
        watch = Watch(pid)
        state = await use_variant(client, variant, own, config.strategy, slo)
        console.print(f"playing: {variant.label}")
        with console.status(variant.label, refresh_per_second=4) as status:
            run = await play(
                client,
                arrivals,
                time_limit_s=config.duration_s + 30,
                on_sample=_progress(variant.label, config.duration_s, status.update),
            )
        machine[name] = watch.seen()
        runs[name] = run_result(run, slo, burst_at_s, config.duration_s)
    return {
        "date": datetime.now().isoformat(timespec="seconds"),
        "config": {key: value for key, value in asdict(config).items() if key in _KEPT},
        "calibration": asdict(calibration),
        "slo": {**asdict(slo), "warning_factor": state.warning_factor},
        "duration_s": config.duration_s,
        "burst_at_s": burst_at_s,
        "steady_rate_per_s": steady_per_s,
        "burst_rate_per_s": burst_per_s,
        "num_requests": len(arrivals),
        "other_cpu_share": {name: seen.others for name, seen in machine.items()},
        "machine_speed": {
            name: seen.work_per_s / machine["calibration"].work_per_s
            for name, seen in machine.items()
        },
        "controller": own.controller,
        "prefill_company": own.prefill_company,
        "runs": runs,
    }


# Settings that shape the result; paths of the machine stay out of stored files.
_KEPT = (
    "duration_s",
    "burst_at",
    "steady_load",
    "burst_load",
    "strategy",
    "calibration_s",
    "seed",
)


async def wait_idle(client: Client, pause_s: float, timeout_s: float = 60.0) -> None:
    """Until nothing runs or waits, and a pause more."""
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
    """What is stored of a run: summaries whole and by phase, the P90 series, server samples."""
    samples = [asdict(sample) for sample in run.samples]
    return {
        **summarize(run),
        **violations(run.records, slo),
        "steady": _phase(run, run.due(0, burst_at_s), slo, 0, burst_at_s),
        "burst": _phase(run, run.due(burst_at_s), slo, burst_at_s, duration_s),
        "series": latency_series(run.records, duration_s),
        "samples": {key: [sample[key] for sample in samples] for key in samples[0]},
    }


def _phase(
    run: Run, records: Sequence[Record], slo: Slo, start_s: float, end_s: float
) -> dict[str, Any]:
    samples = [s for s in run.samples if start_s <= s.at_s < end_s]
    return {
        **latency_summary(records),
        **violations(records, slo),
        **quality(records),
        "mean_thresholds_percent": {
            phase: float(np.mean([getattr(s, f"{phase}_threshold_percent") for s in samples]))
            if samples
            else None
            for phase in ("prefill", "decode")
        },
    }


# -- what is shown and stored --------------------------------------------------------------------


def _calibration_text(calibration: Calibration, steady_per_s: float, burst_per_s: float) -> str:
    zero, full, slo = calibration.zero, calibration.full, calibration.slo
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
    if full.itl_p90_s > 0.95 * zero.itl_p90_s:
        lines.append("note: brownout hardly speeds decoding up here, so it cannot help much")
    return "\n".join(lines)


def _show(result: dict[str, Any], picture: Path, console: Console) -> None:
    result["verdict"] = verdict(result)
    console.print(table(result))
    draw(result, picture)
    console.print(f"picture: {picture}")
    console.print(result["verdict"], style="bold")


def _medians(values: Sequence[Any]) -> Any:
    """Medians of equal structures, number by number; what is not a number or a dict is left out."""
    if isinstance(values[0], dict):
        keys = [key for key in values[0] if key not in ("series", "samples")]
        medians = {k: _medians([value[k] for value in values if k in value]) for k in keys}
        return {key: median for key, median in medians.items() if median is not None}
    numbers = [value for value in values if isinstance(value, int | float)]
    return float(np.median(numbers)) if numbers else None


def _rounded(value: Any) -> Any:
    """Five digits are more than the clock is good for; JSON has no NaN."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _store(result: dict[str, Any], path: Path, console: Console) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(result)) + "\n", encoding="utf-8")
    console.print(f"results: {path}")


def main() -> None:
    """Command line: `python -m serving.bench.demo`."""
    parser = argparse.ArgumentParser(prog="python -m serving.bench.demo", description=__doc__)
    parser.add_argument(
        "--repeat",
        type=int,
        default=1,
        help="calibrate and play so often; more than once: store medians",
    )
    parser.add_argument("--duration-s", type=float, default=75.0, help="of arrivals, for each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--controllers", action="store_true", help="play each of them")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results")
    parser.add_argument("server_args", nargs="*", help="after --: more flags for the server")
    args = parser.parse_args()
    try:
        run_demo(DemoConfig(**{**vars(args), "server_args": tuple(args.server_args)}))
    except (LaunchError, ValueError) as error:
        sys.exit(f"demo failed: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("demo stopped")


if __name__ == "__main__":
    main()
