"""The real engine over a device that is simulated, on a clock that is simulated.

Scheduler, policies, controllers and admission are the server's own objects. What a step takes is
drawn from a recording of a live server (`jmoe serve --timeline FILE`), so that a policy or a
controller is compared over many seeds in seconds.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np

from jmoe.api import resolve
from jmoe.checkpoint import config_of
from jmoe.family import Family
from jmoe.tokenizer import Tokenizer
from serving.bench.loadgen import play
from serving.bench.results import Run
from serving.bench.simulated_time import SimulatedLoop
from serving.bench.simulator.device import Machine, SimulatedDevice, simulated_model
from serving.bench.simulator.step_times import StepTimes, read_steps
from serving.bench.workload import Arrival
from serving.config import AuditConfig, EngineConfig
from serving.control.losses import Curves
from serving.engine import Engine
from serving.errors import ServingError
from serving.execution.executor import StepExecutor
from serving.execution.fitting import limits_of
from serving.frontend import convert
from serving.frontend.access import ANYBODY
from serving.frontend.reports import report
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.request import BrownoutChange


class Served(NamedTuple):
    """Models that answer, with what computes their steps, as `serving.startup.prepare` has them."""

    family: Family
    runner: StepExecutor | None  # None: tokens are all 0
    losses: Curves = ()


class SimulatedServer:
    """A server on a simulated machine, and its client: it has calls of `serving.client.Client`.

    Prompts must be token ids. To be used in an event loop with simulated time; the engine runs
    while the `async with` block does.
    """

    def __init__(
        self,
        machine: Machine,
        config: EngineConfig,
        seed: int = 0,
        exempt_share: float = 0.0,
        served: Served | None = None,
    ) -> None:
        """`exempt_share` of the requests, drawn by `seed`, allow no brownout. The models of
        `served` compute what is answered, which takes no simulated time.
        """
        clock = asyncio.get_running_loop().time
        limits = limits_of(config, machine.num_layers)
        if served is None:
            ways = {config.brownout.way, *config.brownout.ways} - {0}
            model = simulated_model(limits, machine.visits_per_layer, ways)
            served = Served(Family.of(model), None)
        family, runner, losses = served
        self.device = SimulatedDevice(limits, machine, seed, runner)
        config = replace(config, watchdog_s=0, audit=AuditConfig(share=0))  # nothing to score
        self.engine = Engine(config, self.device, family, clock=clock, losses=losses)
        if runner is not None and (way := self.engine.slo.way):
            for model in family:
                model.use_way(way)  # a server before may have left another
        self._overhead_s, self._exempt_share = machine.overhead_s, exempt_share
        self._rng = np.random.default_rng(seed)

    async def __aenter__(self) -> "SimulatedServer":
        self.engine.run()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.engine.stop()
        if error is None:
            self.engine.scheduler.check_idle()

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: pb.SamplingParams | None = None,
        *,
        priority: pb.Priority = pb.PRIORITY_UNSPECIFIED,
        model: str = "",
        timeout_s: float | None = None,
        allow_brownout: bool = True,
    ) -> AsyncIterator[pb.GenerateResponse]:
        """See Client."""
        is_exempt = self._rng.random() < self._exempt_share
        await asyncio.sleep(self._overhead_s)
        outputs = self.engine.generate(
            prompt,
            convert.sampling(sampling or pb.SamplingParams()),
            allow_brownout=allow_brownout and not is_exempt,
            priority=ANYBODY.class_of(convert.priority(pb.GenerateRequest(priority=priority))),
            timeout_s=timeout_s,
            model=model,
        )
        try:
            async for out in outputs:
                yield convert.response(out)
        except ServingError as error:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(report(error).grpc, nothing, nothing, str(error)) from None

    async def server_info(self) -> pb.ServerInfo:
        """See Client."""
        return pb.ServerInfo(
            status=self.engine.status, max_num_seqs=self.engine.config.max_num_seqs
        )

    async def get_brownout(self) -> pb.BrownoutState:
        """See Client."""
        return convert.brownout_state(self.engine.get_brownout())

    async def set_brownout(self, **change: Any) -> pb.BrownoutState:
        """See Client."""
        return convert.brownout_state(await self.engine.set_brownout(BrownoutChange(**change)))

    async def stats(self) -> pb.Stats:
        """See Client."""
        return convert.stats(self.engine.stats())


def run_simulated[T](
    machine: Machine,
    config: EngineConfig,
    drive: Callable[[SimulatedServer], Awaitable[T]],
    seed: int = 0,
    exempt_share: float = 0.0,
    served: Served | None = None,
) -> T:
    """Runs `drive` with a server of its own, in an event loop with simulated time."""

    async def run() -> T:
        async with SimulatedServer(machine, config, seed, exempt_share, served) as server:
            return await drive(server)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(run())


def simulate(
    machine: Machine,
    config: EngineConfig,
    arrivals: Sequence[Arrival],
    seed: int = 0,
    exempt_share: float = 0.0,
) -> Run:
    """Plays `arrivals`, whose prompts are token ids, to the end of the last answer; a share of them
    allows no brownout.
    """

    async def play_all(server: SimulatedServer) -> Run:
        return await play(
            server, arrivals, time_limit_s=math.inf, sample_every_s=config.salc.interval_s
        )

    return run_simulated(machine, config, play_all, seed, exempt_share)


def recorded_machine(timeline: Path, config: EngineConfig) -> Machine:
    """Returns the machine that the timeline of a server shows, which was started with `config`, or
    a table of its steps; its speed is taken to be steady.

    Raises ValueError for a file that is neither.
    """
    cfg = config_of(resolve(config.model))
    steps = read_steps(timeline, cfg.num_layers, cfg.experts_per_token)
    decode = tuple(sorted({*config.decode_buckets, *config.late_decode_buckets}))
    prefill = tuple(sorted({*config.prefill_buckets, *config.late_prefill_buckets}))
    buckets = {"prefill": prefill, "decode": decode}
    times = StepTimes.fit(steps, buckets, steady=True)
    return Machine(times, cfg.num_layers, cfg.experts_per_token)


def as_tokens(samples: Sequence[Arrival]) -> list[Arrival]:
    """Returns tasks with prompts of the bundled model's token ids, and answers as long as the right
    ones and their end.

    A simulated answer is never the right one, and none is expected.
    """
    tokenizer = Tokenizer.load(resolve("bundled"))
    assert tokenizer is not None  # the bundled model has one
    return [
        replace(
            sample,
            prompt=tuple(tokenizer.encode(str(sample.prompt))),
            max_new_tokens=len(tokenizer.encode(str(sample.answer))) + 1,
            answer=None,
        )
        for sample in samples
    ]
