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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmoe.kv_cache import CacheSizes

if TYPE_CHECKING:
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


class DeltaProjection(NamedTuple):
    """What a layer of Gated DeltaNet makes of its T rows before the convolution."""

    qkv: Float[Array, "T C"]  # of G heads of queries, G of keys, H of values
    log_decay: Float[Array, "T H"]  # float32, at most 0
    beta: Float[Array, "T H"]  # float32, between 0 and 1
    weights: Float[Array, "C 1 K"]  # of the convolution, the newest row's last


class MambaProjection(NamedTuple):
    """What a layer of Mamba-2 makes of its T rows before the convolution."""

    x: Float[Array, "T C"]  # of H heads, then B and C of each group
    dt: Float[Array, "T H"]  # float32
    log_decay: Float[Array, "T H"]  # float32: dt A
    weights: tuple[Float[Array, "C 1 K"], Float[Array, "C"] | None, Float[Array, "H"]]
    """Of the convolution, its bias, and D."""


class ConvProjection(NamedTuple):
    """What a layer with a short convolution makes of its T rows before it."""

    x: Float[Array, "T C"]
    weights: Float[Array, "C 1 K"]  # the newest row's last


def log_decay(a_log: Float[Array, "H"], dt: Float[Array, "T H"]) -> Float[Array, "T H"]:
    """Returns the logarithm of what a row multiplies states by: -exp(a_log) dt, bounded."""
    rate = jnp.exp(jnp.minimum(a_log, _MOST_A_LOG))  # no infinity, which a dt of 0 would make NaN
    return jnp.maximum(-rate[None] * dt, MIN_LOG_DECAY)


