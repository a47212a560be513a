"""A worker with attention: pages and slots of its sequences, embeddings and the head.

Rows of one sequence go through the layers together, a `Unit`: one row that decodes, or a chunk of a
prompt. Between two layers a unit waits until every visit of its rows has come back (the token pool
of AMoE, section 3.3, is the unit's own count of what is missing).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jmoe.config import ModelConfig
from jmoe.model import embed, head, layers_of
from jmoe.packed_rows import SLOT, empty_deltas, empty_rows, sampling_mode
from jmoe.sampling import greedy
from jmoe.stages import Visits, Waiting, attend_stage, merge
from jmoe.steps import State, decode_data, prefill_data, remember, sample_step, with_deltas
from jmoe.weights import Params
from serving.execution.aep.messages import FromExperts, RowNumbers, ToExperts, moved
from serving.execution.aep.queues import Entry, MicroQueues, Picker, bucket
from serving.plan import StepControl

MOST_CHUNKS = 8
"""In one stage."""
DECODE, PREFILL = range(2)
"""Groups of a layer's queue: they are different programs."""


class Store(NamedTuple):
    """Rows between two layers, on the device."""

    x: Float[Array, "R d"]
    weights: Float[Array, "R K"]
    parts: Float[Array, "R K d"]


@dataclass(eq=False)
class Unit:
    """Rows of one sequence on their way through the layers."""

    row: Int[np.ndarray, "C"]  # packed
    tokens: Int[np.ndarray, "n"] | None  # of a chunk; None: the newest token of its slot
    places: Int[np.ndarray, "n"]  # of its rows in the worker's store
    deltas: Int[np.ndarray, "D 3"]  # of the block table
    urgent: bool = False
    ends_prompt: bool = True  # or decodes: a token comes of its last row
    missing: int = 0  # visits of its rows that have not come back
    degraded: int = 0

    @property
    def group(self) -> int:
        """Of its layers' queues."""
        return DECODE if self.tokens is None else PREFILL


class Result(NamedTuple):
    """What came of a unit."""

    unit: Unit
    token: int | None  # None where its last row ends no prompt
    logprob: float | None


def _attend(
    cfg: ModelConfig,
    layer: Params,
    groups: Int[Array, "m"] | None,
    embedding: Params | None,
    store: Store,
    state: State,
    tokens: Int[Array, "T"] | None,
    rows: Int[Array, "B C"],
    deltas: Int[Array, "N 3"],
    control: Int[Array, "controls"],
    places: Int[Array, "T"],
    index: Int[Array, ""],
) -> tuple[Store, State, Visits | None]:
    """One stage of units of one kind. `embedding` is given to the first layer alone, `tokens` to
    chunks of prompts. Padding has a place past the store.
    """
    state = with_deltas(state, deltas)
    if tokens is None:
        slot, step = decode_data(state, rows, control)
    else:
        slot, (_, _, step) = None, prefill_data(cfg, state, len(tokens), rows, control)
    if embedding is not None:
        given = state.last_token[slot] if tokens is None else tokens
        x = embed(embedding, given)
        nothing = jnp.zeros((len(x), store.weights.shape[1]), jnp.float32)
        waiting, parts = Waiting(x, nothing), jnp.zeros((*nothing.shape, x.shape[1]), x.dtype)
    else:
        at = jnp.minimum(places, len(store.x) - 1)
        waiting, parts = Waiting(store.x[at], store.weights[at]), store.parts[at]
    waiting, visits, pages = attend_stage(
        cfg, layer, groups, index, waiting, parts, state.pages, step
    )
    store = store._replace(
        x=store.x.at[places].set(waiting.x, mode="drop"),
        weights=store.weights.at[places].set(waiting.weights, mode="drop"),
    )
    return store, state._replace(pages=pages), visits


def _leave(
    cfg: ModelConfig,
    params: Params,
    store: Store,
    last_token: Int[Array, "S"],
    rows: Int[Array, "B C"],
    places: Int[Array, "B"],
) -> tuple[Int[Array, "S"], Int[Array, "B"], Float[Array, "B"], Float[Array, "B V"]]:
    """Tokens of units that have been through all layers, of the last row of each."""
    x = merge(Waiting(store.x[places], store.weights[places]), store.parts[places])
    logits = head(cfg, params, x)
    tokens, logprobs = greedy(logits)
    return remember(last_token, rows[:, SLOT], tokens), tokens, logprobs, logits


class Programs(NamedTuple):
    """Of all attention workers of one architecture."""

    attend: Callable[..., tuple[Store, State, Visits | None]]
    leave: Callable[..., tuple[Array, Array, Array, Array]]
    sample: Callable[..., tuple[Array, Array, Array]]


@cache
def programs_of(cfg: ModelConfig) -> Programs:
    """Compiled at their first call with arrays of new shapes, for all workers."""
    return Programs(
        jax.jit(partial(_attend, cfg), donate_argnums=(3, 4)),
        jax.jit(partial(_leave, cfg), donate_argnums=2),
        jax.jit(sample_step, static_argnames="truncate", donate_argnums=0),
    )


