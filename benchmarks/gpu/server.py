"""jmoe's server with random weights made on the device, and a probe in it.

`python -m benchmarks.gpu.server --stats FILE [--dry-run] [--size KEY=VALUE] [--set KEY=VALUE ...]`.
All else is the server that `jmoe serve` starts. SIGUSR1 makes it write its probe's counters to
FILE.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.gpu.sizes import DRY, SIZE_HELP, Sizes, changed
from serving.cli.options import overrides
from serving.frontend import server
from serving.request import Priority
from serving.settings import reading as settings
from serving.telemetry.observer import Observer


class Probe(Observer):
    """Counts of steps by phase since the start, for a client to take differences of."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.asked = path, 0
        self.engine: Any = None
        self.phases: dict[str, Counter[str]] = {"prefill": Counter(), "decode": Counter()}
        self.ls_waits_s: list[float] = []  # of latency-sensitive requests, in the order they began

    def step_read(self, step: Any, result: Any, started_at: float, now: float) -> None:
        """See Observer. A step is taken to have begun when the device could begin it. A step that
        comes in parts is counted with the last part.
        """
        counts, rows = self.phases[step.phase], len(step.rows)
        if step.is_last:
            counts["steps"] += 1
            counts["rows"] += rows
            counts["tokens"] += step.size
        counts["busy_s"] += now - started_at  # type: ignore[assignment]
        counts["active_experts"] += np.count_nonzero(result.expert_rows) / len(result.expert_rows)  # type: ignore[assignment]
        whole = step.is_last and step.is_first
        if whole and step.phase == "decode" and rows == self.engine.config.max_num_seqs:
            counts["full_steps"] += 1
            counts["full_s"] += now - started_at  # type: ignore[assignment]

    def requests_began(self, queue_s: np.ndarray, wait_s: np.ndarray, priority: Priority) -> None:
        """See Observer. What the latency-sensitive wait for is the step, or part, under way."""
        super().requests_began(queue_s, wait_s, priority)
        if priority is Priority.LATENCY_SENSITIVE:
            self.ls_waits_s += wait_s.tolist()

    def answer(self) -> None:
        """Writes the counters; the number of the answer tells it from the one before."""
        self.asked += 1
        stats = self.engine.stats()
        found = {
            "answer": self.asked,
            "at_s": time.monotonic(),
            "phases": {phase: dict(counts) for phase, counts in self.phases.items()},
            "compilations_since_ready": stats.compilations_since_ready,
            "ls_waits_s": self.ls_waits_s,
        }
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(found), encoding="utf-8")
        os.replace(part, self.path)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stats", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--set", action="append", default=[], dest="pairs")
    parser.add_argument("--size", action="append", default=[], help=SIZE_HELP)
    args = parser.parse_args()
    sizes = changed(DRY if args.dry_run else Sizes(), args.size)
    config = settings.load(
        "default", {"port": 0, "engine.admission": "queue", **overrides({}, args.pairs)}
    )

    def progress(what: str, done: int, total: int) -> None:
        print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

    async def start_engine() -> Any:
        # In a thread, so that health is answered while jax is imported.
        model = await asyncio.to_thread(_make, config, sizes)
        from serving.engine import Engine

        probe = Probe(args.stats)
        engine = await Engine.start(config.engine, model=model, observer=probe, progress=progress)
        probe.engine = engine
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, probe.answer)
        return engine

    uvloop.run(server.serve(config, start_engine))


def _make(config: Any, sizes: Sizes) -> Any:
    print("importing: jax", file=sys.stderr, flush=True)
    from benchmarks.gpu import models
    from serving.execution.kv_pages import claim_memory

    claim_memory(config.engine.memory_fraction)  # before the weights are drawn
    print("drawing: weights", file=sys.stderr, flush=True)
    return models.make(sizes, ways=sizes.ways)


if __name__ == "__main__":
    main()
