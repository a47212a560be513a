"""The audit: what brownout cost, measured on the traffic that there is.

Answers with degraded visits are drawn at random and scored exactly, as best effort, while nobody
waits. An answer's **excess** is what each token's log-probability under brownout was above that of
the exact model, in nats; **disagreement** is the share of greedy tokens that are not the exact
model's first choice.
"""

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jmoe.ratios import ratio
from serving.config import AuditConfig
from serving.errors import ServingError, shown
from serving.request import AuditState, Output, Request
from serving.scheduling.sequence import SequenceState
from serving.telemetry.observer import Observer

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Answers that wait to be scored; of more, which stay is drawn."""
KEPT_ANSWERS = 1000
"""Of each model and key, of which figures are made."""
LEAST_ANSWERS = 50
"""Before a bound is held to."""
LOOK_AGAIN_S = 0.25
"""Until the next look whether there is room."""
STALE_S = 600.0
"""After which an answer that found no room is let go."""
MAX_KEYS = 256
"""Pairs of model and API key with figures of their own; further keys share those of one name."""
OTHER_KEYS = "other keys"
NOTHING = math.nan, math.nan, math.nan


class _Scored(NamedTuple):
    """One answer's part in the figures."""

    tokens: int
    excess: float  # nats, over all tokens
    greedy_tokens: int
    others: int  # of them, those that are not the exact model's first choice
    expected: float  # nats, over all tokens


@dataclass
class _Measured:
    """What was measured of the answers of one model to one API key."""

    num_scored: int = 0
    num_unscored: int = 0
    exempt_until: float = -math.inf
    scored: deque[_Scored] = field(default_factory=lambda: deque(maxlen=KEPT_ANSWERS))
    excess: tuple[float, float, float] = NOTHING  # mean, and the ends of its interval
    disagreement: tuple[float, float, float] = NOTHING
    expected: float = math.nan

    def add(self, one: _Scored) -> None:
        """Counts an answer."""
        self.num_scored += 1
        self.scored.append(one)
        tokens, excess, greedy, others, expected = np.array(self.scored, np.float64).T
        self.expected = float(expected.sum() / tokens.sum())
        mean, margin = ratio(excess, tokens)
        self.excess = mean, mean - margin, mean + margin
        mean, margin = ratio(others, greedy)
        self.disagreement = mean, *np.clip((mean - margin, mean + margin), 0, 1).tolist()


