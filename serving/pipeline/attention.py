"""A worker with attention: units of its sequences wait before each layer, and for their experts.

Rows of one sequence go through the layers together, a `Unit`: one row that decodes, or a chunk of a
prompt. Between two layers a unit waits until every visit of its rows has come back: what each still
misses is the token pool of AMoE, section 3.3.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Shaped

from jmoe.packed_rows import (
    EXEMPT,
    NEXT_TOKEN,
    NUM_SHAPE_COLUMNS,
    SLOT,
    SPARED,
    TOP_PROMPT,
    empty_deltas,
    empty_rows,
    pack_row,
    pack_seat,
)
from jmoe.shaping import Drawn
from jmoe.stages import StageVisits
from serving.execution.executor import FailedRows, LostRows
from serving.pipeline.devices import AttentionDevice, Sizes
from serving.pipeline.messages import (
    DECODE,
    EXPERTS,
    PREFILL,
    Enter,
    FromExperts,
    Left,
    RowNumbers,
    ToExperts,
    Unit,
    UseWay,
    WorkerDown,
    WorkerUp,
)
from serving.pipeline.queues import Entry, MicroQueues, padded
from serving.plan import StepControl, spare_latency_sensitive
from serving.scheduling.layers.picker import LayerPicker

MOST_CHUNKS = 8
"""In one stage."""
FREE = -1
TELLS_EVERY = 64
"""Stages after which a worker tells how many rows it has sent to each expert; idle, at once."""
EXACT = StepControl(100, 0)


class _UnderWay(NamedTuple):
    """A stage that was launched and not read."""

    layer: int
    units: list[Unit]
    places: Int[np.ndarray, "T"]
    rows: Int[np.ndarray, "B C"]
    control: StepControl
    attended: StageVisits


class AttentionWorker:
    """Attention of one device. Launches: one for a stage, one for each message of parts that comes.
    Where a stage's rows go is read once the next one is launched, if any waits; they leave through
    the host's memory.
    """

    def __init__(
        self,
        device: AttentionDevice,
        moe_layers: Sequence[bool],
        hosts: Bool[np.ndarray, "layers E W"],
        numbers: RowNumbers,
        number: int,
        send: Callable[[int, ToExperts], None],
        picker: LayerPicker,
        sizes: Sizes,
    ) -> None:
        """Takes over a device's sequences.

        Args:
            device: with the weights beside experts, and empty.
            moe_layers: of each layer, whether it has experts.
            hosts: which of the W expert workers have each logical expert of each MoE layer; rows of
                one that several have take turns.
            numbers: of the rows of all attention workers.
            number: of this one.
            send: called with an expert worker's number and visits for it.
            picker: whose layer runs next; behind the last layer is one more, where tokens come of
                rows.
            sizes: of this worker.

        Raises ValueError where an expert has no host.
        """
        if not hosts.any(axis=-1).all():
            layer, expert = np.argwhere(~hosts.any(axis=-1))[0].tolist()
            raise ValueError(f"expert {expert} of MoE layer {layer} is on no expert worker")
        self.device, self.number, self.numbers = device, number, numbers
        self._num_layers = len(moe_layers)
        self._moe = np.cumsum(moe_layers) - 1
        self._hosts, self._alive = hosts, np.ones(hosts.shape[-1], bool)
        self._find_owners()
        self._send = send
        self._under_way: _UnderWay | None = None
        self.queues = MicroQueues(self._num_layers + 1, 2, picker)
        self._unit_of: dict[int, Unit] = {}  # by the first of its places
        self._first = np.full(numbers.per_worker, FREE)  # of each place's unit
        num_expert_workers = hosts.shape[-1]
        self._missing = np.zeros((numbers.per_worker, num_expert_workers), np.int64)
        """Visits that have yet to come, by a unit's first place and expert worker."""
        self._told: list[Left | LostRows | FailedRows] = []
        self._buckets = {DECODE: sizes.decode_buckets, PREFILL: sizes.prefill_buckets}
        self._sizes = sizes
        self._expert_rows = np.zeros(hosts.shape[:2], np.int32)
        self.stages = self._told_at = 0
        self.newest = 0, 0  # layer and rows of the newest stage

    @property
    def num_units(self) -> int:
        """Units on their way."""
        return len(self._unit_of)

    def take(
        self, message: Enter | FromExperts | UseWay | WorkerDown | WorkerUp, now: float
    ) -> None:
        """Takes any message. Raises ValueError as `submit`."""
        match message:
            case FromExperts():
                self.receive(message, now)
            case Enter(units):
                for unit in units:
                    self.submit(unit, now)
            case UseWay(way):
                self.device.use_way(way)
            case WorkerDown(kind, number) if kind == EXPERTS:
                self._lose(number)
            case WorkerUp(kind, number) if kind == EXPERTS:
                self._alive[number] = True
                self.device.reach(self._find_owners())

    def told(self) -> list[Left | LostRows | FailedRows]:
        """Returns messages, new since the last call, about units that left or will not leave."""
        told, self._told = self._told, []
        return told

    def submit(self, unit: Unit, now: float) -> None:
        """Lets a unit enter the first layer. Raises ValueError for a chunk that no stage takes, for
        no rows, and for places that are not there or another unit's.
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
        """Adds parts that came; units that no longer miss any wait for their next layer."""
        place = self.numbers.place(parts.row)
        self.device.keep(parts.part, place, parts.pick)
        came = np.bincount(self._first[place])
        touched = np.flatnonzero(came)
        self._missing[touched, parts.worker] -= came[touched]
        here = touched[~self._missing[touched].any(axis=1)]
        units = [self._unit_of[first] for first in here.tolist()]
        self._pass([unit for unit in units if not unit.lost], now)
        self._end_lost([unit for unit in units if unit.lost])

    def _find_owners(self) -> Bool[np.ndarray, "layers E"]:
        """Chooses a worker for each expert among its hosts that are alive; returns which experts
        have one.
        """
        hosts = self._hosts & self._alive
        self._owners = np.argsort(~hosts, axis=-1, kind="stable")  # hosts first
        self._num_owners = hosts.sum(axis=-1)
        return self._num_owners > 0

    def _lose(self, number: int) -> None:
        """Drops an expert worker that is gone. Units that wait for it are lost, but keep their
        places until what others make of their visits has come: it must not be taken for their
        successors'.
        """
        self._alive[number] = False
        self.device.reach(self._find_owners())
        waited = np.flatnonzero(self._missing[:, number])
        self._missing[:, number] = 0
        units = [self._unit_of[first] for first in waited.tolist()]
        for unit in units:
            unit.lost = True
        self._end_lost([u for u in units if not self._missing[u.places[0]].any()])

    def _end_lost(self, units: Sequence[Unit]) -> None:
        if units:
            self._free(units)
            self._told.append(LostRows([unit.number for unit in units]))

    def _free(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._first[unit.places] = FREE
            del self._unit_of[int(unit.places[0])]

    def advance(self, now: float) -> bool:
        """Launches a stage if the picker says so, and reads the one before; returns False where
        there was nothing to do.
        """
        chosen = self.queues.pick(now)
        if chosen is None:
            return self._settle(now)
        layer, group = chosen
        most_units = MOST_CHUNKS if group == PREFILL else 0
        entries = self.queues.take(layer, group, self._buckets[group][-1], most_units)
        units = [entry.what for entry in entries]
        self.stages += 1
        self.newest = layer, sum(entry.rows for entry in entries)
        if layer == self._num_layers:
            self._settle(now)
            self._finish(units)
        else:
            launched = self._launch(layer, units, now)
            self._settle(now)
            self._under_way = launched
        return True

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

    def _launch(self, layer: int, units: list[Unit], now: float) -> _UnderWay | None:
        """Launches attention of a layer; None: of a dense one, behind which nobody waits."""
        places, rows, tokens = self._packed(units)
        deltas = empty_deltas(1)
        if not layer:
            given = np.concatenate([unit.deltas for unit in units])
            deltas = empty_deltas(self._num_deltas(units[0].group, len(places)))
            deltas[: len(given)] = given
        control = self._control(units, rows)
        attended = self.device.attend(layer, tokens, rows, deltas, control, places)
        if attended is None:
            self._pass(units, now)
            return None
        return _UnderWay(layer, units, places, rows, control, attended)

    def _settle(self, now: float) -> bool:
        """Reads the stage that is under way, and sends its rows to their experts; returns whether
        there was one.
        """
        if self._under_way is None:
            return False
        (layer, units, places, rows, control, attended), self._under_way = self._under_way, None
        h, asked, degraded, unserved = self.device.read(attended)
        lengths = [len(unit.places) for unit in units]
        count, starts = sum(lengths), np.cumsum([0, *lengths[:-1]])
        asked = asked[:count]
        asked = self._end_unserved(units, lengths, asked, unserved[:count], layer)
        # A worker may have gone since the launch.
        owners = self._num_owners[self._moe[layer]][np.maximum(asked, 0)]
        stranded = ((asked >= 0) & (owners == 0)).any(axis=1)
        lost, asked = _without(units, lengths, asked, stranded)
        self._end_lost(lost)
        given_up = np.add.reduceat(degraded[:count], starts).tolist()
        exempt = rows[: len(units), EXEMPT].tolist()
        for unit, degraded_here, is_exempt in zip(units, given_up, exempt, strict=True):
            unit.degraded += degraded_here
            percent = 100 if is_exempt else control.threshold_percent
            if not unit.least_percent == percent == unit.most_percent:
                unit.note_threshold(percent)
        waits = np.add.reduceat((asked >= 0).sum(axis=1), starts) > 0
        if not waits.all():  # brownout dropped all of some
            alive = [units[at] for at in np.flatnonzero(~waits)]
            self._pass([unit for unit in alive if int(unit.places[0]) in self._unit_of], now)
        urgent = np.repeat([unit.urgent for unit in units], lengths)
        firsts = np.repeat(places[starts], lengths)
        self._ask(int(self._moe[layer]), h, places[:count], asked, urgent, firsts)
        return True

    def _num_deltas(self, group: int, size: int) -> int:
        """Returns the most changes of the block table that a stage of some size has: a row needs
        one new page at most, and prompts may begin with others' pages, in each group of layers.
        """
        begun = 0 if group == DECODE else MOST_CHUNKS * self._sizes.max_blocks
        return (size + begun) * self._sizes.num_groups

    def _end_unserved(
        self,
        units: list[Unit],
        lengths: list[int],
        asked: Int[np.ndarray, "n K"],
        unserved: Int[np.ndarray, "n"],
        layer: int,
    ) -> Int[np.ndarray, "n K"]:
        """Ends units with visits that no worker can make; returns the visits without them."""
        failed, asked = _without(units, lengths, asked, unserved > 0)
        if failed:
            self._free(failed)
            gone = ", ".join(f"experts-{n}" for n in np.flatnonzero(~self._alive))
            reason = f"no worker has an expert of layer {layer} now ({gone} gone)"
            self._told.append(FailedRows([unit.number for unit in failed], reason))
        return asked

    def _control(self, units: list[Unit], rows: Int[np.ndarray, "B C"]) -> StepControl:
        """Returns the brownout of a stage, and marks those of its packed `rows` that it spares.

        Rows enter with thresholds of their own: of all visits the stage keeps the mean of the
        shares that they are to keep, and those that entered under zero brownout are spared. So are
        latency-sensitive rows where others can give up enough.
        """
        percent, strategy = units[0].percent, units[0].strategy
        floor = max(unit.floor_percent for unit in units)
        control = StepControl(max(percent, floor), strategy, floor)
        if any(unit.percent != percent or unit.strategy != strategy for unit in units):
            bound = [unit for unit in units if unit.strategy]
            for at, unit in enumerate(units):
                rows[at, EXEMPT] = max(rows[at, EXEMPT], 0 if unit.strategy else SPARED)
            if not bound:
                return control
            kept = sum(len(unit.places) * unit.percent for unit in bound)
            percent = -(-kept // sum(len(unit.places) for unit in bound))  # never less than asked
            control = StepControl(max(percent, floor), newest(bound).strategy, floor)
        if not control.strategy or all(unit.urgent for unit in units):
            return control
        urgent = np.zeros(len(rows), bool)
        urgent[: len(units)] = [unit.urgent for unit in units]
        percent = spare_latency_sensitive(rows, urgent, control)
        return control._replace(threshold_percent=percent)

    def _packed(self, units: list[Unit]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Returns places, packed rows and tokens of a stage, padded; no tokens where rows
        decode.
        """
        group, own = units[0].group, np.concatenate([unit.places for unit in units])
        size = next(size for size in self._buckets[group] if size >= len(own))
        places = padded(own, size, self.numbers.per_worker)  # padding: dropped
        rows = empty_rows(size if group == DECODE else MOST_CHUNKS)
        rows[: len(units)] = np.stack([unit.row for unit in units])
        given = [unit.tokens for unit in units if unit.tokens is not None]
        return places, rows, padded(np.concatenate(given), size) if given else None

    def _ask(
        self,
        layer: int,
        h: Shaped[np.ndarray, "T d"],
        places: Int[np.ndarray, "n"],
        asked: Int[np.ndarray, "n K"],
        urgent: Bool[np.ndarray, "n"],
        firsts: Int[np.ndarray, "n"],
    ) -> None:
        """Sends rows to the workers that have the experts they ask for; `firsts` are the first
        places of the rows' units.
        """
        at, pick = np.nonzero(asked >= 0)
        expert, row = asked[at, pick], self.numbers.of(self.number, places)
        self._expert_rows[layer] += np.bincount(expert, minlength=self._expert_rows.shape[1])
        turn = row[at] % self._num_owners[layer, expert]
        owner = self._owners[layer, expert, turn]
        np.add.at(self._missing, (firsts[at], owner), 1)
        for number in np.unique(owner).tolist():
            own = np.flatnonzero(owner == number)
            asks = at[own]  # ascending: visits are in the order of their rows
            new = np.concatenate([[True], asks[1:] != asks[:-1]])
            needed, mine = asks[new], np.cumsum(new) - 1
            of_visits = mine, pick[own], expert[own], urgent[asks]
            self._send(number, ToExperts(layer, h[needed], row[needed], *of_visits))

    def _finish(self, units: list[Unit]) -> None:
        """Takes the tokens of units of one group that have been through all layers, tells of them,
        and frees their places.
        """
        rows = empty_rows(self._size_for(len(units)))
        places = np.zeros(len(rows), np.int32)
        scores, *prompt_top = self._joined_scores(units)
        for at, unit in enumerate(units):
            rows[at], places[at] = unit.row, unit.places[-1]
            if not unit.ends_prompt:
                rows[at, SLOT] = -1
        self._free(units)
        top: tuple[Any, Any] = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
        if any(unit.shape is not None for unit in units):
            drawn = self._draw(units, rows, places)
            tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
            top = drawn.top_ids[: len(units)], drawn.top_logprobs[: len(units)]
        else:
            tokens, logprobs = self.device.leave(rows, places)
        ends = [unit.ends_prompt for unit in units]
        left = Left(
            [unit.number for unit in units],
            [token if end else 0 for token, end in zip(tokens, ends, strict=False)],
            [logprob if end else 0.0 for logprob, end in zip(logprobs, ends, strict=False)],
            [unit.degraded for unit in units],
            scores,
            newest(units).strategy,
            [unit.least_percent for unit in units],
            [unit.most_percent for unit in units],
            *top,
            self._sent_since(),
            *prompt_top,
        )
        self._told.append(left)

    def _draw(
        self, units: list[Unit], rows: Int[np.ndarray, "B C"], places: Int[np.ndarray, "B"]
    ) -> Drawn:
        """Draws the tokens of units of which some have their logits changed."""
        shapes = np.zeros((len(rows), NUM_SHAPE_COLUMNS), np.int32)
        for shape, unit in zip(shapes, units, strict=False):
            if unit.seat is not None:
                self.device.seat(unit.seat)
            if unit.shape is not None:
                shape[:] = unit.shape
        return self.device.draw(rows, places, shapes, [unit.allowed for unit in units])

    def _size_for(self, num_units: int) -> int:
        """Returns the rows of the head's program: one of few sizes, as for stages."""
        sizes = sorted({MOST_CHUNKS, *self._buckets[DECODE]})
        return next(size for size in sizes if size >= num_units)

    def _scores(self, unit: Unit) -> tuple[np.ndarray, ...]:
        """Returns the log-probability of the token that follows each of a chunk's in its prompt,
        and the likeliest tokens there if its request asks for them, as `Scored` has them.
        """
        assert unit.tokens is not None
        places, _, tokens = self._packed([unit])
        assert tokens is not None
        following = np.roll(tokens, -1)
        following[len(unit.tokens) - 1] = unit.row[NEXT_TOKEN]
        count = len(unit.tokens)
        found = self.device.score(places, following, bool(unit.row[TOP_PROMPT]))
        return tuple(np.asarray(part)[:count] for part in found)

    def _joined_scores(self, units: Sequence[Unit]) -> tuple[np.ndarray, ...]:
        """Returns `Scored` for the tokens of all units; what was not asked for means nothing."""
        each = [self._scores(unit) if unit.scores else None for unit in units]
        found = next((scores for scores in each if scores is not None), None)
        if found is None:
            none = np.zeros((0, 0), np.float32)
            return np.zeros((0, 2), np.float32), none.astype(np.int32), none
        filled = [
            tuple(np.zeros((len(unit.places), part.shape[1]), part.dtype) for part in found)
            if scores is None
            else scores
            for unit, scores in zip(units, each, strict=True)
        ]
        return tuple(np.concatenate(parts) for parts in zip(*filled, strict=True))

    def _sent_since(self) -> Int[np.ndarray, "layers E"]:
        """Returns the rows sent to each expert since the last call; empty if it is not time yet."""
        if self.num_units and self.stages - self._told_at < TELLS_EVERY:
            return np.zeros((0, 0), np.int32)
        found, self._told_at = self._expert_rows, self.stages
        self._expert_rows = np.zeros_like(found)
        return found

    def warm(self, part_sizes: Sequence[int]) -> None:
        """Runs each program that may be needed once, on padding, at every size; `part_sizes` are
        those of parts that come.
        """
        self.queues.warm()
        nowhere = self.numbers.per_worker
        for group, sizes in self._buckets.items():
            for size in sizes:
                places = np.full(size, nowhere, np.int32)
                rows = empty_rows(size if group == DECODE else MOST_CHUNKS)
                tokens = np.zeros(size, np.int32) if group == PREFILL else None
                for layer in range(self._num_layers):
                    deltas = empty_deltas(1 if layer else self._num_deltas(group, size))
                    launched = self.device.attend(layer, tokens, rows, deltas, EXACT, places)
                    if launched is not None:  # what it raises is told now
                        self.device.read(launched)
                if group == PREFILL:
                    self.device.score(places, np.zeros(size, np.int32), False)
        sampled = partial(pack_row, -1, kv_len=1, temperature=1.0)
        every_mode = pack_row(-1, kv_len=1), sampled(), sampled(top_k=1)  # of `sampling_mode`
        for size in {MOST_CHUNKS, *self._buckets[DECODE]}:
            shapes = np.zeros((size, NUM_SHAPE_COLUMNS), np.int32)
            for row in every_mode:
                rows, places = np.tile(row, (size, 1)), np.zeros(size, np.int32)
                self.device.leave(rows, places)
                self.device.draw(rows, places, shapes, [])
        self.device.seat(pack_seat(-1, [], [], [], self._sizes.max_len)[0])
        for size in part_sizes:
            self.device.keep(self.device.blank(size), *np.full((2, size), nowhere, np.int32))


def _without(
    units: Sequence[Unit],
    lengths: Sequence[int],
    asked: Int[np.ndarray, "n K"],
    wrong: Bool[np.ndarray, "n"],
) -> tuple[list[Unit], Int[np.ndarray, "n K"]]:
    """Returns the units of which a row is wrong, and the visits without theirs."""
    if not wrong.any():
        return [], asked
    ends = np.logical_or.reduceat(wrong, np.cumsum([0, *lengths[:-1]]))
    found = [unit for unit, at_end in zip(units, ends, strict=True) if at_end]
    return found, np.where(np.repeat(ends, lengths)[:, None], -1, asked)


def newest(units: Sequence[Unit]) -> Unit:
    """Returns the unit that entered last."""
    return max(units, key=lambda unit: unit.number)
