"""Ten minutes of drifting load: the server's own mover against copies that are placed anew.

    python -m benchmarks.balance.drift --json benchmarks/results/drift.json

Steps, clock and runner are simulated; `serving.control.mover.Mover` is the real one. A decode step
of every 20 ms tells it the rows of each expert, drawn by Poisson's law from popularities that
change, and it moves what it wants to. Each second is judged by its true popularities: with experts
at home alone, with the copies that the mover had at its start, and with copies placed for just
that second. All follows from seeds, but for the time that the mover itself takes.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from jaxtyping import Float

from benchmarks.harness import store
from benchmarks.harness.command import markdown, write_figures
from jmoe.parallel.copies import device_loads, with_copies
from jmoe.parallel.placement import contiguous
from serving.config import BalanceConfig
from serving.control.mover import Mover

STEP_S, TOP_K = 0.02, 8
SKEW = 1.2  # of the logarithm of popularity, its standard deviation
DRIFT_S = 180.0  # in which one popularity becomes another
JUMP_S = 120.0  # between two jumps
COPIES_S = 0.094  # of all layers together, as the mover is told: 1 ms each of 94
KINDS = ("drift", "jumps", "rough")
SPARE = (1, 2, 4)
INTERVALS_S, HALF_LIVES_S = (2.0, 5.0, 10.0), (2.0, 3.0, 5.0, 10.0, 60.0)
TUNED_SPARE, TUNED_ROWS = 2, (256, 8)
TIMED = ("advance_ms", "advance_with_a_look_ms", "its_processor_ms")


@dataclass(frozen=True)
class Scene:
    """What is played."""

    kind: str = "drift"  # one of KINDS
    seed: int = 0
    seconds: int = 600
    layers: int = 4
    experts: int = 128
    devices: int = 8
    rows: int = 256  # of a decode step, all devices together
    steps: int = 1  # that a tick stands for

    def popularity(self) -> Float[np.ndarray, "seconds layers E"]:
        """Returns the share of a layer's visits that each expert gets in each second.

        The logarithm is normal. In `drift` it turns from one draw into the next in `DRIFT_S`, in
        `jumps` it is drawn anew every `JUMP_S`, and in `rough` it is an Ornstein-Uhlenbeck process
        that forgets in `DRIFT_S`: about the same change in minutes, twelve times the drift's in
        one second. No expert gets more than every row's visit.
        """
        rng = np.random.default_rng([self.seed, KINDS.index(self.kind)])
        drawn = rng.normal(size=(self.seconds + 1, self.layers, self.experts))
        at = np.arange(self.seconds)
        if self.kind == "drift":
            whole, angle = np.divmod(at / DRIFT_S, 1)
            first, angle = whole.astype(int), 0.5 * np.pi * angle[:, None, None]
            drawn = np.cos(angle) * drawn[first] + np.sin(angle) * drawn[first + 1]
        elif self.kind == "jumps":
            drawn = drawn[(at // JUMP_S).astype(int)]
        else:
            kept = np.exp(-1 / DRIFT_S)
            for second in at[1:]:
                new = np.sqrt(1 - kept**2) * drawn[second]
                drawn[second] = kept * drawn[second - 1] + new
            drawn = drawn[:-1]
        shares = np.exp(SKEW * drawn)
        shares /= shares.sum(axis=2, keepdims=True)
        shares = np.minimum(shares, 1 / TOP_K)
        return shares / shares.sum(axis=2, keepdims=True)

    def homes(self) -> np.ndarray:
        """Returns every expert's own device, bool [E, D]."""
        return np.asarray(contiguous(1, self.experts, self.devices).hosts)[0]


class Noting:
    """A runner that only notes what it is told."""

    def __init__(self) -> None:
        self.written = 0  # layers, ever

    def host_layer(self, layer: int, hosts: np.ndarray) -> None:
        """Counts one layer's write."""
        self.written += 1


def layers_imbalance(shares: Float[np.ndarray, "layers E"], hosts: np.ndarray) -> float:
    """Returns the loads of the fullest devices over the means, of a step's layers together."""
    loads = np.stack([device_loads(*one) for one in zip(shares, hosts, strict=True)])
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())


def at_home(scene: Scene, popularity: np.ndarray) -> np.ndarray:
    """Returns the imbalance of each second without copies."""
    hosts = np.stack([scene.homes()] * scene.layers)
    return np.array([layers_imbalance(shares, hosts) for shares in popularity])


