"""Attention over pages: decode in two kernels, prefill in one."""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from benchmarks.kernels.cases import Case, Count, count_attention, count_expanded
from benchmarks.kernels.inputs import DTYPE
from benchmarks.kernels.roofline import assumptions as h200
from benchmarks.kernels.roofline import parts
from benchmarks.kernels.roofline.parts import Kernel, Prediction
from pallas_kernels.paged_attention import common
from pallas_kernels.paged_attention import mosaic as paged_kernel
from pallas_kernels.paged_attention.merge import grid_of
from pallas_kernels.paged_attention.tiles import LATENT_HEADS, LATENT_WARPGROUPS
from pallas_kernels.prefill_attention import expanded
from pallas_kernels.prefill_attention import mosaic as prefill_kernel
from pallas_kernels.prefill_attention.tiles import LANES, WARPGROUPS, choose, choose_expanded

SOFTMAX = "softmax"
MERGE = "merge of pieces"
SHARED_BYTES_PER_SM = 228 << 10  # of which the system takes 1 KB a block


def arrays(case: Case, page_size: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the shapes of queries, and of keys or values."""
    shape = case.shape
    pages = (1, 1, shape.kv_heads, page_size, shape.head_dim)
    return (
        jax.ShapeDtypeStruct((case.tokens, shape.heads, shape.head_dim), DTYPE),
        jax.ShapeDtypeStruct(pages, DTYPE),
    )


def decode(case: Case, page_size: int) -> Prediction:
    """Predicts `paged_attention`."""
    count = count_attention(case.shape, case.chunks(), window=case.window)
    q, pages = arrays(case, page_size)
    latent = case.shape.latent
    supports = partial(paged_kernel.supports, latent=latent)
    if not parts.taken(supports, q, pages, None if latent else pages):
        return parts.by_reference(count)
    plan = parts.small("plan of the step", h200.DECODE_PLAN_LAUNCHES)
    if latent:
        sizes = common.latent_sizes(q, pages, latent, None, None, case.window)
        assert sizes is not None
        return Prediction(
            count, [plan, _attend_to_latents(case, sizes, count), _merge(case, sizes)]
        )
    sizes = common.sizes_of(q, pages, None, None, case.window)
    assert sizes is not None
    note, planned = "", sizes.num_blocks // h200.NUM_SMS
    if _resident(sizes) < planned:
        note = f"shared memory holds {_resident(sizes)} of {planned} planned blocks"
    return Prediction(count, [plan, _attend(case, sizes, count), _merge(case, sizes)], note)


def _resident(sizes: common.Sizes) -> int:
    """Returns the blocks that a multiprocessor holds at once: as planned, or as shared memory
    allows.
    """
    tokens, head_dim = sizes.tile.tokens, sizes.head_dim
    # Queries and weights in bfloat16, a piece in float32, scratch of a maximum.
    queries = sizes.columns * (6 * head_dim + 2 * tokens + 128)
    per_block = queries + sizes.stages * 4 * tokens * head_dim + 1024
    return min(sizes.num_blocks // h200.NUM_SMS, SHARED_BYTES_PER_SM // per_block)


def _runs(case: Case, sizes: common.Sizes) -> tuple[int, int]:
    """Returns the number of tiles, and of blocks that share them out in equal runs."""
    total = sizes.segments * -(-_read(case, sizes) // sizes.tile.tokens)
    return total, min(max(1, total // sizes.tile.min_tiles), sizes.num_blocks)


def _read(case: Case, sizes: common.Sizes) -> int:
    """Returns the positions that a sequence is read from: over a window, from the copy on that
    brings its first one.
    """
    if not case.window:
        return case.context
    return case.context - max(0, case.context - case.window) // sizes.copy_rows * sizes.copy_rows


def _attend(case: Case, sizes: common.Sizes, count: Count) -> Kernel:
    shape, tile = case.shape, sizes.tile
    total, active = _runs(case, sizes)
    tile_bytes = 4 * tile.tokens * shape.head_dim
    floor_us = max(h200.copy_us(count.bytes), h200.product_us(count.flops))
    moved = total * tile_bytes + 4 * case.tokens * shape.heads * shape.head_dim
    at_once = _resident(sizes) * h200.NUM_SMS
    run_us = -(-total // active) * h200.TILE_CHAIN_CYCLES / h200.CLOCK_GHZ / 1e3
    in_flight_us = moved / (min(active, at_once) * sizes.stages * tile_bytes) * h200.TRIP_US
    mean_us = total / active * h200.TILE_CHAIN_CYCLES / h200.CLOCK_GHZ / 1e3
    streaming = max(h200.copy_us(moved), in_flight_us)
    # Memory is shared evenly until the shorter runs end; then a tile is left of the longer ones.
    longest = streaming * -(-total // active) / (total / active)
    waves = -(-active // at_once)
    steps = [
        (parts.PADDING, h200.copy_us(moved)),
        (parts.LATENCY, max(streaming, mean_us)),
        (parts.TAIL, max(min(longest, streaming + h200.TRIP_US), waves * run_us)),
    ]
    # One after the other: lengths, the page's id, the page; and the piece on its way out.
    return Kernel("paged_attention", floor_us, parts.losses(floor_us, steps, trips=4))


def _attend_to_latents(case: Case, sizes: common.Sizes, count: Count) -> Kernel:
    """Predicts the kernel over latents: a run's tiles come from memory once for all its blocks."""
    shape, tokens = case.shape, sizes.tile.tokens
    total, active = _runs(case, sizes)
    floor_us = max(h200.copy_us(count.bytes), h200.product_us(count.flops))
    tile_bytes = 2 * tokens * sizes.latent
    rows_bytes = 2 * case.tokens * shape.heads * (sizes.latent + sizes.head_dim)
    streaming = h200.copy_us(total * tile_bytes + rows_bytes)
    in_flight = active * sizes.stages * tile_bytes / h200.TRIP_US  # bytes a microsecond
    # Of 64 heads: scores, then half of the values for each warpgroup.
    products = sizes.latent // 16 * h200.wgmma_cycles(tokens)
    products += (
        tokens // 16 * LATENT_WARPGROUPS * h200.wgmma_cycles(sizes.head_dim // LATENT_WARPGROUPS)
    )
    exposed = LATENT_HEADS * tokens / h200.MUFU_PER_CLOCK + h200.SOFTMAX_CYCLES
    mean = total / active / h200.PRODUCT_GHZ / 1e3  # microseconds, if a tile took a cycle
    longest = -(-total // active) / (total / active)
    multiplied = max(streaming, mean * products)
    chained = max(multiplied, mean * (products + exposed))
    steps = [
        (parts.PADDING, streaming),
        (parts.TAIL, max(streaming, mean * products)),
        (SOFTMAX, chained),
        (parts.LATENCY, max(chained, total * tile_bytes / in_flight)),
        (parts.TAIL, chained * longest),
    ]
    return Kernel("latent_attention", floor_us, parts.losses(floor_us, steps, trips=4))


def pieces_of_cut_segments(case: Case, sizes: common.Sizes) -> np.ndarray:
    """Returns the pieces of each segment that several blocks share; others need no merge."""
    total, active = _runs(case, sizes)
    base, extra = divmod(total, active)
    block = np.arange(1, active)
    starts = block * base + np.minimum(block, extra)
    length = total // sizes.segments
    return np.unique(starts[starts % length != 0] // length, return_counts=True)[1] + 1


def _merge(case: Case, sizes: common.Sizes) -> Kernel:
    """Predicts the second kernel, which reads from L2 what the first one wrote."""
    pieces = pieces_of_cut_segments(case, sizes)
    piece_bytes = 4 * sizes.rows * sizes.head_dim
    grid = grid_of(sizes)
    at_once = h200.BLOCKS_PER_SM * h200.NUM_SMS
    busy = len(pieces) * grid.num_lines // grid.lines  # the others end at once
    # The line that says where pieces lie, then pieces, `width` at a time, then the results.
    steps = -(-int(pieces.max(initial=0)) // grid.width)
    trips = h200.IDLE_TRIP_US * (1 + -(-busy // at_once) * (steps + 1))
    losses = {
        MERGE: h200.copy_us(float(pieces.sum()) * piece_bytes) + trips,
        parts.LAUNCHES: h200.KERNEL_US,
    }
    return Kernel("paged_attention_merge", 0.0, losses)


# ---- Prefill ----


def prefill(case: Case, page_size: int) -> Prediction:
    """Predicts `prefill_attention`, which plans the step itself, as in the benchmark."""
    count = count_attention(case.shape, case.chunks(), window=case.window)
    q, pages = arrays(case, page_size)
    if case.shape.latent:
        return _of_latents(case, count, q, pages)
    if not parts.taken(partial(prefill_kernel.supports, scale=1.0), q, pages, pages):
        return parts.by_reference(count)
    plan = parts.small("plan of the step", h200.PREFILL_PLAN_LAUNCHES)
    return Prediction(count, [plan, _prefill(case, page_size)])


def steps_of_tiles(case: Case, page_size: int) -> np.ndarray:
    """Returns the steps over keys of each tile of rows; chunks start at multiples of eight rows
    here. Over a window, a tile's keys begin with the copy that brings its first row's first one.
    """
    shape = case.shape
    tile = choose(shape.heads // shape.kv_heads, shape.head_dim, case.window)
    align, found = min(page_size, tile.block_kv), []
    for rows, context in case.chunks():
        starts = np.arange(0, rows, tile.block_rows)
        last = np.minimum(starts + tile.block_rows, rows) - 1 + context - rows
        first = np.maximum(starts + context - rows + 1 - (case.window or context), 0)
        found.append((last - first // align * align) // tile.block_kv + 1)
    return np.concatenate(found)


def _prefill(case: Case, page_size: int) -> Kernel:
    shape, d = case.shape, case.shape.head_dim
    tile = choose(shape.heads // shape.kv_heads, d, case.window)
    packs = shape.heads // tile.pack
    steps = np.sort(np.repeat(steps_of_tiles(case, page_size), packs))[::-1]
    count = count_attention(shape, case.chunks(), window=case.window)

    # Cycles of a step: both products of a warpgroup, and what its softmax takes.
    scores = d / 16 * h200.wgmma_cycles(tile.block_kv)
    values = tile.block_kv / 16 * h200.wgmma_cycles(d, registers=True)
    softmax = _softmax_cycles(tile.block_kv, d)
    product = WARPGROUPS * (scores + values)
    # A warpgroup's next scores wait for its softmax; the other's products go on meanwhile.
    bound = max(product, scores + softmax, WARPGROUPS * LANES * tile.block_kv / h200.MUFU_PER_CLOCK)
    bound += h200.PREFILL_EXPOSED_CYCLES
    # Of an item: its first softmax and its results hide behind nothing of its own.
    finish = LANES * d * (1 / h200.CONVERT_PER_CLOCK + 4 / h200.SMEM_BYTES_PER_CLOCK)
    alone = softmax + finish + h200.EPILOGUE_CYCLES

    total = float(steps.sum())
    kv_bytes = count.bytes - 4 * d * shape.heads * case.tokens  # all but queries and results
    rounds = len(steps) / h200.NUM_SMS
    # Every round of items sees a part of all heads' keys, of which L2 has kept what fits.
    seen = max(0.0, rounds * total / len(steps) / steps[0] - 1)
    again = count.bytes + seen * max(0, kv_bytes - h200.L2_BYTES)
    l2_cycles = total * 4 * tile.block_kv * d / h200.L2_BYTES_PER_CLOCK / h200.NUM_SMS
    worker = _dealt(len(steps))
    busiest = np.bincount(worker, steps * bound + alone, h200.NUM_SMS).max()
    times = [
        h200.cycles_us(total * product / h200.NUM_SMS),
        max(h200.copy_us(again), h200.cycles_us(l2_cycles)),
        h200.cycles_us(total * bound / h200.NUM_SMS),
        h200.cycles_us((total * bound + len(steps) * alone) / h200.NUM_SMS),
        h200.cycles_us(busiest),
    ]
    return _in_tiles("prefill_attention", count, times)


def _of_latents(
    case: Case, absorbed: Count, q: jax.ShapeDtypeStruct, pages: jax.ShapeDtypeStruct
) -> Prediction:
    shape = case.shape
    q = jax.ShapeDtypeStruct((case.tokens, shape.heads, expanded.SIZE + expanded.ROPE), DTYPE)
    weights = jax.ShapeDtypeStruct((shape.latent, shape.heads * expanded.SIZE), DTYPE)
    if not parts.taken(expanded.supports, q, pages, (weights, weights)):
        return parts.by_reference(absorbed)
    plan = parts.small("plan of the step", h200.PREFILL_PLAN_LAUNCHES)
    return Prediction(count_expanded(shape, case.chunks()), [plan, _expanded(case)])


def _expanded(case: Case) -> Kernel:
    """Predicts the kernel that expands latents: an item is rows of a head, a turn the positions
    that are expanded at once.
    """
    shape, tile, d = case.shape, expanded.TILE, expanded.SIZE
    size = choose_expanded(case.tokens, shape.heads, h200.NUM_SMS)
    count = count_expanded(shape, case.chunks())
    made, steps, turns = [], [], []  # of each item: tiles expanded, steps of rows, turns of rows
    for rows, context in case.chunks():
        for first in range(0, rows, size.rows):
            lasts = np.arange(first, min(rows, first + size.rows), tile.block_rows)
            seen = np.minimum(lasts + tile.block_rows, rows) + context - rows
            made.append(-(-int(seen.max()) // tile.block_kv))
            steps.append(int((-(-seen // tile.block_kv)).sum()))
            turns.append(int((-(-seen // size.keys)).sum()))
    made, steps, turns = (np.repeat(each, shape.heads) for each in (made, steps, turns))

    # Both warpgroups make half a tile's keys, then of its values.
    product = h200.wgmma_cycles(d)
    making = WARPGROUPS * 2 * shape.latent / 16 * product
    scores = (d + expanded.ROPE) / 16 * product
    values = tile.block_kv / 16 * h200.wgmma_cycles(d, registers=True)
    softmax = _softmax_cycles(tile.block_kv, d)
    # A warpgroup's products and its softmax follow each other; the other's go on meanwhile.
    attending = WARPGROUPS * (scores + values)
    bound = max(attending, scores + values + softmax) + h200.PREFILL_EXPOSED_CYCLES
    stored = WARPGROUPS * 2 * LANES * d / h200.CONVERT_PER_CLOCK + h200.EPILOGUE_CYCLES
    kept = 2 * tile.block_rows * (d + 2) * 4 / h200.L2_BYTES_PER_CLOCK

    products = made * making + steps * attending
    chained = made * making + steps * bound
    whole = chained + made * stored + turns * kept
    busiest = np.bincount(_dealt(len(whole)), whole, h200.NUM_SMS).max()
    # Latents come twice and weights once for a tile of keys; keys and values for each step.
    l2_bytes = made * 4 * shape.latent * (tile.block_kv + d) + steps * 2 * tile.block_kv * (
        2 * d + expanded.ROPE
    )
    l2_cycles = float(l2_bytes.sum()) / h200.L2_BYTES_PER_CLOCK / h200.NUM_SMS
    times = [
        h200.cycles_us(products.sum() / h200.NUM_SMS),
        h200.cycles_us(l2_cycles),
        h200.cycles_us(chained.sum() / h200.NUM_SMS),
        h200.cycles_us(whole.sum() / h200.NUM_SMS),
        h200.cycles_us(busiest),
    ]
    return _in_tiles("expanded_attention", count, times)


def _softmax_cycles(keys: int, size: int) -> float:
    """Returns what a warpgroup's step over so many keys takes beside its products."""
    of_rows = h200.SOFTMAX_CYCLES + LANES * size / h200.FP32_PER_CLOCK
    return of_rows + LANES * keys * (1 / h200.MUFU_PER_CLOCK + 4 / h200.FP32_PER_CLOCK)


def _in_tiles(name: str, count: Count, times: Sequence[float]) -> Kernel:
    """Predicts a kernel over tiles from times of ever more complete models."""
    floor_us = max(h200.copy_us(count.bytes), h200.product_us(count.flops))
    names = parts.PADDING, parts.REREADS, SOFTMAX, parts.EPILOGUE, parts.TAIL
    losses = parts.losses(floor_us, zip(names, times, strict=True), trips=3)
    return Kernel(name, floor_us, losses)


def _dealt(num_items: int) -> np.ndarray:
    """Returns the block of each item; items are dealt out back and forth."""
    item = np.arange(num_items)
    place, turn = item % h200.NUM_SMS, item // h200.NUM_SMS
    return np.where(turn % 2 == 0, place, h200.NUM_SMS - 1 - place)
