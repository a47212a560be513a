"""Plays ten minutes of drifting load: the server's own mover against copies that are placed anew.

Steps, clock and runner are simulated; `serving.control.mover.Mover` is the real one. A decode step
of every 20 ms tells it the rows of each expert, drawn by Poisson's law from popularities that
change, and it moves what it wants to. Each second is judged by its true popularities: with the
copies that the mover had at its start, and with copies placed for just that second. All follows
from seeds, but for the time that the mover itself takes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from jaxtyping import Float

from benchmarks.harness.store import markdown
from jmoe.parallel.copies import device_loads, with_copies
from jmoe.parallel.placement import contiguous
from serving.config import BalanceConfig
from serving.control.mover import Mover

SECONDS, SEEDS = 600, 3
STEP_S, TOP_K = 0.02, 8
SKEW = 1.2  # of the logarithm of popularity, its standard deviation
DRIFT_S = 180.0  # in which one popularity becomes another
JUMP_S = 120.0  # between two jumps
COPIES_S = 0.094  # of all layers together, as the mover is told: 1 ms each of 94
KINDS = ("drift", "jumps", "rough")
SPARE = (1, 2, 4)


@dataclass(frozen=True)
class Scene:
    """What is played."""

    kind: str = "drift"  # one of KINDS
    seed: int = 0
    seconds: int = SECONDS
    layers: int = 4
    experts: int = 128
    devices: int = 8
    rows: int = 256  # of a decode step, all devices together

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


def layers_imbalance(shares: Float[np.ndarray, "layers E"], hosts: np.ndarray) -> float:
    """Returns the loads of the fullest devices over the means, of a step's layers together."""
    loads = np.stack([device_loads(*one) for one in zip(shares, hosts, strict=True)])
    return float(loads.max(axis=1).sum() / loads.mean(axis=1).sum())


def placed_anew(scene: Scene, popularity: np.ndarray, spare: int) -> np.ndarray:
    """Returns the imbalance of each second with the copies that its own popularity asks for.

    All steps of a second have the same, so that this is every step's.
    """
    place = partial(with_copies, homes=scene.homes(), spare=spare)
    return np.array(
        [layers_imbalance(shares, np.stack([*map(place, shares)])) for shares in popularity]
    )


def play(scene: Scene, popularity: np.ndarray, config: BalanceConfig) -> dict[str, Any]:
    """Plays the mover over the whole scene.

    Returns imbalance by second, layers written and the most in one tick, and of each tick with a
    look at a layer the milliseconds of `Mover.advance`: this thread's processor time, which other
    programs do not lengthen by taking their turns.
    """
    written: list[int] = []
    runner = SimpleNamespace(host_layer=lambda layer, hosts: written.append(layer))
    placement = contiguous(
        scene.layers, scene.experts, scene.devices, spare=cast("int", config.spare_slots)
    )
    mover = Mover(config, cast("Any", runner), placement, COPIES_S / scene.layers)
    rng = np.random.default_rng([scene.seed, 7])
    seen, ms, most = [], [], 0
    ticks, visits = round(1 / STEP_S), scene.rows * TOP_K
    for second, shares in enumerate(popularity):
        seen.append(layers_imbalance(shares, mover.hosts))
        drawn = rng.poisson(visits * shares, size=(ticks, *shares.shape))
        for tick, rows in enumerate(drawn):
            now = second + (tick + 1) * STEP_S
            result = cast("Any", SimpleNamespace(expert_rows=rows))
            mover.step_read(cast("Any", None), result, now - STEP_S, now)
            before, looks = len(written), mover.layers_looked_at
            start = time.thread_time()
            mover.advance(now)
            if mover.layers_looked_at > looks:
                ms.append(1e3 * (time.thread_time() - start))
            most = max(most, len(written) - before)
    return {
        "imbalance": np.array(seen),
        "layers_written": len(written),
        "most_in_a_tick": most,
        "look_ms": ms,
    }


def figures(
    scene: Scene, config: BalanceConfig, popularity: np.ndarray, anew: np.ndarray
) -> dict[str, Any]:
    """Returns what a scene with the mover came to; means are of the seconds after the first
    interval.

    `anew` is `placed_anew` of the same scene and spare slots.
    """
    played = play(scene, popularity, config)
    # The first looks are a tick apart, and what they placed is in force in the next second.
    after = slice(int(config.interval_s) + 2, None)
    mover, best = played["imbalance"][after].mean(), anew[after].mean()
    return {
        "spare_slots": config.spare_slots,
        "mover": float(mover),
        "anew": float(best),
        "excess": float(mover / best - 1),
        "look_ms": {f"p{p}": float(np.percentile(played["look_ms"], p)) for p in (50, 99)},
    }


def drifting(dry: bool) -> list[dict[str, Any]]:
    """Plays the settings as they are, by kind and spare slots, each over some seeds."""
    found = []
    for kind in KINDS:
        for seed in range(1 if dry else SEEDS):
            scene = Scene(kind, seed, 14 if dry else SECONDS)
            popularity = scene.popularity()
            for spare in SPARE:
                anew = placed_anew(scene, popularity, spare)
                config = BalanceConfig(spare_slots=spare)
                found.append({"kind": kind, "seed": seed})
                found[-1] |= figures(scene, config, popularity, anew)
    return found


PARTS: dict[str, Callable[[bool], Any]] = {"drift": drifting}


def table(found: dict[str, Any]) -> list[str]:
    """Returns means over seeds by kind and spare slots, and medians of what looks took."""
    rows = []
    for kind in KINDS:
        for spare in SPARE:
            ones = [r for r in found["drift"] if (r["kind"], r["spare_slots"]) == (kind, spare)]
            mover, anew, excess = (
                np.mean([r[key] for r in ones]) for key in ("mover", "anew", "excess")
            )
            rows.append([kind, spare, f"{mover:.3f}", f"{anew:.3f}", f"{100 * excess:.1f} %"])
    p50, p99 = (np.median([r["look_ms"][p] for r in found["drift"]]) for p in ("p50", "p99"))
    lines = markdown(["", "spare", "mover", "anew", "over anew"], rows)
    return [*lines, "", f"a look, ms of the processor: P50 {p50:.1f}, P99 {p99:.1f}"]
