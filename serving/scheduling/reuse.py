"""Prefix reuse: prefill starts after the part of a prompt whose KV pages are cached.

Only full pages are shared, and never the last position of a context, which must be computed to
produce a token. So no sequence writes to a page that another one reads, and no page is copied. Of
layers with a window, those pages have to be there that the first new row reads.
"""

import math
from collections.abc import Callable, Container, Sequence
from itertools import chain, islice

import numpy as np

from jmoe.packed_rows import KV_LEN
from serving.plan import Limits, Phase
from serving.scheduling.exact import ExactRows
from serving.scheduling.places import Places
from serving.scheduling.policy import BE, LS
from serving.scheduling.prefixes import (
    EXACT,
    NOBODYS,
    Brownout,
    Found,
    KnownPages,
    Names,
    PagePool,
    Prefix,
)
from serving.scheduling.sequence import SequenceState
from serving.scheduling.step import ScheduledStep


class Reuse:
    """Looks up cached prefixes for sequences, and caches the pages that sequences fill."""

    def __init__(
        self,
        limits: Limits,
        places: Places,
        accepted: Callable[[SequenceState], Brownout] | None,
    ) -> None:
        """`accepted` returns how much brownout a sequence accepts in reused pages; None turns
        reuse off.
        """
        self.is_on = accepted is not None
        self.num_asked = 0  # positions of prompts that were looked up
        self.num_reused = 0  # ... that were taken from the cache instead of computed
        self._limits, self._places = limits, places
        self._accepted = accepted or (lambda sequence: EXACT)
        # By rank and name: who will fill a page by prefill; removed once its results are read.
        self._coming: list[dict[bytes, SequenceState]] = [{} for _ in range(limits.num_ranks)]

    def found(self, sequence: SequenceState, rank: int) -> Found:
        """Returns the cached pages of a rank with which a waiting sequence would start."""
        count = self._num_wanted(sequence)
        if not count:
            return self._places.nothing
        accepted, groups = self._accepted(sequence), self._places.pages(rank)
        num_gone, num_kept = groups[0].num_gone, groups[0].num_kept
        for pages in groups[1:]:
            num_gone, num_kept = num_gone + pages.num_gone, num_kept + pages.num_kept
        state = num_gone, accepted, count
        seen = sequence.prefix.seen.get(rank)
        if seen is None or seen.state != state:
            seen = sequence.prefix.seen[rank] = KnownPages(state, -1, [], self._places.nothing)
        if (
            seen.num_kept != num_kept
        ):  # earlier results stay valid; pages added since may extend them
            names = self._names(sequence, count)
            if not self._limits.windows[0]:
                seen.whole += groups[0].find(islice(names, len(seen.whole), count), accepted)
                count = len(seen.whole)
            seen.found = Found(count, [seen.whole])
            if self._limits.windows != (0,):
                seen.found = self._found_within(names[:count], groups, accepted)
            seen.num_kept = num_kept
        return seen.found

    def _found_within(
        self, names: Sequence[bytes], groups: Sequence[PagePool], accepted: Brownout
    ) -> Found:
        """Returns the pages of the longest prefix of `names` behind which a row has all that it
        reads, in each group.
        """
        windows, size = self._limits.windows, self._limits.page_size
        each = [[pages.get(name, accepted) for name in names] for pages in groups]
        gaps, most, firsts = [0] * len(windows), 0, [0] * len(windows)
        for count, there in enumerate(zip(*each, strict=False), 1):
            gaps = [gap if kept else count for gap, kept in zip(gaps, there, strict=True)]
            reads = [self._limits.first_block(at, count * size) for at in range(len(windows))]
            if all(gap <= first for gap, first in zip(gaps, reads, strict=True)):
                most, firsts = count, reads
        kept = [own[first:most] for own, first in zip(each, firsts, strict=True)]
        return Found(most, [[one for one in own if one is not None] for own in kept])

    def most(self, sequence: SequenceState) -> int:
        """Returns the most cached positions that a waiting sequence has on any rank."""
        if not self.is_on:
            return 0
        ranks = range(self._limits.num_ranks)
        most = max(self.found(sequence, rank).num_blocks for rank in ranks)
        return self._limits.page_size * most

    def awaits(self, sequence: SequenceState, rank: int) -> bool:
        """Returns whether a waiting sequence should start only when a running one of that rank has
        computed its next page, so that it need not compute the same.

        Latency-sensitive sequences never wait for best effort, nor anybody for pages that are
        expected to have more brownout than it accepts; and after having waited in vain, for no
        other sequence.
        """
        coming = self._coming[rank]
        count = self._num_wanted(sequence) if coming else 0
        num_found = self.found(sequence, rank).num_blocks if count else 0
        if num_found >= count:
            return False
        names = self._names(sequence, count)
        owner, prefix = coming.get(names[num_found]), sequence.prefix
        if owner is None or (sequence.priority is LS and owner.request.priority is BE):
            return False
        expected = owner.prefix.brownout.and_then(self._accepted(owner))
        if not expected.is_within(self._accepted(sequence)):
            return False
        if prefix.awaits is None or prefix.awaits[0] is not owner.prefix:
            if prefix.awaits is not None and num_found <= prefix.awaits[1]:
                return False
            prefix.awaits = owner.prefix, num_found
        return True

    def begin(self, sequence: SequenceState, found: Found) -> None:
        """Records that a sequence was admitted with `found` as its first pages."""
        prefix = sequence.prefix
        if self._shares(sequence):
            count = len(sequence.context) // self._limits.page_size
            prefix.coming = range(found.num_blocks, count)
            coming = self._coming[self._limits.rank(sequence.slot)]
            for name in self._coming_names(sequence):
                coming.setdefault(name, sequence)
        prefix.num_named = found.num_blocks
        for kept in chain(*found.kept):
            prefix.brownout = prefix.brownout.and_then(kept.brownout)
        if prefix.brownout != EXACT:
            sequence.note_threshold(Phase.PREFILL, prefix.brownout.percent)
        sequence.num_computed = found.num_blocks * self._limits.page_size
        if not prefix.num_admitted:
            sequence.cached_tokens = sequence.num_computed
            self.num_reused += sequence.num_computed
            looked_up = self._shares(sequence) and not sequence.scores_prompt
            self.num_asked += len(sequence.prompt) * looked_up
        prefix.num_admitted += 1

    def read(
        self,
        step: ScheduledStep,
        degraded: Sequence[int],
        by: Brownout,
        again: Container[int],
        exact: ExactRows,
    ) -> None:
        """Updates every sequence of a step whose results were read.

        `degraded` counts degraded visits by row, and `by` is the brownout of the step. Rows in
        `again` will be computed once more; rows that `exact` tracks met a substitute expert.
        """
        if not self.is_on:
            return
        ends = step.rows[:, KV_LEN] if step.is_last else np.zeros(len(step.sequences), np.int32)
        full = (ends // self._limits.page_size).tolist()
        for at, (sequence, prefix) in enumerate(zip(step.sequences, step.prefixes, strict=True)):
            if full[at] <= prefix.num_named and not degraded[at] and not prefix.coming:
                continue  # no further page is full
            if sequence.done or at in again or (not step.is_last and exact.concerns(sequence)):
                continue
            suffered = NOBODYS if sequence.request.model in exact.models else by
            self.computed(sequence, prefix, full[at], suffered if degraded[at] else EXACT)

    def computed(self, sequence: SequenceState, prefix: Prefix, count: int, by: Brownout) -> None:
        """Caches the first `count` pages, which are full now.

        `by` is the brownout of the positions just written, and `prefix` the sequence's record when
        they were launched.
        """
        prefix.brownout = prefix.brownout.and_then(by)
        if sequence.prefix is prefix and prefix.coming and count > prefix.coming.start:
            self._came(sequence, count)
        if count <= prefix.num_named or prefix.brownout == NOBODYS or not self._shares(sequence):
            return
        if sequence.prefix is not prefix or sequence.slot < 0:
            return  # its pages were taken away meanwhile
        names = self._names(sequence, count)
        groups = self._places.pages(self._limits.rank(sequence.slot))
        for pages, held in zip(groups, sequence.pages, strict=True):
            for block in range(prefix.num_named, count):
                if block in held:  # not behind a window, where they were short
                    pages.keep(names[block], held[block], prefix.brownout)
        prefix.num_named = count

    def num_settled(self, sequence: SequenceState) -> float:
        """Returns how many of a running sequence's first blocks are cached, or never will be."""
        if not self._shares(sequence) or sequence.prefix.brownout == NOBODYS:
            return math.inf
        return sequence.prefix.num_named

    def end(self, sequence: SequenceState) -> None:
        """Records that a running sequence loses its slot: its pages are no longer awaited."""
        self._came(sequence, sequence.prefix.coming.stop)

    def check_idle(self) -> None:
        """Raises AssertionError if pages are awaited of which none will come."""
        if any(self._coming):
            raise AssertionError(f"{sum(map(len, self._coming))} pages are awaited for ever")

    def _came(self, sequence: SequenceState, count: int) -> None:
        """Records that the first `count` pages of a running sequence are no longer awaited."""
        coming, prefix = self._coming[self._limits.rank(sequence.slot)], sequence.prefix
        before = prefix.coming
        for name in self._coming_names(sequence)[: count - before.start]:
            if coming.get(name) is sequence:
                del coming[name]
        prefix.coming = range(min(count, before.stop), before.stop)

    def _coming_names(self, sequence: SequenceState) -> list[bytes]:
        of = sequence.prefix.coming
        return self._names(sequence, of.stop)[of.start : of.stop]

    def _shares(self, sequence: SequenceState) -> bool:
        return self.is_on and sequence.request.reuse_prefix

    def _num_wanted(self, sequence: SequenceState) -> int:
        """Returns how many pages a lookup may return: none for a request that asks for log
        probabilities of its prompt, since every position has to be computed for them.
        """
        if sequence.scores_prompt or not self._shares(sequence):
            return 0
        return (len(sequence.prompt) + len(sequence.tokens) - 1) // self._limits.page_size

    def _names(self, sequence: SequenceState, count: int) -> list[bytes]:
        """Returns the names of at least the first `count` pages of a sequence."""
        prefix, request = sequence.prefix, sequence.request
        if prefix.names is None:
            prefix.names = Names(request.model, request.salt, self._limits.page_size)
        return prefix.names.upto(count, lambda: sequence.context)
