"""An engine whose device only passes time, alone or as a server: what the host does stays real.

`python -m benchmarks.pairs.passing_time STEP_MS [--keys-file F --tls-cert F --tls-key F]` serves
the bundled model's tokenizer with steps that last STEP_MS and write the same tokens always.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Queue
from typing import Any

import numpy as np
import uvloop

import jmoe
from serving.config import BrownoutConfig, EngineConfig, ServerConfig
from serving.engine import Engine
from serving.execution.executor import StepExecutor
from serving.execution.fitting import limits_of
from serving.execution.runner import InOrder
from serving.frontend import server
from serving.plan import Limits, StepControl, StepPlan, StepResult

BATCH = 64
PROMPT = "add 47 + 38 and 12 + 9 then say it"
CONFIG = EngineConfig(
    model="bundled",
    dtype="float32",
    max_num_seqs=BATCH,
    decode_buckets=(4, 8, 16, BATCH),  # with none that is compiled late, while others are timed
    max_model_len=256,
    prefill_company=False,  # one prompt takes as long as many, and would wait for many
    brownout=BrownoutConfig(strategy="zero", way=0),
)


class PassingTime(StepExecutor):
    """An executor whose steps last `duration_s` each, one after another, in real time.

    Its rows get `tokens`, and structured ones the first token that they are allowed.
    """

    compilations_since_ready = num_programs = 0

    def __init__(self, limits: Limits, duration_s: float, tokens: list[int]) -> None:
        self.limits, self.duration_s, self.tokens = limits, duration_s, tokens
        self._free_at = 0.0
        self._allowed: Queue[np.ndarray] = Queue()
        self._reader = InOrder("jmoe-read")

    def launch(self, plan: StepPlan, control: StepControl) -> "Future[StepResult]":
        """See Executor; the step begins when the one before it ends."""
        self._free_at = max(self._free_at, time.monotonic()) + self.duration_s
        ends_at, count = self._free_at, len(plan.rows)
        return self._reader.submit(lambda: self._read(ends_at, count, plan.waits))

    def _read(self, ends_at: float, count: int, waits: bool) -> StepResult:
        allowed = self._allowed.get() if waits else None
        time.sleep(max(0.0, ends_at - time.monotonic()))
        tokens = self.tokens[:count]
        if allowed is not None:
            self._free_at = max(self._free_at, time.monotonic())
            tokens = first_allowed(allowed)
        return StepResult(tokens, [-0.5] * count, [0] * count, np.zeros((1, 1), np.int32), None)

    def draw(self, allowed: np.ndarray) -> None:
        """See Executor."""
        self._allowed.put(allowed)

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """See Executor; nothing fails."""

    def close(self) -> None:
        """Ends the reader's thread."""
        self._reader.close()


def first_allowed(allowed: np.ndarray) -> list[int]:
    """Returns the lowest token id whose bit is set in each row; a word has 32, lowest first."""
    at = (allowed != 0).argmax(axis=1)
    words = np.take_along_axis(allowed, at[:, None], 1)[:, 0].view(np.uint32)
    lowest = np.log2(words & -words.view(np.int32)).astype(int)
    return (32 * at + lowest).tolist()


def passing_engine(duration_s: float) -> Engine:
    """Returns an engine whose steps last `duration_s`. Call it within an event loop."""
    model = jmoe.load("bundled", "float32", ways=[])
    assert model.tokenizer is not None
    tokens = model.tokenizer.encode(PROMPT * 8)[:BATCH]
    engine = Engine(CONFIG, PassingTime(limits_of(CONFIG), duration_s, tokens), model)
    engine.run()
    return engine


def main() -> None:
    """Serves until it is terminated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step_ms", type=float)
    for name in ("keys-file", "tls-cert", "tls-key"):
        parser.add_argument(f"--{name}", default="", help="as for jmoe serve")
    fields: dict[str, Any] = vars(parser.parse_args())
    duration_s = fields.pop("step_ms") / 1e3

    async def start() -> Engine:
        return passing_engine(duration_s)

    uvloop.run(server.serve(ServerConfig(port=0, engine=CONFIG, **fields), start))


if __name__ == "__main__":
    main()
