"""Stages of the routing kernel: from logits in shared memory to the sorted row of each visit."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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
    product,
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
    Sizes,
    by_expert,
    by_row_and_expert,
)
from pallas_kernels.routing.reference import BY_WEIGHT, LOWEST, TINY, is_far, no_less
from pallas_kernels.routing.values import Gating, Grouping

MAX_TOGETHER, MAX_TOGETHER_IN_TURNS, FEW = 128, 64, 32
"""Routed experts that sums over rows are made of at once, in a block of one turn and of several;
where there are more, they are made of so few at a time, that registers suffice."""

PICKS = 8
"""Of a row, that are ranked at once, likewise."""


class _Part(NamedTuple):
    """Routed experts that are looked at together."""

    first: int
    count: int

    @property
    def columns(self):
        """Indices of the experts from the part's first, for each row: equal for all parts of a
        size.
        """
        return iota((ROWS, self.count), 1, EXPERTS)

    def hits(self, picked):
        """Returns where each row's expert is."""
        return self.columns == across(picked - self.first, (ROWS, self.count))

    @property
    def slice(self):
        """Slice of arrays over experts."""
        return pl.ds(self.first, self.count)


def _parts(sizes: Sizes, size: int = 0) -> list[_Part]:
    """Returns parts of a size, or of one with which registers suffice."""
    count = sizes.experts
    most = MAX_TOGETHER if sizes.turns == 1 else MAX_TOGETHER_IN_TURNS
    together = size or (count if count <= most else FEW)
    return [_Part(first, min(together, count - first)) for first in range(0, count, together)]


def _of_all(operation: Callable, parts: list) -> Any:
    return functools.reduce(operation, parts)


def gate(at: Block) -> None:
    """Computes picks, their weights, and the visits of each expert, all in shared memory."""
    sizes, smem, gating = at.sizes, at.smem, at.sizes.gating
    grouping = gating.grouping
    parts = _parts(sizes, sizes.experts // grouping.count if grouping else 0)
    logits = [by_row_and_expert(smem.logits.at[:, part.slice]) for part in parts]
    xs = tuple(map(no_less, logits))
    top = scale = None
    mixes = gating.scoring == "sparsemixer"
    if gating.scoring == "softmax" and (sizes.by_score or not gating.normalize):
        top = _of_all(jnp.maximum, [jnp.max(x, axis=1) for x in xs])
        if not sizes.by_score:
            scale = _sum_of_exp(logits, top)
    if sizes.by_score:
        xs = _scores(xs, top)
    if sizes.biased:
        bias = [by_expert(smem.bias.at[part.slice]) for part in parts]
        xs = tuple(no_less(x + down(b, x.shape)) for x, b in zip(xs, bias, strict=True))
    if grouping:
        xs = _of_best_groups(grouping, parts, xs)

    def pick(k, xs):
        top = _of_all(jnp.maximum, [jnp.max(x, axis=1) for x in xs])
        first = []
        for part, x in zip(parts, xs, strict=True):
            best = jnp.where(x == across(top, x.shape), part.columns, sizes.experts)
            first.append(jnp.min(best, axis=1) + part.first)
        picked = _of_all(jnp.minimum, first)
        smem.weights[:, k] = _share_of_near(gating, xs, top) if mixes else top
        smem.ids[:, k] = picked
        pairs = zip(parts, xs, strict=True)
        return tuple(jnp.where(part.hits(picked), -jnp.inf, x) for part, x in pairs)

    xs = lax.fori_loop(0, sizes.picks, pick, xs)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.ids, at.out.ids.at[at.own])
    kind = by_row(smem.kind)
    visit = jnp.where(kind == DEGRADABLE, 1, jnp.where(kind == EXEMPT, EXEMPT_VISIT, 0))
    for part, x in zip(parts, xs, strict=True):
        visits = jnp.where(x == -jnp.inf, across(visit, x.shape), 0)
        visits = jnp.sum(visits, axis=0)
        if sizes.turns > 1:
            visits += by_expert(smem.visits.at[part.slice])
        smem.visits[part.slice] = visits
    if sizes.by_score:
        if top is not None and not gating.normalize:
            again = [by_row_and_expert(smem.logits.at[:, part.slice]) for part in parts]
            scale = _sum_of_exp(again, top)
        _read_picked(at)
    if not mixes:
        _weigh(at, top if sizes.by_score else None, scale)

    @pl.when(at.by_weight)
    def _():
        _share_out(at, kind)


