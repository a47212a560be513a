"""XLA reference of the routing ops."""

import jax
import jax.numpy as jnp
from jax import lax


def gate(logits, *, top_k, normalize):
    """See `op.gate`."""
    probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, ids = lax.top_k(probs, top_k)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, ids.astype(jnp.int32)


def brownout_plan(ids, *, groups, threshold_percent, strategy, valid, exempt):
    """See `op.brownout_plan`. Returns (expert_ids, degraded, s1)."""
    num_experts = groups.shape[0]
    degradable = valid & ~exempt
    count = _visits(ids, degradable, num_experts)
    pinned = _visits(ids, valid & exempt, num_experts) > 0
    s1 = pinned | _covering(count, pinned, threshold_percent)
    s2_visited = ~s1 & (count > 0)
    grouped = groups >= 0
    united = jnp.where(grouped, groups, 0)
    members = (
        jnp.zeros(num_experts, jnp.int32).at[united].add((s2_visited & grouped).astype(jnp.int32))
    )
    stand_in = grouped & (members[united] > 1)
    own = jnp.arange(num_experts, dtype=jnp.int32)
    partial = jnp.where(~s1 & stand_in, num_experts + united, own)
    full = jnp.where(s1, own, -1)
    target = jnp.select([strategy == 0, strategy == 1], [own, full], partial)
    expert_ids = jnp.where(degradable[:, None], target[ids], ids)
    expert_ids = jnp.where(valid[:, None], expert_ids, -1)
    return expert_ids, valid[:, None] & (expert_ids != ids), s1


def _visits(ids, rows, num_experts):
    """Visits to each expert by the rows that are set."""
    ones = jnp.broadcast_to(rows[:, None], ids.shape).astype(jnp.int32)
    return jnp.zeros(num_experts, jnp.int32).at[ids].add(ones)


def _covering(count, pinned, threshold_percent):
    """Experts that join S1: most visited first, until t percent of all visits are covered."""
    total = jnp.sum(count)
    free = jnp.where(pinned, 0, count)
    order = jnp.argsort(jnp.where(pinned, 1, -count), stable=True)
    before = jnp.cumsum(free[order]) - free[order] + jnp.sum(jnp.where(pinned, count, 0))
    joins = 100 * before < threshold_percent * total
    return jnp.zeros_like(pinned).at[order].set(joins)


def dispatch(expert_ids, weights, slots, *, block_m, max_active):
    """See `op.dispatch`. Returns the fields of `op.Dispatch`."""
    from pallas_kernels.routing.op import max_blocks

    num_rows, top_k = expert_ids.shape
    num_logical = slots.shape[0]
    num_visits = num_rows * top_k
    num_block_rows = max_blocks(num_visits, max_active, block_m)
    weights, kept = _merge_repeats(expert_ids, weights)

    key = jnp.where(kept, expert_ids, num_logical).reshape(num_visits)
    order = jnp.argsort(key, stable=True)
    count = jnp.zeros(num_logical + 1, jnp.int32).at[key].add(1)[:num_logical]
    first_visit = jnp.cumsum(count) - count
    blocks = -(-count // block_m)
    last_block = jnp.cumsum(blocks)
    first_row = (last_block - blocks) * block_m

    sorted_key = key[order]
    expert = jnp.minimum(sorted_key, num_logical - 1)
    rank = jnp.arange(num_visits, dtype=jnp.int32) - first_visit[expert]
    no_row = num_block_rows * block_m
    row = jnp.where(sorted_key < num_logical, first_row[expert] + rank, no_row)
    token = (order // top_k).astype(jnp.int32)
    row_token = jnp.full(no_row, num_rows, jnp.int32).at[row].set(token, mode="drop")
    visit_row = jnp.zeros(num_visits, jnp.int32).at[order].set(row).reshape(num_rows, top_k)

    block = jnp.minimum(jnp.arange(num_block_rows, dtype=jnp.int32), last_block[-1] - 1)
    owner = jnp.searchsorted(last_block, block, side="right").astype(jnp.int32)
    block_slot = slots[jnp.minimum(owner, num_logical - 1)]
    num_active = jnp.sum(count > 0, dtype=jnp.int32)
    return row_token, block_slot, last_block[-1], visit_row, weights, num_active


def _merge_repeats(expert_ids, weights):
    """Moves the weight of a row's repeated pick to its first one; dropped picks weigh 0."""
    same = expert_ids[:, :, None] == expert_ids[:, None, :]
    total = jnp.sum(jnp.where(same, weights[:, None, :], 0.0), axis=-1)
    earlier = jnp.tril(jnp.ones(same.shape[1:], bool), k=-1)
    kept = (expert_ids >= 0) & ~jnp.any(same & earlier[None], axis=-1)
    return jnp.where(kept, total, 0.0), kept
