"""What workers launch: the programs of one device, and the rows that it keeps.

A worker (`attention.py`, `experts.py`) is host code, without jax. Its device is one of these, or a
substitute that a test can reckon by hand.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jmoe import shaping
from jmoe.api import Model
from jmoe.config import ModelConfig
from jmoe.experts import Pool, UnitedExperts, write_slots
from jmoe.model import embed, head, layers_of
from jmoe.packed_rows import SLOT, everything, sampling_mode
from jmoe.sampling import Scored, greedy, score_prompts
from jmoe.shaping import Drawn, Shaping
from jmoe.stages import (
    StageVisits,
    WaitingRows,
    attend_stage,
    expert_stage,
    merge,
    merge_params,
    waiting,
)
from jmoe.steps import (
    State,
    decode_data,
    draw_step,
    make_state,
    prefill_data,
    remember,
    sample_step,
    with_deltas,
)
from jmoe.weights import Params
from pallas_kernels.activation import Activation
from serving.pipeline.queues import bucket, buckets, padded
from serving.plan import StepControl


@dataclass(frozen=True)
class Sizes:
    """Sizes of each attention worker."""

    num_slots: int
    num_pages: int | tuple[int, ...]  # of each group of layers, or of all alike
    page_size: int
    max_blocks: int  # pages that a sequence may begin with, others having filled them
    num_rows: int  # on their way at a time, of all its units
    decode_buckets: tuple[int, ...]  # rows of a stage, ascending; fewer are padded to one of them
    prefill_buckets: tuple[int, ...]
    """Tokens of a stage, likewise; a chunk longer than the last is refused."""
    num_groups: int = 1  # of layers, each with pages of its own

    @property
    def max_len(self) -> int:
        """Positions that a sequence's pages hold."""
        return self.max_blocks * self.page_size

    def max_visits(self, picks: int) -> int:
        """Returns the visits of an expert stage: those of the largest stage of attention."""
        return picks * max(*self.decode_buckets, *self.prefill_buckets)

    @property
    def row_sizes(self) -> list[int]:
        """Rows that come to an expert worker at a time, padded, ascending."""
        return buckets(max(*self.decode_buckets, *self.prefill_buckets))


class UnitedPart(NamedTuple):
    """A device's united experts of one MoE layer and way, in host memory."""

    slots: Int[np.ndarray, "n"]  # of the device's pool
    experts: Pool


class Store(NamedTuple):
    """Rows between two layers."""

    rows: WaitingRows
    parts: Float[Array, "R K d"]

    def merged(
        self, cfg: ModelConfig, before: Params, places: Int[Array, "T"]
    ) -> Float[Array, "T d"]:
        """Returns the rows at `places` after the experts of the layer `before`; those of a place
        past the last are padding.
        """
        at = jnp.minimum(places, len(self.parts) - 1)
        return merge(cfg, before, *jax.tree.map(itemgetter(at), self))


def _attend(
    cfg: ModelConfig,
    before: Params,
    layer: Params,
    groups: Int[Array, "m"] | None,
    reachable: Bool[Array, "E"] | None,
    embedding: Params | None,
    store: Store,
    state: State,
    tokens: Int[Array, "T"] | None,
    rows: Int[Array, "B C"],
    deltas: Int[Array, "N 3"],
    control: Int[Array, "controls"],
    places: Int[Array, "T"],
    index: Int[Array, ""],
    kind: int | None,
) -> tuple[Store, State, StageVisits | None]:
    """Runs an attention stage; `embedding` is given to the first layer alone, and `before` has of
    the others what `merge` reads of the layer before.
    """
    state = with_deltas(state, deltas)
    if tokens is None:
        slot, step = decode_data(cfg, state, rows, control)
        given = state.last_token[slot]
    else:
        _, _, step = prefill_data(cfg, state, len(tokens), rows, control)
        given = tokens
    is_first = embedding is not None
    x = embed(cfg, embedding, given) if is_first else store.merged(cfg, before, places)
    left, visits, pages = attend_stage(
        cfg, layer, groups, index, x, state.pages, step, reachable, kind
    )
    rows = jax.tree.map(lambda kept, own: kept.at[places].set(own, mode="drop"), store.rows, left)
    return store._replace(rows=rows), state._replace(pages=pages), visits


