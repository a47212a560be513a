"""Attention kinds: what a layer's rows read and keep.

A config names the kind of each layer (`ModelConfig.layer_attention`). A kind makes the cache of its
layers, and, of each step, the data that they need: a pytree, made once before the layers. Called
with a layer's projection that returns what the heads read, and the cache as it is afterwards. A
kind of your own needs no change here: name it in a config, or give its data to
`jmoe.model.run_layers`.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jmoe.kv_cache import CacheSizes, KVPages, make_pages
from jmoe.rope import RopeConfig
from pallas_kernels import fp8_pages
from pallas_kernels.fp8_pages import Fp8Pages, rounded
from pallas_kernels.kv_write import Heads, Projection, split_heads, write_kv
from pallas_kernels.online_softmax import softmax
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention import plan as plan_decode
from pallas_kernels.paged_attention.schedule import Schedule
from pallas_kernels.prefill_attention import expanded_attention, plan_expanded, prefill_attention
from pallas_kernels.prefill_attention import plan as plan_prefill
from pallas_kernels.prefill_attention.work import Work

if TYPE_CHECKING:
    from jmoe.config import ModelConfig


@runtime_checkable
class Attention(Protocol):
    """What `run_layers` calls in each layer; a pytree, so that a step under way is a value."""

    def __call__(
        self, projection: Any, layer: Int[Array, ""], cache: Any
    ) -> tuple[Float[Array, "T H D"], Any]:
        """Returns what the heads of each row read, and the cache with this layer's keys and values.

        `projection` is what `jmoe.model.project` makes of the layer: `Projection` or `Heads`, or
        the kind's own.
        """
        ...


class StepRows(NamedTuple):
    """A step's T rows, of N sequences: what kinds make their data of."""

    block_table: Int[Array, "S M"]  # page of each block of each sequence slot, of the kind's group
    slot: Int[Array, "T"]  # of each row's sequence
    position: Int[Array, "T"]
    valid: Bool[Array, "T"]  # False: padding
    slots: Int[Array, "N"]  # of each sequence
    kv_len: Int[Array, "N"]  # positions of each, the step's included; 0: padding
    q_start: Int[Array, "N1"] | None = None
    """First row of each sequence's chunk; None: a decode step, one row a sequence."""
    num_decodes: int = 0
    """The first sequences of a hybrid step, which decode: one row each, padding behind them. A kind
    may take them for chunks."""


@runtime_checkable
class AttentionKind(Protocol):
    """How some layers attend, and what they keep. It is part of a config: frozen and hashable.

    Where a row reads few positions back in pages, an attribute `window` says how many, its own
    included (`page_windows`). Where a row changes what its sequence keeps, so that it may run once
    only, an attribute `recurrent` is true.
    """

    @property
    def shares_pages(self) -> bool:
        """Whether what a sequence keeps lies in the pages of its block table, and nowhere else, so
        that others may begin with them.
        """
        ...

    def cache(self, cfg: "ModelConfig", num_layers: int, sizes: CacheSizes) -> Any:
        """Returns the empty cache of this kind's layers, a pytree. Its arrays' first axes are
        layers, and pages or slots.
        """
        ...

    def step(self, cfg: "ModelConfig", cache: Any, rows: StepRows) -> Attention:
        """Returns what this kind's layers need of a step over their cache. They are called with
        their number among them.
        """
        ...

    def causal(self, batch: int, length: int) -> Attention:
        """Returns the same of `batch` whole sequences of `length` rows, without a cache."""
        ...