@dataclass(frozen=True)
class Recurrent:
    """An `AttentionKind` whose layers keep something of each sequence in its slot."""

    @property
    def shares_pages(self) -> bool:
        """See AttentionKind. There are no pages."""
        return False

    @property
    def recurrent(self) -> bool:
        """See AttentionKind."""
        return True

    def kept(self, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns what a layer keeps of a sequence: its newest inputs in the rows' dtype, and a
        state, if any.
        """
        raise NotImplementedError

    def decode(self, projection: Any, kept: Any) -> tuple[Float[Array, "N H V"], list[Array]]:
        """Runs one row of each of N sequences that have kept that; returns heads, and what they
        keep then.
        """
        raise NotImplementedError

    def prefill(
        self, projection: Any, chunks: "Chunks", kept: Any
    ) -> tuple[Float[Array, "T H V"], list[Array]]:
        """Does the same for chunks."""
        raise NotImplementedError

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


@jax.tree_util.register_static
@dataclass(frozen=True)
class GatedDelta(Recurrent):
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

    def kept(self, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """See Recurrent: inputs [K - 1, C], and a state [H, D, V] in float32."""
        state = self.value_heads, self.key, self.value
        return (
            jax.ShapeDtypeStruct((self.taps - 1, self.channels), dtype),
            jax.ShapeDtypeStruct(state, jnp.float32),
        )

    def decode(
        self, projection: DeltaProjection, kept: Any
    ) -> tuple[Float[Array, "N H V"], list[Array]]:
        """See Recurrent."""
        inputs, states = kept
        sums, inputs = _one_more(projection.qkv, projection.weights, inputs)
        q, k, v = _heads(self, sums, projection.qkv.dtype)
        states = states * jnp.exp(projection.log_decay)[..., None, None]
        old = jnp.einsum("nhdv,nhd->nhv", states, k, precision=_PRECISE)
        new = (v - old) * projection.beta[..., None]
        states = states + k[..., None] * new[..., None, :]
        out = jnp.einsum("nhdv,nhd->nhv", states, q, precision=_PRECISE)
        return out.astype(projection.qkv.dtype), [inputs, states]

    def prefill(
        self, projection: DeltaProjection, chunks: "Chunks", kept: Any
    ) -> tuple[Float[Array, "T H V"], list[Array]]:
        """See Recurrent."""
        inputs, states = kept
        sums, inputs = _convolved(projection.qkv, projection.weights, chunks, inputs)
        q, k, v = _heads(self, sums, projection.qkv.dtype)
        out, states = _scan(q, k, v, projection.log_decay, projection.beta, chunks, states)
        return out.astype(projection.qkv.dtype), [inputs, states]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Mamba(Recurrent):
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

    def kept(self, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """See Recurrent: inputs [K - 1, C], and a state [H, state, value] in float32."""
        return (
            jax.ShapeDtypeStruct((self.taps - 1, self.channels), dtype),
            jax.ShapeDtypeStruct((self.heads, self.state, self.value), jnp.float32),
        )

    def decode(
        self, projection: MambaProjection, kept: Any
    ) -> tuple[Float[Array, "N H V"], list[Array]]:
        """See Recurrent."""
        inputs, states = kept
        sums, inputs = _one_more(projection.x, projection.weights[0], inputs)
        q, k, x = self._heads(projection, sums)
        new = x * projection.dt[..., None]
        states = states * jnp.exp(projection.log_decay)[..., None, None]
        states = states + k[..., None] * new[..., None, :]
        out = jnp.einsum("nhdv,nhd->nhv", states, q, precision=_PRECISE)
        return self._with_skip(projection, out, x), [inputs, states]

    def prefill(
        self, projection: MambaProjection, chunks: "Chunks", kept: Any
    ) -> tuple[Float[Array, "T H V"], list[Array]]:
        """See Recurrent."""
        inputs, states = kept
        sums, inputs = _convolved(projection.x, projection.weights[0], chunks, inputs)
        q, k, x = self._heads(projection, sums)
        new = x * projection.dt[..., None]
        out, states = _scan(q, k, new, projection.log_decay, None, chunks, states)
        return self._with_skip(projection, out, x), [inputs, states]

    def _heads(
        self, projection: MambaProjection, sums: Float[Array, "T C"]
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T H D"], Float[Array, "T H V"]]:
        """Returns C, B and x of each head in float32."""
        if (bias := projection.weights[1]) is not None:
            sums = sums + bias.astype(jnp.float32)[None]
        mixed = jax.nn.silu(sums).astype(projection.x.dtype).astype(jnp.float32)
        ends = [self.wide, self.wide + self.groups * self.state]
        x, b, c = jnp.split(mixed, ends, axis=1)
        b, c = (
            jnp.repeat(one.reshape(-1, self.groups, self.state), self.heads // self.groups, axis=1)
            for one in (b, c)
        )
        return c, b, x.reshape(-1, self.heads, self.value)

    def _with_skip(
        self, projection: MambaProjection, out: Float[Array, "T H V"], x: Float[Array, "T H V"]
    ) -> Float[Array, "T H V"]:
        skip = projection.weights[2].astype(jnp.float32)[None, :, None]
        return (out + skip * x).astype(projection.x.dtype)


@jax.tree_util.register_static
@dataclass(frozen=True)
class ShortConv(Recurrent):
    """Layers whose rows see few before them, by a convolution; it has one head."""

    channels: int
    taps: int  # rows that the convolution sees, a row's own included
    bias: bool = False  # of its projections, and of the convolution

    def kept(self, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """See Recurrent: inputs [K - 1, C]."""
        return (jax.ShapeDtypeStruct((self.taps - 1, self.channels), dtype),)

    def decode(
        self, projection: ConvProjection, kept: Any
    ) -> tuple[Float[Array, "N 1 C"], list[Array]]:
        """See Recurrent."""
        sums, inputs = _one_more(projection.x, projection.weights, *kept)
        return sums[:, None].astype(projection.x.dtype), [inputs]

    def prefill(
        self, projection: ConvProjection, chunks: "Chunks", kept: Any
    ) -> tuple[Float[Array, "T 1 C"], list[Array]]:
        """See Recurrent."""
        sums, inputs = _convolved(projection.x, projection.weights, chunks, *kept)
        return sums[:, None].astype(projection.x.dtype), [inputs]


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
            each = self.kind.kept(projection[0].dtype)
            return [jnp.zeros((len(self.slots), *one.shape), one.dtype) for one in each]
        found = (one[layer, self.slots] for one in cache)
        return [jnp.where(self.begins.reshape(-1, *(1,) * (one.ndim - 1)), 0, one) for one in found]


def _one_more(
    x: Float[Array, "N C"], taps: Float[Array, "C 1 K"], inputs: Float[Array, "N K1 C"]
) -> tuple[Float[Array, "N C"], Float[Array, "N K1 C"]]:
    """Returns the convolution of one row of each sequence in float32, and its newest inputs."""
    seen = jnp.concatenate([inputs, x[:, None]], axis=1)
    weights = taps[:, 0].T.astype(jnp.float32)[None]
    return jnp.sum(seen.astype(jnp.float32) * weights, axis=1), seen[:, 1:]


def _in_blocks(x: Float[Array, "T H *r"], chunks: Chunks) -> Float[Array, "Z H B *r"]:
    """Returns the rows of blocks, zeros where there are none."""
    return jnp.moveaxis(x.at[chunks.rows].get(mode="fill", fill_value=0), 1, 2)


def _convolved(
    x: Float[Array, "T C"],
    taps: Float[Array, "C 1 K"],
    chunks: Chunks,
    inputs: Float[Array, "M K1 C"],
) -> tuple[Float[Array, "T C"], Float[Array, "M K1 C"]]:
    """Returns the convolution of rows in float32, and the newest inputs of their sequences."""
    kept, num_rows = inputs.shape[1], len(x)
    weights = taps[:, 0].astype(jnp.float32)
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


def _heads(
    kind: GatedDelta, convolved: Float[Array, "T C"], dtype: Any
) -> tuple[Float[Array, "T H D"], Float[Array, "T H D"], Float[Array, "T H V"]]:
    """Returns queries, keys and values of each value head in float32, of the convolution's sums."""
    mixed = jax.nn.silu(convolved).astype(dtype).astype(jnp.float32)
    keys = kind.key_heads * kind.key
    q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=1)
    group = kind.value_heads // kind.key_heads
    q, k = (_unit(x.reshape(-1, kind.key_heads, kind.key)) for x in (q, k))
    q, k = (jnp.repeat(x, group, axis=1) for x in (q * kind.key**-0.5, k))
    return q, k, v.reshape(-1, kind.value_heads, kind.value)


def _unit(x: Float[Array, "T G D"]) -> Float[Array, "T G D"]:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _NORM_EPS)


def _scan(
    q: Float[Array, "T H D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H V"],
    log_decay: Float[Array, "T H"],
    beta: Float[Array, "T H"] | None,
    chunks: Chunks,
    states: Float[Array, "M H D V"],
) -> tuple[Float[Array, "T H V"], Float[Array, "M H D V"]]:
    """Runs chunks block by block; what a block's rows are to each other is computed before. Returns
    heads, and the states afterwards.

    With `beta` the values that rows of a block bring depend on those of rows before them: a
    triangular system (Gated DeltaNet's section 3.3), solved once for what comes of the values and
    of the state before. Without (None) they are as they are.
    """
    size = chunks.rows.shape[1]
    q, k, v, log_decay = (_in_blocks(x, chunks) for x in (q, k, v, log_decay))
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
