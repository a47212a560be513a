"""A controller that predicts what brownout gains, and uses the least that keeps both objectives."""

import logging
import math
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr

from serving.config import SalcConfig
from serving.control.algorithm2 import Algorithm2
from serving.control.controller import Decision, Load, PhaseSeen, Seen, StepSeen
from serving.plan import Phase
from serving.scheduling.step_time import StepTimeModel

GRID_PERCENT = np.linspace(100, 0, 21)
"""Thresholds to choose from; of two that are as good, the first."""
TARGET = 0.04
"""Late tokens that it lets pass. A P90 objective allows 0.1; what nobody foresees comes on top."""
NEEDED = 0.06  # late without brownout: with fewer there is none
MIN_SAMPLES, MAX_ERROR = 30, 0.25  # below and above: it knows too little
FEW_ROWS = 3  # in a batch so small brownout saves no time
DEAR_PERCENT = 30.0
"""What a threshold gives up below that costs twice: answers suffer most there."""

PRICES = 0.5, 50.0
PRICE_GAIN = 0.1
WINDOWS_S = 1.0, 5.0
"""Of the gaps that it goes by. Brownout has to help in both: a second alone is often a bad one."""

NEARLY_FULL = 0.7  # of all slots: with more of them taken a queue is near
ROOM = 1.1  # capacity over arrivals, then
DRAIN_S = 0.25, 2.0
"""A queue should be gone in the time that a first token may take, but not in less or more."""
QUEUE_PRICE = 20.0
RISE_PER_S = 60.0
"""Percentage points by which thresholds rise in a second, at most: the first half of brownout saves
more time than the second, so that steady thresholds degrade less than ones that jump."""
SURE = 1.0  # standard deviations of step times by which the ITL objective is taken to be shorter

TOO_LATE = 0.1
"""Share of late first tokens from which on the queue is slower than expected, where the P90 that
was expected is in time."""
CORRECTION, MOST_CORRECTION = 1.2, 3.0
"""Factor on the expected time of the queue for every two such intervals in a row, and the largest;
beyond it Algorithm 2 decides for `DISTRUST_S`."""
DISTRUST_S = 10.0

log = logging.getLogger(__name__)

Curve = Float[np.ndarray, "K"]


class Gap(NamedTuple):
    """A decode step that was launched, with its expected time."""

    at: float
    rows: int
    seconds: float  # between its rows' tokens, under the threshold that it got
    late_unhelped: float  # share of them that would come late without brownout


