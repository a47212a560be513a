"""A model served by asynchronous workers: what a stage costs, part by part, and what waits where.

`python -m benchmarks.aep_served [--json FILE] [--out FOLDER]`: the bundled model on this CPU, 2
attention workers and 3 expert workers in threads of one process, requests that come as fast as
they are answered. The table is the paper's Figure 13: where the time of a stage goes, as its
worker's thread sees it (others run meanwhile, and the cores are shared). The picture is its Figure
11: rows that wait before each layer of each worker, over time.
"""

import argparse
import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.command import write_figures
from serving.bench.facts import commit
from serving.config import AsynchronousConfig, BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.execution.aep.attention import AttentionWorker
from serving.execution.aep.devices import AttentionPrograms, ExpertPrograms
from serving.execution.aep.experts import ExpertWorker
from serving.execution.aep.queues import MicroQueues
from serving.execution.aep.recorder import Stages
from serving.observer import Observer
from serving.request import SamplingParams

NUM_CALLERS, NUM_TOKENS = 24, 40
SETTINGS = EngineConfig(
    mode="aep",
    dtype="float32",
    max_num_seqs=NUM_CALLERS,
    max_model_len=256,
    page_size=16,
    max_prefill_tokens=64,
    max_prefill_seqs=8,
    brownout=BrownoutConfig(strategy="zero", salc=False),
    asynchronous=AsynchronousConfig(attention=2, experts=3),
)
PARTS = {  # class and method of each row of the table; the rest of a stage is bookkeeping
    "attention": {
        "pick a layer": (MicroQueues, "pick"),
        "pack rows": (AttentionWorker, "_packed"),
        "compute, and read which experts": (AttentionPrograms, "attend"),
        "send rows to experts": (AttentionWorker, "_ask"),
        "tokens of the last layer": (AttentionPrograms, "leave"),
    },
    "experts": {
        "pick a layer": (MicroQueues, "pick"),
        "compute": (ExpertPrograms, "compute"),
        "send parts back": (ExpertWorker, "_return"),
    },
}


class Clock:
    """Adds up what methods take, by the thread's worker kind and part, inside of stages."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)

    def watch(self, owner: Any, method: str, kind: str | None, part: str) -> Callable[[], None]:
        """Times a method from now on; returns what undoes that."""
        inner = getattr(owner, method)

        def timed(this: Any, *args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            found = inner(this, *args, **options)
            if part == "compute":
                jax.block_until_ready(found)  # the host would go on; who is asked, waits here
            if found is None and method in ("advance", "pick"):
                return None  # no stage ran
            own = kind or ("attention" if this.counts.shape[1] == 2 else "experts")
            self.seconds[own, part].append(time.perf_counter() - began)
            return found

        setattr(owner, method, timed)
        return lambda: setattr(owner, method, inner)


class Waits(Observer):
    """Keeps all that workers ran."""

    def __init__(self) -> None:
        self.found: dict[str, list[Stages]] = defaultdict(list)

    def stages_ran(self, stages: Stages) -> None:
        """See Observer."""
        self.found[stages.worker].append(stages)


async def serve(waits: Waits, clock: Clock, requests: int) -> float:
    """Serves, and returns the tokens a second."""
    engine = await Engine.start(SETTINGS, observer=waits, progress=lambda *_: None)
    rng, undo = random.Random(0), []

    async def caller() -> None:
        for _ in range(requests):
            prompt = [rng.randrange(500) for _ in range(rng.randrange(4, 60))]
            sampling = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
            async for _ in engine.generate(prompt, sampling):
                pass

    for kind, parts in PARTS.items():
        for part, (owner, method) in parts.items():
            if owner is not MicroQueues:
                undo.append(clock.watch(owner, method, kind, part))
        undo.append(clock.watch(type_of(kind), "advance", kind, "the whole stage"))
    undo.append(clock.watch(MicroQueues, "pick", None, "pick a layer"))
    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(NUM_CALLERS)))
    took_s = time.perf_counter() - began
    for each in reversed(undo):
        each()
    await asyncio.sleep(1.1)  # the newest stages are told of within a second
    await engine.stop()
    return NUM_CALLERS * requests * NUM_TOKENS / took_s


def type_of(kind: str) -> type:
    """The worker's class."""
    return AttentionWorker if kind == "attention" else ExpertWorker


def costs(clock: Clock) -> dict[str, dict[str, float]]:
    """Mean milliseconds of a stage by part, of each kind of worker."""
    found = {}
    for kind, parts in PARTS.items():
        stages = len(clock.seconds[kind, "the whole stage"])
        of_kind = {part: 1e3 * sum(clock.seconds[kind, part]) / stages for part in parts}
        whole = 1e3 * sum(clock.seconds[kind, "the whole stage"]) / stages
        of_kind["bookkeeping"] = whole - sum(of_kind.values())
        found[kind] = of_kind | {"the whole stage": whole}
    return found


def draw(waits: Waits, path: Path, seconds: float = 2.0) -> None:
    """Rows that wait by layer, of each worker, in the middle of the run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(waits.found), 1, figsize=(9, 1.6 * len(waits.found)))
    every = [np.concatenate([s.began_at for s in all_of]) for all_of in waits.found.values()]
    middle = median(np.concatenate(every))
    image = None
    for axis, name in zip(axes, sorted(waits.found), strict=True):
        at = np.concatenate([s.began_at for s in waits.found[name]])
        waiting = np.concatenate([s.waiting for s in waits.found[name]])
        bins = np.linspace(middle, middle + seconds, 201)
        index = np.clip(np.searchsorted(at, bins[:-1], side="right") - 1, 0, len(at) - 1)
        extent = (0.0, seconds, -0.5, waiting.shape[1] - 0.5)
        image = axis.imshow(
            waiting[index].T, aspect="auto", origin="lower", extent=extent, cmap="viridis", vmin=0
        )
        axis.set_ylabel(f"{name}\nlayer")
        axis.set_yticks(range(waiting.shape[1]))
        figure.colorbar(image, ax=axis, label="rows")
        if name != max(waits.found):
            axis.set_xticklabels([])
    axes[0].set_title("Rows that wait before each layer, as each stage began")
    axes[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Prints the table, writes figures and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=6, help="of each caller, one by one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path, help="folder for the picture")
    args = parser.parse_args()
    waits, clock = Waits(), Clock()
    rate = asyncio.run(serve(waits, clock, args.requests))
    found = costs(clock)
    table = Table(title=f"milliseconds of a stage, mean; {rate:.0f} tokens a second")
    for column in ("worker", "part", "ms", "share"):
        table.add_column(column)
    for kind, parts in found.items():
        for part, ms in parts.items():
            share = f"{ms / parts['the whole stage']:.0%}"
            table.add_row(kind, part, f"{ms:.3f}", share)
    Console(width=100).print(table)
    if args.json:
        write_figures(args.json, {"commit": commit(), "tokens_per_s": rate, "ms": found})
    if args.out:
        draw(waits, args.out / "async-queues.png")


if __name__ == "__main__":
    main()
