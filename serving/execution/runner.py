"""The runner: which program runs a step, on which arrays, and what is read of it.

It touches the device through `serving.execution.device` alone.
"""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from jmoe.api import Model
from jmoe.arrival import Arrival, arrival_bytes, compile_writes
from jmoe.attention import is_recurrent, page_windows, sequence_bytes
from jmoe.family import Family
from jmoe.model import LOOKAHEAD
from jmoe.offloaded import Expert
from jmoe.packed_rows import NUM_SHAPE_COLUMNS, everything, pack_row, pack_seat
from jmoe.parallel.placement import Placement
from jmoe.weights import Params
from pallas_kernels.backend import backend
from pallas_kernels.routing import OWN
from serving.config import EngineConfig
from serving.errors import Lost
from serving.execution.buckets import FULL_CAPACITY, Buckets, Key
from serving.execution.device import Device, States
from serving.execution.executables import Executables
from serving.execution.executor import StepExecutor
from serving.execution.fitting import limits_of, num_ranks_of
from serving.execution.kv_pages import allocating, by_memory, goes_by_memory
from serving.execution.memory import check_memory
from serving.execution.mixed import MixedSteps, mixed_models
from serving.execution.param_sets import ParamSets
from serving.execution.programs import Programs, Progress
from serving.execution.ranks import ByRank
from serving.execution.replay import Led
from serving.execution.replication import copies_rule, probes_of
from serving.plan import Limits, Phase, Seat, StepControl, StepPlan, StepResult

if TYPE_CHECKING:
    from serving.cluster.followers import Followers

log = logging.getLogger(__name__)

MAX_LAUNCH_SHARE = 0.03  # of the time of layers launched at once, what launching them may cost
TIMED = 5  # runs of a program whose median counts
GPU_LAUNCH_S = 17e-6
"""What one launch more costs a GPU at least: a graph's start, and kernels that are in every part.
Reckoned, not measured; what it costs the host is measured."""
FULL_CONTROL = StepControl(100, 0)
SWITCH_S = 0.0005
"""How soon (s) the thread that launches steps may take the interpreter from the event loop's."""
LATE_AFTER_S = 2.0
"""What is compiled late lets the rest of the start go first."""