@jax.tree_util.register_static
@dataclass(frozen=True)
class Paged:
    """Causal attention over KV pages: full, or over a sliding window."""

    window: int = 0  # positions that a row sees, its own included; 0: all
    sinks: bool = False  # whether layers have `sinks`: a score a head that has no value
    fp8: bool = False
    """Whether keys and values are kept in eight bits (`pallas_kernels.fp8_pages`). What attends
    without a cache rounds them likewise.
    """
    rotary: RopeConfig | None = None  # None: as `ModelConfig.rope`
    gated: bool = False  # whether queries bring a gate of what each of their elements reads

    @property
    def shares_pages(self) -> bool:
        """See AttentionKind."""
        return True

    @property
    def latent(self) -> int:
        """Elements of a key that are its value; 0: keys and values are kept apart."""
        return 0

    def plan_expanded(self, num_heads: int, pages: KVPages, rows: StepRows) -> Any:
        """Returns the plan of prefill that makes keys and values of what is kept; None: there is
        nothing to make.
        """
        return None

    def __post_init__(self) -> None:
        """Raises ValueError for a window below 0."""
        if self.window < 0:
            raise ValueError(f"window is {self.window}; it must be at least 1, or 0 for none")

    def cache(self, cfg: "ModelConfig", num_layers: int, sizes: CacheSizes) -> KVPages:
        """See AttentionKind."""
        return make_pages(cfg, num_layers, sizes, fp8=self.fp8)

    def step(self, cfg: "ModelConfig", cache: KVPages, rows: StepRows) -> Attention:
        """See AttentionKind. A window that no position can exceed is none."""
        table, heads = rows.block_table, cfg.num_heads
        reached = table.shape[1] * cache.page_size
        kind = self if self.window < reached else replace(self, window=0)
        page = table[rows.slot, rows.position // cache.page_size]
        page = jnp.where(rows.valid, page, cache.padding_page)
        written = Written(page, rows.position % cache.page_size)
        own, sees = table[rows.slots], {"window": kind.window, "latent": kind.latent}
        own = kind._in_sight(own, cache, rows)

        def decode(own: Array, kv_len: Array) -> DecodeAttention:
            plan = plan_decode(heads, cache.k, kv_len=kv_len, **sees)
            return DecodeAttention(written, own, kv_len, plan, kind)

        def prefill(
            own: Array, q_start: Array, kv_len: Array, work: Any = None
        ) -> PrefillAttention:
            if work is None:
                chunks = {"q_start": q_start, "kv_len": kv_len, **sees}
                work = plan_prefill(len(rows.slot), heads, cache.k, **chunks)
            return PrefillAttention(written, own, q_start, kv_len, work, kind)

        q_start, kv_len, n = rows.q_start, rows.kv_len, rows.num_decodes
        if q_start is None:
            return decode(own, kv_len)
        if n:  # latents are read as they are by all
            chunks = q_start[n:], kv_len[n:]
            return HybridAttention(decode(own[:n], kv_len[:n]), prefill(own[n:], *chunks))
        return prefill(own, q_start, kv_len, kind.plan_expanded(heads, cache, rows))

    def _in_sight(
        self, table: Int[Array, "N M"], pages: KVPages, rows: StepRows
    ) -> Int[Array, "N M"]:
        """Returns the pages of each sequence, with the padding page in place of those behind the
        window of its first row: others may own them by now.
        """
        if not self.window:
            return table
        q_len = 1 if rows.q_start is None else rows.q_start[1:] - rows.q_start[:-1]
        first = jnp.maximum(rows.kv_len - q_len - self.window + 1, 0) // pages.page_size
        blocks = jnp.arange(table.shape[1], dtype=jnp.int32)
        return jnp.where(blocks[None] < first[:, None], pages.padding_page, table)

    def causal(self, batch: int, length: int) -> "CausalAttention":
        """See AttentionKind."""
        window = self.window if self.window < length else 0
        return CausalAttention(batch, length, window, self.fp8)


FULL = Paged()


@jax.tree_util.register_static
@dataclass(frozen=True)
class Latent(Paged):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). Of a position it keeps one
    latent of `kv_rank` elements for all heads' keys and values, and `rope` elements that turn.

    Queries are taken to the latents (the projection of keys is absorbed), which are then one key
    head for all, and their own values; `jmoe.model.attended` makes heads of what is read of them.
    Or, where `PrefillAttention.expands`, each head's keys and values are made of latents.
    """

    kv_rank: int = 0
    q_rank: int = 0  # of the queries' own latent; 0: they have none
    nope: int = 0  # elements of a query head that do not turn
    rope: int = 0  # elements that do
    value: int = 0  # elements of a value head
    score_scale: float = 1.0  # beside the root of a query head's size
    interleaved: bool = True  # elements turn in pairs of neighbours; else halves against each other

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.score_scale * (self.nope + self.rope) ** -0.5

    @property
    def latent(self) -> int:
        """See Paged."""
        return self.kv_rank

    @property
    def width(self) -> int:
        """Elements that are kept of a position."""
        return self.kv_rank + self.rope

    def plan_expanded(self, num_heads: int, pages: KVPages, rows: StepRows) -> Any:
        """See Paged."""
        if self.window or self.sinks or rows.q_start is None:
            return None
        sizes = {"rank": self.kv_rank, "key": self.nope + self.rope, "value": self.value}
        return plan_expanded(
            len(rows.slot), num_heads, pages.k, q_start=rows.q_start, kv_len=rows.kv_len, **sizes
        )

    def cache(self, cfg: "ModelConfig", num_layers: int, sizes: CacheSizes) -> KVPages:
        """See AttentionKind."""
        shape = num_layers, sizes.num_pages + 1, 1, sizes.page_size, self.width
        return KVPages(jnp.zeros(shape, sizes.dtype))


class ByKind(NamedTuple):
    """A step's data, or a cache, of layers of several kinds: one for each of
    `ModelConfig.attention_kinds`.
    """

    each: tuple[Any, ...]

    @classmethod
    def of(cls, each: tuple[Any, ...]) -> Any:
        """Returns it, or the one thing itself where all layers are of one kind."""
        return each[0] if len(each) == 1 else cls(each)


KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
"""Names of what keys and values are kept in, as vLLM has them; the last two are one."""


def with_kv_cache_dtype(cfg: "ModelConfig", dtype: str) -> "ModelConfig":
    """Returns a configuration whose layers keep keys and values as `dtype` says, `auto`: as they
    do. Layers that keep something else go on doing so. Raises ValueError for another name, and
    where no layer keeps any.
    """
    if dtype not in KV_CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype is {dtype!r}; it must be one of {', '.join(KV_CACHE_DTYPES)}"
        )
    if dtype == "auto":
        return cfg
    kinds = tuple(
        replace(kind, fp8=True) if type(kind) is Paged else kind for kind in cfg.layer_attention
    )
    if not any(type(kind) is Paged for kind in kinds):
        raise ValueError(
            f"kv_cache_dtype is {dtype!r}, and no layer of this {cfg.architecture} model keeps keys"
            " and values (latents and recurrent states stay as they are); leave it at auto"
        )
    return replace(cfg, layer_attention=kinds)


def _window(kind: AttentionKind) -> int:
    return (kind.shares_pages and getattr(kind, "window", None)) or 0


def page_windows(cfg: "ModelConfig") -> tuple[int, ...]:
    """Returns the window of each group of layers whose pages live equally long, the longest first.

    A group has pages of its own and a block table; those behind its window are free for others.
    0: a sequence's pages live as long as it does.
    """
    windows = {_window(kind) for kind in cfg.attention_kinds}
    return tuple(sorted(windows, key=lambda window: (window > 0, -window)))


def make_cache(
    cfg: "ModelConfig", sizes: CacheSizes, num_pages: tuple[int, ...] | None = None
) -> Any:
    """Returns the empty cache of all layers, `ByKind` where there are several kinds. `num_pages`
    are those of each group of `page_windows`; None: as many in all.
    """
    layers, windows = cfg.layer_attention, page_windows(cfg)
    each = num_pages or (sizes.num_pages,) * len(windows)
    return ByKind.of(
        tuple(
            kind.cache(
                cfg,
                layers.count(kind),
                sizes._replace(num_pages=each[windows.index(_window(kind))]),
            )
            for kind in cfg.attention_kinds
        )
    )


def step_attention(cfg: "ModelConfig", cache: Any, rows: StepRows) -> Any:
    """Returns what all layers need of a step over that cache, `ByKind` where there are several.

    Of several groups the block table has a column each for block 0, then for block 1, and so on.
    """
    each = cache.each if isinstance(cache, ByKind) else (cache,)
    windows, found = page_windows(cfg), list[Any]()
    for kind, own in zip(cfg.attention_kinds, each, strict=True):
        if len(windows) > 1:
            table = rows.block_table[:, windows.index(_window(kind)) :: len(windows)]
            found.append(kind.step(cfg, own, rows._replace(block_table=table)))
        else:
            found.append(kind.step(cfg, own, rows))
    return ByKind.of(tuple(found))


def causal_attention(cfg: "ModelConfig", batch: int, length: int) -> Any:
    """Returns the same of `batch` whole sequences of `length` rows, without a cache."""
    return ByKind.of(tuple(kind.causal(batch, length) for kind in cfg.attention_kinds))


def is_recurrent(cfg: "ModelConfig") -> bool:
    """Returns whether a position that is computed again has to be so from the sequence's first."""
    return any(getattr(kind, "recurrent", False) for kind in cfg.attention_kinds)


