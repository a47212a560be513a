"""What steps take, learnt while serving: by phase, size and threshold."""

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from serving.plan import Phase

SIZES = [1 << power for power in range(21)]
"""Tokens of a prefill step or rows of a decode step at which a time is kept."""
THRESHOLDS_PERCENT = [0.0, 25.0, 50.0, 75.0, 100.0]

GUESS = [0.75 + percent / 400 for percent in THRESHOLDS_PERCENT]
"""What a threshold leaves of a step's time, until steps tell: who expects nothing of brownout never
tries it."""

MOOD_GAIN = 0.1
GAIN = 0.02  # of an entry that many steps taught
YOUNG = 5  # steps whose median an entry is, before later ones move it
ERROR_GAIN = 0.02
CLIP = 0.5
"""The most that a step's error counts for, up or down, where an entry is not young any more: a
machine, or a host, that stood still teaches little."""


class StepTimeModel:
    """Seconds of whole steps, in a table by size and threshold that is read between its entries.

    A step never takes longer for fewer rows or a lower threshold, so an entry that changes holds
    its neighbours down or up. Entries that no step came near follow those that are known: evenly
    between two, and else in the proportions of the nearest size, or in guessed ones. One factor
    multiplies them all, the machine's mood: other work and clocks change it sooner than what a row
    costs.
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
        if table.is_taught(size, threshold_percent):
            self.mood *= 1 + MOOD_GAIN * min(max(error, -CLIP), CLIP)
            self.mood **= 0.99  # what lasts is the table's
        table.learn(size, threshold_percent, error)

    def forget_brownout(self) -> None:
        """Steps with brownout are others from now on: another strategy, or another way."""
        for table in self._tables.values():
            table.forget_brownout()

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
        largest that was seen. None before one was seen that is twice another.
        """
        small, large = self._tables[phase].smallest, self._tables[phase].largest
        if large < 2 * small or not large:
            return None
        small_s, large_s = (self.expected_s(phase, n, threshold_percent) for n in (small, large))
        per_row_s = (large_s - small_s) / (large - small)
        return max(0.0, small_s - per_row_s * small), per_row_s

    def largest(self, phase: Phase) -> int:
        """Size of the largest step that was seen; 0 before the first."""
        return self._tables[phase].largest

    @property
    def longest_s(self) -> float:
        """Of the steps that were seen, by what is known of them now; infinite before the first."""
        known = [t.read(t.largest, 100.0) for t in self._tables.values() if t.known]
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
        self.smallest = self.largest = 0  # sizes that came; 0: none
        shape = len(SIZES), len(THRESHOLDS_PERCENT)
        self._seconds = np.full(shape, math.nan).tolist()
        self._weights = np.zeros(shape).tolist()  # of the steps that taught an entry
        self._first: dict[tuple[int, int], list[float]] = {}  # what a young entry's steps said

    @property
    def known(self) -> bool:
        return self.largest > 0

    def start(self, seconds: float) -> None:
        self._seconds = [[seconds * guess for guess in GUESS] for _ in SIZES]

    def forget_brownout(self) -> None:
        below = [c for c, percent in enumerate(THRESHOLDS_PERCENT) if percent < 100]
        for row in range(len(SIZES)):
            for column in below:
                self._weights[row][column] = 0.0
                self._first.pop((row, column), None)
        if any(map(any, self._weights)):
            self._fill()

    def read(self, size: float, threshold_percent: float) -> float:
        near = _near(size, threshold_percent)
        return sum(share * self._seconds[row][column] for row, column, share in near)

    def curve(self, size: float, thresholds_percent: np.ndarray) -> np.ndarray:
        row, up = _place(SIZES, size)
        pairs = zip(self._seconds[row], self._seconds[row + 1], strict=True)
        return np.interp(
            thresholds_percent, THRESHOLDS_PERCENT, [low + up * (high - low) for low, high in pairs]
        )

    def is_taught(self, size: float, threshold_percent: float) -> bool:
        near = _near(size, threshold_percent)
        return all(self._is_taught(row, column) for row, column, _ in near)

    def _is_taught(self, row: int, column: int) -> bool:
        return len(self._first.get((row, column), ())) == YOUNG

    def learn(self, size: int, threshold_percent: float, error: float) -> None:
        """Moves the entries around a step by as much of its relative error as they had part in."""
        self.smallest = min(self.smallest or size, size)
        self.largest = max(self.largest, size)
        near = _near(size, threshold_percent)
        whole = sum(share**2 for _, _, share in near)
        is_new, wanted = False, []
        for row, column, share in near:
            is_new = is_new or not self._weights[row][column]
            self._weights[row][column] += share
            before, taught = self._seconds[row][column], self._is_taught(row, column)
            if taught:
                gain = min(share / whole * max(share / self._weights[row][column], GAIN), 1.0)
                seconds = before * (1 + gain * min(max(error, -CLIP), CLIP))
            else:
                first = self._first.setdefault((row, column), [])
                first.append(before * (1 + error))
                seconds = self._between_taught(row, column, statistics.median_low(first))
            wanted.append((row, column, seconds))
        for entry in wanted:
            self._move(*entry)
        if is_new:
            self._fill()

    def _between_taught(self, row: int, column: int, seconds: float) -> float:
        """A young entry holds none down or up that more steps taught."""
        taught = [at for at, first in self._first.items() if len(first) == YOUNG]
        low = [self._seconds[r][c] for r, c in taught if r <= row and c <= column]
        high = [self._seconds[r][c] for r, c in taught if r >= row and c >= column]
        return min(max(seconds, max(low, default=0.0)), min(high, default=math.inf))

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
                like = GUESS if other is None else table[other]
                table[row, column] = table[row, edge] * like[column] / like[edge]
        rows = list(columns)
        for column in table.T:
            column[:] = np.interp(SIZES, np.take(SIZES, rows), column[rows])
        # In order, and none that was taught is moved for one that was not.
        low, high = np.zeros_like(table), np.full_like(table, np.inf)
        for (row, column), first in self._first.items():
            if len(first) == YOUNG:
                low[row, column] = high[row, column] = table[row, column]
        low = np.maximum.accumulate(np.maximum.accumulate(low, 0), 1)
        high = np.minimum.accumulate(np.minimum.accumulate(high[::-1, ::-1], 0), 1)[::-1, ::-1]
        table = np.clip(table, low, high)
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
