"""The kernel of the grouped GEMM: `rows @ weights[slot]`, tile by tile.

Weights are on wgmma's M side and rows on its N side. A warpgroup multiplies 64 weight columns, or
twice that, by 8 to 128 rows: an expert of five rows is not padded to 64, and NaN in a row stays in
its column of the accumulator. Rows come from shared memory; weights too, as they lie in the pool,
`[k, columns]`, transposed by wgmma. Quantized ones, `[columns, k]`, go through registers, where
they become bfloat16 on the way. Of bytes with two codes of four bits, shifts make two tiles of 32
neighbours along k, each multiplied by itself; scales of groups are staged with what they scale.

- Persistent blocks walk over (row tile, column) pairs, neighbours on neighbouring columns of one
  expert. Row tiles of one expert in one group go through a column together, so that L2 holds its
  weights. An expert of one tile reads its weights from memory exactly once.
- A warpgroup loads, the others multiply. The pipeline runs on from one pair into the next: while
  results are stored, the next pair's weights are already in flight.
- Each pair takes the narrowest wgmma that holds its rows, so that a ragged tail costs little.
- In decode the floor is one read of the active experts' weights. A block has 90 to 190 KB of them
  in flight, over twice what the latency of memory asks for; tensor cores idle. At its end, a block
  of the first product asks L2 for the weights that it will begin the second one with.
- In prefill the floor is the tensor cores. 128 rows by 256 columns a block would ask L2 for 48
  bytes a clock and multiprocessor where it gives about 40, so two blocks of a cluster work on the
  same columns and load half of the weights each, for both. One multiplying warpgroup is a stage
  ahead of the other, which has the tensor cores to itself while the first stores its results.
- A model's columns need not be multiples of a pair's. The last pair then begins within the one
  before, multiplies those columns again and stores only its own.

A bias is added to an item's accumulators, before gate and up are joined. Results are staged in
shared memory and stored by TMA: the whole width, or eight rows at a time
where an expert ends inside it, as its segment ends at a multiple of eight.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.grouped_gemm.four_bits import HALF, MIDDLE, PackedWeights
from pallas_kernels.grouped_gemm.quantized import BLOCK, QuantizedWeights, Weights, weight_sizes
from pallas_kernels.grouped_gemm.tiles import LANES, GemmTile, Tile
from pallas_kernels.routing import tile_map

CHUNK = 8
"""Rows an expert's segment starts and ends at multiples of."""

_PREFETCHED = 64 * 1024
"""Bytes that a block asks L2 for on behalf of the next product: 8 MB in all, what memory gives in
the two microseconds it would idle while one kernel ends and the next one's first loads return."""

_LOADER_REGISTERS, _CONSUMER_REGISTERS = 24, 240  # with two consumers; 168 each before


