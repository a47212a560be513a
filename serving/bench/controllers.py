"""`jmoe bench controllers`: controllers over load traces and seeds, on simulated time.

Engine, scheduler and controllers are the server's own; what steps take was measured, or stands in a
file. Load is a share of the capacity with all brownout, and the same seed with all brownout from
the first request on is the yardstick: no controller can keep more tokens in time than that.
"""

import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from rich.console import Console

from serving.bench import workload
from serving.bench.calibrate import Calibration, calibrate
from serving.bench.demo import DemoConfig, timed_machine
from serving.bench.results import Run, Sample, Slo, quality, violations
from serving.bench.simulator.server import (
    Machine,
    as_tokens,
    recorded_machine,
    run_simulated,
    simulate,
)
from serving.bench.workload import BUNDLED_TASKS, Arrival, Lengths
from serving.config import EngineConfig
from serving.settings import reading as settings
from serving.telemetry.version import commit

ALL_BROWNOUT = "all brownout"
FIGURES = {
    "late_first": "late first %",
    "late_other": "late other %",
    "degraded": "degraded %",
    "spread": "spread over 1 s",
    "refused": "refused %",
}
CHANGE_AT = 0.3
"""Share of the time after which shapes change and machines change their speed; from then on tokens
count."""
THIN_S = 10.0
"""After a burst, traffic that is thin counts from here on."""
MOST_TTFT = 10.0
NUM_SAMPLES = 512

Times = Float[np.ndarray, "N"]
Shape = Callable[[Times, Times, float, np.random.Generator], Any]


def _mmpp(t: Times, x: Times, interval_s: float, rng: np.random.Generator) -> Times:
    """Returns a rate that jumps between two, 2 s after 2 s on average."""
    jumps = rng.random(len(t)) < interval_s / 2.0
    return np.where(np.cumsum(jumps) % 2, 0.4, 1.2)


SHAPES: dict[str, Shape] = {
    "steady": lambda t, x, interval_s, rng: np.ones_like(t),
    "step": lambda t, x, interval_s, rng: np.where(x < 0, 0.5, 1),
    "ramps": lambda t, x, interval_s, rng: np.clip(0.55 + 0.05 * np.floor(10 * x), 0.5, 1),
    "comes and goes": lambda t, x, interval_s, rng: np.where((x < 0) | (t % 10 < 5), 0.5, 1),
    "ends": lambda t, x, interval_s, rng: np.where((x < 0) | (x >= 0.5), 0.5, 1),
    "diurnal": lambda t, x, interval_s, rng: 0.6 - 0.4 * np.cos(2 * np.pi * x),
    "mmpp": _mmpp,
    "square": lambda t, x, interval_s, rng: np.where(np.rint(t / interval_s) % 2, 0.5, 1.5),
    "thin": lambda t, x, interval_s, rng: np.where(x < 0, 1, 0.02),
}
"""Arrivals as a share of the peak, by time t, x of what is left of it after the change, interval of
the controller, and chance.
"""


class Condition(NamedTuple):
    """What is served, how it arrives, and what the machine does meanwhile."""

    mix: str = "tasks"
    shape: str = "step"
    load: float = 0.85  # at the shape's 1
    speed: float = 1.0  # of the machine, from the change on
    noise: float = 1.0  # of step times, to the recorded one's
    exempt_share: float = 0.0  # of the requests


CONDITIONS = {
    "steady": Condition(shape="steady"),
    "step": Condition(),
    "step to 0.74": Condition(load=0.74),
    "diurnal": Condition(shape="diurnal"),
    "mmpp": Condition(shape="mmpp", load=0.74),
    "square": Condition(shape="square", load=0.74),
    "heavy tails": Condition("heavy tails"),
    "prompts": Condition("prompts"),
    "giant prompts": Condition("giant prompts"),
    "decode only": Condition("decode only"),
    "prefixes": Condition("prefixes", "square", 0.6),
    "thin": Condition(shape="thin"),
    "half speed": Condition(shape="steady", load=0.42, speed=0.5),
    "speed 0.8": Condition(speed=0.8),
    "speed 1.2": Condition(speed=1.2),
    "noise doubled": Condition(noise=2.0),
    "a fifth exempt": Condition(exempt_share=0.2),
    "overload": Condition(load=1.2),
    "ramps": Condition(shape="ramps"),
    "comes and goes": Condition(shape="comes and goes"),
    "ends": Condition(shape="ends"),
    "no burst": Condition(shape="steady", load=0.43),
}


