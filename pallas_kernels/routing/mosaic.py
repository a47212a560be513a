"""Mosaic GPU kernel of a layer's whole routing, for Hopper (sm_90a): one launch.

The XLA reference is some 25 small kernels, and in a decode step nearly all of their time is that of
launches. Here one warpgroup is a block and holds 64 rows; the blocks of a step are one cluster, and
a decode step of up to 64 rows is a single block. The floor is latency: one trip to memory and back
for the logits, a few thousand instructions of one warpgroup, and one trip out.

- Gate: logits stay in registers, a row in four lanes. `top_k` rounds of row maximum, then the
  lowest id among those that equal it. What was picked becomes -inf, below any logit, and so marks
  the picks for the count of visits.
- Plan: experts that come before one in the order (count, then id, pinned ones first) are those
  with a larger key, for keys are distinct; all pairs are compared in registers. Sums are int32.
- Lookups by expert id are sums over a row of which one term is not zero: there is no gather here.
- Dispatch: a visit's rank among its expert's is a strictly lower triangle of ones times the rows'
  one-hot visits, by wgmma in bfloat16. It is exact: factors are 0 and 1, sums at most 64.
- Vectors go through shared memory where they change from a row's layout to a column's. Rows that
  would pass the end of an array are cut off by TMA, which also fills up what is read with zeros.
- A copy of bytes in a row takes whole sixteens: the last one to three experts are stored singly.
- Blocks meet twice, to add up visits before the plan and rows after it. What they exchange goes
  through memory by TMA, past the L1 caches.
- Sorted rows are first all written as gaps; then each visit writes its token, scalar by scalar,
  a quarter of them a warp.

Lane semantics, unlike the other ops' kernels: every layout is named here, while inference of them
finds none for a program of this size, and tiles what TMA then refuses to fill (60 logits a row).
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.layouts import (
    I32,
    ROWS,
    WGMMA,
    by_column,
    by_row,
    iota,
)
from pallas_kernels.routing import stages
from pallas_kernels.routing.op import Dispatch, Plan
from pallas_kernels.routing.parts import (
    DEGRADABLE,
    EXEMPT,
    GAP,
    MAX_BLOCKS,
    MAX_EXPERTS,
    MAX_PICKS,
    PADDING,
    Block,
    Given,
    Out,
    Sizes,
    Smem,
    by_expert,
    scratch,
)


def supports(logits: Array, groups: Array, slots: Array, top_k: int, block_m: int) -> bool:
    """Whether the kernel takes these: float32 logits, up to 512 rows, experts in fours."""
    (num_rows, columns), num_experts = logits.shape, groups.shape[0]
    return (
        logits.dtype == jnp.float32
        and 0 < num_rows <= ROWS * MAX_BLOCKS
        and columns % 4 == 0
        and num_experts % 4 == 0
        and num_experts <= slots.shape[0] <= MAX_EXPERTS
        and top_k <= MAX_PICKS
        and block_m % 4 == 0
    )


def route(
    logits: Float[Array, "T columns"],
    *,
    top_k: int,
    normalize: bool,
    scoring: str,
    groups: Int[Array, "m"],
    slots: Int[Array, "E"],
    threshold_percent: Int[Array, ""],
    strategy: Int[Array, ""],
    valid: Bool[Array, "T"],
    exempt: Bool[Array, "T"],
    block_m: int,
    num_blocks: int,
) -> tuple[Int[Array, "T K"], Plan, Dispatch]:
    """See `op.route`; `supports` says for what. `num_blocks` is the bound on blocks of rows."""
    num_rows = logits.shape[0]
    sizes = Sizes(
        num_rows,
        top_k,
        groups.shape[0],
        slots.shape[0],
        block_m,
        num_blocks * block_m,
        normalize,
        scoring,
    )
    results = _call(sizes)(
        logits, groups, valid, exempt, threshold_percent.reshape(1), strategy.reshape(1)
    )
    out = Out(*results[: len(Out._fields)])
    ids, expert_ids = out.ids[:, :top_k], out.expert_ids[:, :top_k]
    plan = Plan(expert_ids, valid[:, None] & (expert_ids != ids), out.s1 != 0)
    return ids, plan, _dispatch(sizes, out, slots)


def _dispatch(sizes: Sizes, out: Out, slots: Array) -> Dispatch:
    """The op's form of what the kernel wrote. The slots of blocks are for the XLA grouped GEMM
    only, so they are no work of the kernel's: XLA drops them where nothing reads them.
    """
    block = jnp.arange(sizes.sorted_rows // sizes.block_m, dtype=I32)
    row = jnp.minimum(block, jnp.maximum(out.num_blocks - 1, 0)) * sizes.block_m
    past = row[:, None] - out.expert_start[None, :]
    mine = (past >= 0) & (past < out.expert_rows[None, :])
    slot = jnp.sum(jnp.where(mine, slots[None, :], 0), axis=1, dtype=I32)
    return Dispatch(
        row_token=out.row_token,
        block_slot=jnp.where(out.num_blocks > 0, slot, slots[-1]),
        num_blocks=out.num_blocks[0],
        visit_row=out.visit_row[:, : sizes.picks],
        visit_weight=out.visit_weight[:, : sizes.picks],
        expert_rows=out.expert_rows,
        expert_start=out.expert_start,
        expert_slot=slots,
    )


def _call(sizes: Sizes):
    rows, blocks = sizes.rows, sizes.blocks

    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, I32)

    visits = i32(rows, sizes.width)
    results = Out(
        visits,
        visits,
        visits,
        jax.ShapeDtypeStruct(visits.shape, jnp.float32),
        i32(sizes.experts),
        i32(sizes.logical),
        i32(sizes.logical),
        i32(1),
        i32(sizes.sorted_rows),
    )
    exchanged = [i32(blocks, sizes.padded), i32(blocks, sizes.places)] if blocks > 1 else []

    def routing(*refs, **scratch):
        given, written = refs[: len(Given._fields)], refs[len(Given._fields) :]
        out, shared = written[: len(results)], written[len(results) :]
        block = lax.axis_index("block")
        at = Block(sizes, block, Given(*given), Out(*out), shared, Smem(**scratch))
        _route(at)

    return plgpu.kernel(
        routing,
        out_type=[*results, *exchanged],
        cluster=(blocks,),
        cluster_names=("block",),
        scratch_types=scratch(sizes),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def _route(at: Block) -> None:
    smem = at.smem
    _load(at)
    _kinds(at)
    _prepare(at)
    plgpu.barrier_wait(smem.full)
    kind = by_row(smem.kind)
    weights = stages.gate(at, kind)
    plgpu.wait_smem_to_gmem(1)  # all gaps are marked before blocks meet; picks are on their way
    used = pl.ds(0, at.sizes.experts)
    visits, _ = _cluster_exchange(
        at, 0, lambda ref: by_expert(ref.at[used]), smem.visits, smem.all_visits
    )
    stages.plan(at, visits)
    expert_ids = stages.look_up(at, kind)
    kept = stages.merge_repeats(at, expert_ids, weights)
    stages.one_hot(at, expert_ids)
    rows, before = _cluster_exchange(at, 1, by_column, smem.rows, smem.all_rows)
    stages.starts(at, rows)
    stages.ranks(at, expert_ids, kept, before)
    _store(at)
    _fill(at)
    plgpu.wait_smem_to_gmem(0)


def _load(at: Block) -> None:
    """Starts the copies of what the block reads."""
    given, smem = at.given, at.smem
    logits = given.logits.at[at.own, pl.ds(0, at.sizes.experts)]
    plgpu.copy_gmem_to_smem(logits, smem.logits, smem.full)
    plgpu.copy_gmem_to_smem(given.groups.at[at.whole(at.sizes.padded)], smem.groups, smem.full)


def _kinds(at: Block) -> None:
    """What each row is, into shared memory. TMA knows no booleans: a warp reads them one by one."""
    given, last = at.given, at.sizes.rows - 1

    def one_warp(warp):
        rows = [warp * 16 + i for i in range(16)]
        own = [at.index * ROWS + row for row in rows]
        read = [(given.valid[lax.min(row, last)], given.exempt[lax.min(row, last)]) for row in own]
        for row, at_row, (valid, exempt) in zip(rows, own, read, strict=True):
            kind = jnp.where(exempt, EXEMPT, DEGRADABLE)
            at.smem.kind[row] = jnp.where(valid & (at_row <= last), kind, PADDING)

    plgpu.warp_map(one_warp)
    plgpu.commit_smem()


def _prepare(at: Block) -> None:
    """Constants in shared memory, and gaps for sorted rows, while the copies are under way."""
    smem, sizes = at.smem, at.sizes
    strided = plgpu.Layout.WG_STRIDED((GAP,), 2)
    smem.gap[...] = plgpu.layout_cast(jnp.full((GAP,), sizes.rows, I32), strided)
    plgpu.commit_smem()
    chunks = -(-sizes.sorted_rows // GAP)

    @pl.loop(0, -(-chunks // sizes.blocks))
    def _(i):
        chunk = i * sizes.blocks + at.index

        @pl.when(chunk < chunks)
        def _():
            plgpu.copy_smem_to_gmem(smem.gap, at.out.row_token.at[pl.ds(chunk * GAP, GAP)])

    square = (ROWS, ROWS)
    earlier = iota(square, 1, WGMMA) < iota(square, 0, WGMMA)
    smem.earlier[...] = jnp.where(earlier, 1.0, 0.0).astype(jnp.bfloat16)
    smem.ones.T[...] = plgpu.layout_cast(jnp.full((ROWS, 8), 1.0, jnp.bfloat16), WGMMA)


def _cluster_exchange(at: Block, which: int, load, own, every):
    """Sums of what every block has in `own`: over all blocks, and over those before this one."""
    blocks = at.sizes.blocks
    if blocks == 1:
        return load(own), None
    smem, shared = at.smem, at.shared[which]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(own, shared.at[at.index])
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(smem.met.at[which])
    plgpu.barrier_wait(smem.met.at[which])
    plgpu.copy_gmem_to_smem(shared, every, smem.read.at[which])
    plgpu.barrier_wait(smem.read.at[which])

    def add(i, sums):
        total, before = sums
        part = load(every.at[i])
        return total + part, before + part * jnp.where(at.index > i, 1, 0)

    part = load(every.at[0])
    return lax.fori_loop(1, blocks, add, (part, part * jnp.where(at.index > 0, 1, 0)))


def _store(at: Block) -> None:
    """Starts the copies of what is left to be written."""
    smem, out = at.smem, at.out
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.visit_row, out.visit_row.at[at.own])

    @pl.when(at.index == 0)
    def _():
        vectors = [(smem.s1, out.s1), (smem.rows, out.expert_rows), (smem.start, out.expert_start)]
        for vector, into in vectors:
            fours = into.shape[0] // 4 * 4  # a copy of so many bytes in a row is of whole sixteens
            if fours:
                own = pl.ds(0, fours)
                plgpu.copy_smem_to_gmem(vector.at[own], into.at[own])
            for last in range(fours, into.shape[0]):
                into[last] = vector[last]


def _fill(at: Block) -> None:
    """Writes the token of each sorted row that has one. Loads are started sixteen at a time."""
    sizes, smem = at.sizes, at.smem

    def one_warp(warp):
        @pl.loop(0, sizes.picks)
        def _(k):
            tokens = [warp * 16 + i for i in range(16)]
            places = [smem.visit_row[token, k] for token in tokens]
            for token, place in zip(tokens, places, strict=True):

                @pl.when(place < sizes.sorted_rows)
                def _(token=token, place=place):
                    at.out.row_token[place] = at.index * ROWS + token

    plgpu.warp_map(one_warp)
