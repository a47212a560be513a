"""A model of step times by phase, size and threshold, learnt while serving."""

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from serving.plan import Phase

SIZES = [1 << power for power in range(21)]
"""Sizes in the table: tokens of a prefill step, or rows of a decode step."""
THRESHOLDS_PERCENT = [0.0, 25.0, 50.0, 75.0, 100.0]

GUESS = [0.75 + percent / 400 for percent in THRESHOLDS_PERCENT]
"""Assumed ratio of a step's time at each threshold to that at 100, until steps are observed. A
controller that expected no gain from brownout would never try it.
"""

FIRST_RATIO, WORTHWHILE, FORGET = 0.8, 0.97, 0.001
"""Assumed ratio of a hybrid step's time to that of a step of each phase, until some have run; the
largest that is worth it; and how much of a larger one a prefill step forgets, so that such steps
are tried again."""
RATIO_GAIN, RATIO_RISE = 0.1, 0.5  # how fast a ratio is learnt where it is too large, too small
MOOD_GAIN = 0.1
GAIN = 0.02  # least learning rate of an entry with many observations
YOUNG = 5  # an entry is the median of its first steps, so many; later ones move it
NEAR_PERCENT = 5.0  # thresholds that differ by less are about the same
ERROR_GAIN = 0.02
CLIP = 0.5
"""Limit of a step's relative error, up or down, once an entry is no longer young: outliers, such as
when the machine stalled, should teach little.
"""