class Gemm(NamedTuple):
    """One grouped product; `join` makes one result of the parts of an item.

    With `join`, part p of a column is that column of the p-th half of the pool's columns. Without,
    parts are neighbours, and `apply` makes results of each.
    """

    tile: Tile
    gemm: GemmTile
    join: Callable | None
    num_blocks: int
    apply: Callable | None = None

    def __call__(
        self,
        rows: Float[Array, "rows k"],
        weights: Weights,
        work: Int[Array, "M 6"],
        out_dtype: Any,
        bias: Float[Array, "slots columns"] | None = None,
        then: tuple["Gemm", Weights] | None = None,
    ) -> Float[Array, "rows n"]:
        """Computes the product; rows are bfloat16. Result rows that no tile of `work` holds are
        undefined.

        `then` is the product that takes these results, over the same `work`, and its weights: L2 is
        asked for the first of them, but by clusters, whose time is not the weights'.
        """
        tile, gemm, is_last = self.tile, self.gemm, self.join is None and self.apply is None
        width, stages = tile.widths[-1], gemm.stages
        columns = weight_sizes(weights)[1]
        block = (gemm.block_k, gemm.columns)
        operands: list[Any] = [rows, weights]
        packed, of_groups = None, []
        if isinstance(weights, QuantizedWeights):
            block = block[::-1]
            operands = [rows, weights.values, weights.scales]
        elif isinstance(weights, PackedWeights):
            packed, block = weights, (gemm.columns, gemm.block_k // 2)
            operands = [rows, *jax.tree.leaves(weights)]
            shape = stages, gemm.parts, max(1, gemm.block_k // packed.group), gemm.columns
            of_groups = [plgpu.SMEM(shape, leaf.dtype) for leaf in operands[2:]]
        num_own = len(operands)
        if bias is not None:
            operands.append(bias.astype(jnp.float32))
        num_given = len(operands)
        if then is not None and tile.cluster == 1:
            after, weights = then
            operands.append(getattr(weights, "values", weights))
        else:
            after = None
        num_operands = len(operands)

        def body(tiles, *refs):
            own, num_staged = refs[2:num_own], len(refs) - len(of_groups)
            scales = own if packed is None and own else (None,)
            rest = refs[num_operands:num_staged]
            block = _Block(self, columns, tiles, *refs[:2], *scales, *rest)
            if packed is not None:
                groups = tuple(zip(own, refs[num_staged:], strict=True))
                block = block._replace(packed=packed, groups=groups)
            if bias is not None:
                block = block._replace(bias=refs[num_own])
            if after is not None:
                block = block._replace(then=(after, weight_sizes(weights)[1], refs[num_given]))
            block.run()

        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((rows.shape[0], self.out_columns(columns)), out_dtype),
            grid=(max(1, self.num_blocks // tile.cluster),),
            grid_names=("block",),
            cluster=(tile.cluster,),
            cluster_names=("rank",),
            num_threads=gemm.consumers + 1,
            thread_name="wg",
            scratch_types=[
                plgpu.SMEM((stages, width, gemm.block_k), rows.dtype),
                plgpu.SMEM((stages, gemm.parts, *block), operands[1].dtype),
                plgpu.SMEM((gemm.consumers, width, LANES), out_dtype),
                plgpu.Barrier(
                    num_arrivals=gemm.parts * (1 + len(of_groups)) + 1, num_barriers=stages
                ),
                self.empty_barrier(),
                plgpu.Barrier(num_arrivals=1),
                *of_groups,
            ],
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
            ),
            kernel_name="grouped_gemm_down" if is_last else "grouped_gemm_gate_up",
        )(work, *operands)

    def out_columns(self, columns: int) -> int:
        """Returns the columns of the result for `columns` of the pool."""
        return columns if self.join is None else columns // self.gemm.parts

    def empty_barrier(self) -> Any:
        """Returns the barrier of a free stage: every consumer of both blocks of a cluster has done
        with it.
        """
        sizes: Any = {"num_arrivals": self.gemm.consumers, "num_barriers": self.gemm.stages}
        if self.tile.cluster > 1:
            return plgpu.ClusterBarrier(collective_axes=("rank",), **sizes)
        return plgpu.Barrier(**sizes)


class _Item(NamedTuple):
    """A block's part of one (row tile, column) pair; int32 scalars of the kernel."""

    slot: Any
    row: Any  # first of the block's rows, a multiple of eight
    rows: Any  # of the expert from there: 0 where the other block of a cluster has them all
    column: Any


class _Block(NamedTuple):
    """One persistent block. Steps count its pipeline's stages from its first item to its last."""

    call: Gemm
    columns: int  # of the pool
    tiles: Any  # the tile map, in global memory, as are the next four
    rows: Any
    weights: Any  # [slots, k, columns], of quantized values [slots, columns, k]
    scales: Any  # of quantized weights, else None
    out: Any
    x_smem: Any  # [stages, width, block_k]
    w_smem: Any  # [stages, parts, block_k, columns], of quantized values [.., columns, block_k]
    out_smem: Any  # [consumers, width, LANES]
    full: Any  # barrier a stage: what it holds has arrived
    empty: Any  # barrier a stage: see `Gemm.empty_barrier`
    ahead: Any  # barrier: the first consumer has its lead in this item
    then: tuple[Gemm, int, Any] | None = None  # the next product, its columns and its weights
    bias: Any = None  # [slots, columns], float32
    packed: PackedWeights | None = None  # weights in four bits: what is static of them
    groups: tuple = ()  # their scales, and zero points: in global memory, and [stages, parts, ..]

    def run(self) -> None:
        gemm = self.call.gemm
        load: Callable = self.load
        multiply: Callable = self.multiply
        if gemm.consumers > 1:
            load = _with_registers(load, _LOADER_REGISTERS, "decrease")
            multiply = _with_registers(multiply, _CONSUMER_REGISTERS, "increase")
        lax.cond(lax.axis_index("wg") == gemm.consumers, load, multiply)

    @property
    def out_columns(self) -> int:
        return self.call.out_columns(self.columns)

    @property
    def item_columns(self) -> int:
        """Columns of the result that an item makes."""
        return self.call.out_columns(self.call.gemm.parts * self.call.gemm.columns)

    @property
    def num_columns(self) -> int:
        return -(-self.out_columns // self.item_columns)

    @property
    def num_k(self) -> int:
        return self.rows.shape[1] // self.call.gemm.block_k

    @property
    def num_items(self):
        """Items of this block: every `grid`-th pair is its."""
        grid = lax.axis_size("block")
        pairs = self.tiles[0, tile_map.COUNT] * self.num_columns
        return lax.div(pairs + (grid - 1) - lax.axis_index("block"), grid)

    def item(self, i) -> _Item:
        tile, tiles = self.call.tile, self.tiles
        pair = lax.axis_index("block") + i * lax.axis_size("block")
        near = lax.div(pair, self.num_columns)  # a tile of the same group
        place = pair - tiles[near, tile_map.HEAD] * self.num_columns
        size = tiles[near, tile_map.SIZE]
        row = tiles[near, tile_map.ROW] + lax.rem(place, size) * tile.block_t
        rows = lax.min(tiles[near, tile_map.END] - row, tile.block_t)
        if tile.cluster > 1:  # halves, so that neither block waits for the other
            half = _round_up(lax.div(rows + (tile.cluster - 1), tile.cluster))
            first = half * lax.axis_index("rank")
            row, rows = row + first, lax.max(lax.min(rows - first, half), 0)
        return _Item(
            tiles[near, tile_map.SLOT], pl.multiple_of(row, CHUNK), rows, lax.div(place, size)
        )

    @property
    def lead(self) -> int:
        """Stages that the first consumer is ahead. 0 where an item is no longer than the pipeline:
        the first consumer might report the next item's before the second has seen this one's.
        """
        return self.call.gemm.lead if self.num_k >= self.call.gemm.stages else 0

    def first_column(self, item: _Item, part: int):
        """Returns the first column in the pool: gate and up are halves, the parts of `down`
        neighbours.
        """
        first = item.column * self.item_columns
        if self.out_columns % self.item_columns:  # the last item begins within the one before
            first = lax.min(first, self.out_columns - self.item_columns)
        stride = self.call.gemm.columns if self.call.join is None else self.out_columns
        return first + part * stride

    def load(self) -> None:
        """Runs the loading warpgroup: keeps every free stage on its way."""
        stages, num_k = self.call.gemm.stages, self.num_k

        @pl.loop(0, self.num_items)
        def _(i):
            item = self.item(i)

            @pl.loop(0, num_k)
            def _(k):
                step = i * num_k + k
                stage = lax.rem(step, stages)

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(self.empty.at[stage])

                self.load_stage(item, k, stage)

        if self.then is not None:
            self.prefetch(*self.then)

        total = self.num_items * num_k

        @pl.loop(lax.max(total - stages, 0), total)  # every phase is to be seen by a waiter
        def _(step):
            plgpu.barrier_wait(self.empty.at[lax.rem(step, stages)])

    def prefetch(self, call: Gemm, columns: int, weights: Any) -> None:
        """Asks L2 for the weights that this block will begin the next product with."""
        gemm = call.gemm
        block = self._replace(call=call, columns=columns, rows=self.out, weights=weights)
        step_bytes = gemm.block_k * gemm.parts * gemm.columns * weights.dtype.itemsize
        step_bytes //= 1 if self.packed is None else 2
        steps = max(1, min(gemm.stages, block.num_k, _PREFETCHED // step_bytes))

        @pl.when(block.num_items > 0)
        def _():
            item = block.item(0)
            for k in range(steps):
                for part in range(gemm.parts):
                    plgpu.async_prefetch(block.weights_at(item, part, k))

    def weights_at(self, item: _Item, part: int, k) -> Any:
        """Returns what a stage holds of a part, in global memory."""
        gemm = self.call.gemm
        size = gemm.block_k if self.packed is None else gemm.block_k // 2
        ks = pl.ds(k * size, size)
        columns = pl.ds(self.first_column(item, part), gemm.columns)
        is_plain = self.scales is None and self.packed is None
        at = (ks, columns) if is_plain else (columns, ks)
        return self.weights.at[item.slot, *at]

    def load_stage(self, item: _Item, k, stage) -> None:
        gemm, tile = self.call.gemm, self.call.tile
        ks = pl.ds(k * gemm.block_k, gemm.block_k)
        for part in range(gemm.parts):
            copies = [(self.weights_at(item, part, k), self.w_smem, tile.cluster > 1)]
            for of_all, staged in self.groups:
                assert self.packed is not None
                columns = pl.ds(self.first_column(item, part), gemm.columns)
                first = lax.div(k * gemm.block_k, self.packed.group)
                source = of_all.at[item.slot, pl.ds(first, staged.shape[2]), columns]
                # Whole in each block: TMA writes to multiples of 128 bytes, which half may not be.
                copies.append((source, staged, False))
            for source, staged, is_shared in copies:
                plgpu.copy_gmem_to_smem(
                    source,
                    staged.at[stage, part],
                    self.full.at[stage],
                    collective_axes=("rank",) if is_shared else None,
                )

        def load_rows(width: int) -> None:
            plgpu.copy_gmem_to_smem(
                self.rows.at[pl.ds(item.row, width), ks],
                self.x_smem.at[stage, pl.ds(0, width)],
                self.full.at[stage],
            )

        _by_width(tile.widths, item.rows, load_rows)

    def multiply(self) -> None:
        """Runs a consumer warpgroup: its 64 columns of each part, for every item."""

        @pl.loop(0, self.num_items)
        def _(i):
            item = self.item(i)
            if self.lead:
                follows = lax.axis_index("wg") > 0
                pl.when(follows)(lambda: plgpu.barrier_wait(self.ahead))

            def compute(width: int) -> None:
                results = self.biased(item, self.products(i, item, width))
                if (join := self.call.join) is not None:
                    results = [join(*results)]
                if (apply := self.call.apply) is not None:
                    results = map(apply, results)
                for part, result in enumerate(results):
                    self.store(item, part, result)

            _by_width(self.call.tile.widths, item.rows, compute)

        plgpu.wait_smem_to_gmem(0)

    def products(self, i, item: _Item, width: int) -> Sequence[Float[Array, "LANES width"]]:
        gemm, num_k = self.call.gemm, self.num_k
        product = self.product if self.scales is None else self.quantized_product
        product = product if self.packed is None else self.packed_product

        def accumulate(*accs):
            def one_step(k, scales):
                step = i * num_k + k
                stage = lax.rem(step, gemm.stages)
                next_scales = self.block_scales(item, lax.min(k + 1, num_k - 1))
                plgpu.barrier_wait(self.full.at[stage])
                product(accs, stage, width, scales)
                plgpu.wgmma_wait(self.in_flight)
                self.free(step - self.in_flight // gemm.parts, k >= self.in_flight // gemm.parts)
                if self.lead:
                    leads = (lax.axis_index("wg") == 0) & (k == self.lead - 1)
                    pl.when(leads)(lambda: plgpu.barrier_arrive(self.ahead))
                return next_scales

            lax.fori_loop(0, num_k, one_step, self.block_scales(item, 0))
            results = [acc[...] for acc in accs]
            if self.in_flight:
                self.free((i + 1) * num_k - 1, True)
            return results

        acc = plgpu.WGMMAAccumulatorRef((LANES, width), jnp.float32)
        return pl.run_scoped(accumulate, *[acc] * gemm.parts)

    def biased(self, item: _Item, results: Sequence[Any]) -> Sequence[Any]:
        """Returns an item's products with the bias of their columns, where there is one."""
        if self.bias is None:
            return results
        own, layout = lax.axis_index("wg") * LANES, plgpu.Layout.WGMMA.reduce(1)
        columns = [self.first_column(item, part) + own for part in range(len(results))]
        places = [(item.slot, pl.ds(pl.multiple_of(column, LANES), LANES)) for column in columns]
        biases = [plgpu.load(self.bias, at, layout=layout, optimized=False) for at in places]
        return [
            result + lax.broadcast_in_dim(bias, result.shape, [0])
            for result, bias in zip(results, biases, strict=True)
        ]

    @property
    def in_flight(self) -> int:
        """Products in flight while the next stage is waited for: those of one stage.

        0 where weights come from registers, which the next stage's are about to take.
        """
        return self.call.gemm.parts if self.scales is None and self.packed is None else 0

    def free(self, step, condition) -> None:
        stage = lax.rem(step, self.call.gemm.stages)
        pl.when(condition)(lambda: plgpu.barrier_arrive(self.empty.at[stage]))

    def product(self, accs, stage, width: int, scales: tuple) -> None:
        own = pl.ds(lax.axis_index("wg") * LANES, LANES)
        x = self.x_smem.at[stage, pl.ds(0, width)].T
        for part, acc in enumerate(accs):
            plgpu.wgmma(acc, self.w_smem.at[stage, part, :, own].T, x)

    def quantized_product(self, accs, stage, width: int, scales: tuple) -> None:
        own = pl.ds(lax.axis_index("wg") * LANES, LANES)
        x = self.x_smem.at[stage, pl.ds(0, width)].T
        for part, acc in enumerate(accs):
            values = self.w_smem[stage, part, own].astype(jnp.float32)
            plgpu.wgmma(acc, (values * scales[part]).astype(jnp.bfloat16), x)
        plgpu.commit_smem()  # TMA overwrites what was read here by other means than its own

    def packed_product(self, accs, stage, width: int, scales: tuple) -> None:
        assert self.packed is not None
        own = pl.ds(lax.axis_index("wg") * LANES, LANES)
        for part, acc in enumerate(accs):
            for pair in range(self.call.gemm.block_k // (2 * HALF)):
                codes = self.w_smem[stage, part, own, pl.ds(pair * HALF, HALF)].astype(jnp.uint16)
                for half, own_codes in enumerate((codes & 15, codes >> 4)):
                    first = (2 * pair + half) * HALF
                    group = min(first // self.packed.group, self.groups[0][1].shape[2] - 1)
                    of_group = [staged[stage, part, group, own] for _, staged in self.groups]
                    x = self.x_smem.at[stage, pl.ds(0, width), pl.ds(first, HALF)].T
                    plgpu.wgmma(acc, _dequantized(own_codes, *of_group), x)
        plgpu.commit_smem()

    def block_scales(self, item: _Item, k) -> tuple:
        """Returns the scales of this warpgroup's weights in the k-th step, read a step ahead of
        use.
        """
        if self.scales is None:
            return ()
        gemm = self.call.gemm
        k_block = lax.div(k * gemm.block_k, BLOCK)
        own = lax.axis_index("wg") * LANES
        columns = [self.first_column(item, part) + own for part in range(gemm.parts)]
        return tuple(self.scales[item.slot, lax.div(c, BLOCK), k_block] for c in columns)

    def store(self, item: _Item, part: int, result: Float[Array, "LANES width"]) -> None:
        first = self.first_column(item, part) + lax.axis_index("wg") * LANES
        if self.out_columns % self.item_columns == 0:
            self.store_at(first, item, result)
        else:  # columns of the item before are stored once, by it
            own = first >= item.column * self.item_columns
            pl.when(own)(lambda: self.store_at(first, item, result))

    def store_at(self, first, item: _Item, result: Float[Array, "LANES width"]) -> None:
        width = result.shape[1]
        warpgroup = lax.axis_index("wg")
        staged = self.out_smem.at[warpgroup, pl.ds(0, width)]
        columns = pl.ds(pl.multiple_of(first, LANES), LANES)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged.T[...] = plgpu.layout_cast(
            result.astype(self.out.dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()

        def whole() -> None:
            plgpu.copy_smem_to_gmem(staged, self.out.at[pl.ds(item.row, width), columns])

        def ragged() -> None:
            @pl.loop(0, lax.div(_round_up(item.rows), CHUNK))
            def _(chunk):
                start = pl.multiple_of(chunk * CHUNK, CHUNK)
                plgpu.copy_smem_to_gmem(
                    self.out_smem.at[warpgroup, pl.ds(start, CHUNK)],
                    self.out.at[pl.ds(pl.multiple_of(item.row + start, CHUNK), CHUNK), columns],
                )

        lax.cond(item.rows > width - CHUNK, whole, ragged)


def _dequantized(
    codes: UInt16[Array, "LANES k"], scales: Any, zeros: Any = None
) -> Float[Array, "LANES k"]:
    """Returns the bfloat16 that uint16 codes of four bits stand for, as `four_bits.dequantize`
    does; scales and zero points are a row's.

    A code in the last bits of 128 is a number without a conversion, and two share a register.
    """

    def wide(of_rows: Any) -> Any:
        return lax.broadcast_in_dim(of_rows, codes.shape, [0])

    def number(code: Any) -> Any:
        return lax.bitcast_convert_type(code | jnp.uint16(0x4300), jnp.bfloat16)

    if scales.dtype != jnp.uint8:
        middle = jnp.bfloat16(128 + MIDDLE)
        if zeros is not None:
            middle = wide((zeros.astype(jnp.float32) + 128).astype(jnp.bfloat16))
        steps = number(codes) - middle
        if scales.dtype == jnp.bfloat16:
            return steps * wide(scales)
        product = steps.astype(jnp.float32) * wide(scales.astype(jnp.float32))
        return product.astype(jnp.bfloat16)
    size = number(codes & jnp.uint16(7)) - jnp.bfloat16(128)
    # Twice the magnitude of E2M1: 0 1 2 3 4 6 8 12.
    zero = jnp.bfloat16(0)
    twice = size + jnp.maximum(size - jnp.bfloat16(4), zero)
    twice = twice + jnp.bfloat16(2) * jnp.maximum(size - jnp.bfloat16(6), zero)
    sign = (codes & jnp.uint16(8)) << jnp.uint16(12)
    bits = lax.bitcast_convert_type(twice, jnp.uint16) | sign
    exponents = lax.bitcast_convert_type(scales.astype(jnp.uint16) << jnp.uint16(7), jnp.bfloat16)
    return lax.bitcast_convert_type(bits, jnp.bfloat16) * wide(exponents * jnp.bfloat16(0.5))


def _round_up(rows):
    """Rounds up to a multiple of eight."""
    return lax.div(rows + (CHUNK - 1), CHUNK) * CHUNK


def _by_width(widths: Sequence[int], rows, run: Callable[[int], None]) -> None:
    """Runs `run` with the first width that holds `rows`."""
    width, *wider = widths
    if wider:
        lax.cond(rows <= width, lambda: run(width), lambda: _by_width(wider, rows, run))
    else:
        run(width)


def _with_registers(role: Callable[[], None], count: int, action: Any) -> Callable[[], None]:
    def run() -> None:
        plgpu.set_max_registers(count, action=action)
        role()

    return run
