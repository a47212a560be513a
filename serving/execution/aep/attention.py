"""A worker with attention: units of its sequences wait before each layer, and for their experts.

Rows of one sequence go through the layers together, a `Unit`: one row that decodes, or a chunk of a
prompt. Between two layers a unit waits until every visit of its rows has come back: what each still
misses is the token pool of AMoE, section 3.3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jmoe.packed_rows import SLOT, empty_deltas, empty_rows
from serving.execution.aep.devices import AttentionDevice
from serving.execution.aep.messages import FromExperts, RowNumbers, ToExperts
from serving.execution.aep.queues import Entry, MicroQueues, Picker, bucket
from serving.plan import StepControl

MOST_CHUNKS = 8
"""In one stage."""
FREE = -1
DECODE, PREFILL = range(2)
"""Groups of a layer's queue: they are different programs."""


@dataclass(eq=False)
class Unit:
    """Rows of one sequence on their way through the layers."""

    row: Int[np.ndarray, "C"]  # packed
    tokens: Int[np.ndarray, "n"] | None  # of a chunk; None: the newest token of its slot
    places: Int[np.ndarray, "n"]  # of its rows in the worker's store
    deltas: Int[np.ndarray, "D 3"]  # of the block table
    urgent: bool = False
    ends_prompt: bool = True  # or decodes: a token comes of its last row
    layer: int = 0  # before which it waits, or that it is in
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


