"""Public paged decode attention."""

from jaxtyping import Array, Float, Int

from pallas_kernels.backend import hopper
from pallas_kernels.paged_attention import reference


def paged_attention(
    q: Float[Array, "B H D"],
    k_pages: Float[Array, "L P G S D"],
    v_pages: Float[Array, "L P G S D"],
    *,
    layer: Int[Array, ""],
    block_table: Int[Array, "B M"],
    kv_len: Int[Array, "B"],
    scale: float,
) -> Float[Array, "B H D"]:
    """Attention of one new row a sequence over its pages of `layer`.

    Position p of sequence b lives in page `block_table[b, p // S]` at offset `p % S`; positions
    `[0, kv_len[b])` are attended to. H is a multiple of the G kv heads. A row with kv_len 0
    (padding) yields zeros. Softmax and accumulation are float32; the result has q's dtype.
    """
    attend = reference.paged_attention
    if hopper():
        from pallas_kernels.paged_attention import mosaic  # Pallas is not imported where unused

        if mosaic.supports(q, k_pages, v_pages):
            attend = mosaic.paged_attention
    return attend(
        q, k_pages, v_pages, layer=layer, block_table=block_table, kv_len=kv_len, scale=scale
    )