@dataclass(frozen=True)
class ControllersConfig:
    """What is played. Raises ValueError for names that are none and for counts below 1."""

    conditions: tuple[str, ...] = tuple(CONDITIONS)
    controllers: tuple[str, ...] = ("algorithm2", "predictive")
    seeds: int = 20
    first_seed: int = 1000
    duration_s: float = 30.0  # of arrivals
    load: float | None = None  # in place of each condition's
    model: str = "bundled"  # whose steps are measured, where there is no file
    times: Path | None = None  # of steps: a timeline, or a table
    traces: tuple[Path, ...] = ()  # played as further conditions
    settings: tuple[str, ...] = ()  # KEY=VALUE over those of the preset
    processes: int = 0  # 0: as many as there are processors
    out: Path = Path("out")
    mix: tuple[float, float, float] | None = None  # as `Lengths`, in place of each condition's

    def __post_init__(self) -> None:
        for name in self.conditions:
            if name not in CONDITIONS:
                raise ValueError(f"condition {name!r} is none of {', '.join(CONDITIONS)}")
        if self.mix and not (min(self.mix[:2]) >= 1 and 0 <= self.mix[2] < math.inf):
            raise ValueError(
                f"mix is {self.mix}; it must be two means of 1 token or more and a spread of 0 or "
                "more, which is finite"
            )
        if self.seeds < 1 or not self.duration_s > 0:
            raise ValueError("seeds and duration_s must be above 0")


