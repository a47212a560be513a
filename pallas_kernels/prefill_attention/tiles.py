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
    key_stages: int  # steps whose keys shared memory holds
    value_stages: int  # at least 2: a step's are waited for before those of the one before go
    pack: int  # a power of two, at most 8: TMA tiles are 8 rows high

    @property
    def stages(self) -> int:
        """Stages of the ring of keys and of that of values."""
        return self.key_stages + self.value_stages

    @property
    def rows(self) -> int:
        """Positions that a warpgroup takes."""
        return LANES // self.pack

    @property
    def block_rows(self) -> int:
        """Positions that a thread block takes."""
        return WARPGROUPS * self.rows


def choose(group: int, head_dim: int, window: int = 0) -> Tile:
    """Returns the tile for `group` query heads a kv head, over a window or (0) all positions.

    With head size 256 the result alone takes 128 registers a thread, and a step of 128 keys would
    neither leave registers for two of its products at once nor fit into shared memory twice. Over a
    window eight heads side by side would spill there, too.

    Values get more stages than keys because a warpgroup keeps them longer: keys until it has their
    scores, values of the step before until it has this step's weights, too.
    """
    pack = math.gcd(group, 8)
    if head_dim > 128:
        return Tile(64, key_stages=2, value_stages=2, pack=min(pack, 4) if window else pack)
    if head_dim > 64:
        return Tile(128, key_stages=2, value_stages=3, pack=pack)
    return Tile(128, key_stages=3, value_stages=4, pack=pack)


@dataclass(frozen=True)
class Expanded:
    """What a thread block takes of latents: rows attend to positions after these were expanded."""

    rows: int  # a multiple of those that its warpgroups take at once
    keys: int  # positions that are expanded at once, a multiple of a step's


def choose_expanded(num_rows: int, heads: int, num_blocks: int) -> Expanded:
    """Returns as many rows as leave an item, which is of one head, for almost every block: what is
    expanded serves them all. More than 1,024 would save a seventh at most.
    """
    step = WARPGROUPS * LANES
    rows = step
    most = min(1024, num_rows)
    while rows < most and -(-num_rows // (2 * rows)) * heads >= num_blocks * 0.9:
        rows *= 2
    return Expanded(rows, keys=512)