def sequence_bytes(cfg: "ModelConfig", dtype: jnp.dtype) -> int:
    """Returns the bytes that layers keep of a sequence outside pages, however long it is."""
    sizes = CacheSizes(1, 1, 1, 1, dtype)
    kinds = [kind for kind in cfg.layer_attention if not kind.shares_pages]
    each = (jax.eval_shape(lambda kind=kind: kind.cache(cfg, 1, sizes)) for kind in kinds)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(list(each)))


def page_bytes(cfg: "ModelConfig", page_size: int, dtype: jnp.dtype) -> tuple[int, ...]:
    """Returns the bytes of one page of each group of `page_windows`, what its layers keep of it."""

    def size(*num_pages: int) -> int:
        sizes = CacheSizes(1, page_size, 1, 1, dtype)
        leaves = jax.tree.leaves(jax.eval_shape(lambda: make_cache(cfg, sizes, num_pages)))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    groups = range(len(page_windows(cfg)))
    return tuple(
        size(*(1 + (at == group) for at in groups)) - size(*(1 for _ in groups)) for group in groups
    )


class Written(NamedTuple):
    """Where the keys and values of a step's T rows go."""

    page: Int[Array, "T"]  # padding rows: the padding page
    offset: Int[Array, "T"]

    def write(
        self, projection: Projection | Heads, layer: Int[Array, ""], cache: KVPages
    ) -> tuple[Float[Array, "T H D"], KVPages]:
        """Returns query heads, and the cache with the rows' keys and values."""
        if isinstance(projection, Projection):
            assert cache.v is not None
            q, *new = write_kv(projection, cache.k, cache.v, layer=layer, **self._asdict())
            return q, KVPages(*new)
        at = layer, self.page, slice(None), self.offset
        return projection.q, KVPages(fp8_pages.write(cache.k, at, projection.k))


