"""Expert load for the live page: a byte for each expert of each layer."""

import base64
from collections.abc import Callable
from typing import Any

import numpy as np

LEVELS = 255


class ExpertLoad:
    """Rows that experts computed between two calls of `look`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: tuple[float, np.ndarray] | None = None

    def look(self, rows: np.ndarray | None, num_routed: int) -> dict[str, Any] | None:
        """Returns the load since the last call; None on the first, or before any step was read.

        `rows [layers, E]` are counts since the start; the first `num_routed` experts are the routed
        ones. `load` is base64 of a byte per expert, layer by layer: LEVELS * sqrt(rows / largest),
        rounded up, so that only an idle expert has 0.
        """
        if rows is None:
            return None
        now = self._clock()
        last, self._last = self._last, (now, rows)
        if last is None or last[1].shape != rows.shape or now <= last[0]:
            return None
        since, took_s = rows - last[1], now - last[0]
        most = int(since.max(initial=0))
        levels = np.ceil(LEVELS * np.sqrt(since / max(1, most))).astype(np.uint8)
        layers, experts = rows.shape
        return {
            "layers": layers,
            "experts": experts,
            "routed": min(num_routed, experts),
            "most_rows_per_s": most / took_s,
            "load": base64.b64encode(levels.tobytes()).decode(),
        }