def placed_anew(scene: Scene, popularity: np.ndarray, spare: int) -> np.ndarray:
    """Returns the imbalance of each second with the copies that its own popularity asks for.

    All steps of a second have the same, so that this is every step's.
    """
    place = partial(with_copies, homes=scene.homes(), spare=spare)
    return np.array(
        [layers_imbalance(shares, np.stack([*map(place, shares)])) for shares in popularity]
    )


def play(scene: Scene, popularity: np.ndarray, config: BalanceConfig) -> dict[str, Any]:
    """Returns the mover over the whole scene.

    Returns imbalance by second, layers written and the most in one tick, copies, and milliseconds
    of `Mover.advance` at each tick, by the clock and of this thread's processor time, which other
    programs do not lengthen by taking their turns. `looked`: ticks with a look at a layer.
    """
    runner = Noting()
    placement = contiguous(scene.layers, scene.experts, scene.devices, spare=config.spare_slots)
    mover = Mover(config, cast("Any", runner), placement, COPIES_S / scene.layers)
    rng = np.random.default_rng([scene.seed, 7])
    seen, ms, cpu_ms, looked, most = [], [], [], [], 0
    tick_s = scene.steps * STEP_S
    ticks, visits = round(1 / tick_s), scene.steps * scene.rows * TOP_K
    for second, shares in enumerate(popularity):
        seen.append(layers_imbalance(shares, mover.hosts))
        drawn = rng.poisson(visits * shares, size=(ticks, *shares.shape))
        for tick, rows in enumerate(drawn):
            now = second + (tick + 1) * tick_s
            result = cast("Any", SimpleNamespace(expert_rows=rows))
            mover.step_read(cast("Any", None), result, now - tick_s, now)
            written, looks = runner.written, mover.layers_looked_at
            start, cpu = time.perf_counter(), time.thread_time()
            mover.advance(now)
            cpu_ms.append(1e3 * (time.thread_time() - cpu))
            ms.append(1e3 * (time.perf_counter() - start))
            looked.append(mover.layers_looked_at > looks)
            most = max(most, runner.written - written)
    return {
        "imbalance": np.array(seen),
        "layers_written": runner.written,
        "most_in_a_tick": most,
        "experts_copied": mover.experts_copied,
        "ms": np.array(ms),
        "cpu_ms": np.array(cpu_ms),
        "looked": np.array(looked),
    }


def figures(
    scene: Scene, config: BalanceConfig, popularity: np.ndarray, anew: np.ndarray
) -> dict[str, Any]:
    """Returns what a scene with the mover came to; means are of the seconds after the first
    interval.

    `anew` is `placed_anew` of the same scene and spare slots.
    """
    played, home = play(scene, popularity, config), at_home(scene, popularity)
    # The first looks are a tick apart, and what they placed is in force in the next second.
    after = slice(int(config.interval_s) + 2, None)
    mover, best = played["imbalance"][after], anew[after]
    return {
        "spare_slots": config.spare_slots,
        "home": float(home[after].mean()),
        "mover": float(mover.mean()),
        "anew": float(best.mean()),
        "excess": float(mover.mean() / best.mean() - 1),
        "worst_second": float((mover / best).max()),
        "layers_written": played["layers_written"],
        "most_in_a_tick": played["most_in_a_tick"],
        "experts_copied": played["experts_copied"],
        "advance_ms": _times(played["ms"]),
        "advance_with_a_look_ms": _times(played["ms"][played["looked"]]),
        "its_processor_ms": _times(played["cpu_ms"][played["looked"]]),
    }


def _times(ms: np.ndarray) -> dict[str, float]:
    if not len(ms):
        return {"ticks": 0}
    return {"ticks": len(ms), **{f"p{p}": float(np.percentile(ms, p)) for p in (50, 99)}}


def drifting(seeds: int, seconds: int) -> list[dict[str, Any]]:
    """The settings as they are, by kind and spare slots, each over some seeds."""
    found = []
    for kind in KINDS:
        for seed in range(seeds):
            scene = Scene(kind, seed, seconds)
            popularity = scene.popularity()
            for spare in SPARE:
                anew = placed_anew(scene, popularity, spare)
                config = BalanceConfig(spare_slots=spare)
                found.append({"kind": kind, "seed": seed})
                found[-1] |= figures(scene, config, popularity, anew)
    return found


