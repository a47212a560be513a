"""The kernel that attends to latents by keys and values that it makes of them, head by head.

Of DeepSeek-V3 a row, position and head take 2,176 operations in the absorbed form (`latent`), and
640 with a key of 192 elements and a value of 128, which are 262,144 operations to make: 512 for a
row where 512 share them. A head's weights are 256 KB, more than shared memory has: made tile by
tile where they are used, by each block for its 128 rows, they would be 2,048 operations a row and
every tile would read those weights again. So a block takes many rows of a head (`tiles.Expanded`):

- It expands 512 positions into memory of its own, 256 KB, 34 MB in all blocks, which L2 holds. The
  part of a key that turns is every head's and is read from the pages.
- Then its rows attend to them, 128 at a time. Sums, largest scores and sums of weights of rows that
  will see more wait in the block's memory, too: 1 KB a row comes and goes for the 2.5 KB of keys
  and values that 512 positions are for it.
- While positions are expanded, latents go through the ring of values and weights through that of
  keys; keys are made first, then values, so that latents are read twice: of both at once ptxas
  spills. What a block has stored by TMA it reads by TMA, after it has waited for the stores.
- Tiles, turns of the two warpgroups and rings are `mosaic`'s; a step's values are weighed in it.

A step of many short chunks after long prefixes expands them for few rows: `pays` knows the step's
rows alone, which are static, and takes them for one chunk's.

Shared memory: 224 KB, of which rings have two steps. Registers: 232 a thread that multiplies.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import num_sms
from pallas_kernels.layouts import accumulate, of_rows
from pallas_kernels.paged_attention.common import splat
from pallas_kernels.paged_attention.tiles import LATENT_HEADS
from pallas_kernels.prefill_attention import work
from pallas_kernels.prefill_attention.attend import (
    NONE,
    Attention,
    multiply,
    nothing,
    store,
)
from pallas_kernels.prefill_attention.mosaic import LOADER
from pallas_kernels.prefill_attention.parts import (
    Item,
    Refs,
    Shape,
    drain,
    for_each_item,
    read_item,
    scratch,
    zero,
)
from pallas_kernels.prefill_attention.tiles import (
    LANES,
    WARPGROUPS,
    Expanded,
    Tile,
    choose_expanded,
)

SIZE, ROPE = 128, 64
"""Elements of a value, as of a key that do not turn; and of those that do."""

TILE = Tile(128, key_stages=2, value_stages=2, pack=1)
_REGISTERS = {"load": 40, "multiply": 232}


class _Latents(NamedTuple):
    """What the kernel has beside `Refs`, whose keys are pages and whose values make keys."""

    weights: Any  # that make values
    made: Any  # [block, 2, keys, SIZE], keys and values
    sums: Any  # [block, rows, SIZE]
    tops: Any  # [block, rows]
    norms: Any
    q_smem: Any  # as in Refs, what turns
    k_smem: Any  # `Refs.full` has their barriers after those of values


def supports(q: Any, pages: Any, weights: tuple[Any, Any]) -> bool:
    """Returns whether the kernel takes these: bfloat16, heads of DeepSeek's sizes, latents of a
    multiple of 128 elements, and pages of 16, 32, 64 or 128 positions.
    """
    rank = weights[0].shape[0]
    bf16 = all(one.dtype == jnp.bfloat16 for one in (q, pages, *weights))
    sizes = q.shape[2] == SIZE + ROPE
    sizes &= all(one.shape[1] == q.shape[1] * SIZE for one in weights)
    sizes &= pages.shape[2] == 1 and pages.shape[4] == rank + ROPE and rank % SIZE == 0
    return bool(bf16 and sizes and pages.shape[3] in (16, 32, 64, 128))


def pays(num_rows: int, heads: int, rank: int) -> bool:
    """Returns whether rows of one chunk take fewer operations so than in the absorbed form.

    Counted for a position, of a block that has the most to do: both forms' bounds are the tensor
    cores.
    """
    size = choose_expanded(num_rows, heads, num_sms())
    turns = -(-(-(-num_rows // size.rows) * heads) // num_sms())
    rows = min(num_rows, size.rows)
    of_head = rows * 2 * (2 * SIZE + ROPE) + 2 * rank * 2 * SIZE
    padded = -(-heads // LATENT_HEADS) * LATENT_HEADS
    absorbed = num_rows * padded * 2 * (2 * rank + ROPE) / num_sms()
    return turns * of_head < absorbed


def plan(
    num_rows: int,
    heads: int,
    *,
    q_start: Int[Array, "N1"],
    kv_len: Int[Array, "N"],
    size: Expanded | None = None,
) -> work.Work:
    """Returns what `prefill_attention` takes as `todo`."""
    size = size or choose_expanded(num_rows, heads, num_sms())
    rows = work.aligned(num_rows)
    return work.plan(q_start, kv_len, rows, block_rows=size.rows, block_kv=size.keys)


def prefill_attention(
    q: Float[Array, "T H 192"],
    weights: tuple[Float[Array, "R H*128"], Float[Array, "R H*128"]],
    pages: Float[Array, "L P 1 S D"],
    *,
    layer: Int[Array, ""],
    block_table: Int[Array, "N M"],
    q_start: Int[Array, "N1"],
    kv_len: Int[Array, "N"],
    scale: float,
    todo: work.Work | None = None,
    size: Expanded | None = None,
    num_blocks: int | None = None,
    interpreted: bool = False,
) -> Float[Array, "T H 128"]:
    """See `op.expanded_attention`; `supports` says for what, `mosaic.prefill_attention` the rest.

    `todo` is for the size that is chosen: give no other with it.
    """
    num_rows, heads, _ = q.shape
    chosen = size or choose_expanded(num_rows, heads, num_sms())
    if todo is None:
        todo = plan(num_rows, heads, q_start=q_start, kv_len=kv_len, size=size)
    rank = weights[0].shape[0]
    shape = Shape(
        heads,
        heads,
        SIZE,
        pages.shape[3],
        TILE,
        num_blocks or num_sms(),
        scale,
        interpreted,
        rank=rank,
        rope=ROPE,
        expanded=chosen,
    )
    q = jnp.pad(q, ((0, work.aligned(num_rows) - num_rows), (0, 0), (0, 0)))
    out, *_ = _call(shape, q)(
        todo.tiles,
        todo.count,
        layer.astype(jnp.int32)[None],
        block_table.astype(jnp.int32),
        q,
        pages,
        *weights,
    )
    return out[:num_rows]


def _call(shape: Shape, q: Array) -> Callable[..., Any]:
    assert shape.expanded is not None
    rows, keys, blocks = shape.expanded.rows, shape.expanded.keys, shape.num_blocks

    def body(*arrays, **buffers):
        own, (of_values, out, *kept) = arrays[:7], arrays[7:]
        turned = {name: buffers.pop(f"latent_{name}") for name in ("q_smem", "k_smem")}
        buffers |= {"out": out, "latents": _Latents(of_values, *kept, **turned)}
        refs = Refs(*own, **buffers)
        warpgroup = lax.axis_index("wg")

        def load():
            plgpu.set_max_registers(_REGISTERS["load"], action="decrease")
            _load(shape, refs)

        def attend():
            plgpu.set_max_registers(_REGISTERS["multiply"], action="increase")
            _attend(shape, refs, warpgroup)

        lax.cond(warpgroup == LOADER, load, attend)

    buffers = scratch(shape, q.dtype)
    del buffers["clean"]  # values of positions that are not there are made zeros
    buffers |= {
        "q_full": plgpu.Barrier(num_arrivals=2 * WARPGROUPS),
        "latent_q_smem": plgpu.SMEM((WARPGROUPS, LANES, ROPE), q.dtype),
        "latent_k_smem": plgpu.SMEM((TILE.key_stages, TILE.block_kv, ROPE), q.dtype),
        "full": plgpu.Barrier(
            num_arrivals=shape.copies, num_barriers=TILE.stages + TILE.key_stages
        ),
    }
    sds = jax.ShapeDtypeStruct
    return plgpu.kernel(
        body,
        out_type=[
            sds((*q.shape[:2], SIZE), q.dtype),
            sds((blocks, 2, keys, SIZE), q.dtype),
            sds((blocks, rows, SIZE), jnp.float32),
            sds((blocks, rows), jnp.float32),
            sds((blocks, rows), jnp.float32),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types=buffers,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        kernel_name="expanded_attention",
    )


class _Turn:
    """Rows that a block takes at once, and positions that were expanded at once.

    Made again where it is needed: what the plan says is not held in registers meanwhile.
    """

    def __init__(self, shape: Shape, refs: Refs, item, number) -> None:
        assert shape.expanded is not None
        at, step, keys = read_item(shape, refs, item), shape.tile.block_kv, shape.expanded.keys
        sets = _sets(shape, at)
        self.at, self.i = at, lax.rem(number, sets)
        self.first = lax.div(number, sets) * keys  # position
        seen = lax.min(at.hi + at.offset - self.first, keys)
        self.tiles = lax.div(seen + (step - 1), step)  # of positions that the item's rows see
        own, offset = _rows(shape, at, self.i), at.offset - self.first
        steps = lax.div(lax.max(own.hi - 1 + offset + step, 0), step)
        steps = lax.min(steps, keys // step)
        # Positions are counted from the first one.
        self.own = own._replace(offset=offset, blocks=steps, kv_len=at.kv_len - self.first)


def _turns(shape: Shape, at: Item):
    return at.blocks * _sets(shape, at)


def _sets(shape: Shape, at: Item):
    """Returns how many times a block takes rows of an item."""
    return lax.div(at.hi - at.row + (shape.tile.block_rows - 1), shape.tile.block_rows)


def _rows(shape: Shape, at: Item, i) -> Item:
    rows = shape.tile.block_rows
    row = pl.multiple_of(at.row + i * rows, work.ALIGN)
    return at._replace(row=row, lo=lax.max(at.lo, row), hi=lax.min(at.hi, row + rows))


# ---- The warpgroup that loads ----


def _load(shape: Shape, refs: Refs) -> None:
    tile, rows, block = shape.tile, shape.copy_rows, lax.axis_index("block")
    layer, latents = refs.layer[0], refs.latents

    def fetch(source: Callable[[Any], Any], smem, full, at: Item) -> None:
        """Fills a tile, as many rows at a time as there are in a page."""

        @pl.loop(0, shape.copies if shape.copies <= 2 else shape.copies + zero(at))
        def _(i):
            start = pl.multiple_of(i * rows, work.ALIGN)
            plgpu.copy_gmem_to_smem(source(start), smem.at[pl.ds(start, rows)], full)

    def key_place(steps):
        stage = lax.rem(steps, tile.key_stages)
        plgpu.barrier_wait(refs.empty.at[stage])
        return stage

    def value_place(steps):
        stage = lax.rem(steps, tile.value_stages)
        plgpu.barrier_wait(refs.empty.at[tile.key_stages + stage])
        return stage

    def paged(at: Item, first, columns):
        last = lax.div(at.kv_len - 1, rows) * rows

        def source(start):
            # Past the last position any page of the sequence's own will do.
            position = lax.min(first + start, last)
            page = refs.table[at.chunk, lax.div(position, shape.page_size)]
            offset = 0
            if rows < shape.page_size:
                offset = pl.multiple_of(lax.rem(position, shape.page_size), rows)
            return refs.k.at[layer, page, 0, pl.ds(offset, rows), columns]

        return source

    def made(part, step):
        def source(start):
            row = pl.multiple_of(step * tile.block_kv + start, work.ALIGN)
            return latents.made.at[block, part, pl.ds(row, rows)]

        return source

    def weights(own, at: Item, row):
        column = pl.ds(pl.multiple_of(at.head * SIZE, SIZE), SIZE)
        return lambda start: own.at[pl.ds(pl.multiple_of(row + start, work.ALIGN), rows), column]

    def item(at: Item, steps):
        def expand(of: _Turn, steps) -> None:
            chunks = shape.rank // SIZE

            @pl.loop(0, of.tiles * 2 * chunks)
            def _(i):  # of a tile keys, then values
                row = pl.multiple_of(lax.rem(i, chunks) * SIZE, SIZE)
                first = of.first + lax.div(i, 2 * chunks) * tile.block_kv
                stage = value_place(steps + i)
                full = refs.full.at[tile.key_stages + stage]
                fetch(paged(of.at, first, pl.ds(row, SIZE)), refs.v_smem.at[stage], full, of.at)
                stage = key_place(steps + i)
                smem, full = refs.k_smem.at[stage], refs.full.at[stage]
                for part, own in enumerate((refs.v, latents.weights)):
                    is_next = lax.rem(lax.div(i, chunks), 2) == part
                    pl.when(is_next)(partial(fetch, weights(own, of.at, row), smem, full, of.at))

        def keys(of: _Turn, steps, step) -> None:
            stage = key_place(steps + step)
            fetch(made(0, step), refs.k_smem.at[stage], refs.full.at[stage], of.at)
            turned = paged(of.at, of.first + step * tile.block_kv, pl.ds(shape.rank, ROPE))
            fetch(turned, latents.k_smem.at[stage], refs.full.at[tile.stages + stage], of.at)

        def values(of: _Turn, steps, step) -> None:
            stage = value_place(steps + step)
            full = refs.full.at[tile.key_stages + stage]
            fetch(made(1, step), refs.v_smem.at[stage], full, of.at)

        def turn(number, steps):
            of = _Turn(shape, refs, at.number, number)
            pl.when(of.i == 0)(lambda: expand(of, steps))
            pl.when(of.own.blocks > 0)(lambda: _load_queries(shape, refs, of.own))

            @pl.loop(0, of.own.blocks)
            def _(step):
                keys(of, steps, step)
                values(of, steps, step)

            return steps + of.own.blocks

        return lax.fori_loop(0, _turns(shape, at), turn, steps)

    for_each_item(shape, refs, item)
    drain(shape, refs)


def _load_queries(shape: Shape, refs: Refs, at: Item) -> None:
    plgpu.barrier_wait(refs.q_empty)
    for warpgroup in range(WARPGROUPS):
        rows = pl.ds(pl.multiple_of(at.row + warpgroup * LANES, work.ALIGN), LANES)
        for columns, smem in (
            (pl.ds(0, SIZE), refs.q_smem),
            (pl.ds(SIZE, ROPE), refs.latents.q_smem),
        ):
            own = refs.q.at[rows, at.head, columns]
            plgpu.copy_gmem_to_smem(own, smem.at[warpgroup], refs.q_full)


# ---- The warpgroups that multiply ----


_BY_ROW = plgpu.Layout.WGMMA.reduce(1)


class _Kept(NamedTuple):
    """Sums of rows over the positions before, where they wait."""

    latents: _Latents
    rows: Any

    @staticmethod
    def start():
        """Returns the state before any position was seen."""
        sums = splat(0.0, (LANES, SIZE), plgpu.Layout.WGMMA)
        return sums, *(splat(x, (LANES,), _BY_ROW) for x in (NONE, 0.0))

    def load(self):
        kept = self.latents.sums, self.latents.tops, self.latents.norms
        layouts = plgpu.Layout.WGMMA, _BY_ROW, _BY_ROW
        return tuple(
            plgpu.load(one, self.rows, layout=layout, optimized=False)
            for one, layout in zip(kept, layouts, strict=True)
        )

    def store(self, sums, top, norm) -> None:
        self.latents.sums[self.rows] = sums
        self.latents.tops[self.rows] = top
        self.latents.norms[self.rows] = norm


class _Attention(Attention):
    """Takes half of a step's keys at a time and weighs their values at once, while the other
    warpgroup finds weights: for scores of them all, or weights of a step before, there are no
    registers.
    """

    def attend(self, kept: _Kept, is_first) -> tuple[Array, Array, Array]:
        """Returns sums, largest scores and sums of weights over these positions and all before."""

        def steps(acc):
            acc[...], *state = lax.cond(is_first, _Kept.start, kept.load)
            whole = self.whole()
            for first, end, masked in ((0, whole, False), (whole, self.at.blocks, True)):
                one = partial(self.step, acc, masked)
                state = lax.fori_loop(first, end, one, tuple(state))
            return acc[...], *state

        plgpu.barrier_arrive(self.refs.q_empty)
        plgpu.barrier_wait(self.refs.q_full)
        return self.accumulator(steps)

    def step(self, acc, masked: bool, step, state):
        """Takes in a step's keys and values."""
        top, norm = state
        s = self.scores(step, lambda: 0, masked)
        new_top = jnp.maximum(top, jnp.max(s, axis=1) * self.factor)
        keep = jnp.exp2(top - new_top)
        p = jnp.exp2(s * self.factor - of_rows(new_top, s.shape))
        norm = norm * keep + jnp.sum(p, axis=1)
        self.wait_for_values(step)
        acc[...] = acc[...] * of_rows(keep, acc.shape)
        self.weigh(acc, self.narrow(p), step)
        if not self.shape.interpreted:
            plgpu.wgmma_wait(0)
        self.release_values(step)
        return new_top, norm