class StepTimeModel:
    """Durations (s) of whole steps, interpolated in a table by size and threshold.

    Times are monotonic in rows and threshold, so a changed entry also limits its neighbours.
    Entries without observations are interpolated between known ones, and otherwise extrapolated
    with the proportions of the nearest size, or guessed ones. All entries are multiplied by one
    factor, the machine's `mood`, since other work and clock rates change faster than the cost per
    row.
    """

    def __init__(self) -> None:
        """Starts without observations."""
        self.num_observed = 0
        self.mood = 1.0
        self.error = 0.0
        """Recent mean relative error of predictions, each made before learning from its step."""
        self._hybrid_ratios: list[dict[int, float]] = [{} for _ in SIZES]
        """Recent time of hybrid steps over that of a step of each phase, by tokens of prompts and
        then by rows; only of those that were observed."""
        self._variance = 0.0
        self._tables = {phase: _Table() for phase in Phase}

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm of the ratio of actual to predicted step times."""
        return math.sqrt(self._variance)

    def knows(self, phase: Phase) -> bool:
        """Returns whether a step of that phase was observed."""
        return self._tables[phase].known

    def has_seen(self, phase: Phase, threshold_percent: float) -> bool:
        """Returns whether steps about as degraded as that, of any size, were observed."""
        return self._tables[phase].has_seen(threshold_percent)

    def observe(self, phase: Phase, size: int, threshold_percent: float, seconds: float) -> None:
        """Learns from a step's duration. The threshold is a mean over its rows; exempt ones have
        100.
        """
        if not (size > 0 and seconds > 0):
            return  # no time passed on its clock
        table = self._tables[phase]
        if not table.known:
            table.start(seconds / self.mood)
        error = seconds / self.expected_s(phase, size, threshold_percent) - 1
        self._note(error)
        if table.is_taught(size, threshold_percent):
            self.mood *= 1 + MOOD_GAIN * min(max(error, -CLIP), CLIP)
            self.mood **= 0.99  # lasting changes move into the table
        table.learn(size, threshold_percent, error)
        ratios = self._hybrid_ratios[_knot(size)] if phase is Phase.PREFILL else {}
        for rows, ratio in ratios.items():
            if ratio > WORTHWHILE:
                ratios[rows] = ratio * (1 - FORGET)

    def observe_hybrid(
        self, num_tokens: int, num_rows: int, threshold_percent: float, seconds: float
    ) -> None:
        """Learns from a step in which `num_rows` decoded beside `num_tokens` of prompts."""
        if seconds > 0:  # else no time passed on its clock
            expected_s = self.hybrid_s(num_tokens, num_rows, threshold_percent)
            error = seconds / expected_s - 1
            self._note(error)
            gain = RATIO_GAIN if error < 0 else RATIO_RISE
            ratio = self.hybrid_ratio(num_tokens, num_rows)
            ratio *= 1 + gain * min(max(error, -1.0), 1.0)
            self._hybrid_ratios[_knot(num_tokens)][_knot(num_rows)] = ratio

    def hybrid_ratio(self, num_tokens: float, num_rows: float) -> float:
        """Returns the expected time of a hybrid step with so many tokens of prompts and rows that
        decode, over that of a step of each phase. Beside more than twice or less than half the rows
        of every such step that was observed, nothing is known.
        """
        ratios, rows = self._hybrid_ratios[_knot(num_tokens)], _knot(num_rows)
        near = [other for other in ratios if abs(other - rows) <= 1]
        if not near:
            return FIRST_RATIO
        return ratios[min(near, key=lambda other: (abs(other - rows), other))]

    def hybrid_s(self, num_tokens: int, num_rows: int, threshold_percent: float = 100.0) -> float:
        """Returns the expected time (s) of such a step; NaN before there was one of each phase."""
        sizes = (Phase.PREFILL, num_tokens), (Phase.DECODE, num_rows)
        apart_s = sum(self.expected_s(*of, threshold_percent) for of in sizes)
        return self.hybrid_ratio(num_tokens, num_rows) * apart_s

    def hybrid_pays(self, num_tokens: int, num_rows: int) -> bool:
        """Returns whether such a step takes less than one of each phase; False where too few of
        these were observed to tell.
        """
        sizes = {Phase.PREFILL: num_tokens, Phase.DECODE: num_rows}
        taught = all(self._tables[of].is_taught_near(size, 100.0) for of, size in sizes.items())
        return taught and self.hybrid_ratio(num_tokens, num_rows) <= WORTHWHILE

    def forget_brownout(self, *phases: Phase) -> None:
        """Forgets times with brownout, of all phases if none is named: of another strategy or way,
        or found out long ago.
        """
        for phase in phases or Phase:
            self._tables[phase].forget_brownout()

    def expected_s(self, phase: Phase, size: float, threshold_percent: float = 100.0) -> float:
        """Returns the expected time (s) of a whole step; NaN before the first step of its phase."""
        return self.mood * self._tables[phase].read(size, threshold_percent)

    def curve(
        self, phase: Phase, size: float, thresholds_percent: Float[np.ndarray, "K"]
    ) -> Float[np.ndarray, "K"]:
        """Returns the expected times (s) of whole steps of one size at all these thresholds."""
        return self.mood * self._tables[phase].curve(size, thresholds_percent)

    def line(self, phase: Phase, threshold_percent: float = 100.0) -> tuple[float, float] | None:
        """Returns a step's fixed time and its time per row or token (s).

        It is a line through the smallest and the largest step seen. None until the largest is at
        least twice the smallest.
        """
        small, large = self._tables[phase].smallest, self._tables[phase].largest
        if large < 2 * small or not large:
            return None
        small_s, large_s = (self.expected_s(phase, n, threshold_percent) for n in (small, large))
        per_row_s = (large_s - small_s) / (large - small)
        return max(0.0, small_s - per_row_s * small), per_row_s

    def largest(self, phase: Phase) -> int:
        """Returns the size of the largest step seen; 0 before the first."""
        return self._tables[phase].largest

    @property
    def longest_s(self) -> float:
        """The longest expected time (s) of the step sizes seen; infinite before the first step."""
        known = [t.read(t.largest, 100.0) for t in self._tables.values() if t.known]
        return self.mood * max(known, default=math.inf)

    def _note(self, error: float) -> None:
        self.num_observed += 1
        gain = max(1 / self.num_observed, ERROR_GAIN)
        self.error += gain * (min(abs(error), 1.0) - self.error)
        logarithm = math.log(min(max(1 + error, 0.25), 4.0))
        self._variance += gain * (logarithm**2 - self._variance)


class _Table:
    """Seconds by size and threshold; nondecreasing in both."""

    def __init__(self) -> None:
        self.smallest = self.largest = 0  # sizes seen; 0: none
        shape = len(SIZES), len(THRESHOLDS_PERCENT)
        self._seconds = np.full(shape, math.nan).tolist()
        self._weights = np.zeros(shape).tolist()  # summed shares of observed steps
        self._first: dict[tuple[int, int], list[float]] = {}  # a young entry's observations
        self._steps_near = [0] * (int(100 // NEAR_PERCENT) + 1)  # observed, by threshold

    @property
    def known(self) -> bool:
        return self.largest > 0

    def start(self, seconds: float) -> None:
        self._seconds = [[seconds * guess for guess in GUESS] for _ in SIZES]

    def forget_brownout(self) -> None:
        below = [c for c, percent in enumerate(THRESHOLDS_PERCENT) if percent < 100]
        self._steps_near[:-1] = [0] * (len(self._steps_near) - 1)
        for row in range(len(SIZES)):
            for column in below:
                self._weights[row][column] = 0.0
                self._first.pop((row, column), None)
        if any(map(any, self._weights)):
            self._fill()

    def has_seen(self, threshold_percent: float) -> bool:
        return self._steps_near[int(threshold_percent // NEAR_PERCENT)] >= YOUNG

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

    def is_taught_near(self, size: float, threshold_percent: float) -> bool:
        """Returns whether the nearest entry was observed."""
        row, column, _ = max(_near(size, threshold_percent), key=lambda entry: entry[2])
        return self._is_taught(row, column)

    def _is_taught(self, row: int, column: int) -> bool:
        return len(self._first.get((row, column), ())) == YOUNG

    def learn(self, size: int, threshold_percent: float, error: float) -> None:
        """Moves the entries around a step by its relative error, in proportion to their shares in
        it.
        """
        self.smallest = min(self.smallest or size, size)
        self.largest = max(self.largest, size)
        self._steps_near[int(threshold_percent // NEAR_PERCENT)] += 1
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
        """Clamps a young entry's time so that it does not move entries with more observations."""
        taught = [at for at, first in self._first.items() if len(first) == YOUNG]
        low = [self._seconds[r][c] for r, c in taught if r <= row and c <= column]
        high = [self._seconds[r][c] for r, c in taught if r >= row and c >= column]
        return min(max(seconds, max(low, default=0.0)), min(high, default=math.inf))

    def _move(self, row: int, column: int, seconds: float) -> None:
        """Sets an entry, and adjusts others to keep the table monotonic."""
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
                    break  # all beyond is in order, too
                table[i][j] = seconds

    def _fill(self) -> None:
        """Fills the entries without observations."""
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
        # Make the table monotonic without moving entries that have enough observations.
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
    """Returns the entries around a step, as (row, column, share); shares add up to 1."""
    row, up = _place(SIZES, size)
    column, right = _place(THRESHOLDS_PERCENT, threshold_percent)
    near = [
        (row, column, (1 - up) * (1 - right)),
        (row, column + 1, (1 - up) * right),
        (row + 1, column, up * (1 - right)),
        (row + 1, column + 1, up * right),
    ]
    return [entry for entry in near if entry[2] > 0]


def _knot(size: float) -> int:
    """Returns which of `SIZES` is the nearest."""
    row, up = _place(SIZES, size)
    return row + (up > 0.5)


def _place(knots: Sequence[float], value: float) -> tuple[int, float]:
    """Returns the knot at or below a value (never the last), and the fraction of the way to the
    next.
    """
    at = min(max(bisect_right(knots, value) - 1, 0), len(knots) - 2)
    return at, min(max((value - knots[at]) / (knots[at + 1] - knots[at]), 0.0), 1.0)


def _spans(known: np.ndarray, *columns: int) -> bool:
    return known[0] <= min(columns) and max(columns) <= known[-1]


def _nearest(row: int, rows: list[int]) -> int | None:
    """Returns the nearest row; of two equally near, the smaller, which promises less gain from
    brownout.
    """
    return min(rows, key=lambda other: (abs(other - row), other), default=None)
