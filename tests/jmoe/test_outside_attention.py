"""An attention kind from outside the package, with a cache of its own shape, in some layers."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy_forward
import pytest

import jmoe
from jmoe.attention import FULL, page_windows
from jmoe.kv_cache import KVPages
from pallas_kernels.kv_write import split_heads

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


@dataclass(frozen=True)
class Ring:
    """A window whose keys lie in a ring a slot, without pages: [L, slots, window, G, D]."""

    window: int
    shares_pages: bool = False

    def cache(self, cfg, num_layers, sizes):
        shape = num_layers, sizes.num_slots, self.window, cfg.num_kv_heads, cfg.head_dim
        return KVPages(jnp.zeros(shape, sizes.dtype), jnp.zeros(shape, sizes.dtype))

    def step(self, cfg, cache, rows):
        slots, far = cache.k.shape[1], 2**30
        begins = jnp.full(slots, far).at[rows.slot].min(jnp.where(rows.valid, rows.position, far))
        ends = jnp.full(slots, -far).at[rows.slot].max(jnp.where(rows.valid, rows.position, -far))
        begin, end = begins[rows.slot, None], ends[rows.slot]
        before = begin - 1 - (begin - 1 - jnp.arange(self.window)[None]) % self.window
        old = (before >= 0) & (before > rows.position[:, None] - self.window)
        back = rows.position[:, None] - rows.position[None]
        new = (back >= 0) & (back < self.window) & (rows.slot[:, None] == rows.slot[None])
        stays = rows.valid & (rows.position > end - self.window)
        return RingRows(
            jnp.where(stays, rows.slot, slots),  # out of range: dropped
            rows.slot,
            rows.position % self.window,
            jnp.concatenate([old, new & rows.valid[None]], axis=1),
        )

    def causal(self, batch, length):
        raise NotImplementedError("over its cache alone")


class RingRows(NamedTuple):
    kept_at: jax.Array
    slot: jax.Array
    place: jax.Array
    seen: jax.Array  # [T, window + T]

    def __call__(self, projection, layer, cache):
        q, *fresh = split_heads(projection)
        groups = q.shape[1] // fresh[0].shape[1]
        k, v = (
            jnp.repeat(
                jnp.concatenate([old[layer, self.slot], jnp.repeat(new[None], len(q), 0)], axis=1),
                groups,
                axis=2,
            )
            for old, new in zip(cache, fresh, strict=True)
        )
        scores = jnp.einsum("thd,tkhd->thk", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(self.seen[:, None], scores, -1e30), axis=-1)
        kept = [
            old.at[layer, self.kept_at, self.place].set(new, mode="drop")
            for old, new in zip(cache, fresh, strict=True)
        ]
        return jnp.einsum("thk,tkhd->thd", weights, v), KVPages(*kept)


@pytest.mark.sized(exhaustive=("3",))
@pytest.mark.deep
@pytest.mark.parametrize("chunk_size", [3, 64])
def test_a_ring_beside_full_attention_is_a_window(root_dir, chunk_size):
    model = jmoe.load(root_dir / "tests/golden/qwen3_moe_mixed_yarn", dtype="float32")
    kinds = Ring(5), FULL, Ring(5), FULL
    assert page_windows(replace(model.config, layer_attention=kinds)) == (0,)  # it has no pages
    model = replace(model, config=replace(model.config, layer_attention=kinds))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 40, count).tolist() for count in (21, 4)]
    out = jmoe.generate(model, prompts, 9, stop_token_ids=[], chunk_size=chunk_size, page_size=4)
    for prompt, tokens, logprobs in zip(prompts, out.tokens, out.logprobs, strict=True):
        for at in (0, 8):
            logits = numpy_forward.forward(model, [prompt + tokens[:at]])[0]
            assert tokens[at] == np.argmax(logits)
            want = jax.nn.log_softmax(logits)[tokens[at]]
            assert logprobs[at] == pytest.approx(float(want), abs=2e-4)
    full = replace(model, config=replace(model.config, layer_attention=()))
    assert (
        np.abs(
            numpy_forward.forward(full, [prompts[0]])[0]
            - numpy_forward.forward(model, [prompts[0]])[0]
        ).max()
        > 1e-2
    )


@pytest.fixture
def root_dir(request):
    return request.config.rootpath