def tuning(seconds: int) -> list[dict[str, Any]]:
    """Returns other intervals and half-lives, for large and small decode steps; coarser, to be
    done.
    """
    found = []
    for kind in KINDS:
        base = Scene(kind, 0, seconds, layers=2, steps=5)
        popularity = base.popularity()
        anew = placed_anew(base, popularity, TUNED_SPARE)
        for rows, interval_s, half_life_s in product(TUNED_ROWS, INTERVALS_S, HALF_LIVES_S):
            config = BalanceConfig(
                spare_slots=TUNED_SPARE, interval_s=interval_s, half_life_s=half_life_s
            )
            found.append({"kind": kind, "rows": rows})
            found[-1] |= {"interval_s": interval_s, "half_life_s": half_life_s}
            found[-1] |= figures(replace(base, rows=rows), config, popularity, anew)
    return found


def table(found: dict[str, Any]) -> list[str]:
    """Returns means over seeds by kind and spare slots; then what other settings come to."""
    rows = []
    for kind in KINDS:
        for spare in SPARE:
            ones = [r for r in found["drift"] if (r["kind"], r["spare_slots"]) == (kind, spare)]
            mean = {k: np.mean([r[k] for r in ones]) for k in ("home", "mover", "anew", "excess")}
            rows.append(
                [
                    *(kind, spare, *(f"{mean[k]:.3f}" for k in ("home", "mover", "anew"))),
                    f"{100 * mean['excess']:.1f} %",
                    f"{np.mean([r['layers_written'] for r in ones]):.0f}",
                    max(r["most_in_a_tick"] for r in ones),
                    *(_p50_p99([r[key] for r in ones]) for key in TIMED),
                ]
            )
    heads = ["", "spare", "at home", "mover", "anew", "over anew", "writes", "most a tick"]
    lines = markdown([*heads, "advance, ms: P50 / P99", "with a look", "processor"], rows)
    for kind in KINDS if found["tuning"] else ():
        for num in TUNED_ROWS:
            lines += ["", f"{kind}, {num} rows a step, {TUNED_SPARE} spare: over anew (writes)"]
            lines += _grid([r for r in found["tuning"] if (r["kind"], r["rows"]) == (kind, num)])
    return lines


def _p50_p99(times: list[dict[str, float]]) -> str:
    """Returns the median of medians and the highest P99."""
    known = [t for t in times if t["ticks"]]
    if not known:
        return "-"
    return f"{np.median([t['p50'] for t in known]):.4f} / {max(t['p99'] for t in known):.2f}"


def _grid(ones: list[dict[str, Any]]) -> list[str]:
    cells = {
        (r["interval_s"], r["half_life_s"]): f"{100 * r['excess']:.1f} % ({r['layers_written']})"
        for r in ones
    }
    heads = ["interval \\ half-life, s", *(f"{half:g}" for half in HALF_LIVES_S)]
    return markdown(
        heads, [[f"{i:g}", *(cells[i, half] for half in HALF_LIVES_S)] for i in INTERVALS_S]
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Plays, prints tables, and writes the JSON file that is asked for."""
    parser = argparse.ArgumentParser("benchmarks.balance.drift", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=int, default=600, help="simulated (default: 600)")
    parser.add_argument("--seeds", type=int, default=3, help="scenes of each kind (default: 3)")
    parser.add_argument("--no-tuning", action="store_true", help="only the settings as they are")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--dry-run", action="store_true", help="14 seconds of one scene of a kind")
    args = parser.parse_args(arguments)
    if args.dry_run:
        args.seconds, args.seeds, args.no_tuning = 14, 1, True
    found = {
        "commit": store.commit(),
        "date": store.now(),
        "machine": store.machine("cpu") | {"load": os.getloadavg()[0], "cores": os.cpu_count()},
        "settings": {
            "seconds": args.seconds,
            "seeds": args.seeds,
            "step_s": STEP_S,
            "interval_s": BalanceConfig().interval_s,
            "half_life_s": BalanceConfig().half_life_s,
        },
        "drift": drifting(args.seeds, args.seconds),
        "tuning": [] if args.no_tuning else tuning(args.seconds),
    }
    print("\n".join(table(found)))
    if args.json:
        write_figures(args.json, found)
    return found


if __name__ == "__main__":
    main()
