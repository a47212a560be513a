"""The scheduler: queues, slots and pages, and the plan of the next step.

Who owns which pages: a sequence in PREFILL or DECODE owns `pages`, which cover positions
`[0, len(pages) * page_size)`; every other page is free. A finished sequence's pages are free at
once: steps run in order on the device, so a step in flight that still writes to them runs before
any step of a new owner.
"""

import math
from bisect import insort
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jmoe.packed_rows import KV_LEN, NUM_COLUMNS, NUM_DELTA_COLUMNS, Q_LEN
from serving.plan import Limits, Phase, StepPlan
from serving.scheduling.pages import PageAllocator
from serving.scheduling.policy import Policy
from serving.scheduling.sequence import SequenceState, SequenceStatus


@dataclass(frozen=True)
class ScheduledStep:
    """A plan, and the sequences that its rows belong to."""

    plan: StepPlan
    sequences: list[SequenceState]
    sampled: list[bool]  # whether the row's token is used: its prompt ends here

    def share_prompt_logprobs(self, values: Float[np.ndarray, "T"]) -> None:
        """Gives sequences the log-probabilities that came of their chunks.

        They go to a chunk's own positions: a sequence that was preempted computes its prompt again,
        and may have had a chunk under way.
        """
        at = 0
        for row, sequence in zip(self.plan.rows, self.sequences, strict=True):
            q_len = int(row[Q_LEN])
            start = int(row[KV_LEN]) - q_len
            wanted = min(q_len, len(sequence.prompt) - 1 - start)
            if sequence.request.sampling.prompt_logprobs and not sequence.tokens:
                sequence.prompt_logprobs[start : start + wanted] = values[at : at + wanted].tolist()
            at += q_len


