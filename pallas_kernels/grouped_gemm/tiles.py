"""Tile choices of the grouped GEMM."""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from pallas_kernels.backend import SHARED_BYTES

BLOCK_M = 8
"""Rows a block of the XLA reference. Measured on a CPU: an expert's blocks share one read of its
weights, so taller blocks mostly add padding. The Mosaic kernels need segments that start at
multiples of 8."""

LANES = 64
"""Weight columns a consumer warpgroup multiplies at once: wgmma's M."""

_MAX_STAGES = 12

_PREFILL_MEAN = 32
"""Rows an expert above which prefill's tile is taken."""


@dataclass(frozen=True)
class GemmTile:
    """Tile of one of the two products, in elements."""

    block_k: int  # summed over in one pipeline stage
    parts: int  # accumulators of `LANES` weight columns a consumer warpgroup holds
    consumers: int  # warpgroups that multiply; one more loads
    stages: int = 2  # of the pipeline
    lead: int = 0  # stages the first consumer is ahead, so that epilogues do not coincide

    @property
    def columns(self) -> int:
        """Weight columns of one part, over all consumers."""
        return LANES * self.consumers


@dataclass(frozen=True)
class Tile:
    """How the op is cut: row tiles are common to both products."""

    widths: tuple[int, ...]  # rows a block multiplies, wgmma's N: the first that holds the tile's
    cluster: int  # blocks that share a tile's weights, each with its part of the rows
    group: int  # row tiles of one expert that go through its columns together
    gate_up: GemmTile
    down: GemmTile
    visit_dtype: jnp.dtype  # of the rows between `down` and the combine

    @property
    def block_t(self) -> int:
        """Rows of a tile, over the cluster."""
        return self.widths[-1] * self.cluster


def _fill(width: int, gemm: GemmTile, out_bytes: int, weight_bytes: float = 2.0) -> GemmTile:
    """Returns `gemm` with as many stages as shared memory holds beside the staged results."""
    columns = gemm.parts * gemm.columns
    stage_bytes = gemm.block_k * (2 * width + weight_bytes * columns)
    stages = (SHARED_BYTES - gemm.consumers * width * LANES * out_bytes) // stage_bytes
    return replace(gemm, stages=min(_MAX_STAGES, int(stages)))


def decode(width: int, consumers: int) -> Tile:
    """Returns decode's tile: weights are what is moved. One consumer's narrow columns balance few
    experts; two consumers' wider ones read an expert's rows half as often.
    """
    widths = tuple(w for w in (8, 16, 32, 64, 128) if w <= width)
    gate_up = GemmTile(64, 2, consumers)
    down = GemmTile(128, 1, 1) if width <= 64 and consumers == 1 else gate_up
    gate_up, down = _fill(width, gate_up, 2), _fill(width, down, 4)
    return Tile(widths, 1, 16, gate_up, down, jnp.dtype(jnp.float32))


def prefill() -> Tile:
    """Returns prefill's tile: two blocks of 128 rows by 256 columns share weights; alone, each
    would ask L2 for more than it gives. Visits are bfloat16: they would take an eighth of the
    products' time as float32.

    One consumer stores its results while the other multiplies: a lead of one stage of the four
    leaves two for what is on its way.
    """
    gemm = _fill(128, GemmTile(64, 2, 2, lead=1), 2)
    return Tile((32, 64, 96, 128), 2, 8, gemm, gemm, jnp.dtype(jnp.bfloat16))


def quantized(width: int, cluster: int) -> Tile:
    """Returns the tile of quantized weights: two consumers share the work of making bfloat16 of a
    stage's weights.
    """
    widths = tuple(w for w in (8, 16, 32, 64, 128) if w <= width)
    gate_up = _fill(width, GemmTile(128, 2, 2), 2, weight_bytes=1.0)
    down = _fill(width, GemmTile(128, 1, 2), 2, weight_bytes=1.0)
    return Tile(widths, cluster, 16, gate_up, down, jnp.dtype(jnp.bfloat16))


def packed(width: int, cluster: int) -> Tile:
    """Returns the tile of weights in four bits: as `quantized`, of stages that divide every
    multiple of 64. A weight has at most five bytes of scale and zero point for 32 of it.
    """
    tile, weight_bytes = quantized(width, cluster), 1 / 2 + 5 / 32
    gate_up = _fill(width, GemmTile(64, 2, 2), 2, weight_bytes)
    down = _fill(width, GemmTile(64, 1, 2), 2, weight_bytes)
    return replace(tile, gate_up=gate_up, down=down)


def choose(
    num_rows: int,
    top_k: int,
    num_experts: int,
    d_model: int,
    d_ff: int,
    weight_bits: int = 16,
) -> Tile:
    """Returns the tile for a step of `num_rows` rows with `top_k` visits over `num_experts`
    experts.

    No expert has more rows than there are, so up to 128 its weights are read exactly once. Past
    that some experts have more than 128 of them well before the mean has: from a mean of
    `_PREFILL_MEAN` on, clusters that share weights move less through L2 than decode's tiles.
    """
    visits = num_rows * top_k
    mean = visits / max(1, min(visits, num_experts))
    width = next((w for w in (8, 16, 32, 64) if num_rows <= w), 128)
    if weight_bits < 16:
        return {8: quantized, 4: packed}[weight_bits](width, 2 if mean > 64 else 1)
    if num_rows > 128 and mean > _PREFILL_MEAN:
        tile = prefill()
    else:
        tile = decode(width, 1 if mean <= 24 else 2)
    return tile if fits(tile, d_model, d_ff) else plain(tile)


def fits(tile: Tile, d_model: int, d_ff: int) -> bool:
    """Returns whether a model's sizes hold the tile's columns and are multiples of its stages.

    The last columns of an expert may overlap: the model's need not be multiples of the tile's.
    """
    return (
        d_ff >= tile.gate_up.columns
        and d_model >= tile.down.parts * tile.down.columns
        and d_model % tile.gate_up.block_k == 0
        and d_ff % tile.down.block_k == 0
    )


def plain(tile: Tile) -> Tile:
    """Returns `tile` with columns and stages that fit every multiple of 64."""
    width = tile.widths[-1]
    gate_up, down = _fill(width, GemmTile(64, 2, 1), 2), _fill(width, GemmTile(64, 1, 1), 4)
    return replace(tile, gate_up=gate_up, down=down)
