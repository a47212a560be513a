"""Routing in few launches, for GPUs without the Mosaic kernel.

Neither sorts nor scatters, each of which is several launches: whatever depends on all rows is a sum
over comparisons. An expert's rank in a row is the number of experts ahead of it; a visit's place,
the visits ahead of it and the blocks of earlier experts. Comparisons grow with the square of the
visits, so from `MOST_COMPARED` on the dispatch is the reference's, which sorts.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.routing import reference

HALF = 1 << 16
MOST_UNSORTED = 64
"""Visits that stay in their order in blocks of one row each: an expert's first row means nothing
there, and its weights may be read again."""
MOST_COMPARED = 4096
"""Visits. So many take about as long to compare as sorting and scattering takes to launch."""


def route(
    logits,
    gating,
    *,
    bias,
    groups,
    slots,
    threshold_percent,
    strategy,
    valid,
    exempt,
    block_m,
    num_blocks,
):
    """See `op.route`; `num_blocks` is the bound. Returns picks, and the fields of `Plan` and
    `op.Dispatch`.
    """
    top_k, normalize, scoring, grouping, scale, jitter = gating
    num_experts = groups.shape[0]
    if logits.shape[0] * HALF > jnp.iinfo(jnp.int32).max:
        raise ValueError(f"{logits.shape[0]} rows are more than one step's routing can count")
    logits = logits[:, :num_experts].astype(jnp.float32)
    keys = reference.no_less(logits)
    chosen_by = reference.choice(keys, scoring, bias, grouping)
    rank, sum_of_exp = _ranks(chosen_by, keys, logits, scoring, jitter)
    degradable = valid & ~exempt
    # Degradable rows in the lower half of a number, exempt ones above: one sum instead of two.
    of_row = jnp.where(valid, jnp.where(exempt, HALF, 1), 0)
    picked = rank < top_k
    share = reference.share_of(_scores(keys, sum_of_exp, picked, normalize, scoring), 1.0)
    counted = of_row[:, None], jnp.where(degradable[:, None], share, 0)
    visits, shares = _sums([jnp.where(picked, values, 0) for values in counted], 0)
    count, pinned = visits & (HALF - 1), visits >= HALF
    total = top_k * jnp.sum(degradable, dtype=jnp.int32)  # the same in every layer
    own = jnp.arange(num_experts, dtype=jnp.int32)
    pick = jnp.arange(top_k, dtype=jnp.int32)
    hit = rank[:, None, :] == pick[None, :, None]
    s1, target = reference.targets(
        count, shares, pinned, total, groups, threshold_percent, strategy
    )
    served = jnp.where(degradable[:, None], target[None, :], own[None, :])
    served = jnp.where(valid[:, None], served, -1)
    fields = [jnp.broadcast_to(own, rank.shape), served, keys, sum_of_exp]
    ids, expert_ids, top, sum_of_exp = _sums([jnp.where(hit, f[:, None, :], 0) for f in fields], 2)
    weights = _weights(top, sum_of_exp, normalize, scoring)
    weights = weights if scale == 1 else scale * weights
    plan = expert_ids, valid[:, None] & (expert_ids != ids), s1
    sizes = {"block_m": block_m, "num_blocks": num_blocks}
    if expert_ids.size > MOST_COMPARED:
        return ids, plan, reference.dispatch(expert_ids, weights, slots, **sizes)
    return ids, plan, _dispatch(expert_ids, weights, slots, **sizes)


def _sums(arrays, axis):
    """Returns sums over an axis, all of them in one reduction."""
    zeros = [jnp.zeros((), a.dtype) for a in arrays]
    return lax.reduce(
        arrays, zeros, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (axis,)
    )


def _ranks(chosen_by, keys, logits, scoring, jitter):
    """Returns, for every expert in its row, the experts ahead of it and the sum of exp(logit - its
    own key); of sparsemixer, over those that are near and not ahead.
    """
    index = jnp.arange(keys.shape[1], dtype=jnp.int32)
    own, other = chosen_by[:, :, None], chosen_by[:, None, :]
    tie = (other == own) & (index[None, :] < index[:, None])[None]
    ahead = (other > own) | tie
    if scoring == "sparsemixer":
        own, other = keys[:, :, None], keys[:, None, :]
        out = ahead | reference.is_far(other, own, jitter)
        exp = jnp.where(out, 0.0, jnp.exp(other - own))
    else:
        exp = jnp.exp(logits[:, None, :] - keys[:, :, None])
    return _sums([ahead.astype(jnp.int32), exp], 2)


def _scores(keys, sum_of_exp, picked, normalize, scoring):
    """Returns the gate weight that each expert has in its row, if it is picked, before scaling."""
    if scoring != "sigmoid" and not normalize:
        return 1 / sum_of_exp
    highest = jnp.max(keys, axis=1, keepdims=True)
    scores = jax.nn.sigmoid(keys) if scoring == "sigmoid" else jnp.exp(keys - highest)
    if not normalize:
        return scores
    total = jnp.sum(jnp.where(picked, scores, 0), axis=1, keepdims=True)
    return scores / jnp.maximum(total, reference.TINY)


def _weights(top, sum_of_exp, normalize, scoring):
    """Returns the gate weights of picks, summed column by column, so that XLA fuses it."""
    picks = range(top.shape[1])
    if scoring == "sigmoid":
        weights = jax.nn.sigmoid(top)
        if not normalize:
            return weights
        total = sum(weights[:, k : k + 1] for k in picks)
        return weights / jnp.maximum(total, reference.TINY)
    if normalize:
        weights = jnp.exp(top - functools.reduce(jnp.maximum, [top[:, k : k + 1] for k in picks]))
        return weights / sum(weights[:, k : k + 1] for k in picks)
    return 1 / sum_of_exp


def _merge_repeats(expert_ids, weights):
    """Merges repeats as the reference does, column by column."""
    picks = range(expert_ids.shape[1])
    totals, kept = [], []
    for k in picks:
        own = expert_ids[:, k]
        same = [expert_ids[:, j] == own for j in picks]
        total = sum(jnp.where(same[j], weights[:, j], 0.0) for j in picks)
        first = own >= 0
        for earlier in same[:k]:
            first &= ~earlier
        totals.append(jnp.where(first, total, 0.0))
        kept.append(first)
    return jnp.stack(totals, axis=1), jnp.stack(kept, axis=1)


def _dispatch(expert_ids, weights, slots, *, block_m, num_blocks):
    """Dispatches as the reference does."""
    num_rows, top_k = expert_ids.shape
    num_logical, num_visits = slots.shape[0], expert_ids.size
    num_sorted = num_blocks * block_m
    weights, kept = _merge_repeats(expert_ids, weights)
    key = jnp.where(kept, expert_ids, num_logical).reshape(num_visits)
    logical = jnp.arange(num_logical, dtype=jnp.int32)
    count = jnp.sum(key[None, :] == logical[:, None], axis=1, dtype=jnp.int32)
    rows = -(-count // block_m) * block_m

    visit = jnp.arange(num_visits, dtype=jnp.int32)
    if block_m == 1 and num_visits <= min(MOST_UNSORTED, num_blocks):
        place = jnp.where(key < num_logical, visit, num_sorted)
        row_token = jnp.where(key < num_logical, lax.div(visit, jnp.int32(top_k)), num_rows)
        row_token = jnp.pad(row_token, (0, num_sorted - num_visits), constant_values=num_rows)
        block_slot = slots[jnp.minimum(key, num_logical - 1)]
        block_slot = jnp.pad(block_slot, (0, num_sorted - num_visits), mode="edge")
        fields = row_token, block_slot, jnp.int32(num_visits), place.reshape(num_rows, top_k)
        return *fields, weights, count, jnp.zeros_like(count), slots
    ahead = (key[None, :] == key[:, None]) & (visit[None, :] < visit[:, None])
    before = jnp.where(logical[None, :] < key[:, None], rows[None, :], 0)
    most = max(num_visits, num_logical)  # padded to one sum
    ahead, before = (
        jnp.pad(a.astype(jnp.int32), ((0, 0), (0, most - a.shape[1]))) for a in (ahead, before)
    )
    place = jnp.sum(ahead + before, axis=1, dtype=jnp.int32)
    place = jnp.where(key < num_logical, place, num_sorted)

    # The last visit whose place is at or before each row, and that place, in one number.
    row = jnp.arange(num_sorted, dtype=jnp.int32)
    bits = num_visits.bit_length()
    code = (place << bits) | visit
    code = jnp.max(jnp.where(place[None, :] <= row[:, None], code[None, :], -1), axis=1)
    # Of -1, where there are no visits, the index is clipped: to a dropped one, as all are then.
    last = jnp.minimum(code & ((1 << bits) - 1), num_visits - 1)
    row_token = jnp.where(code >> bits == row, lax.div(last, jnp.int32(top_k)), num_rows)
    block_slot = slots[jnp.minimum(key[last[::block_m]], num_logical - 1)]
    first_row = jnp.sum(
        jnp.where(logical[None, :] < logical[:, None], rows[None, :], 0), axis=1, dtype=jnp.int32
    )
    num_used = jnp.sum(rows // block_m, dtype=jnp.int32)
    visit_row = place.reshape(num_rows, top_k)
    return row_token, block_slot, num_used, visit_row, weights, count, first_row, slots