def part_layers(launch_s: float, whole_s: float, num_layers: int) -> int:
    """Returns the layers to launch at once: n = clamp(ceil(c / (0.03 t_layer)), 1, L), in equal
    parts.

    What a launch costs beside its layers, `launch_s`, may be 3 % of them; `whole_s` is what all
    layers take in one (docs/priorities.md).
    """
    layer_s = max(whole_s - launch_s, 1e-9) / num_layers
    least = min(max(math.ceil(launch_s / (MAX_LAUNCH_SHARE * layer_s)), 1), num_layers)
    return -(-num_layers // (num_layers // least))


class _Undrawn(NamedTuple):
    """A step whose layers are launched: what draws its tokens is, once it is known what its
    structured outputs may have next. So the device need not wait for the host.
    """

    key: Key
    step: ByRank
    begun: "Future[Any]"  # its layers, in order
    result: "Future[StepResult]"


class DeviceRunner(StepExecutor):
    """Step programs of a model, or of a family, over one device state. `start` compiles and warms
    them.
    """

    def __init__(
        self,
        models: Model | Family,
        config: EngineConfig,
        *,
        parks: bool = True,
        followers: "Followers | None" = None,
    ) -> None:
        """`parks`: whether steps may have to make way between two layers. `followers` are the other
        processes of the model's mesh, where this is process 0 of several.
        """
        self.family = family = Family.of(models)
        self.model = model = family[0]
        cfg, num_ranks = model.config, num_ranks_of(model)
        kept = page_windows(cfg), is_recurrent(cfg)
        self.limits = limits_of(config, cfg.num_layers, num_ranks, *kept)
        each, probes = [one.params for one in family], probes_of(config.balance, family)
        if probes:
            each = [{**own, LOOKAHEAD: of} for own, of in zip(each, probes, strict=True)]
        self.sets = ParamSets(each, eager=config.enforce_eager, num_resident=config.resident_sets)
        # One program runs any part of a step where a loop whose length the device reads is free. A
        # GPU's host would wait for it; there each part has a program of its own.
        stacked = not any(isinstance(segment, tuple) for segment in self.sets[0]["segments"])
        self._parts_by_number = stacked and backend() == "cpu"
        self.buckets = Buckets(config, self.limits, mixed_models(config, family))
        self.copies_rule = copies_rule(config.balance, model, self.buckets.prefill)
        self.buckets.switched = frozenset(self.copies_rule.gains_from)
        self._max_model_len = config.max_model_len
        num_layers = self.limits.num_layers
        wanted = parks and config.part_layers < num_layers
        self._runs_parts = self._parts_by_number or wanted
        self._measures_parts = self._runs_parts and not config.part_layers
        self._layers_at_once = dict.fromkeys(
            ((key.phase, key.size) for key in self.buckets.step_keys()),
            min(config.part_layers or num_layers, num_layers),
        )
        devices = None if model.home is None else list(model.home.mesh.devices.flat)
        executables = Executables.at(config.compilation_cache, devices)
        states = States(model, config, self._runs_parts)
        programs_of = partial(
            Programs,
            family,
            self.buckets,
            params=self.sets,
            parts_by_number=self._parts_by_number,
            replication=self.copies_rule.replication,
        )

        def step_bytes(limits: Limits) -> int:
            programs = programs_of(states.shapes(limits))
            programs.compilations.close()
            return programs.step_bytes(executables)

        beside = states.shaping_bytes(self.limits)
        beside += self.limits.slots_per_rank * sequence_bytes(cfg, model.dtype)
        beside += len(family.vacant) * arrival_bytes(family)[0]
        if goes_by_memory(config):
            self.limits = by_memory(config, self.limits, model, step_bytes, beside=beside)
        else:
            check_memory(model, self.limits, beside=beside)
        with allocating(config, self.limits, model):
            state, shaping = states.make(self.limits), states.shaping(self.limits)
            jax.block_until_ready((state, shaping))
        programs = programs_of(state)
        self.device = Device(
            family, self.limits, self.buckets, state, shaping, programs, executables
        )
        self._followers, self._failures = followers, Lost()
        self._calls = self.device if followers is None else Led(self.device, followers)
        self._reader = InOrder("jmoe-read")
        self._launcher = InOrder("jmoe-launch") if self.device.calls_block else None
        self._switched_s: float | None = None  # the interpreter's interval before `start`
        self.mixed = MixedSteps(self.device, self._calls)
        self._undrawn: _Undrawn | None = None
        self._closing = threading.Event()
        self.copy_s = 0.0
        self.implementations = self.programs.implementations()

    @property
    def programs(self) -> Programs:
        """Compiled programs."""
        return self.device.programs

    @property
    def compilations_since_ready(self) -> int:
        """Compilations after `start` that a step waited for; each one is a fault."""
        return self.programs.compilations.since_ready

    @property
    def num_programs(self) -> int:
        """See Executor."""
        return len(self.programs.compiled())

    def start(self, way: int, ways: Sequence[int], progress: Progress | None = None) -> None:
        """Compiles every program, runs each once on padding, and loads `way` (0: none). Late
        programs are compiled by a thread from then on.
        """
        self._prepare(self.buckets.keys(), progress)
        for other in [w for w in ways if w != way] + [way] * bool(way):
            self._calls.use_way(other)  # every way once: switching compiles nothing later
        jax.block_until_ready((self.device.state, self.model.pool))
        if (home := self.family.home) is not None and home.spare:
            self._measure_copies(home.placement)
        if (offloaded := self.family.offloaded) is not None and offloaded.spare:
            self.fetch_experts(offloaded.first_fetched())  # and what that takes is compiled
        if self.family.routed_slots and len(self.family) > 1:
            compile_writes(self.family)
        if self._measures_parts:
            self._measure_parts()
        self.mixed.measure()
        if self._runs_parts and not self._parts_by_number:
            self._prepare(self.buckets.parts(self._layers_at_once), progress)
        self._calls.ready()
        if self._launcher is not None:
            self._switched_s = sys.getswitchinterval()
            sys.setswitchinterval(min(self._switched_s, SWITCH_S))
        if self.buckets.late:
            threading.Thread(target=self._compile_late, name="jmoe-late").start()

    def _compile_late(self) -> None:
        wait_s = LATE_AFTER_S
        for phase, size in self.buckets.late:
            if self._closing.wait(wait_s):
                return
            wait_s = 0.0
            try:
                self.device.compile_late(phase, size)
            except Exception as error:  # whatever XLA raises: a larger program serves
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                unit = "rows" if phase == "decode" else "tokens"
                of = f"{phase} steps of {size} {unit}"
                log.warning("no program for %s, which run more: %s", of, why)

    def _prepare(self, keys: Sequence[Key], progress: Progress | None) -> None:
        """Compiles programs, and runs each once on padding."""
        self._calls.compile(keys, progress)
        for done, key in enumerate(keys):
            if progress is not None:
                progress("warming", done, len(keys))
            self._calls.warm(key)

    def _measure_parts(self) -> None:
        """Chooses how many layers to launch at once.

        What a launch more costs is what two halves take longer than the whole, each read as a
        server reads it, and at least a launch of no layers. Where each part is a program, which is
        compiled only for the cut that is chosen, it is what the host takes to launch one. Each size
        is cut as its own layers take: steps of sizes that are cut alike can join.
        """
        num_layers = self.limits.num_layers
        half = num_layers // 2
        for phase, size in self._layers_at_once:
            key, whole = Key(phase, size, FULL_CAPACITY), [(0, num_layers)]
            if self._parts_by_number:
                halves = [(0, half), (half, num_layers)]
                whole_s, halves_s, none_s = self._time(key, whole, halves, [(0, 0)])
                launch_s = max(halves_s - whole_s, none_s)
            else:
                (whole_s,) = self._time(key, whole)
                launch_s = max(GPU_LAUNCH_S, self._host_launch_s(key))
            self._layers_at_once[phase, size] = part_layers(launch_s, whole_s, num_layers)

    def _measure_copies(self, placement: Placement) -> None:
        """Measures what `host_layer` takes, and has it compiled.

        One expert gets a host more, or one less where every slot is taken, and all is put back.
        """
        before, took_s = np.array(placement.hosts[0]), []
        other, room = before.copy(), before.sum(axis=0) < placement.room
        copied = before & (before.sum(axis=1, keepdims=True) > 1)
        expert, device = np.argwhere(~before & room[None, :] if room.any() else copied)[-1]
        other[expert, device] ^= True
        for hosts in (other, before, other, before):
            began = time.perf_counter()
            self._calls.host_layer(0, hosts)
            jax.block_until_ready(self.model.pool)
            took_s.append(time.perf_counter() - began)
        self.copy_s = max(took_s[2:])

    def _time(self, key: Key, *ways: Sequence[tuple[int, int]]) -> list[float]:
        """Returns the seconds that a full step takes when it is cut in these ways, in turn;
        medians.

        A way is (first layer, layer to stop at) of each part.
        """
        cut = [[self._full_step(key, *layers) for layers in way] for way in ways]
        times_s: list[list[float]] = [[] for _ in ways]
        for _ in range(TIMED):
            for parts, found in zip(cut, times_s, strict=True):
                began = time.perf_counter()
                for part in parts:
                    arrays = self.device.arrays(key, part, FULL_CONTROL)
                    out = self._calls.run(key, arrays)
                    self.device.read(out, key, part)()
                found.append(time.perf_counter() - began)
        return [sorted(found)[TIMED // 2] for found in times_s]

    def _host_launch_s(self, key: Key) -> float:
        """Returns the seconds that the host takes to lay out and launch a full step, which goes on
        without it; a median.
        """
        step, found = self._full_step(key, 0, self.limits.num_layers), []
        for _ in range(TIMED):
            began = time.perf_counter()
            out = self._calls.run(key, self.device.arrays(key, step, FULL_CONTROL))
            found.append(time.perf_counter() - began)
            self.device.read(out, key, step)()
        return sorted(found)[TIMED // 2]

    def _full_step(self, key: Key, first: int, stop: int) -> ByRank:
        """Returns these layers of a step that fills a size as far as sequences are long enough, of
        slots that own no page yet: all are in the padding page.
        """
        size = min(key.size, self.buckets.rows(key), self.limits.slots_per_rank)
        q_len = min(max(1, key.size // size), self._max_model_len)
        prefill = key.phase == "prefill"
        rows = [
            pack_row(
                rank * self.limits.slots_per_rank + at, kv_len=q_len, q_len=q_len if prefill else 1
            )
            for rank in range(self.limits.num_ranks)
            for at in range(size)
        ]
        tokens = np.zeros(len(rows) * q_len * prefill, np.int32)
        plan = StepPlan(
            Phase(key.phase), np.stack(rows), tokens=tokens, first_layer=first, stop_layer=stop
        )
        return ByRank.of(plan, self.limits)

    def launch(self, plan: StepPlan, control: StepControl) -> "Future[StepResult]":
        """See Executor."""
        done = self._begin(plan, control)
        if self.buckets.switched and plan.phase is Phase.PREFILL:
            done.add_done_callback(partial(self._note_load, self.family[plan.models[0]]))
        return done

    def _note_load(self, model: Model, done: "Future[StepResult]") -> None:
        """Tells the rule about copies what a prefill step of a model computed where."""
        if not done.cancelled() and done.exception() is None and model.home is not None:
            result, hosts = done.result(), np.asarray(model.home.placement.hosts)
            if result.device_rows is not None:
                rows = result.expert_rows, result.device_rows
                self.copies_rule.seen(*rows, hosts, copied=result.copies is not None)

    def _begin(self, plan: StepPlan, control: StepControl) -> "Future[StepResult]":
        step = ByRank.of(plan, self.limits)
        key = self.buckets.choose(
            plan.phase,
            step.size,
            self._capacity_percent(plan, control),
            prompt_logprobs=plan.prompt_logprobs,
            models=len(plan.models),
            hybrid=plan.num_decodes > 0,
        )
        if not self._parts_by_number and plan.num_layers < self.limits.num_layers:
            layers = plan.first_layer, plan.stop_layer
            key = self.buckets.part(key, layers, self._layers_at_once)
        if plan.phase is Phase.PREFILL and key.size in self.buckets.switched:
            key = key._replace(copies=self.copies_rule.copies(key.size))
        arrays = self.device.arrays(key, step, control)
        score = plan.is_last and plan.prompt_logprobs
        run = partial(self._calls.run, key, arrays, models=plan.models, score=score)
        if plan.shapes is not None:
            seats = [self._seating(seat) for seat in plan.shapes.seats]
            begun = self._call(lambda: [call() for call in (run, *seats)])
            if not plan.waits:
                allowed = everything(len(plan.rows), self.model.config.vocab_size)
                return self._draw(key, step, begun, allowed)
            self._undrawn = _Undrawn(key, step, begun, Future())
            return self._undrawn.result
        return self._launch(lambda: self.device.read(run(sample=plan.is_last), key, step))

    def _seating(self, seat: Seat) -> Callable[[], None]:
        rank, slot = divmod(seat.slot, self.limits.slots_per_rank)
        told = pack_seat(slot, seat.prompt, seat.output, seat.biases, self.buckets.seat.size)
        return partial(self._calls.seat, rank, told)

    def draw(self, allowed: Int[np.ndarray, "B W"]) -> None:
        """See Executor."""
        undrawn, self._undrawn = self._undrawn, None
        assert undrawn is not None, "no step waits to be drawn"
        drawn = self._draw(undrawn.key, undrawn.step, undrawn.begun, allowed)
        drawn.add_done_callback(lambda read: _pass_on(read, undrawn.result))

    def _draw(
        self, key: Key, step: ByRank, begun: "Future[Any]", allowed: Int[np.ndarray, "B W"]
    ) -> "Future[StepResult]":
        """Draws tokens of a step whose logits are changed, from those that rows are allowed. What
        went wrong as it was `begun` is what goes wrong here.
        """
        assert step.plan.shapes is not None
        num_rows = self.buckets.rows(key)
        at = step.row_at(num_rows)
        shapes = np.zeros((step.num_ranks * num_rows, NUM_SHAPE_COLUMNS), np.int32)
        shapes[at] = step.plan.shapes.rows
        limited = (allowed != -1).any(axis=1)  # others are many words that say nothing
        draw = partial(self._calls.draw, shapes, at[limited], allowed[limited])

        def start() -> Callable[[], StepResult]:
            begun.result()
            return self.device.read(draw(), key, step)

        return self._launch(start)

    def _in_order(self, call: Callable[[], object]) -> None:
        """Makes a device call in the order of launches; returns when it is made, except where steps
        run one at a time.
        """
        made = self._call(call)
        if not self.device.one_at_a_time:
            made.result()

    def _call(self, call: Callable[[], object]) -> "Future[Any]":
        """Makes a device call in the order of launches; returns what tells when it is made."""
        if self.device.one_at_a_time:
            return self._submit(call)
        if self._launcher is not None:
            return self._launcher.submit(call)
        made: Future[Any] = Future()
        made.set_result(call())
        return made

    def _launch(self, start: Callable[[], Callable[[], StepResult]]) -> "Future[StepResult]":
        """Makes device calls in order, and has what they return read behind them.

        A call that blocks is made in a thread of its own, so that the tick goes on.
        """
        if self.device.one_at_a_time:
            return self._submit(lambda: start()())
        if self._launcher is None:
            return self._submit(start())
        launched = self._launcher.submit(lambda: (start(), time.monotonic()))

        def read() -> StepResult:
            read, called_at = launched.result()
            return replace(read(), called_at=called_at)

        return self._submit(read)

    def _submit[T](self, call: Callable[[], T]) -> "Future[T]":
        """Runs a call in the reader's thread, in order. A fault that comes of a lost process says
        so.
        """
        if self._followers is None:
            return self._reader.submit(call)
        future = self._reader.submit(partial(self._followers.lost.named, call))
        future.add_done_callback(self._note_failure)
        return future

    def _note_failure(self, done: "Future[Any]") -> None:
        if (error := done.exception()) is not None:
            self._failures.say(f"{type(error).__name__}: {error}")

    def _capacity_percent(self, plan: StepPlan, control: StepControl) -> int:
        """Returns the threshold whose capacity serves the step.

        Experts that exempt rows visit are loaded beside those of the threshold: with m experts and
        K picks a row, each row may add K / m to it; K / (N m) in a mixed step of N models.
        """
        cfg = self.model.config
        if control.strategy == 0:
            return FULL_CAPACITY
        percent, num_experts = control.threshold_percent, len(plan.models) * cfg.num_experts
        percent = max(
            self.family[model].resident.largest_threshold(control.strategy, percent)
            for model in plan.models
        )
        if (own := cfg.strategy) is not None and control.strategy == OWN:
            num_united = self.model.num_united_slots
            most = own.most_active(percent, num_experts, num_united)
            if most >= num_experts:
                return FULL_CAPACITY
            # The paper's plan, too, which serves where this one fails.
            percent = max(percent, math.ceil(100 * (most - num_united) / num_experts))
        pinned = 100 * plan.num_exempt * cfg.experts_per_token
        return min(FULL_CAPACITY, percent + math.ceil(pinned / num_experts))

    def layers_at_once(self, phase: Phase, size: int) -> int:
        """See Executor; measured at the start, or as the settings say."""
        return self._layers_at_once[phase, self.buckets.bucket(phase, size)]

    def mixes(self, counts: Int[np.ndarray, "models ranks"]) -> bool:
        """See Executor; measured at the start."""
        return self.mixed.pays(counts)

    @property
    def has_hybrid(self) -> bool:
        """See Executor."""
        return self.buckets.has_hybrid

    @property
    def part_layers_by_size(self) -> dict[str, int]:
        """See Executor."""
        return {f"{phase} {size}": n for (phase, size), n in self._layers_at_once.items()}

    def load_way(self, way: int, layer: int) -> None:
        """See Executor. Every way fits the slots that capacities are reckoned with."""
        self._in_order(partial(self._calls.load_way, way, layer))

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """See Executor."""
        self._failures.watch(on_failure)
        if self._followers is not None:
            self._followers.lost.watch(lambda reason: self._failures.say(f"PeerLost: {reason}"))

    def host_layer(self, layer: int, hosts: Bool[np.ndarray, "E D"]) -> None:
        """See Executor."""
        self._in_order(partial(self._calls.host_layer, layer, hosts.copy()))

    @property
    def resident_models(self) -> Sequence[int] | None:
        """See Executor."""
        return None if self.sets.all_resident else self.sets.resident

    def replace_set(self, victim: int, model: int) -> "Future[None]":
        """See Executor."""
        self._in_order(lambda: None)  # steps of the victim have read its weights
        return self.sets.replace(victim, model)

    def place_params(self, params: Params) -> Params:
        """See Executor."""
        return self.sets.placed(params)

    def write_experts(self, arrival: Arrival) -> None:
        """See Executor."""
        self._in_order(partial(arrival.write_piece, self.model.resident.held))

    def load_united(self, model: Model, way: int, layer: int) -> None:
        """See Executor."""
        self._in_order(partial(model.load_way_layer, way, layer))

    def install(self, number: int, model: Model) -> None:
        """See Executor."""
        self.family.put(number, model)
        self.sets.put(number, model.params)

    def vacate(self, number: int) -> None:
        """See Executor."""
        self.family.put(number, None)
        self.sets.put(number, self.sets[0])

    def fetch_experts(self, experts: Mapping[Expert, int]) -> None:
        """See Executor."""
        self._in_order(partial(self.family.fetch, experts))

    def close(self) -> None:
        """Stops counting compilations, and reading. Other processes end, too, once they have run
        what they were told.
        """
        self._closing.set()
        self.programs.compilations.close()
        self.sets.close()
        if self._followers is not None:
            self._end(self._followers)
        if self._launcher is not None:
            self._launcher.close()
            if self._switched_s is not None:
                sys.setswitchinterval(self._switched_s)
        self._reader.close()

    def _end(self, followers: "Followers") -> None:
        if followers.lost.reason or self._failures.reason:
            followers.close(stop=False)
            return
        calling = self._reader if self.device.one_at_a_time else self._launcher
        if calling is None:
            followers.close()
            return
        try:  # behind the steps that wait
            calling.submit(followers.close).result(followers.stops_within_s)
        except TimeoutError:  # one of them hangs
            followers.close(stop=False)


def _pass_on(read: "Future[Any]", result: "Future[Any]") -> None:
    if not result.set_running_or_notify_cancel():
        return
    if (error := read.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(read.result())


class InOrder:
    """Runs jobs in the order they were given: reads what the device computes, or launches steps.

    Its thread is a daemon: one that waits for a device that hangs keeps no process alive, as a
    `ThreadPoolExecutor`'s would.
    """

    def __init__(self, name: str) -> None:
        """`name` is the thread's."""
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit[T](self, job: Callable[[], T]) -> "Future[T]":
        """Returns a future of what `job` returns or raises."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Ends the thread once it has run what it was given."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (given := self._jobs.get()) is not None:
            future, job = given
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:  # whatever it is, it belongs to who asked
                future.set_exception(error)