def _attend(shape: Shape, refs: Refs, warpgroup) -> None:
    block, latents = lax.axis_index("block"), refs.latents

    def expand(of: _Turn, steps) -> None:
        @pl.loop(0, of.tiles)
        def _(i):
            live = of.at.kv_len - of.first - i * shape.tile.block_kv
            _expand(shape, refs, warpgroup, of.at, i, steps, live)

        plgpu.wait_smem_to_gmem(0)

    def kept(of: _Turn) -> _Kept:
        row = of.i * shape.tile.block_rows + warpgroup * LANES
        return _Kept(latents, (block, pl.ds(pl.multiple_of(row, LANES), LANES)))

    def finish(of: _Turn, out, top, norm) -> None:
        assert shape.expanded is not None
        is_last = of.own.hi + of.own.offset <= shape.expanded.keys

        @pl.when(is_last)
        def _():
            result = out * of_rows(1.0 / norm, out.shape)
            store(shape, refs, warpgroup, of.own, result.astype(refs.out.dtype))

        @pl.when(~is_last)
        def _():
            kept(of).store(out, top, norm)

    def item(at: Item, steps):
        @pl.when(at.blocks == 0)
        def _():
            @pl.loop(0, _sets(shape, at))
            def _(i):
                own = _rows(shape, at, i)
                store(shape, refs, warpgroup, own, nothing(shape, refs))

        def turn(number, steps):
            first = _Turn(shape, refs, at.number, number)
            pl.when(first.i == 0)(lambda: expand(first, steps))

            @pl.when(first.own.blocks > 0)
            def _():
                one = _Attention(shape, refs, warpgroup, first.own, steps)
                found = one.attend(kept(first), first.first == 0)
                finish(_Turn(shape, refs, at.number, number), *found)

            return steps + _Turn(shape, refs, at.number, number).own.blocks

        return lax.fori_loop(0, _turns(shape, at), turn, steps)

    multiply(shape, refs, warpgroup, item)


