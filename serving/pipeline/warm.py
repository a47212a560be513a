"""What workers run before they serve, so that nothing is compiled later."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from jmoe.packed_rows import pack_row
from serving.pipeline.devices import AttentionDevice, ExpertDevice
from serving.pipeline.queues import buckets


def warm_copies(device: AttentionDevice | ExpertDevice, rows: Any, size: int, to: Any) -> None:
    """Runs the copies of fewer rows than the `size` that there are."""
    for count in buckets(size - 1) if size > 1 else ():
        device.sent(rows, np.zeros(count, np.int32), to)


def rows_of_all_modes() -> Iterator[Int[np.ndarray, "C"]]:
    """Yields padding that is greedy, that samples, and that truncates (`sampling_mode`)."""
    yield pack_row(-1, kv_len=1)
    yield pack_row(-1, kv_len=1, temperature=1.0)
    yield pack_row(-1, kv_len=1, temperature=1.0, top_k=1)
