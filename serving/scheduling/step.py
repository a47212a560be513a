"""A step as it is scheduled: what devices run of it, and the sequences that its rows belong to.

All rows belong to one model, except in a mixed decode step, which is always launched whole. Other
steps may be launched in parts of some layers each. Between two parts, rows may leave (their request
ended or was evicted), and a step that has reached the same layer may join.

Where attention and experts run on separate devices, rows complete singly: they wait in a queue
before each layer (AMoE, section 3). They enter together as a step, and each leaves the last layer
whenever it gets there, with whichever rows were batched with it.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from jaxtyping import Int

from jmoe.packed_rows import (
    DELTA_SLOT,
    EXEMPT,
    KV_LEN,
    NUM_DELTA_COLUMNS,
    NUM_SHAPE_COLUMNS,
    Q_LEN,
    SLOT,
    SPARED,
    empty_deltas,
)
from serving.plan import (
    NUM_STAGING_REGIONS,
    Limits,
    Phase,
    Shapes,
    Singles,
    StepControl,
    StepPlan,
    StepResult,
    spare_latency_sensitive,
)
from serving.scheduling.exact import ExactRows
from serving.scheduling.policy import LS, BatchView
from serving.scheduling.prefixes import Prefix
from serving.scheduling.sequence import SequenceState, SequenceStatus, is_best_effort


@dataclass(eq=False)
class Parts:
    """What is common to the parts in which a step is launched."""

    at_once: int = 0  # layers that are launched at once, of every part alike
    num_parks: int = 0
    control: StepControl | None = None  # of all layers, set at launch
    joins: "ScheduledStep | None" = None  # a parked step that joins when this reaches its layer
    staging: dict[int, list[int]] = field(default_factory=dict)  # regions of hidden rows, by rank
    needed: Int[np.ndarray, "layers columns"] | None = None
    """The sum of `StepResult.needed` over the parts that were read."""
    degraded: Counter[SequenceState] = field(default_factory=Counter)  # visits, of the same parts


@dataclass(eq=False, kw_only=True)
class ScheduledStep(StepPlan):
    """A step plan and the sequences of its rows, which the lists follow. A step under way is what
    is left of it, from `first_layer` on: `take_layers` takes those to launch, as a step of their
    own. Rows that complete singly form one again as they leave (`singles.gathered`), with the parts
    of the last to enter.
    """

    sequences: list[SequenceState]
    sampled: list[bool]
    """Whether the row's token is used; in prefill, whether the chunk ends the prompt. All False of
    layers before the last."""
    parts: Parts = field(default_factory=Parts)
    prefixes: list[Prefix] = field(default_factory=list)
    """The sequences' prefixes when these layers were planned."""
    parks: "ScheduledStep | None" = None  # what is parked for these layers
    num_joined: int = 0  # rows of a parked step that joined
    control: StepControl | None = None  # brownout that these layers were launched with
    way: int = -1  # way of united experts in force; -1: several, or unknown
    launched_at: float = math.nan  # in seconds of the engine's clock
    started_at: float = math.nan  # when the device could begin: then, or after the previous step

    @property
    def decodes(self) -> bool:
        """Whether rows decode in it: in a decode step, and in a hybrid one."""
        return self.phase is Phase.DECODE or self.num_decodes > 0

    @property
    def has_ls(self) -> bool:
        """Whether it contains a latency-sensitive request, or a promoted one."""
        return any(s.priority is LS for s in self.sequences)

    @property
    def has_best_effort(self) -> bool:
        """Whether it contains a best-effort request, promoted or not."""
        return any(map(is_best_effort, self.sequences))

    @property
    def scores_prompts(self) -> bool:
        """Whether a prompt's log-probabilities are computed."""
        chunks = self.sequences[self.num_decodes :]
        return self.phase is Phase.PREFILL and any(s.scores_prompt for s in chunks)

    @property
    def exempt_share(self) -> float:
        """The share of its positions that are exempt from brownout at launch."""
        return self.num_exempt / self.size

    @property
    def refused_share(self) -> float:
        """The share of its positions whose requests refuse brownout, or more of it."""
        refused = [s.spared or not s.request.allow_brownout for s in self.sequences]
        return int(self.q_lens[refused].sum()) / self.size if any(refused) else 0.0

    @property
    def mean_threshold_percent(self) -> float:
        """The mean threshold of its positions at launch; exempt ones count as 100."""
        if self.control is None or not self.control.strategy:
            return 100.0
        return 100 - (100 - self.control.threshold_percent) * (1 - self.exempt_share)

    def degrade_best_effort_first(self, control: StepControl) -> int:
        """Returns the threshold to launch these layers with so that, of all their visits, the
        control's share is kept exact, and best effort is degraded first
        (`spare_latency_sensitive`).
        """
        urgent = [s.priority is LS for s in self.sequences]
        if all(urgent):
            return control.threshold_percent
        return spare_latency_sensitive(self.rows, np.array(urgent), control)

    def decode_beside(self, step: "ScheduledStep") -> None:
        """Makes this prefill step a hybrid one, which computes a decode step's rows, too."""
        self.num_decodes = len(step.rows)
        self.tokens = np.concatenate([np.full(self.num_decodes, -1, np.int32), self.tokens])
        self.rows = np.concatenate([step.rows, self.rows])
        self.deltas = np.concatenate([step.deltas, self.deltas])
        self.sequences = step.sequences + self.sequences
        self.sampled = step.sampled + self.sampled

    def spare(self, models: Collection[int]) -> None:
        """Exempts the rows of these models from brownout, in a mixed step."""
        spared = np.isin(self.row_models, list(models))
        self.rows[spared, EXEMPT] = np.maximum(self.rows[spared, EXEMPT], SPARED)

    def share_prompt_logprobs(self, result: StepResult) -> None:
        """Stores the prompt log-probabilities that the sequences' chunks yielded.

        They are stored by position, since an evicted sequence computes its prompt again, and may
        have had a chunk in flight.
        """
        values, at = result.prompt_logprobs, 0
        assert values is not None
        for row, sequence in zip(self.rows, self.sequences, strict=True):
            q_len = int(row[Q_LEN])
            start = int(row[KV_LEN]) - q_len
            wanted = min(q_len, len(sequence.prompt) - 1 - start)
            if sequence.scores_prompt:
                own, best = values[at : at + wanted].T.tolist()
                sequence.prompt_logprobs[start : start + wanted] = own
                sequence.prompt_best[start : start + wanted] = best
                if count := sequence.request.sampling.top_prompt_logprobs:
                    assert result.prompt_top is not None
                    own = slice(at, at + wanted), slice(count)
                    tops = zip(*(part[own].tolist() for part in result.prompt_top), strict=True)
                    sequence.prompt_top[start : start + wanted] = [
                        tuple(zip(*top, strict=True)) for top in tops
                    ]
            at += q_len

    def count_degraded(self, degraded: Sequence[int]) -> list[int]:
        """Counts degraded visits of these layers, by row. Returns those of all the step's layers
        where these are the last, and zeros before.
        """
        sums = self.parts.degraded
        if self.is_last and not sums:
            return list(degraded)
        sums.update(dict(zip(self.sequences, degraded, strict=True)))
        return [sums.pop(sequence) if self.is_last else 0 for sequence in self.sequences]

    # ---- a step under way -------------------------------------------------------------------

    def view(self, index: int, *, parked: bool) -> BatchView:
        """Returns the step as a policy sees it."""
        own = self.phase, self.first_layer, self.has_ls, len(self.rows), self.parts.num_parks
        return BatchView(*own, parked, index)

    def place(self, regions: Mapping[int, int], limits: Limits) -> None:
        """Assigns hidden rows to its tokens, in one region on each rank that has its sequences."""
        self.parts.staging = {rank: [region] for rank, region in regions.items()}
        start = {rank: limits.staging_row(region, rank) for rank, region in regions.items()}
        places = []
        for sequence, q_len in zip(self.sequences, self.q_lens.tolist(), strict=True):
            rank = limits.rank(sequence.slot)
            places.append(np.arange(start[rank], start[rank] + q_len, dtype=np.int32))
            start[rank] += q_len
        self.places = np.concatenate(places)

    def release_staging(self, rank: int | None = None) -> dict[int, list[int]]:
        """Releases and returns the step's regions of one rank, or of all (None)."""
        staging = self.parts.staging
        return {r: staging.pop(r) for r in list(staging) if rank in (None, r)}

    def on_ranks(self, limits: Limits) -> Int[np.ndarray, "2 ranks"]:
        """Returns its numbers of sequences and positions on each rank."""
        ranks = self.rows[:, SLOT] // limits.slots_per_rank
        counts = (np.bincount(ranks, of_row, limits.num_ranks) for of_row in (None, self.q_lens))
        return np.stack([*counts]).astype(np.int32)

    def size_with(self, limits: Limits, *others: "ScheduledStep") -> int:
        """Returns the size of the program that it and `others` would need together.

        That is the number of positions on the fullest rank, or the largest prefill program for
        prompt log-probabilities.
        """
        steps = (self, *others)
        if limits.prefill_buckets and any(step.scores_prompts for step in steps):
            return limits.prefill_buckets[-1]
        return int(np.sum([step.on_ranks(limits)[1] for step in steps], axis=0).max())

    def has_room_for(self, other: "ScheduledStep", limits: Limits) -> bool:
        """Returns whether `other` can join this prefill step at no extra cost (the same token
        bucket).
        """
        own, others = self.on_ranks(limits), other.on_ranks(limits)
        most = limits.max_prefill_seqs, limits.token_bucket(int(own[1].max()))
        return bool((own + others <= np.array(most)[:, None]).all())

    def drop(self, sequence: SequenceState) -> None:
        """Removes a sequence, since its pages may belong to another before the next layers run."""
        at = self.sequences.index(sequence)
        sequence.num_sampled -= self.sampled[at]
        sequence.step = None
        sequence.unread = False
        stays = np.arange(len(self.rows)) != at
        token_stays = np.repeat(stays, self.q_lens)
        self.tokens, self.places = (
            part[token_stays[: len(part)]] for part in (self.tokens, self.places)
        )
        self.rows = self.rows[stays]
        self.deltas = self.deltas[self.deltas[:, DELTA_SLOT] != sequence.slot]
        del self.sequences[at], self.sampled[at]

    def absorb(self, other: "ScheduledStep") -> None:
        """Takes over the rows of a step that has reached the same layer."""
        assert (self.phase, self.models) == (other.phase, other.models)
        assert self.first_layer == other.first_layer
        for sequence in other.sequences:
            sequence.step = self
        for name in ("rows", "tokens", "places"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(other, name)]))
        self.sequences += other.sequences
        self.sampled += other.sampled
        self.parts.degraded.update({s: other.parts.degraded[s] for s in other.sequences})
        for rank, regions in other.release_staging().items():
            self.parts.staging.setdefault(rank, []).extend(regions)
        self.parts.num_parks = max(self.parts.num_parks, other.parts.num_parks)
        self.parts.joins = None

    def take_layers(self, num_layers: int) -> "ScheduledStep":
        """Returns the step of the layers to launch next, of a model's `num_layers`: another, or
        itself with the last one, which frees the sequences.
        """
        stop = min(self.first_layer + self.parts.at_once, num_layers)
        taken, is_last = self, stop == num_layers
        if not is_last:
            rows = self.rows.copy()  # rows may be made exempt for these layers only
            none, own = [False] * len(rows), list(self.sequences)
            taken = replace(self, rows=rows, sequences=own, sampled=none)
            self.first_layer, self.deltas = stop, empty_deltas(0)
        taken.stop_layer, taken.is_last = stop, is_last
        taken.prompt_logprobs = self.scores_prompts
        taken.shapes = self._shapes() if is_last else None
        taken.prefixes = [s.prefix for s in taken.sequences]
        if is_last:
            for sequence in self.sequences:
                sequence.step = None
        return taken

    def _shapes(self) -> Shapes | None:
        """Returns the logit changes of rows whose tokens are used; None if no row has any.

        A sequence is seated when its prompt ends.
        """
        drawn = [s for s, used in zip(self.sequences, self.sampled, strict=True) if used]
        if all(s.shape is None for s in drawn):
            return None
        rows = np.zeros((len(self.sequences), NUM_SHAPE_COLUMNS), np.int32)
        for row, sequence, used in zip(rows, self.sequences, self.sampled, strict=True):
            if used and sequence.shape is not None:
                row[:] = sequence.shape
        seated = self.num_decodes if self.phase is Phase.PREFILL else len(self.sequences)
        ends = zip(self.sequences[seated:], self.sampled[seated:], strict=True)
        seats = [s.seat() for s, used in ends if used and s.shape is not None]
        return Shapes(rows, seats, waits=any(s.is_held for s in drawn))