class Auditor(Observer):
    """Draws degraded answers, has them scored, and tells whose brownout costs too much."""

    def __init__(
        self,
        config: AuditConfig,
        names: Sequence[str],
        score: Callable[[SequenceState], Awaitable[SequenceState]],
        has_room: Callable[[int], bool],
        clock: Callable[[], float],
    ) -> None:
        """`score` runs an answer behind its prompt once more, exactly, and returns that request,
        whose prompt has log-probabilities; it raises ServingError for an answer that cannot be
        scored. `has_room` returns whether nobody would wait for one of a model's. Times are seconds
        of `clock`, which is the event loop's.
        """
        self.config, self._names = config, names
        self._score, self._has_room, self._clock = score, has_room, clock
        self._waiting: list[SequenceState] = []
        self._offered = asyncio.Event()
        self._measured = {(number, ""): _Measured() for number in range(len(names))}

    def request_finished(self, sequence: SequenceState, output: Output, now: float) -> None:
        """See Observer."""
        allowed = sequence.request.allow_audit
        if not self.config.share or not sequence.degraded_visits or not allowed:
            return
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(sequence)
        else:
            at = random.randrange(MAX_WAITING)
            self._of(self._waiting[at]).num_unscored += 1
            self._waiting[at] = sequence
        self._offered.set()

    async def run(self) -> None:
        """Scores answers for ever, for at most `share` of the time."""
        while True:
            await self._offered.wait()
            if not self._waiting:  # those that were offered are of a model that has gone since
                continue
            answer = random.choice(self._waiting)
            is_stale = self._clock() - answer.previous_at > STALE_S
            if not is_stale and not self._has_room(answer.request.model):
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            self._waiting.remove(answer)
            if not self._waiting:
                self._offered.clear()
            if is_stale:
                self._of(answer).num_unscored += 1
                continue
            began = self._clock()
            try:
                self.note(answer, await self._score(answer))
            except Exception as error:
                self._of(answer).num_unscored += 1
                level = logging.DEBUG if isinstance(error, ServingError) else logging.ERROR
                log.log(level, "an answer was not audited", exc_info=error)
            del answer
            took_s = self._clock() - began
            await asyncio.sleep(took_s * (1 / self.config.share - 1))

    def note(self, answer: SequenceState, scored: SequenceState) -> None:
        """Counts an answer's scores, which may be of fewer tokens than it has."""
        own = slice(len(answer.prompt) - 1, None)  # scores are of tokens behind the first one
        exact, best = scored.prompt_logprobs[own], np.array(scored.prompt_best[own])
        measured, count = self._of(answer), len(exact)
        if not count:  # the only token fills the last position
            measured.num_unscored += 1
            return
        sampling = answer.request.sampling
        is_greedy = not sampling.temperature and not sampling.shapes
        greedy = count if is_greedy else 0
        others = int(np.sum(np.array(exact) < best)) if is_greedy else 0
        excess = math.fsum(answer.logprobs[:count]) - math.fsum(exact)
        expected = count * (answer.expected_nats / len(answer.tokens))
        measured.add(_Scored(count, excess, greedy, others, expected))
        self._hold_to_bound(answer.request, measured)

    def exempts(self, model: int, key: str) -> bool:
        """Returns whether a key's requests to a model are exempt, since brownout cost them more
        than the bound.
        """
        whose = model, key if (model, key) in self._measured else OTHER_KEYS
        measured = self._measured.get(whose)
        if measured is None or measured.exempt_until == -math.inf:
            return False
        if measured.exempt_until > self._clock():
            return True
        self._measured[whose] = _Measured(measured.num_scored, measured.num_unscored)
        log.info("brownout of %s is tried again", self._whose(model, key))
        return False

    def forget(self, model: int) -> None:
        """Forgets a model that is gone: what was measured of it, and answers that wait."""
        self._waiting = [one for one in self._waiting if one.request.model != model]
        if not self._waiting:
            self._offered.clear()
        for of_model, key in list(self._measured):
            if of_model == model:
                del self._measured[of_model, key]
        self._measured[model, ""] = _Measured()

    def state(self) -> tuple[AuditState, ...]:
        """Returns the figures of each model, and of each API key that it answered."""
        now = self._clock()
        return tuple(
            AuditState(
                self._names[model],
                one.num_scored,
                one.num_unscored,
                *one.excess,
                *one.disagreement,
                one.exempt_until > now,
                key,
                one.expected,
            )
            for (model, key), one in list(self._measured.items())
            if self._names[model] or len(self._names) == 1
        )

    def _of(self, answer: SequenceState) -> _Measured:
        model, key = answer.request.model, answer.request.key
        if (model, key) not in self._measured and len(self._measured) >= MAX_KEYS:
            key = OTHER_KEYS
        return self._measured.setdefault((model, key), _Measured())

    def _whose(self, model: int, key: str) -> str:
        of = f" for key {shown(key)}" if key else ""
        return f"model {shown(self._names[model])}{of}"

    def _hold_to_bound(self, request: Request, measured: _Measured) -> None:
        most, count = self.config.max_excess_nats, len(measured.scored)
        mean, low, high = measured.excess
        if not most or count < LEAST_ANSWERS or measured.exempt_until > -math.inf or low <= most:
            return
        measured.exempt_until = self._clock() + self.config.retry_s
        log.warning(
            "brownout of %s costs %.3g nats a token (%.3g to %.3g, %d answers), more than "
            "engine.audit.max_excess_nats=%g: its new requests are exempt for %g s",
            *(self._whose(request.model, request.key), mean, low, high, count, most),
            self.config.retry_s,
            extra={
                "event": "audit_exempt",
                "model": self._names[request.model],
                "key": request.key,
                "excess": mean,
            },
        )
