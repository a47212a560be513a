"""Stages of the routing kernel: from logits in shared memory to the sorted row of each visit."""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import (
    BY_ROW,
    I32,
    ROWS,
    WGMMA,
    across,
    by_column,
    by_row,
    down,
    iota,
)
from pallas_kernels.routing.parts import (
    BY_EXPERT,
    DEGRADABLE,
    EXEMPT,
    EXEMPT_VISIT,
    EXPERTS,
    PADDING,
    PINNED,
    Block,
    by_expert,
    own,
    product,
)
from pallas_kernels.routing.reference import LOWEST, TINY


def gate(at: Block, kind) -> list:
    """Picks, and the visits of each expert, into shared memory; the weights of picks."""
    sizes, smem = at.sizes, at.smem
    shape = (ROWS, sizes.experts)
    expert = iota(shape, 1, EXPERTS)
    logits = plgpu.load(smem.logits, layout=EXPERTS, optimized=False)
    x = jnp.where(logits >= LOWEST, logits, LOWEST)
    scale = None
    if sizes.scoring == "softmax" and not sizes.normalize:
        scale = jnp.sum(jnp.exp(logits - across(jnp.max(x, axis=1), shape)), axis=1)

    def pick(k, x):
        top = jnp.max(x, axis=1)
        best = jnp.where(x == across(top, shape), expert, sizes.experts)
        picked = jnp.min(best, axis=1)
        smem.weights[:, k], smem.ids[:, k] = top, picked
        return jnp.where(expert == across(picked, shape), -jnp.inf, x)

    x = lax.fori_loop(0, sizes.picks, pick, x)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.ids, at.out.ids.at[at.own])
    visit = jnp.where(kind == DEGRADABLE, 1, jnp.where(kind == EXEMPT, EXEMPT_VISIT, 0))
    visits = jnp.where(x == -jnp.inf, across(visit, shape), 0)
    smem.visits[pl.ds(0, sizes.experts)] = jnp.sum(visits, axis=0)
    return _weights(at, scale)


def _weights(at: Block, scale) -> list:
    """Weights of the picks, whose logits are in shared memory; `scale` is softmax's sum."""
    sizes = at.sizes
    tops = [by_row(at.smem.weights.at[:, k]) for k in range(sizes.picks)]
    if sizes.scoring == "sigmoid":
        weights = [1.0 / (1.0 + jnp.exp(-top)) for top in tops]
    else:
        weights = [jnp.exp(top - tops[0]) for top in tops]
    if sizes.normalize:
        scale = jnp.maximum(functools.reduce(jnp.add, weights), TINY)
    return [w / scale for w in weights] if scale is not None else weights


def plan(at: Block, visits) -> None:
    """Which expert serves the visits to each one; S1. See `reference.brownout_plan`."""
    sizes, smem = at.sizes, at.smem
    wide = (ROWS, sizes.experts)
    used = pl.ds(0, sizes.experts)
    count = visits & (EXEMPT_VISIT - 1)
    # An expert's visits are at most the rows there are: products with 100 and 512 fit.
    place = count * 512 + (511 - iota((sizes.experts,), 0, BY_EXPERT))
    key = jnp.where(visits >= EXEMPT_VISIT, PINNED, 0) + place
    smem.key[used] = key
    needed = at.given.threshold[0] * jnp.sum(count)

    @pl.loop(0, sizes.padded, step=ROWS)
    def _(first):
        own = pl.ds(pl.multiple_of(first, ROWS), ROWS)
        mine = by_row(smem.key.at[own])
        ahead = down(key, wide) > across(mine, wide)
        before = jnp.sum(jnp.where(ahead, down(count, wide), 0), axis=1)
        smem.s1[own] = jnp.where((mine >= PINNED) | (100 * before < needed), 1, 0)

    in_s1 = by_expert(smem.s1.at[used])
    left = jnp.where((in_s1 == 0) & (count > 0), by_expert(smem.groups.at[used]), -2)
    strategy = jnp.full((ROWS,), at.given.strategy[0])

    @pl.loop(0, sizes.padded, step=ROWS)
    def _(first):
        own = pl.ds(pl.multiple_of(first, ROWS), ROWS)
        group, in_s1 = by_row(smem.groups.at[own]), by_row(smem.s1.at[own]) != 0
        together = down(left, wide) == across(group, wide)
        members = jnp.sum(jnp.where(together, 1, 0), axis=1)
        expert = first + iota((ROWS,), 0, BY_ROW)
        partial = jnp.where(~in_s1 & (group >= 0) & (members > 1), sizes.experts + group, expert)
        full = jnp.where(in_s1, expert, -1)
        smem.target[own] = jnp.where(strategy == 0, expert, jnp.where(strategy == 1, full, partial))


