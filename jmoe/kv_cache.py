"""Paged KV cache: keys and values on the device, in pages."""

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from pallas_kernels import fp8_pages
from pallas_kernels.fp8_pages import AnyPages

if TYPE_CHECKING:
    from jmoe.config import ModelConfig


class CacheSizes(NamedTuple):
    """What caches are made for."""

    num_pages: int
    page_size: int  # positions
    num_slots: int  # sequences
    max_blocks: int  # pages of the longest sequence
    dtype: jnp.dtype


class KVPages(NamedTuple):
    """Keys and values of L layers; position p of a sequence is row p % S of its page p // S.

    A head's rows of a page lie together, so that a kernel reads them as one tile. The last page
    is the padding page: what padding rows write goes there. Latents, of which keys and values are
    made, are keys of one head, without values beside them.
    """

    k: AnyPages  # what queries are compared with
    v: AnyPages | None = None
    """What is summed by weight; None: the first elements of the latents."""

    @property
    def padding_page(self) -> int:
        """The page that takes padding rows."""
        return self.k.shape[1] - 1

    @property
    def page_size(self) -> int:
        """Positions a page."""
        return self.k.shape[3]


def make_pages(
    cfg: "ModelConfig", num_layers: int, sizes: CacheSizes, *, fp8: bool = False
) -> KVPages:
    """Returns zeroed pages of some layers, and the padding page; in eight bits, or of the sizes'
    dtype.
    """
    shape = num_layers, sizes.num_pages + 1, cfg.num_kv_heads, sizes.page_size, cfg.head_dim
    if fp8:
        return KVPages(fp8_pages.zeros(shape), fp8_pages.zeros(shape))
    return KVPages(jnp.zeros(shape, sizes.dtype), jnp.zeros(shape, sizes.dtype))