def samples_of(mix: str, config: "ControllersConfig | None" = None) -> list[Arrival]:
    """Returns requests of a mix, or of the lengths that `config` has instead, all at 0 s; token ids
    are random, so that no prefix is shared but in the mix of that name.
    """
    if config is not None and config.mix:
        return _random(Lengths(*config.mix), _engine(config).max_model_len)
    if mix == "tasks":
        return workload.shuffled(as_tokens(workload.load_tasks(BUNDLED_TASKS)), 0, NUM_SAMPLES)
    if mix == "giant prompts":
        small, giant = (
            _random(lengths) for lengths in (Lengths(16, 16, 0.5), Lengths(200, 8, 0.0))
        )
        return [(giant if number % 16 == 15 else small)[number] for number in range(NUM_SAMPLES)]
    if mix == "prefixes":  # eight requests begin alike, four such groups at a time
        own = _random(Lengths(14, 12, 0.5), 128) * 8
        shared = workload.synthetic(Lengths(96, 1, 0.0), NUM_SAMPLES, seed=1, vocab_size=1 << 20)
        return [
            replace(one, prompt=(*shared[number // 32 * 4 + number % 4].prompt, *one.prompt))
            for number, one in enumerate(own)
        ]
    lengths = {
        "prompts": Lengths(118, 2.5, 0.4),
        "decode only": Lengths(2, 48, 0.4),
        "heavy tails": Lengths(24, 20, 1.3),
    }
    return _random(lengths[mix])


def _random(lengths: Lengths, max_total_tokens: int = 256) -> list[Arrival]:
    return workload.synthetic(
        lengths, NUM_SAMPLES, seed=0, vocab_size=1 << 20, max_total_tokens=max_total_tokens
    )


class Case(NamedTuple):
    """One condition on one machine, calibrated: a process plays it by its seed."""

    condition: Condition
    machine: Machine
    samples: Sequence[Arrival]
    times_s: Sequence[float]  # of a trace from a file; empty: by the condition's shape
    calibration: Calibration
    config: ControllersConfig

    @property
    def slo(self) -> Slo:
        """The calibration's, with a TTFT of at most `MOST_TTFT` unloaded ones: where prompts are
        the load, those of a full batch queue.
        """
        slo = self.calibration.slo
        return replace(slo, ttft_s=min(slo.ttft_s, MOST_TTFT * self.calibration.unloaded_ttft_s))

    def arrivals(self, seed: int) -> list[Arrival]:
        """Returns the requests; a trace from a file has its own order and its own gaps."""
        per_s = self.condition.load * self.calibration.full.capacity_per_s
        if self.times_s:
            return workload.schedule(self.samples, [at_s / per_s for at_s in self.times_s])
        duration_s, step_s = self.config.duration_s, _engine(self.config).salc.interval_s
        t = np.arange(0.0, duration_s, step_s)
        x = (t / duration_s - CHANGE_AT) / (1 - CHANGE_AT)
        shape = SHAPES[self.condition.shape]
        shares = shape(t, x, step_s, np.random.default_rng([seed, 1]))
        pieces = [(step_s, per_s * share) for share in shares]
        samples = self.samples  # new prefixes follow older ones
        if self.condition.mix != "prefixes":
            samples = workload.shuffled(samples, seed, NUM_SAMPLES)
        return workload.schedule(samples, workload.piecewise_poisson_times(pieces, seed))


def _engine(config: ControllersConfig, **changes: object) -> EngineConfig:
    own = dict(one.split("=", 1) for one in config.settings)
    given = {"engine.model": config.model, "engine.brownout.strategy": "partial"}
    return settings.load("demo", {**given, **own, **changes}).engine


def calibrated(
    machine: Machine, samples: Sequence[Arrival], config: ControllersConfig
) -> Calibration:
    """Returns the simulated machine, measured as `serving.bench.calibrate` measures a real one:
    nobody is refused meanwhile.
    """
    engine = _engine(config, **{"engine.admission": "queue"})
    return run_simulated(machine, engine, lambda server: calibrate(server, samples, window_s=5.0))


def cases(machine: Machine, config: ControllersConfig) -> Iterator[tuple[str, Case]]:
    """Yields the cases by name; each mix is calibrated once."""
    known: dict[str, tuple[list[Arrival], Calibration]] = {}
    for name in config.conditions:
        condition = CONDITIONS[name]
        if config.load is not None:
            condition = condition._replace(load=config.load)
        if config.mix:
            condition = condition._replace(mix=",".join(f"{of:g}" for of in config.mix))
        if condition.mix not in known:
            samples = samples_of(condition.mix, config)
            known[condition.mix] = samples, calibrated(machine, samples, config)
        samples, calibration = known[condition.mix]
        yield name, Case(condition, machine, samples, (), calibration, config)
    for path in config.traces:
        limit = _engine(config).max_model_len
        samples = workload.load_trace(path, max_total_tokens=limit)
        gap_s = samples[-1].at_s / len(samples) or 1.0
        times_s = [sample.at_s / gap_s for sample in samples]  # at one a second
        condition = Condition(path.name, "its own", config.load or 0.74)
        calibration = calibrated(machine, samples, config)
        yield path.name, Case(condition, machine, samples, times_s, calibration, config)


def play(case: Case, controller: str, seed: int) -> dict[str, float]:
    """Plays a case under a controller, and returns its figures."""
    condition, config, slo = case.condition, case.config, case.slo
    arrivals = case.arrivals(seed)
    ends_s = arrivals[-1].at_s if case.times_s else config.duration_s
    change_s = CHANGE_AT * ends_s
    changes: dict[str, object] = {
        "engine.brownout.ttft_slo_s": slo.ttft_s,
        "engine.brownout.itl_slo_s": slo.itl_s,
    }
    if controller == ALL_BROWNOUT:
        changes |= {f"engine.brownout.{p}_threshold_percent": 0 for p in ("prefill", "decode")}
        changes["engine.brownout.salc"] = False
    else:
        changes["engine.salc.controller"] = controller
    machine = replace(
        case.machine, speeds=((0.0, 1.0), (change_s, condition.speed)), noise=condition.noise
    )
    engine = _engine(config, **changes)
    run = simulate(machine, engine, arrivals, seed, condition.exempt_share)
    return figures(run, slo, change_s + THIN_S * (condition.shape == "thin"), ends_s)


def figures(run: Run, slo: Slo, start_s: float, end_s: float) -> dict[str, float]:
    """Returns, in percent, what the requests that were due from `start_s` on have met; a refused
    one is a late first token.
    """
    due = run.due(start_s)
    late, refused = violations(due, slo), sum(not record.ok for record in due)
    return {
        "late_first": 100 * (late["ttft_violation_rate"] or 0.0),
        "late_other": 100 * (late["itl_violation_rate"] or 0.0),
        "degraded": 100 * (quality(due)["degraded_share"] or 0.0),
        "spread": spread([one for one in run.samples if start_s <= one.at_s <= end_s]),
        "refused": 100 * refused / max(len(due), 1),
    }


def spread(samples: Sequence[Sample]) -> float:
    """Returns the mean difference in points between the highest and the lowest of the thresholds
    within a second: of the phase whose thresholds move more.
    """
    at_s = np.array([sample.at_s for sample in samples])
    of_phase = []
    for name in ("prefill_threshold_percent", "decode_threshold_percent"):
        values = np.array([getattr(sample, name) for sample in samples])
        windows = [values[(at_s >= at) & (at_s <= at + 1)] for at in at_s]
        of_phase.append(float(np.mean([np.ptp(one) for one in windows])) if windows else 0.0)
    return max(of_phase)


def run_controllers(config: ControllersConfig) -> dict[str, Any]:
    """Plays every condition under every controller and the yardstick over all seeds; prints and
    stores medians and worst, and draws them.

    Raises LaunchError, WorkloadError, ValueError for a file of step times that is none, and
    SettingsError.
    """
    engine = _engine(config)  # before a server is timed
    config.out.mkdir(parents=True, exist_ok=True)
    if config.times:
        machine = recorded_machine(config.times, engine)
    else:
        asked = DemoConfig(simulated=True, out=config.out)
        server = (*asked.server, "--model", config.model)
        asked = replace(asked, server=server)
        machine, _ = timed_machine(asked, workload.load_tasks(asked.tasks), Console())
    result: dict[str, Any] = {
        "command": f"jmoe bench controllers {shlex.join(sys.argv[3:])}".strip(),
        "commit": commit(),
        "seeds": config.seeds,
        "conditions": {},
    }
    print(" " * 22 + "".join(f"{words:>16}" for words in FIGURES.values()))
    # Not forked: jax has threads.
    with ProcessPoolExecutor(config.processes or None, mp_context=get_context("spawn")) as pool:
        for name, case in cases(machine, config):
            began, slo = time.monotonic(), case.slo
            found: dict[str, Any] = {}
            for controller in (*config.controllers, ALL_BROWNOUT):
                seeds = range(config.first_seed, config.first_seed + config.seeds)
                each = list(pool.map(partial(play, case, controller), seeds))
                found[controller] = {
                    key: {
                        "median": statistics.median(one[key] for one in each),
                        "worst": max(one[key] for one in each),
                    }
                    for key in FIGURES
                }
            stored = case.condition._asdict() | {"ttft_slo_s": slo.ttft_s, "itl_slo_s": slo.itl_s}
            result["conditions"][name] = stored | {"figures": found}
            load = case.condition.load / case.condition.speed
            print(
                f"{name}: {load:.2f} of the capacity with all brownout; SLO {1e3 * slo.ttft_s:.0f} "
                f"and {1e3 * slo.itl_s:.1f} ms; {time.monotonic() - began:.0f} s"
            )
            for controller, of in found.items():
                print(line_of(f"  {Path(controller).name}"[:21], of), flush=True)
            (config.out / "controllers.json").write_text(json.dumps(result, indent=1) + "\n")
    _draw(result, config.out / "controllers.png")
    print(f"picture: {config.out / 'controllers.png'}")
    return result


def line_of(words: str, of: Mapping[str, Mapping[str, float]]) -> str:
    """Returns a line of the table: medians, the worst seed in brackets."""
    cells = (f"{of[key]['median']:.1f} ({of[key]['worst']:.1f})" for key in FIGURES)
    return f"{words:22}" + "".join(f"{cell:>16}" for cell in cells)


def _draw(result: Mapping[str, Any], path: Path) -> None:
    from jmoe.extras import pyplot  # not above: it would bring jax

    plt, conditions = pyplot(), result["conditions"]
    shown = list(FIGURES)[:3]
    figure, axes = plt.subplots(
        1, len(shown), sharey=True, figsize=(15, 1.5 + 0.4 * len(conditions)), squeeze=False
    )
    for axis, key in zip(axes[0], shown, strict=True):
        for number, controller in enumerate(next(iter(conditions.values()))["figures"]):
            values = [one["figures"][controller][key]["median"] for one in conditions.values()]
            axis.plot(values, range(len(values)), "os^Dv"[number % 5], label=controller)
        axis.set_title(FIGURES[key], loc="left", fontweight="bold")
        axis.set_xlim(-2, 102)
        axis.grid(color="#dddddd", lw=0.7)
    axes[0][0].set_yticks(range(len(conditions)), conditions)
    axes[0][0].invert_yaxis()
    axes[0][0].legend(fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
