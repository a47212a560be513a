"""The functional model: one pure function a stage, and the run over layers that joins them.

Letters: T rows, d model width, H query heads, G kv heads, D head size, m experts, K picks a row.
Every stage works alone on flat rows `x [T, d]`. What it needs of a step is data (`StepData`): a
step under way is a value, its rows, cache and data, and the half layer it has come to.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jmoe.attention import Attention, ByKind, Latent
from jmoe.brownout import Control
from jmoe.config import ModelConfig
from jmoe.config_keys import words
from jmoe.experts import ExpertTable, uncut
from jmoe.moe import (
    COUNTS,
    Balance,
    Exchange,
    LayerStats,
    RoutedRows,
    Wanted,
    alone,
    dense_mlp,
    moe,
    normed,
    residual,
)
from jmoe.parallel.delivery import over_mesh
from jmoe.parallel.probe import Probe
from jmoe.parallel.replicas import Copying, Replicas, Replication
from jmoe.recurrent import SlotRows
from jmoe.rope import Rotation, rotation
from jmoe.weights import Params, Weights
from pallas_kernels.backend import backend
from pallas_kernels.kv_write import Heads, Projection, turn
from pallas_kernels.matmul import LayerOf, linear, matmul_transposed
from pallas_kernels.norm import rms_norm

LOOKAHEAD = "lookahead"
"""Where probes are among the parameters, if a server has them (`jmoe.parallel.probe`)."""

LATENT_EPS = 1e-6
"""Of the norms of latents, whatever a config says of the others."""


class StepData(NamedTuple):
    """What the layers need of a step beside its rows; the same in every layer. A pytree."""

    rows: RoutedRows
    attention: Any  # an `Attention` of all layers, or one for each of their kinds (`ByKind`)
    control: Control


def embed(cfg: ModelConfig, params: Params, tokens: Int[Array, "T"]) -> Float[Array, "T d"]:
    """Returns the rows of the embedding matrix, as the first layer takes them."""
    rows = params["embed"][tokens]
    return rows if cfg.embedding_multiplier == 1 else rows * cfg.embedding_multiplier


def project(
    cfg: ModelConfig,
    layer: Params,
    h: Float[Array, "T d"],
    cos_sin: Rotation,
    *,
    expands: bool = False,
) -> tuple[Any, Float[Array, "T H D"] | None]:
    """Returns the QKV product of normed rows; what `Projection` has of them is still to be
    applied. Of latent attention, queries and latents as they are: taken to each other, or, where
    attention `expands` these, not. And the gate of what heads read, where they have one.
    """
    if "wkv_a" in layer:
        return _latents(cfg, layer, h, cos_sin, expands), None
    shape = (-1, cfg.num_heads + 2 * cfg.num_kv_heads, cfg.head_dim)
    product, bias, gate = linear(h, layer["wqkv"]), layer.get("bqkv"), None
    if product.shape[1] > shape[1] * shape[2]:  # gates behind the queries
        width = product.shape[1]
        product, gate = _without_gate(cfg, product)
        if bias is not None and bias.shape[0] == width:  # gates have biases, too
            bias, of_gate = _without_gate(cfg, bias[None])
            gate = gate + of_gate
        gate = gate.reshape(-1, cfg.num_heads, cfg.head_dim)
    projection = Projection(
        product.reshape(shape),
        cfg.num_kv_heads,
        cos_sin.cos,
        cos_sin.sin,
        bias=None if bias is None else bias.reshape(shape[1:]),
        q_norm=layer["q_norm"] if cfg.qk_norm else None,
        k_norm=layer["k_norm"] if cfg.qk_norm else None,
        eps=cfg.rms_norm_eps,
        sinks=layer.get("sinks"),
        clip=cfg.clip_qkv,
        turned_first=cfg.turned_first,
    )
    return projection, gate


def _without_gate(
    cfg: ModelConfig, product: Float[Array, "T C"]
) -> tuple[Float[Array, "T QKV"], Float[Array, "T HD"]]:
    """Returns queries, keys and values, and the gates between them."""
    size = cfg.num_heads * cfg.head_dim
    q, gate, kv = jnp.split(product, [size, 2 * size], axis=1)
    return jnp.concatenate([q, kv], axis=1), gate


def _latents(
    cfg: ModelConfig, layer: Params, h: Float[Array, "T d"], cos_sin: Rotation, expands: bool
) -> Heads:
    kind = next(kind for kind in cfg.attention_kinds if isinstance(kind, Latent))
    q = h
    if kind.q_rank:
        q = rms_norm(linear(h, layer["wq_a"]), layer["q_a_norm"], LATENT_EPS)
    q = linear(q, layer["wq"]).reshape(h.shape[0], cfg.num_heads, -1)
    q, q_turned = jnp.split(q, [kind.nope], axis=2)
    # XLA would make one product of two with the same rows, and so copy both weights in every step.
    compressed = linear(lax.optimization_barrier(h), layer["wkv_a"])
    latent, k_turned = jnp.split(compressed, [kind.kv_rank], axis=1)
    latent = rms_norm(latent, layer["kv_a_norm"], LATENT_EPS)[:, None]
    pairs = (q_turned, k_turned[:, None])
    if kind.interleaved:
        pairs = (jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1) for x in pairs)
    q_turned, k_turned = (turn(x, cos_sin.cos, cos_sin.sin) for x in pairs)
    k = jnp.concatenate([latent, k_turned], axis=2)
    scale = 1.0 if cos_sin.query_scale is None else cos_sin.query_scale[:, None, None]
    if expands:
        q = _scaled(jnp.concatenate([q, q_turned], axis=2), scale)
        keys, values = (one.reshape(kind.kv_rank, -1) for one in _of_latents(cfg, layer))
        return Heads(q, k, k, layer.get("sinks"), (keys, values))
    keys, _ = _of_latents(cfg, layer)
    q = jnp.concatenate([jnp.einsum("thn,rhn->thr", q, keys), q_turned], axis=2)
    # Attention scales by the root of the width that it sees.
    q = _scaled(q, scale * (kind.scale * kind.width**0.5))
    return Heads(q, k, k, layer.get("sinks"))


def _scaled(
    q: Float[Array, "T H D"], scale: float | Float[Array, "T 1 1"]
) -> Float[Array, "T H D"]:
    """Returns queries that are multiplied in float32, in their own dtype."""
    if isinstance(scale, float) and scale == 1:
        return q
    return (q.astype(jnp.float32) * scale).astype(q.dtype)


def _of_latents(
    cfg: ModelConfig, layer: Params
) -> tuple[Float[Array, "r H nope"], Float[Array, "r H value"]]:
    """Returns what makes each head's keys, and its values, of latents."""
    if "wkv_b" in layer:
        layer = with_split_latents(layer)
    keys, values = (
        layer[name].reshape(-1, cfg.num_heads, layer[name].shape[1] // cfg.num_heads)
        for name in ("wk_b", "wv_b")
    )
    return keys, values


def attend(
    cfg: ModelConfig,
    layer: Params,
    x: Float[Array, "T d"],
    cos_sin: Rotation,
    attention: Attention,
    index: Int[Array, ""],
    cache: Any,
) -> tuple[Float[Array, "T d"], Any]:
    """Runs attention of layer `index` with its residual; returns the cache, too."""
    h = normed(cfg, layer, "attn_norm", x)
    if isinstance(attention, SlotRows):
        projection, gate = attention.kind.project(cfg, layer, h)
        out, cache = attention(projection, index, cache)
        return attended(cfg, layer, x, attention.kind.apply_gate(cfg, layer, out, gate)), cache
    expands = getattr(attention, "expands", False)
    projection, gate = project(cfg, layer, h, cos_sin, expands=expands)
    out, cache = attention(projection, index, cache)
    return attended(cfg, layer, x, out, gate, expands), cache


def attended(
    cfg: ModelConfig,
    layer: Params,
    x: Float[Array, "T d"],
    out: Float[Array, "T H D"],
    gate: Float[Array, "T H D"] | None = None,
    expanded: bool = False,
) -> Float[Array, "T d"]:
    """Adds to the rows what their heads have read: of latents, or of values made of them; gated
    where they have a `gate`.
    """
    if "wkv_a" in layer and not expanded:
        _, values = _of_latents(cfg, layer)
        out = jnp.einsum("thr,rhv->thv", out[..., : values.shape[0]].astype(values.dtype), values)
    if gate is not None:
        out = out * jax.nn.sigmoid(gate.astype(out.dtype))
    out = linear(out.reshape(x.shape[0], -1), layer["wo"]).astype(x.dtype)
    return residual(cfg, layer, "attn", x, out + layer["bo"][None] if "bo" in layer else out)


def head(cfg: ModelConfig, params: Params, x: Float[Array, "T d"]) -> Float[Array, "T V"]:
    """Applies the final norm and the output projection; float32 logits."""
    h = normed(cfg, params, "final_norm", x)
    if cfg.tie_embeddings:
        h = h.astype(params["embed"].dtype)
        logits: Array = matmul_transposed(h, params["embed"], jnp.float32)
    else:
        logits = linear(h, params["lm_head"], jnp.float32)
    if cfg.head_bias:
        logits = logits + params["head_bias"].astype(jnp.float32)[None]
    if cfg.logits_scaling == 1:
        return logits
    return lax.optimization_barrier(logits / cfg.logits_scaling)  # the same bits for all readers


class Halves(NamedTuple):
    """The two halves of a layer, as the run over layers calls them: of one parameter set, or of the
    several ones of a mixed step (`jmoe.mixed`), whose rows lie in segments.
    """

    rotation: Callable[..., Any]  # (cfg, positions) -> as `rotations`
    attend: Callable[..., Any]  # as `attend`
    moe: Callable[..., Any]  # as `jmoe.moe.moe`
    dense: Callable[..., Any]  # as `jmoe.moe.dense_mlp`


def rotations(cfg: ModelConfig, positions: Int[Array, "T"]) -> Rotation | ByKind:
    """Returns cosines and sines of the rows: for all layers, or, where these turn differently, for
    each kind of attention.
    """
    ropes = [cfg.rope_of(kind) for kind in cfg.attention_kinds]
    each = {rope: rotation(positions, rope, cfg.head_dim) for rope in dict.fromkeys(ropes)}
    return each[ropes[0]] if len(each) == 1 else ByKind(tuple(each[rope] for rope in ropes))


ONE_SET = Halves(rotations, attend, moe, dense_mlp)


def run_layers(
    cfg: ModelConfig,
    weights: Weights,
    x: Any,
    cache: Any,
    step: StepData,
    *,
    halves: range | None = None,
    max_active: int,
    wanted: Wanted = COUNTS,
    replication: Replication | None = None,
    of_sets: Halves = ONE_SET,
) -> tuple[Any, Any, LayerStats | None]:
    """Runs layers in order, or a part of them: attention of layer l is half 2 l, its experts 2 l +
    1.

    Whole layers of one kind that follow each other are one scan, or run one after another
    (`unstack`). The cache (KV pages) travels in the scan's carry: as scanned inputs and outputs XLA
    would copy the whole cache. So does the layer's number: of a scanned one every layer would copy
    its four bytes.

    Args:
        cfg: the model's.
        weights: the model's.
        x: rows [T, d] as they enter the first half; `embed` makes them for the whole model. Of
            several parameter sets, whatever `of_sets` takes.
        cache: what `step.attention` reads and writes.
        step: of these rows, the same for every part of their step.
        halves: None is all of them, `range(2 * cfg.num_layers)`.
        max_active: experts a layer that the dispatch has room for; the caller guarantees it.
        wanted: what is not wanted is not computed.
        replication: over a mesh, how each layer copies experts for the next one; None: not at all.
        of_sets: what a layer's halves do.

    Returns rows and cache after the last half, and stats stacked over the MoE layers whose experts
    were among the halves, None without one. Raises ValueError for halves that the model does not
    have, or hidden rows of a part of it.
    """
    part = _checked(cfg, halves, wanted)
    cos_sin = of_sets.rotation(cfg, step.rows.positions)
    weights = _leveled(weights, step)
    run = _Run(cfg, weights, step, cos_sin, max_active, wanted, replication, of_sets)
    state = x, cache, run.no_replicas(), jnp.int32(part.start // 2)
    stats, hidden = [], []
    for first, count, layers, moe_layers in run.segments():
        for span in run.by_kind(_spans(part, first, count), first):
            state, (out, before) = run.span(span, layers, moe_layers, state)
            if moe_layers is not None and span.with_mlp:
                stats.append(out)
            hidden.append(before)
    x, cache, _, _ = state
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *stats) if stats else None
    if wanted.hidden and joined is not None:
        joined = joined._replace(hidden=jnp.concatenate([*hidden, x[None]]))
    return x, cache, joined


def run_between(
    cfg: ModelConfig,
    weights: Weights,
    x: Float[Array, "T d"],
    cache: Any,
    step: StepData,
    first: Int[Array, ""],
    stop: Int[Array, ""],
    *,
    max_active: int,
    replication: Replication | None = None,
) -> tuple[Float[Array, "T d"], Any, LayerStats]:
    """Runs layers `[first, stop)`, both traced: one program runs any part of the model.

    It is a loop whose length the device reads, which is free on a CPU; on a GPU the host would have
    to wait for it. Bits do not depend on where a model is cut, but for copies of experts over a
    mesh, which each part begins without. Weights are stacked. Otherwise as `run_layers`; of layers
    outside the part, stats are 0.
    """
    cos_sin = rotations(cfg, step.rows.positions)
    weights = _leveled(weights, step)
    run = _Run(cfg, weights, step, cos_sin, max_active, COUNTS, replication)
    stats = no_stats(cfg, weights, x.shape[0], cfg.num_moe_layers)
    if replication is not None:
        by_layer = jnp.zeros(cfg.num_moe_layers, jnp.int32)
        stats = stats._replace(balance=Balance(by_layer, by_layer))
    state = x, cache, run.no_replicas(), stats
    for start, count, layers, moe_layers in run.segments():
        for span in run.by_kind([_Span(0, count)], start):
            low, high = (jnp.clip(at - start, span.start, span.stop) for at in (first, stop))
            state = run.loop(low, high, span, layers, moe_layers, start, state)
    x, cache, _, stats = state
    return x, cache, stats


def no_stats(cfg: ModelConfig, weights: Weights, num_rows: int, num_layers: int) -> LayerStats:
    """Returns the stats of so many MoE layers of which none has run, without a balance."""
    slots, offloaded = weights.table.slots, weights.table.offloaded
    return LayerStats(
        jnp.zeros((num_layers, num_rows), jnp.int32),
        jnp.zeros((num_layers, slots.shape[1]), jnp.int32),
        needed=None if offloaded is None else jnp.zeros_like(offloaded[:num_layers]),
        wrong=None if cfg.strategy is None else jnp.zeros(num_layers, jnp.int32),
    )


def _leveled(weights: Weights, step: StepData) -> Weights:
    """Returns weights whose table has the thresholds of this step, where there are levels."""
    if not isinstance(table := weights.table, ExpertTable):  # of a mixed step
        return weights
    percent, strategy = step.control
    return weights._replace(table=table.at_level(strategy, percent))


class _Span(NamedTuple):
    """Layers `[start, stop)` of a segment, of which the same halves run."""

    start: int
    stop: int
    with_attention: bool = True
    with_mlp: bool = True
    kind: int | None = None  # number of its layers' kind of attention; None: all have one
    others: int = 0  # layers of other kinds before it


def _checked(cfg: ModelConfig, halves: range | None, wanted: Wanted) -> range:
    whole = range(2 * cfg.num_layers)
    if halves is None or halves == whole:
        return whole
    if halves.step != 1 or not 0 <= halves.start <= halves.stop <= whole.stop:
        raise ValueError(
            f"halves is {halves}; it must be a range with step 1 of the {whole.stop} half layers"
        )
    if wanted.hidden:
        raise ValueError(f"halves is {halves}; hidden rows are of the whole model")
    return halves


def _spans(part: range, first: int, count: int) -> list[_Span]:
    """Splits a segment's layers that lie in `part`, counted from `first`; half layers are spans of
    their own.
    """
    start, stop = max(part.start, 2 * first), min(part.stop, 2 * (first + count))
    if start >= stop:
        return []
    start, stop = start - 2 * first, stop - 2 * first
    spans = []
    if start % 2:
        spans.append(_Span(start // 2, start // 2 + 1, with_attention=False))
    if (start + 1) // 2 < stop // 2:
        spans.append(_Span((start + 1) // 2, stop // 2))
    if stop % 2:
        spans.append(_Span(stop // 2, stop // 2 + 1, with_mlp=False))
    return spans


@dataclass(frozen=True)
class _Run:
    """What all layers of one run have in common."""

    cfg: ModelConfig
    weights: Weights
    step: StepData
    cos_sin: Any
    max_active: int
    wanted: Wanted
    replication: Replication | None
    of_sets: Halves = ONE_SET

    @property
    def stacked(self) -> bool:
        """Whether a segment's layers are in one array."""
        return not any(isinstance(segment, tuple) for segment in self.weights.params["segments"])

    def no_replicas(self) -> Replicas | None:
        """Returns the replicas that the first MoE layer gets. A scan has to carry arrays, even
        empty ones.
        """
        if self.replication is None or not self.stacked:
            return None
        return Replicas.none(self.weights.pool, self.weights.table, self.replication)

    def segments(self) -> Iterator[tuple[int, int, Any, slice | None]]:
        """Yields each segment's first layer, number of layers and parameters, and which of the MoE
        layers they are; None: they are dense.
        """
        moe_start, all_layers = 0, self.weights.params["segments"]
        for (is_moe, first, count), layers in zip(self.cfg.segments(), all_layers, strict=True):
            yield first, count, layers, slice(moe_start, moe_start + count) if is_moe else None
            moe_start += count * is_moe

    def by_kind(self, spans: list[_Span], first: int) -> list[_Span]:
        """Returns the spans of a segment that begins at layer `first`, cut where the kind of
        attention changes, where the step has several, or they turn differently.
        """
        if not any(isinstance(one, ByKind) for one in (self.step.attention, self.cos_sin)):
            return spans
        return [
            span._replace(start=start - first, stop=stop - first, kind=kind, others=others)
            for span in spans
            for kind, start, stop, others in self.cfg.attention_runs(
                first + span.start, first + span.stop
            )
        ]

    def span(
        self, span: _Span, layers: Any, moe_layers: slice | None, state: Any
    ) -> tuple[Any, Any]:
        """Runs a span of a segment's layers; `moe_layers` are their table rows, None if dense."""

        def body(state: Any, xs: Any) -> Any:
            (x, cache, replicas, index), before = state, state[0] if self.wanted.hidden else None
            *carried, out = self._layer(span, xs, x, cache, replicas, index)
            return (*carried, index + int(span.with_mlp)), (out, before)

        xs = self._with_table(layers, moe_layers)
        if isinstance(layers, tuple):
            return in_turn(body, state, xs, range(span.start, span.stop))
        is_whole = (span.start, span.stop) == (0, len(jax.tree.leaves(layers)[0]))
        if is_whole and backend() != "cpu":
            return lax.scan(body, state, xs)
        # By number: a part of the scanned input would be a copy, and on a CPU every layer of it is.
        return lax.scan(
            lambda state, at: body(state, _layer(xs, at)),
            state,
            jnp.arange(span.start, span.stop, dtype=jnp.int32),
        )

    def loop(
        self,
        low: Array,
        high: Array,
        span: _Span,
        layers: Any,
        moe_layers: slice | None,
        start: int,
        state: Any,
    ) -> Any:
        """Runs layers `[low, high)` of a span of a stacked segment that begins at layer `start`."""
        xs, at_moe = self._with_table(layers, moe_layers), moe_layers.start if moe_layers else 0

        def body(at: Array, state: Any) -> Any:
            x, cache, replicas, stats = state
            *carried, out = self._layer(span, _layer(xs, at), x, cache, replicas, at + start)
            if out is not None:
                stats = jax.tree.map(lambda all_, one: all_.at[at_moe + at].set(one), stats, out)
            return *carried, stats

        return lax.fori_loop(low, high, body, state)

    def _with_table(self, layers: Any, moe_layers: slice | None) -> tuple:
        """Returns a segment's parameters, and its rows of the expert table, None of a dense one;
        each beside those of the next MoE layers, None where they are not asked for. Of layers in
        arrays of their own, all that for each of them.
        """
        tables, next_layers = None, None
        if moe_layers is not None:
            table, next_table = self.weights.table, None
            if self.replication is not None:
                next_layers, next_table = self._next(moe_layers)
            tables = jax.tree.map(itemgetter(moe_layers), table), next_table
        if isinstance(layers, tuple):
            each = zip(layers, next_layers or [None] * len(layers), strict=True)
            return tuple((own, tables and _rows(*tables, at)) for at, own in enumerate(each))
        return (with_wide_router(layers) if tables else layers, next_layers), tables

    def _next(self, moe_layers: slice) -> tuple[Any, ExpertTable]:
        """Returns what guesses the routing of the MoE layers behind these, their routers or probes,
        and their table rows; the last one's next is the first where they are stacked (its copies
        are for nobody), None where they are not.
        """
        table = jax.tree.map(lambda rows: jnp.roll(rows, -1, axis=0), self.weights.table)
        rows = jax.tree.map(itemgetter(moe_layers), table)
        if (probes := self.weights.params.get(LOOKAHEAD)) is not None:
            return self._probes(probes, moe_layers), rows
        found = [
            segment for segment in self.weights.params["segments"] if "router" in _first(segment)
        ]
        if not self.stacked:
            routers = [_router_of(layer) for segment in found for layer in segment]
            return (*routers[1:], None)[moe_layers], rows
        wide = map(_router_of, map(with_wide_router, found))
        joined = jax.tree.map(lambda *parts: jnp.roll(jnp.concatenate(parts), -1, axis=0), *wide)
        return jax.tree.map(itemgetter(moe_layers), joined), rows

    def _probes(self, probes: Probe, moe_layers: slice) -> Any:
        """Returns the probes of these MoE layers; the last one has none, or the first's where they
        are stacked.
        """
        if self.stacked:
            joined = jax.tree.map(lambda part: jnp.concatenate([part, part[:1]]), probes)
            return jax.tree.map(itemgetter(moe_layers), joined)
        count = probes.bias.shape[0]
        each = [jax.tree.map(itemgetter(layer), probes) for layer in range(count)]
        return (*each, None)[moe_layers]

    def _layer(
        self, span: _Span, xs: Any, x: Any, cache: Any, replicas: Any, index: Array
    ) -> tuple:
        """Runs layer `index`, or the half of it that `span` has; returns rows, cache, copies of the
        next MoE layer's experts, and its stats.
        """
        ((layer, next_layer), tables), out = xs, None
        if span.with_attention:
            x, cache = self._attend(span, layer, x, cache, index)
        if span.with_mlp and tables is not None:
            table, next_table = tables
            exchange = self._exchange(table, replicas, next_layer, next_table)
            pool, (rows, _, control) = self.weights.pool, self.step
            given: dict[str, Any] = {"max_active": self.max_active, "wanted": self.wanted}
            x, out, replicas = self.of_sets.moe(
                self.cfg, layer, pool, table, x, rows, control, exchange, **given
            )
        elif span.with_mlp:
            x = self.of_sets.dense(self.cfg, layer, x)
        return x, cache, replicas, out

    def _attend(self, span: _Span, layer: Any, x: Any, cache: Any, index: Array) -> tuple:
        """Runs a layer's attention with the rotation, the data and the cache of its kind."""
        run, attention, turn = self.of_sets.attend, self.step.attention, self.cos_sin
        if (kind := span.kind) is None:
            return run(self.cfg, layer, x, turn, attention, index, cache)
        turn = turn.each[kind] if isinstance(turn, ByKind) else turn
        if not isinstance(attention, ByKind):
            return run(self.cfg, layer, x, turn, attention, index, cache)
        each = [None] * len(attention.each) if cache is None else [*cache.each]
        own, index = attention.each[kind], index - span.others
        x, each[kind] = run(self.cfg, layer, x, turn, own, index, each[kind])
        return x, None if cache is None else ByKind(tuple(each))

    def _exchange(
        self, table: Any, replicas: Any, next_layer: Any, next_table: ExpertTable | None
    ) -> Exchange:
        """Returns how a layer's rows meet their experts."""
        if table.hosts is None:
            return alone
        if self.replication is None:
            return over_mesh
        return Copying(self.replication, replicas, next_layer, next_table)


def _rows(table: Any, next_table: ExpertTable | None, layer: int) -> tuple:
    """Returns a layer's row of each table, without slicing it out where kernels can take it in
    place.
    """
    row, ahead = jax.tree.map(itemgetter(layer), (table, next_table))
    return row if table.hosts is not None else uncut(row, table, layer), ahead


def _first(segment: Any) -> Params:
    """Returns one layer's parameters, or all of them stacked."""
    return segment[0] if isinstance(segment, tuple) else segment


def _router_of(layer: Params) -> Params:
    """Returns what `jmoe.moe.router` and `gate` read."""
    names = "mlp_norm", "mlp_norm_bias", "router", "router_bias", "logits_bias"
    return {name: layer[name] for name in names if name in layer}


_MULTIPLIED = words("wqkv wo w_in wq_a wq wkv_a router shared_gate_up shared_down gate_up down")
"""Weights that `pallas_kernels.matmul.linear` alone reads."""


def _layer(xs: Any, at: Array) -> Any:
    """Returns one layer of stacked arrays."""

    def one(path: Sequence[Any], leaf: Array) -> Any:
        if getattr(path[-1], "key", None) in _MULTIPLIED:
            return LayerOf(leaf, at)
        return lax.dynamic_index_in_dim(leaf, at, 0, keepdims=False)

    return jax.tree_util.tree_map_with_path(one, xs)


def layers_of(cfg: ModelConfig, params: Params) -> list[tuple[Params, bool]]:
    """Returns (parameters, whether it has experts) of each layer in order."""
    found = []
    for (is_moe, _, count), segment in zip(cfg.segments(), params["segments"], strict=True):
        for i in range(count):
            taken = isinstance(segment, tuple)
            found.append((segment[i] if taken else jax.tree.map(itemgetter(i), segment), is_moe))
    return found


def unstack(params: Params) -> Params:
    """Returns the same weights, each layer's in arrays of its own: what `run_layers` does not scan
    over.

    A step over them is one CUDA graph. XLA puts no product into a graph whose weights it has to
    slice out of a stack, so that a scan's body is launched kernel by kernel, with copies of the
    small weights on streams of their own.

    Both kinds of arrays are there until the caller drops `params`.
    """
    segments = []
    for segment in params["segments"]:
        if "router" in segment:
            segment = with_wide_router(segment)
        if "wkv_b" in segment:
            segment = with_split_latents(segment)
        count = len(jax.tree.leaves(segment)[0])
        segments.append(tuple(jax.tree.map(itemgetter(i), segment) for i in range(count)))
    return {**params, "segments": segments}


def in_turn(body: Callable, state: Any, xs: Sequence[Any], layers: range) -> Any:
    """Runs layers as `lax.scan` does, but unrolled in the program; `xs` are each layer's."""
    one = jax.jit(body)  # traced and lowered once, not once a layer
    outs = []
    for index in layers:
        state, out = one(state, xs[index])
        outs.append(out)
    return state, jax.tree.map(lambda *parts: jnp.stack(parts), *outs)


def with_split_latents(layers: Params) -> Params:
    """Returns the same weights of one layer or several, with those that make keys of latents apart
    from those that make values.

    In a checkpoint each head's columns of both follow each other. cuBLAS would take one of the two
    in place, but XLA hands it whole arrays only, and would copy both in every step.
    """
    others = dict(layers)
    joined = others.pop("wkv_b")
    rank, columns = joined.shape[-2:]
    of_values = others["wo"].shape[-2]
    turned = others["wq"].shape[-1] - (columns - of_values)  # of queries
    heads = turned // (others["wkv_a"].shape[-1] - rank)
    by_head = joined.reshape(*joined.shape[:-1], heads, columns // heads)
    keys, values = jnp.split(by_head, [(columns - of_values) // heads], axis=-1)
    keys, values = (one.reshape(*joined.shape[:-1], -1) for one in (keys, values))
    return others | {"wk_b": keys, "wv_b": values}


def with_wide_router(segment: Any) -> Any:
    """Returns the same layers, their router's columns a multiple of eight: `routing.route` drops
    the rest.

    cuBLAS takes no other number of columns. XLA would pad the weights and cut the logits, to the
    same bits, in every layer of every step; so they are padded once a step, or once in `unstack`.
    """
    if isinstance(segment, list):  # of several parameter sets
        return list(map(with_wide_router, segment))
    router = segment["router"]
    missing = -router.shape[-1] % 8
    if not missing or backend() == "cpu":
        return segment
    wide = {"router": jnp.pad(router, ((0, 0), (0, 0), (0, missing)))}
    if "logits_bias" in segment:
        wide["logits_bias"] = jnp.pad(segment["logits_bias"], ((0, 0), (0, missing)))
    return segment | wide
