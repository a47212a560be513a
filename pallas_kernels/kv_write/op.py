"""Public KV page write. Letters: T rows, H query heads, G kv heads, D head size, N = H + 2 G."""

from dataclasses import dataclass

from jaxtyping import Array, Float, Int

from pallas_kernels.backend import KERNEL, hopper, note
from pallas_kernels.fp8_pages import AnyPages
from pallas_kernels.kv_write import reference


@dataclass(frozen=True)
class Projection:
    """A layer's product with its QKV weights, and what is still to be applied to it.

    In this order, each result rounded to the rows' dtype: the bias, where there is one; RMS norm of
    each query and key head, or of all together, where there are norm weights; the bound, where
    there is one; rotation of the first `2 half` elements of query and key heads, halves against
    each other, computed in float32. With `turned_first`, rotation comes before the norms.
    """

    rows: Float[Array, "T N D"]  # H query heads, then G key heads, then G value heads
    kv_heads: int
    cos: Float[Array, "T half"]  # float32, of each row's angles
    sin: Float[Array, "T half"]
    bias: Float[Array, "N D"] | None = None
    q_norm: Float[Array, "Nq"] | None = None  # of D elements, or of as many as all heads have
    k_norm: Float[Array, "Nk"] | None = None  # there are both or none
    eps: float = 0.0  # of the norms
    sinks: Float[Array, "H"] | None = None  # for who attends with the queries
    clip: float = 0.0  # bound of queries, keys and values; 0: none
    turned_first: bool = False

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.rows.shape[1] - 2 * self.kv_heads


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values as attention takes them, where nothing is left to be applied.

    Or queries, and latents of which `expand` makes keys and values (`expanded_attention`).
    """

    q: Float[Array, "T H Q"]
    k: Float[Array, "T G D"]
    v: Float[Array, "T G D"]
    sinks: Float[Array, "H"] | None = None
    expand: tuple[Float[Array, "R X"], Float[Array, "R Y"]] | None = None


def split_heads(
    projection: Projection | Heads,
) -> tuple[Float[Array, "T H D"], Float[Array, "T G D"], Float[Array, "T G D"]]:
    """Returns queries, keys and values as attention takes them."""
    if isinstance(projection, Heads):
        return projection.q, projection.k, projection.v
    return reference.split_heads(projection)


def write_kv(
    projection: Projection,
    k_pages: AnyPages,
    v_pages: AnyPages,
    *,
    layer: Int[Array, ""],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
) -> tuple[Float[Array, "T H D"], AnyPages, AnyPages]:
    """Returns queries, and the pages with key and value of row t at `[layer, page[t], :,
    offset[t]]`.

    Pages are updated in place where the caller donates them. Places must be in range (XLA is
    promised so: bounds checks would more than double a scatter's time on a CPU), and no two rows
    may have the same one but in the last page, P - 1: it belongs to nobody, padding rows are sent
    there, and what it holds afterwards is not defined.
    """
    if hopper():
        from pallas_kernels.kv_write import mosaic  # Pallas is not imported where it is unused

        if mosaic.supports(projection, k_pages, v_pages):
            note("KV write", KERNEL)
            return mosaic.write_kv(
                projection, k_pages, v_pages, layer=layer, page=page, offset=offset
            )
    note("KV write", has_batched=False)
    return reference.write_kv(projection, k_pages, v_pages, layer=layer, page=page, offset=offset)