class DecodeAttention(NamedTuple):
    """One row a sequence, over its pages, its own key included."""

    written: Written
    block_table: Int[Array, "B M"]
    kv_len: Int[Array, "B"]  # 0: padding
    plan: Schedule | None
    kind: Paged

    def __call__(
        self, projection: Projection | Heads, layer: Int[Array, ""], cache: KVPages
    ) -> tuple[Float[Array, "B H D"], KVPages]:
        """See Attention."""
        q, pages = self.write(projection, layer, cache)
        return self.read(q, layer, pages, projection.sinks), pages

    def write(
        self, projection: Projection | Heads, layer: Int[Array, ""], cache: KVPages
    ) -> tuple[Float[Array, "B H D"], KVPages]:
        """Returns query heads, and the cache with the rows' keys and values."""
        return self.written.write(projection, layer, cache)

    def read(
        self,
        q: Float[Array, "B H D"],
        layer: Int[Array, ""],
        cache: KVPages,
        sinks: Float[Array, "*B H"] | None = None,
    ) -> Float[Array, "B H V"]:
        """Returns what the heads read of a cache that the rows are written to. `sinks` are the
        layer's, or each row's own.
        """
        return paged_attention(
            q,
            cache.k,
            cache.v,
            layer=layer,
            block_table=self.block_table,
            kv_len=self.kv_len,
            scale=q.shape[-1] ** -0.5,
            window=self.kind.window,
            sinks=sinks,
            latent=self.kind.latent,
            todo=self.plan,
        )


