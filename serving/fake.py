"""A runner without a device, whose outputs and times one can compute by hand.

The next token of a sequence is its newest one plus one, modulo the vocabulary; a step takes a time
that the test sets. It tests the real scheduler and the real tick.
"""

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from jmoe.packed_rows import DELTA_BLOCK, DELTA_PAGE, DELTA_SLOT, KV_LEN, Q_LEN, SLOT
from serving.plan import Limits, Phase, StepControl, StepPlan, StepResult


@dataclass
class FakeRunner:
    """Counts up. Checks that every position it is told to write lies on a page it was given.

    With a `step_s`, steps take that long by the running event loop's clock, one after another;
    without, a step is done when it is launched.
    """

    limits: Limits
    vocab_size: int = 1000
    step_s: float = 0.0
    compilations_since_ready: int = 0
    launches: list[tuple[Phase, int, StepControl]] = field(default_factory=list)
    _last: dict[int, int] = field(default_factory=dict)
    _table: dict[tuple[int, int], int] = field(default_factory=dict)
    _busy_until: float = 0.0
    _written: dict[int, list[int]] = field(default_factory=dict)  # page -> tokens, by offset

    def launch(self, plan: StepPlan, control: StepControl) -> Future[StepResult]:
        """See serving.execution.runner.Runner."""
        self.launches.append((plan.phase, len(plan.rows), control))
        for delta in plan.deltas:
            key = (int(delta[DELTA_SLOT]), int(delta[DELTA_BLOCK]))
            self._table[key] = int(delta[DELTA_PAGE])
        tokens, at = [], 0
        for row in plan.rows:
            slot, kv_len, q_len = int(row[SLOT]), int(row[KV_LEN]), int(row[Q_LEN])
            if plan.phase is Phase.PREFILL:
                new = plan.tokens[at : at + q_len].tolist()
                at += q_len
            else:
                new = [self._last[slot]]
            self._write(slot, kv_len - q_len, new)
            self._last[slot] = (new[-1] + 1) % self.vocab_size
            tokens.append(self._last[slot])
        count = len(tokens)
        zeros, prompt = np.zeros((1, 1), np.int32), None
        if plan.prompt_logprobs:  # of the token at position p: -p
            parts = [np.arange(row[KV_LEN] - row[Q_LEN], row[KV_LEN]) + 1.0 for row in plan.rows]
            prompt = -np.concatenate(parts)
        result = StepResult(tokens, [-0.5] * count, [0] * count, zeros, prompt)
        future: Future[StepResult] = Future()
        if not self.step_s:
            self._finish(future, result)
            return future
        loop = asyncio.get_running_loop()
        self._busy_until = max(self._busy_until, loop.time()) + self.step_s
        loop.call_at(self._busy_until, self._finish, future, result)
        return future

    def _finish(self, future: Future[StepResult], result: StepResult) -> None:
        if future.set_running_or_notify_cancel():
            future.set_result(result)

    def _write(self, slot: int, start: int, tokens: list[int]) -> None:
        size = self.limits.page_size
        for position, token in enumerate(tokens, start):
            page = self._table[slot, position // size]
            self._written.setdefault(page, [-1] * size)[position % size] = token

    def history(self, slot: int, length: int) -> list[int]:
        """Tokens at positions `[0, length)` of a slot, as its pages hold them."""
        size = self.limits.page_size
        return [self._written[self._table[slot, p // size]][p % size] for p in range(length)]

    def load_way(self, way: int, layer: int) -> None:
        """See serving.execution.runner.Runner. There is nothing to load."""

    def close(self) -> None:
        """Nothing to release."""