def _leave(
    cfg: ModelConfig,
    before: Params,
    params: Params,
    store: Store,
    last_token: Int[Array, "S"],
    rows: Int[Array, "B C"],
    places: Int[Array, "B"],
) -> tuple[Int[Array, "S"], Int[Array, "B"], Float[Array, "B"], Float[Array, "B V"]]:
    logits = head(cfg, params, store.merged(cfg, before, places))
    tokens, logprobs = greedy(logits)
    return remember(last_token, rows[:, SLOT], tokens), tokens, logprobs, logits


def _score(
    cfg: ModelConfig,
    before: Params,
    params: Params,
    store: Store,
    places: Int[Array, "T"],
    following: Int[Array, "T"],
    top: Bool[Array, ""],
) -> Scored:
    x = store.merged(cfg, before, places)
    return score_prompts(head(cfg, params, x), following, top)


class _Programs(NamedTuple):
    attend: Callable[..., tuple[Store, State, StageVisits | None]]
    leave: Callable[..., tuple[Array, Array, Array, Array]]
    score: Callable[..., Scored]
    sample: Callable[..., tuple[Array, Array, Array]]
    draw: Callable[..., tuple[Array, Shaping, Drawn]]
    seat: Callable[..., Shaping]


@cache
def _programs_of(cfg: ModelConfig) -> _Programs:
    """Returns programs for all workers, compiled at their first call with arrays of new shapes."""
    return _Programs(
        jax.jit(partial(_attend, cfg), static_argnames="kind", donate_argnums=(5, 6)),
        jax.jit(partial(_leave, cfg), donate_argnums=3),
        jax.jit(partial(_score, cfg)),
        jax.jit(sample_step, static_argnames="truncate", donate_argnums=0),
        jax.jit(partial(draw_step, truncate=None), donate_argnums=(0, 1)),
        jax.jit(shaping.seat, donate_argnums=0),
    )


@partial(jax.jit, donate_argnums=0)
def _keep_parts(
    store: Store, parts: Float[Array, "n d"], places: Int[Array, "n"], picks: Int[Array, "n"]
) -> Store:
    return store._replace(parts=store.parts.at[places, picks].set(parts, mode="drop"))


@partial(jax.jit, donate_argnums=0)
def _keep_rows(
    store: Float[Array, "R d"], h: Float[Array, "n d"], rows: Int[Array, "n"]
) -> Float[Array, "R d"]:
    return store.at[rows].set(h, mode="drop")


def _padded(
    rows: Shaped[np.ndarray, "n d"], *numbers: Int[np.ndarray, "n"]
) -> tuple[Shaped[np.ndarray, "m d"], ...]:
    """Returns rows and what belongs to each, padded to one of few sizes; padding belongs
    nowhere.
    """
    size, beyond = bucket(len(rows)), np.iinfo(np.int32).max
    found = np.pad(rows, ((0, size - len(rows)), (0, 0)))
    return found, *(padded(each, size, beyond) for each in numbers)