class AttentionWorker:
    """Attention of one device. Launches: one for a stage, one for each message of parts that comes;
    for each expert worker that a stage's rows go to a gather (none where all rows go) and a copy;
    and a stage waits for its own result, which says where rows go.
    """

    def __init__(
        self,
        device: AttentionDevice,
        moe_layers: Sequence[bool],
        hosts: Bool[np.ndarray, "layers E W"],
        numbers: RowNumbers,
        number: int,
        experts: Sequence[Any],
        send: Callable[[int, ToExperts], None],
        picker: Picker,
        *,
        decode_buckets: Sequence[int] = (8, 32, 128),
        prefill_buckets: Sequence[int] = (32, 128, 512),
    ) -> None:
        """Takes over a device's sequences.

        Args:
            device: with the weights beside experts, and empty.
            moe_layers: of each layer, whether it has experts.
            hosts: which of the W expert workers have each logical expert of each MoE layer; rows of
                one that several have take turns.
            numbers: of the rows of all attention workers.
            number: of this one.
            experts: where the expert workers are, as `device.sent` has it.
            send: called with an expert worker's number and visits for it.
            picker: whose layer runs next; behind the last layer is one more, where tokens come of
                rows.
            decode_buckets: rows of a stage, ascending; fewer are padded to one of them.
            prefill_buckets: tokens of a stage, likewise; a chunk longer than the last is refused.

        Raises ValueError where an expert has no host.
        """
        if not hosts.any(axis=-1).all():
            layer, expert = np.argwhere(~hosts.any(axis=-1))[0].tolist()
            raise ValueError(f"expert {expert} of MoE layer {layer} is on no expert worker")
        self.device, self.number, self.numbers = device, number, numbers
        self._num_layers = len(moe_layers)
        self._moe = np.cumsum(moe_layers) - 1
        self._owners = np.argsort(~hosts, axis=-1, kind="stable")  # hosts first
        self._num_owners = hosts.sum(axis=-1)
        self._experts, self._send, self._picker = list(experts), send, picker
        self.queues = MicroQueues(self._num_layers + 1, 2)
        self._unit_of: dict[int, Unit] = {}  # by the first of its places
        self._first = np.full(numbers.per_worker, FREE)  # of each place's unit
        self._missing = np.zeros(numbers.per_worker, np.int64)  # visits, by first place
        self._buckets = {DECODE: list(decode_buckets), PREFILL: list(prefill_buckets)}
        self.control = StepControl(100, 0)  # of the stages that come
        self.stages = 0

    @property
    def num_units(self) -> int:
        """On their way."""
        return len(self._unit_of)

    def submit(self, unit: Unit, now: float) -> None:
        """A unit enters the first layer. Raises ValueError for a chunk that no stage takes, for no
        rows, and for places that are not there or another unit's.
        """
        last = self.numbers.per_worker - 1
        if not len(unit.places) or not 0 <= unit.places.min() <= unit.places.max() <= last:
            raise ValueError(
                f"a unit's places are {unit.places.tolist()}; it must have one or more, each of 0 "
                f"to {last}"
            )
        if len(unit.places) > (most := self._buckets[PREFILL][-1]):
            raise ValueError(f"a chunk has {len(unit.places)} tokens; a stage takes {most}")
        taken = unit.places[self._first[unit.places] != FREE]
        if len(taken):
            raise ValueError(f"place {taken[0]} is another unit's")
        self._first[unit.places] = unit.places[0]
        self._unit_of[int(unit.places[0])] = unit
        self._wait([unit], now)

    def receive(self, parts: FromExperts, now: float) -> None:
        """Parts came; units that miss none any more wait for their next layer."""
        place = self.numbers.place(parts.row)
        places = np.full(parts.padded, self.numbers.per_worker, np.int32)  # padding: dropped
        picks = np.zeros(parts.padded, np.int32)
        places[: len(place)], picks[: len(place)] = place, parts.pick
        self.device.keep(parts.part, places, picks)
        came = np.bincount(self._first[place], minlength=len(self._missing))
        self._missing -= came
        here = np.flatnonzero((came > 0) & (self._missing == 0))
        self._pass([self._unit_of[first] for first in here.tolist()], now)

    def advance(self, now: float, *, more_may_come: bool = True) -> list[Result] | None:
        """Runs a stage, if the picker says so: what came of units that have left with it; None
        where none ran.
        """
        chosen = self.queues.pick(self._picker, now, more_may_come)
        if chosen is None:
            return None
        layer, group = chosen
        most_units = MOST_CHUNKS if group == PREFILL else 0
        entries = self.queues.take(layer, group, self._buckets[group][-1], most_units)
        units = [entry.what for entry in entries]
        self.stages += 1
        if layer == self._num_layers:
            return self._finish(units)
        self._run(layer, units, now)
        return []

    def _wait(self, units: Sequence[Unit], now: float) -> None:
        queues: dict[tuple[int, int], list[Entry]] = {}
        for unit in units:
            rows = len(unit.places)
            entry = Entry(rows, rows * unit.urgent, now, unit)
            queues.setdefault((unit.layer, unit.group), []).append(entry)
        for (layer, group), entries in queues.items():
            self.queues.put(layer, group, entries)

    def _pass(self, units: Sequence[Unit], now: float) -> None:
        for unit in units:
            unit.layer += 1
        self._wait(units, now)

    def _run(self, layer: int, units: list[Unit], now: float) -> None:
        """Runs attention of a layer, and sends its rows to their experts."""
        lengths = [len(unit.places) for unit in units]
        places, rows, tokens = self._packed(units, sum(lengths))
        deltas = empty_deltas(1)
        if not layer:
            given = np.concatenate([unit.deltas for unit in units])
            deltas = empty_deltas(bucket(len(given) or 1))
            deltas[: len(given)] = given
        h, asked, degraded = self.device.attend(layer, tokens, rows, deltas, self.control, places)
        if asked is None or degraded is None:  # a dense layer: nobody waits
            self._pass(units, now)
            return
        count, starts = sum(lengths), np.cumsum([0, *lengths[:-1]])
        missing = np.add.reduceat((asked[:count] >= 0).sum(axis=1), starts)
        given_up = np.add.reduceat(degraded[:count], starts).tolist()
        self._missing[places[starts]] = missing
        for unit, degraded_here in zip(units, given_up, strict=True):
            unit.degraded += degraded_here
        if not missing.all():  # brownout dropped all of some
            self._pass([units[at] for at in np.flatnonzero(missing == 0)], now)
        urgent = np.repeat([unit.urgent for unit in units], lengths)
        self._ask(int(self._moe[layer]), h, len(places), places[:count], asked[:count], urgent)

    def _packed(
        self, units: list[Unit], count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Places, packed rows and tokens of a stage, padded; no tokens where rows decode."""
        group = units[0].group
        size = next(size for size in self._buckets[group] if size >= count)
        places = np.full(size, self.numbers.per_worker, np.int32)  # padding: dropped
        places[:count] = np.concatenate([unit.places for unit in units])
        rows = empty_rows(size if group == DECODE else MOST_CHUNKS)
        rows[: len(units)] = np.stack([unit.row for unit in units])
        given = [unit.tokens for unit in units if unit.tokens is not None]
        if not given:
            return places, rows, None
        tokens = np.zeros(size, np.int32)
        tokens[:count] = np.concatenate(given)
        return places, rows, tokens

    def _ask(
        self,
        layer: int,
        h: Any,
        size: int,
        places: Int[np.ndarray, "n"],
        asked: Int[np.ndarray, "n K"],
        urgent: Bool[np.ndarray, "n"],
    ) -> None:
        """Sends rows to the workers that have the experts they ask for; `h` is padded to `size`."""
        at, pick = np.nonzero(asked >= 0)
        expert, row = asked[at, pick], self.numbers.of(self.number, places)
        turn = row[at] % self._num_owners[layer, expert]
        owner = self._owners[layer, expert, turn]
        for number in range(len(self._experts)):
            own, index = np.flatnonzero(owner == number), None
            if not len(own):
                continue
            asks = at[own]  # ascending: visits are in the order of their rows
            new = np.concatenate([[True], asks[1:] != asks[:-1]])
            needed, mine = asks[new], np.cumsum(new) - 1
            if len(needed) < len(places):
                index = np.zeros(bucket(len(needed)), np.int32)
                index[: len(needed)] = needed
            visits = ToExperts(
                layer,
                self.device.sent(h, index, self._experts[number]),
                size if index is None else len(index),
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
            self._first[unit.places] = FREE
            del self._unit_of[int(unit.places[0])]
        tokens, logprobs = self.device.leave(rows, places)
        return [
            Result(unit, token, logprob) if unit.ends_prompt else Result(unit, None, None)
            for unit, token, logprob in zip(units, tokens, logprobs, strict=False)
        ]
