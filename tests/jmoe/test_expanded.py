"""Prompts read by keys and values that are made of latents write what the absorbed form writes."""

import jax
import jax.numpy as jnp
import pytest

import jmoe
from jmoe import attention
from pallas_kernels.prefill_attention import work
from tests.jmoe.conftest import GOLDEN

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

PROMPTS = [[3, 5, 7, 11, 13, 17, 19, 23, 29, 31], [40, 2], [8, 9, 10] * 15]


def dense(q, weights, pages, *, layer, block_table, q_start, kv_len, scale, todo):
    """Does as `expanded_attention` says, with all positions of all chunks at once."""
    (num_rows, heads, _), rank, chunks = q.shape, weights[0].shape[0], kv_len.shape[0]
    turned = pages.shape[4] - rank
    row = jnp.arange(num_rows)
    chunk = jnp.sum(q_start[None, 1:] <= row[:, None], axis=1)
    own = jnp.minimum(chunk, chunks - 1)
    latents = pages[layer, block_table][:, :, 0].reshape(chunks, -1, pages.shape[4])
    keys, values = (
        (latents[..., :rank] @ part).reshape(*latents.shape[:2], heads, -1) for part in weights
    )
    turning = jnp.broadcast_to(latents[:, :, None, rank:], (*keys.shape[:3], turned))
    keys = jnp.concatenate([keys, turning], axis=3)[own]
    seen = jnp.where(chunk < chunks, row + (kv_len - q_start[1:])[own] + 1, 1)
    scores = jnp.einsum("thk,tchk->thc", q, keys) * scale
    live = jnp.arange(keys.shape[1])[None, None] < seen[:, None, None]
    weight = jax.nn.softmax(jnp.where(live, scores, -jnp.inf), axis=2)
    return jnp.einsum("thc,tchv->thv", weight, values[own])


@pytest.mark.sized(
    exhaustive=(
        "deepseek_v2",
        "deepseek_v2_scaled",
    )
)
@pytest.mark.deep
@pytest.mark.parametrize(
    "case", ["deepseek_v2", "deepseek_v2_scaled", "deepseek_v3_halves", "mistral4"]
)
def test_both_forms_write_the_same(monkeypatch, case):
    """With yarn's factor on scores, and without; with either order of what turns; with queries that
    grow with their position.
    """
    model = jmoe.load(GOLDEN / case, "float32")

    def write():
        jax.clear_caches()
        return jmoe.generate(model, PROMPTS, 8, stop_token_ids=(), page_size=4).tokens

    want, called = write(), []

    def expanded(*args, **chunks):
        called.append(args)
        return dense(*args, **chunks)

    def plan(num_rows, heads, pages, *, q_start, kv_len, **sizes):
        return work.plan(q_start, kv_len, work.aligned(num_rows), block_rows=128, block_kv=512)

    monkeypatch.setattr(attention, "plan_expanded", plan)
    monkeypatch.setattr(attention, "expanded_attention", expanded)
    assert write() == want
    assert called
    jax.clear_caches()
