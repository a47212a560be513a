"""Losses of a training as JSON lines and for TensorBoard."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from jmoe.extras import need

FILE = "losses.jsonl"


def text_of(losses: Mapping[str, float]) -> str:
    """Returns losses as they are shown beside a progress bar."""
    return " ".join(f"{name} {loss:.4f}" for name, loss in losses.items())


class LossLog:
    """Writes losses to a folder: to `losses.jsonl`, and as TensorBoard's events.

    A line has `what` is trained, the `step`, `time` in seconds of the epoch, and each loss by its
    name. A run that was killed goes on in the same files; the steps since its last checkpoint
    stand there twice, the later ones count.

    Args:
        folder: made if absent; None writes nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._lines = self._events = None
        if folder is not None:
            need("train", "tensorboardX")
            from tensorboardX import SummaryWriter

            folder.mkdir(parents=True, exist_ok=True)
            self._lines = (folder / FILE).open("a", encoding="utf-8")
            # Named by the second otherwise, in which one run may follow another.
            self._events = SummaryWriter(str(folder), filename_suffix=f".{time.time_ns()}")

    def write(self, what: str, step: int, losses: Mapping[str, float]) -> None:
        """Writes the losses of a step, at once; nothing without any."""
        if self._lines is None or self._events is None or not losses:
            return
        line = {"what": what, "step": step, "time": time.time(), **losses}
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()
        for name, loss in losses.items():
            self._events.add_scalar(f"{what}/{name}".replace(", ", "/"), loss, step)
        self._events.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._lines, self._events):
            if file is not None:
                file.close()