def _expand(shape: Shape, refs: Refs, warpgroup, at: Item, i, steps, live) -> None:
    """Makes keys and values of the i-th tile of positions, of which `live` are there and the
    warpgroup has half.
    """
    tile, chunks = shape.tile, shape.rank // SIZE
    mine = pl.ds(pl.multiple_of(warpgroup * LANES, LANES), LANES)

    def stages(product):
        """Returns the stages of a product's weights and latents."""
        product = steps + product
        return lax.rem(product, tile.key_stages), lax.rem(product, tile.value_stages)

    def release(product) -> None:
        of_weights, of_latents = stages(product)
        plgpu.barrier_arrive(refs.empty.at[of_weights])
        plgpu.barrier_arrive(refs.empty.at[tile.key_stages + of_latents])

    def products(first, acc):
        @pl.loop(0, chunks + zero(at))
        def _(chunk):
            of_weights, of_latents = stages(first + chunk)
            plgpu.barrier_wait(refs.full.at[tile.key_stages + of_latents])
            plgpu.barrier_wait(refs.full.at[of_weights])
            plgpu.wgmma(acc, refs.v_smem.at[of_latents, mine], refs.k_smem.at[of_weights])
            plgpu.wgmma_wait(1)
            pl.when(chunk > 0)(partial(release, first + chunk - 1))

        plgpu.wgmma_wait(0)
        release(first + chunks - 1)
        return acc[...]

    staged = refs.out_smem[0].at[warpgroup + zero(at)]
    row = pl.multiple_of(i * tile.block_kv + warpgroup * LANES, LANES)
    for part in range(2):
        made = accumulate(partial(products, part * chunks), (LANES, SIZE))
        if part:
            # A weight of zero would not do: what another sequence left there may be infinite.
            layout = plgpu.Layout.WGMMA
            position = plgpu.broadcasted_iota(jnp.int32, made.shape, 0, layout=layout)
            made = jnp.where(position < live - warpgroup * LANES, made, 0.0)
        for column in range(0, SIZE, shape.staged):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[...] = made[:, column : column + shape.staged].astype(refs.out.dtype)
            plgpu.commit_smem()
            place = refs.latents.made.at[
                lax.axis_index("block"), part, pl.ds(row, LANES), pl.ds(column, shape.staged)
            ]
            plgpu.copy_smem_to_gmem(staged, place)
