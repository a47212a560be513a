"""The engine: admission, the tick, and what callers hold on to.

The tick is the system on one screen (`Engine._tick`): shortly before a step ends, let the
controllers act, plan the next step and launch it; then take the results of the one that ended. The
device never waits for the host, and a request waits for as few steps as can be.
"""

import asyncio
import contextlib
import logging
import math
import random
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from jmoe.api import Model, check_tokens, load
from serving.config import EngineConfig, ServerConfig
from serving.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ServingError,
    Unavailable,
)
from serving.loader import ExpertsLoader, allowed_ways
from serving.observer import Observer
from serving.pace import Pace
from serving.policy import POLICIES
from serving.programs import Progress, limit_cpu_threads
from serving.request import (
    BrownoutChange,
    BrownoutState,
    EngineStats,
    Output,
    Priority,
    Request,
    SamplingParams,
)
from serving.runner import DeviceRunner, Runner, StepResult, within_positions
from serving.scheduler import Scheduler, StepPlan
from serving.sequence import SequenceState
from serving.settings import check
from serving.slo import SloAnalyser

log = logging.getLogger(__name__)

LONG_TEXT = 16_384
"""Characters above which a prompt is tokenized in a thread: 4 ms with the bundled tokenizer."""
RETRY_AFTER_S = 0.5
"""What an overloaded engine tells a caller before it knows its own speed."""


@dataclass
class Launched:
    """A step on the device, and its result once that is read."""

    plan: StepPlan
    result: asyncio.Future[StepResult]
    launched_at: float
    started_at: float  # when the device could begin: at its launch, or after the step before it


@dataclass
class Counters:
    """Events since start."""

    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    steps_prefill: int = 0
    steps_decode: int = 0
    expert_visits: int = 0
    degraded_visits: int = 0


