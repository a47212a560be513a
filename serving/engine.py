"""The engine: admission, the tick, and the interface to callers.

The tick (`Engine._tick`) is the core of the system: let the controllers act, plan a step and submit
it, as long as the executor has room; then take what it has completed. A step runner has room for
one step beside the one that runs, which is planned shortly before that ends: so the device never
waits for the host, and a request waits for as few steps as possible. Asynchronous workers have room
for any number, and complete rows singly.
"""

import serving.settings.extras  # noqa: F401  (names the extra of a package that is missing)

# isort: split
import asyncio
import contextlib
import logging
import math
import sys
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jmoe.api import Model
from jmoe.family import Family
from serving.config import EngineConfig, ServerConfig
from serving.control.audit import Auditor
from serving.control.experts_loader import ExpertsLoader, allowed_ways
from serving.control.fetcher import Fetcher
from serving.control.guarded import make_controller
from serving.control.losses import Curve, Curves, LossBound, Losses
from serving.control.models import Models
from serving.control.registry import Registry
from serving.control.slo import SloAnalyser
from serving.errors import (
    NOT_OURS,
    Aborted,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServingError,
    Unavailable,
    WorkerLost,
    shown,
)
from serving.execution.executor import (
    STEPS_AT_ONCE,
    Completed,
    DecodesBesidePrompts,
    Draws,
    Executor,
    FailedRows,
    HasWorkers,
    LostRows,
    Mixes,
    RankDown,
    RankUp,
    RunsParts,
    Stages,
    WayChanged,
)
from serving.execution.programs import Progress
from serving.intake.admission import Admission, Deadlines
from serving.intake.structure import allowed_tokens
from serving.plan import Phase, StepControl, StepResult
from serving.request import (
    Bounds,
    BrownoutChange,
    BrownoutState,
    Chat,
    EngineStats,
    Expected,
    ModelBrownout,
    Output,
    Priority,
    Request,
    SamplingParams,
    number_of,
)
from serving.scheduling.pace import Pace
from serving.scheduling.policy import BE, LS, make_policy
from serving.scheduling.scheduler import Scheduler
from serving.scheduling.sequence import SequenceState, SequenceStatus
from serving.scheduling.step import ScheduledStep
from serving.settings.composes import COMPANY, why_not
from serving.settings.reading import brownout_of_models, check
from serving.startup.arrivals import arriving
from serving.startup.prepare import prepare
from serving.telemetry.accounting import Accounts
from serving.telemetry.latencies import Latencies
from serving.telemetry.observer import Observer
from serving.telemetry.progress import progress_bar
from serving.telemetry.watchdog import Watchdog

log = logging.getLogger(__name__)

REFUSING_S = 5.0
"""Over which refusals are told in the state of brownout."""

HASTE = 0.5
"""Share of the objective of first tokens after which these come before further ones."""
UNRESPONSIVE_S = 10.0
"""If the event loop takes longer (s) to react to a stuck step, it counts as stuck, too."""
NOBODY = "no worker with attention is there"


