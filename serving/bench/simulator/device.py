"""A runner whose steps only pass simulated time."""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jmoe.api import Model, resolve
from jmoe.config import read_config
from jmoe.experts import ExpertPool, UnitedExperts, make_table
from jmoe.weights import ResidentWeights, Weights
from serving.bench.simulator.step_times import StepTimes
from serving.execution.executor import LoadsWays, StepExecutor
from serving.plan import Limits, StepControl, StepPlan, StepResult


@dataclass(frozen=True)
class Machine:
    """The server's sizes and what its steps take."""

    times: StepTimes
    num_layers: int
    visits_per_layer: int
    overhead_s: float = 0.0  # from client to engine and back, of a first token
    speeds: Sequence[tuple[float, float]] = ((0.0, 1.0),)
    """From when on (s) it is how fast, over the recorded one."""
    noise: float = 1.0  # how far moods lie from 1, over the recorded ones


@dataclass
class SimulatedDevice(StepExecutor):
    """Runs launches one after another, each as long as the machine takes in its mood.

    See serving.execution.executor. Tokens are all 0, and of the visits that may be degraded, the
    share that the threshold says is; with a `runner`, which computes the launches, both are real.
    """

    limits: Limits
    machine: Machine
    seed: int = 0
    runner: StepExecutor | None = None
    compilations_since_ready: int = 0
    num_programs: int = 0
    busy_s: float = 0.0
    _busy_until: float = 0.0
    _at: int = 0

    def __post_init__(self) -> None:
        moods = self.machine.times.moods
        self._at = int(np.random.default_rng(self.seed).integers(len(moods)))

    def launch(self, plan: StepPlan, control: StepControl) -> "Future[StepResult]":
        """See Executor."""
        machine, size = self.machine, plan.size
        share = 1 - control.threshold_percent / 100 if control.strategy else 0.0
        degraded = (size - plan.num_exempt) * share / size
        layers = plan.num_layers / self.limits.num_layers
        seconds = machine.times.expected_s(plan.phase, size, degraded, layers)
        loop = asyncio.get_running_loop()
        starts_at = max(self._busy_until, loop.time())
        now = bisect_right(machine.speeds, starts_at, key=lambda piece: piece[0]) - 1
        seconds *= self._mood() / machine.speeds[now][1]
        self._busy_until = starts_at + seconds
        self.busy_s += seconds
        if self.runner is None:
            result = self._result(plan, share)
        else:
            result = self.runner.launch(plan, control).result()
        future: Future[StepResult] = Future()
        loop.call_at(self._busy_until, _finish, future, result)
        return future

    def load_way(self, way: int, layer: int) -> None:
        """See LoadsWays. Takes no time; without a runner there is nothing to load."""
        if isinstance(self.runner, LoadsWays):
            self.runner.load_way(way, layer)

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """See Executor. Nothing fails."""

    def close(self) -> None:
        """See Executor. There is nothing to release."""

    def _mood(self) -> float:
        moods = self.machine.times.moods
        self._at = (self._at + 1) % len(moods)
        return max(0.2, 1 + self.machine.noise * (float(moods[self._at]) - 1))

    def _result(self, plan: StepPlan, share: float) -> StepResult:
        visits = plan.num_layers * self.machine.visits_per_layer
        degraded = np.rint(np.where(plan.exempt, 0, plan.q_lens) * visits * share).astype(int)
        count = len(plan.rows)
        zeros = np.zeros((1, 1), np.int32)
        prompt = np.full((int(plan.q_lens.sum()), 2), -0.5) if plan.prompt_logprobs else None
        return StepResult([0] * count, [-0.5] * count, degraded.tolist(), zeros, prompt)


def _finish(future: "Future[StepResult]", result: StepResult) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(result)


def simulated_model(limits: Limits, visits_per_layer: int, ways: Collection[int]) -> Model:
    """Returns a model of the right sizes without weights, with united experts for `ways`; it takes
    token ids, and none ends an answer.
    """
    layers = limits.num_layers
    cfg = replace(
        read_config(resolve("bundled")),
        vocab_size=1 << 30,
        eos_token_ids=(),
        num_layers=layers,
        moe_layers=(True,) * layers,
        layer_attention=(),
        experts_per_token=visits_per_layer,
    )
    shapes = (layers, 1, 1, 2), (layers, 1, 1, 1), (layers, cfg.num_experts)
    gate_up, down, groups = (np.zeros(shape, np.int32) for shape in shapes)
    united = {way: UnitedExperts(way, gate_up, down, groups) for way in ways}
    pool = ExpertPool(jnp.zeros((1, 1, 2)), jnp.zeros((1, 1, 1)))
    weights = Weights({}, pool, make_table(layers, cfg.num_experts, bool(united)))
    resident = ResidentWeights(weights, united)
    return Model("simulated", Path(), cfg, jnp.dtype(jnp.float32), resident)
