"""The demo's burst on the bundled model, and what brownout cost its answers: each degraded one is
scored again, exactly, once the server is idle.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.pairs.harness import Figures, Play
from jmoe.api import resolve
from jmoe.tokenizer import Tokenizer
from serving.bench import demo, workload
from serving.bench.calibrate import Calibration, calibrate, run_all_steps
from serving.bench.demo import NATIVE, DemoConfig, wait_idle
from serving.bench.launch import ready_server
from serving.bench.loadgen import Steered
from serving.bench.loadgen import play as play_load
from serving.bench.results import violations
from serving.bench.simulator.server import (
    Served,
    SimulatedServer,
    recorded_machine,
    run_simulated,
)
from serving.bench.variants import Variant, use_variant
from serving.client import Client
from serving.execution.executor import StepExecutor
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.settings.reading import load
from serving.startup.prepare import prepare

SCORED_AT_ONCE = 16


class _Noting:
    """A client that keeps prompt, tokens and log-probabilities of the answers with degraded
    visits.
    """

    def __init__(self, client: Client | SimulatedServer) -> None:
        self._client, self.get_brownout, self.stats = client, client.get_brownout, client.stats
        self.degraded: list[tuple[Sequence[int], list[int], list[float]]] = []

    async def generate(
        self, prompt: Any, sampling: Any = None, **options: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        """See Client; an answer's log-probabilities are asked for."""
        tokens, logprobs, visits = [], [], 0
        sampling.logprobs = True
        async for message in self._client.generate(prompt, sampling, **options):
            tokens += message.token_ids
            logprobs += message.logprobs
            visits = message.usage.degraded_visits
            yield message
        if visits:
            self.degraded.append((prompt, tokens, logprobs))

    async def excess(self) -> list[float]:
        """Returns the log-probabilities of all degraded answers' tokens as they were drawn, above
        the exact model's.
        """
        places = asyncio.Semaphore(SCORED_AT_ONCE)

        async def score(prompt: Sequence[int], tokens: list[int]) -> list[float]:
            sampling = pb.SamplingParams(max_new_tokens=1, prompt_logprobs=True)
            async with places:
                asked = [*prompt, *tokens]
                call = self._client.generate(asked, sampling, allow_brownout=False)
                messages = [message async for message in call]
            return list(messages[0].prompt_logprobs)[-len(tokens) :]

        exact = await asyncio.gather(*(score(one[0], one[1]) for one in self.degraded))
        return [
            float(drawn - scored)
            for (*_, logprobs), scores in zip(self.degraded, exact, strict=True)
            for drawn, scored in zip(logprobs, scores, strict=True)
        ]


class _Burst:
    """The demo's burst of the bundled tasks."""

    def __init__(self, dry: bool) -> None:
        self.config = DemoConfig(segment_s=1.5 if dry else 15.0, calibration_s=0.5 if dry else 6.0)
        tokenizer = Tokenizer.load(resolve("bundled"))
        assert tokenizer is not None
        self.tasks = [
            replace(task, prompt=tuple(tokenizer.encode(str(task.prompt))))
            for task in workload.load_tasks(self.config.tasks)
        ]

    def server(self, folder: str, *flags: str) -> AbstractAsyncContextManager[Client]:
        """Starts the demo's server, whose log goes to `folder`."""
        most_s, log = self.config.startup_timeout_s, Path(folder) / "server.log"
        native, command = {NATIVE: os.environ.get(NATIVE, "0")}, [*self.config.server, *flags]
        return ready_server(command, log, most_s, native)

    async def calibrate(self, client: Steered) -> Calibration:
        """Measures objectives and load."""
        tasks = workload.shuffled(self.tasks, 0)
        return await calibrate(client, tasks, window_s=self.config.calibration_s)

    async def play(
        self,
        client: Client | SimulatedServer,
        known: Calibration,
        own: pb.BrownoutState,
        change: Mapping[str, Any] | None,
        number: int,
    ) -> Figures:
        """Plays the burst under fields of `SetBrownoutRequest`, or without brownout (None). `own`
        is the state in which the server was started.
        """
        config = self.config
        await wait_idle(client, config.pause_s)
        variant = Variant("", "", change is not None, {"keep": own.keep, **(change or {})})
        await use_variant(client, variant, own, "partial", known.slo)
        noting = _Noting(client)
        arrivals = demo.burst(config, self.tasks, *demo.rates(known, config), number)
        run = await play_load(noting, arrivals, time_limit_s=4 * config.segment_s)
        await wait_idle(client, config.pause_s)
        records = run.due(config.segment_s * config.burst_at)
        late, excess = violations(records, known.slo), await noting.excess()
        visits = sum(record.expert_visits for record in records)
        counts = [
            sum(late[f"{prefix}{kind}_tokens"] or 0 for kind in ("first", "other"))
            for prefix in ("late_", "")
        ]
        tokens = sum(len(record.token_s) for record in run.records)
        return {
            "loss, millinats": 1e3 * sum(excess) / tokens,
            "late_share": counts[0] / max(1, counts[1]),
            "late_first_share": late["ttft_violation_rate"] or 0.0,
            "late_other_share": late["itl_violation_rate"] or 0.0,
            "degraded_share": sum(r.degraded_visits for r in records) / max(1, visits),
            "right_share": sum(bool(r.correct) for r in records) / max(1, len(records)),
        }


@asynccontextmanager
async def bursts(
    settings: Mapping[str, Mapping[str, Any] | None], dry: bool, *, levels: bool = False
) -> AsyncIterator[Play]:
    """Starts the demo's server; a play is the demo's burst under a setting, as `_Burst.play` has
    it. With `levels`, thresholds by weight are levels.

    Objectives and load are those of one calibration. Settings meet the same requests in a round.
    """
    burst = _Burst(dry)
    with TemporaryDirectory() as folder:
        flag = f"engine.brownout.levels={str(levels).lower()}"
        async with burst.server(folder, "--set", flag) as client:
            own, known = await client.get_brownout(), await burst.calibrate(client)
            yield lambda name, number: burst.play(client, known, own, settings[name], number)


@asynccontextmanager
async def replays(
    settings: Mapping[str, Mapping[str, Any] | None], dry: bool
) -> AsyncIterator[Play]:
    """Likewise on simulated time: steps take what a server's took that was timed, and the model
    computes them. Thresholds by weight are levels.
    """
    burst = _Burst(dry)
    with TemporaryDirectory() as folder:
        timeline = Path(folder) / "timeline.json"
        async with burst.server(folder, "--timeline", str(timeline)) as client:
            await run_all_steps(client, workload.shuffled(burst.tasks, 0), bursts=3 if dry else 36)
        machine = recorded_machine(timeline, load("demo").engine)
    asked = load("demo", {"engine.brownout.levels": True}).engine
    found = await asyncio.to_thread(prepare, asked, None, lambda *_: None)
    engine, family, runner, losses = found
    assert isinstance(runner, StepExecutor)
    served = Served(family, runner, losses)

    async def simulated[T](drive: Callable[[SimulatedServer], Awaitable[T]], seed: int) -> T:
        return await asyncio.to_thread(run_simulated, machine, engine, drive, seed, 0.0, served)

    known = await simulated(burst.calibrate, 0)

    async def play(name: str, number: int) -> Figures:
        async def drive(server: SimulatedServer) -> Figures:
            own = await server.get_brownout()
            return await burst.play(server, known, own, settings[name], number)

        return await simulated(drive, number)

    yield play
