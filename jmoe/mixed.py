"""One decode step for rows of several models of a family (Multi-MoE).

The models' rows lie in segments of one size, padded. What is a model's own (embeddings, norms,
attention, router, shared expert, head) runs segment by segment, as in a step of that model alone.
Routed experts run once, for the rows of all segments: an expert that two models share is read once.

Letters: N models, B rows of each, d model width, m routed experts of a model, U united ones. The
experts of a step are columns: expert e of the step's model i is column `i m + e`, or that of the
first model of the step whose expert e lies in the same slot. United experts follow them, model by
model, and a column's is that of the model whose column it is.
"""

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jmoe.attention import ByKind, DecodeAttention
from jmoe.brownout import Control
from jmoe.config import ModelConfig
from jmoe.experts import ABSENT, ExpertTable, Pool
from jmoe.model import (
    Halves,
    attend,
    attended,
    embed,
    head,
    project,
    rotations,
    run_layers,
)
from jmoe.moe import (
    COUNTS,
    Asked,
    Exchange,
    LayerStats,
    RoutedRows,
    Wanted,
    alone,
    dense_mlp,
    normed,
    router,
    with_residual,
)
from jmoe.packed_rows import SLOT
from jmoe.recurrent import SlotRows
from jmoe.rope import Rotation
from jmoe.sampling import greedy
from jmoe.steps import State, StepOutput, decode_data, remember, with_deltas
from jmoe.weights import Params, Weights

Segments = tuple[Float[Array, "B d"], ...]
"""Rows of each of the step's models."""


class MixedWeights(NamedTuple):
    """Weights of the models of one step, in the order of their segments. A pytree."""

    pool: Pool
    params: tuple[Params, ...]
    tables: tuple[ExpertTable, ...]

    @classmethod
    def of(cls, models: Sequence[Weights]) -> "MixedWeights":
        """Joins the weights of models over one pool."""
        return cls(
            models[0].pool,
            tuple(weights.params for weights in models),
            tuple(weights.table for weights in models),
        )

    def joined(self) -> Weights:
        """Returns them as one value over whose layers `run_layers` goes: of each layer, a list of
        the models' parameters, and a row of the `JoinedTable`.
        """
        segments = []
        for layers in zip(*(params["segments"] for params in self.params), strict=True):
            unstacked = isinstance(layers[0], tuple)
            segments.append(
                tuple(map(list, zip(*layers, strict=True))) if unstacked else list(layers)
            )
        table: Any = JoinedTable.of(self.tables)
        return Weights({"segments": segments}, self.pool, table)


class JoinedTable(NamedTuple):
    """The experts of several models as columns of one table; a row for each MoE layer."""

    slots: Int[Array, "layers E"]  # pool slot of a column; E = N m + N U
    groups: Int[Array, "layers columns"]  # united expert of each of the N m columns; -1: none
    owner: Int[Array, "layers N m"]  # model of the step in whose columns a model's expert is
    offloaded: Int[Array, "layers columns"] | None = None  # as in ExpertTable, of each column
    hosts: Bool[Array, "layers E D"] | None = None  # likewise

    @classmethod
    def of(cls, tables: Sequence[ExpertTable]) -> "JoinedTable":
        """Joins tables; experts are shared at one position, so only experts of one number are
        compared, and united ones are lent together. Over a mesh every device finds the same, since
        what it does not have is numbered in the place of a slot (`jmoe.parallel.home.Home.table`).
        """
        num_experts = tables[0].groups.shape[1]
        num_united = tables[0].slots.shape[1] - num_experts
        own = jnp.stack([table.slots[:, :num_experts] for table in tables], axis=1)
        same = own[:, :, None, :] == own[:, None, :, :]  # [layers, of a model, another's, m]
        away = [table.offloaded for table in tables if table.offloaded is not None]
        if away:  # whoever is served by a substitute is so alone
            absent = jnp.stack(away, axis=1)[:, :, None, :] == ABSENT
            same &= ~absent | jnp.eye(len(tables), dtype=bool)[None, :, :, None]
        united = [table.slots[:, num_experts:] for table in tables]
        lent = jnp.stack(united, axis=1)
        lent = jnp.all(lent[:, :, None] == lent[:, None], axis=-1)  # [layers, to a model, by one]
        lender = jnp.argmax(lent, axis=2).astype(jnp.int32)
        hosts = [table.hosts for table in tables if table.hosts is not None]
        parts = (slice(num_experts), slice(num_experts, None))
        groups = [
            jnp.where(table.groups < 0, -1, table.groups + num_united * lender[:, number, None])
            for number, table in enumerate(tables)
        ]
        return cls(
            jnp.concatenate([own.reshape(own.shape[0], -1), *united], axis=1),
            jnp.concatenate(groups, axis=1),
            jnp.argmax(same, axis=2).astype(jnp.int32),  # the first
            jnp.concatenate(away, axis=1) if away else None,
            jnp.concatenate([own[:, at] for at in parts for own in hosts], axis=1)
            if hosts
            else None,
        )