def _share_of_near(gating: Gating, xs, top):
    """Returns each row's weight of a pick of sparsemixer, of what is left. See
    `reference.is_far`.
    """
    sums = []
    for x in xs:
        most = across(top, x.shape)
        far = is_far(x, most, gating.jitter)
        sums.append(jnp.sum(jnp.where(far, 0.0, jnp.exp(x - most)), axis=1))
    return gating.scale / _of_all(jnp.add, sums)


def _share_out(at: Block, kind) -> None:
    """Sums the gate weights of each expert's visits that may be degraded, in shared memory. See
    `reference.share_of`.
    """
    sizes, smem = at.sizes, at.smem
    for part in _parts(sizes):

        def add(k, found, part=part):
            weights, picked = by_row(smem.weights.at[:, k]), by_row(smem.ids.at[:, k])
            share = (weights * ((1 << 15) / sizes.gating.scale) + 0.5).astype(I32)
            share = across(jnp.where(kind == DEGRADABLE, share, 0), found.shape)
            return found + jnp.where(part.hits(picked), share, 0)

        none = plgpu.layout_cast(jnp.full((ROWS, part.count), 0, I32), EXPERTS)
        shares = jnp.sum(lax.fori_loop(0, sizes.picks, add, none), axis=0)
        if sizes.turns > 1:
            shares += by_expert(smem.shares.at[part.slice])
        smem.shares[part.slice] = shares


def _sum_of_exp(logits, top):
    """Returns each row's sum of exp(logit - top)."""
    return _of_all(jnp.add, [jnp.sum(jnp.exp(x - across(top, x.shape)), axis=1) for x in logits])


def _scores(xs, top):
    """Returns scores of logits: of softmax, if there is a row's `top`, else of sigmoid."""
    if top is None:
        return tuple(1.0 / (1.0 + jnp.exp(-x)) for x in xs)
    total = _sum_of_exp(xs, top)
    return tuple(jnp.exp(x - across(top, x.shape)) / across(total, x.shape) for x in xs)


def _of_best_groups(grouping: Grouping, parts: list[_Part], xs):
    """Returns `xs`, the lowest there is in groups that are not among a row's best. Each part is a
    group.
    """
    worth = []
    for part, left in zip(parts, xs, strict=True):
        of_group = 0.0
        for i in range(grouping.best):
            most = jnp.max(left, axis=1)
            of_group += most
            if i + 1 < grouping.best:
                best = jnp.where(left == across(most, left.shape), part.columns, part.count)
                first = across(jnp.min(best, axis=1), left.shape)
                left = jnp.where(part.columns == first, -jnp.inf, left)
        worth.append(of_group)
    kept = []
    for g, (own, x) in enumerate(zip(worth, xs, strict=True)):
        others = [other >= own if j < g else other > own for j, other in enumerate(worth) if j != g]
        ahead = functools.reduce(jnp.add, [jnp.where(is_ahead, 1, 0) for is_ahead in others])
        most = jnp.where(ahead < grouping.top, jnp.inf, LOWEST)
        kept.append(jnp.minimum(x, across(most, x.shape)))
    return tuple(kept)