def look_up(at: Block, kind) -> list:
    """Logical expert of each visit, also into shared memory."""
    sizes, smem = at.sizes, at.smem
    shape = (ROWS, sizes.experts)
    expert = iota(shape, 1, EXPERTS)
    target = down(by_expert(smem.target.at[pl.ds(0, sizes.experts)]), shape)

    @pl.loop(0, sizes.picks)
    def _(k):
        picked = by_row(smem.ids.at[:, k])
        found = jnp.sum(jnp.where(expert == across(picked, shape), target, 0), axis=1)
        served = jnp.where(kind == DEGRADABLE, found, picked)
        smem.expert_ids[:, k] = jnp.where(kind == PADDING, -1, served)

    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.expert_ids, at.out.expert_ids.at[at.own])
    return [by_row(smem.expert_ids.at[:, k]) for k in range(sizes.picks)]


def merge_repeats(at: Block, expert_ids: list, weights: list) -> list:
    """A row's weights summed where its visits meet, into shared memory; which visits are kept."""
    kept = []
    for k, expert in enumerate(expert_ids):
        same = [other == expert for other in expert_ids]
        first = functools.reduce(lambda a, b: a & ~b, same[:k], expert >= 0)
        pairs = zip(same, weights, strict=True)
        total = functools.reduce(jnp.add, (jnp.where(mine, w, 0.0) for mine, w in pairs))
        at.smem.weights[:, k] = jnp.where(first, total, 0.0)
        kept.append(first)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(at.smem.weights, at.out.visit_weight.at[at.own])
    return kept


def one_hot(at: Block, expert_ids: list) -> None:
    """Visits one-hot, and the rows of each logical expert, into shared memory."""
    smem = at.smem
    shape = (ROWS, ROWS)

    @pl.loop(0, at.sizes.places // ROWS)
    def _(chunk):
        expert = iota(shape, 1, WGMMA) + chunk * ROWS
        hits = [expert == across(mine, shape, WGMMA) for mine in expert_ids]
        hit = functools.reduce(lambda a, b: a | b, hits)
        smem.visited[chunk] = jnp.where(hit, 1.0, 0.0).astype(jnp.bfloat16)

    plgpu.commit_smem()

    @pl.loop(0, at.sizes.places // ROWS)
    def _(chunk):
        rows = product(smem.visited.at[chunk].T, smem.ones.T)  # all eight columns are the sum
        smem.rows[own(chunk)] = jnp.max(rows, axis=1).astype(I32)


def starts(at: Block, rows) -> None:
    """First sorted row of each logical expert, into shared memory; the number of blocks."""
    sizes, smem = at.sizes, at.smem
    wide = (ROWS, sizes.places)
    block_m = jnp.full(rows.shape, sizes.block_m, I32)
    blocks = lax.div(rows + (sizes.block_m - 1), block_m)
    smem.rows[...] = rows

    @pl.loop(0, sizes.places, step=ROWS)
    def _(first):
        earlier = iota(wide, 1, WGMMA) < iota(wide, 0, WGMMA) + first
        before = jnp.sum(jnp.where(earlier, down(blocks, wide, WGMMA), 0), axis=1)
        smem.start[pl.ds(pl.multiple_of(first, ROWS), ROWS)] = before * sizes.block_m

    total = jnp.sum(blocks)

    @pl.when(at.index == 0)
    def _():
        at.out.num_blocks[0] = total


def ranks(at: Block, expert_ids: list, kept: list, before) -> None:
    """Sorted row of each visit, into shared memory: its expert's start plus the rows before."""
    sizes, smem = at.sizes, at.smem
    shape = (ROWS, ROWS)
    starts = smem.start
    if before is not None:
        starts = smem.first
        starts[...] = by_column(smem.start) + before

    def one_chunk(chunk, found):
        earlier = product(smem.earlier, smem.visited.at[chunk]).astype(I32)
        row = earlier + down(by_column(starts.at[own(chunk)]), shape, WGMMA)
        expert = iota(shape, 1, WGMMA) + chunk * ROWS
        hits = [expert == across(mine, shape, WGMMA) for mine in expert_ids]
        here = [jnp.sum(jnp.where(hit, row, 0), axis=1) for hit in hits]
        return tuple(map(jnp.add, found, here))

    nowhere = plgpu.layout_cast(jnp.full((ROWS,), 0, I32), BY_ROW)
    found = lax.fori_loop(0, sizes.places // ROWS, one_chunk, (nowhere,) * sizes.picks)
    for k, row in enumerate(found):
        smem.visit_row[:, k] = jnp.where(kept[k], row, sizes.sorted_rows)
