"""Allocates regions of hidden rows to prefill steps; each rank has a few."""

from collections.abc import Iterable, Mapping

from serving.plan import NUM_STAGING_REGIONS, Limits


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
