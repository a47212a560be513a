"""Tile sizes of the prefill attention kernel."""

import math
from dataclasses import dataclass

LANES = 64
"""Rows of a warpgroup's wgmma: query rows times the heads that are packed beside them."""
WARPGROUPS = 2
"""Warpgroups that multiply; one more loads."""


@dataclass(frozen=True)
class Tile:
    """What one thread block works on at a time.

    `pack` query heads that share a kv head lie side by side on a warpgroup's 64 rows, so that it
    takes 64 / pack positions of each: short chunks waste less of it.
    """

    block_kv: int  # keys and values a step, a multiple of 64
    stages: int  # steps in flight, of keys and of values each
    pack: int  # a power of two, at most 8: TMA tiles are 8 rows high

    @property
    def rows(self) -> int:
        """Positions a warpgroup takes."""
        return LANES // self.pack

    @property
    def block_rows(self) -> int:
        """Positions a thread block takes."""
        return WARPGROUPS * self.rows


def choose(group: int, head_dim: int) -> Tile:
    """The tile for `group` query heads a kv head.

    With head size 256 the result alone takes 128 registers a thread, and a step of 128 keys would
    neither leave registers for two of its products at once nor fit into shared memory twice.
    """
    return Tile(block_kv=64 if head_dim > 128 else 128, stages=2, pack=math.gcd(group, 8))