def wide_logits(
    logits: Sequence[Float[Array, "B m"]], owner: Int[Array, "N m"]
) -> Float[Array, "T columns"]:
    """Returns logits of all rows over the step's columns, -inf where a row's model has no expert.

    Gating these picks what gating a segment by itself does: -inf adds nothing to a softmax. Where
    logits are equal to the last bit, another of their experts may be picked.
    """
    count = len(logits)
    rows = [
        jnp.concatenate(
            [
                jnp.where((owner[number] == column)[None, :], own, -jnp.inf)
                for column in range(count)
            ],
            axis=1,
        )
        for number, own in enumerate(logits)
    ]
    return jnp.concatenate(rows)


def mixed_rotations(
    cfg: ModelConfig, positions: Int[Array, "N"], count: int
) -> list[Rotation] | ByKind:
    """Returns `jmoe.model.rotations` of each of `count` segments' rows; by kind, those of all."""
    each: list[Any] = [rotations(cfg, own) for own in jnp.split(positions, count)]
    if not isinstance(each[0], ByKind):
        return each
    return ByKind(tuple(map(list, zip(*(own.each for own in each), strict=True))))


def mixed_attend(
    cfg: ModelConfig,
    layers: Sequence[Params],
    xs: Segments,
    turns: Sequence[Rotation],
    attention: DecodeAttention | SlotRows,
    index: Int[Array, ""],
    cache: Any,
) -> tuple[Segments, Any]:
    """Runs attention of layer `index` for all segments, with its residual; returns the cache
    afterwards, too.

    `attention` is of all rows. All write before any reads: between two writes to the cache a read
    would have XLA copy it.
    """
    queries, gates, sinks, size = [], [], [], xs[0].shape[0]
    if isinstance(attention, SlotRows):  # reads only what its own rows write
        outs = []
        for number, (layer, x, turn) in enumerate(zip(layers, xs, turns, strict=True)):
            own = attention.part(slice(number * size, (number + 1) * size))
            x, cache = attend(cfg, layer, x, turn, own, index, cache)
            outs.append(x)
        return tuple(outs), cache
    for number, (layer, x, turn) in enumerate(zip(layers, xs, turns, strict=True)):
        rows = slice(number * size, (number + 1) * size)
        written = jax.tree.map(itemgetter(rows), attention.written)
        h = normed(cfg, layer, "attn_norm", x)
        projection, gate = project(cfg, layer, h, turn)
        gates.append(gate)
        q, cache = attention._replace(written=written).write(projection, index, cache)
        queries.append(q)
        if (own := projection.sinks) is not None:
            sinks.append(jnp.broadcast_to(own, (size, *own.shape)))
    of_rows = jnp.concatenate(sinks) if sinks else None
    out = attention.read(jnp.concatenate(queries), index, cache, of_rows)
    outs = jnp.split(out, len(xs))
    return tuple(map(attended, [cfg] * len(xs), layers, xs, outs, gates)), cache


