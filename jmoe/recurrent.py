"""Recurrent layers: what they keep of a sequence is as large however long that is.

Letters: T rows, N sequences, C channels, K taps of a convolution, G key heads, H value heads, D and
V elements of a key and of a value, B rows of a block, Z blocks.

**Gated DeltaNet** (arXiv 2412.06464) keeps one matrix a head. A row's query, key and value pass a
causal convolution over the K newest rows of their sequence. Then, for each value head, the state S
[D, V] decays, forgets what it has under the row's key in part, and takes its value instead
(equation 10):

    S <- exp(decay) S;  S <- S + k (beta (v - S^T k))^T;  out = S^T q

**Mamba-2** (arXiv 2405.21060) keeps such a matrix, too, but forgets by its decay alone: with the
paper's B and C for k and q, which groups of heads share, and dt x for the value,

    S <- exp(dt A) S + B (dt x)^T;  out = S^T C + D x

**A short convolution** (LFM2, arXiv 2511.23404) keeps the K - 1 newest rows alone.

What a sequence keeps lies in its slot. A row at position 0 begins with nothing, so that no slot has
to be emptied; and a row may run once only, unlike one that writes a page.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmoe.kv_cache import CacheSizes
from jmoe.parameter import Layout, Parameter
from pallas_kernels.matmul import linear
from pallas_kernels.norm import rms_norm

if TYPE_CHECKING:
    from jmoe.architectures import Architecture
    from jmoe.attention import StepRows
    from jmoe.config import ModelConfig

BLOCK = 32
"""Rows that are computed at once; as many in all programs, so that a sequence's bits do not depend
on what else is in a step, but on how its prompt is cut."""
MIN_LOG_DECAY = -40.0
"""Logarithm of the smallest factor that a state is multiplied by: less would change nothing in
float32, but be taken from sums of others."""
_MOST_A_LOG = 80.0
_PRECISE = lax.Precision.HIGHEST  # a state lives as long as its sequence
_NORM_EPS = 1e-6


Layer = Mapping[str, Any]
"""A layer's parameters (`jmoe.weights.Params`)."""
HeadRows = Float[Array, "T H V"]
"""Rows of heads; where a row is decoded of each sequence, T is N."""


class ConvProjection(NamedTuple):
    """What a layer with a convolution alone makes of its T rows before it."""

    x: Float[Array, "T C"]
    weights: Layer  # the layer's: `conv` [C, 1, K], the newest row's last


class ScanProjection(NamedTuple):
    """What a layer with states makes of its T rows before the convolution."""

    x: Float[Array, "T C"]  # what passes it: queries, keys and values, in the kind's order
    weights: Layer  # as of ConvProjection
    log_decay: Float[Array, "T H"]  # float32, at most 0
    rate: Float[Array, "T H"]  # float32: beta of Gated DeltaNet, dt of Mamba-2


class Heads(NamedTuple):
    """A layer's rows behind the convolution, as states take them; float32."""

    q: Float[Array, "T H D"]
    k: Float[Array, "T H D"]
    v: Float[Array, "T H V"]
    beta: Float[Array, "T H"] | None = None
    """What part of it a value replaces of what the state has under its key; None: nothing."""
    beside: Float[Array, "T H V"] | None = None  # what is added to what is read, if anything


def log_decay(a_log: Float[Array, "H"], dt: Float[Array, "T H"]) -> Float[Array, "T H"]:
    """Returns the logarithm of what a row multiplies states by: -exp(a_log) dt, bounded."""
    rate = jnp.exp(jnp.minimum(a_log, _MOST_A_LOG))  # no infinity, which a dt of 0 would make NaN
    return jnp.maximum(-rate[None] * dt, MIN_LOG_DECAY)


