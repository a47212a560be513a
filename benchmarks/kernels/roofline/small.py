"""Routing and the KV page write: little to move, much to wait for."""

from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.kernels.cases import Case, Count, count_kv_write
from benchmarks.kernels.problems import WAY
from benchmarks.kernels.roofline import assumptions as h200
from benchmarks.kernels.roofline import parts
from benchmarks.kernels.roofline.parts import Kernel, Prediction
from pallas_kernels.grouped_gemm import BLOCK_M
from pallas_kernels.routing import mosaic
from pallas_kernels.routing.op import max_blocks
from pallas_kernels.routing.parts import MAX_BLOCKS
from pallas_kernels.routing.values import Gating

ROWS = 64  # of a block of the routing kernel
INSTRUCTIONS = "instructions of one warpgroup"


def kv_write(case: Case) -> Prediction:
    """Predicts `kv_write`: a block a row, in waves of as many as fit at once."""
    shape, rows = case.shape, case.tokens
    count = count_kv_write(shape, rows)
    if shape.head_dim not in (64, 128, 256):
        return parts.by_reference(count)
    row_bytes = 2 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    resident = min(h200.BLOCKS_PER_SM, (228 << 10) // (row_bytes + 1024))
    waves = rows / (resident * h200.NUM_SMS)
    floor_us = h200.copy_us(count.bytes)
    # Of a block: a row in, its elements changed (some ten operations each), and out again.
    change_us = row_bytes / 2 * 10 / h200.FP32_PER_CLOCK / h200.CLOCK_GHZ / 1e3
    of_block_us = 2 * h200.TRIP_US + change_us
    steps = [(parts.LATENCY, waves * of_block_us)] if waves > 1 else []
    whole = -(-rows // (resident * h200.NUM_SMS))
    if waves > 1:
        last = (whole - waves) * h200.copy_us(resident * h200.NUM_SMS * 2 * row_bytes)
        steps.append((parts.TAIL, max(waves * of_block_us, floor_us) + min(last, of_block_us)))
    losses = parts.losses(floor_us, steps, trips=2)
    losses[parts.LATENCY] = losses.get(parts.LATENCY, 0.0) + change_us
    return Prediction(count, [Kernel("kv_write", floor_us, losses)])


def routing_bytes(case: Case) -> int:
    """Returns the bytes of the logits and of the op's results."""
    m, k, rows = case.shape.num_experts, case.shape.top_k, case.tokens
    logical = m + -(-m // WAY)
    sorted_rows = BLOCK_M * max_blocks(rows * k, m, BLOCK_M)
    visits = rows * k * (4 + 4 + 1 + 4 + 4)  # picks, plan, degraded, sorted rows, weights
    return 4 * rows * m + visits + 4 * sorted_rows + 4 * 4 * logical + m


def routing(case: Case) -> Prediction:
    """Predicts `routing`: one launch and some of XLA's, or XLA's alone where the kernel does not
    take the rows. A block takes more than 512 rows in turns of 64.
    """
    m, k, rows = case.shape.num_experts, case.shape.top_k, case.tokens
    logical = m + -(-m // WAY)
    count = Count(routing_bytes(case), 0)
    floor_us = h200.copy_us(count.bytes)
    turns = -(-rows // (ROWS * MAX_BLOCKS))
    blocks = -(-rows // (ROWS * turns))
    logits = jax.ShapeDtypeStruct((rows, m), jnp.float32)
    groups, slots = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (m, logical))
    supports = partial(mosaic.supports, gating=Gating(k, True), block_m=BLOCK_M)
    if not parts.taken(supports, logits, groups, slots):
        # The comparisons of visits with each other and with experts stay in registers or L2;
        # a stable sort of the visits goes over them a few times.
        launches = h200.ROUTE_REFERENCE_LAUNCHES
        losses = {
            parts.LAUNCHES: launches * h200.KERNEL_US,
            "sort of visits": h200.copy_us(8 * 2 * 4 * rows * k),
            parts.FILL: 2 * launches * h200.IDLE_TRIP_US,
        }
        return Prediction(count, [Kernel("XLA reference", floor_us, losses, launches)])
    each = instructions(m, k, logical) * h200.CYCLES_PER_INSTRUCTION / h200.CLOCK_GHZ / 1e3
    compute_us = turns * each
    # In, once a turn, and out; and twice, where blocks meet, out and in again.
    trips = 1 + turns + (4 if blocks > 1 else 0)
    kernel = Kernel("routing", floor_us, {INSTRUCTIONS: compute_us, **parts.fixed(trips)})
    rest = parts.small("results in other forms", h200.ROUTE_LAUNCHES)
    return Prediction(count, [kernel, rest])


def instructions(m: int, k: int, logical: int) -> float:
    """Estimates the instructions of a warp of the routing kernel: 64 rows by `m` experts in 128
    threads.

    Estimates by stage: picks are k rounds of four instructions an element; the order of experts
    and their groups are all pairs, twice; a pick's lookup is three an element; one-hot visits,
    ranks and starts are a few for each pick, row and logical expert.
    """
    elements = ROWS * m / 128
    chunks = -(-logical // ROWS)
    pairs = 2 * 4 * elements * -(-m // ROWS)
    one_hot = chunks * (ROWS * ROWS / 128) * 3 * k * 2
    starts = chunks * (ROWS * chunks * ROWS / 128) * 4
    return 4 * k * elements + pairs + 3 * k * elements + one_hot + starts
