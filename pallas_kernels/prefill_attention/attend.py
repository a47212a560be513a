"""The warpgroups of the prefill attention kernel that multiply."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.layouts import accumulate, of_rows, product
from pallas_kernels.prefill_attention import work
from pallas_kernels.prefill_attention.parts import Item, Refs, Shape, for_each_item, zero
from pallas_kernels.prefill_attention.tiles import LANES, WARPGROUPS


def attend(shape: Shape, refs: Refs, warpgroup) -> None:
    """Runs a warpgroup that multiplies."""

    def item(at: Item, steps):
        zeros = partial(nothing, shape, refs)
        store(shape, refs, warpgroup, at, lax.cond(at.blocks > 0, of_item(at, steps), zeros))
        return steps + at.blocks

    def of_item(at: Item, steps):
        return Attention(shape, refs, warpgroup, at, steps)

    plgpu.barrier_arrive(refs.q_empty)
    multiply(shape, refs, warpgroup, item)


def nothing(shape: Shape, refs: Refs) -> Array:
    """Returns the result of rows without keys."""
    zeros = jnp.zeros((LANES, shape.head_dim), refs.out.dtype)
    return plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def multiply(shape: Shape, refs: Refs, warpgroup, item: Callable[[Item, Any], Any]) -> None:
    """Runs `item` for all of the block's in a warpgroup that multiplies (`for_each_item`)."""
    for stage in range(shape.tile.stages):
        plgpu.barrier_arrive(refs.empty.at[stage])

    @pl.when(warpgroup == 1)
    def _():
        plgpu.barrier_arrive(refs.turn.at[0])

    for_each_item(shape, refs, item)
    plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == 0)
    def _():
        plgpu.barrier_wait(refs.turn.at[0])


NONE = -1e30
"""The largest score of a row that has seen no key: finite, so that it can be subtracted."""