class AttentionDevice:
    """A jax device and a model's weights, but for its experts: pages, slots, and rows between two
    layers. Padding has a place past the last row.
    """

    def __init__(self, model: Model, ways: Sequence[int], sizes: Sizes, device: Any) -> None:
        """Copies the weights to `device`, beside an empty state; `ways` are those that may be used,
        so that the model can go.
        """
        cfg, params = model.config, model.params
        state = make_state(
            cfg,
            num_slots=sizes.num_slots,
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            max_blocks=sizes.max_blocks,
            dtype=model.dtype,
        )
        self._device = device
        self._params, self._state = jax.device_put((params, state), device)
        self._programs = _programs_of(cfg)
        self._layers, kinds = [], cfg.attention_kinds
        for at, (layer, _) in enumerate(layers_of(cfg, self._params)):
            own = cfg.layer_attention[at]
            index = jax.device_put(jnp.int32(cfg.layer_attention[:at].count(own)), device)
            self._layers.append((layer, index, kinds.index(own) if len(kinds) > 1 else None))
        self._before = [{}, *(merge_params(layer) for layer, _, _ in self._layers)]
        self._is_moe = cfg.moe_layers
        self._groups_of = {way: model.united_of(way).groups for way in ways}
        self._groups = self._of_layers(np.asarray(model.table.groups, np.int32))
        self._reachable: list[Array | None] = []
        self.reach(np.ones(model.table.slots.shape, bool))
        num_rows, picks, kind = sizes.num_rows, cfg.experts_per_token, params["embed"].dtype
        empty = Store(
            waiting(cfg, jnp.zeros((num_rows, cfg.d_model), kind)),
            jnp.zeros((num_rows, picks, cfg.d_model), kind),
        )
        self._store = jax.device_put(empty, device)
        self._vocab_size = cfg.vocab_size
        seats = shaping.make_shaping(state.last_token.shape[0], cfg.vocab_size)
        self._shaping = jax.device_put(seats, device)

    def attend(
        self,
        layer: int,
        tokens: Int[np.ndarray, "T"] | None,
        rows: Int[np.ndarray, "B C"],
        deltas: Int[np.ndarray, "N 3"],
        control: StepControl,
        places: Int[np.ndarray, "T"],
    ) -> StageVisits | None:
        """Launches one layer's stage for the rows at `places`; returns what `read` takes, None of a
        dense layer. `tokens` are of chunks of prompts; without them a row decodes the newest token
        of its slot.
        """
        params, index, kind = self._layers[layer]
        self._store, self._state, visits = self._programs.attend(
            self._before[layer],
            params,
            self._groups[layer],
            self._reachable[layer],
            None if layer else {"embed": self._params["embed"]},
            self._store,
            self._state,
            tokens,
            rows,
            deltas,
            np.array(control[:2], np.int32),
            places,
            index,
            kind=kind,
        )
        return started(visits)

    def read(self, attended: StageVisits) -> tuple[np.ndarray, ...]:
        """Waits for a stage and returns what it found, in the host's memory."""
        return jax.device_get(tuple(attended))

    def reach(self, reachable: Bool[np.ndarray, "layers E"]) -> None:
        """Sets which logical experts of each MoE layer some worker has, from now on."""
        self._reachable = self._of_layers(reachable)

    def use_way(self, way: int) -> None:
        """Sends visits to the united experts of `way` from now on."""
        self._groups = self._of_layers(np.asarray(self._groups_of[way], np.int32))

    def _of_layers(self, table: Shaped[np.ndarray, "layers columns"]) -> list[Array | None]:
        """Copies the rows of MoE layers to the device, and returns them by layer."""
        rows = iter(jax.device_put(list(table), self._device))
        return [next(rows) if is_moe else None for is_moe in self._is_moe]

    def blank(self, count: int) -> Shaped[np.ndarray, "n d"]:
        """Returns so many parts without content."""
        return np.zeros((count, self._store.parts.shape[2]), self._store.parts.dtype)

    def keep(
        self,
        parts: Shaped[np.ndarray, "n d"],
        places: Int[np.ndarray, "n"],
        picks: Int[np.ndarray, "n"],
    ) -> None:
        """Stores parts of visits that came."""
        self._store = _keep_parts(self._store, *_padded(parts, places, picks))

    def leave(
        self, rows: Int[np.ndarray, "B C"], places: Int[np.ndarray, "B"]
    ) -> tuple[Sequence[int], Sequence[float]]:
        """Returns tokens and log-probabilities of rows that have been through all layers."""
        last, tokens, logprobs, logits = self._programs.leave(
            self._before[-1], self._params, self._store, self._state.last_token, rows, places
        )
        if (mode := sampling_mode(rows)) != "greedy":
            truncate = mode == "truncate"
            last, tokens, logprobs = self._programs.sample(last, logits, rows, truncate=truncate)
        self._state = self._state._replace(last_token=last)
        found: Any = jax.device_get((tokens, logprobs))
        return found[0].tolist(), found[1].tolist()

    def seat(self, told: Int[np.ndarray, "n"]) -> None:
        """Fills a slot for a sequence whose logits are changed (`jmoe.packed_rows.pack_seat`)."""
        self._shaping = self._programs.seat(self._shaping, told[None])

    def draw(
        self,
        rows: Int[np.ndarray, "B C"],
        places: Int[np.ndarray, "B"],
        shapes: Int[np.ndarray, "B shape"],
        allowed: Sequence[Int[np.ndarray, "W"] | None],
    ) -> Drawn:
        """Draws as `leave` does, with the logits of some rows changed (`jmoe.shaping.draw`).
        Returns what is drawn on the host.
        """
        masks = everything(len(rows), self._vocab_size)
        for mask, given in zip(masks, allowed, strict=False):
            if given is not None:
                mask[:] = given
        last, *_, logits = self._programs.leave(
            self._before[-1], self._params, self._store, self._state.last_token, rows, places
        )
        last, self._shaping, drawn = self._programs.draw(
            last, self._shaping, logits, rows, shapes, masks
        )
        self._state = self._state._replace(last_token=last)
        return jax.device_get(drawn)

    def score(
        self, places: Int[np.ndarray, "T"], following: Int[np.ndarray, "T"], top: bool
    ) -> Scored:
        """Returns, on the host, the log-probability of the token that follows each row that has
        been through all layers, and with `top` the likeliest tokens.
        """
        found = self._programs.score(
            self._before[-1], self._params, self._store, places, following, jnp.asarray(top)
        )
        return jax.device_get(found)


