"""The scheduler: queues, slots and pages, and the layers to launch next.

A sequence in PREFILL or DECODE holds `pages`, which cover positions `[0, room)`, but for those
behind a window; it may share the first of them with other sequences (`reuse`). All other pages are
free. A finished sequence's pages, and those that a window leaves, are free at once where launches
run in order on the device: a launch in flight that still uses them runs before any launch of a new
owner; and a finished sequence is removed from its step, so that later layers do not write. Where
rows complete singly (`singles`), a sequence keeps slot and pages until its row has left, and is not
evicted before.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType

import numpy as np

from jmoe.packed_rows import KV_LEN, NUM_COLUMNS, NUM_DELTA_COLUMNS, Q_LEN, SLOT
from serving.plan import Limits, Phase
from serving.request import Priority
from serving.scheduling.exact import ExactRows
from serving.scheduling.places import Places
from serving.scheduling.policy import (
    BE,
    LS,
    TOGETHER,
    Company,
    GuardedPolicy,
    Order,
    Policy,
    RequestViews,
    View,
)
from serving.scheduling.prefixes import Brownout
from serving.scheduling.queues import Mixes, Queues, RoundRobin, Share, of_one_model
from serving.scheduling.reuse import Reuse
from serving.scheduling.sequence import SequenceState, SequenceStatus, is_best_effort
from serving.scheduling.step import Chunks, ScheduledStep, SingleRows, StagingRegions, gathered
from serving.scheduling.waiting import WHOLE, QueuedClass, Shares

FEW_DECODING = 1 / 3
"""Share of a decode step's rows. With fewer decoding, prompts do not wait for company: another
prefill step delays few. Simulated, this more than halves a steady load's wait for first tokens."""


MOST_BESIDE = 1 / 4
"""Share of a prefill step's tokens that may be rows which decode beside prompts."""
Beside = Callable[[int, int], bool]
"""`(num_tokens, num_rows)`: whether so many rows are to decode beside a prefill step's tokens."""


