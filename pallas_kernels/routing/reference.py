"""XLA reference of the routing ops, with the letters of `op.py`.

Counts are sums over comparisons rather than scatters: XLA runs a scatter on a CPU one index at a
time, and these tables are small.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.routing.values import Grouping, Plan, Scoring

LOWEST = float(jnp.finfo(jnp.float32).min)
"""What a logit that is NaN or -inf counts as when experts are chosen."""

BY_WEIGHT = 4
"""Added to a strategy's code: of as many experts, those of most gate weight are kept."""

TINY = float(jnp.finfo(jnp.float32).tiny)
"""Least sum that weights are divided by: sigmoids underflow."""


def gate(
    logits: Float[Array, "T m"],
    *,
    top_k: int,
    normalize: bool,
    scoring: Scoring = "softmax",
    bias: Float[Array, "m"] | None = None,
    grouping: Grouping | None = None,
    scale: float = 1.0,
    jitter: float = 0.0,
) -> tuple[Float[Array, "T {top_k}"], Int[Array, "T {top_k}"]]:
    """Returns the `top_k` largest logits of each row, and their scores; ties go to the lower id.

    Scores are softmax over all m experts or each logit's sigmoid, in float32. Returns gate weights
    (the scores, divided by their sum where `normalize`, times `scale`) and expert ids (int32), by
    falling score. A logit that is NaN counts as the lowest there is. With a `bias`, experts and
    groups are chosen by score plus bias, with groups of which several experts count by score, as
    float32 rounds them.

    With sparsemixer (Phi-3.5-MoE; arXiv 2409.12136) a pick's score is its softmax over what was not
    picked before and is at most 2 `jitter` below it, as a part of the larger of both. It has no
    groups, bias or normalization: raises ValueError.
    """
    if scoring == "sparsemixer" and (normalize or bias is not None or grouping is not None):
        raise ValueError("sparsemixer has no bias, grouping or normalize; leave them out")
    logits = logits.astype(jnp.float32)
    keys = no_less(logits)
    # top_k would put 0.0 above -0.0. Added, so that a logit of zero has its gradient.
    keys = keys + lax.stop_gradient(jnp.where(keys == 0, 0.0, keys) - keys)
    if scoring == "sparsemixer":
        return _sparsemixer(keys, top_k, scale, jitter)
    if bias is None and grouping is None:
        top, ids = lax.top_k(keys, top_k)
    else:
        chosen_by = lax.stop_gradient(choice(keys, scoring, bias, grouping))
        _, ids = lax.top_k(jnp.where(chosen_by == 0, 0.0, chosen_by), top_k)
        top = jnp.take_along_axis(keys, ids, axis=1)
    # Not `top[:, :1]`: a slice of its results keeps XLA from seeing top_k in them, and it sorts.
    highest = lax.stop_gradient(jnp.max(keys, axis=-1, keepdims=True))
    weights = jax.nn.sigmoid(top) if scoring == "sigmoid" else jnp.exp(top - highest)
    if normalize:  # what softmax divides by cancels
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), TINY)
    elif scoring == "softmax":
        weights = weights / jnp.sum(jnp.exp(logits - highest), axis=-1, keepdims=True)
    return weights if scale == 1 else scale * weights, ids.astype(jnp.int32)


def _sparsemixer(keys, top_k, scale, jitter):
    left, weights, ids = keys, [], []
    numbers = jnp.arange(keys.shape[1], dtype=jnp.int32)
    for _ in range(top_k):
        top, chosen = lax.top_k(left, 1)
        near = jax.nn.softmax(jnp.where(is_far(left, top, jitter), -jnp.inf, left), axis=1)
        weights.append(jnp.take_along_axis(near, chosen, axis=1))
        ids.append(chosen.astype(jnp.int32))
        left = jnp.where(numbers[None] == ids[-1], -jnp.inf, left)
    weights = jnp.concatenate(weights, axis=1)
    return weights if scale == 1 else scale * weights, jnp.concatenate(ids, axis=1)


def is_far(keys, top, jitter):
    """Returns which keys are more than 2 `jitter` below `top`, as a part of the larger of both. Of
    -inf it says nothing: no exponential of it counts.
    """
    return top - keys > 2 * jitter * jnp.maximum(jnp.maximum(keys, -keys), top)


def no_less(keys):
    """Returns keys by which experts are chosen: the lowest there is for NaN and -inf."""
    return jnp.where(keys >= LOWEST, keys, LOWEST)


def by_score(biased, grouping):
    """Returns whether experts are chosen by score: logits would order them otherwise."""
    return biased or (grouping is not None and grouping.best > 1)