@partial(jax.jit, static_argnames=("max_active", "activation"))
def _compute(
    pool: Pool,
    store: Float[Array, "R d"],
    slots: Int[Array, "E"],
    rows: Int[Array, "V"],
    expert_ids: Int[Array, "V"],
    *,
    max_active: int,
    activation: Activation,
) -> Float[Array, "V d"]:
    given: dict[str, Any] = {"max_active": max_active, "activation": activation}
    return expert_stage(pool, store[rows], expert_ids, slots, **given)


class ExpertDevice:
    """A jax device and its part of a model's experts, and the newest rows by number."""

    def __init__(
        self,
        model: Model,
        ways: Sequence[int],
        hosted: Bool[np.ndarray, "layers E"],
        num_rows: int,
        device: Any,
    ) -> None:
        """Copies the logical experts that are `hosted` here to `device`, and their united experts
        of all `ways` within host memory, so that the model can go; those of the first way are
        loaded. `num_rows` are all attention workers'.
        """
        cfg = model.config
        slots = np.asarray(model.table.slots)
        local = np.full(slots.shape, -1, np.int32)
        local[hosted] = np.arange(int(hosted.sum()))
        self._pool = jax.device_put(model.pool.read(jnp.asarray(slots[hosted])), device)

        def part(united: UnitedExperts, layer: int) -> UnitedPart:
            experts = united.layer(layer)
            own = local[layer, cfg.num_experts :][: experts.num_slots]
            here = np.flatnonzero(own >= 0)
            return UnitedPart(own[here], experts.read(here))

        self._united = {
            way: [part(model.united_of(way), layer) for layer in range(len(slots))] for way in ways
        }
        self._activation = cfg.activation
        self.ways = tuple(ways)
        self._way = self.ways[0] if self.ways else 0
        self._slots = [jax.device_put(jnp.asarray(own), device) for own in local]
        self._max_active = max(1, int(hosted.sum(axis=1).max()))
        self._store = jax.device_put(jnp.zeros((num_rows, cfg.d_model), self._pool.dtype), device)

    def blank(self, count: int) -> Shaped[np.ndarray, "n d"]:
        """Returns so many rows without content."""
        return np.zeros((count, self._store.shape[1]), self._store.dtype)

    def keep(self, h: Shaped[np.ndarray, "n d"], rows: Int[np.ndarray, "n"]) -> None:
        """Stores rows that came, by their numbers."""
        self._store = _keep_rows(self._store, *_padded(h, rows))

    def use_way(self, way: int) -> None:
        """Loads the united experts of `way` that are on this device, unless they are loaded."""
        if way != self._way:
            for layer in self._united[way]:
                self._pool = write_slots(self._pool, *layer)
        self._way = way

    def compute(
        self, layer: int, rows: Int[np.ndarray, "V"], expert_ids: Int[np.ndarray, "V"]
    ) -> Array:
        """Launches the computation of parts [V, d] of visits to experts of one MoE layer; id -1:
        padding.
        """
        slots, most = self._slots[layer], self._max_active
        given: dict[str, Any] = {"max_active": most, "activation": self._activation}
        return started(_compute(self._pool, self._store, slots, rows, expert_ids, **given))

    def read(self, parts: Array) -> Shaped[np.ndarray, "V d"]:
        """Waits for parts and returns them, on the host."""
        return jax.device_get(parts)


def started[T](arrays: T) -> T:
    """Starts the copy of arrays to the host, which follows what makes them, and returns them."""
    for array in jax.tree.leaves(arrays):
        array.copy_to_host_async()
    return arrays