class Scheduler:
    """Continuous batching: new sequences join and finished ones leave between any two steps.

    Args:
        limits: sizes that a schedule must keep to.
        policy: the scheduling policy.
        layers_at_once: returns the number of layers to launch at once for a phase and a size, in
            positions on the fullest rank, while there is best-effort work; otherwise steps are
            launched whole.
        share: best effort's guaranteed share of device time.
        max_wait_s: best effort that has waited longer counts as latency-sensitive.
        mixes: returns whether a decode step with these numbers of rows of several models, by rank,
            pays; None: never.
        accepted: returns how much brownout a sequence accepts in reused pages; None turns
            prefix reuse off.
        slow_s: calls of the policy that take longer are logged.
        in_order: whether steps complete whole and in order; otherwise rows do singly, steps are
            planned whole, and whatever is in none may be in the next.
        beside: says when rows decode in a prefill step; None: never.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        layers_at_once: Callable[[Phase, int], int] | None = None,
        share: float = 0.0,
        max_wait_s: float = math.inf,
        mixes: Mixes | None = None,
        accepted: Callable[[SequenceState], Brownout] | None = None,
        slow_s: float = math.inf,
        in_order: bool = True,
        beside: Beside | None = None,
    ) -> None:
        self._in_order, self._beside = in_order, beside
        self.limits, self.share = limits, Share(share)
        self.policy = GuardedPolicy(policy, slow_s)
        self.places = Places(limits)
        self._slides = any(limits.windows)
        self.reuse = Reuse(limits, self.places, accepted)
        self._round_robin = RoundRobin(limits, mixes)
        self.models: set[int] | None = None  # models that may begin steps; None: all
        self.exact = ExactRows()
        self.queues = Queues(self.policy)
        self.running: list[SequenceState] = []  # in PREFILL or DECODE, by admission
        self.under_way: list[ScheduledStep] = []  # begun, but not launched to the last layer
        self.num_parks = self.num_joins = self.num_mixed = self.num_hybrid = 0
        self.num_evictions = dict.fromkeys(Priority, 0)
        self._layers_at_once = layers_at_once or (lambda phase, size: limits.num_layers)
        self._max_wait_s = max_wait_s
        self.staging = StagingRegions(limits)
        self.singles = SingleRows(limits, self.staging)  # none where steps complete whole
        self._last_phase = Phase.DECODE
        self._none_waited_at = -math.inf  # at that time no prompt could have begun
        self._newest: ScheduledStep | None = (
            None  # the one under way whose layers were launched last
        )
        self._has_best_effort = False  # as the next step is planned
        self._most_tokens = sys.maxsize  # likewise

    # ---- requests ---------------------------------------------------------------------------

    @property
    def waiting(self) -> list[SequenceState]:
        """All waiting sequences, class by class."""
        return [*self.queues[LS], *self.queues[BE]]

    @property
    def idle(self) -> bool:
        """Whether no request is running or waiting."""
        return not (self.running or self.queues[LS] or self.queues[BE])

    def add(self, sequence: SequenceState, now: float = 0.0) -> None:
        """Queues a sequence, in the policy's order."""
        is_next = self.queues.add(sequence)
        if is_next and math.isnan(sequence.ready_at) and self._admissible(sequence):
            sequence.ready_at = now

    def finish(self, sequence: SequenceState) -> None:
        """Removes a sequence, whatever its status, and frees what it holds. May be called again."""
        status, sequence.status = sequence.status, SequenceStatus.DONE
        if status is SequenceStatus.WAITING:
            self.queues.remove(sequence)
        elif status is not SequenceStatus.DONE:
            self._release(sequence)

    @property
    def models_asked(self) -> set[int]:
        """The models of all requests that run or wait."""
        return {s.request.model for s in (*self.running, *self.waiting)}

    def has_begun(self, model: int) -> bool:
        """Returns whether a step with this model is begun, but not launched to its last layer."""
        return any(model in step.models for step in self.under_way)

    def _free(self) -> list[SequenceState]:
        """Returns the running sequences that may be in the next step and are in none under way."""
        free = [s for s in self.running if s.step is None]
        if self.models is None and not self.exact.models:
            return free
        return [s for s in free if self._may_run(s)]

    def _may_run(self, sequence: SequenceState) -> bool:
        return self._runs(sequence) and (not self.exact.models or self.exact.may_run(sequence))

    def _runs(self, sequence: SequenceState) -> bool:
        """Returns whether its model may begin steps (its weights are on the device)."""
        return self.models is None or sequence.request.model in self.models

    def num_free_slots(self, priority: Priority = LS) -> int:
        """Returns how many more sequences of a class could be admitted, apart from pages.

        Slots held by best-effort sequences count as free for latency-sensitive ones.
        """
        return sum(self.places.admissible(self.running, priority))

    def waits(
        self, priority: Priority, now: float, shares: Mapping[int, Shares] = MappingProxyType({})
    ) -> QueuedClass:
        """Summarizes the waiting and running sequences of a class. `shares` are those of models
        with objectives of their own; ages are over them.
        """
        queue, free = self.queues[priority], self.num_free_slots(priority)
        running = [s for s in self.running if s.request.priority is priority]
        begun = [s for s in running if s.status is SequenceStatus.PREFILL and not s.tokens]
        ages = (
            (now - s.arrived_at) / shares.get(s.request.model, WHOLE)[0]
            for s in (*queue, *begun)
            if not s.tokens
        )
        oldest_s, counts = max(ages, default=0.0), (len(queue), len(running), len(begun))
        there = {s.request.model for s in (*queue, *running)} if shares else ()
        least = zip(*(shares.get(model, WHOLE) for model in there), strict=True)
        first, further = map(min, least) if there else WHOLE
        return QueuedClass(oldest_s, len(queue) > free, *counts, (first, further))

    def check_idle(self) -> None:
        """Raises AssertionError if it is not idle, or if a slot, page or region has leaked."""
        if not self.idle:
            raise AssertionError(f"{len(self.waiting)} waiting and {len(self.running)} running")
        self.places.check_idle()
        self.staging.check_idle()
        self.reuse.check_idle()
        self.singles.check_idle()
        if self.under_way:
            raise AssertionError(f"{len(self.under_way)} steps without rows are under way")

    def observe(self, step: ScheduledStep, ended_at: float) -> None:
        """Counts a step for best effort's share, while there is best-effort work."""
        if not self._has_best_effort:
            return
        if self._in_order:
            seconds = ended_at - step.started_at
            self.share.observe(seconds, ended_at, seconds * step.has_best_effort)
        else:
            own = step.q_lens[[is_best_effort(s) for s in step.sequences]]
            self.share.observe(float(step.size), ended_at, float(own.sum()))

    def note_read(
        self, step: ScheduledStep, degraded: Sequence[int], by: Brownout, again: Set[int]
    ) -> None:
        """Notes that the results of a step's layers were read; see `Reuse.read`. What is behind
        windows now is free.
        """
        self.reuse.read(step, degraded, by, again, self.exact)
        if self._slides:
            for at, sequence in enumerate(step.sequences):
                if sequence.pages and sequence.step is None and at not in again:
                    self.places.slide(sequence, self.reuse.num_settled(sequence))

    def num_decoding_beside(self, step: ScheduledStep) -> int:
        """Returns how many sequences wait for a further token during this step."""
        own = step.sequences if step.phase is Phase.PREFILL else ()
        running, first = (
            sum(s.status is SequenceStatus.DECODE for s in some) for some in (self.running, own)
        )
        return running - first

    def tokens_at(self) -> float:
        """Returns the mean time of decoding latency-sensitive sequences' last tokens, or NaN."""
        decoding = self._candidates((LS,), SequenceStatus.DECODE)
        found = [s.previous_at for s in decoding if not math.isnan(s.previous_at)]
        return sum(found) / len(found) if found else math.nan

    def waited_s(self, now: float) -> float:
        """Returns the longest time (s) that a latency-sensitive sequence has waited for its first
        token; 0 where none does.
        """
        first = (s for s in self._for_prefill() if not s.tokens and s.priority is LS)
        return now - min((s.arrived_at for s in first), default=now)

    def next_prefill_tokens(self) -> int:
        """Returns an upper bound on the tokens of a prefill step planned now."""
        most = self.limits.num_ranks * self.limits.max_prefill_tokens
        return min(most, sum(map(self._left, self._for_prefill())))

    def _for_prefill(self) -> list[SequenceState]:
        """Returns the sequences that a prefill step planned now could have: begun ones, and the
        first in line.
        """
        begun = [s for s in self._free() if s.status is SequenceStatus.PREFILL]
        return [*begun, *of_one_model(self.waiting, self.limits.max_prefill_seqs)]

    def _left(self, waiting: SequenceState) -> int:
        """Returns how many positions a waiting sequence has to compute."""
        if waiting.status is SequenceStatus.PREFILL:
            return len(waiting.context) - waiting.num_computed
        return len(waiting.prompt) + len(waiting.tokens) - self.reuse.most(waiting)

    # ---- the next layers --------------------------------------------------------------------

    def next_step(
        self,
        itl_slack_s: float = -math.inf,
        now: float = 0.0,
        company: Company | None = None,
        most_tokens: int = sys.maxsize,
    ) -> ScheduledStep | None:
        """Returns the layers to launch next, or None if there is nothing to run.

        It allocates their pages and advances their sequences. `itl_slack_s` is the time that the
        policy may spend on a prefill step out of turn, and `company` what a prompt should wait for
        (see View). A prefill step has at most `most_tokens` on a rank.
        """
        self._most_tokens = most_tokens
        self._has_best_effort = bool(self.queues[BE]) or any(map(is_best_effort, self.running))
        self._promote(now)
        view = self._view(itl_slack_s, now, company)
        choice = self.policy.choose(view)
        begin, other = self._begin_decode, self._begin_prefill
        if choice.phase is Phase.PREFILL:
            begin, other = other, begin
        resume = choice.resume
        step = begin(choice.order, now) if resume is None else self.under_way[resume]
        if step is None and self.under_way:  # nothing to run for this choice, so run anything
            step = self.under_way[0]
        if step is None:
            step = other(TOGETHER, now) or begin(TOGETHER, now)
        return None if step is None else self._take_layers(step, now)

    def _promote(self, now: float) -> None:
        """Promotes best effort that has waited too long to latency-sensitive."""
        if self._max_wait_s == math.inf or not self._has_best_effort:
            return
        for sequence in (*self.queues[BE][:1], *self.running):
            if sequence.request.priority is BE and sequence.step is None:
                late = now - sequence.waiting_since > self._max_wait_s
                sequence.priority = LS if late else BE

    def _view(self, itl_slack_s: float, now: float, company: Company | None) -> View:
        free = self._free()
        prefilling = [s for s in free if s.status is SequenceStatus.PREFILL]
        decoding = self._to_decode(free)
        prefill, decode = self._by_class(prefilling), self._by_class(decoding)
        can = {
            c: bool(self.staging.ranks)
            and (bool(prefill[c]) or self._next_admissible((c,)) is not None)
            for c in (LS, BE)
        }
        few = len(decoding) < FEW_DECODING * self.limits.decode_rows
        if prefilling or few or self._has_best_effort:
            company = None
        limits = self.limits
        most = 0 if company is None else limits.max_prefill_seqs
        heads = of_one_model(self.queues[LS], most)
        waiting_tokens = sum(map(self._left, heads))
        full = limits.num_ranks * min(self._most_tokens, limits.max_prefill_tokens)
        if len(heads) >= limits.max_prefill_seqs or waiting_tokens >= full:
            company = None
        waiting = heads[: self.num_free_slots()] if heads and can[LS] else []
        if not waiting:
            self._none_waited_at = now
        return View(
            now=now,
            max_batch=self.limits.decode_rows,
            ls_prefill=RequestViews([*prefill[LS], *self.queues[LS]]),
            be_prefill=RequestViews([*prefill[BE], *self.queues[BE]]),
            ls_decode=RequestViews(decode[LS]),
            be_decode=RequestViews(decode[BE]),
            can_prefill=MappingProxyType(can),
            under_way=tuple(
                step.view(index, parked=step is not self._newest)
                for index, step in enumerate(self.under_way)
            ),
            last_phase=self._last_phase,
            itl_slack_s=itl_slack_s,
            may_park=self.share.may_park or not self._has_best_effort,
            company=company,
            waiting_tokens=waiting_tokens,
            oldest_s=now - heads[0].arrived_at if heads else 0.0,
            waited_s=sum(now - max(s.arrived_at, self._none_waited_at) for s in waiting),
        )

    def _by_class(self, sequences: list[SequenceState]) -> dict[Priority, list[SequenceState]]:
        if not self._has_best_effort:
            return {LS: sequences, BE: []}
        return {c: [s for s in sequences if s.priority is c] for c in (LS, BE)}

    def _take_layers(self, step: ScheduledStep, now: float) -> ScheduledStep:
        """Takes the next layers of a step; a parked one that has reached the same layer joins."""
        other, num_joined, parks = step.parts.joins, 0, None
        if other in self.under_way and other.first_layer == step.first_layer:
            num_joined = len(other.rows)
            step.absorb(other)
            self.under_way.remove(other)
            self.num_joins += 1
        elif other not in self.under_way:  # it has gone, and is not to be kept
            step.parts.joins = None
        if self._newest is not step and self._newest in self.under_way:
            parks = self._newest
            parks.parts.num_parks += 1
            self.num_parks += 1
        taken = step.take_layers(self.limits.num_layers)
        taken.parks, taken.num_joined = parks, num_joined
        if not self._in_order:
            self.under_way.remove(step)
            self.singles.enter(taken, now, all_urgent=not self.share.may_park)
        elif taken.is_last:
            self._end(step)
        self._newest = step if step in self.under_way else None
        self._last_phase = Phase.DECODE if step.decodes else step.phase
        return taken

    def _begin(self, step: ScheduledStep, now: float) -> ScheduledStep:
        self.under_way.append(step)
        step.parts.at_once = self._at_once(step)
        for sequence in step.sequences:
            sequence.step = step
        if self._has_best_effort and step.has_best_effort:
            for sequence in step.sequences:
                sequence.waiting_since = now
        return step

    def _at_once(self, step: ScheduledStep, *others: ScheduledStep) -> int:
        """Returns how many layers of a step to launch at once, together with `others`."""
        if not (self.policy.parks and self._has_best_effort):
            return self.limits.num_layers
        return self._layers_at_once(step.phase, step.size_with(self.limits, *others))

    def _joins(self, step: ScheduledStep, parked: ScheduledStep | None) -> ScheduledStep | None:
        """Returns the parked step if its rows can go on as part of `step`, which begins.

        It reaches the layer at which the other is parked only if both are cut alike, and goes on
        from there only if what they are together is, too: where each part is a program of its own,
        there is none for other layers.
        """
        if parked not in self.under_way:
            return None
        alike = step.parts.at_once == parked.parts.at_once == self._at_once(step, parked)
        return parked if alike else None

    def _end(self, step: ScheduledStep) -> None:
        """Ends a step: its last layers are launched, or it has no rows left."""
        self.under_way.remove(step)
        self.staging.give_back(step.release_staging())

    # ---- rows that complete singly ----------------------------------------------------------

    def complete(self, numbers: Sequence[int]) -> ScheduledStep:
        """Takes rows of one phase that left the last layer, and frees their sequences for new
        steps. Returns the step that they form, in this order.
        """
        rows = self.singles.take(numbers)
        step = gathered(rows, self.limits)
        self._release_done(row.sequence for row in rows)
        return step

    def run_again(self, numbers: Sequence[int]) -> None:
        """Restarts rows that were lost on their way: their positions are computed again, as
        chunks.
        """
        rows = self.singles.take(numbers)
        for row in rows:
            if not row.sequence.done:
                q_len = int(row.step.q_lens[row.at])
                if self.limits.recurrent:  # some layers of it may have run
                    q_len = row.sequence.num_computed
                row.sequence.run_again(q_len, row.step.sampled[row.at])
        self._release_done(row.sequence for row in rows)

    def give_up(self, numbers: Sequence[int]) -> list[SequenceState]:
        """Gives up rows that will neither leave nor run again. Returns the requests to end."""
        sequences = [row.sequence for row in self.singles.take(numbers)]
        self._release_done(sequences)
        return [sequence for sequence in sequences if not sequence.done]

    def abandon(self) -> None:
        """Gives up all rows, since none will ever leave."""
        self.run_again(self.singles.numbers())

    def close_rank(self, rank: int) -> list[SequenceState]:
        """Closes a rank that is lost. Returns its requests, which are to be ended."""
        self.places.close(rank)
        self.give_up(self.singles.numbers(rank))
        return self._on_rank(rank)

    def _release_done(self, sequences: Iterable[SequenceState]) -> None:
        """Frees what requests hold that ended while their rows were on their way."""
        for sequence in sequences:
            if sequence.done:
                self._release(sequence)

    # ---- prefill ----------------------------------------------------------------------------

    def _next_admissible(
        self,
        group: Sequence[Priority],
        ranks: Sequence[int] | None = None,
        model: int | None = None,
    ) -> SequenceState | None:
        """Returns the first waiting sequence of a group if one of `ranks` (None: any) has a slot
        and pages for its context, otherwise None. `model` restricts it to sequences of that model.

        No sequence of the same class and model overtakes it, since a long prompt must not starve
        behind short ones. Sequences of another model overtake it only to fill up a step of their
        own model. A latency-sensitive one overtakes best effort that waits for a slot or pages,
        since it may use slots, and evict for pages, where best effort may not. Any overtakes one
        that waits until a running one has computed its prefix.
        """
        models = self.models if model is None else (model,)
        for head in self.queues.heads(group, models, self._awaits_prefix):
            if self._admissible(head, ranks):
                return head
            if not is_best_effort(head):
                return None
        return None

    def _awaits_prefix(self, waiting: SequenceState) -> bool:
        """Returns whether a sequence that could be admitted waits for pages that are being
        computed.
        """
        return any(
            self.reuse.awaits(waiting, rank) and self._admissible(waiting, (rank,))
            for rank in range(self.limits.num_ranks)
        )

    def _admissible(self, head: SequenceState, ranks: Sequence[int] | None = None) -> bool:
        return self._rank_for(head, ranks) is not None

    def _rank_for(self, head: SequenceState, ranks: Sequence[int] | None) -> int | None:
        """Returns the rank, among `ranks` or all, with the longest cached prefix of the sequence.

        Ties go to the rank with the most free pages. If no rank has room as it is, a
        latency-sensitive sequence gets the one where best effort would give up most. None if that
        does not make room either.
        """
        own, end, places = head.request.priority, self._end_of(head), self.places
        free = places.admissible(self.running, own)
        ranks = [rank for rank in (range(len(free)) if ranks is None else ranks) if free[rank]]
        there = {rank: self.reuse.found(head, rank) for rank in ranks}
        found = places.rank_for(end, ranks, there)
        if found is not None or own is BE:
            # Also one that has waited too long: two of best effort would evict each other.
            return found
        room = {}
        for rank in ranks:
            giving = self._giving_way(rank)
            if giving or places.free_slots(rank):
                room[rank] = places.num_left(rank, end, there[rank], giving)
        fitting = [rank for rank, left in room.items() if left >= 0]
        return max(fitting, key=lambda rank: (there[rank].num_blocks, room[rank]), default=None)

    def _has_place(self, head: SequenceState, rank: int) -> bool:
        """Returns whether the sequence fits on a rank as things are."""
        there = {rank: self.reuse.found(head, rank)}
        return self.places.rank_for(self._end_of(head), (rank,), there) is not None

    def _end_of(self, head: SequenceState) -> int:
        """Returns how many positions it needs pages for: its context and one more, lest it be
        evicted once admitted.
        """
        return len(head.context) + 1

    def _begin_prefill(self, order: Order, now: float) -> ScheduledStep | None:
        decoding, most = self._beside_prompts(), self.limits.max_prefill_tokens
        rows = len(decoding)
        if rows and self._beside is not None and self._beside(most - rows, rows):
            most -= rows
        most = min(most, self._most_tokens)
        chunks = Chunks(self.limits, self.exact, self.staging.ranks, most)
        for number, group in enumerate(order):
            if number and chunks:  # later groups fill up the step at no extra cost
                if self._parked(Phase.PREFILL, chunks.model) is not None:
                    break  # a parked step joins instead of new prompts
                chunks.keep_to_bucket()
            self._fill_prefill(group, chunks, now)
        if not chunks:
            return None
        step = chunks.pack()
        self._decode_beside(step, decoding)
        self._begin(step, now)
        ranks = (self.limits.rank(sequence.slot) for sequence in step.sequences)
        step.place(self.staging.take(ranks), self.limits)
        parked = self._parked(Phase.PREFILL, step.model)
        if parked is not None and step.has_room_for(parked, self.limits):
            step.parts.joins = self._joins(step, parked)
        return step

    def _beside_prompts(self) -> list[SequenceState]:
        """Returns the sequences that may decode in a prefill step which is being planned: all that
        decode, or none.

        The step takes the place of a decode step: whoever it left out could wait for as long as
        there are prompts. Prompts keep most of it, or they would crawl beside many rows. None where
        a step could be parked, or a row be run again.
        """
        if self._beside is None or self._has_best_effort or self.under_way or self.exact.models:
            return []
        decoding = self._to_decode(self._candidates((LS,), SequenceStatus.DECODE))
        if not 0 < len(decoding) <= MOST_BESIDE * self.limits.max_prefill_tokens:
            return []
        begun = self._candidates((LS,), SequenceStatus.PREFILL)
        head = begun[0] if begun else self._next_admissible((LS,))
        if head is None or head.scores_prompt:
            return []
        models = {sequence.request.model for sequence in (head, *decoding)}
        return decoding if len(models) == 1 else []

    def _decode_beside(self, step: ScheduledStep, decoding: list[SequenceState]) -> None:
        """Makes a prefill step a hybrid one if the `decoding` sequences can be in it, and that pays
        at its size. Nobody is evicted for it.
        """
        if not decoding or self._beside is None or step.scores_prompts:
            return
        decode = SequenceStatus.DECODE  # else evicted for a prompt's pages
        if any(s.status is not decode or s.request.model != step.model for s in decoding):
            return
        if self._beside(step.size, len(decoding)) and all(map(self._has_page, decoding)):
            step.decode_beside(self._decode_step(decoding))
            self.num_hybrid += 1

    def _has_page(self, sequence: SequenceState) -> bool:
        has = sequence.num_computed < sequence.room
        return has or self._takes_pages(sequence)

    def _parked(self, phase: Phase, model: int | None) -> ScheduledStep | None:
        if self.exact.models:
            return None  # together, their rows could need too many experts
        own = (s for s in self.under_way if s.phase is phase and s.model == model)
        return next((step for step in own if not step.is_first), None)

    def _fill_prefill(self, group: Sequence[Priority], chunks: Chunks, now: float) -> None:
        """Takes chunks of a group's prompts: first of those already begun, then of new ones."""
        for sequence in self._candidates(group, SequenceStatus.PREFILL):
            if sequence.status is not SequenceStatus.PREFILL:
                continue  # it was evicted for an earlier one
            others = chunks.model not in (None, sequence.request.model)
            on_rank = self.limits.rank(sequence.slot) in chunks.ranks()
            if not others and on_rank and chunks.may_take(sequence):
                if self._slides:
                    found = self._finds_pages(sequence)
                    chunks.drop_evicted()
                    if not found:
                        continue
                chunks.take(sequence)
        while ranks := chunks.ranks():
            sequence = self._next_admissible(group, ranks, chunks.model)
            if sequence is None or not chunks.may_take(sequence):
                return
            self._admit(sequence, ranks, now)
            chunks.drop_evicted()
            chunks.take(sequence)

    def _candidates(self, group: Sequence[Priority], status: SequenceStatus) -> list[SequenceState]:
        """Returns a group's running sequences with this status that are in no step under way."""
        found = [s for s in self._free() if s.status is status]
        if not self._has_best_effort:
            return found if LS in group else []
        return [s for s in found if s.priority in group]

    @staticmethod
    def _to_decode(sequences: list[SequenceState]) -> list[SequenceState]:
        return [s for s in sequences if s.status is SequenceStatus.DECODE and not s.exhausted]

    def _admit(self, sequence: SequenceState, ranks: Sequence[int], now: float) -> None:
        """Admits a sequence, and evicts best effort for a latency-sensitive one if necessary.

        It gets pages for its whole context at once, or over a window as many as it will have at
        once, so that no decoding sequence can take those that a later chunk will need.
        """
        rank = self._rank_for(sequence, ranks)
        assert rank is not None  # since it is admissible
        self.queues.remove(sequence)
        while not self._has_place(sequence, rank):
            self._preempt(self.policy.victim(self._giving_way(rank)))
        sequence.status = SequenceStatus.PREFILL
        found = self.reuse.found(sequence, rank)
        self.places.take(rank, sequence, found)
        self.reuse.begin(sequence, found)
        self.running.append(sequence)
        if math.isnan(sequence.ready_at):
            sequence.ready_at = now

    def _on_rank(self, rank: int) -> list[SequenceState]:
        return [s for s in self.running if self.limits.rank(s.slot) == rank]

    def _giving_way(self, rank: int) -> list[SequenceState]:
        """Returns a rank's sequences that may be evicted for a latency-sensitive one."""
        return [s for s in self._on_rank(rank) if is_best_effort(s) and self._may_evict(s)]

    def _may_evict(self, sequence: SequenceState) -> bool:
        """Returns whether nothing writes to its pages any more once others have them."""
        return self._in_order or sequence.step is None

    # ---- decode -----------------------------------------------------------------------------

    def _begin_decode(self, order: Order, now: float) -> ScheduledStep | None:
        scheduled: list[SequenceState] = []
        candidates = self._decoding(order)
        if not candidates:
            return None
        parked, limits = self._parked(Phase.DECODE, candidates[0].request.model), self.limits
        room = [limits.decode_rows // limits.num_ranks] * limits.num_ranks
        if parked is not None:
            taken = parked.on_ranks(limits)[0].tolist()
            room = [n - seqs for n, seqs in zip(room, taken, strict=True)]
        for sequence in candidates:
            rank = limits.rank(sequence.slot)
            if not room[rank] or sequence.status is not SequenceStatus.DECODE:
                continue  # no row is left, or it was evicted for an earlier one
            if sequence.num_computed >= sequence.room:
                num_running, found = len(self.running), self._finds_pages(sequence)
                if len(self.running) < num_running:
                    stay = [s for s in scheduled if s.status is SequenceStatus.DECODE]
                    room[rank] += len(scheduled) - len(stay)
                    scheduled = stay
                if not found:
                    continue
            scheduled.append(sequence)
            room[rank] -= 1
        if not scheduled:
            return None
        step = self._begin(self._decode_step(scheduled), now)
        self.num_mixed += len(step.models) > 1
        step.parts.joins = self._joins(step, parked)
        return step

    def _decode_step(self, scheduled: list[SequenceState]) -> ScheduledStep:
        """Returns a step in which these sequences decode, and advances them; they have the pages
        for it.
        """
        for sequence in scheduled:
            sequence.num_computed += 1
            sequence.num_sampled += 1
            if sequence.bounds_degraded:
                sequence.plan_degraded(1)
        rows = np.concatenate([sequence.row for sequence in scheduled]).reshape(-1, NUM_COLUMNS)
        rows[:, SLOT] = [sequence.slot for sequence in scheduled]
        rows[:, KV_LEN] = [sequence.num_computed for sequence in scheduled]
        rows[:, Q_LEN] = 1
        models = [sequence.request.model for sequence in scheduled]
        size = self.limits.page_size
        deltas = [
            delta
            for sequence in scheduled
            if sequence.prefix.num_mapped * size < sequence.room
            for delta in sequence.mapped(sequence.prefix.num_mapped, sequence.room // size)
        ]
        return ScheduledStep(
            Phase.DECODE,
            rows,
            np.array(deltas, np.int32).reshape(-1, NUM_DELTA_COLUMNS),
            model=models[0],
            row_models=np.array(models if len(set(models)) > 1 else (), np.int32),
            sequences=scheduled,
            sampled=[True] * len(scheduled),
        )

    def _decoding(self, order: Order) -> list[SequenceState]:
        """Returns sequences to decode by group: of one model, or of several if none can park."""
        groups = [
            self._to_decode(self._candidates(group, SequenceStatus.DECODE)) for group in order
        ]
        alone = bool(self.under_way) or (self.policy.parks and self._has_best_effort)
        rows = self._round_robin.take(groups, for_all=not self.share.may_park, alone=alone)
        return self.exact.limited(rows) if self.exact.models else rows

    # ---- who gives way ----------------------------------------------------------------------

    def _finds_pages(self, sequence: SequenceState) -> bool:
        """Allocates pages for a running sequence's next positions, and evicts for the first of them
        if necessary; False if it waits for pages, or was evicted itself.
        """
        found = self._takes_pages(sequence)
        while not found and sequence.num_computed >= sequence.room:
            victim = self._victim_for(sequence)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
            found = self._more_pages(sequence)
        return True

    def _takes_pages(self, sequence: SequenceState) -> bool:
        """Allocates pages for a running sequence's next positions, and evicts nobody; False if
        there are none.

        Those behind a window are given back before, though where pages are short nobody can share
        what was not read yet.
        """
        if self._slides:
            self.places.slide(sequence, self.reuse.num_settled(sequence))
        found = self._more_pages(sequence)
        if self._slides and not found:
            self.places.slide(sequence)
            found = self._more_pages(sequence)
        return found

    def _more_pages(self, sequence: SequenceState) -> bool:
        decodes = sequence.status is SequenceStatus.DECODE
        return (self.places.extend if decodes else self.places.refill)(sequence)

    def _victim_for(self, sequence: SequenceState) -> SequenceState | None:
        """Returns the sequence to evict so that a running one gets a page; None: nobody can be yet.

        Best effort is evicted first, and among the candidates those whose model cannot run now. A
        latency-sensitive sequence is never evicted for best effort.
        """
        running = self._on_rank(self.limits.rank(sequence.slot))
        running = list(filter(is_best_effort, running)) or running
        victim = self.policy.victim([s for s in running if not self._runs(s)] or running)
        return victim if self._may_evict(victim) else None

    def _preempt(self, victim: SequenceState) -> None:
        """Evicts a sequence: it loses its pages, and is recomputed from its old place in line."""
        self.num_evictions[victim.request.priority] += 1
        self._release(victim)
        victim.reset_for_recompute()
        self.add(victim, victim.waiting_since)

    def _release(self, sequence: SequenceState) -> None:
        if not self._may_evict(sequence):
            return  # it is released once its row has left
        step = sequence.step
        if step is not None:
            step.drop(sequence)
            if not step.sequences:
                self._end(step)
        self.running.remove(sequence)
        self.reuse.end(sequence)
        self.places.give_back(sequence)
