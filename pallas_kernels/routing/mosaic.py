"""Mosaic GPU kernel of a layer's whole routing, for Hopper (sm_90a): one launch.

The XLA reference is some 25 small kernels, and in a decode step nearly all of their time is that of
launches. Here one warpgroup is a block and holds 64 rows; the blocks of a step are one cluster, and
a decode step of up to 64 rows is a single block. The floor is latency: one trip to memory and back
for the logits, a few thousand instructions of one warpgroup, and one trip out. Of more than 512
rows a block has several times 64, one after the other (`Block.each_turn`): their picks stay in
shared memory, and what is one-hot is made again when visits are placed.

- Gate: logits stay in registers, a row in four lanes. `top_k` rounds of row maximum, then the
  lowest id among those that equal it. What was picked becomes -inf, below any logit, and so marks
  the picks for the count of visits. With a bias, scores take the logits' place, and a warp reads
  the picks' logits again, one by one; groups of experts are apart in registers, and in one that is
  not among a row's best each logit becomes the lowest there is. Sparsemixer's weights are sums over
  what a round has left.
- Plan: experts that come before one in the order (count, then id, pinned ones first) are those
  with a larger key, for keys are distinct; all pairs are compared in registers. Sums are int32.
- Lookups by expert id are sums over a row of which one term is not zero: there is no gather here.
- Dispatch: a visit's rank among its expert's is a strictly lower triangle of ones times the rows'
  one-hot visits, by wgmma in bfloat16. It is exact: factors are 0 and 1, sums at most 64.
- Vectors go through shared memory where they change from a row's layout to a column's. Rows that
  would pass the end of an array are cut off by TMA, which also fills up what is read with zeros.
- A copy of bytes in a row takes whole sixteens: the last one to three experts are stored singly.
- Blocks exchange twice, to add up visits before the plan and rows after it: each writes its part
  to memory by TMA, and reads it back into the shared memory of all of them (`_exchange`).
- Sorted rows are first all written as gaps; then, once all blocks have, each visit writes its
  token, scalar by scalar, a quarter of them a warp. So are the rows of the grouped GEMM's tile
  map, which XLA would make two kernels of.
- Tables of all layers are given whole, with the layer: cutting a row out would be a launch.

Lane semantics, unlike the other ops' kernels: every layout is named here, while inference of them
finds none for a program of this size, and tiles what TMA then refuses to fill (60 logits a row).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.layouts import (
    BY_ROW,
    I32,
    ROWS,
    WGMMA,
    by_row,
    iota,
)
from pallas_kernels.routing import stages
from pallas_kernels.routing.op import Dispatch, TableRow, row_length, row_of
from pallas_kernels.routing.parts import (
    BY_EXPERT,
    DEGRADABLE,
    EXEMPT,
    FEW_EXPERTS,
    FEW_PICKS,
    FEW_TURNS,
    GAP,
    MANY_EXPERTS,
    MAX_GROUPS,
    MAX_LOGICAL,
    MAX_PICKS,
    MAX_ROUTED,
    MAX_ROUTED_IN_TURNS,
    MAX_SMEM,
    MAX_TURNS,
    PADDING,
    Block,
    Given,
    Out,
    Sizes,
    Smem,
    by_expert,
    scratch,
    smem_bytes,
    whole_fours,
)
from pallas_kernels.routing.tile_map import COUNT, END, HEAD, ROW, SIZE, SLOT, RowTiles, TileMap
from pallas_kernels.routing.values import Gating, Plan


def supports(
    logits: Array,
    groups: Array | TableRow,
    slots: Array | TableRow,
    gating: Gating,
    block_m: int,
    bias: Array | TableRow | None = None,
) -> bool:
    """Returns whether the kernel takes these: float32 logits; up to 4,096 rows of 64 routed
    experts, 2,048 of 128, 512 of 256, in fours; 512 logical experts; 8 picks, up to 512 rows of 128
    experts or more 16, if by logits and not sparsemixer; up to 8 groups of a multiple of four
    experts; as far as what a block keeps fits in shared memory.
    """
    num_rows, columns = logits.shape
    num_experts, num_logical = row_length(groups), row_length(slots)
    biased, grouping, top_k = bias is not None, gating.grouping, gating.top_k
    sizes = Sizes(num_rows, gating, num_experts, num_logical, block_m, 0, None, False, biased)
    plain = not biased and grouping is None and gating.scoring != "sparsemixer"
    return (
        logits.dtype == jnp.float32
        and (bias is None or _dtype(bias) == jnp.float32)
        and (grouping is None or num_experts % (4 * grouping.count) == 0)
        and (grouping is None or grouping.count <= MAX_GROUPS)
        and num_rows > 0
        and sizes.turns <= (MAX_TURNS if num_experts <= FEW_EXPERTS else FEW_TURNS)
        and smem_bytes(sizes) <= MAX_SMEM
        and columns % 4 == 0
        and num_experts % 4 == 0
        and num_experts <= min(num_logical, MAX_ROUTED)
        and (sizes.turns == 1 or (num_experts <= MAX_ROUTED_IN_TURNS and top_k <= FEW_PICKS))
        and num_logical <= MAX_LOGICAL
        and top_k <= (MAX_PICKS if plain and num_experts >= MANY_EXPERTS else FEW_PICKS)
        and block_m % 4 == 0
    )


def _dtype(row: Array | TableRow) -> jnp.dtype:
    return (row.table if isinstance(row, TableRow) else row).dtype


def route(
    logits: Float[Array, "T columns"],
    gating: Gating,
    *,
    bias: Float[Array, "m"] | TableRow | None = None,
    groups: Int[Array, "m"] | TableRow,
    slots: Int[Array, "E"] | TableRow,
    threshold_percent: Int[Array, ""] | Int[Array, "1"] | TableRow,
    strategy: Int[Array, ""],
    valid: Bool[Array, "T"],
    exempt: Bool[Array, "T"],
    block_m: int,
    num_blocks: int,
    tiles: RowTiles | None = None,
    interpreted: bool = False,
) -> tuple[Int[Array, "T K"], Plan, Dispatch]:
    """See `op.route`; `supports` says for what. `num_blocks` is the bound on blocks of rows.

    `interpreted`: blocks meet before they exchange sums, as the interpreter needs it.
    """
    sizes = Sizes(
        logits.shape[0],
        gating,
        row_length(groups),
        row_length(slots),
        block_m,
        num_blocks * block_m,
        tiles,
        interpreted,
        bias is not None,
        isinstance(threshold_percent, TableRow),
    )
    threshold = threshold_percent
    threshold = threshold.table if isinstance(threshold, TableRow) else threshold
    scalars = threshold.reshape(-1), strategy.reshape(1)
    tables = (*_in_a_row(groups), *_in_a_row(slots))
    more = () if bias is None else _in_a_row(bias)
    out = _call(sizes)(logits, *tables, valid, exempt, *scalars, *more)
    ids, expert_ids = (picks[:, : gating.top_k] for picks in (out.ids, out.expert_ids))
    plan = Plan(expert_ids, valid[:, None] & (expert_ids != ids), out.s1 != 0)
    return ids, plan, _dispatch(sizes, out, row_of(slots))


def _in_a_row(row: Array | TableRow) -> tuple[Array, Array]:
    """Returns the flat table of all layers, each padded to whole 16 bytes, and the layer."""
    if isinstance(row, TableRow):
        length = row.table.shape[-1]
        table = jnp.pad(row.table, ((0, 0), (0, whole_fours(length) - length)))
        return table.reshape(-1), jnp.asarray(row.layer, I32).reshape(1)
    return row, jnp.zeros(1, I32)


def _dispatch(sizes: Sizes, out: Out, slots: Array) -> Dispatch:
    """Returns the op's form of what the kernel wrote. The slots of blocks are for the XLA grouped
    GEMM only, so they are no work of the kernel's: XLA drops them where nothing reads them.
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
        tile_map=TileMap(out.tile_map, sizes.tiles) if sizes.tiles else None,
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
        *([i32(sizes.map_rows, COUNT + 1)] if sizes.tiles else []),
    )
    written = [shape for shape in results if shape is not None]
    apart = _odd(sizes.padded // ROWS), _odd(sizes.chunks)
    per_expert, per_logical = i32(blocks, apart[0] * ROWS), i32(blocks, apart[1], ROWS)
    exchanged = [per_expert, per_logical, per_expert]

    def routing(*refs, **scratch):
        num_given = len(refs) - len(written) - (len(exchanged) if blocks > 1 else 0)
        given, refs = refs[:num_given], refs[num_given:]
        out, shared = refs[: len(written)], refs[len(written) :]
        block = lax.axis_index("block")
        at = Block(sizes, block, Given(*given), Out(*out), shared, Smem(**scratch))
        _route(at)

    kernel = plgpu.kernel(
        routing,
        out_type=[*written, *(exchanged if blocks > 1 else [])],
        cluster=(blocks,),
        cluster_names=("block",),
        scratch_types=scratch(sizes),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return lambda *given: Out(*kernel(*given)[: len(written)])


def _odd(vectors: int) -> int:
    """Returns the distance between the parts of two blocks, in vectors of 64.

    Where it is a power of two, ptxas 13 may compute the address of a block's part with 32 bits,
    and the copy goes astray (`test_a_blocks_copies_go_by_whole_addresses`).
    """
    return max(3, vectors | 1)


def _route(at: Block) -> None:
    smem, sizes = at.smem, at.sizes
    _load(at)
    _prepare(at)
    if sizes.biased:
        plgpu.barrier_wait(smem.bias_loaded)
    at.each_turn(_pick)
    plgpu.wait_smem_to_gmem(1 if sizes.turns == 1 else 0)  # gaps are marked; picks are on their way
    _meet(at, "arrive.release")
    plgpu.barrier_wait(smem.full)
    used = pl.ds(0, sizes.experts)
    _exchange(at, 0, smem.visits, smem.all_visits)
    visits, _ = _sums(at, smem.visits, smem.all_visits, lambda ref: by_expert(ref.at[used]))

    @pl.when(at.by_weight)
    def _():
        _exchange(at, 2, smem.shares, smem.all_shares)
        if sizes.blocks > 1:
            shares, _ = _sums(at, smem.shares, smem.all_shares, lambda ref: by_expert(ref.at[used]))
            smem.shares[used] = shares

    stages.plan(at, visits)
    served: list[tuple[list, Callable]] = []
    at.each_turn(lambda at: served.append(_serve(at)))
    _exchange(at, 1, smem.rows, smem.all_rows)
    num_tiles = stages.starts(at, functools.partial(_sums, at, smem.rows, smem.all_rows))
    _meet(at, "wait.acquire")  # gaps are marked by all blocks, tokens written over some of them
    at.each_turn(lambda at: _place(at, *(served[0] if sizes.turns == 1 else _served(at))))
    _store_sums(at)
    if sizes.tiles:
        _map_tiles(at, num_tiles)
    plgpu.wait_smem_to_gmem(0)


def _load(at: Block) -> None:
    """Starts the copies of what the block reads. What is read past a row's end is not used.

    TMA takes no copy that starts off a multiple of 16 bytes: it is an illegal instruction. So the
    rows of a table are padded (`_in_a_row`).
    """
    given, smem, sizes = at.given, at.smem, at.sizes
    _load_logits(at)
    if sizes.biased:
        bias = pl.ds(given.bias_layer[0] * sizes.experts, sizes.padded)
        plgpu.copy_gmem_to_smem(given.bias.at[bias], smem.bias, smem.bias_loaded)
    groups = pl.ds(given.groups_layer[0] * sizes.experts, sizes.padded)
    plgpu.copy_gmem_to_smem(given.groups.at[groups], smem.groups, smem.full)
    for first, count in sizes.slot_boxes:
        slots = pl.ds(given.slots_layer[0] * whole_fours(sizes.logical) + first, count)
        into = smem.slots.at[pl.ds(first, count)]
        plgpu.copy_gmem_to_smem(given.slots.at[slots], into, smem.full)


def _load_logits(at: Block) -> None:
    logits = at.given.logits.at[at.own, pl.ds(0, at.sizes.experts)]
    plgpu.copy_gmem_to_smem(logits, at.smem.logits, at.smem.loaded)


def _pick(at: Block) -> None:
    """Computes the picks of 64 rows, and loads the next ones' logits as soon as these are read."""
    _kinds(at)
    plgpu.barrier_wait(at.smem.loaded)
    stages.gate(at)
    if at.sizes.turns > 1:
        following = at._replace(turn=at.turn + 1)

        @pl.when((at.turn + 1 < at.sizes.turns) & (following.first_row < at.sizes.rows))
        def _():
            _load_logits(following)


def _serve(at: Block) -> tuple[list, Callable]:
    """Returns the experts that serve 64 rows, and which visits of a pick are kept. Counts the
    experts' rows.
    """
    smem = at.smem
    expert_ids = stages.look_up(at)
    kept = stages.merge_repeats(at, expert_ids)
    if at.sizes.turns == 1:
        stages.one_hot(at, expert_ids)
    else:
        stages.one_hot(at._replace(smem=smem._replace(rows=smem.turn_rows)), expert_ids)
        stages.add_rows(at, smem.rows)
        for k, keep in enumerate(kept):
            smem.visit_row[:, k] = jnp.where(keep, 1, 0)
    return expert_ids, kept.__getitem__


def _served(at: Block) -> tuple[list, Callable]:
    """Returns again what `_serve` returned for these rows, and makes their visits one-hot."""
    smem, picks = at.smem, range(at.sizes.picks)
    expert_ids = [by_row(smem.expert_ids.at[:, k]) for k in picks]
    stages.one_hot(at._replace(smem=smem._replace(rows=smem.turn_rows)), expert_ids)
    return expert_ids, lambda k: by_row(smem.visit_row.at[:, k]) != 0


def _place(at: Block, expert_ids: list, kept: Callable) -> None:
    """Stores the sorted rows of 64 rows' visits and, for each of those, its token."""
    stages.ranks(at, expert_ids, kept)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(at.smem.visit_row, at.out.visit_row.at[at.own])
    _fill(at)
    if at.sizes.turns > 1:
        stages.add_rows(at, at.smem.first)


def _kinds(at: Block) -> None:
    """Stores each row's kind in shared memory. TMA copies no booleans: a warp reads them one by
    one.
    """
    given, last = at.given, at.sizes.rows - 1

    def one_warp(warp):
        rows = [warp * 16 + i for i in range(16)]
        own = [at.first_row + row for row in rows]
        read = [(given.valid[lax.min(row, last)], given.exempt[lax.min(row, last)]) for row in own]
        for row, at_row, (valid, exempt) in zip(rows, own, read, strict=True):
            kind = jnp.where(exempt, EXEMPT, DEGRADABLE)
            at.smem.kind[row] = jnp.where(valid & (at_row <= last), kind, PADDING)

    plgpu.warp_map(one_warp)
    plgpu.commit_smem()


def _prepare(at: Block) -> None:
    """Fills in constants in shared memory, and gaps between sorted rows, while copies are in
    flight.
    """
    smem, sizes = at.smem, at.sizes
    if sizes.turns > 1:  # sums over turns begin at nothing
        nothing = plgpu.layout_cast(jnp.zeros((sizes.padded,), I32), BY_EXPERT)
        smem.visits[...], smem.shares[...] = nothing, nothing
        zeros = plgpu.layout_cast(jnp.full((ROWS,), 0, I32), BY_ROW)
        for chunk in range(sizes.chunks):
            smem.rows[chunk] = zeros
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


def _exchange(at: Block, which: int, own, every) -> None:
    """Copies what every block has in `own` into `every` of all of them.

    Each block writes its part to memory, and reads that part itself: a multicast copy is one slice
    a block, this one's the very row that it wrote. So memory is written and read by one thread and
    one proxy, in the order that `wait_smem_to_gmem` makes, and nothing has to be ordered between
    blocks but the copies' arrival in shared memory, which the barrier of each block counts. The
    interpreter takes a multicast for a read of all parts by every block, so there they meet first.

    In memory, parts are an odd number of vectors apart (`_odd`).
    """
    if at.sizes.blocks == 1:
        return
    smem, shared = at.smem, at.shared[which]
    shared = shared.at[:, pl.ds(0, own.shape[0])]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(own, shared.at[at.index])
    plgpu.wait_smem_to_gmem(0)
    if at.sizes.interpreted:
        plgpu.barrier_arrive(smem.met.at[which])
        plgpu.barrier_wait(smem.met.at[which])
    plgpu.copy_gmem_to_smem(shared, every, smem.exchanged.at[which], collective_axes="block")
    plgpu.barrier_wait(smem.exchanged.at[which])


def _meet(at: Block, step: str) -> None:
    """Runs a step, arrive or wait, of the cluster's own barrier: what a block wrote before it
    arrived is ordered before what others do after they waited. An mbarrier's arrivals, jax's
    `ClusterBarrier` among them, are of the block's scope only. The interpreter does not know it;
    there `_exchange` does its part.
    """
    if at.sizes.blocks == 1 or at.sizes.interpreted:
        return

    def barrier(_) -> None:
        void = ir.Type.parse("!llvm.void")
        text = f"barrier.cluster.{step}.aligned;"
        llvm.inline_asm(void, [], text, "~{memory}", has_side_effects=True)

    inlined: Any = plgpu.inline_mgpu()(barrier)
    inlined()


def _sums(at: Block, own, every, load):
    """Returns two sums of what `load` makes of each block's values: over all blocks, and over
    earlier ones.
    """
    if at.sizes.blocks == 1:
        return load(own), None

    def add(i, sums):
        total, before = sums
        part = load(every.at[i])
        return total + part, before + part * jnp.where(at.index > i, 1, 0)

    part = load(every.at[0])
    return lax.fori_loop(1, at.sizes.blocks, add, (part, part * jnp.where(at.index > 0, 1, 0)))


def _store_sums(at: Block) -> None:
    """Starts the copies of results that all rows share: S1, rows and starts of experts."""
    smem, out, sizes = at.smem, at.out, at.sizes
    plgpu.commit_smem()

    @pl.when(at.index == 0)
    def _():
        _store_vector(smem.s1, out.s1, 0, sizes.experts)
        for chunk in range(sizes.chunks):
            first = chunk * ROWS
            count = min(ROWS, sizes.logical - first)
            _store_vector(smem.rows.at[chunk], out.expert_rows, first, count)
            _store_vector(smem.start.at[chunk], out.expert_start, first, count)


def _store_vector(vector, into, first: int, count: int) -> None:
    """Stores a vector: whole sixteens of bytes by one copy, the rest value by value."""
    fours = count // 4 * 4
    if fours:
        plgpu.copy_smem_to_gmem(vector.at[pl.ds(0, fours)], into.at[pl.ds(first, fours)])
    for last in range(fours, count):
        into[first + last] = vector[last]


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
                    at.out.row_token[place] = at.first_row + token

    plgpu.warp_map(one_warp)


def _map_tiles(at: Block, num_tiles) -> None:
    """Writes the rows of the tile map. Experts are dealt out to the warps of all blocks; each loads
    what it needs of eight at a time.
    """
    sizes, smem = at.sizes, at.smem
    tiles, table = sizes.tiles, at.out.tile_map
    assert tiles is not None
    warps, together = 4 * sizes.blocks, 8

    def write(expert, rows, start, first, slot) -> None:
        count = lax.div(rows + (tiles.rows - 1), jnp.int32(tiles.rows))

        @pl.loop(0, jnp.where(expert < sizes.logical, count, 0))
        def _(tile):
            ahead = lax.div(tile, jnp.int32(tiles.group)) * tiles.group
            row = first + tile
            table[row, SLOT] = slot
            table[row, ROW] = start + ahead * tiles.rows
            table[row, END] = start + rows
            table[row, HEAD] = first + ahead
            table[row, SIZE] = lax.min(count - ahead, jnp.int32(tiles.group))

    def one_warp(warp):
        @pl.loop(0, -(-sizes.logical // (warps * together)))
        def _(turn):
            some = [(turn * together + i) * warps + at.index * 4 + warp for i in range(together)]
            found = []
            for expert in some:
                known = lax.min(expert, jnp.int32(sizes.logical - 1))
                place = lax.div(known, jnp.int32(ROWS)), lax.rem(known, jnp.int32(ROWS))
                vectors = smem.rows, smem.start, smem.tile
                found.append((*(vector[place] for vector in vectors), smem.slots[known]))
            for expert, values in zip(some, found, strict=True):
                write(expert, *values)

    plgpu.warp_map(one_warp)

    @pl.when(at.index == 0)
    def _():
        table[0, COUNT] = num_tiles