class Engine:
    """Serves a model or a family in one event loop. Make it with `await Engine.start(config)`."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        model: Model | Family | None,
        observer: Observer | Sequence[Observer] | None = None,
        clock: Callable[[], float] = time.monotonic,
        losses: Curves = (),
    ) -> None:
        """Needs an executor that is ready. Without `model` (in tests), prompts must be token ids.
        `clock` is the clock of the event loop's timers, in seconds. `losses` has the models' curves
        of expected loss.
        """
        self.config, self.executor = config, executor
        self.family = None if model is None else Family.of(model)
        self.status = "starting"
        self.failure = ""  # why it failed, once it did
        self.restart_s: float | None = None  # until a process that ends with it serves again
        self.pace = Pace(executor.limits.num_layers, waits=config.prefill_company)
        ways = allowed_ways(config.brownout, self.family)
        slow_s = config.plugin_slow_ms / 1e3 or math.inf
        names = list(("",) if self.family is None else self.family.names)
        self.names = names  # of models in requests, by place; empty: vacant
        own = brownout_of_models(config.brownout.models)
        self.slo = SloAnalyser(
            config.brownout,
            config.salc,
            way=ways[0] if ways else 0,
            pace=self.pace,
            slow_s=slow_s,
            losses=Losses(names, losses, levels=config.brownout.levels),
            models=[own.get(name, ModelBrownout(name)) for name in names],
        )
        self.loader = ExpertsLoader(executor, self.family, ways, self.slo, config.balance)
        audit = replace(config.audit, share=0) if config.resident_experts else config.audit
        self.auditor = Auditor(audit, self.names, self._score, self._audits, clock)
        others = [observer] if isinstance(observer, Observer) else observer or ()
        mover = [] if self.loader.mover is None else [self.loader.mover]
        self.accounts = Accounts([self.slo.load, *mover, self.auditor, *others])
        has_hybrid = isinstance(executor, DecodesBesidePrompts) and executor.has_hybrid
        self.scheduler = Scheduler(
            executor.limits,
            make_policy(config.policy),
            layers_at_once=executor.layers_at_once if isinstance(executor, RunsParts) else None,
            share=config.best_effort_share,
            max_wait_s=config.best_effort_max_wait_s or math.inf,
            mixes=executor.mixes if isinstance(executor, Mixes) else None,
            accepted=self.slo.accepted if config.reuses_prefixes else None,
            slow_s=slow_s,
            in_order=executor.in_order,
            beside=self._decodes_beside if has_hybrid else None,
        )
        self._work = asyncio.Event()  # a request or news has come
        self.registry = Registry(executor, self.scheduler, config.model_stay_s, self._work.set)
        self.fetcher = Fetcher(executor, self.scheduler, self.family, clock)
        self.admission = Admission(config, executor.limits, self.family)
        self.models = Models(
            config,
            executor,
            self.family,
            names,
            self.loader,
            self.slo,
            self.admission,
            self.auditor,
            arriving,
            self._work.set,
        )
        self.request_timeout_s = 0.0  # of requests that name none; 0: they have none
        self.deadlines = Deadlines(config.queue_timeout_s, clock, self._end)
        stuck = f"a step took longer than {config.watchdog_s:g} s (engine.watchdog_s)"
        self.watchdog = Watchdog(config.watchdog_s, partial(self._fail_from_thread, stuck))
        self.on_unresponsive: Callable[[str], None] = log.critical
        self._clock = clock
        self._refused_at: deque[float] = deque(maxlen=100_000)
        self._in_flight = deque[ScheduledStep]()  # none where rows complete singly
        self._news = deque[Any]()  # what the executor told (serving.execution.executor)
        self._workers = executor if isinstance(executor, HasWorkers) else None
        self._changes = set[asyncio.Task[Any]]()  # of models
        self._open: set[SequenceState] = set()  # admitted and not ended
        self._under_way = {priority: Counter[str]() for priority in Priority}  # of them, by key
        self._idle = asyncio.Event()
        self._failed = asyncio.Event()
        self._started_at = clock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._audit_task: asyncio.Task[None] | None = None
        executor.listen(self._note)
        if self._workers is not None and self.accounts.wants_stages:
            self._workers.record()

    # ---- life -------------------------------------------------------------------------------

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        model: Model | Family | None = None,
        observer: Observer | Sequence[Observer] | None = None,
        progress: Progress | None = None,
    ) -> "Engine":
        """Loads a model unless one is given, compiles and warms every program, starts the tick.

        `progress` is told what is being done; without one, bars or lines are shown
        (`serving.telemetry.progress`).

        Raises SettingsError for a configuration that cannot be used, and what `jmoe.load` raises.
        """
        check(ServerConfig(engine=config))
        make_policy(config.policy)  # fail early on a bad name
        make_controller(config.salc)
        with progress_bar() if progress is None else contextlib.nullcontext(progress) as shown_by:
            prepared = await asyncio.to_thread(prepare, config, model, shown_by)
        fitting, loaded, executor, losses = prepared
        engine = cls(fitting, executor, loaded, observer, losses=losses)
        engine.run()
        return engine

    def run(self) -> None:
        """Starts the tick; the engine is ready from now on."""
        self.status = "ready"
        self._loop = asyncio.get_running_loop()
        self._loop_task = asyncio.create_task(self._run(), name="jmoe-tick")
        self._audit_task = asyncio.create_task(self.auditor.run(), name="jmoe-audit")
        self.watchdog.start()
        self.executor.watch(self._fail_from_thread)

    async def drain(self, timeout_s: float) -> bool:
        """Stops admission and lets requests finish. Returns whether all did within `timeout_s`."""
        if self.status == "ready":
            self.status = "draining"
        try:
            async with asyncio.timeout(timeout_s):
                while not self.scheduler.idle:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def died(self) -> str:
        """Waits until the engine has failed, and returns why. A stopped engine never fails."""
        await self._failed.wait()
        return self.failure

    async def stop(self) -> None:
        """Aborts the remaining requests and ends the tick. May be called again."""
        if self.status != "failed":
            self.status = "stopped"
        self._fail_all(partial(Aborted, "the engine stopped"))
        for change in self._changes:
            change.cancel()
        if self._audit_task is not None:
            self._audit_task.cancel()
        if self._loop_task is not None:
            self._loop_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop_task
            self._loop_task = None
            self.watchdog.close()
            await self.admission.close()
            await asyncio.to_thread(self.executor.close)  # which waits for other processes

    def _fail(self, reason: str) -> None:
        """Marks the engine as failed: ends all requests with an error, and refuses new ones."""
        if self.status in ("failed", "stopped"):
            return
        log.error("the engine failed: %s", reason)
        self.status, self.failure = "failed", reason
        self._in_flight.clear()
        self.scheduler.abandon()  # nothing will leave any more
        self._fail_all(partial(Unavailable, f"the engine failed: {reason}", self.restart_s))
        self._failed.set()
        if self._loop_task is not None and asyncio.current_task() is not self._loop_task:
            self._loop_task.cancel()

    def _fail_from_thread(self, reason: str) -> None:
        """Calls `_fail` from another thread: the watchdog's, or one in which a runner fails."""
        assert self._loop is not None
        heard = threading.Event()

        def fail() -> None:
            try:
                self._fail(reason)
            finally:
                heard.set()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(fail)
        if not heard.wait(UNRESPONSIVE_S):
            self.on_unresponsive(f"{reason}, and the event loop does not answer")

    # ---- callers ----------------------------------------------------------------------------

    @property
    def bounds(self) -> Bounds:
        """Limits of a prompt's size."""
        return self.admission.bounds

    @property
    def model(self) -> Model | None:
        """The first model, which serves requests that name none; None in tests."""
        return None if self.family is None else self.family[0]

    def check_admission(
        self, priority: Priority | None = None, key: str = "", model: int | None = None
    ) -> None:
        """Raises Unavailable or Overloaded if requests of a class are not admitted now; None: if
        those of no class are.

        This is cheap, so that it can be checked before a request is read. `key` names the caller's
        API key: while the queue is long, who has more than a share of it is refused first. `model`
        None: not known yet.
        """
        if self.status != "ready":
            why = f": {self.failure}" if self.failure else ""
            raise Unavailable(
                f"the engine is {self.status}{why}; try another replica or come back later",
                self.restart_s if self.failure else None,
            )
        refusals: list[Overloaded] = []
        for one in Priority if priority is None else (priority,):
            try:
                return self._check_queue(one, key, model)
            except Overloaded as error:
                refusals.append(error)
        self.accounts.request_refused(key, priority)
        self._refused_at.append(self._clock())
        raise refusals[0]

    def _check_queue(self, priority: Priority, key: str, model: int | None) -> None:
        admission, objective_s = self.config.admission, math.inf
        queued = self.scheduler.queues[priority]
        under_way = self._under_way[priority] if queued else Counter[str]()
        room, steps_s, prompts_s = self.admission.room(key, under_way, self._clock()), 0.0, 0.0
        if admission == "objective" or (admission == "auto" and self.slo.is_own_objective):
            asked = range(len(self.names)) if model is None else (model,)
            objective_s = max(self.slo.objectives(priority, one)[0] for one in asked)
            if priority is LS:
                prompts_s, steps_s = self.slo.first_token_s(len(self.scheduler.queues[LS]))
        caution = self.slo.room(priority)
        self.admission.check_queue(
            priority, self.scheduler, objective_s, prompts_s, steps_s, room, caution
        )

    async def tokenize(
        self,
        prompt: str | Chat,
        model: str = "",
        *,
        special_tokens: bool = True,
        priority: Priority | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Returns the token ids of a text, or of a chat as the model's template writes it.

        `special_tokens`: with those that the tokenizer puts around a text. `priority` is the class
        of the request that the prompt is of, which waits meanwhile; None: of none. `timeout_s` is
        as in `generate`. Raises NotFound, InvalidRequest, DeadlineExceeded and what a tokenizer or
        template fails with.
        """
        timeout_s, _ = self._timeout(timeout_s)
        number = number_of(model, self.names)
        request = Request(
            "tokenize", prompt, priority=priority or LS, timeout_s=timeout_s, model=number
        )
        self.admission.check_size(request)
        return await self.admission.tokenize(
            request, special_tokens=special_tokens, waits=priority is not None
        )

    def with_defaults(self, sampling: SamplingParams, model: str = "") -> SamplingParams:
        """Returns the parameters that a request with these is drawn by: with the model's own
        defaults for what it left out (`engine.generation_config`).
        """
        return self.admission.with_defaults(sampling, number_of(model, self.names))

    def _timeout(self, timeout_s: float | None) -> tuple[float | None, bool]:
        """Returns a request's timeout (s), and whether it is the server's default."""
        servers = timeout_s is None and self.request_timeout_s > 0
        return self.request_timeout_s if servers else timeout_s, servers

    async def generate(
        self,
        prompt: str | Sequence[int] | Chat,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        allow_brownout: bool = True,
        priority: Priority = Priority.LATENCY_SENSITIVE,
        timeout_s: float | None = None,
        model: str = "",
        reuse_prefix: bool = True,
        salt: str = "",
        max_degraded_percent: int = 100,
        allow_audit: bool = True,
        key: str = "",
        waited_s: float = 0.0,
    ) -> AsyncGenerator[Output]:
        """Streams a request's outputs; the last one has a `finish_reason`.

        `model` is one of `names`; empty: the first. Closing the iterator aborts the request.
        `timeout_s` None: the server's default (`request_timeout_s`). With `reuse_prefix`, cached KV
        pages that requests with the same `salt` have computed of the prompt are reused. `key` names
        the caller, as `check_admission` has it. At no token
        is more than `max_degraded_percent` of the request's own expert visits degraded; 0 is the
        same as `allow_brownout=False`. A degraded answer may be scored again (`engine.audit`), with
        `allow_audit`. The request came `waited_s` seconds ago: its prompt was made meanwhile.

        Raises NotFound, InvalidRequest, RequestFailed, and other errors of `serving.errors`.
        """
        number = number_of(model, self.names)
        self.check_admission(priority, key, number)
        timeout_s, servers = self._timeout(timeout_s)
        allow_brownout = allow_brownout and max_degraded_percent != 0
        request = Request(
            request_id or uuid.uuid4().hex,
            prompt,
            self.admission.with_defaults(sampling or SamplingParams(), number),
            allow_brownout and not self.auditor.exempts(number, key),
            priority,
            timeout_s,
            number,
            servers,
            reuse_prefix,
            self.models.salt(number) + salt,
            max_degraded_percent,
            allow_audit,
            key,
            model_name=self.names[number],
        )
        sequence = await self._admit(request, waited_s)
        try:
            while True:
                output = await sequence.next_output()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._abandon(sequence)

    async def _score(self, answer: SequenceState) -> SequenceState:
        """Runs a prompt and its answer once more, exactly, as best effort; returns that request."""
        most = min(self.config.max_model_len, self.scheduler.limits.most_positions)
        context = answer.context[: most - 1]
        sampling = SamplingParams(max_new_tokens=1, prompt_logprobs=True, ignore_eos=True)
        request = Request(
            uuid.uuid4().hex,
            context,
            sampling,
            allow_brownout=False,
            priority=BE,
            model=answer.request.model,
            reuse_prefix=False,
            is_audit=True,
        )
        sequence = await self._admit(request)
        try:
            await sequence.next_output()
        finally:
            self._abandon(sequence)
        return sequence

    def _audits(self, model: int) -> bool:
        """Returns whether a model's answer may be scored now: nobody waits, nor would for a
        slot, and no controller is short of time.
        """
        scheduler = self.scheduler
        return (
            self.status == "ready"
            and not self.slo.is_moved
            and (scheduler.models is None or model in scheduler.models)
            and not scheduler.waiting
            and not any(self.admission.num_tokenizing.values())
            and scheduler.num_free_slots(LS) > 1
        )

    async def _admit(self, request: Request, waited_s: float = 0.0) -> SequenceState:
        self._check_workers(request)
        arrived_at, generations = self._clock() - waited_s, self.models.generations
        generation = generations[request.model]
        sequence = await self.admission.sequence(request, arrived_at)
        if not request.is_audit:  # again, since tokenizing a long text takes time
            self.check_admission(request.priority, request.key, request.model)
        self._check_workers(request)
        if generations[request.model] != generation:
            raise NotFound(f"model {shown(request.model_name)} is not served any more")
        self.deadlines.watch(sequence)
        self.scheduler.add(sequence, self._clock())
        self.accounts.request_admitted(sequence, arrived_at)
        self._open.add(sequence)
        self._under_way[request.priority][request.key] += 1
        self._work.set()
        return sequence

    def _check_workers(self, request: Request) -> None:
        """Raises WorkerLost if workers that a request needs are gone."""
        if self._workers is None:
            return
        if not self.scheduler.places.any_open:
            raise self._lost(NOBODY)
        exact = not request.allow_brownout or self.slo.strategy == "zero"
        if exact and (missing := self._workers.unreachable):
            raise self._lost(f"{missing}, and nothing may stand in for it")

    def _lost(self, why: str) -> WorkerLost:
        retry_after_s = 0.0 if self._workers is None else self._workers.retry_after_s
        return WorkerLost(f"{why}; send the request again", retry_after_s)

    def _abandon(self, sequence: SequenceState) -> None:
        """Aborts an unfinished request whose caller has closed the iterator."""
        self.deadlines.forget(sequence)
        if not sequence.done:
            self.accounts.request_ended(sequence, None)
            self._retire(sequence)
        sequence.drop_outputs()

    def _end(self, sequence: SequenceState, error: ServingError) -> None:
        """Ends a request with an error that its caller gets."""
        if not sequence.done:
            self.accounts.request_ended(sequence, error)
            sequence.deliver(error)
            self._retire(sequence)

    def _retire(self, sequence: SequenceState) -> None:
        if sequence in self._open:
            self._open.remove(sequence)
            request = sequence.request
            counts = self._under_way[request.priority]
            counts[request.key] -= 1
            if not counts[request.key]:
                del counts[request.key]
        self.models.retired.set()
        sequence.matcher = None  # may be large, and an audit keeps what has ended for a while
        try:
            self.scheduler.finish(sequence)
        except Exception as error:
            self._fail(f"the scheduler lost a request: {type(error).__name__}: {error}")
        if self.scheduler.idle:
            self._idle.set()

    def _fail_all(self, error: Callable[[], ServingError]) -> None:
        """Ends all requests, each with an error of its own: one that is raised in many tasks at a
        time holds on to the generators of all of them, which are then closed while they run.
        """
        self.loader.abandon(error())
        self.models.abandon(error())
        for sequence in list(self._open):
            self._end(sequence, error())

    # ---- operators --------------------------------------------------------------------------

    def get_brownout(self) -> BrownoutState:
        """Returns the brownout settings in force, and whether requests were refused lately."""
        since = self._clock() - REFUSING_S
        while self._refused_at and self._refused_at[0] < since:
            self._refused_at.popleft()
        return self.slo.state(len(self._refused_at) / REFUSING_S)

    async def set_brownout(self, change: BrownoutChange) -> BrownoutState:
        """Changes brownout settings; another way is loaded while serving goes on (ExpertsLoader).
        Raises InvalidRequest, and Unavailable for another way if the engine has failed or stopped.
        """
        self._check(change, self.loader.bound(change))
        if change.way is not None:
            if self.status in ("failed", "stopped"):
                raise Unavailable(f"the engine is {self.status}; no other way can be loaded")
            self._work.set()
            await self.loader.load(change)
            # A change that this one was checked with may have been dropped with its caller.
            try:
                self._check(change, self.loader.bound(replace(change, way=None)))
            except InvalidRequest as error:
                way = self.slo.way
                raise InvalidRequest(f"{error}; the way is {way} now, all else as before") from None
        self.slo.apply(change, self._clock())
        return self.slo.state()

    def what_if(self, change: BrownoutChange) -> dict[Phase, Expected]:
        """Returns what a change of brownout lets expect at the present load; nothing is changed.
        Raises InvalidRequest as `set_brownout`.
        """
        bound = self.loader.bound(change)
        self._check(change, bound)
        return self.slo.what_if(change, bound)

    def _check(self, change: BrownoutChange, bound: LossBound) -> None:
        """Raises InvalidRequest for a change that cannot be made, and NotFound for a model that is
        not served.
        """
        if change.prefill_company and (why := why_not(self.config, COMPANY)):
            raise InvalidRequest(f"prefill_company is True; it must be left out {why}")
        self.slo.check(change, bound)
        self.models.check(bound)

    async def load_model(self, name: str, directory: str) -> None:
        """Loads a further model of the family's architecture while others are served; returns when
        requests may name it. Goes on even if this caller is cancelled.

        Raises InvalidRequest for a model that cannot be served beside the others, or has no place,
        slots or memory, and Unavailable if the engine does not run.
        """
        await self._kept_on(self.models.load(name, directory))

    async def unload_model(self, name: str, drain_s: float = 0.0) -> int:
        """Unloads a model: nobody finds it from now on. Its requests may go on for `drain_s`
        seconds; those that are left end with ModelUnloaded. Returns how many.

        Raises NotFound, InvalidRequest for the first model, and Unavailable if the engine does not
        run.
        """
        return await self._kept_on(self.models.unload(name, drain_s, self._open, self._end))

    async def _kept_on[T](self, change: Coroutine[Any, Any, T]) -> T:
        """Makes a change of models, even if its caller is cancelled."""
        if self.status != "ready":
            change.close()
            raise Unavailable(f"the engine is {self.status}; its models stay as they are")
        task = asyncio.create_task(change, name="jmoe-models")
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    def stats(self) -> EngineStats:
        """Returns the current counters and gauges."""
        up_s, compiled = self._clock() - self._started_at, self.executor.compilations_since_ready
        full_s = self.pace.times.expected_s(Phase.DECODE, self.config.max_num_seqs)
        audits = self.auditor.state()
        return self.accounts.stats(self.scheduler, compiled, up_s, full_s, audits)

    # ---- the tick ---------------------------------------------------------------------------

    async def _run(self) -> None:
        """Ticks while there is work. An error fails the engine's requests, never the process."""
        try:
            while True:
                if not await self._tick():
                    self._work.clear()
                    if not self.registry.swapping:
                        self.scheduler.check_idle()
                    await self._until_work()
        except BaseException as error:
            # Whatever the error is, no caller must wait for an engine that no longer ticks.
            self._fail(f"{type(error).__name__}: {error}")
            if isinstance(error, NOT_OURS):
                raise
            log.debug("where it came from", exc_info=True)

    async def _until_work(self) -> None:
        """Waits for work. Controllers go on deciding until thresholds are back at their ceiling."""
        while not self._work.is_set():
            with contextlib.suppress(TimeoutError):
                timeout_s = self.slo.decides_in_s(self._clock())
                await asyncio.wait_for(self._work.wait(), timeout_s)
            self._decide(self._clock())

    async def _tick(self) -> bool:
        """Plans a step if there is room, else takes what completed. Returns False if there is no
        work.
        """
        waited = await self._until_due()
        while self._news and not self.executor.in_order:
            self._take(self._news.popleft())  # first of all: a rank may be gone
        now = self._clock()
        self._advance_controllers(now)
        step = self._plan(now)
        if step is not None and not waited:
            await self._let_others_run()
        if step is None or not self._has_room:
            comes = self._in_flight or self.scheduler.singles or self.loader.is_waiting
            if step is None and not (comes or self._news):
                if not (self.loader.busy or self.models.busy):
                    self.registry.advance(now, idle=True)
                    return False
                await asyncio.sleep(0)  # lets other tasks run between two layers of another way
                return True
            await self._until_news()
            while self._news and (step is None or not self._has_room):
                self._take(self._news.popleft())
        if step is not None and step.waits:
            assert isinstance(self.executor, Draws)
            self.executor.draw(self._allowed(step))
        return True

    @property
    def _has_room(self) -> bool:
        return len(self._in_flight) < STEPS_AT_ONCE

    async def _until_due(self) -> bool:
        """Waits until the next step must be planned, or something has completed; returns whether
        other tasks have run.

        They write the tokens of the step before, which may take longer than there is time: then the
        next step goes first.
        """
        if not self._in_flight:
            if not self.executor.in_order:
                await asyncio.sleep(0)  # lets other tasks run between ticks
            return not self.executor.in_order
        before = self._in_flight[-1]
        at = before.started_at + self.pace.idle_s(before)
        if at - self._clock() <= self.pace.others_s:
            return False
        await self._let_others_run()
        while not self._news and (timeout_s := at - self._clock()) > 0:
            self._work.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._work.wait(), timeout_s)
        return True

    async def _let_others_run(self) -> None:
        began = self._clock()
        await asyncio.sleep(0)
        self.pace.observe_others(self._clock() - began)

    async def _until_news(self) -> None:
        """Waits until something has completed; where there is room, at most until the next
        request.
        """
        while not self._news:
            self._work.clear()
            await self._work.wait()
            if self._has_room:
                return

    def _plan(self, now: float) -> ScheduledStep | None:
        """Plans the next step and submits it; None if there is nothing to run, or nothing may."""
        if self.loader.holds:
            return None
        num_running, since_s = len(self.scheduler.running), 0.0
        beside = self.scheduler.num_hybrid > 0 and self.slo.is_exact
        company = self.pace.company(self.slo.in_force[0], num_running, beside=beside)
        slack_s, most = -math.inf, self._prompt_tokens(now)
        if self._in_flight:
            before = self._in_flight[-1]
            tokens_at = self.scheduler.tokens_at()
            since_s = self.pace.since_tokens_s(before, tokens_at)
            tokens = min(self.scheduler.next_prefill_tokens(), most)
            slack_s = self.slo.itl_slack_s(before, tokens, num_running)
        step = self.scheduler.next_step(slack_s, now, company, most)
        if step is not None:
            self._submit(step, now, since_s)
        return step

    def _prompt_tokens(self, now: float) -> int:
        """Returns how many prompt tokens the next step may have: those that keep further tokens in
        time; any number where nobody waits for these, or first tokens are about to be late, too.
        """
        ttft_slo_s, itl_slo_s = self.slo.in_force
        num_decoding = sum(s.status is SequenceStatus.DECODE for s in self.scheduler.running)
        if not (self.executor.in_order and num_decoding):
            return sys.maxsize
        if self.scheduler.waited_s(now) > HASTE * ttft_slo_s:
            return sys.maxsize
        sizes = self.executor.limits.prefill_buckets
        return self.pace.prefill_tokens(itl_slo_s, num_decoding, sizes)

    def _decodes_beside(self, num_tokens: int, num_rows: int) -> bool:
        """Returns whether rows are to decode in a prefill step: while nothing is degraded, since
        each phase has a threshold of its own, and where that takes less than a step of each.
        """
        fits = num_tokens + num_rows <= self.executor.limits.max_prefill_tokens
        return fits and self.slo.is_exact and self.pace.times.hybrid_pays(num_tokens, num_rows)

    def _decide(self, now: float) -> None:
        shares = {LS: self.slo.shares, BE: {}}
        waiting = {c: self.scheduler.waits(c, now, shares[c]) for c in (LS, BE)}
        self.slo.maybe_update(now, waiting, self.scheduler.limits.decode_rows)

    def _advance_controllers(self, now: float) -> None:
        self._decide(now)
        waited = self.loader.is_waiting
        self.loader.advance(now, len(self.scheduler.singles))
        if self.loader.is_waiting and not waited:
            self.watchdog.launched += 1  # a device that hangs over it must not go unnoticed
        self.models.advance()
        self.registry.advance(now)
        self.fetcher.advance(now)

    def _submit(self, step: ScheduledStep, planned_at: float, since_s: float) -> None:
        launched_at, control = self._clock(), step.parts.control
        if control is None:
            rows = self.scheduler.num_decoding_beside(step)
            control = self.slo.control(step, since_s, rows, launched_at)
        step.parts.control = control
        if self.executor.in_order:  # otherwise whichever rows are in a layer together decide
            percent = step.degrade_best_effort_first(control)
            control = control._replace(threshold_percent=percent)
            decode, others, n = Phase.DECODE, step.phase, step.num_decodes
            rows = zip(step.sequences, step.exempt.tolist(), strict=True)
            for at, (sequence, exempt) in enumerate(rows):
                sequence.note_threshold(decode if at < n else others, 100 if exempt else percent)
            step.launched_at = step.started_at = launched_at
            self._in_flight.append(step)
        elif step.waits:  # for nothing: the tokens before have all been read
            assert step.shapes is not None
            step.shapes = replace(step.shapes, waits=False, allowed=self._allowed(step))
        step.control, step.way = control, self.slo.way_in_force
        for sequence in step.sequences if step.phase is Phase.PREFILL else ():
            sequence.note_start(launched_at)
        self.fetcher.launched(step)
        self.watchdog.launched += 1 if step.singles is None else len(step.sequences)
        self.executor.submit(step, control)
        self.accounts.step_launched(step, planned_at, self._clock())

    # ---- what an executor tells -------------------------------------------------------------

    def _note(self, told: Any) -> None:
        """Queues what the executor tells, until the engine has failed or stopped; called in any
        thread.
        """
        if self.status in ("failed", "stopped"):
            return
        self._news.append(told)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._work.set)

    def _take(self, told: Any) -> None:
        """Handles what the executor tells; rows that were given up already are ignored."""
        now = self._clock()
        match told:
            case Completed(result=BaseException() as error):
                raise error
            case Completed(result=StepResult() as result) if self.executor.in_order:
                self._take_step(result, now)
            case Completed(result=StepResult() as result):
                self._take_rows(told, result, now)
            case LostRows(rows):
                self.scheduler.run_again(self._known(rows))
            case FailedRows(rows, reason):
                for sequence in self.scheduler.give_up(self._known(rows)):
                    self._end(sequence, self._lost(reason))
            case RankDown():
                self._close_rank(told)
            case RankUp(rank):
                self.scheduler.places.open(rank)
            case WayChanged():
                self.watchdog.ended += 1
                self.loader.changed(now)
            case Stages():
                self.accounts.stages_ran(told)
        if self.scheduler.idle:
            self._idle.set()

    def _known(self, rows: Sequence[int]) -> list[int]:
        """Returns those of rows that have not been given up, which have ended now."""
        known = [number for number in rows if number in self.scheduler.singles]
        self.watchdog.ended += len(known)
        return known

    def _take_step(self, result: StepResult, now: float) -> None:
        step = self._in_flight.popleft()
        self.watchdog.ended += 1
        if not step.waits:  # one that does is drawn behind the step before
            self.pace.observe_launch(result.called_at - step.launched_at)
        if self._in_flight:
            after = self._in_flight[0]
            after.started_at = max(now, after.launched_at)
        percent = 100 if step.control is None else step.control.threshold_percent
        percents = np.where(step.exempt, 100, percent).tolist()
        self._accept(step, result, now, percents)

    def _take_rows(self, told: Completed, result: StepResult, now: float) -> None:
        num_decoding, rows = self.scheduler.singles.num_decoding, self._known(told.rows)
        if not rows:
            return
        step = self.scheduler.complete(rows)
        step.control = StepControl(min(told.least_percent), told.strategy)
        spans = zip(step.sequences, told.least_percent, told.most_percent, strict=True)
        for sequence, *percents in spans:
            for percent in percents:
                sequence.note_threshold(step.phase, percent)
        size = num_decoding if step.phase is Phase.DECODE else 0
        self._accept(step, result, now, told.least_percent, size)

    def _close_rank(self, down: RankDown) -> None:
        """Ends the requests of a lost rank, whose keys and values are lost."""
        before = len(self.scheduler.singles)
        for sequence in self.scheduler.close_rank(down.rank):
            self._end(sequence, self._lost(down.reason))
        if not self.scheduler.places.any_open:
            for sequence in list(self.scheduler.waiting):
                self._end(sequence, self._lost(NOBODY))
        self.watchdog.ended += before - len(self.scheduler.singles)

    def _allowed(self, step: ScheduledStep) -> np.ndarray:
        return allowed_tokens(step.sequences, step.sampled, self.bounds.vocab_size, self._end)

    def _accept(
        self,
        step: ScheduledStep,
        result: StepResult,
        now: float,
        percents: Sequence[int],
        size: int = 0,
    ) -> None:
        """Delivers a step's tokens to their requests, and its latencies to the SLO analyser.
        `percents` are thresholds of its rows, 100 of exempt ones; `size` as of `Pace.observe`.
        """
        self.pace.observe(step, now, size)
        self.scheduler.observe(step, now)
        latencies = Latencies()
        q_lens = step.q_lens.tolist() if step.is_last else [0] * len(step.sequences)
        degraded = step.count_degraded(result.degraded)
        visits = self.admission.visits_per_token
        self.accounts.step_read(step, result, step.started_at, now, visits, sum(degraded))
        if result.prompt_logprobs is not None:
            step.share_prompt_logprobs(result)
        again = self.fetcher.accept(step, result, degraded)
        self.scheduler.note_read(step, result.degraded, self.slo.suffered(step), again)
        curves = self.slo.loss_curves(step)
        for at, sequence in enumerate(step.sequences):
            if sequence.done or at in again:
                continue  # it ended while this step was in flight, or runs again
            sequence.degraded_visits += degraded[at]
            sequence.visited_tokens += q_lens[at]
            if not step.sampled[at]:
                continue
            request = sequence.request
            if not request.is_audit:
                latencies.add(request, sequence.arrived_at, sequence.previous_at)
            sequence.previous_at = now
            if not sequence.tokens:
                sequence.first_at = now
            self._price(sequence, curves[request.model], percents[at])
            token, logprob = result.tokens[at], result.logprobs[at]
            try:
                top = result.top(at, request.sampling.top_logprobs)
                output = sequence.accept(token, logprob, top)
            except ServingError as error:
                self._end(sequence, error)
                continue
            sequence.deliver(output)
            if output.finish_reason is not None:
                self.accounts.request_finished(sequence, output, now)
                if not request.is_audit:
                    self.admission.capacity[request.priority].observe(now - sequence.started_at)
                self._retire(sequence)
        self.slo.observe(latencies, step.launched_at, now)
        self.accounts.tokens(latencies, self.slo.objectives, now)

    def _price(self, sequence: SequenceState, curve: Curve | None, percent: int) -> None:
        """Adds what a token's threshold lets expect that it costs; NaN where that is not known."""
        nats = 0.0 if percent == 100 else math.nan if curve is None else curve[percent]
        sequence.expected_nats += nats
        if not math.isnan(nats) and not sequence.request.is_audit:
            self.accounts.counters.priced_tokens += 1
            self.accounts.counters.expected_loss_nats += nats
