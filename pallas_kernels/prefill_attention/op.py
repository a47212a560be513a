"""Public prefill attention."""

from jaxtyping import Array, Float, Int

from pallas_kernels.backend import hopper
from pallas_kernels.prefill_attention import reference


def prefill_attention(
    q: Float[Array, "T H D"],
    k_pages: Float[Array, "L P G S D"],
    v_pages: Float[Array, "L P G S D"],
    *,
    layer: Int[Array, ""],
    block_table: Int[Array, "N M"],
    q_start: Int[Array, "N1"],
    kv_len: Int[Array, "N"],
    scale: float,
) -> Float[Array, "T H D"]:
    """Causal attention of N chunks of rows, packed one after another, over their pages.

    Rows `[q_start[n], q_start[n + 1])` are the last rows of a sequence whose pages hold `kv_len[n]`
    positions, these rows' own keys included: row i of the chunk sits at position
    `kv_len[n] - chunk_len + i` and sees positions up to its own. Chunks may be empty. Rows past
    `q_start[N]` yield zeros. Softmax and accumulation are float32; the result has q's dtype.
    """
    implementation = reference.prefill_attention
    if hopper():
        from pallas_kernels.prefill_attention import mosaic  # Pallas is not imported where unused

        if mosaic.supports(q, k_pages, v_pages, scale):
            implementation = mosaic.prefill_attention
    return implementation(
        q,
        k_pages,
        v_pages,
        layer=layer,
        block_table=block_table,
        q_start=q_start,
        kv_len=kv_len,
        scale=scale,
    )
