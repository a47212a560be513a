"""A controller that predicts what brownout gains, and uses the least that keeps both objectives."""

import logging
import math
from collections import deque
from collections.abc import Collection
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from serving.config import SalcConfig
from serving.control.algorithm2 import Algorithm2
from serving.control.controller import Decision, Load, Loss, PhaseSeen, Seen, StepSeen
from serving.plan import Phase
from serving.scheduling.step_time import StepTimeModel

GRID_PERCENT = np.linspace(100, 0, 21)
"""Thresholds to choose from, clipped to floor and ceiling; of two that are as good, the first."""
TARGET = 0.04
"""Late tokens that it lets pass. A P90 objective allows 0.1; what nobody foresees comes on top."""
NEEDED = 0.07  # late without brownout: with fewer there is none
MIN_SAMPLES, MAX_ERROR = 30, 0.5  # below and above: it knows too little
FEW_ROWS = 3  # in a batch so small brownout saves no time
DEAR_PERCENT = 30.0
"""What a threshold gives up below that costs twice: answers suffer most there."""

PRICES = 0.5, 16.0
"""Where late tokens are chance, such as on a noisy machine, dear brownout keeps hardly more of them
in time."""
PRICE_GAIN = 0.1
WINDOWS_S = 1.0, 5.0
"""Of the gaps that it goes by. Brownout has to help in both: a second alone is often a bad one."""

SLOTS = 0.8
"""Share of the slots beyond which requests count as a queue: it is there soon."""
FEW_SLOTS = 4
"""Of as many or fewer that share leaves no whole slot: only who waits for one is a queue."""
FULL = 1.6
"""Such a wait, in what the TTFT objective leaves for it, calls for all brownout if it lasts."""
SETTLE_S = 2.0
"""Of the mean wait that brownout follows: within less, queues come and go by chance, and thresholds
would with them."""
AT_ONCE = 0.6, 1.0
"""Waits, in the same, that call for the first and for all brownout at once; for them a queue begins
where all slots are taken."""
LEAST = 0.05  # share of all brownout; with less there is none
SHARES = np.linspace(0, 1, 41)  # of all brownout, by its price
DEVIATIONS = np.linspace(-8, 8, 1281)
NORMAL = np.array([NormalDist().cdf(at) for at in DEVIATIONS])
"""The normal distribution there; between them a line errs by 5e-6. SciPy's takes a server 0.4 s and
20 MB to import."""
SURE = 1.0  # standard deviations of step times by which the ITL objective is taken to be shorter

FIRST_TARGET = 0.05
"""Late first tokens, of the mean over `HOLD_MEAN_S`, above which brownout is held, though no queue
is foreseen."""
HOLD_MEAN_S, HOLD_RISE = 2.0, 0.2
"""How much of all brownout more is held a second where that share is twice the target; it falls as
fast where nothing is late."""
BUSY = 0.5
"""Of the device's time, that the requests would take without brownout: with less none is held."""

TOO_LATE = 0.1
"""Share of late first tokens from which on the queue is slower than expected, where the P90 that
was expected is in time."""
CORRECTION, MOST_CORRECTION = 1.2, 3.0
"""Factor on the expected time of the queue for every two such intervals in a row, and the largest;
beyond it, and where holding all brownout does not help, Algorithm 2 decides for `DISTRUST_S`."""
DISTRUST_S = 10.0

log = logging.getLogger(__name__)

Curve = Float[np.ndarray, "K"]


RISE = 1
"""Steps of the grid by which a threshold may rise as a queue grows, to degrade the other phase."""
FREE = 1e-3
"""Share of the price by visits that a token has whatever the loss: what costs nothing saves
something."""


