"""Step times, learnt from the timeline of a live server or from a table."""

import csv
import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.ndimage import median_filter
from scipy.optimize import nnls

from serving.telemetry.timeline import DEVICE

PHASES = ("prefill", "decode")
OUTLIER = 4.0
"""Steps that took so many times the median of their kind are stalls of the machine."""
DRIFT_STEPS = 301
"""Steps over which the machine's speed is the median, where it is taken to be steady."""
KNOTS = np.array([0.0, 0.5, 1.0])
"""Shares of degraded visits between which a token's time is interpolated: half of the brownout
saves more than half of what all of it does.
"""
ASSUMED = np.array([[0, 0, 1, -2, 1], [0, 0, 0.01, -0.01, 0], [0, 0, 0, 0.01, -0.01]])
"""Products with coefficients that are 0 where a token's time is linear in that share, and does not
depend on it. They say what steps that were not recorded take: brownout that was never seen saves
nothing. Against steps of many tokens they weigh little.
"""


class Recorded(NamedTuple):
    """One launch of a recording: layers of a step."""

    phase: str
    size: int  # tokens of a prefill step, rows of a decode step
    degraded: float  # of its expert visits, 0 to 1
    share: float  # of the model's layers
    seconds: float


def read_steps(path: Path, num_layers: int, visits_per_layer: int) -> list[Recorded]:
    """Returns the launches of a timeline, in order, or the whole steps of a table in CSV with the
    columns phase, size, degraded and seconds; `visits_per_layer` is experts a token.

    Raises ValueError for a file that is neither.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".csv":
            found = [
                Recorded(
                    row["phase"],
                    int(row["size"]),
                    float(row["degraded"]),
                    1.0,
                    float(row["seconds"]),
                )
                for row in csv.DictReader(text.splitlines())
            ]
        else:
            found = [
                _recorded(event, num_layers, visits_per_layer)
                for event in json.loads(text)["traceEvents"]
                if event["ph"] == "X" and event["tid"] == DEVICE and not _is_hybrid(event)
            ]
        for one in found:
            if one.phase not in PHASES:
                raise ValueError(f"phase {one.phase!r} is none of {', '.join(PHASES)}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is neither a timeline of `jmoe serve --timeline` nor a table of steps: {error}"
        ) from None
    return found


def _is_hybrid(event: Mapping[str, Any]) -> bool:
    """Returns whether rows decoded beside prompts, which a simulated device does not do."""
    return event["name"] == "prefill" and event["args"].get("decodes", 0) > 0


def _recorded(event: Mapping[str, Any], num_layers: int, visits_per_layer: int) -> Recorded:
    args = event["args"]
    first, last = map(int, args["layers"].split("-"))
    count = last + 1 - first
    visits = args["tokens"] * count * visits_per_layer
    return Recorded(
        event["name"],
        args["tokens"] if event["name"] == "prefill" else args["rows"],
        args["degraded_visits"] / visits,
        count / num_layers,
        event["dur"] / 1e6,
    )


@dataclass(frozen=True)
class StepTimes:
    """Seconds of launches: a + s (b + n c(g)) for n tokens, of whose visits a share g is degraded,
    and a share s of the layers; a, b and c at each of `KNOTS` are those of the program, by phase
    and bucket.
    """

    buckets: Mapping[str, tuple[int, ...]]
    coefficients: Mapping[tuple[str, int], Float[np.ndarray, "5"]]
    moods: Float[np.ndarray, "N"]
    """Seconds recorded over seconds expected, launch by launch: the machine is not always alike."""

    @classmethod
    def fit(
        cls,
        recorded: Sequence[Recorded],
        buckets: Mapping[str, tuple[int, ...]],
        *,
        steady: bool = False,
    ) -> "StepTimes":
        """Fits launches in order. `steady`: what changed the machine's speed for a while is no
        part of its moods, and it has the speed that it mostly had.

        Raises ValueError where a phase has none.
        """
        found = cls._fit(recorded, buckets)
        if not steady:
            return found
        speed = median_filter(found.moods, DRIFT_STEPS, mode="nearest")
        drift = speed / np.median(speed)
        steady_s = [one.seconds / by for one, by in zip(recorded, drift, strict=True)]
        return cls._fit(
            [one._replace(seconds=s) for one, s in zip(recorded, steady_s, strict=True)], buckets
        )

    @classmethod
    def _fit(
        cls, recorded: Sequence[Recorded], buckets: Mapping[str, tuple[int, ...]]
    ) -> "StepTimes":
        by_program: dict[tuple[str, int], list[Recorded]] = {}
        for one in recorded:
            key = one.phase, _bucket(buckets[one.phase], one.size)
            by_program.setdefault(key, []).append(one)
        missing = set(buckets) - {phase for phase, _ in by_program}
        if missing:
            raise ValueError(f"the recording has no {' and no '.join(sorted(missing))} step")
        found = cls(buckets, {key: _solve(steps) for key, steps in by_program.items()}, np.ones(1))
        moods = [one.seconds / found.expected_s(*one[:4]) for one in recorded]
        return cls(buckets, found.coefficients, np.array(moods))

    def expected_s(self, phase: str, size: int, degraded: float, share: float) -> float:
        """Returns the expected seconds of a launch, the machine in its usual mood."""
        sizes = self.buckets[phase]
        bucket = _bucket(sizes, size)
        # A program that the recording lacks is taken to be as the next one that it has.
        known = min(
            (other for kind, other in self.coefficients if kind == phase),
            key=lambda other: (other < bucket, abs(other - bucket)),
        )
        return float(self.coefficients[phase, known] @ _features(size, degraded, share))


def _bucket(sizes: Sequence[int], size: int) -> int:
    return sizes[min(bisect_left(sizes, size), len(sizes) - 1)]


def _features(size: int, degraded: float, share: float) -> Float[np.ndarray, "5"]:
    near = np.maximum(0.0, 1 - np.abs(degraded - KNOTS) / KNOTS[1])
    return np.array([1.0, share, *(share * size * near)])


def _solve(steps: Iterable[Recorded]) -> Float[np.ndarray, "5"]:
    steps = list(steps)
    per_share = np.array([one.seconds / one.share for one in steps])
    kept = [
        one
        for one, value in zip(steps, per_share, strict=True)
        if value <= OUTLIER * np.median(per_share)
    ]
    matrix = np.array([*(_features(one.size, one.degraded, one.share) for one in kept), *ASSUMED])
    return nnls(matrix, np.array([*(one.seconds for one in kept), 0, 0, 0]))[0]
