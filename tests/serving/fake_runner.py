"""A runner without a device for tests of the real scheduler and the real tick.

Its outputs and times are easy to predict: a sequence's next token is its newest one plus one, plus
its model's number in a family, modulo the vocabulary size; and a step takes as long as the test
sets.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Int

from jmoe.packed_rows import DELTA_BLOCK, DELTA_PAGE, DELTA_SLOT, KV_LEN, Q_LEN, SLOT
from serving.execution.executor import StepExecutor
from serving.plan import Limits, Phase, StepControl, StepPlan, StepResult


@dataclass
class FakeRunner(StepExecutor):
    """A runner whose tokens count up.

    It checks that every position it writes lies on a page it was given, that pages hold what rows
    read, and that the rows of a step that runs in parts are in the same place and at the right
    layer. With `step_s`, whole steps take that long by the running event loop's clock, one after
    another, and parts take their share; without, steps are done when they are launched.
    """

    limits: Limits
    vocab_size: int = 1000
    step_s: float | Callable[[StepPlan], float] = 0.0
    part_layers: int = 0  # layers launched at once; 0: all
    checks_context: bool = True  # check, at every token, that pages hold what attention would read
    resident: list[int] | None = None  # models whose weights are on the device; None: all
    set_s: float = 0.0  # how long `replace_set` takes
    mixed_models: int = 0  # whose rows a decode step may have; less than 2: one model's
    compilations_since_ready: int = 0
    num_programs: int = 0
    launch_s: float = 0.0  # from a launch until a device that waits could begin
    has_hybrid: bool = False  # whether rows decode in prefill steps
    launches: list[tuple[Phase, int, StepControl]] = field(default_factory=list)
    _last: dict[int, int] = field(default_factory=dict)
    _table: dict[tuple[int, int], int] = field(default_factory=dict)
    _contexts: dict[int, list[int]] = field(default_factory=dict)  # by slot
    _hidden: dict[int, tuple[int, int]] = field(default_factory=dict)  # token, layers done
    _undrawn: list[tuple[StepPlan, StepResult, Future[StepResult]]] = field(default_factory=list)
    _busy_until: float = 0.0
    _written: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    """By group, layer and page."""

    def launch(self, plan: StepPlan, control: StepControl) -> Future[StepResult]:
        """See serving.execution.executor."""
        self.launches.append((plan.phase, len(plan.rows), control))
        assert self.resident is None or set(plan.models) <= set(self.resident)
        row_models = plan.row_models.tolist() or [plan.model] * len(plan.rows)
        assert len(plan.models) == 1 or (plan.is_last and not plan.first_layer)
        assert 0 <= plan.first_layer < plan.stop_layer <= self.limits.num_layers
        assert plan.is_last == (plan.stop_layer == self.limits.num_layers)
        self._check_ranks(plan)
        first_block: dict[int, int] = {}  # of those that each slot was given
        for delta in plan.deltas:
            slot, block = int(delta[DELTA_SLOT]), int(delta[DELTA_BLOCK])
            self._table[slot, block] = int(delta[DELTA_PAGE])
            block //= len(self.limits.windows)
            first_block[slot] = min(block, first_block.get(slot, block))
        tokens, degraded, at = [], [], 0
        for row, model in zip(plan.rows, row_models, strict=True):
            slot, kv_len, q_len = int(row[SLOT]), int(row[KV_LEN]), int(row[Q_LEN])
            if plan.phase is Phase.PREFILL:
                new, places = plan.tokens[at : at + q_len].tolist(), plan.places[at : at + q_len]
                at += q_len
                new = [self._last[slot]] if new == [-1] else new  # of a hybrid step
            else:
                new, places = [self._last[slot]], [self._hidden_row(slot)]
            start = kv_len - q_len
            # Pages that another sequence has written; what no window reads may be anything.
            adopted = first_block.get(slot, start) * self.limits.page_size < start
            if adopted:
                known = self.history(slot, start)
                self._contexts[slot] = [-1] * (start - len(known)) + known
            self._run(plan, slot, start, new, places)
            token, count = self.computed(plan, control, row, model, new, adopted)
            tokens.append(token)
            degraded.append(count)
            if plan.is_last:
                self._last[slot] = tokens[-1]
        count = len(tokens)
        zeros, prompt, prompt_top = np.zeros((1, 1), np.int32), None, None
        if plan.prompt_logprobs:  # of the token at position p: -p; the likeliest at p % 4 != 0
            parts = [np.arange(row[KV_LEN] - row[Q_LEN], row[KV_LEN]) + 1.0 for row in plan.rows]
            own = np.concatenate(parts)
            prompt = -np.stack([own, np.where(own % 4 == 0, own - 0.5, own)], axis=1)
            # The likeliest of position p are tokens p, p + 1, ..., each one nat less likely.
            ranks = np.arange(5)
            ids = own.astype(np.int32)[:, None] + ranks.astype(np.int32)
            prompt_top = ids, prompt[:, 1:] - ranks
        result = StepResult(tokens, [-0.5] * count, degraded, zeros, prompt, prompt_top=prompt_top)
        future: Future[StepResult] = Future()
        assert not self._undrawn, "a step was launched while one waits to be drawn"
        if plan.waits:
            self._undrawn.append((plan, result, future))
            return future
        self._schedule(plan, result, future)
        return future

    def computed(
        self,
        plan: StepPlan,
        control: StepControl,
        row: Int[np.ndarray, "NUM_COLUMNS"],
        model: int,
        new: list[int],
        adopted: bool,
    ) -> tuple[int, int]:
        """Returns the next token of a row whose tokens `new` have run, and its degraded visits.

        `adopted`: the row starts after pages that another sequence has written.
        """
        return (new[-1] + 1 + model) % self.vocab_size, 0

    def _schedule(self, plan: StepPlan, result: StepResult, future: "Future[StepResult]") -> None:
        whole_s = self.step_s(plan) if callable(self.step_s) else self.step_s
        if not whole_s:
            self._finish(future, result)
            return
        loop = asyncio.get_running_loop()
        share = plan.num_layers / self.limits.num_layers
        self._busy_until = max(self._busy_until, loop.time() + self.launch_s) + whole_s * share
        loop.call_at(self._busy_until, self._finish, future, result)

    def _hidden_row(self, slot: int) -> int:
        """Returns the hidden row of a slot's decode row between two parts of its step."""
        limits = self.limits
        return limits.rank(slot) * limits.hidden_per_rank + slot % limits.slots_per_rank

    def _check_ranks(self, plan: StepPlan) -> None:
        """Checks that ranks have room for their rows, and that a sequence's pages are on
        its rank.
        """
        limits = self.limits
        rank = plan.rows[:, SLOT] // limits.slots_per_rank
        delta_rank = plan.deltas[:, DELTA_SLOT] // limits.slots_per_rank
        pages = np.array(limits.group_pages)[plan.deltas[:, DELTA_BLOCK] % len(limits.windows)]
        assert (plan.deltas[:, DELTA_PAGE] // pages == delta_rank).all()
        if plan.phase is Phase.DECODE:
            assert np.bincount(rank).max() <= limits.decode_rows // limits.num_ranks
            return
        tokens = np.bincount(rank, plan.rows[:, Q_LEN])
        assert tokens.max() <= limits.max_prefill_tokens
        assert np.bincount(rank[plan.num_decodes :]).max() <= limits.max_prefill_seqs
        assert not plan.num_decodes or (self.has_hybrid and plan.is_first and plan.is_last)
        assert (plan.places // limits.hidden_per_rank == np.repeat(rank, plan.q_lens)).all()

    def draw(self, allowed: np.ndarray) -> None:
        """See Executor; counts up to the next token that the row is allowed to draw."""
        plan, result, future = self._undrawn.pop()
        tokens = []
        for row, token, bits in zip(plan.rows, result.tokens, allowed, strict=True):
            while not bits[token // 32] >> (token % 32) & 1:
                token = (token + 1) % self.vocab_size
            tokens.append(token)
            self._last[int(row[SLOT])] = token
        self._schedule(plan, replace(result, tokens=tokens), future)

    def layers_at_once(self, phase: Phase, size: int) -> int:
        """See serving.execution.executor."""
        return self.part_layers or self.limits.num_layers

    @property
    def part_layers_by_size(self) -> dict[str, int]:
        """See serving.execution.executor."""
        return {}

    def mixes(self, counts: Int[np.ndarray, "models ranks"]) -> bool:
        """See Executor; always mixes as many models as allowed."""
        return 1 < len(counts) <= self.mixed_models

    def _finish(self, future: Future[StepResult], result: StepResult) -> None:
        if future.set_running_or_notify_cancel():
            future.set_result(result)

    def _run(
        self, plan: StepPlan, slot: int, start: int, tokens: list[int], places: Iterable[int]
    ) -> None:
        """Runs layers of a chunk whose positions begin at `start`, and whose rows are at
        `places`.
        """
        size = self.limits.page_size
        for position, (token, place) in enumerate(zip(tokens, places, strict=True), start):
            if plan.first_layer:
                waiting = self._hidden[int(place)]
                assert waiting == (token, plan.first_layer), f"row {place} holds {waiting}"
            else:
                context = self._contexts.setdefault(slot, [])
                context += [-1] * (position - len(context))  # no row of a window of 1 reads them
                context[position:] = [token]
            self._hidden[int(place)] = token, plan.stop_layer
            for group in range(len(self.limits.windows)):
                page = self._page(slot, group, position)
                for layer in range(plan.first_layer, plan.stop_layer):
                    own = self._written.setdefault((group, layer, page), [-1] * size)
                    own[position % size] = token
        if plan.is_last and self.checks_context:
            end = start + len(tokens)
            known = self.history(slot, end, start)
            own = self._contexts[slot][end - len(known) : end]
            assert own == known, "another wrote its pages"

    def _page(self, slot: int, group: int, position: int) -> int:
        block = position // self.limits.page_size
        return self._table[slot, block * len(self.limits.windows) + group]

    def history(self, slot: int, length: int, start: int | None = None) -> list[int]:
        """Returns the tokens at positions `[0, length)` of a slot, as its pages hold them in every
        layer; where all have a window, only those that rows from position `start` on read (None:
        `length`).
        """
        size, found = self.limits.page_size, list[list[int]]()
        for group, window in enumerate(self.limits.windows):
            first = max(0, (length if start is None else start) - window + 1) if window else 0
            places = [(self._page(slot, group, p), p % size) for p in range(first, length)]
            found += [
                [self._written[group, layer, page][at] for page, at in places]
                for layer in range(self.limits.num_layers)
            ]
        longest = max(found, key=len)
        assert all(own == longest[len(longest) - len(own) :] for own in found)
        return longest

    def load_way(self, way: int, layer: int) -> None:
        """See serving.execution.executor. There is nothing to load."""

    @property
    def resident_models(self) -> list[int] | None:
        """See Executor."""
        return self.resident

    def replace_set(self, victim: int, model: int) -> Future[None]:
        """See Executor; done after `set_s` by the running event loop's clock."""
        assert self.resident is not None
        self.resident.remove(victim)
        future: Future[None] = Future()

        def done() -> None:
            assert self.resident is not None
            self.resident.append(model)
            future.set_result(None)

        asyncio.get_running_loop().call_later(self.set_s, done)
        return future

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """See Executor; nothing fails."""

    def close(self) -> None:
        """Does nothing, since there is nothing to release."""
