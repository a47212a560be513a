"""Public paged decode attention."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import native
from pallas_kernels.backend import KERNEL, NATIVE, batched, hopper, note
from pallas_kernels.fp8_pages import AnyPages, Fp8Pages
from pallas_kernels.paged_attention import batched as few_launches
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.schedule import Schedule


def plan(
    heads: int, pages: Any, *, kv_len: Int[Array, "B"], window: int = 0, latent: int = 0
) -> Schedule | None:
    """Returns how the kernel shares out a step's keys among its blocks; None where it does not run.

    `heads` query heads; of `pages` [L, P, G, S, D] only sizes and dtype count; `latent` as in
    `paged_attention`. It depends on no
    layer, and XLA does not take it out of a scan over layers by itself: a caller makes it before
    the scan.
    """
    if not hopper():
        return None
    from pallas_kernels.paged_attention import mosaic  # Pallas is not imported where unused

    dtype = jnp.bfloat16 if isinstance(pages, Fp8Pages) else pages.dtype
    q = jax.ShapeDtypeStruct((kv_len.shape[0], heads, pages.shape[4]), dtype)
    if not mosaic.supports(q, pages, pages, latent):
        return None
    return mosaic.plan(q, pages, kv_len, window, latent)


def paged_attention(
    q: Float[Array, "B H D"],
    k_pages: AnyPages,
    v_pages: AnyPages | None,
    *,
    layer: Int[Array, ""],
    block_table: Int[Array, "B M"],
    kv_len: Int[Array, "B"],
    scale: float,
    window: int = 0,
    sinks: Float[Array, "*B H"] | None = None,
    latent: int = 0,
    todo: Schedule | None = None,
) -> Float[Array, "B H V"]:
    """Attends with one new row a sequence over its pages of `layer`.

    Position p of sequence b lives in page `block_table[b, p // S]` at offset `p % S`; positions
    `[0, kv_len[b])` are attended to, or the last `window` of them; 0: all. H is a multiple of the G
    kv heads. A row with kv_len 0 (padding) yields zeros. Softmax and accumulation are float32; the
    result has q's dtype. `sinks` are scores, one a query head, or a row and query
    head, that take weight and have no value.

    Values are as wide as keys; or, of latents, the first `latent` elements of the keys themselves,
    which are one head: `v_pages` is None then.

    `todo` is `plan` of the same lengths, made here where it is not given. Raises ValueError for
    values that are given twice, or not at all.
    """
    if (v_pages is None) != (latent > 0):
        raise ValueError(f"latent is {latent}; give v_pages or, of latents, their values' elements")
    rows = {"layer": layer, "block_table": block_table, "kv_len": kv_len, "scale": scale}
    rows |= {"window": window, "sinks": sinks, "latent": latent}
    if hopper():
        from pallas_kernels.paged_attention import mosaic  # Pallas is not imported where unused

        if mosaic.supports(q, k_pages, v_pages, latent):
            note("attention", KERNEL)
            return mosaic.paged_attention(q, k_pages, v_pages, todo=todo, **rows)
    if native.attends(q, k_pages, v_pages):
        note("attention", NATIVE)
        return native.paged_attention(q, k_pages, v_pages, **rows)
    note("attention")
    op = few_launches if batched() else reference
    return op.paged_attention(q, k_pages, v_pages, **rows)
