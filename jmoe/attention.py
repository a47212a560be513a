"""Attention kinds: what a step's rows read, as a pytree that knows how to read it.

An attention kind is a class whose instances are pytrees of what it needs of a step, made once
before the layers. Called with a layer's projection it returns what the heads read and the cache as
it is afterwards. A kind of your own needs no change here: give an instance of it to
`jmoe.model.run_layers`.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jmoe.kv_cache import KVPages
from pallas_kernels.kv_write import Projection, split_heads, write_kv
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention import plan as plan_decode
from pallas_kernels.paged_attention.schedule import Schedule
from pallas_kernels.prefill_attention import plan as plan_prefill
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.prefill_attention.work import Work


@runtime_checkable
class Attention(Protocol):
    """What `run_layers` calls in each layer; a pytree, so that a step under way is a value."""

    def __call__(
        self, projection: Projection, layer: Int[Array, ""], cache: Any
    ) -> tuple[Float[Array, "T H D"], Any]:
        """Returns what the heads of each row read, and the cache with this layer's keys and
        values.
        """
        ...


class Written(NamedTuple):
    """Where the keys and values of a step's T rows go."""

    page: Int[Array, "T"]  # padding rows: the padding page
    offset: Int[Array, "T"]

    @classmethod
    def at(
        cls,
        pages: KVPages,
        block_table: Int[Array, "S M"],
        slot: Int[Array, "T"],
        position: Int[Array, "T"],
        valid: Bool[Array, "T"],
    ) -> "Written":
        """Makes it for rows at `position` of sequence slots whose pages `block_table` lists."""
        page = block_table[slot, position // pages.page_size]
        return cls(jnp.where(valid, page, pages.padding_page), position % pages.page_size)


class DecodeAttention(NamedTuple):
    """One row a sequence, over its pages, its own key included."""

    written: Written
    block_table: Int[Array, "B M"]
    kv_len: Int[Array, "B"]  # 0: padding
    plan: Schedule | None

    @classmethod
    def of(
        cls,
        written: Written,
        pages: KVPages,
        block_table: Int[Array, "B M"],
        *,
        num_heads: int,
        kv_len: Int[Array, "B"],
    ) -> "DecodeAttention":
        """Makes it with the kernel's work planned, once for all layers (`paged_attention`)."""
        plan = plan_decode(num_heads, pages.k, kv_len=kv_len)
        return cls(written, block_table, kv_len, plan)

    def __call__(
        self, projection: Projection, layer: Int[Array, ""], cache: KVPages
    ) -> tuple[Float[Array, "B H D"], KVPages]:
        """See Attention."""
        q, pages = self.write(projection, layer, cache)
        return self.read(q, layer, pages), pages

    def write(
        self, projection: Projection, layer: Int[Array, ""], cache: KVPages
    ) -> tuple[Float[Array, "B H D"], KVPages]:
        """Returns query heads, and the cache with the rows' keys and values."""
        q, *new = write_kv(projection, *cache, layer=layer, **self.written._asdict())
        return q, KVPages(*new)

    def read(
        self, q: Float[Array, "B H D"], layer: Int[Array, ""], cache: KVPages
    ) -> Float[Array, "B H D"]:
        """Returns what the heads read of a cache that the rows are written to."""
        return paged_attention(
            q,
            cache.k,
            cache.v,
            layer=layer,
            block_table=self.block_table,
            kv_len=self.kv_len,
            scale=q.shape[-1] ** -0.5,
            todo=self.plan,
        )


class PrefillAttention(NamedTuple):
    """Chunks of prompts packed one after another, causal, over their pages."""

    written: Written
    block_table: Int[Array, "N M"]
    q_start: Int[Array, "N1"]
    kv_len: Int[Array, "N"]
    work: Work | None

    @classmethod
    def of(
        cls,
        written: Written,
        pages: KVPages,
        block_table: Int[Array, "N M"],
        *,
        num_heads: int,
        q_start: Int[Array, "N1"],
        kv_len: Int[Array, "N"],
    ) -> "PrefillAttention":
        """Makes it with the kernel's work planned, once for all layers (`prefill_attention`)."""
        rows = written.page.shape[0]
        work = plan_prefill(rows, num_heads, pages.k, q_start=q_start, kv_len=kv_len)
        return cls(written, block_table, q_start, kv_len, work)

    def __call__(
        self, projection: Projection, layer: Int[Array, ""], cache: KVPages
    ) -> tuple[Float[Array, "T H D"], KVPages]:
        """See Attention."""
        q, *new = write_kv(projection, *cache, layer=layer, **self.written._asdict())
        pages = KVPages(*new)
        return (
            prefill_attention(
                q,
                pages.k,
                pages.v,
                layer=layer,
                block_table=self.block_table,
                q_start=self.q_start,
                kv_len=self.kv_len,
                scale=q.shape[-1] ** -0.5,
                todo=self.work,
            ),
            pages,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CausalAttention:
    """`batch` whole sequences of `length` rows each, without a cache: what is given is passed
    on.
    """

    batch: int = field(metadata={"static": True})
    length: int = field(metadata={"static": True})

    def __call__(
        self, projection: Projection, layer: Int[Array, ""], cache: Any
    ) -> tuple[Float[Array, "T H D"], Any]:
        """See Attention."""
        q, k, v = split_heads(projection)
        heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
        shape = (self.batch, self.length)
        qg = q.reshape(*shape, kv_heads, heads // kv_heads, head_dim)
        kb, vb = (a.reshape(*shape, kv_heads, head_dim) for a in (k, v))
        s = jnp.einsum("bqghd,bkgd->bghqk", qg, kb, preferred_element_type=jnp.float32)
        s = s * head_dim**-0.5
        seen = jnp.tril(jnp.ones((self.length, self.length), bool))
        p = jax.nn.softmax(jnp.where(seen[None, None, None], s, -jnp.inf), axis=-1)
        out = jnp.einsum("bghqk,bkgd->bqghd", p.astype(v.dtype), vb)
        return out.reshape(q.shape), cache
