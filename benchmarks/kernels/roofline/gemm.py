"""The grouped GEMM: two products over the experts' weights, and what XLA does around them."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from benchmarks.kernels.cases import WEIGHT_BYTES, Case, count_moe_mlp, weight_bits
from benchmarks.kernels.inputs import choices
from benchmarks.kernels.roofline import assumptions as h200
from benchmarks.kernels.roofline import parts
from benchmarks.kernels.roofline.parts import Kernel, Prediction
from benchmarks.kernels.shapes import Shape
from pallas_kernels.grouped_gemm import BLOCK_M
from pallas_kernels.grouped_gemm.tiles import LANES, GemmTile, Tile, choose
from pallas_kernels.routing.op import max_blocks

ACTIVATIONS = "rows in and out of memory"
DEQUANTIZE = "dequantization"
SEED = 0  # of the draw


@lru_cache(maxsize=256)
def rows_of_experts(shape: Shape, tokens: int, skew: str) -> tuple[int, ...]:
    """Returns the rows of each expert in one draw of the benchmark's router, always
    the same one.
    """
    ids = choices(np.random.default_rng(SEED), shape, tokens, skew)
    return tuple(np.bincount(ids.ravel(), minlength=shape.num_experts).tolist())


class Product(NamedTuple):
    """One of the two products of a case: [rows, k] by [k, columns] of each expert."""

    name: str
    tile: Tile
    gemm: GemmTile
    rows: tuple[int, ...]  # of each expert
    k: int
    columns: int
    out_columns: int
    out_bytes: int  # of an element
    weight_bytes: float  # of an element

    @property
    def workers(self) -> int:
        """Clusters of blocks, each at work on one item."""
        return h200.NUM_SMS // self.tile.cluster

    @property
    def num_columns(self) -> int:
        """Items of one row tile."""
        return -(-self.columns // (self.gemm.parts * self.gemm.columns))

    @property
    def matrix_bytes(self) -> float:
        """Weights of one expert."""
        return self.k * self.columns * self.weight_bytes

    def groups(self) -> list[list[int]]:
        """Returns the rows of each tile, in groups of tiles that go through an expert's columns
        together.
        """
        groups = []
        for rows in self.rows:
            starts = range(0, rows, self.tile.block_t)
            tiles = [min(self.tile.block_t, rows - start) for start in starts]
            size = self.tile.group
            groups += [tiles[i : i + size] for i in range(0, len(tiles), size)]
        return groups

    def items(self) -> np.ndarray:
        """Returns the rows of every item's tile, in the order in which workers take them."""
        parts = [np.tile(group, self.num_columns) for group in self.groups()]
        return np.concatenate(parts) if parts else np.zeros(0, int)

    def width(self, rows: int) -> int:
        """Returns the rows that a block multiplies for a tile of `rows`."""
        half = -(-rows // self.tile.cluster)
        half += -half % 8
        return next((w for w in self.tile.widths if w >= half), self.tile.widths[-1])

    # ---- Cycles of a multiprocessor, of one item ----

    def multiply(self, rows: int) -> float:
        """Returns the tensor cores' cycles, with the padding of rows to a width and of narrow
        products.
        """
        products = self.k / 16 * self.gemm.parts * self.gemm.consumers
        return products * h200.wgmma_cycles(self.width(rows), self.weight_bytes < 2)

    def dequantize(self) -> float:
        """Returns the cycles that an item's weights take: two conversions and a product each. In
        four bits two share a register: a byte is widened for them, a shift or mask, a mask, a
        difference and a product.
        """
        each = 2 / h200.CONVERT_PER_CLOCK + 1 / h200.FP32_PER_CLOCK
        if self.weight_bytes < 1:
            each = (0.5 + 0.5 + 0.5) / h200.INT32_PER_CLOCK + (0.5 + 0.5) / h200.FP32_PER_CLOCK
        return self.k * self.gemm.parts * self.gemm.columns * each

    def read(self, rows: int, blocks: int) -> float:
        """Returns the bytes of an item for so many blocks of a cluster: it reads weights once for
        all of them, each block its own rows.
        """
        weights = self.gemm.parts * self.gemm.columns * self.weight_bytes
        return self.k * (weights + 2 * blocks * self.width(rows))

    def finish(self, rows: int) -> float:
        """Returns the cycles of the epilogue that no product hides. With a lead a consumer's
        results are stored while the other multiplies, as long as the stages between them last.
        """
        joins = self.out_columns < self.columns
        per_item = self.gemm.columns * (1 if joins else self.gemm.parts)
        swiglu = 2 / h200.MUFU_PER_CLOCK + 8 / h200.FP32_PER_CLOCK
        each = (swiglu if joins else 0) + 1 / h200.CONVERT_PER_CLOCK
        each += 2 * self.out_bytes / h200.SMEM_BYTES_PER_CLOCK  # in and, by TMA, out
        results = per_item * self.width(rows) * each
        if not self.gemm.lead:
            return results + h200.EPILOGUE_CYCLES
        ahead = self.gemm.lead * self.gemm.block_k / self.k * self.multiply(rows)
        hidden = ahead / self.gemm.consumers
        return max(0.0, results / self.gemm.consumers + h200.EPILOGUE_CYCLES - hidden)

    # ---- The whole product ----

    def streamed_us(self, num_bytes: float, num_items: int) -> float:
        """Returns the memory's time, where the last items have too few workers to keep it busy."""
        if not num_items:
            return 0.0
        each, rest = num_bytes / num_items, num_items % self.workers
        at_once = self.tile.cluster * h200.PORT_BYTES_PER_CLOCK * h200.CLOCK_GHZ * 1e3
        last = max(h200.copy_us(rest * each), each / at_once if rest else 0.0)
        return h200.copy_us((num_items - rest) * each) + last

    def kernel(self) -> Kernel:
        """Returns the prediction: from the floor up, one loss after the other."""
        total, active = sum(self.rows), sum(rows > 0 for rows in self.rows)
        rows, item = np.unique(self.items(), return_inverse=True)

        def by_item(cost: Callable[[int], float]) -> np.ndarray:
            return np.array([cost(int(r)) for r in rows])[item]

        def mean_us(cycles: np.ndarray) -> float:
            return h200.cycles_us(float(np.sum(cycles)) / self.workers)

        weights = active * self.matrix_bytes
        in_bytes, out_bytes = 2 * total * self.k, total * self.out_columns * self.out_bytes
        moved = out_bytes + (in_bytes if in_bytes > h200.L2_BYTES / 2 else 0)
        again = len(self.groups()) * self.matrix_bytes + moved
        from_l2 = by_item(lambda rows: self.read(rows, self.tile.cluster))
        l2_us = h200.cycles_us(float(np.sum(from_l2)) / h200.L2_BYTES_PER_CLOCK / h200.NUM_SMS)
        floor_us = max(h200.copy_us(weights), h200.product_us(2 * total * self.k * self.columns))
        multiply = by_item(self.multiply)
        # Into the multiprocessor, which has one of the blocks.
        load = by_item(lambda rows: self.read(rows, 1) / h200.PORT_BYTES_PER_CLOCK)
        local = np.maximum(multiply, load)
        steps = [
            (ACTIVATIONS, h200.copy_us(weights + moved)),
            (parts.PADDING, mean_us(multiply)),
            (parts.REREADS, max(h200.copy_us(again), l2_us, mean_us(local))),
        ]
        if self.weight_bytes < 2:
            alone = self.dequantize()
            # One warpgroup converts while the other multiplies; each does both by itself.
            local = np.maximum(local, alone) + np.minimum(local, alone) / self.gemm.consumers
            steps.append((DEQUANTIZE, mean_us(local)))
        local = local + by_item(self.finish)
        steps.append((parts.EPILOGUE, mean_us(local)))
        busiest = np.bincount(np.arange(len(local)) % self.workers, local, self.workers).max()
        steps.append(
            (parts.TAIL, max(h200.cycles_us(float(busiest)), self.streamed_us(again, len(local))))
        )
        return Kernel(self.name, floor_us, parts.losses(floor_us, steps))


def products(case: Case, shape: Shape, weight_bytes: float) -> list[Product]:
    """Returns both products of a case, with the tile that the op would choose."""
    rows = rows_of_experts(shape, case.tokens, case.skew or "uniform")
    sizes = shape.num_experts, shape.d_model, shape.d_ff
    tile = choose(case.tokens, shape.top_k, *sizes, weight_bits(weight_bytes))
    d, f = shape.d_model, shape.d_ff
    return [
        Product("grouped_gemm_gate_up", tile, tile.gate_up, rows, d, 2 * f, f, 2, weight_bytes),
        Product(
            "grouped_gemm_down", tile, tile.down, rows, f, d, d, tile.visit_dtype.itemsize,
            weight_bytes,
        ),
    ]  # fmt: skip


def predict(case: Case) -> Prediction:
    """Predicts a grouped GEMM, in any number format."""
    shape, tokens, weight_bytes = case.shape, case.tokens, WEIGHT_BYTES[case.op]
    rows = rows_of_experts(shape, tokens, case.skew or "uniform")
    active = sum(r > 0 for r in rows)
    count = count_moe_mlp(shape, active, sum(rows), weight_bytes)
    unit = 128 if weight_bytes == 1 else LANES
    if shape.d_model % unit or shape.d_ff % unit:
        return parts.by_reference(count)
    up, down = products(case, shape, weight_bytes)
    sorted_rows = BLOCK_M * max_blocks(tokens * shape.top_k, shape.num_experts, BLOCK_M)
    visits = tokens * shape.top_k * shape.d_model * down.out_bytes
    gathered = 2 * shape.d_model * (sorted_rows + up.tile.block_t + tokens)
    combined = 4 * tokens * shape.d_model + (visits if visits > h200.L2_BYTES / 2 else 0)
    return Prediction(
        count,
        [
            parts.small("tile map", h200.TILE_MAP_LAUNCHES),
            parts.outside("gather", gathered),
            up.kernel(),
            down.kernel(),
            parts.outside("combine", combined),
        ],
    )
