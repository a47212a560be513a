"""A step in the scheduler: its rows, and the next layer to launch.

All rows belong to one model, except in a mixed decode step, which is always launched whole. Other
batches may be launched in parts of some layers each. Between two parts, rows may leave (their
request ended or was evicted), and a batch that has reached the same layer may join.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from jmoe.packed_rows import KV_LEN, NUM_DELTA_COLUMNS, Q_LEN
from jmoe.shape_rows import NUM_SHAPE_COLUMNS
from serving.plan import (
    Limits,
    Phase,
    Shapes,
    StepControl,
    StepPlan,
    spare_latency_sensitive,
)
from serving.request import Priority
from serving.scheduling.policy import BE, BatchView
from serving.scheduling.prefixes import Prefix
from serving.scheduling.sequence import SequenceState


@dataclass
class ScheduledStep:
    """Layers to launch, and the sequences that the plan's rows belong to. Rows that complete singly
    form one again as they leave (`singles.gathered`), with the batch of the last to enter.
    """

    batch: "Batch"
    plan: StepPlan
    sequences: list[SequenceState]
    sampled: list[bool]  # whether the row's token is used; all False before the last layers
    prefixes: list[Prefix]  # the sequences' prefixes when these layers were planned
    parks: "Batch | None" = None  # the step that is parked for these layers
    num_joined: int = 0  # rows of a parked step that joined
    control: StepControl | None = None  # brownout that these layers were launched with
    way: int = -1  # way of united experts in force; -1: several, or unknown

    @property
    def is_first(self) -> bool:
        """Whether these are the batch's first layers."""
        return self.plan.first_layer == 0

    @property
    def is_last(self) -> bool:
        """Whether these layers include the last one, which yields tokens."""
        return self.plan.is_last

    @property
    def waits(self) -> bool:
        """Whether sampling waits until the previous step's tokens have been read."""
        return self.plan.shapes is not None and self.plan.shapes.waits

    @property
    def has_ls(self) -> bool:
        """Whether it contains a latency-sensitive request."""
        return any(s.priority is Priority.LATENCY_SENSITIVE for s in self.sequences)

    @property
    def exempt_share(self) -> float:
        """The share of its positions that are exempt from brownout at launch."""
        return self.plan.num_exempt / int(self.plan.q_lens.sum())

    @property
    def refused_share(self) -> float:
        """The share of its positions whose requests refuse brownout."""
        q_lens = self.plan.q_lens
        refused = [not s.request.allow_brownout for s in self.sequences]
        return int(q_lens[refused].sum()) / int(q_lens.sum())

    @property
    def mean_threshold_percent(self) -> float:
        """The mean threshold of its positions at launch; exempt ones count as 100."""
        if self.control is None or not self.control.strategy:
            return 100.0
        return 100 - (100 - self.control.threshold_percent) * (1 - self.exempt_share)

    def degrade_best_effort_first(self, threshold_percent: int) -> int:
        """Returns the threshold to launch these layers with so that, of all their visits,
        `threshold_percent` are kept exact, and best effort is degraded first
        (`spare_latency_sensitive`).
        """
        if not self.batch.has_best_effort:
            return threshold_percent
        urgent = np.array([s.priority is Priority.LATENCY_SENSITIVE for s in self.sequences])
        return spare_latency_sensitive(self.plan.rows, urgent, threshold_percent)

    def share_prompt_logprobs(self, values: Float[np.ndarray, "T"]) -> None:
        """Stores the prompt log-probabilities that the sequences' chunks yielded.

        They are stored by position, since an evicted sequence computes its prompt again, and may
        have had a chunk in flight.
        """
        at = 0
        for row, sequence in zip(self.plan.rows, self.sequences, strict=True):
            q_len = int(row[Q_LEN])
            start = int(row[KV_LEN]) - q_len
            wanted = min(q_len, len(sequence.prompt) - 1 - start)
            if sequence.request.sampling.prompt_logprobs and not sequence.tokens:
                sequence.prompt_logprobs[start : start + wanted] = values[at : at + wanted].tolist()
            at += q_len


