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
from typing import NamedTuple

import numpy as np

from jmoe.ratios import ratio
from serving.config import AuditConfig
from serving.errors import ServingError, shown
from serving.request import AuditState, Output
from serving.scheduling.sequence import SequenceState
from serving.telemetry.observer import Observer

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Answers that wait to be scored; of more, which stay is drawn."""
KEPT_ANSWERS = 1000
"""Of each model, of which figures are made."""
LEAST_ANSWERS = 50
"""Before a bound is held to."""
LOOK_AGAIN_S = 0.25
"""Until the next look whether there is room."""


class Offer(NamedTuple):
    """An answer to score."""

    model: int
    context: list[int]  # prompt and answer
    logprobs: list[float]  # of the answer's tokens, as they were drawn
    is_greedy: bool


class Scores(NamedTuple):
    """Log-probabilities of an answer's tokens under the exact model, and of its likeliest ones."""

    logprobs: Sequence[float]
    best: Sequence[float]


class _Scored(NamedTuple):
    """One answer's part in the figures."""

    tokens: int
    excess: float  # nats, over all tokens
    greedy_tokens: int
    others: int  # of them, those that are not the exact model's first choice


class Figures(NamedTuple):
    """A model's, as in `AuditState`."""

    excess_nats: float = math.nan
    excess_low_nats: float = math.nan
    excess_high_nats: float = math.nan
    disagreement: float = math.nan
    disagreement_low: float = math.nan
    disagreement_high: float = math.nan


class Auditor(Observer):
    """Draws degraded answers, has them scored, and tells which models' brownout costs too much."""

    def __init__(
        self,
        config: AuditConfig,
        names: Sequence[str],
        score: Callable[[Offer], Awaitable[Scores]],
        has_room: Callable[[int], bool],
        clock: Callable[[], float],
    ) -> None:
        """`score` raises ServingError for an answer that cannot be scored; `has_room` returns
        whether nobody would wait for one of a model's. Times are seconds of `clock`, which is the
        event loop's.
        """
        self.config, self._names = config, names
        self._score, self._has_room, self._clock = score, has_room, clock
        self._waiting: list[Offer] = []
        self._offered = asyncio.Event()
        self._scored = [deque[_Scored](maxlen=KEPT_ANSWERS) for _ in names]
        self._figures = [Figures()] * len(names)
        self._exempt_until = [-math.inf] * len(names)
        self.num_scored = [0] * len(names)
        self.num_unscored = [0] * len(names)

    def request_finished(self, sequence: SequenceState, output: Output, now: float) -> None:
        """See Observer."""
        super().request_finished(sequence, output, now)
        request = sequence.request
        if not self.config.share or not sequence.degraded_visits or not request.allow_audit:
            return
        offer = Offer(
            request.model,
            sequence.context,
            sequence.logprobs,
            not request.sampling.temperature and not request.sampling.shapes,
        )
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(offer)
        else:
            at = random.randrange(MAX_WAITING)
            self.num_unscored[self._waiting[at].model] += 1
            self._waiting[at] = offer
        self._offered.set()

    async def run(self) -> None:
        """Scores answers for ever, for at most `share` of the time."""
        while True:
            await self._offered.wait()
            at = random.randrange(len(self._waiting))
            if not self._has_room(self._waiting[at].model):
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            offer = self._waiting.pop(at)
            if not self._waiting:
                self._offered.clear()
            began = self._clock()
            try:
                self.note(offer, await self._score(offer))
            except ServingError as error:
                self.num_unscored[offer.model] += 1
                log.debug("an answer was not audited: %s", error)
            took_s = self._clock() - began
            await asyncio.sleep(took_s * (1 / self.config.share - 1))

    def note(self, offer: Offer, scores: Scores) -> None:
        """Counts an answer's scores, which may be of fewer tokens than it has."""
        model, count = offer.model, len(scores.logprobs)
        if not count:  # the only token fills the last position
            self.num_unscored[model] += 1
            return
        own, best = np.array(scores.logprobs), np.array(scores.best)
        greedy = count if offer.is_greedy else 0
        others = int(np.sum(own < best)) if offer.is_greedy else 0
        excess = math.fsum(offer.logprobs[:count]) - math.fsum(scores.logprobs)
        self._scored[model].append(_Scored(count, excess, greedy, others))
        self.num_scored[model] += 1
        self._figures[model] = self._figured(model)
        self._hold_to_bound(model)

    def exempts(self, model: int) -> bool:
        """Returns whether a model's requests are exempt, since brownout cost more than the
        bound.
        """
        until = self._exempt_until[model]
        if until > self._clock():
            return True
        if until > -math.inf:
            self._exempt_until[model] = -math.inf
            self._scored[model].clear()
            self._figures[model] = Figures()
            log.info("brownout of model %s is tried again", shown(self._names[model]))
        return False

    def state(self) -> tuple[AuditState, ...]:
        """Returns the figures of each model."""
        now = self._clock()
        return tuple(
            AuditState(name, scored, unscored, *figures, until > now)
            for name, scored, unscored, figures, until in zip(
                self._names,
                self.num_scored,
                self.num_unscored,
                self._figures,
                self._exempt_until,
                strict=True,
            )
        )

    def _hold_to_bound(self, model: int) -> None:
        most, found = self.config.max_excess_nats, self._scored[model]
        if not most or len(found) < LEAST_ANSWERS or self._exempt_until[model] > -math.inf:
            return
        excess, low, high, *_ = self._figures[model]
        if low > most:
            self._exempt_until[model] = self._clock() + self.config.retry_s
            log.warning(
                "brownout of model %s costs %.3g nats a token (%.3g to %.3g, %d answers), more "
                "than engine.audit.max_excess_nats=%g: its new requests are exempt for %g s",
                *(shown(self._names[model]), excess, low, high, len(found), most),
                self.config.retry_s,
                extra={"event": "audit_exempt", "model": self._names[model], "excess": excess},
            )

    def _figured(self, model: int) -> Figures:
        tokens, excess, greedy, others = np.array(self._scored[model], np.float64).T
        mean, margin = ratio(excess, tokens)
        differs, its_margin = ratio(others, greedy)
        low, high = np.clip((differs - its_margin, differs + its_margin), 0, 1).tolist()
        return Figures(mean, mean - margin, mean + margin, differs, low, high)
