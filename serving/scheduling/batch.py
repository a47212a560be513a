"""A step while the scheduler holds it: its rows, and the layer it has come to.

A batch is launched in parts of some layers. Between two parts rows may leave it (their request
ended or was evicted), and another batch that has come as far may join.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jmoe.packed_rows import EXEMPT, KV_LEN, NUM_COLUMNS, NUM_DELTA_COLUMNS, Q_LEN
from serving.plan import Phase, StepControl, StepPlan
from serving.request import Priority
from serving.scheduling.policy import BatchView
from serving.scheduling.sequence import SequenceState


class Chunk:
    """One sequence's share of a batch: a decode row, or a chunk of its prompt."""

    __slots__ = ("places", "row", "sampled", "sequence", "tokens")

    def __init__(
        self,
        sequence: SequenceState,
        row: np.ndarray,
        *,
        sampled: bool,
        tokens: Sequence[int] = (),
    ) -> None:
        """`sampled`: whether its token is used; of a prompt, whether it ends here."""
        self.sequence, self.row, self.sampled, self.tokens = sequence, row, sampled, tokens
        self.places = range(0)  # of the device's hidden rows, for its tokens


@dataclass(frozen=True)
class ScheduledStep:
    """Layers to launch, and the sequences that the plan's rows belong to."""

    batch: "Batch"
    plan: StepPlan
    sequences: list[SequenceState]
    sampled: list[bool]  # whether the row's token is used: it comes of the last layers only

    @property
    def is_first(self) -> bool:
        """Whether these are the batch's first layers."""
        return self.plan.first_layer == 0

    @property
    def is_last(self) -> bool:
        """Whether tokens come of these layers."""
        return self.plan.is_last

    def degrade_best_effort_first(self, threshold_percent: int) -> int:
        """The threshold of these layers, if all their visits were to keep `threshold_percent`.

        While best effort alone can give up what that asks for, latency-sensitive rows are exempt,
        and best effort keeps what is left: with N visits, L of them exempt, (t N - 100 L) / (N - L)
        percent of its own. Where that would be less than nothing, the threshold is everybody's.
        """
        rows, q_lens = self.plan.rows, self.plan.q_lens
        ls = np.array([s.priority is Priority.LATENCY_SENSITIVE for s in self.sequences])
        degradable = ~ls & (rows[:, EXEMPT] == 0)
        total, left = int(q_lens.sum()), int(q_lens[degradable].sum())
        kept = threshold_percent * total - 100 * (total - left)
        if not left or not ls.any() or kept < 0:
            return threshold_percent
        rows[ls, EXEMPT] = 1
        return -(-kept // left)

    def share_prompt_logprobs(self, values: Float[np.ndarray, "T"]) -> None:
        """Gives sequences the log-probabilities that came of their chunks.

        They go to a chunk's own positions: a sequence that was evicted computes its prompt again,
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


class Batch:
    """Chunks of one phase, of which layers `[0, next_layer)` are launched."""

    def __init__(
        self, phase: Phase, chunks: list[Chunk], deltas: list[tuple[int, int, int]]
    ) -> None:
        self.phase, self.chunks = phase, chunks
        self.next_layer = 0
        self.num_parks = 0
        self.control: StepControl | None = None  # of all its layers, from its first launch on
        self.joins: Batch | None = None  # a parked one, taken along when this has come as far
        self.extents: list[int] = []  # of hidden rows
        self._deltas = deltas
        for chunk in chunks:
            chunk.sequence.batch = self

    @property
    def has_ls(self) -> bool:
        """Whether a latency-sensitive request is in it."""
        return any(c.sequence.priority is Priority.LATENCY_SENSITIVE for c in self.chunks)

    @property
    def num_tokens(self) -> int:
        """Positions that it computes."""
        if self.phase is Phase.DECODE:
            return len(self.chunks)
        return sum(len(chunk.tokens) for chunk in self.chunks)

    def view(self, index: int, *, parked: bool) -> BatchView:
        """What a policy sees of it."""
        return BatchView(
            self.phase,
            self.next_layer,
            self.has_ls,
            len(self.chunks),
            self.num_parks,
            parked,
            index,
        )

    def place(self, extent: int, start: int) -> None:
        """Its tokens' rows wait in `extent`, which begins at hidden row `start`."""
        self.extents.append(extent)
        for chunk in self.chunks:
            chunk.places = range(start, start + len(chunk.tokens))
            start += len(chunk.tokens)

    def drop(self, sequence: SequenceState) -> None:
        """Takes a sequence out: its pages may be another's before the next layers run."""
        (chunk,) = (c for c in self.chunks if c.sequence is sequence)
        self.chunks.remove(chunk)
        self._deltas = [delta for delta in self._deltas if delta[0] != sequence.slot]
        sequence.num_sampled -= chunk.sampled
        sequence.batch = None

    def absorb(self, other: "Batch") -> None:
        """Takes over the rows of another that has come to the same layer."""
        assert (self.phase, self.next_layer) == (other.phase, other.next_layer)
        for chunk in other.chunks:
            chunk.sequence.batch = self
        self.chunks += other.chunks
        self.extents += other.extents
        self.num_parks = max(self.num_parks, other.num_parks)
        self.joins = None

    def take_layers(self, stop: int, num_layers: int) -> ScheduledStep:
        """The step that runs layers up to `stop`; after the last one, sequences are free again."""
        sequences = [chunk.sequence for chunk in self.chunks]
        prefill = self.phase is Phase.PREFILL
        plan = StepPlan(
            phase=self.phase,
            rows=np.array([c.row for c in self.chunks], np.int32).reshape(-1, NUM_COLUMNS),
            deltas=np.array(self._deltas, np.int32).reshape(-1, NUM_DELTA_COLUMNS),
            tokens=np.concatenate([np.asarray(c.tokens, np.int32) for c in self.chunks])
            if prefill
            else np.zeros(0, np.int32),
            prompt_logprobs=prefill
            and any(s.request.sampling.prompt_logprobs and not s.tokens for s in sequences),
            places=np.concatenate([np.asarray(c.places, np.int32) for c in self.chunks])
            if prefill
            else np.zeros(0, np.int32),
            first_layer=self.next_layer,
            stop_layer=stop,
            is_last=stop == num_layers,
        )
        self.next_layer, self._deltas = stop, []
        if plan.is_last:
            for sequence in sequences:
                sequence.batch = None
        sampled = [chunk.sampled and plan.is_last for chunk in self.chunks]
        return ScheduledStep(self, plan, sequences, sampled)
