"""Simulates the grouped GEMM's blocks on an H200: what a tile should cost on a given load.

Predictions, not measurements: they choose between tiles until a GPU is there to time them. The
roofline (`benchmarks.kernels.roofline.gemm`) says by name what is lost against the floor, from mean
costs; here blocks compete for memory and L2 item by item, which tells close tiles apart. Every
persistent block works off its items in the kernel's order. While it does one, it takes its share of
the bandwidth of memory and of L2, and needs at least the time of its products, of its share of
shared memory's ports, and of what it can load alone. A cluster counts as one block.

`python -m benchmarks.kernels.gemm_model` prints what prefill's tile takes in the time of decode's,
by mean rows an expert, and what a tile with two consumers takes in that of the plain one.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.kernels.cases import SKEWS
from benchmarks.kernels.inputs import choices
from benchmarks.kernels.roofline import assumptions as h200
from pallas_kernels.grouped_gemm import tiles
from pallas_kernels.grouped_gemm.tiles import LANES, GemmTile, Tile
from pallas_kernels.shapes import MODELS, Shape


@dataclass(frozen=True)
class Gpu:
    """Rates that the model takes for granted: the roofline's, which say where they come from."""

    blocks: int = h200.NUM_SMS
    clock: float = 1e9 * h200.CLOCK_GHZ
    memory: float = 1e12 * h200.COPY_TB_S  # bytes/s of a copy
    l2: float = h200.L2_BYTES_PER_CLOCK  # of a multiprocessor, all of them reading
    port: float = h200.PORT_BYTES_PER_CLOCK  # of a multiprocessor at most
    shared: float = h200.SMEM_BYTES_PER_CLOCK
    product: float = h200.FLOPS_PER_CLOCK  # of a multiprocessor
    special: float = h200.MUFU_PER_CLOCK  # exponentials and roots of a multiprocessor
    drain: float = h200.EPILOGUE_CYCLES  # from the last product's start to a result, and a store


class _Cost(NamedTuple):
    """Of one item of one block (or cluster)."""

    memory: float  # bytes
    l2: float  # bytes
    alone: float  # seconds


class Prediction(NamedTuple):
    """Of both products of a layer."""

    seconds: float
    share_of_copy: float  # the active experts' weights, against the copy bandwidth
    flop_s: float  # of rows that are there


