"""Tokens of steps in which rows are shaped: drawn at once, or once what rows may draw is known.

A structured output's next token depends on the one before, which the host has to have read. So
that the device need not wait for it, the step's layers are launched before, and only what draws its
tokens afterwards (`Draws.draw`).
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jmoe.shape_rows import NUM_SHAPE_COLUMNS, everything, pack_seat
from jmoe.steps import StepOutput
from serving.execution.buckets import Key
from serving.execution.device import Device
from serving.execution.ranks import ByRank
from serving.execution.results import Results
from serving.plan import Seat, Shapes, StepPlan, StepResult

Submit = Callable[[Callable[[], StepResult]], "Future[StepResult]"]


class _Undrawn(NamedTuple):
    out: StepOutput
    key: Key
    step: ByRank
    plan: StepPlan
    result: "Future[StepResult]"


class Drawing:
    """Draws the tokens of one runner's steps. A step that waits is drawn before another one is
    launched.
    """

    def __init__(self, device: Device, results: Results, submit: Submit, max_len: int) -> None:
        """`submit` has results read in order; sequences have up to `max_len` positions."""
        self._device, self._results, self._submit = device, results, submit
        self._max_len = max_len
        self._undrawn: _Undrawn | None = None

    def start(
        self, out: StepOutput, key: Key, step: ByRank, plan: StepPlan
    ) -> "Future[StepResult]":
        """Starts sampling behind the last layers of a plan with shapes. Draws its tokens now unless
        it waits.
        """
        assert plan.shapes is not None
        for seat in plan.shapes.seats:
            self._device.seat(self._told(seat))
        undrawn = _Undrawn(out, key, step, plan, Future())
        if plan.shapes.waits:
            self._undrawn = undrawn
            return undrawn.result
        vocab = self._device.model.config.vocab_size
        return self._submit(self._drawn(undrawn, everything(len(plan.rows), vocab)))

    def draw(self, allowed: Int[np.ndarray, "B W"]) -> None:
        """Draws the tokens of the step that waits."""
        undrawn, self._undrawn = self._undrawn, None
        assert undrawn is not None, "no step waits to be drawn"
        self._submit(self._drawn(undrawn, allowed)).add_done_callback(
            lambda read: _pass_on(read, undrawn.result)
        )

    def _drawn(
        self, undrawn: _Undrawn, allowed: Int[np.ndarray, "B W"]
    ) -> Callable[[], StepResult]:
        out, key, step, plan, _ = undrawn
        num_rows = self._device.buckets.rows(key)
        padded_shapes = np.zeros((step.num_ranks * num_rows, NUM_SHAPE_COLUMNS), np.int32)
        padded_allowed = np.full((len(padded_shapes), allowed.shape[1]), -1, np.int32)
        at, shapes = step.row_at(num_rows), plan.shapes
        assert isinstance(shapes, Shapes)
        padded_shapes[at], padded_allowed[at] = shapes.rows, allowed
        rows = step.padded_rows(num_rows)
        out = self._device.draw(out, rows, padded_shapes, padded_allowed)
        return self._results.start(out, key, step, plan.first_layer)

    def _told(self, seat: Seat) -> Int[np.ndarray, "D n"]:
        """Returns a seat's numbers for each device; only the slot's own has anything to do."""
        limits = self._device.limits
        rank, slot = divmod(seat.slot, limits.slots_per_rank)
        told = pack_seat(slot, seat.prompt, seat.output, seat.biases, self._max_len)
        others = pack_seat(-1, [], [], [], self._max_len)
        return np.concatenate([told if at == rank else others for at in range(limits.num_ranks)])


def _pass_on(read: "Future[Any]", result: "Future[Any]") -> None:
    if not result.set_running_or_notify_cancel():
        return
    if (error := read.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(read.result())