class Attention:
    """Attention of a warpgroup's rows over one item's keys."""

    def __init__(self, shape: Shape, refs: Refs, warpgroup, at: Item, steps) -> None:
        self.shape, self.refs, self.at = shape, refs, at
        self.tile = shape.tile
        self.warpgroup, self.steps = warpgroup, steps
        self.row = at.row + warpgroup * self.tile.rows
        self.factor = shape.scale * math.log2(math.e)  # powers of two are what the hardware has

    def key_stage(self, step):
        """Returns the stage of the ring of keys, and the index of its barriers."""
        return lax.rem(self.steps + step, self.tile.key_stages)

    def value_stage(self, step):
        """Returns the stage of the ring of values; its barriers follow those of keys."""
        return lax.rem(self.steps + step, self.tile.value_stages)

    def wait_for_values(self, step) -> None:
        """Waits until the step's values are there."""
        stage = self.tile.key_stages + self.value_stage(step)
        plgpu.barrier_wait(self.refs.full.at[stage])

    def release_values(self, step) -> None:
        """Lets the step's values be overwritten."""
        stage = self.tile.key_stages + self.value_stage(step)
        plgpu.barrier_arrive(self.refs.empty.at[stage])

    def __call__(self) -> Array:
        """Returns the rows' results."""
        at, refs = self.at, self.refs
        plgpu.barrier_wait(refs.q_full)
        state = self.first()

        def rest(acc):
            # Steps below `whole` hold no key that is too late for a row of this warpgroup, those
            # from `first` on none that is too early.
            whole = lax.max(self.whole(), 1)
            first, now = 1, state
            if self.shape.window:
                early = lax.min(self.row + self.tile.rows, at.hi) + at.offset - self.shape.window
                first = lax.div(early + (self.tile.block_kv - 1), self.tile.block_kv)
                first = lax.min(lax.max(first, 1), at.blocks)
                whole = lax.max(whole, first)
                now = lax.fori_loop(1, first, lambda i, s: self.next(acc, i, s, masked=True), now)
            now = lax.fori_loop(first, whole, lambda i, s: self.next(acc, i, s, masked=False), now)
            now = lax.fori_loop(
                whole, at.blocks, lambda i, s: self.next(acc, i, s, masked=True), now
            )
            plgpu.barrier_arrive(refs.q_empty)
            _, norm, p = now
            return self.last(acc, p), norm

        out, norm = self.accumulator(rest)
        out = out * of_rows(1.0 / norm, out.shape)
        return out.astype(refs.out.dtype)

    def whole(self):
        """Returns how many steps have no key that is too late for a row of the warpgroup."""
        first_row = lax.max(self.row, self.at.lo)
        whole = lax.div(first_row + self.at.offset + 1, self.tile.block_kv)
        return lax.min(lax.max(whole, 0), self.at.blocks)

    def scores(self, step, queue_more: Callable[[], int], masked: bool) -> Array:
        """Computes the unscaled scores of the step's keys.

        `queue_more` may queue other products behind theirs and returns how many: those stay in
        flight.
        """
        refs, stage = self.refs, self.key_stage(step)

        def queue(scores):
            plgpu.barrier_wait(refs.full.at[stage])
            if refs.latents is not None:
                plgpu.barrier_wait(refs.full.at[self.tile.stages + stage])
            plgpu.barrier_wait(refs.turn.at[self.warpgroup])
            for of in (refs,) if refs.latents is None else (refs, refs.latents):
                plgpu.wgmma(scores, self.queries(step, of.q_smem), of.k_smem.at[stage].T)
            more = queue_more()
            plgpu.barrier_arrive(refs.turn.at[1 - self.warpgroup])
            return plgpu.wgmma_accumulator_load(scores, wait_n=more)

        shape = (LANES, self.tile.block_kv)
        s = accumulate(queue, shape)
        plgpu.barrier_arrive(refs.empty.at[stage])
        return self.mask(s, step) if masked else s

    def queries(self, step, smem):
        """Returns the warpgroup's rows."""
        mine = self.warpgroup
        if self.shape.head_dim > 128 or self.shape.rope:
            # Plus zero, but see `zero`: their many descriptors are not to be held in registers.
            mine = mine + lax.min(self.steps + step, 0)
        return smem.at[mine]

    def mask(self, s, step):
        """Returns the scores without those of keys that a row does not see."""
        shape, layout = s.shape, plgpu.Layout.WGMMA
        if self.shape.window:
            # A number a row: of as many as there are scores the differences from columns would be
            # held in 64 registers through every loop.
            shape, layout = shape[:1], layout.reduce(1)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
        last = (row & (self.tile.rows - 1)) + (
            self.row + self.at.offset - step * self.tile.block_kv
        )
        if self.shape.window:
            last = of_rows(last, s.shape)
        # `column <= last`, written so that a thread's columns differ by constants alone. As sums
        # with the lane they would be computed once and held in 32 registers through every loop.
        seen = (column & -8) <= last - (column & 7)
        if self.shape.window:
            seen &= (column & -8) > last - (column & 7) - self.shape.window
        return jnp.where(seen, s, -jnp.inf)

    def first(self):
        """Returns the state (largest score, sum of weights, weights of the step) after the first
        step.
        """
        s = self.scores(0, lambda: 0, masked=True)
        top = jnp.max(s, axis=1) * self.factor
        if self.shape.window:  # a row may see none of the first step's keys
            top = jnp.maximum(top, NONE)
        if self.refs.sinks is None:
            p = jnp.exp2(s * self.factor - of_rows(top, s.shape))
            norm = jnp.sum(p, axis=1)
        else:  # a score more, of a key without a value
            at = lax.div(self.at.head, self.tile.pack)
            layout = plgpu.Layout.WGMMA.reduce(1)
            sinks = plgpu.load(self.refs.sinks, (at,), layout=layout, optimized=False)
            top = jnp.maximum(top, sinks)
            p = jnp.exp2(s * self.factor - of_rows(top, s.shape))
            norm = jnp.sum(p, axis=1) + jnp.exp2(sinks - top)
        self.wait_for_values(0)
        return top, norm, self.narrow(p)

    def next(self, acc, step, state, *, masked: bool):
        """Weighs the values of the step before, and meanwhile finds the weights of this one."""
        top, norm, p = state

        def values():
            self.weigh(acc, p, step - 1)
            return 1

        s = self.scores(step, values, masked)
        new_top = jnp.maximum(top, jnp.max(s, axis=1) * self.factor)
        keep = jnp.exp2(top - new_top)
        p = jnp.exp2(s * self.factor - of_rows(new_top, s.shape))
        norm = norm * keep + jnp.sum(p, axis=1)
        # The next step weighs this one's values. They are waited for here because that ends a basic
        # block: within one, ptxas moves the wait for the product, which the accumulator needs, up
        # to before the exponentials.
        self.wait_for_values(step)
        acc[...] = acc[...] * of_rows(keep, acc.shape)
        self.release_values(step - 1)
        return new_top, norm, self.narrow(p)

    def narrow(self, p):
        """Rounds weights in this step already: float32 ones would take the next twice the
        registers.
        """
        return lax.optimization_barrier(p.astype(self.refs.q.dtype))

    def last(self, acc, p) -> Array:
        """Weighs the last values; returns the sum over all."""
        at = self.at
        step = at.blocks - 1
        live = at.kv_len - step * self.tile.block_kv

        @pl.when(live < self.tile.block_kv)
        def _():
            self.clean(self.value_stage(step), live)

        self.weigh(acc, p, step)
        out = acc[...]
        self.release_values(step)
        return out

    def clean(self, stage, live) -> None:
        """Zeroes the values from row `live` on: their weight is 0, but they may be infinite."""
        wide = self.shape.head_dim // LANES
        parts = self.tile.block_kv // LANES * wide

        def clean_part(part):
            row = pl.multiple_of(lax.div(part, wide) * LANES, LANES)
            column = pl.multiple_of(lax.rem(part, wide) * LANES, LANES)
            v = self.refs.v_smem.at[stage, pl.ds(row, LANES), pl.ds(column, LANES)]
            at = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
            v[...] = jnp.where(at + row < live, v[...], jnp.zeros(v.shape, v.dtype))

        @pl.loop(0, -(-parts // WARPGROUPS) + zero(self.at))
        def _(i):
            part = i * WARPGROUPS + self.warpgroup
            pl.when(part < parts)(partial(clean_part, part))

        plgpu.commit_smem()
        plgpu.barrier_arrive(self.refs.clean)
        plgpu.barrier_wait(self.refs.clean)

    def accumulator(self, run: Callable[[Any], Any]) -> Any:
        """Calls `run` with an accumulator of zeros."""
        kept = self.refs.acc_smem.at[self.warpgroup] if self.shape.interpreted else None
        return accumulate(run, (LANES, self.shape.head_dim), kept)

    def weigh(self, acc, p, step) -> None:
        """Adds `p @ values`."""
        v = self.refs.v_smem.at[self.value_stage(step)]
        if not self.shape.interpreted:
            plgpu.wgmma(acc, p, v)
            return
        p_smem = self.refs.p_smem.at[self.warpgroup]
        p_smem[...] = p
        plgpu.commit_smem()
        acc[...] = acc[...] + product(p_smem, v)


def store(shape: Shape, refs: Refs, warpgroup, at: Item, out) -> None:
    """Stores the rows [lo, hi) of a warpgroup's results."""
    rows, pack = shape.tile.rows, shape.tile.pack
    mine = warpgroup + zero(at)
    tiled, linear = (form.at[mine] for form in refs.out_smem)
    row = pl.multiple_of(at.row + warpgroup * rows, work.ALIGN)
    first = lax.max(at.lo - row, 0)
    count = lax.min(at.hi - row, rows) - first  # may be negative: nothing to store

    def copy(form, start, size, columns):
        for i in range(pack):
            plgpu.copy_smem_to_gmem(
                form.at[pl.ds(i * rows + start, size)],
                refs.out.at[pl.ds(row + start, size), at.head + i, columns],
            )

    def stage(form, part, width):
        # Columns 64 at a time: the addresses then differ by constants, which takes few registers.
        for start in range(0, shape.staged, width):
            form.at[:, pl.ds(start, width)][...] = part[:, start : start + width]
        plgpu.commit_smem()

    for column in range(0, shape.head_dim, shape.staged):
        columns = pl.ds(column, shape.staged)
        part = out[:, column : column + shape.staged]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(count == rows)
        def _(part=part, columns=columns):
            stage(tiled, part, LANES)
            copy(tiled, 0, rows, columns)

        @pl.when(count < rows)
        def _(part=part, columns=columns):
            stage(linear, part, 32)
            start, size = first, rows // 2
            while size:  # as many rows as `count` says, in powers of two
                has = lax.max(count, 0) & size
                pl.when(has > 0)(partial(copy, linear, start, size, columns))
                start, size = start + has, size // 2