def mixed_moe(
    cfg: ModelConfig,
    layers: Sequence[Params],
    pool: Pool,
    table: JoinedTable,
    xs: Segments,
    rows: RoutedRows,
    control: Control,
    exchange: Exchange = alone,
    *,
    max_active: int,
    wanted: Wanted = COUNTS,
) -> tuple[Segments, LayerStats, None]:
    """Runs the MLP half of one layer for all segments, as `jmoe.moe.moe` does for one; `table` is
    this layer's row, `rows` are all. Stats are by column; picks are not to be wanted.

    The brownout plan is one for all rows, over the experts of the step.
    """
    num_experts = table.owner.shape[1]
    hs, logits = zip(*map(router, [cfg] * len(xs), layers, xs), strict=True)
    wide = wide_logits([own[:, :num_experts] for own in logits], table.owner)
    asked = Asked({}, jnp.concatenate(xs), jnp.concatenate(hs), wide, rows, control)
    row = ExpertTable(table.slots, table.groups, table.hosts, table.offloaded)
    out, _, stats, _ = exchange(cfg, pool, row, asked, max_active)
    outs = jnp.split(out, len(xs))
    joined = [with_residual(cfg, *of_model) for of_model in zip(layers, xs, hs, outs, strict=True)]
    return tuple(joined), stats, None


def mixed_dense(cfg: ModelConfig, layers: Sequence[Params], xs: Segments) -> Segments:
    """Runs `jmoe.moe.dense_mlp` for each segment."""
    return tuple(dense_mlp(cfg, layer, x) for layer, x in zip(layers, xs, strict=True))


def mixed_decode_step(
    cfg: ModelConfig,
    weights: MixedWeights,
    state: State,
    rows: Int[Array, "T C"],
    deltas: Int[Array, "D 3"],
    control: Int[Array, "controls"],
    *,
    max_active: int,
) -> tuple[State, StepOutput]:
    """Runs `jmoe.steps.decode_step` for rows of N models: rows `[i B, (i + 1) B)` are of the i-th.

    It runs whole: what `control` says of layers is not read. `max_active` counts the step's
    columns. In the output `expert_rows` are by column, the united ones last, and so is `needed`.
    """
    count = len(weights.params)
    state = with_deltas(state, deltas)
    slot, step = decode_data(cfg, state, rows, control)
    tokens = jnp.split(state.last_token[slot], count)
    xs = tuple(map(embed, [cfg] * count, weights.params, tokens))
    halves = Halves(partial(mixed_rotations, count=count), mixed_attend, mixed_moe, mixed_dense)
    xs, pages, stats = run_layers(
        cfg, weights.joined(), xs, state.pages, step, max_active=max_active, of_sets=halves
    )
    logits = jnp.concatenate(
        [head(cfg, params, x) for params, x in zip(weights.params, xs, strict=True)]
    )
    tokens, logprobs = greedy(logits)
    assert stats is not None  # every model has an MoE layer
    degraded = jnp.sum(stats.degraded, axis=0, dtype=jnp.int32)
    state = state._replace(
        pages=pages, last_token=remember(state.last_token, rows[:, SLOT], tokens)
    )
    own = {"logits": logits, "needed": stats.needed}
    return state, StepOutput(tokens, logprobs, degraded, stats.expert_rows, **own)


def by_model(
    columns: Int[np.ndarray, "layers E"], count: int, num_experts: int
) -> Int[np.ndarray, "N layers logical"]:
    """Returns what is by column of a step of `count` models by the logical experts of each: of an
    expert that several share, all is the first one's.
    """
    parts = columns[:, : count * num_experts], columns[:, count * num_experts :]
    each = [part.reshape(len(part), count, part.shape[1] // count) for part in parts]
    return np.concatenate(each, axis=2).swapaxes(0, 1)