def _read_picked(at: Block) -> None:
    """Stores the logits of what was picked by other keys as weights. A warp reads sixteen at a
    time.
    """
    smem = at.smem

    def one_warp(warp):
        @pl.loop(0, at.sizes.picks)
        def _(k):
            rows = [warp * 16 + i for i in range(16)]
            picked = [smem.ids[row, k] for row in rows]
            found = [smem.logits[row, expert] for row, expert in zip(rows, picked, strict=True)]
            for row, logit in zip(rows, found, strict=True):
                smem.weights[row, k] = no_less(logit)

    plgpu.warp_map(one_warp)
    plgpu.commit_smem()


def _weigh(at: Block, largest, scale) -> None:
    """Makes weights of the picks' logits, in shared memory. `largest` is a row's largest logit,
    None where the first pick's is it; `scale` is softmax's sum.
    """
    gating = at.sizes.gating
    tops = [by_row(at.smem.weights.at[:, k]) for k in range(gating.top_k)]
    if gating.scoring == "sigmoid":
        weights = [1.0 / (1.0 + jnp.exp(-top)) for top in tops]
    else:
        largest = tops[0] if largest is None else largest
        weights = [jnp.exp(top - largest) for top in tops]
    if gating.normalize:
        scale = jnp.maximum(functools.reduce(jnp.add, weights), TINY)
    for k, weight in enumerate(weights):
        weight = weight if scale is None else weight / scale
        at.smem.weights[:, k] = weight if gating.scale == 1 else gating.scale * weight


def plan(at: Block, visits) -> None:
    """Decides S1 and which expert serves the visits to each one. See `reference.brownout_plan`."""
    sizes, smem = at.sizes, at.smem
    used = pl.ds(0, sizes.experts)
    count = visits & (EXEMPT_VISIT - 1)
    # An expert's visits are at most the rows there are: products with 100 and 512 fit.
    place = count * 512 + (511 - iota((sizes.experts,), 0, BY_EXPERT))
    smem.key[used] = jnp.where(visits >= EXEMPT_VISIT, PINNED, 0) + place
    layer = at.given.groups_layer[0] if sizes.by_layer else 0
    needed = at.given.threshold[layer] * jnp.sum(count)

    @pl.loop(0, sizes.padded, step=ROWS)
    def _(first):
        own = pl.ds(pl.multiple_of(first, ROWS), ROWS)
        mine = by_row(smem.key.at[own])
        before = _of_all(jnp.add, [_visits_ahead(at, part, mine) for part in _parts(sizes)])
        smem.s1[own] = jnp.where((mine >= PINNED) | (100 * before < needed), 1, 0)

    @pl.when(at.by_weight)
    def _():
        _keep_by_weight(at)

    for part in _parts(sizes):
        smem.left[part.slice] = _left(at, part)
    strategy = jnp.full((ROWS,), at.given.strategy[0] & (BY_WEIGHT - 1))

    @pl.loop(0, sizes.padded, step=ROWS)
    def _(first):
        own = pl.ds(pl.multiple_of(first, ROWS), ROWS)
        group, in_s1 = by_row(smem.groups.at[own]), by_row(smem.s1.at[own]) != 0
        members = _of_all(jnp.add, [_members(at, part, group) for part in _parts(sizes)])
        expert = first + iota((ROWS,), 0, BY_ROW)
        partial = jnp.where(~in_s1 & (group >= 0) & (members > 1), sizes.experts + group, expert)
        full = jnp.where(in_s1, expert, -1)
        smem.target[own] = jnp.where(strategy == 0, expert, jnp.where(strategy == 1, full, partial))


def _keep_by_weight(at: Block) -> None:
    """Puts as many experts into S1 as are in it, by weight. See `reference._weightiest`."""
    sizes, smem = at.sizes, at.smem
    room = jnp.sum(by_expert(smem.s1.at[pl.ds(0, sizes.experts)]))

    @pl.loop(0, sizes.padded, step=ROWS)
    def _(first):
        own = pl.ds(pl.multiple_of(first, ROWS), ROWS)
        key, share = by_row(smem.key.at[own]), by_row(smem.shares.at[own])
        expert = first + iota((ROWS,), 0, BY_ROW)
        place = _of_all(jnp.add, [_ahead(at, part, share, expert) for part in _parts(sizes)])
        kept = (key >= PINNED) | ((_count_of(key) > 0) & (place < room))
        smem.s1[own] = jnp.where(kept, 1, 0)