class Engine:
    """Serves one model in one event loop. Make it with `await Engine.start(config)`."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        model: Model | None,
        observer: Observer | None = None,
    ) -> None:
        """An engine over a runner that is ready; `model` None (tests) takes token prompts only."""
        self.config, self.model, self.runner = config, model, runner
        self.status = "starting"
        self.observer = observer or Observer()
        ways = allowed_ways(config.brownout, model)
        self.slo = SloAnalyser(config.brownout, config.salc, way=ways[0] if ways else 0)
        self.loader = ExpertsLoader(runner, model, ways, self.slo)
        self.scheduler = Scheduler(runner.limits, POLICIES[config.policy]())
        self.counters = Counters()
        self.pace = Pace()
        self._visits_per_token = (
            model.config.num_moe_layers * model.config.experts_per_token if model else 1
        )
        self._in_flight: Launched | None = None
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="jmoe-read")
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="jmoe-tokenize")
        self._started_at = time.monotonic()
        self._loop_task: asyncio.Task[None] | None = None

    # ---- life -------------------------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        model: Model | None = None,
        observer: Observer | None = None,
        progress: Progress | None = None,
    ) -> "Engine":
        """Loads a model unless one is given, compiles and warms every program, starts the tick.

        `config.max_model_len` is cut to the positions that the model was made for.

        Raises SettingsError for a configuration that cannot be used, and what `jmoe.load` raises.
        """
        check(ServerConfig(engine=config))
        if config.policy not in POLICIES:
            have = ", ".join(POLICIES)
            raise ValueError(f"policy is {config.policy!r}; it must be one of {have}")

        def prepare() -> tuple[EngineConfig, Model, DeviceRunner]:
            limit_cpu_threads(config.cpu_threads)
            loaded = model or _load(config, progress)
            fitting = within_positions(config, loaded)
            runner = DeviceRunner(loaded, fitting)
            ways = allowed_ways(config.brownout, loaded)
            runner.start(ways[0] if ways else 0, ways, progress)
            return fitting, loaded, runner

        fitting, loaded, runner = await asyncio.to_thread(prepare)
        engine = cls(fitting, runner, loaded, observer)
        engine.run()
        return engine

    def run(self) -> None:
        """Starts the tick; the engine is ready."""
        self.status = "ready"
        self._loop_task = asyncio.create_task(self._run(), name="jmoe-tick")

    async def drain(self, timeout_s: float) -> bool:
        """Admits nothing more and lets what is there finish. True if all did in time."""
        self.status = "draining"
        try:
            async with asyncio.timeout(timeout_s):
                while self.scheduler.waiting or self.scheduler.running:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Aborts what is left and ends the tick. Safe to call again."""
        self.status = "stopped"
        self._fail_all(Aborted("the engine stopped"))
        if self._loop_task is not None:
            self._loop_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop_task
            self._loop_task = None
            self._reader.shutdown(wait=True)
            self._tokenizing.shutdown(wait=False, cancel_futures=True)
            self.runner.close()

    # ---- callers ----------------------------------------------------------------------------

    def check_admission(self) -> None:
        """Raises Unavailable or Overloaded; cheap, and before anything is tokenized."""
        if self.status != "ready":
            raise Unavailable(f"the engine is {self.status}; try another replica or come back")
        waiting = len(self.scheduler.waiting) - self.scheduler.num_free_slots
        if waiting >= self.config.max_queue_len:
            self.counters.rejected += 1
            raise Overloaded(
                f"{len(self.scheduler.waiting)} requests wait already; try again later",
                self.observer.queue_drain_s(len(self.scheduler.waiting)) or RETRY_AFTER_S,
            )

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        allow_brownout: bool = True,
        priority: Priority = Priority.LATENCY_SENSITIVE,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Output]:
        """Streams a request's outputs; the last one has a `finish_reason`.

        Closing the iterator aborts the request and frees its pages.

        Raises InvalidRequest, Overloaded, Unavailable, DeadlineExceeded, or Aborted.
        """
        self.check_admission()
        arrived_at = time.monotonic()
        request = Request(
            request_id or uuid.uuid4().hex,
            prompt,
            sampling or SamplingParams(),
            allow_brownout,
            priority,
            timeout_s,
        )
        sequence = self._admit(request, await self._tokens(prompt), arrived_at)
        try:
            while True:
                output = await sequence.outputs.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._abandon(sequence)

    def _admit(self, request: Request, prompt: list[int], arrived_at: float) -> SequenceState:
        sampling, config = request.sampling, self.config
        total = len(prompt) + sampling.max_new_tokens
        if total > config.max_model_len:
            raise InvalidRequest(
                f"prompt ({len(prompt)} tokens) and max_new_tokens ({sampling.max_new_tokens}) "
                f"make {total} positions; this server has {config.max_model_len}"
            )
        if self.model is not None:
            try:
                check_tokens(prompt, self.model.config.vocab_size)
            except ValueError as error:
                raise InvalidRequest(str(error)) from None
        limits = self.runner.limits
        if limits.pages_for(total) > limits.num_pages:
            raise InvalidRequest(
                f"{total} positions need {limits.pages_for(total)} KV pages; "
                f"this server has {limits.num_pages}"
            )
        if sampling.stop and (self.model is None or self.model.tokenizer is None):
            raise InvalidRequest("stop strings need a tokenizer; this model has none")
        stops = set(sampling.stop_token_ids)
        if self.model is not None and not sampling.ignore_eos:
            stops |= set(self.model.config.eos_token_ids)
        sequence = SequenceState(
            request,
            prompt,
            seed=random.getrandbits(64) if sampling.seed is None else sampling.seed,
            arrived_at=arrived_at,
            stop_token_ids=frozenset(stops),
            tokenizer=None if self.model is None else self.model.tokenizer,
        )
        if request.timeout_s is not None:
            sequence.deadline = asyncio.get_running_loop().call_later(
                request.timeout_s, self._expire, sequence
            )
        self.scheduler.add(sequence)
        self._work.set()
        return sequence

    async def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        tokenizer = None if self.model is None else self.model.tokenizer
        if isinstance(prompt, str):
            if tokenizer is None:
                raise InvalidRequest("this model has no tokenizer; send token ids")
            if len(prompt) > LONG_TEXT:  # others' steps go on meanwhile; one such text at a time
                loop = asyncio.get_running_loop()
                tokens = await loop.run_in_executor(self._tokenizing, tokenizer.encode, prompt)
                self.check_admission()
            else:
                tokens = tokenizer.encode(prompt)
        else:
            tokens = list(prompt)
        if not tokens:
            raise InvalidRequest("the prompt is empty; send at least one token")
        return tokens

    def _expire(self, sequence: SequenceState) -> None:
        self._end(sequence, DeadlineExceeded(f"not finished after {sequence.request.timeout_s} s"))

    def _abandon(self, sequence: SequenceState) -> None:
        """The caller is gone: an unfinished request is aborted."""
        if sequence.deadline is not None:
            sequence.deadline.cancel()
        if not sequence.done:
            self.counters.aborted += 1
            self._retire(sequence)

    def _end(self, sequence: SequenceState, error: ServingError) -> None:
        """Ends a request with an error its caller sees."""
        if not sequence.done:
            self.counters.aborted += 1
            self._retire(sequence)
            sequence.outputs.put_nowait(error)

    def _retire(self, sequence: SequenceState) -> None:
        self.scheduler.finish(sequence)
        if not (self.scheduler.waiting or self.scheduler.running):
            self._idle.set()

    def _fail_all(self, error: ServingError) -> None:
        self.loader.abandon(error)
        for sequence in [*self.scheduler.waiting, *self.scheduler.running]:
            self._end(sequence, error)

    # ---- operators --------------------------------------------------------------------------

    def get_brownout(self) -> BrownoutState:
        """Brownout settings in force."""
        return self.slo.state()

    async def set_brownout(self, change: BrownoutChange) -> BrownoutState:
        """Changes settings, another way layer by layer while serving. Raises InvalidRequest,
        or Unavailable for another way when nothing ticks any more.
        """
        self.slo.check(change)
        strategy = change.strategy or self.slo.strategy
        if strategy == "partial" and not (change.way or self.slo.way):
            raise InvalidRequest(
                "partial brownout needs united experts; this model has none loaded"
            )
        if change.way is not None:
            if self.status in ("failed", "stopped"):
                raise Unavailable(f"the engine is {self.status}; no other way can be loaded")
            loaded = self.loader.request(change.way)
            self._work.set()
            await asyncio.shield(loaded)  # it goes on if this caller does not wait for it
        self.slo.apply(change, time.monotonic())
        return self.slo.state()

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        counters, pages = self.counters, self.scheduler.pages
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_pages_used=pages.num_pages - pages.num_free,
            kv_pages_total=pages.num_pages,
            compilations_since_ready=self.runner.compilations_since_ready,
            requests_finished=counters.finished,
            requests_aborted=counters.aborted,
            requests_rejected=counters.rejected,
            steps_prefill=counters.steps_prefill,
            steps_decode=counters.steps_decode,
            expert_visits=counters.expert_visits,
            degraded_visits=counters.degraded_visits,
            uptime_s=time.monotonic() - self._started_at,
        )

    # ---- the tick ---------------------------------------------------------------------------

    async def _run(self) -> None:
        """Ticks while there is work. A failing step fails its requests, never the process."""
        while True:
            try:
                if not await self._tick():
                    self._work.clear()
                    self.scheduler.check_idle()
                    await self._work.wait()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                log.exception("a step failed")
                self.status = "failed"
                self._in_flight = None
                self._fail_all(Unavailable(f"the engine failed: {error}"))
                return

    async def _tick(self) -> bool:
        """Launches step N + 1, then takes step N's results. False when there is nothing to do."""
        step = self._in_flight
        if step is not None:
            await self._nearly_done(step)
        now = time.monotonic()
        oldest = self.scheduler.oldest_arrival()
        self.slo.maybe_update(
            now,
            0.0 if oldest is None else now - oldest,
            slots_taken=len(self.scheduler.waiting) > self.scheduler.num_free_slots,
        )
        self.loader.advance()
        self._in_flight = self._launch(self.scheduler.next_step(self._spare_s(step)))
        if step is not None:
            result = await step.result
            now = time.monotonic()
            self.pace.observe(step.plan, step.started_at, now)
            if self._in_flight is not None:
                self._in_flight.started_at = max(now, self._in_flight.launched_at)
            self._accept(step, result, now)
        return not (step is None and self._in_flight is None) or self.loader.busy

    def _spare_s(self, step: Launched | None) -> float:
        """ITL that running sequences have to spare for a prefill step after the one under way."""
        if step is None or step.plan.phase == "decode":
            return -math.inf  # a prefill step's turn anyway
        return self.pace.spare_s(
            self.slo.itl_slo_s,
            self.pace.ends_at(step.plan, step.started_at),
            num_decoding=len(self.scheduler.running),
            num_prefill_tokens=self.scheduler.next_prefill_tokens(),
        )

    async def _nearly_done(self, step: Launched) -> None:
        """Waits until the next step has to be planned, or this one is done already."""
        until = step.started_at + self.pace.idle_s(step.plan)
        timeout_s = until - time.monotonic()
        if timeout_s > 0:
            await asyncio.wait([step.result], timeout=timeout_s)
        else:
            await asyncio.sleep(0)  # callers get their turn between any two launches

    def _launch(self, plan: StepPlan | None) -> Launched | None:
        if plan is None:
            return None
        control = self.slo.control(plan.phase)
        for sequence in plan.sequences:
            sequence.note_threshold(plan.phase, control[0])
        launched_at = time.monotonic()
        handle = self.runner.launch(plan, control)
        loop = asyncio.get_running_loop()
        result = loop.run_in_executor(self._reader, self.runner.read, handle)
        return Launched(plan, result, launched_at, launched_at)

    def _accept(self, step: Launched, result: StepResult, now: float) -> None:
        """Gives a step's tokens to their requests, and its latencies to the analyser."""
        plan, first, further = step.plan, [], []
        self._account(step, result, now)
        if result.prompt_logprobs is not None:
            plan.share_prompt_logprobs(result.prompt_logprobs)
        for at, sequence in enumerate(plan.sequences):
            if sequence.done:
                continue  # it ended while this step was under way
            sequence.degraded_visits += result.degraded[at]
            sequence.visited_tokens += int(plan.q_lens[at])
            if not plan.sampled[at]:
                continue
            if sequence.tokens:
                further.append(sequence.previous_at)
            else:
                first.append(sequence.arrived_at)
            sequence.previous_at = now
            output = sequence.accept(result.tokens[at], result.logprobs[at], self._visits_per_token)
            sequence.outputs.put_nowait(output)
            if output.finish_reason is not None:
                self.counters.finished += 1
                self.observer.request_finished(sequence, output, now)
                self._retire(sequence)
        self._observe(step, first, further, now)

    def _account(self, step: Launched, result: StepResult, now: float) -> None:
        plan, counters = step.plan, self.counters
        if plan.phase == "prefill":
            counters.steps_prefill += 1
        else:
            counters.steps_decode += 1
        counters.expert_visits += int(plan.q_lens.sum()) * self._visits_per_token
        counters.degraded_visits += sum(result.degraded)
        self.observer.step_read(plan, result, step.started_at, now)

    def _observe(
        self, step: Launched, first: list[float], further: list[float], now: float
    ) -> None:
        if first:
            arrived_at = np.array(first)
            self.slo.observe_first_tokens(arrived_at, now)
            self.observer.first_tokens(now - arrived_at, self.slo.ttft_slo_s)
        if further:
            previous_at = np.array(further)
            self.slo.observe_tokens(previous_at, step.launched_at, now)
            self.observer.further_tokens(now - previous_at, self.slo.itl_slo_s)


def _load(config: EngineConfig, progress: Progress | None) -> Model:
    def layers(done: int, total: int) -> None:
        if progress is not None:
            progress("loading", done, total)

    return load(config.model, config.dtype, ways=config.brownout.ways or None, progress=layers)
