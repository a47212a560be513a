"""Counts what XLA compiles: nothing, once a server is ready."""

from typing import Any

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


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
        if event == COMPILE_EVENT:
            self.before += not self._ready
            self.since_ready += self._ready
