"""Public prefill attention."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import native
from pallas_kernels.backend import KERNEL, NATIVE, batched, hopper, note
from pallas_kernels.fp8_pages import AnyPages
from pallas_kernels.prefill_attention import batched as few_launches
from pallas_kernels.prefill_attention import reference


def plan(
    num_rows: int,
    heads: int,
    pages: Any,
    *,
    q_start: Int[Array, "N1"],
    kv_len: Int[Array, "N"],
    window: int = 0,
    latent: int = 0,
) -> Any:
    """Returns what the kernel has to know of a step's chunks; None where it does not run.

    `heads` query heads; of `pages` [L, P, G, S, D] only sizes and dtype count; `latent` as in
    `prefill_attention`. It depends on no layer,
    and XLA does not take it out of a scan over layers by itself: a caller makes it before the scan.
    """
    if not hopper():
        return None
    # Pallas is not imported where unused.
    from pallas_kernels.paged_attention import mosaic as paged
    from pallas_kernels.prefill_attention import latent as of_latents
    from pallas_kernels.prefill_attention import mosaic

    chunks = {"q_start": q_start, "kv_len": kv_len, "window": window}
    if latent:
        q = jax.ShapeDtypeStruct((num_rows, heads, pages.shape[4]), pages.dtype)
        if not paged.supports(q, pages, None, latent):
            return None
        return of_latents.plan(num_rows, heads, pages, **chunks, latent=latent)
    return mosaic.plan(num_rows, heads, pages, **chunks)


def prefill_attention(
    q: Float[Array, "T H D"],
    k_pages: AnyPages,
    v_pages: AnyPages | None,
    *,
    layer: Int[Array, ""],
    block_table: Int[Array, "N M"],
    q_start: Int[Array, "N1"],
    kv_len: Int[Array, "N"],
    scale: float,
    window: int = 0,
    sinks: Float[Array, "H"] | None = None,
    latent: int = 0,
    todo: Any = None,
) -> Float[Array, "T H V"]:
    """Attends causally with N chunks of rows, packed one after another, over their pages.

    Rows `[q_start[n], q_start[n + 1])` are the last rows of a sequence whose pages hold `kv_len[n]`
    positions, these rows' own keys included: row i of the chunk sits at position
    `kv_len[n] - chunk_len + i` and sees positions up to its own, or the last `window` of those; 0:
    all. Chunks may be empty. Rows before `q_start[0]` yield anything, those past `q_start[N]`
    zeros. Softmax and accumulation are float32; the result has q's dtype. `sinks` are scores, one a
    query head, that take weight and have no value.

    Values are as wide as keys; or, of latents, the first `latent` elements of the keys themselves,
    which are one head: `v_pages` is None then.

    `todo` is `plan` of the same chunks, made here where it is not given. Raises ValueError for
    values that are given twice, or not at all.
    """
    if (v_pages is None) != (latent > 0):
        raise ValueError(f"latent is {latent}; give v_pages or, of latents, their values' elements")
    chunks: dict[str, Any] = {"layer": layer, "block_table": block_table, "scale": scale}
    chunks |= {"q_start": q_start, "kv_len": kv_len}
    chunks |= {"window": window, "sinks": sinks, "latent": latent}
    if hopper():
        # Pallas is not imported where unused.
        from pallas_kernels.paged_attention import mosaic as paged
        from pallas_kernels.prefill_attention import latent as of_latents
        from pallas_kernels.prefill_attention import mosaic

        if v_pages is None:
            if paged.supports(q, k_pages, v_pages, latent):
                note("attention", KERNEL)
                return of_latents.prefill_attention(q, k_pages, todo=todo, **chunks)
        elif mosaic.supports(q, k_pages, v_pages, scale):
            note("attention", KERNEL)
            del chunks["latent"]
            return mosaic.prefill_attention(q, k_pages, v_pages, todo=todo, **chunks)
    if native.attends(q, k_pages, v_pages):
        note("attention", NATIVE)
        return native.prefill_attention(q, k_pages, v_pages, **chunks)
    note("attention")
    op = few_launches if batched() else reference
    return op.prefill_attention(q, k_pages, v_pages, **chunks)


def plan_expanded(
    num_rows: int,
    heads: int,
    pages: Any,
    *,
    q_start: Int[Array, "N1"],
    kv_len: Int[Array, "N"],
    rank: int,
    key: int,
    value: int,
) -> Any:
    """Returns what `expanded_attention` has to know of a step's chunks; None where it does not run,
    or where as many rows of one chunk would take fewer operations in the absorbed form.

    `pages` as in `plan`; heads have keys of `key` elements, of which those that turn are in the
    pages, after `rank` others, and values of `value`.
    """
    if not hopper():
        return None
    from pallas_kernels.prefill_attention import expanded  # Pallas is not imported where unused

    sds = jax.ShapeDtypeStruct
    q = sds((num_rows, heads, key), pages.dtype)
    of_keys = sds((rank, heads * (key - (pages.shape[4] - rank))), pages.dtype)
    weights = of_keys, sds((rank, heads * value), pages.dtype)
    if not expanded.supports(q, pages, weights) or not expanded.pays(num_rows, heads, rank):
        return None
    return expanded.plan(num_rows, heads, q_start=q_start, kv_len=kv_len)


def expanded_attention(
    q: Float[Array, "T H K"],
    weights: tuple[Float[Array, "R X"], Float[Array, "R Y"]],
    pages: Float[Array, "L P 1 S D"],
    **chunks: Any,
) -> Float[Array, "T H V"]:
    """Attends as `prefill_attention` does, to keys and values that are made of latents; `chunks`
    are its layer, block_table, q_start, kv_len, scale and todo.

    `weights` make of a latent's first R elements, for each head in turn, the elements of its key
    that do not turn, and those of its value; the other D - R end every head's key. `todo` is
    `plan_expanded` of the same chunks, which says where this runs.
    """
    from pallas_kernels.prefill_attention import expanded  # Pallas is not imported where unused

    note("attention", KERNEL)
    return expanded.prefill_attention(q, weights, pages, **chunks)