class Batch:
    """Rows of one phase, whose layers `[0, next_layer)` have been launched.

    Row b is at index b of `sequences`, `rows` and `sampled`, and in a prefill step also of `tokens`
    and `places`.
    """

    def __init__(
        self,
        phase: Phase,
        sequences: list[SequenceState],
        rows: Int[np.ndarray, "B C"],
        sampled: list[bool],
        deltas: list[tuple[int, int, int]],
        tokens: list[list[int]] | None = None,
    ) -> None:
        """`sampled`: whether each row's token is used; in prefill, whether the chunk ends the
        prompt.
        """
        self.phase, self.sequences, self.rows, self.sampled = phase, sequences, rows, sampled
        self.tokens = tokens or []
        self.places: list[range] = []  # hidden rows on the device
        self.next_layer = 0
        self.at_once = 0  # layers that are launched at once, of every part alike
        self.num_parks = 0
        self.control: StepControl | None = None  # of all its layers, set at launch
        self.joins: Batch | None = None  # a parked batch that joins when this one reaches its layer
        self._staging: dict[int, list[int]] = {}  # regions of hidden rows, by rank
        self.needed: np.ndarray | None = None  # sum over parts read so far (`StepResult.needed`)
        self.has_best_effort = any(s.request.priority is BE for s in sequences)
        self.model = sequences[0].request.model  # in a mixed step, the first row's
        self.models = frozenset(s.request.model for s in sequences)
        self._deltas = deltas
        for sequence in sequences:
            sequence.batch = self

    @property
    def has_ls(self) -> bool:
        """Whether it contains a latency-sensitive request."""
        return any(s.priority is Priority.LATENCY_SENSITIVE for s in self.sequences)

    @property
    def num_tokens(self) -> int:
        """The number of positions that it computes."""
        return sum(map(len, self.tokens)) if self.phase is Phase.PREFILL else len(self.rows)

    def view(self, index: int, *, parked: bool) -> BatchView:
        """Returns the batch as a policy sees it."""
        return BatchView(
            self.phase,
            self.next_layer,
            self.has_ls,
            len(self.rows),
            self.num_parks,
            parked,
            index,
        )

    def place(self, regions: Mapping[int, int], limits: Limits) -> None:
        """Assigns hidden rows to its tokens, in one region on each rank that has its sequences."""
        self._staging = {rank: [region] for rank, region in regions.items()}
        start = {rank: limits.staging_row(region, rank) for rank, region in regions.items()}
        for sequence, tokens in zip(self.sequences, self.tokens, strict=True):
            rank = limits.rank(sequence.slot)
            self.places.append(range(start[rank], start[rank] + len(tokens)))
            start[rank] += len(tokens)

    def release_staging(self, rank: int | None = None) -> dict[int, list[int]]:
        """Releases and returns the batch's regions of one rank, or of all (None)."""
        given = {r: e for r, e in self._staging.items() if rank in (None, r)}
        self._staging = {r: e for r, e in self._staging.items() if r not in given}
        return given

    def on_ranks(self, limits: Limits) -> list[tuple[int, int]]:
        """Returns its numbers of sequences and positions on each rank."""
        found = [(0, 0)] * limits.num_ranks
        for number, sequence in enumerate(self.sequences):
            rank = limits.rank(sequence.slot)
            seqs, tokens = found[rank]
            found[rank] = seqs + 1, tokens + (len(self.tokens[number]) if self.tokens else 1)
        return found

    def size(self, limits: Limits, *others: "Batch") -> int:
        """Returns the size of the program that it and `others` would need together.

        That is the number of positions on the fullest rank, or the largest prefill program for
        prompt log-probabilities.
        """
        batches = (self, *others)
        if limits.prefill_buckets and any(batch.scores_prompts for batch in batches):
            return limits.prefill_buckets[-1]
        ranks = zip(*(batch.on_ranks(limits) for batch in batches), strict=True)
        return max(sum(tokens for _, tokens in rank) for rank in ranks)

    @property
    def scores_prompts(self) -> bool:
        """Whether a prompt's log-probabilities are computed."""
        return self.phase is Phase.PREFILL and any(
            s.request.sampling.prompt_logprobs and not s.tokens for s in self.sequences
        )

    def has_room_for(self, other: "Batch", limits: Limits) -> bool:
        """Returns whether `other` can join this prefill step at no extra cost (the same token
        bucket).
        """
        own, others = self.on_ranks(limits), other.on_ranks(limits)
        bucket = limits.token_bucket(max(tokens for _, tokens in own))
        return all(
            seqs + more_seqs <= limits.max_prefill_seqs and tokens + more_tokens <= bucket
            for (seqs, tokens), (more_seqs, more_tokens) in zip(own, others, strict=True)
        )

    def drop(self, sequence: SequenceState) -> None:
        """Removes a sequence, since its pages may belong to another before the next layers run."""
        at = self.sequences.index(sequence)
        sequence.num_sampled -= self.sampled[at]
        sequence.batch = None
        sequence.unread = False
        sequence.forget_missed()
        self.rows = np.delete(self.rows, at, axis=0)
        for column in (self.sequences, self.sampled, self.tokens, self.places):
            if column:
                del column[at]
        self._deltas = [delta for delta in self._deltas if delta[0] != sequence.slot]

    def absorb(self, other: "Batch") -> None:
        """Takes over the rows of a batch that has reached the same layer."""
        assert (self.phase, self.models) == (other.phase, other.models)
        assert self.next_layer == other.next_layer
        for sequence in other.sequences:
            sequence.batch = self
        self.rows = np.concatenate([self.rows, other.rows])
        self.sequences += other.sequences
        self.sampled += other.sampled
        self.tokens += other.tokens
        self.places += other.places
        for rank, regions in other.release_staging().items():
            self._staging.setdefault(rank, []).extend(regions)
        self.has_best_effort |= other.has_best_effort
        self.num_parks = max(self.num_parks, other.num_parks)
        self.joins = None

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
        prefill = self.phase is Phase.PREFILL
        seats = [s.seat() for s in drawn if prefill and s.shape is not None]
        return Shapes(rows, seats, waits=any(s.matcher is not None for s in drawn))

    def _row_models(self) -> Int[np.ndarray, "B"]:
        mixed = self.sequences if len(self.models) > 1 else ()
        return np.array([s.request.model for s in mixed], np.int32)

    def take_layers(self, stop: int, num_layers: int) -> ScheduledStep:
        """Returns the step that runs layers up to `stop`; the last one frees the sequences."""
        sequences, is_last = self.sequences, stop == num_layers
        plan = StepPlan(
            phase=self.phase,
            rows=self.rows.copy(),  # rows may be made exempt for these layers only
            deltas=np.array(self._deltas, np.int32).reshape(-1, NUM_DELTA_COLUMNS),
            tokens=joined(self.tokens),
            prompt_logprobs=self.scores_prompts,
            places=joined(self.places),
            model=self.model,
            row_models=self._row_models(),
            first_layer=self.next_layer,
            stop_layer=stop,
            is_last=is_last,
            shapes=self._shapes() if is_last else None,
        )
        self.next_layer, self._deltas = stop, []
        prefixes = [s.prefix for s in sequences]
        if is_last:
            for sequence in sequences:
                sequence.batch = None
            return ScheduledStep(self, plan, sequences, self.sampled, prefixes)
        return ScheduledStep(self, plan, list(sequences), [False] * len(sequences), prefixes)


def joined(parts: Sequence[Sequence[int]]) -> Int[np.ndarray, "T"]:
    """Returns the tokens or places of all rows, one after another."""
    if not parts:
        return np.zeros(0, np.int32)
    return np.concatenate([np.asarray(part, np.int32) for part in parts])