class Scheduler:
    """Continuous batching: new sequences join and finished ones leave between any two steps."""

    def __init__(self, limits: Limits, policy: Policy) -> None:
        self.limits = limits
        self.policy = policy
        self.pages = PageAllocator(limits.num_pages)
        self.waiting: list[SequenceState] = []  # sorted by the policy's rank
        self.running: list[SequenceState] = []  # in PREFILL or DECODE, by admission
        self._free_slots = list(range(limits.num_slots - 1, -1, -1))
        self._last_phase = Phase.DECODE

    def add(self, sequence: SequenceState) -> None:
        """Queues a sequence in its place."""
        insort(self.waiting, sequence, key=self.policy.rank)

    def finish(self, sequence: SequenceState) -> None:
        """Takes a sequence out, wherever it is, and frees what it holds. Again is no error."""
        status, sequence.status = sequence.status, SequenceStatus.DONE
        if status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        elif status is not SequenceStatus.DONE:
            self._release(sequence)

    @property
    def num_free_slots(self) -> int:
        """Sequences that could still be admitted, pages aside."""
        return len(self._free_slots)

    def oldest_arrival(self) -> float | None:
        """Arrival of the oldest sequence that waits for its first token."""
        ages = [s.arrived_at for s in self.waiting if not s.tokens]
        ages += [
            s.arrived_at
            for s in self.running
            if s.status is SequenceStatus.PREFILL and not s.tokens
        ]
        return min(ages, default=None)

    def check_idle(self) -> None:
        """Raises AssertionError if, with nothing to do, a page or a slot is missing."""
        if self.waiting or self.running:
            raise AssertionError(f"{len(self.waiting)} waiting and {len(self.running)} running")
        self.pages.check_idle()
        if len(self._free_slots) != self.limits.num_slots:
            raise AssertionError(f"{self.limits.num_slots - len(self._free_slots)} slots leaked")

    def next_prefill_tokens(self) -> int:
        """Tokens that a prefill step planned now would have, at most."""
        heads = self.waiting[: self.limits.max_prefill_seqs]
        return min(self.limits.max_prefill_tokens, sum(len(s.context) for s in heads))

    def next_step(self, itl_slack_s: float = -math.inf) -> ScheduledStep | None:
        """The next step, with its pages taken and its sequences advanced; None: nothing to run.

        `itl_slack_s` is what the policy may spend on a prefill step out of turn (see Policy).
        """
        decoding = [
            s for s in self.running if s.status is SequenceStatus.DECODE and not s.exhausted
        ]
        ready = self._prefill_ready()
        if self.policy.prefill_next(
            ready=ready, running=len(decoding), last_phase=self._last_phase, itl_slack_s=itl_slack_s
        ):
            step = self._plan_prefill() or self._plan_decode(decoding)
        else:
            step = self._plan_decode(decoding) or (self._plan_prefill() if ready else None)
        if step is not None:
            self._last_phase = step.plan.phase
        return step

    def _prefill_ready(self) -> bool:
        if any(s.status is SequenceStatus.PREFILL for s in self.running):
            return True
        return self._next_admissible() is not None

    def _next_admissible(self) -> SequenceState | None:
        """The first waiting sequence, if a slot and pages for all of its context are there.

        Nobody overtakes it: a long prompt must not starve behind short ones. A sequence whose last
        token is still in flight cannot be recomputed yet.
        """
        head = next((s for s in self.waiting if not s.in_flight), None)
        if head is None or not self._free_slots:
            return None
        # One position more than it needs now, or it might be preempted as soon as it is admitted.
        wanted = self.limits.pages_for(len(head.context) + 1)
        return head if wanted <= self.pages.num_free else None

    def _plan_prefill(self) -> ScheduledStep | None:
        limits, room = self.limits, self.limits.max_prefill_tokens
        chunks: list[tuple[SequenceState, list[int]]] = []
        for sequence in [s for s in self.running if s.status is SequenceStatus.PREFILL]:
            if room and len(chunks) < limits.max_prefill_seqs:
                room -= self._take_chunk(sequence, room, chunks)
        while room and len(chunks) < limits.max_prefill_seqs:
            sequence = self._next_admissible()
            if sequence is None:
                break
            self.waiting.remove(sequence)
            sequence.status = SequenceStatus.PREFILL
            sequence.slot = self._free_slots.pop()
            # All at once, so that no decoding sequence can take what a later chunk will need.
            sequence.pages = self.pages.allocate(self.limits.pages_for(len(sequence.context)))
            self.running.append(sequence)
            room -= self._take_chunk(sequence, room, chunks)
        return self._pack_prefill(chunks) if chunks else None

    def _take_chunk(
        self,
        sequence: SequenceState,
        room: int,
        chunks: list[tuple[SequenceState, list[int]]],
    ) -> int:
        start = sequence.num_computed
        part = sequence.context[start : start + room]
        chunks.append((sequence, part))
        return len(part)

    def _pack_prefill(self, chunks: list[tuple[SequenceState, list[int]]]) -> ScheduledStep:
        rows, deltas, sampled = [], [], []
        for sequence, part in chunks:
            mapped = self.limits.pages_for(sequence.num_computed)
            sequence.num_computed += len(part)
            reached = self.limits.pages_for(sequence.num_computed)
            deltas += [(sequence.slot, b, sequence.pages[b]) for b in range(mapped, reached)]
            rows.append(sequence.packed(len(part)).copy())
            last = sequence.num_computed == len(sequence.context)
            sampled.append(last)
            if last:
                sequence.status = SequenceStatus.DECODE
                sequence.num_sampled += 1
        plan = StepPlan(
            phase=Phase.PREFILL,
            rows=np.stack(rows),
            deltas=_stack(deltas),
            tokens=np.concatenate([np.asarray(part, np.int32) for _, part in chunks]),
            prompt_logprobs=any(
                s.request.sampling.prompt_logprobs and not s.tokens for s, _ in chunks
            ),
        )
        return ScheduledStep(plan, [sequence for sequence, _ in chunks], sampled)

    def _plan_decode(self, decoding: list[SequenceState]) -> ScheduledStep | None:
        deltas: list[tuple[int, int, int]] = []
        scheduled: list[SequenceState] = []
        for sequence in decoding:
            if sequence.status is not SequenceStatus.DECODE:
                continue  # preempted for one before it
            while not self._extend_if_free(sequence, deltas):
                victim = self.policy.victim(self.running)
                scheduled = [s for s in scheduled if s is not victim]
                deltas = [delta for delta in deltas if delta[0] != victim.slot]
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                scheduled.append(sequence)
        if not scheduled:
            return None
        rows = np.empty((len(scheduled), NUM_COLUMNS), np.int32)
        for at, sequence in enumerate(scheduled):
            sequence.num_computed += 1
            sequence.num_sampled += 1
            rows[at] = sequence.packed(1)
        plan = StepPlan(
            phase=Phase.DECODE,
            rows=rows,
            deltas=_stack(deltas),
            tokens=np.zeros(0, np.int32),
            prompt_logprobs=False,
        )
        return ScheduledStep(plan, scheduled, [True] * len(scheduled))

    def _extend_if_free(self, sequence: SequenceState, deltas: list[tuple[int, int, int]]) -> bool:
        """Gives a sequence the page its next position needs, if it needs one; False: none free."""
        if self.limits.pages_for(sequence.num_computed + 1) > len(sequence.pages):
            if not self.pages.num_free:
                return False
            page = self.pages.allocate(1)[0]
            deltas.append((sequence.slot, len(sequence.pages), page))
            sequence.pages.append(page)
        return True

    def _preempt(self, victim: SequenceState) -> None:
        """Takes a sequence's pages; it waits in its old place and is recomputed later."""
        self._release(victim)
        victim.reset_for_recompute()
        self.add(victim)

    def _release(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self.pages.free(sequence.pages)
        self._free_slots.append(sequence.slot)
        sequence.pages = []


def _stack(deltas: list[tuple[int, int, int]]) -> np.ndarray:
    return np.array(deltas, np.int32).reshape(-1, NUM_DELTA_COLUMNS)
