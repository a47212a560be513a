"""Tokens of steps in which rows are shaped: drawn at once, or once what rows may draw is known.

A structured output's next token depends on the one before, which the host has to have read. So
that the device need not wait for it, the step's layers are launched before, and only what draws its
tokens afterwards (`Draws.draw`).
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jmoe.shape_rows import NUM_SHAPE_COLUMNS, everything, pack_seat
from serving.execution.buckets import Key
from serving.execution.device import Calls, Device
from serving.execution.ranks import ByRank
from serving.execution.results import Results
from serving.plan import StepResult

InOrder = Callable[[Callable[[], object]], None]
Launch = Callable[[Callable[[], Callable[[], StepResult]]], "Future[StepResult]"]


class _Undrawn(NamedTuple):
    key: Key
    step: ByRank
    result: "Future[StepResult]"


class Drawing:
    """Draws the tokens of one runner's steps. A step that waits is drawn before another one is
    launched.
    """

    def __init__(
        self, calls: Calls, device: Device, results: Results, in_order: InOrder, launch: Launch
    ) -> None:
        """`calls` are made by `in_order`, or by `launch` where a result is read of them."""
        self._calls, self._device, self._results = calls, device, results
        self._in_order, self._launch = in_order, launch
        self._undrawn: _Undrawn | None = None

    def start(self, key: Key, step: ByRank) -> "Future[StepResult]":
        """Starts sampling behind the last layers of a step with shapes. Draws its tokens now unless
        it waits.
        """
        assert step.plan.shapes is not None
        for seat in step.plan.shapes.seats:
            rank, slot = divmod(seat.slot, self._device.limits.slots_per_rank)
            max_len = self._device.buckets.seat.size
            told = pack_seat(slot, seat.prompt, seat.output, seat.biases, max_len)
            self._in_order(partial(self._calls.seat, rank, told))
        if step.plan.waits:
            self._undrawn = _Undrawn(key, step, Future())
            return self._undrawn.result
        vocab = self._device.model.config.vocab_size
        return self._draw(key, step, everything(len(step.rank), vocab))

    def draw(self, allowed: Int[np.ndarray, "B W"]) -> None:
        """Draws the tokens of the step that waits."""
        undrawn, self._undrawn = self._undrawn, None
        assert undrawn is not None, "no step waits to be drawn"
        key, step, result = undrawn
        self._draw(key, step, allowed).add_done_callback(lambda read: _pass_on(read, result))

    def _draw(
        self, key: Key, step: ByRank, allowed: Int[np.ndarray, "B W"]
    ) -> "Future[StepResult]":
        assert step.plan.shapes is not None
        num_rows = self._device.buckets.rows(key)
        at = step.row_at(num_rows)
        shapes = np.zeros((step.num_ranks * num_rows, NUM_SHAPE_COLUMNS), np.int32)
        shapes[at] = step.plan.shapes.rows
        limited = (allowed != -1).any(axis=1)  # others are many words that say nothing
        draw = partial(self._calls.draw, shapes, at[limited], allowed[limited])
        return self._launch(lambda: self._results.start(draw(), key, step))


def _pass_on(read: "Future[Any]", result: "Future[Any]") -> None:
    if not result.set_running_or_notify_cancel():
        return
    if (error := read.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(read.result())
