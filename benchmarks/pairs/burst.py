"""The demo's burst on the bundled model, and what brownout cost its answers: each degraded one is
scored again, exactly, once the server is idle.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.pairs.harness import Figures, Play
from jmoe.api import resolve
from jmoe.tokenizer import Tokenizer
from serving.bench.calibrate import calibrate
from serving.bench.demo import NATIVE, DemoConfig, rates, wait_idle
from serving.bench.launch import running_server
from serving.bench.loadgen import play as play_load
from serving.bench.results import violations
from serving.bench.variants import Variant, use_variant
from serving.bench.workload import (
    burst_pieces,
    load_tasks,
    piecewise_poisson_times,
    schedule,
    shuffled,
)
from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

SCORED_AT_ONCE = 16


class _Noting(Client):
    """Keeps prompt, tokens and log-probabilities of the answers with degraded visits."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.degraded: list[tuple[Sequence[int], list[int], list[float]]] = []

    async def noted(self, call: Any, prompt: Sequence[int]) -> AsyncIterator[pb.GenerateResponse]:
        tokens, logprobs, visits = [], [], 0
        async for message in call:
            tokens += message.token_ids
            logprobs += message.logprobs
            visits = message.usage.degraded_visits
            yield message
        if visits:
            self.degraded.append((prompt, tokens, logprobs))

    def generate(self, prompt: Any, sampling: Any = None, **options: Any) -> Any:
        """See Client; an answer's log-probabilities are asked for."""
        sampling.logprobs = True
        return self.noted(super().generate(prompt, sampling, **options), prompt)

    async def excess(self) -> list[float]:
        """Returns the log-probabilities of all degraded answers' tokens as they were drawn, above
        the exact model's.
        """
        places = asyncio.Semaphore(SCORED_AT_ONCE)

        async def score(prompt: Sequence[int], tokens: list[int]) -> list[float]:
            sampling = pb.SamplingParams(max_new_tokens=1, prompt_logprobs=True)
            async with places:
                asked = [*prompt, *tokens]
                call = super(_Noting, self).generate(asked, sampling, allow_brownout=False)
                messages = [message async for message in call]
            return list(messages[0].prompt_logprobs)[-len(tokens) :]

        exact = await asyncio.gather(*(score(one[0], one[1]) for one in self.degraded))
        return [
            float(drawn - scored)
            for (*_, logprobs), scores in zip(self.degraded, exact, strict=True)
            for drawn, scored in zip(logprobs, scores, strict=True)
        ]


@asynccontextmanager
async def bursts(
    settings: Mapping[str, Mapping[str, Any] | None], dry: bool
) -> AsyncIterator[Play]:
    """Starts the demo's server; a play is the demo's burst under fields of `SetBrownoutRequest`, or
    without brownout (None).

    Objectives and load are those of one calibration. Settings meet the same requests in a round.
    """
    config = DemoConfig(segment_s=1.5 if dry else 15.0, calibration_s=0.5 if dry else 6.0)
    tokenizer = Tokenizer.load(resolve("bundled"))
    assert tokenizer is not None
    tasks = [
        replace(task, prompt=tuple(tokenizer.encode(str(task.prompt))))
        for task in load_tasks(config.tasks)
    ]
    async with AsyncExitStack() as stack:
        log = Path(stack.enter_context(TemporaryDirectory())) / "server.log"
        native = {NATIVE: os.environ.get(NATIVE, "0")}
        address, _ = await stack.enter_async_context(
            running_server(config.server, log, config.startup_timeout_s, environment=native)
        )
        client = _Noting(address)
        await stack.enter_async_context(client)
        await client.wait_ready(config.startup_timeout_s)
        own = await client.get_brownout()
        known = await calibrate(client, shuffled(tasks, 0), window_s=config.calibration_s)

        async def play(name: str, number: int) -> Figures:
            times = piecewise_poisson_times(
                burst_pieces(config.segment_s, *rates(known, config), config.burst_at), number
            )
            await wait_idle(client, config.pause_s)
            change = settings[name]
            variant = Variant(name, "", change is not None, {"keep": own.keep, **(change or {})})
            await use_variant(client, variant, own, "partial", known.slo)
            client.degraded.clear()
            arrivals = schedule(shuffled(tasks, number), times)
            run = await play_load(client, arrivals, time_limit_s=4 * config.segment_s)
            await wait_idle(client, config.pause_s)
            records = run.due(config.segment_s * config.burst_at)
            late, excess = violations(records, known.slo), await client.excess()
            visits = sum(record.expert_visits for record in records)
            tokens = sum(len(record.token_s) for record in run.records)
            return {
                "loss, millinats": 1e3 * sum(excess) / tokens,
                "late_first_share": late["ttft_violation_rate"] or 0.0,
                "late_other_share": late["itl_violation_rate"] or 0.0,
                "degraded_share": sum(r.degraded_visits for r in records) / max(1, visits),
                "right_share": sum(bool(r.correct) for r in records) / max(1, len(records)),
            }

        yield play