def _ahead(at: Block, part: _Part, mine, expert):
    """Returns how many of `part` come before visited experts of these ids and shares."""
    shape = (ROWS, part.count)
    key, share = by_expert(at.smem.key.at[part.slice]), by_expert(at.smem.shares.at[part.slice])
    other = jnp.where(_count_of(key) > 0, share + 1, 0)  # comparisons are unsigned: no -1
    other = down(jnp.where(key >= PINNED, PINNED, other), shape)
    mine, before = across(mine + 1, shape), part.columns + part.first < across(expert, shape)
    return jnp.sum(jnp.where((other > mine) | ((other == mine) & before), 1, 0), axis=1)


def _visits_ahead(at: Block, part: _Part, mine):
    """Returns the visits to those of `part` that come before the experts whose keys are `mine`."""
    key, shape = by_expert(at.smem.key.at[part.slice]), (ROWS, part.count)
    visits = down(_count_of(key), shape)
    return jnp.sum(jnp.where(down(key, shape) > across(mine, shape), visits, 0), axis=1)


def _left(at: Block, part: _Part):
    """Returns the groups of the experts of `part` that are visited and not in S1; -2 for the
    others.
    """
    s1, key, groups = (
        by_expert(vector.at[part.slice]) for vector in (at.smem.s1, at.smem.key, at.smem.groups)
    )
    return jnp.where((s1 == 0) & (_count_of(key) > 0), groups, -2)


def _members(at: Block, part: _Part, group):
    """Returns how many experts that `_left` found are in each of the groups."""
    left, shape = by_expert(at.smem.left.at[part.slice]), (ROWS, part.count)
    return jnp.sum(jnp.where(down(left, shape) == across(group, shape), 1, 0), axis=1)


def _count_of(key):
    """Returns the visits that an expert's key was made of."""
    return (key & (PINNED - 1)) >> 9


def look_up(at: Block) -> list:
    """Returns the logical expert of each visit, and stores it in shared memory."""
    sizes, smem = at.sizes, at.smem
    kind = by_row(smem.kind)
    parts = _parts(sizes)
    targets = [down(by_expert(smem.target.at[part.slice]), (ROWS, part.count)) for part in parts]

    @pl.loop(0, sizes.picks)
    def _(k):
        picked = by_row(smem.ids.at[:, k])
        found = 0
        for part, target in zip(parts, targets, strict=True):
            found += jnp.sum(jnp.where(part.hits(picked), target, 0), axis=1)
        served = jnp.where(kind == DEGRADABLE, found, picked)
        smem.expert_ids[:, k] = jnp.where(kind == PADDING, -1, served)

    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.expert_ids, at.out.expert_ids.at[at.own])
    return [by_row(smem.expert_ids.at[:, k]) for k in range(sizes.picks)]


def merge_repeats(at: Block, expert_ids: list) -> list:
    """Sums a row's weights where its visits meet, in shared memory; returns which visits are
    kept.
    """
    weights, kept = [by_row(at.smem.weights.at[:, k]) for k in range(at.sizes.picks)], []
    for k in range(at.sizes.picks):
        expert = by_row(at.smem.expert_ids.at[:, k])  # again, lest all comparisons be kept
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
    """Stores visits one-hot in shared memory, and counts the rows of each logical expert
    (`rows`).
    """
    smem = at.smem
    shape = (ROWS, ROWS)

    @pl.loop(0, at.sizes.chunks)
    def _(chunk):
        expert = iota(shape, 1, WGMMA) + chunk * ROWS
        hits = [expert == across(mine, shape, WGMMA) for mine in expert_ids]
        hit = functools.reduce(lambda a, b: a | b, hits)
        smem.visited[chunk] = jnp.where(hit, 1.0, 0.0).astype(jnp.bfloat16)

    plgpu.commit_smem()

    @pl.loop(0, at.sizes.chunks)
    def _(chunk):
        rows = product(smem.visited.at[chunk].T, smem.ones.T)  # all eight columns are the sum
        smem.rows[chunk] = jnp.max(rows, axis=1).astype(I32)