def predict(shape: Shape, loads: Sequence[int], tile: Tile, gpu: Gpu | None = None) -> Prediction:
    """`loads` are the rows of each expert. Launches are not counted."""
    gpu = gpu or Gpu()
    d, f = shape.d_model, shape.d_ff
    products = ((tile.gate_up, d, f, True), (tile.down, f, d, False))
    seconds = 0.0
    for gemm, k, columns, joins in products:
        width = gemm.columns if joins else gemm.columns * gemm.parts
        items = _items(tile, gemm, loads, k, -(-columns // width), joins, gpu)
        seconds += _drain(list(items), gpu.blocks // tile.cluster, gpu)
    weights = 2 * shape.expert_elements * sum(load > 0 for load in loads)
    flops = 2 * shape.expert_elements * sum(loads)
    return Prediction(seconds, weights / seconds / gpu.memory, flops / seconds)


def _items(
    tile: Tile,
    gemm: GemmTile,
    loads: Sequence[int],
    k: int,
    num_columns: int,
    joins: bool,
    gpu: Gpu,
) -> Iterator[_Cost]:
    """In the kernel's order: the tiles of a group go through a column together."""
    weights = 2 * k * gemm.parts * gemm.columns
    for load in loads:
        tiles = [min(tile.block_t, load - at) for at in range(0, load, tile.block_t)]
        for at in range(0, len(tiles), tile.group):
            group = tiles[at : at + tile.group]
            for _ in range(num_columns):
                for rows in group:
                    widths = _widths(tile, rows)
                    own = 2 * k * sum(widths)
                    memory = weights / len(group) + 2 * k * rows / num_columns
                    clocks = max(_clocks(gemm, k, width, joins, gpu) for width in widths)
                    loaded = (weights + own) / tile.cluster / gpu.port  # what a block asks L2 for
                    alone = max(clocks, loaded) / gpu.clock
                    yield _Cost(memory, weights + own, alone)


def _widths(tile: Tile, rows: int) -> list[int]:
    """Returns the rows that each block of the cluster loads and multiplies."""
    half = -(-rows // tile.cluster // 8) * 8 if tile.cluster > 1 else rows
    shares = [max(0, min(rows - rank * half, half)) for rank in range(tile.cluster)]
    return [next(w for w in tile.widths if share <= w) for share in shares]


def _clocks(gemm: GemmTile, k: int, width: int, joins: bool, gpu: Gpu) -> float:
    """Of a block's products and the part of its epilogue that no product hides.

    An item costs what tensor cores need or what shared memory does: each 64 columns read their
    weights and the rows, and the loads of the next step are written beside them.
    """
    columns = gemm.parts * gemm.columns
    tensor = 2 * columns * width * k / gpu.product
    read = gemm.parts * gemm.consumers * (LANES + width) * 2 * k
    written = (columns + width) * 2 * k
    main = max(tensor, (read + written) / gpu.shared)
    # Two special functions a result of SwiGLU; without it, four instructions for two results, on
    # four schedulers of 32 lanes. Consumers that finish together share these units.
    results = LANES * width * (1 if joins else gemm.parts)
    epilogue = results * (2 / gpu.special if joins else 2 / 128)
    if not gemm.lead:
        return main + gpu.drain + gemm.consumers * epilogue
    hidden = gemm.lead * main * gemm.block_k / k / gemm.consumers
    return main + max(0.0, gpu.drain + epilogue - hidden)


def _drain(items: Sequence[_Cost], blocks: int, gpu: Gpu) -> float:
    """Seconds until the last block is through: block b has items b, b + blocks, ..."""
    cost = np.array(items, float).reshape(-1, 3)
    at = np.arange(blocks)
    left = np.ones(blocks)
    clock = 0.0
    while (active := at < len(cost)).any():
        memory, l2, alone = cost[at[active]].T
        rate = 1 / alone
        rate = np.minimum(rate, _fair(rate * memory, gpu.memory) / memory)
        rate = np.minimum(rate, _fair(rate * l2, gpu.l2 * gpu.blocks * gpu.clock) / l2)
        step = (left[active] / rate).min()
        clock += step
        left[active] -= rate * step
        done = active & (left < 1e-9)
        at[done] += blocks
        left[done] = 1.0
    return clock


def _fair(asked: np.ndarray, given: float) -> np.ndarray:
    """Returns the max-min fair shares of `given` for those who ask for `asked`."""
    if asked.sum() <= given:
        return asked
    order = np.sort(asked)
    rest = given - np.concatenate([[0], np.cumsum(order)[:-1]])
    level = rest / np.arange(len(order), 0, -1)
    cap = level[np.argmax(order > level)]
    return np.minimum(asked, cap)


SLOW_L2 = Gpu(l2=28.0)
"""What L2 may give where requests collide: no choice should hang on the difference."""
_ODD = (
    Shape("d 2048, f 704", 2048, 704, 64, 4, 16, 16, 128),
    Shape("d 2880, f 2880", 2880, 2880, 32, 4, 16, 16, 128),
)


def drawn(shape: Shape, tokens: int, skew: str, seed: int = 0) -> list[int]:
    """Returns the rows of each expert, as a benchmark draws them."""
    picks = choices(np.random.default_rng(seed), shape, tokens, skew)
    return np.bincount(picks.ravel(), minlength=shape.num_experts).tolist()


def ratio(shape: Shape, tokens: int, skew: str, tile: Tile, other: Tile, gpu: Gpu) -> float:
    """Returns the time of `tile` by that of `other`, mean of three draws."""
    times = []
    for seed in range(3):
        loads = drawn(shape, tokens, skew, seed)
        times.append([predict(shape, loads, t, gpu).seconds for t in (tile, other)])
    return float(np.mean([a / b for a, b in times]))


def _print_tables(models: Sequence[Shape], odd: Sequence[Shape]) -> None:
    print(f"{'prefill / decode':20s}{'mean':>6s}{'tokens':>8s}", *SKEWS, "(L2 at 40, 28)")
    for shape in models:
        for mean in (24, 32, 40, 48, 64):
            tokens = mean * shape.num_experts // shape.top_k
            both = tiles.prefill(), tiles.decode(128, 2)
            found = [ratio(shape, tokens, s, *both, g) for s in SKEWS for g in (Gpu(), SLOW_L2)]
            print(f"{shape.name:20s}{mean:6d}{tokens:8d}", *(f"{r:.3f}" for r in found))
    print("prefill / plain")
    for shape in odd:
        for tokens in (1024, 4096, 16384):
            both = tiles.prefill(), tiles.plain(tiles.prefill())
            found = [ratio(shape, tokens, SKEWS[1], *both, g) for g in (Gpu(), SLOW_L2)]
            print(f"{shape.name:26s}{tokens:8d}", *(f"{r:.3f}" for r in found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser("benchmarks.kernels.gemm_model")
    parser.add_argument("--dry-run", action="store_true", help="one model")
    args = parser.parse_args()
    _print_tables(*((MODELS[:1], ()) if args.dry_run else (MODELS, _ODD)))