class Predictive:
    """Spends brownout where the model of step times says that it saves most.

    A gap between two tokens is long where a prefill step lies in it, and that is known before the
    decode step that ends it is launched: so gaps are kept step by step (`of_step`), each with as
    much brownout as makes up for the time already lost, and none where nothing is lost or
    everything is. The price of a late token, in degraded ones, moves until `TARGET` of them are
    late. First tokens come late where requests queue for a slot: thresholds of whole intervals
    (`decide`) are the cheapest under which slots come free as fast as requests arrive.

    Where first tokens come later than was expected it takes queues to be slower. While it knows too
    little, or errs too much, Algorithm 2 decides.
    """

    def __init__(self, config: SalcConfig) -> None:
        self._fallback = Algorithm2(config)
        self._knows = self._helps = False
        self._price = 2.0
        self._gaps: deque[Gap] = deque()
        self._percents, self._decided_at = np.zeros(2), -math.inf  # decided last, and when
        self._ttft_s = math.nan  # expected then
        self._correction, self._wrong_for, self._distrusted_until = 1.0, 0, -math.inf

    # ---- by interval ------------------------------------------------------------------------

    def decide(self, seen: Seen) -> Decision:
        """See Controller."""
        self._correct(seen)
        self._knows = _knows_enough(seen) and seen.now >= self._distrusted_until
        if not self._knows:
            self._decided_at, self._ttft_s = -math.inf, math.nan
            return self._fallback.decide(seen)
        while self._gaps and self._gaps[0].at < seen.now - WINDOWS_S[-1]:
            self._gaps.popleft()
        newest = [gap for gap in self._gaps if gap.at >= seen.now - WINDOWS_S[0]]
        self._set_price(seen.decode, min(map(_late_unhelped, (newest, self._gaps))))
        prefill, decode, ttft_s = _least_for_queue(
            seen.load, seen.times, seen.prefill.slo_s, seen.decode.slo_s, self._correction
        )
        self._ttft_s = ttft_s
        most = self._percents + RISE_PER_S * max(seen.now - self._decided_at, 0.0)
        self._percents = np.minimum([prefill, decode], most)
        self._decided_at = seen.now
        prefill, decode = self._percents.tolist()
        return Decision(prefill, decode, ttft_s, _expected_p90_s(newest, seen.times.spread))

    def _correct(self, seen: Seen) -> None:
        """Compares the first tokens that came with what was expected of them."""
        late, slo_s = seen.prefill.late_share, seen.prefill.slo_s
        wrong = late is not None and late > TOO_LATE and self._ttft_s <= slo_s
        self._wrong_for = self._wrong_for + 1 if wrong else 0
        if not wrong:
            self._correction = max(1.0, 0.95 * self._correction)
        elif self._wrong_for % 2 == 0:
            self._correction *= CORRECTION
        if self._correction > MOST_CORRECTION:
            self._correction, self._distrusted_until = 1.0, seen.now + DISTRUST_S
            log.warning(
                "predictive: %.0f %% of first tokens come later than %.3g s, and %.3g s was "
                "expected; algorithm2 decides for %g s",
                100 * (late or 0.0),
                slo_s,
                self._ttft_s,
                DISTRUST_S,
            )

    def _set_price(self, decode: PhaseSeen, unhelped: float) -> None:
        late = decode.late_share or 0.0
        self._helps = max(unhelped, late) > NEEDED
        if self._helps and decode.late_share is not None:
            off = min(max((late - TARGET) / TARGET, -1.0), 2.0)
            price = self._price * math.exp(PRICE_GAIN * off)
            self._price = min(max(price, PRICES[0]), PRICES[1])

    # ---- by step ----------------------------------------------------------------------------

    def of_step(self, step: StepSeen) -> float:
        """See Controller."""
        if not self._knows:
            return step.percent
        return self._of_prefill(step) if step.phase is Phase.PREFILL else self._of_decode(step)

    def _of_decode(self, step: StepSeen) -> float:
        gap_s = step.since_s + _curve(step.times, step.phase, step.size, step.exempt_share)
        late = _late(gap_s, step.itl_slo_s, step.times.spread)
        percent = step.percent
        if self._helps and step.size > FEW_ROWS:
            cost = self._price * late + PRICE_OF_GRID
            percent = min(percent, float(GRID_PERCENT[np.argmin(cost)]))
        expected_s = float(np.interp(percent, GRID_PERCENT[::-1], gap_s[::-1]))
        self._gaps.append(Gap(step.now, step.size, expected_s, float(late[0])))
        return percent

    def _of_prefill(self, step: StepSeen) -> float:
        """Decides a prefill step together with the decode step that follows, which may make up for
        the rest.
        """
        rows = step.num_decoding
        if not self._helps or rows <= FEW_ROWS:
            return step.percent
        prefill_s = _curve(step.times, Phase.PREFILL, step.size, step.exempt_share)[:, None]
        decode_s = _curve(step.times, Phase.DECODE, rows, step.exempt_share)[None, :]
        late = _late(step.since_s + prefill_s + decode_s, step.itl_slo_s, step.times.spread)
        of_decode = (rows * (self._price * late + PRICE_OF_GRID[None, :])).min(1)
        return min(
            step.percent, float(GRID_PERCENT[np.argmin(of_decode + step.size * PRICE_OF_GRID)])
        )


PRICE_OF_GRID = (100 - GRID_PERCENT) / 100 + np.maximum(DEAR_PERCENT - GRID_PERCENT, 0) / 100
"""Of a token under each threshold of the grid."""


def _knows_enough(seen: Seen) -> bool:
    times = seen.times
    return (
        times.num_observed >= MIN_SAMPLES
        and times.error <= MAX_ERROR
        and times.knows(Phase.PREFILL)
        and (times.knows(Phase.DECODE) or seen.load.new_tokens <= 1)
        and seen.load.new_tokens > 0
    )


def _late_unhelped(gaps: Collection[Gap]) -> float:
    """Returns the share of the gaps' tokens that would be late without brownout; 0 without any."""
    rows = sum(gap.rows for gap in gaps)
    return sum(gap.rows * gap.late_unhelped for gap in gaps) / rows if rows else 0.0


def _expected_p90_s(gaps: Collection[Gap], spread: float) -> float:
    """Returns the expected P90 in seconds; NaN without samples."""
    if not gaps:
        return math.nan
    # Five values, each as likely, stand for the noise of each gap.
    noise = np.exp(spread * np.array([-1.28, -0.52, 0.0, 0.52, 1.28]))
    values = np.outer([gap.seconds for gap in gaps], noise).ravel()
    weights = np.repeat([gap.rows for gap in gaps], len(noise))
    order = np.argsort(values)
    at = np.searchsorted(np.cumsum(weights[order]), 0.9 * weights.sum())
    return float(values[order][at])