class Recurrent(ABC):
    """An `AttentionKind` whose layers keep something of each sequence in its slot."""

    @property
    def shares_pages(self) -> bool:
        """See AttentionKind. There are no pages."""
        return False

    @property
    def recurrent(self) -> bool:
        """See AttentionKind."""
        return True

    @abstractmethod
    def tensors(self, cfg: "ModelConfig", names: "Architecture", at: str) -> Layout:
        """Describes a layer's parameters of its own; `at` begins the names of its tensors."""

    @abstractmethod
    def project(
        self, cfg: "ModelConfig", layer: Layer, h: Float[Array, "T d"]
    ) -> tuple[Any, HeadRows]:
        """Returns what a layer makes of normed rows, and the gate of its heads."""

    @abstractmethod
    def apply_gate(
        self, cfg: "ModelConfig", layer: Layer, out: HeadRows, gate: HeadRows
    ) -> HeadRows:
        """Returns what the output projection takes of heads and their gate."""

    @abstractmethod
    def kept(self, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns what a layer keeps of a sequence: its newest inputs in the rows' dtype, and a
        state, if any.
        """

    @abstractmethod
    def decode(self, projection: Any, kept: Any) -> tuple[HeadRows, list[Array]]:
        """Runs one row of each of N sequences that have kept that; returns heads, and what they
        keep then.
        """

    @abstractmethod
    def prefill(self, projection: Any, chunks: "Chunks", kept: Any) -> tuple[HeadRows, list[Array]]:
        """Does the same for chunks."""

    def cache(
        self, cfg: "ModelConfig", num_layers: int, sizes: CacheSizes
    ) -> tuple[Float[Array, "L slots *s"], ...]:
        """See AttentionKind."""
        each = self.kept(sizes.dtype)
        return tuple(jnp.zeros((num_layers, sizes.num_slots, *a.shape), a.dtype) for a in each)

    def step(self, cfg: "ModelConfig", cache: Any, rows: "StepRows") -> "SlotRows":
        """See AttentionKind."""
        is_there, nobody = rows.kv_len > 0, cache[0].shape[1]
        write = jnp.where(is_there, rows.slots, nobody)  # out of range: dropped
        if rows.q_start is None:
            return SlotRows(rows.slots, write, rows.kv_len <= 1, None, self)
        n = rows.num_decodes
        begins = rows.kv_len - (rows.q_start[1:] - rows.q_start[:-1]) <= 0
        chunks = Chunks.of(rows.q_start[n:], rows.slot.shape[0])
        return SlotRows(rows.slots, write, begins, chunks, self)

    def causal(self, batch: int, length: int) -> "SlotRows":
        """See AttentionKind."""
        return self.packed(jnp.arange(batch + 1, dtype=jnp.int32) * length, batch * length)

    def packed(
        self, q_start: Int[Array, "N1"], num_rows: int, starts: Bool[Array, "T"] | None = None
    ) -> "SlotRows":
        """Returns what layers need of whole sequences without a cache; `starts` are rows with which
        another one begins.
        """
        count = len(q_start) - 1
        slots, begins = jnp.arange(count, dtype=jnp.int32), jnp.ones(count, bool)
        return SlotRows(slots, slots, begins, Chunks.of(q_start, num_rows, starts), self)


class WithStates(Recurrent):
    """Layers that keep a state [D, V] of each head, in float32, beside their newest inputs."""

    @abstractmethod
    def of_heads(self, projection: ScanProjection, sums: Float[Array, "T C"]) -> Heads:
        """Returns the rows of each head, of the convolution's sums."""

    def decode(self, projection: ScanProjection, kept: Any) -> tuple[HeadRows, list[Array]]:
        """See Recurrent."""
        inputs, states = kept
        sums, inputs = _one_more(projection, inputs)
        q, k, new, beta, beside = self.of_heads(projection, sums)
        states = states * jnp.exp(projection.log_decay)[..., None, None]
        if beta is not None:
            old = jnp.einsum("nhdv,nhd->nhv", states, k, precision=_PRECISE)
            new = (new - old) * beta[..., None]
        states = states + k[..., None] * new[..., None, :]
        out = jnp.einsum("nhdv,nhd->nhv", states, q, precision=_PRECISE)
        out = out if beside is None else out + beside
        return out.astype(projection.x.dtype), [inputs, states]

    def prefill(
        self, projection: ScanProjection, chunks: "Chunks", kept: Any
    ) -> tuple[HeadRows, list[Array]]:
        """See Recurrent."""
        inputs, states = kept
        sums, inputs = _convolved(projection, chunks, inputs)
        heads = self.of_heads(projection, sums)
        out, states = _scan(heads, projection.log_decay, chunks, states)
        out = out if heads.beside is None else out + heads.beside
        return out.astype(projection.x.dtype), [inputs, states]


@jax.tree_util.register_static
@dataclass(frozen=True)
class GatedDelta(WithStates):
    """Layers whose heads are those of Gated DeltaNet."""

    key_heads: int
    value_heads: int  # a multiple of them
    key: int  # elements of a key, and of a query
    value: int
    taps: int  # rows that the convolution sees, a row's own included

    @property
    def channels(self) -> int:
        """Elements that pass the convolution."""
        return 2 * self.key_heads * self.key + self.value_heads * self.value

    def tensors(self, cfg: "ModelConfig", names: "Architecture", at: str) -> Layout:
        """See Recurrent."""
        at, d, heads = at + "linear_attn.", cfg.d_model, self.value_heads
        keys, values = self.key_heads * self.key, heads * self.value
        parts, woven = ("qkv", "z", "b", "a"), ()
        stored = (self.channels, d), (values, d), (heads, d), (heads, d)
        if names.joined_delta:
            parts, stored = ("qkvz", "ba"), ((2 * keys + 2 * values, d), (2 * heads, d))
            group = heads // self.key_heads
            woven = (*2 * (self.key,), *2 * (group * self.value,)), 2 * (group,)
        parts = tuple(f"{at}in_proj_{part}.weight" for part in parts)
        return {
            "w_in": Parameter(parts, stored, woven=woven),
            "conv": _taps(at + "conv1d.weight", self),
            "a_log": Parameter((at + "A_log",), ((heads,),), "bias", float32=True),
            "dt_bias": Parameter((at + "dt_bias",), ((heads,),), "bias", float32=True),
            "gated_norm": Parameter((at + "norm.weight",), ((self.value,),), "norm"),
            "wo": Parameter((at + "out_proj.weight",), ((d, values),)),
        }

    def project(
        self, cfg: "ModelConfig", layer: Layer, h: Float[Array, "T d"]
    ) -> tuple[ScanProjection, HeadRows]:
        """See Recurrent."""
        heads, channels = self.value_heads, self.channels
        ends = [channels, channels + heads * self.value, channels + heads * (self.value + 1)]
        qkv, gate, beta, dt = jnp.split(linear(h, layer["w_in"]), ends, axis=1)
        beta, dt = (x.astype(jnp.float32) for x in (beta, dt))
        decay = log_decay(layer["a_log"], jax.nn.softplus(dt + layer["dt_bias"][None]))
        projection = ScanProjection(qkv, layer, decay, jax.nn.sigmoid(beta))
        return projection, gate.reshape(-1, heads, self.value)

    def apply_gate(
        self, cfg: "ModelConfig", layer: Layer, out: HeadRows, gate: HeadRows
    ) -> HeadRows:
        """See Recurrent. Each head has a norm of its own, before the gate."""
        out = rms_norm(out, layer["gated_norm"], cfg.rms_norm_eps)
        opening = jax.nn.silu(gate.astype(jnp.float32))
        return (out.astype(jnp.float32) * opening).astype(out.dtype)

    def kept(self, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """See Recurrent: inputs [K - 1, C], and a state [H, D, V] in float32."""
        state = self.value_heads, self.key, self.value
        return _inputs(self, dtype), jax.ShapeDtypeStruct(state, jnp.float32)

    def of_heads(self, projection: ScanProjection, sums: Float[Array, "T C"]) -> Heads:
        """See WithStates. Queries and keys of a key head serve several value heads."""
        mixed = jax.nn.silu(sums).astype(projection.x.dtype).astype(jnp.float32)
        keys, group = self.key_heads * self.key, self.value_heads // self.key_heads
        q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=1)
        q, k = (_unit(x.reshape(-1, self.key_heads, self.key)) for x in (q, k))
        q, k = (jnp.repeat(x, group, axis=1) for x in (q * self.key**-0.5, k))
        return Heads(q, k, v.reshape(-1, self.value_heads, self.value), projection.rate)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Mamba(WithStates):
    """Layers of Mamba-2."""

    heads: int
    value: int  # elements of a head
    state: int  # elements of B, and of C
    groups: int  # of heads that share them
    taps: int  # rows that the convolution sees, a row's own included
    conv_bias: bool = True
    bias: bool = False  # of its projections
    dt_least: float = 0.0
    dt_most: float = math.inf

    @property
    def wide(self) -> int:
        """Elements of all heads."""
        return self.heads * self.value

    @property
    def channels(self) -> int:
        """Elements that pass the convolution."""
        return self.wide + 2 * self.groups * self.state

    def tensors(self, cfg: "ModelConfig", names: "Architecture", at: str) -> Layout:
        """See Recurrent."""
        at, d, heads = f"{at}{names.mixer or 'mamba'}.", cfg.d_model, (self.heads,)
        columns = self.wide + self.channels + self.heads
        biases = {"b_conv": ("conv1d", self.channels)} if self.conv_bias else {}
        if self.bias:
            biases |= {"b_in": ("in_proj", columns), "bo": ("out_proj", d)}
        return {
            "w_in": Parameter((at + "in_proj.weight",), ((columns, d),)),
            "conv": _taps(at + "conv1d.weight", self),
            "a_log": Parameter((at + "A_log",), (heads,), "bias", float32=True),
            "dt_bias": Parameter((at + "dt_bias",), (heads,), "bias", float32=True),
            "skip": Parameter((at + "D",), (heads,), "norm", float32=True),
            "gated_norm": Parameter((at + "norm.weight",), ((self.wide,),), "norm"),
            "wo": Parameter((at + "out_proj.weight",), ((d, self.wide),)),
            **_biases(at, biases),
        }

    def project(
        self, cfg: "ModelConfig", layer: Layer, h: Float[Array, "T d"]
    ) -> tuple[ScanProjection, HeadRows]:
        """See Recurrent."""
        gate, x, dt = jnp.split(_entering(layer, h), [self.wide, self.wide + self.channels], axis=1)
        dt = jax.nn.softplus(dt.astype(jnp.float32) + layer["dt_bias"][None])
        dt = jnp.clip(dt, self.dt_least, self.dt_most)
        projection = ScanProjection(x, layer, log_decay(layer["a_log"], dt), dt)
        return projection, gate.reshape(-1, self.heads, self.value)

    def apply_gate(
        self, cfg: "ModelConfig", layer: Layer, out: HeadRows, gate: HeadRows
    ) -> HeadRows:
        """See Recurrent. The heads of a group have a norm, behind the gate."""
        h = out.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        h = h.reshape(len(h), self.groups, -1)
        h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + cfg.rms_norm_eps)
        h = h.reshape(len(h), -1).astype(out.dtype) * layer["gated_norm"][None]
        return h.reshape(out.shape)

    def kept(self, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """See Recurrent: inputs [K - 1, C], and a state [H, state, value] in float32."""
        state = self.heads, self.state, self.value
        return _inputs(self, dtype), jax.ShapeDtypeStruct(state, jnp.float32)

    def of_heads(self, projection: ScanProjection, sums: Float[Array, "T C"]) -> Heads:
        """See WithStates: C, B and dt x of each head, and D x beside them."""
        layer, dtype = projection.weights, projection.x.dtype
        if (bias := layer.get("b_conv")) is not None:
            sums = sums + bias.astype(jnp.float32)[None]
        mixed = jax.nn.silu(sums).astype(dtype).astype(jnp.float32)
        ends = [self.wide, self.wide + self.groups * self.state]
        x, b, c = jnp.split(mixed, ends, axis=1)
        b, c = (
            jnp.repeat(one.reshape(-1, self.groups, self.state), self.heads // self.groups, axis=1)
            for one in (b, c)
        )
        x = x.reshape(-1, self.heads, self.value)
        skip = layer["skip"].astype(jnp.float32)[None, :, None]
        return Heads(c, b, x * projection.rate[..., None], beside=skip * x)


@jax.tree_util.register_static
@dataclass(frozen=True)
class ShortConv(Recurrent):
    """Layers whose rows see few before them, by a convolution; it has one head."""

    channels: int
    taps: int  # rows that the convolution sees, a row's own included
    bias: bool = False  # of its projections, and of the convolution

    def tensors(self, cfg: "ModelConfig", names: "Architecture", at: str) -> Layout:
        """See Recurrent."""
        at, d, wide = at + "conv.", cfg.d_model, self.channels
        biases = {"b_in": ("in_proj", 3 * wide), "b_conv": ("conv", wide), "bo": ("out_proj", d)}
        return {
            "w_in": Parameter((at + "in_proj.weight",), ((3 * wide, d),)),
            "conv": _taps(at + "conv.weight", self),
            "wo": Parameter((at + "out_proj.weight",), ((d, wide),)),
            **_biases(at, biases if self.bias else {}),
        }

    def project(
        self, cfg: "ModelConfig", layer: Layer, h: Float[Array, "T d"]
    ) -> tuple[ConvProjection, HeadRows]:
        """See Recurrent. One gate is before the convolution, the other behind it."""
        before, gate, x = jnp.split(_entering(layer, h), 3, axis=1)
        return ConvProjection(before * x, layer), gate[:, None]

    def apply_gate(
        self, cfg: "ModelConfig", layer: Layer, out: HeadRows, gate: HeadRows
    ) -> HeadRows:
        """See Recurrent."""
        return (out + layer["b_conv"][None, None] if "b_conv" in layer else out) * gate

    def kept(self, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """See Recurrent: inputs [K - 1, C]."""
        return (_inputs(self, dtype),)

    def decode(self, projection: ConvProjection, kept: Any) -> tuple[HeadRows, list[Array]]:
        """See Recurrent."""
        sums, inputs = _one_more(projection, *kept)
        return sums[:, None].astype(projection.x.dtype), [inputs]

    def prefill(
        self, projection: ConvProjection, chunks: "Chunks", kept: Any
    ) -> tuple[HeadRows, list[Array]]:
        """See Recurrent."""
        sums, inputs = _convolved(projection, chunks, *kept)
        return sums[:, None].astype(projection.x.dtype), [inputs]


Kind = GatedDelta | Mamba | ShortConv


def _taps(name: str, kind: Kind) -> Parameter:
    return Parameter((name,), ((kind.channels, 1, kind.taps),), "laid out")


def _inputs(kind: Kind, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((kind.taps - 1, kind.channels), dtype)


def _biases(at: str, sizes: Mapping[str, tuple[str, int]]) -> Layout:
    """Describes biases by key, of modules of these names and sizes."""
    return {
        key: Parameter((f"{at}{name}.bias",), ((size,),), "bias")
        for key, (name, size) in sizes.items()
    }


def _entering(layer: Layer, h: Float[Array, "T d"]) -> Float[Array, "T columns"]:
    """Returns the product of rows with the layer's first weights, and its bias if it has one."""
    product = linear(h, layer["w_in"])
    return product + layer["b_in"][None] if "b_in" in layer else product


class Chunks(NamedTuple):
    """Rows of M sequences, packed one after another, in blocks of B that have rows of one alone."""

    q_start: Int[Array, "M1"]
    owner: Int[Array, "T"]  # of each row; past the last: none
    offset: Int[Array, "T"]  # behind the first row of its chunk, or of what begins in it
    block: Int[Array, "T"]  # of each row
    place: Int[Array, "T"]  # in it
    rows: Int[Array, "Z B"]  # of each block; past the last: none
    chunk: Int[Array, "Z"]  # of each block; M: none
    part: Int[Array, "Z B"] | None = None  # what has begun in a block up to each of its rows

    @classmethod
    def of(
        cls, q_start: Int[Array, "M1"], num_rows: int, starts: Bool[Array, "T"] | None = None
    ) -> "Chunks":
        """Plans them; `starts` as of `Recurrent.packed`."""
        count, size = len(q_start) - 1, BLOCK
        num_blocks = (num_rows + count * (size - 1)) // size
        index = jnp.arange(num_rows, dtype=jnp.int32)
        owner = jnp.sum(q_start[None, 1:] <= index[:, None], axis=1, dtype=jnp.int32)
        owner = jnp.where(index < q_start[0], count, owner)
        first_row = jnp.append(q_start[:-1], 0)[owner]
        offset = index - first_row
        blocks = -(-(q_start[1:] - q_start[:-1]) // size)
        ends = jnp.cumsum(blocks, dtype=jnp.int32)
        numbers = jnp.arange(num_blocks, dtype=jnp.int32)
        chunk = jnp.sum(ends[None] <= numbers[:, None], axis=1, dtype=jnp.int32)
        before = jnp.append(ends - blocks, 0)
        first = jnp.append(q_start[:-1], num_rows)[chunk] + (numbers - before[chunk]) * size
        rows = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        rows = jnp.where(rows < jnp.append(q_start[1:], 0)[chunk][:, None], rows, num_rows)
        block, part = before[owner] + offset // size, None
        place = offset % size
        if starts is not None:
            new = jnp.append(starts, False)[rows]
            part = jnp.cumsum(new, axis=1, dtype=jnp.int32)
            offset = index - lax.cummax(jnp.where(starts, index, first_row))
        return cls(q_start, owner, offset, block, place, rows, chunk, part)


class SlotRows(NamedTuple):
    """A step's rows: those of sequences that decode, then chunks of others. An `Attention`."""

    slots: Int[Array, "N"]
    write: Int[Array, "N"]  # the same, out of range for nobody's
    begins: Bool[Array, "N"]  # those that have nothing yet
    chunks: Chunks | None  # None: all decode
    kind: Recurrent

    @property
    def num_decodes(self) -> int:
        """How many of the sequences may decode."""
        return len(self.slots) - (0 if self.chunks is None else len(self.chunks.q_start) - 1)

    def __call__(
        self, projection: Any, layer: Int[Array, ""], cache: Any
    ) -> tuple[Float[Array, "T H V"], Any]:
        """See Attention."""
        kept, n, chunks = self._before(projection, layer, cache), self.num_decodes, self.chunks
        after, out = list[list[Array]](), None
        if n:
            first = projection._replace(
                **{name: x[:n] for name, x in projection._asdict().items() if name != "weights"}
            )
            out, new = self.kind.decode(first, [one[:n] for one in kept])
            after.append(new)
        if chunks is not None:
            decoded = out
            out, new = self.kind.prefill(projection, chunks, [one[n:] for one in kept])
            after.append(new)
            if decoded is not None:
                decodes = jnp.arange(n, dtype=jnp.int32) < chunks.q_start[0]
                decoded = jnp.where(decodes[:, None, None], decoded, out[:n])
                out = out.at[:n].set(decoded)
        assert out is not None
        if cache is None:
            return out, None
        return out, tuple(
            old.at[layer, self.write].set(jnp.concatenate(new), mode="drop")
            for old, new in zip(cache, zip(*after, strict=True), strict=True)
        )

    def part(self, rows: slice) -> "SlotRows":
        """Returns the same of some rows of a decode step."""
        own = self.slots[rows], self.write[rows], self.begins[rows]
        return SlotRows(*own, None, self.kind)

    def _before(self, projection: Any, layer: Int[Array, ""], cache: Any) -> list[Array]:
        """Returns what the sequences have kept."""
        if cache is None:
            each = self.kind.kept(projection.x.dtype)
            return [jnp.zeros((len(self.slots), *one.shape), one.dtype) for one in each]
        found = (one[layer, self.slots] for one in cache)
        return [jnp.where(self.begins.reshape(-1, *(1,) * (one.ndim - 1)), 0, one) for one in found]


def _one_more(
    projection: ConvProjection | ScanProjection, inputs: Float[Array, "N K1 C"]
) -> tuple[Float[Array, "N C"], Float[Array, "N K1 C"]]:
    """Returns the convolution of one row of each sequence in float32, and its newest inputs."""
    seen = jnp.concatenate([inputs, projection.x[:, None]], axis=1)
    weights = projection.weights["conv"][:, 0].T.astype(jnp.float32)[None]
    return jnp.sum(seen.astype(jnp.float32) * weights, axis=1), seen[:, 1:]


def _in_blocks(x: Float[Array, "T H *r"], chunks: Chunks) -> Float[Array, "Z H B *r"]:
    """Returns the rows of blocks, zeros where there are none."""
    return jnp.moveaxis(x.at[chunks.rows].get(mode="fill", fill_value=0), 1, 2)


def _convolved(
    projection: ConvProjection | ScanProjection, chunks: Chunks, inputs: Float[Array, "M K1 C"]
) -> tuple[Float[Array, "T C"], Float[Array, "M K1 C"]]:
    """Returns the convolution of rows in float32, and the newest inputs of their sequences."""
    x, kept, num_rows = projection.x, inputs.shape[1], len(projection.x)
    weights = projection.weights["conv"][:, 0].astype(jnp.float32)
    owner = jnp.minimum(chunks.owner, len(inputs) - 1)
    total = x.astype(jnp.float32) * weights[None, :, kept]
    for back in range(1, kept + 1):
        here = jnp.pad(x, ((back, 0), (0, 0)))[:num_rows]
        older = inputs[owner, jnp.clip(chunks.offset - back + kept, 0, kept - 1)]
        if chunks.part is not None:  # nothing is older than what begins
            older = jnp.zeros_like(here)
        seen = jnp.where((chunks.offset >= back)[:, None], here, older)
        total = total + seen.astype(jnp.float32) * weights[None, :, kept - back]
    lengths = chunks.q_start[1:] - chunks.q_start[:-1]
    at = lengths[:, None] - kept + jnp.arange(kept, dtype=jnp.int32)[None]
    rows = jnp.clip(chunks.q_start[:-1, None] + at, 0, num_rows - 1)
    older = jnp.take_along_axis(inputs, jnp.clip(at + kept, 0, kept - 1)[..., None], axis=1)
    return total, jnp.where((at >= 0)[..., None], x[rows], older)


def _unit(x: Float[Array, "T G D"]) -> Float[Array, "T G D"]:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _NORM_EPS)


def _scan(
    heads: Heads, log_decay: Float[Array, "T H"], chunks: Chunks, states: Float[Array, "M H D V"]
) -> tuple[Float[Array, "T H V"], Float[Array, "M H D V"]]:
    """Runs chunks block by block; what a block's rows are to each other is computed before. Returns
    heads, and the states afterwards.

    With `beta` the values that rows of a block bring depend on those of rows before them: a
    triangular system (Gated DeltaNet's section 3.3), solved once for what comes of the values and
    of the state before. Without (None) they are as they are.
    """
    size, beta = chunks.rows.shape[1], heads.beta
    q, k, v, log_decay = (_in_blocks(x, chunks) for x in (*heads[:3], log_decay))
    total = jnp.cumsum(log_decay, axis=2)
    before = jnp.tril(jnp.ones((size, size), bool))[None, None]
    into = out_of = jnp.ones((1, 1, size), bool)  # rows that see the state before, and behind
    passes = jnp.ones((1, 1), bool)
    if (part := chunks.part) is not None:
        before = before & (part[:, None, :, None] == part[:, None, None, :])
        into, out_of = part[:, None] == 0, part[:, None] == part[:, None, -1:]
        passes = part[:, None, -1] == 0
    apart = jnp.exp(jnp.where(before, total[..., None] - total[..., None, :], -jnp.inf))
    since = jnp.where(into, jnp.exp(total), 0)[..., None]
    values, keys = v, jnp.zeros_like(k[..., :0])
    if beta is not None:
        beta = _in_blocks(beta, chunks)
        seen = jnp.einsum("zhid,zhjd->zhij", k, k, precision=_PRECISE) * apart
        wanted = jnp.concatenate([v, k * since], axis=-1) * beta[..., None]
        solved = jnp.matmul(_inverse(seen * beta[..., None]), wanted, precision=_PRECISE)
        values, keys = jnp.split(solved, [v.shape[-1]], axis=-1)
    among = jnp.einsum("zhid,zhjd->zhij", q, k, precision=_PRECISE) * apart
    until = jnp.where(out_of, jnp.exp(total[..., -1:] - total), 0)[..., None]
    whole = jnp.where(passes, jnp.exp(total[..., -1]), 0)

    def body(states: Array, block: Any) -> tuple[Array, Array]:
        chunk, q, k, values, keys, among, whole = block
        state = states[jnp.minimum(chunk, len(states) - 1)]
        new = values
        if beta is not None:
            new = values - jnp.matmul(keys, state, precision=_PRECISE)
        out = jnp.matmul(q, state, precision=_PRECISE) + jnp.matmul(among, new, precision=_PRECISE)
        state = state * whole[:, None, None]
        state = state + jnp.einsum("hbd,hbv->hdv", k, new, precision=_PRECISE)
        return states.at[chunk].set(state, mode="drop"), out

    states, out = lax.scan(
        body, states, (chunks.chunk, q * since, k * until, values, keys, among, whole)
    )
    return jnp.moveaxis(out, 1, 2)[chunks.block, chunks.place], states


def _inverse(below: Float[Array, "Z H B B"]) -> Float[Array, "Z H B B"]:
    """Returns the inverse of a triangular matrix with ones on its diagonal and that below it; what
    is not below is not read.

    Blocks on the diagonal are inverted, twice as large ones of two each: of [[a, 0], [b, c]] the
    inverse is [[a', 0], [-c' b a', c']]. XLA's own solver is a call of LAPACK on a CPU, which a
    program that was read and not compiled does not find.
    """
    size = below.shape[-1]
    at = jnp.arange(size, dtype=jnp.int32)
    found = jnp.broadcast_to(jnp.eye(size, dtype=below.dtype), below.shape)
    block = 1
    while block < size:
        is_pair = at[:, None] // (2 * block) == at[None] // (2 * block)
        is_corner = (
            is_pair & (at[:, None] % (2 * block) >= block) & (at[None] % (2 * block) < block)
        )
        corner = jnp.where(is_corner[None, None], below, 0)
        half = jnp.matmul(found, corner, precision=_PRECISE)
        found = found - jnp.matmul(half, found, precision=_PRECISE)
        block *= 2
    return found