@partial(jax.jit, donate_argnums=0)
def _keep(
    store: Store, parts: Float[Array, "n d"], places: Int[Array, "n"], picks: Int[Array, "n"]
) -> Store:
    return store._replace(parts=store.parts.at[places, picks].set(parts, mode="drop"))


@jax.jit
def _some(h: Float[Array, "T d"], at: Int[Array, "n"]) -> Float[Array, "n d"]:
    return h[at]


class AttentionWorker:
    """Attention of one device. Launches: one for a stage, one for each message of parts that comes;
    for each expert worker that a stage's rows go to a gather (none where all rows go) and a copy;
    and a stage waits for its own result, which says where rows go.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        groups: Int[np.ndarray, "layers m"],
        state: State,
        hosts: Bool[np.ndarray, "layers E W"],
        numbers: RowNumbers,
        number: int,
        device: Any,
        experts: Sequence[Any],
        send: Callable[[int, ToExperts], None],
        picker: Picker,
        *,
        decode_buckets: Sequence[int] = (8, 32, 128),
        prefill_buckets: Sequence[int] = (32, 128, 512),
    ) -> None:
        """Takes over a device's sequences.

        Args:
            cfg: the model's.
            params: the model's, on the device.
            groups: of its MoE layers, as in ExpertTable.
            state: empty, on the device.
            hosts: which of the W expert workers have each logical expert; rows of one that several
                have take turns.
            numbers: of the rows of all attention workers.
            number: of this one.
            device: where all that is.
            experts: devices of the expert workers.
            send: called with an expert worker's number and visits for it.
            picker: whose layer runs next.
            decode_buckets: rows of a stage, ascending; fewer are padded to one of them.
            prefill_buckets: tokens of a stage, likewise; a chunk longer than the last is refused.

        Raises ValueError where an expert has no host.
        """
        if not hosts.any(axis=-1).all():
            layer, expert = np.argwhere(~hosts.any(axis=-1))[0].tolist()
            raise ValueError(f"expert {expert} of MoE layer {layer} is on no expert worker")
        self.cfg, self.device, self.number, self.numbers = cfg, device, number, numbers
        self._params, self._state = params, state
        self._layers = layers_of(cfg, params)
        self._groups = [jax.device_put(jnp.asarray(row, jnp.int32), device) for row in groups]
        self._index = [jax.device_put(jnp.int32(at), device) for at in range(cfg.num_layers)]
        self._moe = np.cumsum([is_moe for _, is_moe in self._layers]) - 1
        width, picks = cfg.d_model, cfg.experts_per_token
        kind, count = params["embed"].dtype, numbers.per_worker
        empty = Store(
            jnp.zeros((count, width), kind),
            jnp.zeros((count, picks), jnp.float32),
            jnp.zeros((count, picks, width), kind),
        )
        self._store = jax.device_put(empty, device)
        self._programs = programs_of(cfg)
        self._owners = np.argsort(~hosts, axis=-1, kind="stable")  # hosts first
        self._num_owners = hosts.sum(axis=-1)
        self._experts, self._send, self._picker = list(experts), send, picker
        self.queues = MicroQueues(cfg.num_layers + 1, 2)
        self._unit_of: dict[int, Unit] = {}  # by place
        self._layer_of: dict[Unit, int] = {}  # that it is in
        self._buckets = {DECODE: list(decode_buckets), PREFILL: list(prefill_buckets)}
        self.control = StepControl(100, 0)  # of the stages that come
        self.stages = 0

    @property
    def num_units(self) -> int:
        """On their way."""
        return len(self._layer_of)

    def submit(self, unit: Unit, now: float) -> None:
        """A unit enters the first layer. Raises ValueError for a chunk that no stage takes, or a
        place that another unit has.
        """
        if len(unit.places) > (most := self._buckets[PREFILL][-1]):
            raise ValueError(f"a chunk has {len(unit.places)} tokens; a stage takes {most}")
        places = unit.places.tolist()
        taken = next((place for place in places if place in self._unit_of), None)
        if taken is not None:
            raise ValueError(f"place {taken} is another unit's")
        self._unit_of |= dict.fromkeys(places, unit)
        self._layer_of[unit] = 0
        self._wait(unit, 0, now)

    def receive(self, parts: FromExperts, now: float) -> None:
        """Parts came; units that miss none any more wait for their next layer."""
        place = self.numbers.place(parts.row)
        places = np.full(len(parts.part), self.numbers.per_worker, np.int32)  # padding: dropped
        picks = np.zeros(len(parts.part), np.int32)
        places[: len(place)], picks[: len(place)] = place, parts.pick
        self._store = _keep(self._store, parts.part, places, picks)
        for at in place.tolist():
            unit = self._unit_of[at]
            unit.missing -= 1
            if not unit.missing:
                self._layer_of[unit] += 1
                self._wait(unit, self._layer_of[unit], now)

    def advance(self, now: float, *, more_may_come: bool = True) -> list[Result] | None:
        """Runs a stage, if the picker says so: what came of units that have left with it; None
        where none ran.
        """
        queues = self.queues
        if not queues.num_rows:
            return None
        chosen = self._picker.pick(
            queues.counts, queues.oldest, now, urgent=queues.urgent, more_may_come=more_may_come
        )
        if chosen is None:
            return None
        layer, group = chosen
        entries = queues.take(layer, group, self._buckets[group][-1], MOST_CHUNKS)
        units = [entry.what for entry in entries]
        self.stages += 1
        if layer == self.cfg.num_layers:
            return self._finish(units)
        self._run(layer, units, now)
        return []

    def _wait(self, unit: Unit, layer: int, now: float) -> None:
        rows = len(unit.places)
        self.queues.put(layer, unit.group, Entry(rows, rows * unit.urgent, now, unit))

    def _run(self, layer: int, units: list[Unit], now: float) -> None:
        """Launches attention of a layer, and sends its rows to their experts."""
        params, is_moe = self._layers[layer]
        places, rows, tokens = self._packed(units)
        first = layer == 0
        deltas = np.concatenate([u.deltas for u in units]) if first else empty_deltas(0)
        padded = empty_deltas(bucket(max(1, len(deltas))))
        padded[: len(deltas)] = deltas
        self._store, self._state, visits = self._programs.attend(
            params,
            self._groups[self._moe[layer]] if is_moe else None,
            {"embed": self._params["embed"]} if first else None,
            self._store,
            self._state,
            tokens if units[0].group == PREFILL else None,
            rows,
            padded,
            np.array(self.control, np.int32),
            places,
            self._index[layer],
        )
        count = sum(len(unit.places) for unit in units)
        if visits is None:
            asked, degraded = np.full((count, 1), -1), np.zeros(count, np.int32)
        else:
            asked, degraded = jax.device_get((visits.expert_ids, visits.degraded))
        start = 0
        for unit in units:
            own = slice(start, start + len(unit.places))
            start = own.stop
            unit.degraded += int(degraded[own].sum())
            unit.missing = int((asked[own] >= 0).sum())
            if not unit.missing:
                self._layer_of[unit] += 1
                self._wait(unit, self._layer_of[unit], now)
        if visits is not None:
            urgent = np.repeat([u.urgent for u in units], [len(u.places) for u in units])
            self._ask(int(self._moe[layer]), visits.h, places[:count], asked[:count], urgent)

    def _packed(self, units: list[Unit]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Places, packed rows and tokens of a stage, padded."""
        count = sum(len(unit.places) for unit in units)
        group = units[0].group
        size = next(size for size in self._buckets[group] if size >= count)
        places = np.full(size, self.numbers.per_worker, np.int32)  # padding: dropped
        places[:count] = np.concatenate([unit.places for unit in units])
        rows = empty_rows(size if group == DECODE else MOST_CHUNKS)
        rows[: len(units)] = np.stack([unit.row for unit in units])
        tokens = np.zeros(len(places), np.int32)
        given = [unit.tokens for unit in units if unit.tokens is not None]
        if given:
            tokens[:count] = np.concatenate(given)
        return places, rows, tokens

    def _ask(
        self,
        layer: int,
        h: Array,
        places: Int[np.ndarray, "n"],
        asked: Int[np.ndarray, "n K"],
        urgent: Bool[np.ndarray, "n"],
    ) -> None:
        at, pick = np.nonzero(asked >= 0)
        expert = asked[at, pick]
        row = self.numbers.of(self.number, places)
        turn = row[at] % self._num_owners[layer, expert]
        owner = self._owners[layer, expert, turn]
        for number in np.unique(owner).tolist():
            own = np.flatnonzero(owner == number)
            needed, mine = np.unique(at[own], return_inverse=True)
            some = h
            if len(needed) < len(places):
                index = np.zeros(bucket(len(needed)), np.int32)
                index[: len(needed)] = needed
                some = _some(h, index)
            visits = ToExperts(
                layer,
                moved(some, self._experts[number]),
                row[needed],
                mine,
                pick[own],
                expert[own],
                urgent[at[own]],
            )
            self._send(number, visits)

    def _finish(self, units: list[Unit]) -> list[Result]:
        """Tokens of units that have been through all layers; their places are free."""
        rows = empty_rows(bucket(len(units)))
        places = np.zeros(len(rows), np.int32)
        for at, unit in enumerate(units):
            rows[at], places[at] = unit.row, unit.places[-1]
            if not unit.ends_prompt:
                rows[at, SLOT] = -1
            del self._layer_of[unit]
            for place in unit.places.tolist():
                del self._unit_of[place]
        last, tokens, logprobs, logits = self._programs.leave(
            self._params, self._store, self._state.last_token, rows, places
        )
        if (mode := sampling_mode(rows)) != "greedy":
            truncate = mode == "truncate"
            last, tokens, logprobs = self._programs.sample(last, logits, rows, truncate=truncate)
        self._state = self._state._replace(last_token=last)
        found: Any = jax.device_get((tokens, logprobs))
        return [
            Result(unit, int(token), float(logprob))
            if unit.ends_prompt
            else Result(unit, None, None)
            for unit, token, logprob in zip(units, *found, strict=False)
        ]