def _curve(times: StepTimeModel, phase: Phase, size: float, exempt_share: float) -> Curve:
    """Returns the seconds of a step under each threshold of the grid."""
    return times.curve(phase, size, 100 - (100 - GRID_PERCENT) * (1 - exempt_share))


def _late(seconds: np.ndarray, slo_s: float, spread: float) -> np.ndarray:
    """Returns the probability of exceeding the objective, with noise around what is expected."""
    return ndtr(np.log(seconds / slo_s) / max(spread, 0.02))


class Queue(NamedTuple):
    """What a pair of thresholds of the grid, of prefill and decode, makes of the load."""

    capacity_per_s: Float[np.ndarray, "K K"]  # requests that it serves
    slot_s: Float[np.ndarray, "K K"]  # until a request that arrives now has a slot
    wait_s: Float[np.ndarray, "K K"]  # then, until the prompts ahead of it are computed
    step_s: Float[np.ndarray, "K K"]  # of a prefill step and the decode step that follows


def queue_of(load: Load, times: StepTimeModel, itl_slo_s: float) -> Queue:
    """Returns what each pair of thresholds makes of the load.

    When there is more to do than time, prefill steps are full, or have the prompts of the slots
    that a full decode step frees, and as many follow one another as the ITL objective allows. So
    each decode step has the rows of the requests that these began, N - 1 times, unless slots are
    fewer. A request of P tokens costs its share of both: whichever of them is the load, at capacity
    the device works a second a second. First tokens queue for slots and, whether or not slots are
    free, behind the prompts ahead.
    """
    prompt = max(load.prompt_tokens, 1.0)
    further = max(load.new_tokens - 1, 0.0)
    freed = load.max_running / max(further, 1e-9)  # slots, by a decode step of a full batch
    largest = float(times.largest(Phase.PREFILL))
    tokens = max(min(prompt * freed, largest), load.prefill_tokens, 1.0)
    per_step = tokens / prompt
    prefill_s = _curve(times, Phase.PREFILL, tokens, load.exempt_share)
    rows, in_a_row, decode_s = 1.0, 1.0, np.zeros_like(GRID_PERCENT)
    if further and times.knows(Phase.DECODE):
        room_s = itl_slo_s * math.exp(-SURE * times.spread) - times.expected_s(Phase.DECODE, 1)
        in_a_row = max(room_s / prefill_s[0], 1.0)
        rows = min(max(further * per_step * in_a_row, 1.0), load.max_running)
        decode_s = _curve(times, Phase.DECODE, rows, load.exempt_share)
    request_s = (prefill_s / per_step)[:, None] + (further / rows * decode_s)[None, :]
    step_s = prefill_s[:, None] + decode_s[None, :]
    ahead = (load.num_waiting + load.num_prefilling) / per_step
    wait_s = ahead * (prefill_s[:, None] + decode_s[None, :] / in_a_row)
    beyond = max(0, load.num_running + load.num_waiting - load.max_running)
    return Queue(1 / request_s, beyond * request_s, wait_s, step_s)


def _least_for_queue(
    load: Load, times: StepTimeModel, ttft_slo_s: float, itl_slo_s: float, correction: float
) -> tuple[float, float, float]:
    """Returns the cheapest thresholds of prefill and decode under which requests are served as fast
    as they arrive and those that wait get their first tokens in time, and the P90 TTFT that is
    expected then. `correction` is how much slower than expected the queue has been.
    """
    queue = queue_of(load, times, itl_slo_s)
    there = load.num_running + load.num_waiting
    cost = load.prompt_tokens * PRICE_OF_GRID[:, None] + load.new_tokens * PRICE_OF_GRID[None, :]
    cost /= load.prompt_tokens + load.new_tokens
    used = correction * load.arrivals_per_s / queue.capacity_per_s
    first_s = correction * (queue.wait_s + queue.step_s)
    if max(there / load.max_running, used[0, 0]) > NEARLY_FULL or first_s[0, 0] > ttft_slo_s / 2:
        late_s = np.maximum(queue.slot_s, first_s - ttft_slo_s / 2)
        drain_s = min(max(ttft_slo_s, DRAIN_S[0]), DRAIN_S[1])
        cost += QUEUE_PRICE * np.maximum(0, ROOM * used + np.maximum(late_s, 0) / drain_s - 1)
    at = np.unravel_index(np.argmin(cost), cost.shape)
    company_s = 0.0
    if load.company is not None:
        tokens_per_s = max(load.arrivals_per_s * load.prompt_tokens, 1e-9)
        company_s = min(load.company.wait_s, load.company.tokens / tokens_per_s)
    ttft_s = company_s + first_s[at] + correction * queue.slot_s[at]
    return float(GRID_PERCENT[at[0]]), float(GRID_PERCENT[at[1]]), float(ttft_s)