class PrefillAttention(NamedTuple):
    """Chunks of prompts packed one after another, causal, over their pages."""

    written: Written
    block_table: Int[Array, "N M"]
    q_start: Int[Array, "N1"]
    kv_len: Int[Array, "N"]
    work: Any
    kind: Paged

    @property
    def expands(self) -> bool:
        """Whether it takes queries that are not taken to the latents, and weights to expand
        these.
        """
        return self.kind.latent > 0 and isinstance(self.work, Work)

    def __call__(
        self, projection: Projection | Heads, layer: Int[Array, ""], cache: KVPages
    ) -> tuple[Float[Array, "T H D"], KVPages]:
        """See Attention."""
        q, pages = self.written.write(projection, layer, cache)
        return self.read(q, layer, pages, projection), pages

    def read(
        self,
        q: Float[Array, "T H D"],
        layer: Int[Array, ""],
        cache: KVPages,
        projection: Projection | Heads,
    ) -> Float[Array, "T H V"]:
        """Returns what the heads read of a cache that the rows are written to."""
        chunks = {
            "layer": layer,
            "block_table": self.block_table,
            "q_start": self.q_start,
            "kv_len": self.kv_len,
            "todo": self.work,
        }
        if self.expands:
            assert isinstance(projection, Heads)
            assert projection.expand is not None
            assert isinstance(self.kind, Latent)
            assert not isinstance(cache.k, Fp8Pages)
            scale = self.kind.scale
            return expanded_attention(q, projection.expand, cache.k, scale=scale, **chunks)
        return prefill_attention(
            q,
            cache.k,
            cache.v,
            scale=q.shape[-1] ** -0.5,
            window=self.kind.window,
            sinks=projection.sinks,
            latent=self.kind.latent,
            **chunks,
        )


class HybridAttention(NamedTuple):
    """Rows of sequences that decode, and behind them chunks of prompts. All are written before any
    are read, since XLA would copy the cache for a read between two writes.
    """

    decode: DecodeAttention  # of the first rows, as many as may decode
    prefill: PrefillAttention  # of all rows; those that decode are in no chunk

    def __call__(
        self, projection: Projection | Heads, layer: Int[Array, ""], cache: KVPages
    ) -> tuple[Float[Array, "T H D"], KVPages]:
        """See Attention."""
        q, pages = self.decode.write(projection, layer, cache)
        count = self.decode.kv_len.shape[0]
        decoded = self.decode.read(q[:count], layer, pages, projection.sinks)
        read = self.prefill.read(q, layer, pages, projection)
        decodes = jnp.arange(count, dtype=jnp.int32) < self.prefill.q_start[0]
        first = jnp.where(decodes[:, None, None], decoded, read[:count])
        return read.at[:count].set(first), pages


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CausalAttention:
    """`batch` whole sequences of `length` rows each, without a cache: what is given is passed
    on.
    """

    batch: int = field(metadata={"static": True})
    length: int = field(metadata={"static": True})
    window: int = field(default=0, metadata={"static": True})  # as of `Paged`
    fp8: bool = field(default=False, metadata={"static": True})  # likewise

    def __call__(
        self, projection: Projection | Heads, layer: Int[Array, ""], cache: Any
    ) -> tuple[Float[Array, "T H D"], Any]:
        """See Attention."""
        q, k, v = split_heads(projection)
        if self.fp8:
            k, v = rounded(k), rounded(v)
        heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
        shape = (self.batch, self.length)
        qg = q.reshape(*shape, kv_heads, heads // kv_heads, head_dim)
        kb, vb = (a.reshape(*shape, kv_heads, head_dim) for a in (k, v))
        s = jnp.einsum("bqghd,bkgd->bghqk", qg, kb, preferred_element_type=jnp.float32)
        s = s * head_dim**-0.5
        seen = jnp.tril(jnp.ones((self.length, self.length), bool))
        if self.window:
            seen = jnp.triu(seen, 1 - self.window)
        sinks = projection.sinks
        if sinks is not None:
            sinks = sinks.reshape(1, kv_heads, heads // kv_heads, 1)
        p = softmax(jnp.where(seen[None, None, None], s, -jnp.inf), sinks)
        out = jnp.einsum("bghqk,bkgd->bqghd", p.astype(v.dtype), vb)
        return out.reshape(q.shape), cache