def choice(keys, scoring, bias, grouping):
    """Returns what experts are chosen by, of logits that are no less than `LOWEST`."""
    if by_score(bias is not None, grouping):
        keys = jax.nn.sigmoid(keys) if scoring == "sigmoid" else jax.nn.softmax(keys, axis=1)
    if bias is not None:
        keys = no_less(keys + bias.astype(jnp.float32)[None])
    return keys if grouping is None else jnp.where(_in_best(keys, grouping), keys, LOWEST)


def _in_best(keys, grouping):
    """Returns whether each expert is in one of its row's best groups. Compares, and so fuses."""
    num_rows, num_experts = keys.shape
    left = keys.reshape(num_rows, grouping.count, -1)
    worth = jnp.zeros((num_rows, grouping.count), jnp.float32)
    own = jnp.arange(left.shape[2], dtype=jnp.int32)[None, None]
    for _ in range(grouping.best):
        most = jnp.max(left, axis=2, keepdims=True)
        worth += most[:, :, 0]
        first = jnp.min(jnp.where(left == most, own, left.shape[2]), axis=2, keepdims=True)
        left = jnp.where(own == first, -jnp.inf, left)
    group = jnp.arange(grouping.count, dtype=jnp.int32)
    own, other = worth[:, :, None], worth[:, None, :]
    ahead = (other > own) | (other == own) & (group[None, :] < group[:, None])[None]
    is_best = jnp.sum(ahead, axis=2, dtype=jnp.int32) < grouping.top
    return jnp.repeat(is_best, num_experts // grouping.count, axis=1)


def brownout_plan(
    ids: Int[Array, "T K"],
    weights: Float[Array, "T K"] | None = None,
    *,
    scale: float = 1.0,
    groups: Int[Array, "m"],
    threshold_percent: Int[Array, ""],
    strategy: Int[Array, ""],
    valid: Bool[Array, "T"],
    exempt: Bool[Array, "T"],
) -> Plan:
    """BrownoutServe's Algorithm 1 for one layer, made exact (docs/architecture.md, Brownout).

    A strategy's code plus `BY_WEIGHT` keeps as many experts as Algorithm 1 does, but those whose
    degradable visits have most gate `weights` together (in units of 2^-15, before `scale`): as much
    is computed, and less is lost. It needs weights.

    `groups[e]` is the united expert of e's group, or -1 where none is loaded (the original then
    serves). Threshold and strategy are traced: another setting is not another program. All
    arithmetic is int32, so T * K must stay below 2**31 / 100.
    """
    num_experts = groups.shape[0]
    degradable = valid & ~exempt
    chosen = ids[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None, :]
    counted = chosen & degradable[:, None, None]
    count = _count(counted)
    shares = None
    if weights is not None:  # of a user's own router they may be anything: as much as sums hold
        shares = share_of(jnp.clip(weights, 0, scale * (1 << 15) / ids.shape[0]), scale)
        shares = jnp.sum(jnp.where(counted, shares[:, :, None], 0), axis=(0, 1), dtype=jnp.int32)
    pinned = jnp.any(chosen & (valid & exempt)[:, None, None], axis=(0, 1))
    total = ids.shape[1] * jnp.sum(degradable, dtype=jnp.int32)
    s1, target = targets(count, shares, pinned, total, groups, threshold_percent, strategy)
    expert_ids = jnp.where(degradable[:, None], target[ids], ids)
    expert_ids = jnp.where(valid[:, None], expert_ids, -1)
    return Plan(expert_ids, valid[:, None] & (expert_ids != ids), s1)


def share_of(weights, scale):
    """Returns gate weights, before they were scaled, in units of 2^-15, as int32: in any order,
    their sums are the same. Scores are at most 1: int32 holds the sums of 65,535 rows.
    """
    return (weights * ((1 << 15) / scale) + 0.5).astype(jnp.int32)


def targets(count, shares, pinned, total, groups, threshold_percent, strategy):
    """Returns S1, and the logical expert that serves each expert's degradable visits (-1: none).

    `count` are these visits, `total` their number, `shares` their gate weights; `pinned` experts
    are in S1 whatever it is.
    """
    num_experts = groups.shape[0]
    s1 = pinned | _covering(count, total, pinned, threshold_percent)
    if shares is not None:
        s1 = jnp.where(strategy >= BY_WEIGHT, _weightiest(count, shares, pinned, s1), s1)
    strategy = strategy & (BY_WEIGHT - 1)
    s2_visited = ~s1 & (count > 0)
    together = groups[:, None] == groups[None, :]
    members = _count((together & s2_visited[None, :])[:, None].swapaxes(0, 2))
    own = jnp.arange(num_experts, dtype=jnp.int32)
    substitute = ~s1 & (groups >= 0) & (members > 1)
    partial = jnp.where(substitute, num_experts + groups, own)
    full = jnp.where(s1, own, -1)
    return s1, jnp.where(strategy == 0, own, jnp.where(strategy == 1, full, partial))


def _weightiest(count, shares, pinned, s1):
    """Returns as many experts as `s1` has: the pinned ones, then the visited ones of most weight,
    ties by lower id.
    """
    shares = jnp.where(count > 0, shares, -1)
    place = jnp.sum(_ahead(shares, pinned), axis=1, dtype=jnp.int32)
    return pinned | ((count > 0) & (place < jnp.sum(s1, dtype=jnp.int32)))


def _ahead(values, pinned):
    """Returns [e, other]: whether the other expert comes before e, as pinned or by more, ties by
    lower id.
    """
    index = jnp.arange(values.shape[0], dtype=jnp.int32)
    more = values[None, :] > values[:, None]
    tie = (values[None, :] == values[:, None]) & (index[None, :] < index[:, None])
    return pinned[None, :] | more | tie


def _count(mask):
    """Counts true entries over the two leading axes, as int32."""
    return jnp.sum(mask, axis=(0, 1), dtype=jnp.int32)


def _covering(count, total, pinned, threshold_percent):
    """Returns the experts that join S1: most visited first, ties by lower id, until t % of `total`
    are covered.

    An expert joins while the visits of those before it, the pinned ones included, fall short.
    """
    ahead = _ahead(count, pinned)
    before = jnp.sum(jnp.where(ahead, count[None, :], 0), axis=1, dtype=jnp.int32)
    return 100 * before < threshold_percent * total


def dispatch(expert_ids, weights, slots, *, block_m, num_blocks):
    """See `op.dispatch`; `num_blocks` is the bound. Returns the fields of `op.Dispatch`."""
    num_rows, top_k = expert_ids.shape
    num_logical = slots.shape[0]
    num_visits = num_rows * top_k
    weights, kept = _merge_repeats(expert_ids, weights)

    key = jnp.where(kept, expert_ids, num_logical).reshape(num_visits)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    count = _count((key[:, None] == jnp.arange(num_logical, dtype=jnp.int32)[None, :])[:, None])
    blocks = -(-count // block_m)
    first_visit, first_block = _before(count), _before(blocks)
    last_block = first_block + blocks
    first_row = first_block * block_m

    block = jnp.minimum(jnp.arange(num_blocks, dtype=jnp.int32), jnp.maximum(last_block[-1] - 1, 0))
    owner = _count((last_block[:, None] <= block[None, :])[:, None])
    owner = jnp.minimum(owner, num_logical - 1)
    row = jnp.arange(num_blocks * block_m, dtype=jnp.int32)
    row_owner = owner[row // block_m]
    rank = row - first_row[row_owner]
    visit = jnp.minimum(first_visit[row_owner] + rank, num_visits - 1)
    row_token = jnp.where(rank < count[row_owner], order[visit] // top_k, num_rows)

    sorted_key = key[order]
    expert = jnp.minimum(sorted_key, num_logical - 1)
    place = first_row[expert] + jnp.arange(num_visits, dtype=jnp.int32) - first_visit[expert]
    place = jnp.where(sorted_key < num_logical, place, num_blocks * block_m)
    visit_row = (
        jnp.zeros(num_visits, jnp.int32)
        .at[order]
        .set(place, mode="promise_in_bounds", unique_indices=True)
    )
    visit_row = visit_row.reshape(num_rows, top_k)
    return row_token, slots[owner], last_block[-1], visit_row, weights, count, first_row, slots


def _before(values):
    """Returns the sum of the values before each one. XLA fuses comparisons, where a scan would be a
    kernel.
    """
    index = jnp.arange(values.shape[0], dtype=jnp.int32)
    earlier = index[None, :] < index[:, None]
    return jnp.sum(jnp.where(earlier, values[None, :], 0), axis=1, dtype=jnp.int32)


def _merge_repeats(expert_ids, weights):
    """Moves the weight of a row's repeated pick to its first one; dropped picks weigh 0."""
    same = expert_ids[:, :, None] == expert_ids[:, None, :]
    total = jnp.sum(jnp.where(same, weights[:, None, :], 0.0), axis=-1)
    earlier = jnp.tril(jnp.ones(same.shape[1:], bool), k=-1)
    kept = (expert_ids >= 0) & ~jnp.any(same & earlier[None], axis=-1)
    return jnp.where(kept, total, 0.0), kept
