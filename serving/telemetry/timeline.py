"""A timeline of an engine in Chrome's trace format, for Perfetto or chrome://tracing.

One track shows what the host plans and launches, one what the device runs; each request that
finishes has its own, under its class. Asynchronous workers have a track each, and a count of the
rows that wait before each of their layers. `Timeline` is an observer like any other: `jmoe serve
--timeline FILE` has one, and so may a notebook: `Engine.start(config, observer=timeline)`, then
`timeline.write(path)`.
"""

import json
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from serving.errors import SettingsError
from serving.execution.executor import Stages
from serving.plan import StepResult
from serving.request import Output, Priority
from serving.scheduling.sequence import SequenceState
from serving.scheduling.step import ScheduledStep
from serving.telemetry.observer import Observer

MAX_EVENTS = 100_000
"""How many events are kept; the newest ones."""

HOST, DEVICE = 1, 2  # tracks
FIRST_WORKER = 3
_PROCESS = 1
_TRACKS = {HOST: "host: plan and launch", DEVICE: "device: layers of steps"}


class Timeline(Observer):
    """An observer that keeps the newest events and writes them to a file."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        """Keeps the newest `max_events`."""
        super().__init__()
        self._events: deque[list[dict[str, Any]]] = deque(maxlen=max_events)
        self._num_requests = 0
        self._workers: dict[str, int] = {}  # tracks of asynchronous workers, by name

    def __len__(self) -> int:
        """Returns the number of events that are kept."""
        return len(self._events)

    def step_launched(self, step: ScheduledStep, began_at: float, now: float) -> None:
        """See Observer."""
        parked, happened = step.parks, list[dict[str, Any]]()
        if parked is not None:
            args = {"phase": parked.phase, "rows": len(parked.rows), "layer": parked.first_layer}
            happened.append(_instant("park", began_at, args))
        if step.num_joined:
            args = {"phase": step.phase, "rows": step.num_joined, "layer": step.first_layer}
            happened.append(_instant("join", began_at, args))
        launch = _span(HOST, f"launch {step.phase}", began_at, now, {"layers": _layers(step)})
        self._events.append([launch, *happened])

    def step_read(
        self, step: ScheduledStep, result: StepResult, started_at: float, now: float
    ) -> None:
        """See Observer. Skipped for asynchronous workers, whose steps overlap; stages are shown
        instead.
        """
        if self._workers:
            return
        best_effort = sum(s.request.priority is Priority.BEST_EFFORT for s in step.sequences)
        args = {
            "layers": _layers(step),
            "rows": len(step.rows),
            "best_effort_rows": best_effort,
            "tokens": step.size,
            "decodes": step.num_decodes if step.phase == "prefill" else len(step.rows),
            "exempt_tokens": step.num_exempt,
            "degraded_visits": sum(result.degraded),
        }
        if step.control is not None:
            args |= step.control._asdict()
        self._events.append([_span(DEVICE, step.phase, started_at, now, args)])

    def stages_ran(self, stages: Stages) -> None:
        """See Observer. Adds to a track for each worker, with how many rows wait before its
        layers.
        """
        track = self._workers.setdefault(stages.worker, FIRST_WORKER + len(self._workers))
        columns = stages.layers, stages.rows, stages.began_at, stages.ended_at, stages.waiting
        for layer, rows, began_at, ended_at, waiting in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            args = {"layer": layer, "rows": rows, "waiting": sum(waiting)}
            counted = {f"layer {number}": count for number, count in enumerate(waiting)}
            self._events.append(
                [
                    _span(track, f"layer {layer}", began_at, ended_at, args),
                    _event("C", f"{stages.worker} waiting", began_at, tid=track, args=counted),
                ]
            )

    def request_finished(self, sequence: SequenceState, output: Output, now: float) -> None:
        """See Observer."""
        request, usage = sequence.request, output.usage
        whole = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish_reason": output.finish_reason,
        }
        own = {"cat": request.priority.value, "id": self._num_requests, "tid": HOST}
        self._num_requests += 1
        arrived_at, name = sequence.arrived_at, request.request_id
        self._events.append(
            [
                _event("b", name, arrived_at, args=whole, **own),
                _event("b", "queued", arrived_at, **own),
                _event("e", "queued", sequence.began_at, **own),
                _event("e", name, now, **own),
            ]
        )

    def write(self, path: Path) -> None:
        """Writes the kept events to a JSON file. Raises SettingsError if it cannot be written."""
        text = json.dumps({"traceEvents": list(self._named())}, allow_nan=False, ensure_ascii=False)
        try:
            # A request's id may be half a surrogate pair where a caller is in this process.
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise SettingsError(
                f"timeline is {str(path)!r}: {error.strerror}; name a file in a folder that is "
                "there and can be written to"
            ) from None

    def _named(self) -> Iterator[dict[str, Any]]:
        names = [("process_name", HOST, "jmoe")]
        names += [("thread_name", track, name) for track, name in _TRACKS.items()]
        names += [("thread_name", track, name) for name, track in self._workers.items()]
        for what, track, name in names:
            yield {"ph": "M", "name": what, "pid": _PROCESS, "tid": track, "args": {"name": name}}
        yield from chain.from_iterable(self._events)


def _event(kind: str, name: str, at: float, **fields: Any) -> dict[str, Any]:
    """Makes an event. `at` is in seconds of the engine's clock; the format has microseconds.

    Readers use whole nanoseconds: adjacent spans must be rounded alike, or they overlap and one of
    them is dropped.
    """
    return {"ph": kind, "name": name, "ts": _ns(at) / 1000, "pid": _PROCESS, **fields}


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


def _span(track: int, name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    return _event("X", name, start, dur=(_ns(end) - _ns(start)) / 1000, tid=track, args=args)


def _instant(name: str, at: float, args: dict[str, Any]) -> dict[str, Any]:
    return _event("i", name, at, tid=HOST, s="t", args=args)


def _layers(step: ScheduledStep) -> str:
    return f"{step.first_layer}-{step.stop_layer - 1}"
