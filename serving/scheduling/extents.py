"""Hidden rows of prefill steps under way: each rank has room for a few steps."""

from collections.abc import Iterable, Mapping

from serving.plan import NUM_EXTENTS, Limits


class Extents:
    """Extents by rank, each free or one step's."""

    def __init__(self, limits: Limits) -> None:
        self._free = [list(range(NUM_EXTENTS)) for _ in range(limits.num_ranks)]

    @property
    def ranks(self) -> set[int]:
        """Those with one that is free."""
        return {rank for rank, free in enumerate(self._free) if free}

    def take(self, ranks: Iterable[int]) -> dict[int, int]:
        """One of each of these ranks. Raises IndexError where none is free."""
        return {rank: self._free[rank].pop() for rank in set(ranks)}

    def give_back(self, taken: Mapping[int, Iterable[int]]) -> None:
        """Extents of a step, by rank."""
        for rank, extents in taken.items():
            self._free[rank] += extents

    def check_idle(self) -> None:
        """Raises AssertionError unless all are free."""
        if lost := sum(NUM_EXTENTS - len(free) for free in self._free):
            raise AssertionError(f"{lost} extents leaked")