class StagingRegions:
    """The free regions of each rank."""

    def __init__(self, limits: Limits) -> None:
        self._free = [list(range(NUM_STAGING_REGIONS)) for _ in range(limits.num_ranks)]

    @property
    def ranks(self) -> set[int]:
        """The ranks with a free region."""
        return {rank for rank, free in enumerate(self._free) if free}

    def take(self, ranks: Iterable[int]) -> dict[int, int]:
        """Takes one region on each of these ranks. Raises IndexError if a rank has none free."""
        return {rank: self._free[rank].pop() for rank in set(ranks)}

    def give_back(self, taken: Mapping[int, Iterable[int]]) -> None:
        """Frees a step's regions, given by rank."""
        for rank, regions in taken.items():
            self._free[rank] += regions

    def check_idle(self) -> None:
        """Raises AssertionError unless all are free."""
        if lost := sum(NUM_STAGING_REGIONS - len(free) for free in self._free):
            raise AssertionError(f"{lost} regions leaked")


class Chunks:
    """The chunks of a prefill step that is being filled."""

    def __init__(self, limits: Limits, exact: ExactRows, ranks: Set[int], most: int) -> None:
        """`ranks` are those that may have chunks, of `most` tokens each."""
        self._limits, self._exact, self._ranks, self._most = limits, exact, ranks, most
        self._taken: list[tuple[SequenceState, list[int]]] = []

    def __bool__(self) -> bool:
        return bool(self._taken)

    @property
    def model(self) -> int | None:
        """The model of these prompts; None while there are none."""
        return self._taken[0][0].request.model if self._taken else None

    def ranks(self) -> list[int]:
        """Returns the ranks with room for another token."""
        seqs = Counter(self._limits.rank(sequence.slot) for sequence, _ in self._taken)
        return [
            rank
            for rank, tokens in enumerate(self._tokens())
            if rank in self._ranks
            and tokens < self._most
            and seqs[rank] < self._limits.max_prefill_seqs
        ]

    def may_take(self, sequence: SequenceState) -> bool:
        """Returns whether the step may take a token of the sequence, if its rank has room."""
        return self._exact.may_run(sequence) and self._room_for(sequence) > 0

    def take(self, sequence: SequenceState) -> None:
        """Takes the next chunk of a prompt, as long as its rank has room for."""
        rank, start = self._limits.rank(sequence.slot), sequence.num_computed
        room = min(self._most - self._tokens()[rank], self._room_for(sequence))
        room = min(room, sequence.room - start)
        self._taken.append((sequence, sequence.context[start : start + room]))

    def drop_evicted(self) -> None:
        """Drops chunks of sequences that were evicted to admit another one."""
        self._taken = [c for c in self._taken if c[0].status is not SequenceStatus.WAITING]

    def keep_to_bucket(self) -> None:
        """Limits further chunks to the token bucket that the step already costs."""
        self._most = self._limits.token_bucket(max(self._tokens()))

    def pack(self) -> ScheduledStep:
        """Makes the step, and advances its sequences as if it had run."""
        pages_for = self._limits.pages_for
        rows, sampled, deltas = [], [], []
        for sequence, part in self._taken:
            # If a sequence runs again, its last pages may not be in the device's block table yet.
            mapped = min(sequence.prefix.num_mapped, pages_for(sequence.num_computed))
            sequence.num_computed += len(part)
            deltas += sequence.mapped(mapped, pages_for(sequence.num_computed))
            ends = sequence.num_computed == len(sequence.context)
            rows.append(sequence.packed(len(part)).copy())
            sampled.append(ends)
            if ends:
                sequence.status = SequenceStatus.DECODE
                sequence.num_sampled += 1
        sequences, tokens = zip(*self._taken, strict=True)
        return ScheduledStep(
            Phase.PREFILL,
            np.stack(rows),
            np.array(deltas, np.int32).reshape(-1, NUM_DELTA_COLUMNS),
            np.concatenate(tokens, dtype=np.int32),
            model=sequences[0].request.model,
            sequences=list(sequences),
            sampled=sampled,
        )

    def _room_for(self, sequence: SequenceState) -> int:
        """Returns how many tokens the sequence may have, apart from its rank's limit."""
        if not self._exact.concerns(sequence):
            return self._most
        return self._exact.most - sum(len(p) for s, p in self._taken if self._exact.concerns(s))

    def _tokens(self) -> list[int]:
        """Returns the number of tokens taken on each rank."""
        found = [0] * self._limits.num_ranks
        for sequence, part in self._taken:
            found[self._limits.rank(sequence.slot)] += len(part)
        return found