class Prices(NamedTuple):
    """What a token of each phase costs under each threshold of the grid."""

    percent: Curve  # the grid: thresholds to choose from, falling
    visits: Curve  # in degraded visits, the same in both phases
    prefill: Curve
    decode: Curve
    by_loss: bool

    @classmethod
    def of(cls, loss: Loss | None = None, bounds: tuple[float, float] = (0.0, 100.0)) -> "Prices":
        """Returns prices by expected loss, of which the highest is that of all brownout within the
        bounds; by degraded visits where it is not known, or nothing.
        """
        percent = np.clip(GRID_PERCENT, *bounds)
        visits = (100 - percent) / 100 + np.maximum(DEAR_PERCENT - percent, 0) / 100
        curves = [
            np.zeros_like(percent) if loss is None else np.interp(percent, range(101), loss(phase))
            for phase in Phase
        ]
        highest = max(curve[-1] for curve in curves)
        if not highest:
            return cls(percent, visits, visits, visits, by_loss=False)
        scaled = (visits[-1] / highest * curve + FREE * visits for curve in curves)
        return cls(percent, visits, *scaled, by_loss=True)


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
    late. First tokens come late where requests queue: every step gets brownout by how long they
    waited lately, or by how long they wait now if that is long, so that no rate of arrivals has to
    be guessed.

    Where first tokens come later than was expected it takes queues to be slower. On a machine so
    noisy that they are late whenever brownout ends, it holds some. While it knows too little, or
    errs too much, Algorithm 2 decides.
    """

    def __init__(self, config: SalcConfig) -> None:
        self._fallback = Algorithm2(config)
        self._helps = False
        self._price, self._prices = 2.0, Prices.of()
        self._gaps: deque[Gap] = deque()
        self._mean, self._mean_at = 0.0, -math.inf  # share of brownout that queues called for
        self._queue: Queue | None = None  # None: it knows too little
        self._ttft_s = math.nan  # expected at the last decision
        self._correction, self._wrong_for, self._distrusted_until = 1.0, 0, -math.inf
        self._held, self._late_first, self._held_at = 0.0, 0.0, math.inf

    # ---- by interval ------------------------------------------------------------------------

    def decide(self, seen: Seen) -> Decision:
        """See Controller."""
        self._correct(seen)
        self._hold(seen)
        self._queue, self._ttft_s = None, math.nan
        if not _knows_enough(seen) or seen.now < self._distrusted_until:
            return self._fallback.decide(seen)
        while self._gaps and self._gaps[0].at < seen.now - WINDOWS_S[-1]:
            self._gaps.popleft()
        newest = [gap for gap in self._gaps if gap.at >= seen.now - WINDOWS_S[0]]
        self._set_price(seen.decode, min(map(_late_unhelped, (newest, self._gaps))))
        load = seen.load
        slos_s = seen.prefill.slo_s, seen.decode.slo_s
        self._prices = Prices.of(seen.loss, seen.bounds)
        self._queue = queue = queue_of(load, seen.times, *slos_s, self._prices)
        at = self._for_queue(queue, load, seen.now)
        prefill, decode = self._prices.percent[list(at)].tolist()
        wait_s = self._correction * queue.wait_s(load, at)
        self._ttft_s = float(queue.step_s[at]) + wait_s + _company_s(load)
        itl_s = _expected_p90_s(newest, seen.times.spread)
        return Decision(prefill, decode, self._ttft_s, itl_s)

    def _correct(self, seen: Seen) -> None:
        """Compares the first tokens that came with what was expected of them."""
        late, slo_s = seen.prefill.late_share, seen.prefill.slo_s
        wrong = late is not None and late > TOO_LATE and self._ttft_s <= slo_s
        self._wrong_for = self._wrong_for + 1 if wrong else 0
        if not wrong:
            self._correction = max(1.0, 0.95 * self._correction)
        elif self._wrong_for % 2 == 0:
            self._correction *= CORRECTION
        if self._correction > MOST_CORRECTION and self._held < 1:
            self._correction = MOST_CORRECTION
        elif self._correction > MOST_CORRECTION:
            self._correction, self._distrusted_until = 1.0, seen.now + DISTRUST_S
            log.warning(
                "predictive: %.0f %% of first tokens come later than %.3g s, and %.3g s was "
                "expected; algorithm2 decides for %g s",
                100 * (late or 0.0),
                slo_s,
                self._ttft_s,
                DISTRUST_S,
            )

    def _hold(self, seen: Seen) -> None:
        """Moves the share of all brownout that is held by how many first tokens came late."""
        passed_s = min(max(seen.now - self._held_at, 0.0), 2 * HOLD_MEAN_S)
        self._held_at, late = seen.now, seen.prefill.late_share or 0.0
        self._late_first += (1 - math.exp(-passed_s / HOLD_MEAN_S)) * (late - self._late_first)
        off = min(self._late_first / FIRST_TARGET - 1, 2.0)
        self._held = min(max(self._held + HOLD_RISE * off * passed_s, 0.0), 1.0)

    def _for_queue(self, queue: "Queue", load: Load, now: float) -> tuple[int, int]:
        """Returns where in the grid the thresholds are that the queue calls for."""
        share, at_once = queue.called_for(load, self._correction)
        gain = 1 - math.exp(-max(now - self._mean_at, 0.0) / SETTLE_S)
        self._mean += gain * (min(share, 1.0) - self._mean)
        self._mean_at = now
        is_busy = load.arrivals_per_s * queue.request_s[0, 0] > BUSY
        share = min(max(self._mean, at_once, self._held * is_busy), 1.0)
        if share < LEAST:  # what a queue left behind ends
            return 0, 0
        return queue.chosen[int(share * (len(SHARES) - 1))]

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
        if self._queue is None:
            return step.percent
        at = self._for_queue(self._queue, step.load, step.now)
        prefill, decode = self._prices.percent[list(at)].tolist()
        if step.phase is Phase.PREFILL:
            return self._of_prefill(step, prefill)
        return self._of_decode(step, decode)

    def _of_decode(self, step: StepSeen, percent: float) -> float:
        grid = self._prices.percent
        gap_s = step.since_s + _curve(grid, step.times, step.phase, step.size, step.exempt_share)
        late = _late(gap_s, step.itl_slo_s, step.times.spread)
        if self._helps and step.size > FEW_ROWS:
            cost = self._price * late + self._prices.decode
            percent = min(percent, float(grid[np.argmin(cost)]))
        expected_s = float(np.interp(percent, grid[::-1], gap_s[::-1]))
        self._gaps.append(Gap(step.now, step.size, expected_s, float(late[0])))
        return percent

    def _of_prefill(self, step: StepSeen, percent: float) -> float:
        """Decides a prefill step together with the decode step that follows, which may make up for
        the rest.
        """
        rows = step.num_decoding
        if not self._helps or rows <= FEW_ROWS:
            return percent
        grid, exempt = self._prices.percent, step.exempt_share
        prefill_s = _curve(grid, step.times, Phase.PREFILL, step.size, exempt)[:, None]
        decode_s = _curve(grid, step.times, Phase.DECODE, rows, exempt)[None, :]
        late = _late(step.since_s + prefill_s + decode_s, step.itl_slo_s, step.times.spread)
        of_decode = (rows * (self._price * late + self._prices.decode[None, :])).min(1)
        cost = of_decode + step.size * self._prices.prefill
        return min(percent, float(grid[np.argmin(cost)]))


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


def _curve(
    grid: Curve, times: StepTimeModel, phase: Phase, size: float, exempt_share: float
) -> Curve:
    """Returns the seconds of a step under each threshold of the grid."""
    return times.curve(phase, size, 100 - (100 - grid) * (1 - exempt_share))


def _late(seconds: np.ndarray, slo_s: float, spread: float) -> np.ndarray:
    """Returns the probability of exceeding the objective, with noise around what is expected."""
    return np.interp(np.log(seconds / slo_s) / max(spread, 0.02), DEVIATIONS, NORMAL)


class Queue(NamedTuple):
    """What brownout makes of the load, by thresholds of the grid, of prefill and of decode."""

    request_s: Float[np.ndarray, "K K"]  # from one request to the next, at capacity
    per_step: float  # prompts of a prefill step
    prompt_s: Float[np.ndarray, "K K"]  # that each of them has of the time
    step_s: Float[np.ndarray, "K K"]  # of a prefill step and the decode step that follows
    chosen: list[tuple[int, int]]
    """Where `request_s` is least, by `SHARES` of all brownout in degraded visits; where expected
    loss is known, the pair of least loss under which nobody waits longer than under that one."""
    room_s: float  # that the TTFT objective leaves beside `step_s` without brownout

    def wait_s(self, load: Load, at: tuple[int, int] = (0, 0), slots: float = 1.0) -> float:
        """Returns what a request that arrives now waits for under thresholds `at`: for one of that
        share of the slots, and for the prompts that are ahead of the next step's.
        """
        prompts = max(load.num_waiting + load.num_prefilling - self.per_step, 0.0)
        taken = max(slots * load.max_running, min(load.max_running, FEW_SLOTS))
        beyond = max(load.num_running + load.num_waiting - taken, 0.0)
        return float(prompts * self.prompt_s[at] + beyond * self.request_s[at])

    def called_for(self, load: Load, slower: float = 1.0) -> tuple[float, float]:
        """Returns which shares of all brownout a queue calls for that is so many times as slow as
        expected: if it lasts, and at once. More than 1 where it is long, less than 0 where short.
        """
        slower, (begins, ends) = slower / self.room_s, AT_ONCE
        lasting = slower * self.wait_s(load, slots=SLOTS) / FULL
        return lasting, (slower * self.wait_s(load) - begins) / (ends - begins)


def queue_of(
    load: Load,
    times: StepTimeModel,
    ttft_slo_s: float,
    itl_slo_s: float,
    prices: Prices,
) -> Queue:
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
    prefill_s = _curve(prices.percent, times, Phase.PREFILL, tokens, load.exempt_share)
    rows, in_a_row, decode_s = 1.0, 1.0, np.zeros_like(GRID_PERCENT)
    if further and times.knows(Phase.DECODE):
        room_s = itl_slo_s * math.exp(-SURE * times.spread) - times.expected_s(Phase.DECODE, 1)
        in_a_row = max(room_s / prefill_s[0], 1.0)
        rows = min(max(further * per_step * in_a_row, 1.0), load.max_running)
        decode_s = _curve(prices.percent, times, Phase.DECODE, rows, load.exempt_share)
    request_s = (prefill_s / per_step)[:, None] + (further / rows * decode_s)[None, :]
    step_s = prefill_s[:, None] + decode_s[None, :]
    prompt_s = (prefill_s[:, None] + decode_s[None, :] / in_a_row) / per_step
    visits = _of_request(load, prices.visits, prices.visits)
    share = visits / (visits[-1, -1] or 1.0)
    price = _of_request(load, prices.prefill, prices.decode)
    chosen = [(0, 0)]
    for most in SHARES:  # of pairs that are as fast, the cheapest
        within = np.where(share <= most + 1e-9, request_s * (1 + 1e-6 * share), np.inf)
        at = _least(within)
        if prices.by_loss:
            is_as_fast = (request_s <= request_s[at]) & (prompt_s <= prompt_s[at])
            prefill, decode = (max(0, last - RISE) for last in chosen[-1])
            is_as_fast[:prefill] = is_as_fast[:, :decode] = False
            at = _least(np.where(is_as_fast, price, np.inf))
        chosen.append(at)
    room_s = max(ttft_slo_s - float(step_s[0, 0]), ttft_slo_s / 4)
    return Queue(request_s, per_step, prompt_s, step_s, chosen[1:], room_s)


def _of_request(load: Load, prefill: Curve, decode: Curve) -> Float[np.ndarray, "K K"]:
    """Returns what a request costs under each pair of thresholds."""
    return load.prompt_tokens * prefill[:, None] + load.new_tokens * decode[None, :]


def _least(values: Float[np.ndarray, "K K"]) -> tuple[int, int]:
    prefill, decode = np.unravel_index(np.argmin(values), values.shape)
    return int(prefill), int(decode)


def _company_s(load: Load) -> float:
    """Returns how long the first prompt of a step waits for company."""
    if load.company is None:
        return 0.0
    tokens, wait_s, total_s = load.company
    per_s = max(load.arrivals_per_s, 1e-9)
    # Of prompts that come evenly, all have waited r t^2 / 2 together after t.
    return min(
        wait_s, tokens / (per_s * max(load.prompt_tokens, 1e-9)), math.sqrt(2 * total_s / per_s)
    )
