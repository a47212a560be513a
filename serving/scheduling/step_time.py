"""What steps take, learnt while serving: by phase, size and threshold."""

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from serving.plan import Phase

SIZES = [1 << power for power in range(21)]
"""Tokens of a prefill step or rows of a decode step at which a time is kept."""
THRESHOLDS_PERCENT = [0.0, 25.0, 50.0, 75.0, 100.0]

MOOD_GAIN = 0.1
GAIN = 0.02  # of an entry that many steps taught; the first ones are averaged
YOUNG = 5  # steps that an entry was taught by
ERROR_GAIN = 0.02
CLIP = 0.5
"""The most that a step counts for which takes longer: one that stood still teaches little."""


class StepTimeModel:
    """Seconds of whole steps, in a table by size and threshold that is read between its entries.

    A step never takes longer for fewer rows or a lower threshold, so an entry that changes holds
    its neighbours down or up. Entries that no step came near follow those that are known: evenly
    between two, and else in the proportions of the nearest size. One factor multiplies
    them all, the machine's mood: other work and clocks change it sooner than what a row costs.
    """

    def __init__(self) -> None:
        """Knows nothing."""
        self.num_observed = 0
        self.mood = 1.0
        self.error = 0.0
        """Mean relative error of predictions lately, each made before its step was learnt from."""
        self._variance = 0.0
        self._tables = {phase: _Table() for phase in Phase}

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm of a step's time around the prediction's."""
        return math.sqrt(self._variance)

    def knows(self, phase: Phase) -> bool:
        """Whether it saw a step of that phase."""
        return self._tables[phase].known

    def observe(self, phase: Phase, size: int, threshold_percent: float, seconds: float) -> None:
        """A step took so long. The threshold is a mean over its rows: exempt ones have 100."""
        if not (size > 0 and seconds > 0):
            return  # its clock stood still
        table = self._tables[phase]
        if not table.known:
            table.start(seconds / self.mood)
        error = seconds / self.expected_s(phase, size, threshold_percent) - 1
        self._note(error)
        if table.has_seen(size, threshold_percent):
            error = min(error, CLIP)
            self.mood *= 1 + MOOD_GAIN * max(error, -CLIP)
            self.mood **= 0.99  # what lasts is the table's
        table.learn(size, threshold_percent, error)

    def expected_s(self, phase: Phase, size: float, threshold_percent: float = 100.0) -> float:
        """Of a whole step; NaN before the first of its phase."""
        return self.mood * self._tables[phase].read(size, threshold_percent)

    def curve(
        self, phase: Phase, size: float, thresholds_percent: Float[np.ndarray, "K"]
    ) -> Float[np.ndarray, "K"]:
        """Seconds of whole steps of one size under all these thresholds."""
        return self.mood * self._tables[phase].curve(size, thresholds_percent)

    def line(self, phase: Phase, threshold_percent: float = 100.0) -> tuple[float, float] | None:
        """Seconds of a step, and of each row or token in it: a line through the smallest and the
        largest that were seen. None before two sizes were.
        """
        sizes = self._tables[phase].sizes
        if len(sizes) < 2:
            return None
        small, large = sizes[0], sizes[-1]
        small_s, large_s = (self.expected_s(phase, n, threshold_percent) for n in (small, large))
        per_row_s = (large_s - small_s) / (large - small)
        return max(0.0, small_s - per_row_s * small), per_row_s

    @property
    def longest_s(self) -> float:
        """Of the steps that were seen, by what is known of them now; infinite before the first."""
        known = [t.read(t.sizes[-1], 100.0) for t in self._tables.values() if t.known]
        return self.mood * max(known, default=math.inf)

    def _note(self, error: float) -> None:
        self.num_observed += 1
        gain = max(1 / self.num_observed, ERROR_GAIN)
        self.error += gain * (min(abs(error), 1.0) - self.error)
        logarithm = math.log(min(max(1 + error, 0.25), 4.0))
        self._variance += gain * (logarithm**2 - self._variance)


class _Table:
    """Seconds by size and threshold; they rise along both, weakly."""

    def __init__(self) -> None:
        self.known = False
        self._seconds = [[math.nan] * len(THRESHOLDS_PERCENT) for _ in SIZES]
        self._weights = [[0.0] * len(THRESHOLDS_PERCENT) for _ in SIZES]

    @property
    def sizes(self) -> list[int]:
        """Those that steps came near."""
        return [n for n, weights in zip(SIZES, self._weights, strict=True) if any(weights)]

    def start(self, seconds: float) -> None:
        self.known = True
        self._seconds = [[seconds] * len(THRESHOLDS_PERCENT) for _ in SIZES]

    def read(self, size: float, threshold_percent: float) -> float:
        near = _near(size, threshold_percent)
        return sum(share * self._seconds[row][column] for row, column, share in near)

    def curve(self, size: float, thresholds_percent: np.ndarray) -> np.ndarray:
        row, up = _place(SIZES, size)
        pairs = zip(self._seconds[row], self._seconds[row + 1], strict=True)
        return np.interp(
            thresholds_percent, THRESHOLDS_PERCENT, [low + up * (high - low) for low, high in pairs]
        )

    def has_seen(self, size: float, threshold_percent: float) -> bool:
        near = _near(size, threshold_percent)
        return all(self._weights[row][column] for row, column, _ in near)

    def learn(self, size: float, threshold_percent: float, error: float) -> None:
        """Moves the entries around a step by as much of its relative error as they had part in."""
        near = _near(size, threshold_percent)
        whole = sum(share**2 for _, _, share in near)
        is_new = False
        for row, column, share in near:
            is_new = is_new or not self._weights[row][column]
            self._weights[row][column] += share
            weight = self._weights[row][column]
            # The first step of all may have stood still: a faster one counts at once.
            gain = 1.0 if error < 0 and weight < YOUNG else max(share / weight, GAIN)
            gain *= share / whole
            self._move(row, column, self._seconds[row][column] * (1 + error * min(gain, 1.0)))
        if is_new:
            self._fill()

    def _move(self, row: int, column: int, seconds: float) -> None:
        """Sets an entry, and whatever then would be out of order."""
        table = self._seconds
        raised = seconds > table[row][column]
        rows = range(row, len(SIZES)) if raised else range(row, -1, -1)
        columns = range(column, len(THRESHOLDS_PERCENT)) if raised else range(column, -1, -1)
        table[row][column] = seconds
        for j in columns:
            for i in rows:
                if (i, j) == (row, column):
                    continue
                if (table[i][j] >= seconds) if raised else (table[i][j] <= seconds):
                    break  # so is all beyond
                table[i][j] = seconds

    def _fill(self) -> None:
        """Entries that no step came near."""
        table, seen = np.array(self._seconds), np.array(self._weights) > 0
        columns = {int(row): np.flatnonzero(seen[row]) for row in np.flatnonzero(seen.any(1))}
        for row, known in columns.items():
            at = np.take(THRESHOLDS_PERCENT, known)
            table[row] = np.interp(THRESHOLDS_PERCENT, at, table[row, known])
        for row, known in columns.items():
            for column in range(len(THRESHOLDS_PERCENT)):
                edge = int(min(max(column, known[0]), known[-1]))
                other = _nearest(row, [k for k, c in columns.items() if _spans(c, column, edge)])
                if other is not None:
                    table[row, column] = (
                        table[row, edge] * table[other, column] / table[other, edge]
                    )
        rows = list(columns)
        for column in table.T:
            column[:] = np.interp(SIZES, np.take(SIZES, rows), column[rows])
        table = np.maximum.accumulate(np.maximum.accumulate(table, 0), 1)
        self._seconds = table.tolist()


def _near(size: float, threshold_percent: float) -> list[tuple[int, int, float]]:
    """Entries around a step, as (row, column, share); shares add up to 1."""
    row, up = _place(SIZES, size)
    column, right = _place(THRESHOLDS_PERCENT, threshold_percent)
    near = [
        (row, column, (1 - up) * (1 - right)),
        (row, column + 1, (1 - up) * right),
        (row + 1, column, up * (1 - right)),
        (row + 1, column + 1, up * right),
    ]
    return [entry for entry in near if entry[2] > 0]


def _place(knots: Sequence[float], value: float) -> tuple[int, float]:
    """The knot at or below a value, not the last one, and the share of the way to the next."""
    at = min(max(bisect_right(knots, value) - 1, 0), len(knots) - 2)
    return at, min(max((value - knots[at]) / (knots[at + 1] - knots[at]), 0.0), 1.0)


def _spans(known: np.ndarray, *columns: int) -> bool:
    return known[0] <= min(columns) and max(columns) <= known[-1]


def _nearest(row: int, rows: list[int]) -> int | None:
    """Of two that are as near, the smaller: it promises less of brownout."""
    return min(rows, key=lambda other: (abs(other - row), other), default=None)