@dataclass(eq=False)
class Entered:
    """A row of a step, from its first layer until it has left the last one."""

    step: ScheduledStep
    at: int

    @property
    def sequence(self) -> SequenceState:
        """The sequence that it belongs to."""
        return self.step.sequences[self.at]


class SingleRows:
    """The rows that have entered, by number. A sequence is in its step until its row is taken."""

    def __init__(self, limits: Limits, staging: StagingRegions) -> None:
        """`staging` gets back what a step has of a rank once none of its rows is left there."""
        self._limits, self._staging = limits, staging
        self._entered: dict[int, Entered] = {}
        self._numbers = count()
        self.num_decoding = 0  # of the rows
        self._rows_left = Counter[tuple[ScheduledStep, int]]()

    def __len__(self) -> int:
        """Returns the number of rows (a chunk counts as one) that have not left the last layer."""
        return len(self._entered)

    def __contains__(self, number: int) -> bool:
        """Returns whether a row has entered, and has neither left nor been given up."""
        return number in self._entered

    def enter(self, step: ScheduledStep, now: float, *, all_urgent: bool) -> None:
        """Lets a step's rows enter. Those of latency-sensitive sequences are urgent, or all."""
        numbers = []
        step.launched_at = step.started_at = now
        for at, sequence in enumerate(step.sequences):
            numbers.append(next(self._numbers))
            self._entered[numbers[-1]] = Entered(step, at)
            self._rows_left[step, self._limits.rank(sequence.slot)] += 1
            sequence.step = step
        self.num_decoding += len(numbers) * (step.phase is Phase.DECODE)
        step.singles = Singles(
            numbers,
            step.sampled,
            [all_urgent or s.priority is LS for s in step.sequences],
            [step.prompt_logprobs and s.scores_prompt for s in step.sequences],
        )

    def take(self, numbers: Sequence[int]) -> list[Entered]:
        """Takes rows out: they have left, are lost, or are given up."""
        rows = [self._entered.pop(number) for number in numbers]
        for row in rows:
            step, rank = row.step, self._limits.rank(row.sequence.slot)
            self._rows_left[step, rank] -= 1
            if not self._rows_left[step, rank]:
                del self._rows_left[step, rank]
                self._staging.give_back(step.release_staging(rank))
            row.sequence.step = None
            self.num_decoding -= step.phase is Phase.DECODE
        return rows

    def numbers(self, rank: int | None = None) -> list[int]:
        """Returns the numbers of a rank's rows, or of all (None)."""
        ranks = {n: self._limits.rank(row.sequence.slot) for n, row in self._entered.items()}
        return [number for number, own in ranks.items() if rank in (None, own)]

    def check_idle(self) -> None:
        """Raises AssertionError if a row is on its way."""
        if self._entered or self._rows_left or self.num_decoding:
            raise AssertionError(f"{len(self._entered)} rows never left the last layer")


def gathered(rows: Sequence[Entered], limits: Limits) -> ScheduledStep:
    """Returns the step that rows of one phase form which left the last layer together."""
    newest = max((row.step for row in rows), key=lambda step: step.launched_at)
    entered_at = min(row.step.launched_at for row in rows)
    ways = {row.step.way for row in rows}
    return ScheduledStep(
        newest.phase,
        np.stack([row.step.rows[row.at] for row in rows]),
        prompt_logprobs=any(row.step.prompt_logprobs for row in rows),
        model=newest.model,
        stop_layer=limits.num_layers,
        sequences=[row.sequence for row in rows],
        sampled=[row.step.sampled[row.at] for row in rows],
        parts=newest.parts,
        prefixes=[row.step.prefixes[row.at] for row in rows],
        way=ways.pop() if len(ways) == 1 else -1,
        launched_at=entered_at,
        started_at=entered_at,
    )