def starts(at: Block, summed) -> Any:
    """Stores first sorted row and first tile of each logical expert in shared memory; returns how
    many tiles there are. `summed(load)` is the rows of a chunk's experts, and those of earlier
    blocks.

    Blocks of rows and tiles are summed as one number: there are fewer than 2**15 of either.
    """
    sizes, smem = at.sizes, at.smem
    tile_rows = sizes.tiles.rows if sizes.tiles else sizes.sorted_rows
    earlier = iota((ROWS, ROWS), 1, WGMMA) < iota((ROWS, ROWS), 0, WGMMA)

    def one_chunk(chunk, total):
        rows, before = summed(lambda ref: by_column(ref.at[chunk]))
        smem.rows[chunk] = rows
        both = _divided_up(rows, sizes.block_m) | _divided_up(rows, tile_rows) << 16
        first = jnp.sum(jnp.where(earlier, down(both, earlier.shape, WGMMA), 0), axis=1) + total
        smem.start[chunk] = (first & 0xFFFF) * sizes.block_m
        smem.tile[chunk] = first >> 16
        if before is not None:
            smem.first[chunk] = by_column(smem.start.at[chunk]) + before
        return total + jnp.sum(both)

    total = lax.fori_loop(0, sizes.chunks, one_chunk, jnp.int32(0))

    @pl.when(at.index == 0)
    def _():
        at.out.num_blocks[0] = total & 0xFFFF

    return total >> 16


def _divided_up(rows, by: int):
    """Returns quotients, rounded up."""
    return lax.div(rows + (by - 1), jnp.full(rows.shape, by, I32))


def add_rows(at: Block, to) -> None:
    """Adds a turn's rows of each logical expert to a vector in shared memory."""
    plgpu.commit_smem()

    @pl.loop(0, at.sizes.chunks)
    def _(chunk):
        to[chunk] = by_row(to.at[chunk]) + by_row(at.smem.turn_rows.at[chunk])

    plgpu.commit_smem()


def ranks(at: Block, expert_ids: list, kept: Callable) -> None:
    """Stores the sorted row of each visit that is kept in shared memory: its expert's start plus
    the rows before.
    """
    sizes, smem = at.sizes, at.smem
    shape = (ROWS, ROWS)
    starts = smem.start if smem.first is None else smem.first

    nowhere = plgpu.layout_cast(jnp.full((ROWS,), 0, I32), BY_ROW)
    together = PICKS if sizes.turns == 1 else PICKS // 2  # a loop's own values need registers, too
    for first in range(0, sizes.picks, together):
        some = expert_ids[first : first + together]

        def one_chunk(chunk, found, some=some):
            earlier = product(smem.earlier, smem.visited.at[chunk]).astype(I32)
            row = earlier + down(by_column(starts.at[chunk]), shape, WGMMA)
            expert = iota(shape, 1, WGMMA) + chunk * ROWS
            hits = [expert == across(mine, shape, WGMMA) for mine in some]
            here = [jnp.sum(jnp.where(hit, row, 0), axis=1) for hit in hits]
            return tuple(map(jnp.add, found, here))

        found = lax.fori_loop(0, sizes.chunks, one_chunk, (nowhere,) * len(some))
        for k, row in enumerate(found, first):
            smem.visit_row[:, k] = jnp.where(kept(k), row, sizes.sorted_rows)
