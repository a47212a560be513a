"""Counts what XLA compiles: nothing that a step waits for, once a server is ready."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

_thread = threading.local()


@contextmanager
def no_step_waits() -> Iterator[None]:
    """Keeps what this thread compiles within from being counted: no step waits for it."""
    _thread.uncounted = True
    try:
        yield
    finally:
        _thread.uncounted = False


class Compilations:
    """Counts this process's compilations from now on, until `close`."""

    def __init__(self) -> None:
        self.before, self.since_ready = 0, 0
        self._ready = False
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def ready(self) -> None:
        """Begins to count: nothing should have to be compiled from now on."""
        self._ready = True

    def close(self) -> None:
        """Stops counting."""
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILE_EVENT and not getattr(_thread, "uncounted", False):
            self.before += not self._ready
            self.since_ready += self._ready
