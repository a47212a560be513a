"""The runner: device state, launches, and reads. The only one that touches the device."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.api import Model
from jmoe.packed_rows import empty_deltas, empty_rows, pack_row
from jmoe.steps import StepOutput, make_state, served
from pallas_kernels.backend import backend
from serving.config import EngineConfig
from serving.execution.executables import Executables
from serving.execution.memory import check_memory
from serving.execution.programs import (
    FULL_CAPACITY,
    Buckets,
    Key,
    Programs,
    Progress,
    with_default_buckets,
)
from serving.execution.reader import ResultReader
from serving.plan import NUM_EXTENTS, Limits, Phase, StepControl, StepPlan, StepResult

log = logging.getLogger(__name__)

MAX_LAUNCH_SHARE = 0.03  # of the time of layers launched at once, what launching them may cost
TIMED = 5  # runs of a program whose median counts
GPU_LAUNCH_S = 17e-6
"""What one launch more costs a GPU: a graph's start, and kernels that are in every part. Reckoned,
not measured."""
FULL_CONTROL = StepControl(100, 0)


class Runner(Protocol):
    """What an engine asks of a device; `serving.fake.FakeRunner` answers without one."""

    limits: Limits

    @property
    def compilations_since_ready(self) -> int:
        """Compilations since the runner was ready; each one is a fault."""
        ...

    @property
    def num_programs(self) -> int:
        """Programs that were compiled before it was ready."""
        ...

    def launch(self, plan: StepPlan, control: StepControl) -> "Future[StepResult]":
        """Starts a step's layers under `control` and returns at once.

        The future is done when they are, in a thread of the runner's.
        """
        ...

    def layers_at_once(self, phase: Phase, size: int) -> int:
        """Layers of such a step to launch at once, where others may have to go between."""
        ...

    @property
    def part_layers_by_size(self) -> Mapping[str, int]:
        """`layers_at_once` by phase and size, such as "decode 64"."""
        ...

    def load_way(self, way: int, layer: int) -> None:
        """Puts one layer's united experts of `way` into the pool, between two steps."""
        ...

    def close(self) -> None:
        """Releases what the runner holds outside the device."""
        ...


def part_layers(launch_s: float, whole_s: float, num_layers: int) -> int:
    """Layers to launch at once: n = clamp(ceil(c / (0.03 t_layer)), 1, L), in parts alike.

    What a launch costs beside its layers, `launch_s`, may be 3 % of them; `whole_s` is what all
    layers take in one (docs/priorities.md).
    """
    layer_s = max(whole_s - launch_s, 1e-9) / num_layers
    least = min(max(math.ceil(launch_s / (MAX_LAUNCH_SHARE * layer_s)), 1), num_layers)
    return -(-num_layers // (num_layers // least))


def limits_of(config: EngineConfig, num_layers: int = 1) -> Limits:
    """Sizes of a configuration; `num_pages` 0 means enough for `max_num_seqs` at full length."""
    blocks = -(-config.max_model_len // config.page_size)
    reserved = config.reserved_ls_seqs
    reserved = max(1, config.max_num_seqs // 8) if reserved < 0 else reserved
    return Limits(
        num_slots=config.max_num_seqs + reserved,
        max_decode_seqs=config.max_num_seqs,
        num_layers=num_layers,
        prefill_buckets=with_default_buckets(config).prefill_buckets,
        num_pages=config.num_pages or blocks * config.max_num_seqs,
        page_size=config.page_size,
        max_prefill_tokens=config.max_prefill_tokens,
        max_prefill_seqs=min(config.max_prefill_seqs, config.max_num_seqs),
    )


def fit_to_model(config: EngineConfig, model: Model) -> EngineConfig:
    """`config` as it is served: what it leaves open is chosen, and `max_model_len` cut to the
    positions that the model was made for.
    """
    config, most = with_default_buckets(config), model.config.max_position
    if config.max_model_len <= most:
        return config
    log.warning(
        "max_model_len is %d; %s has %d positions, and serves those",
        config.max_model_len,
        model.name,
        most,
    )
    return replace(config, max_model_len=most)


class DeviceRunner:
    """A model's step programs over one device state. `start` compiles and warms them."""

    def __init__(self, model: Model, config: EngineConfig, *, parks: bool = True) -> None:
        """`parks`: whether steps may have to make way between two layers."""
        self.model = model
        self.limits = limits_of(config, model.config.num_layers)
        params, options = served(model.params, eager=config.enforce_eager)
        # One program runs any part of a step where a loop whose length the device reads is free. A
        # GPU's host would wait for it; there each part has a program of its own.
        stacked = not any(isinstance(segment, tuple) for segment in params["segments"])
        self._parts_by_number = stacked and backend() == "cpu"
        check_memory(model, self.limits)
        self.buckets = Buckets(config, self.limits)
        num_layers = self.limits.num_layers
        wanted = parks and config.part_layers < num_layers
        self._runs_parts = self._parts_by_number or wanted
        self._measures_parts = self._runs_parts and not config.part_layers
        self._layers_at_once = dict.fromkeys(
            ((key.phase, key.size) for key in self.buckets.step_keys()),
            min(config.part_layers or num_layers, num_layers),
        )
        self._executables = Executables.at(config.compilation_cache)
        self._state = make_state(
            model.config,
            num_slots=self.limits.num_slots,
            num_pages=self.limits.num_pages,
            page_size=self.limits.page_size,
            max_blocks=self.limits.pages_for(config.max_model_len),
            dtype=model.dtype,
            num_hidden=self.limits.extent(NUM_EXTENTS) if self._runs_parts else 0,
        )
        self.programs = Programs(
            model,
            self.buckets,
            self._state,
            params,
            options,
            parts_by_number=self._parts_by_number,
        )
        self._reader = ResultReader()

    @property
    def compilations_since_ready(self) -> int:
        """Compilations after `start`; each one is a fault."""
        return self.programs.compilations_since_ready

    @property
    def num_programs(self) -> int:
        """See Runner."""
        return len(self.programs.compiled())

    def start(self, way: int, ways: Sequence[int], progress: Progress | None = None) -> None:
        """Compiles every program, runs each once on padding, and loads `way` (0: none)."""
        self._prepare(self.buckets.keys(), progress)
        for other in [w for w in ways if w != way] + [way] * bool(way):
            self.model.use_way(other)  # every way once: switching compiles nothing later
        jax.block_until_ready((self._state, self.model.pool))
        if self._measures_parts:
            self._measure_parts()
        if self._runs_parts and not self._parts_by_number:
            self._prepare(self._keys_of_parts(), progress)
        self.programs.mark_ready()

    def _prepare(self, keys: Sequence[Key], progress: Progress | None) -> None:
        """Compiles programs, and runs each once on padding."""
        self.programs.compile_all(keys, self._executables, progress)
        for done, key in enumerate(keys):
            if progress is not None:
                progress("warming", done, len(keys))
            self._warm(key)

    def _measure_parts(self) -> None:
        """Chooses how many layers to launch at once.

        What a launch more costs is what two halves take longer than the whole, each read as a
        server reads it, and at least a launch of no layers. Where each part is a program, all sizes
        of a phase are cut alike, so that they can join.
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
                (whole_s,), launch_s = self._time(key, whole), GPU_LAUNCH_S
            self._layers_at_once[phase, size] = part_layers(launch_s, whole_s, num_layers)
        if not self._parts_by_number:
            for phase, longest in self._longest_parts().items():
                self._layers_at_once |= {k: longest for k in self._layers_at_once if k[0] == phase}

    def _longest_parts(self) -> dict[str, int]:
        """Layers at once by phase, the most of any size."""
        found: dict[str, int] = {}
        for (phase, _), count in self._layers_at_once.items():
            found[phase] = max(found.get(phase, 0), count)
        return found

    def _keys_of_parts(self) -> list[Key]:
        num_layers = self.limits.num_layers
        return [
            key
            for phase, count in self._longest_parts().items()
            if count < num_layers
            for key in self.buckets.parts(phase, num_layers, count)
        ]

    def _time(self, key: Key, *ways: Sequence[tuple[int, int]]) -> list[float]:
        """Seconds that a full step takes when it is cut in these ways, in turn; medians.

        A way is (first layer, layer to stop at) of each part.
        """
        size = min(key.size, self.buckets.rows(key))
        rows, q_len = empty_rows(size), max(1, key.size // size)
        for slot in range(size):  # of page 0, which nobody owns yet
            rows[slot] = pack_row(slot, kv_len=q_len, q_len=q_len if key.phase == "prefill" else 1)
        times_s: list[list[float]] = [[] for _ in ways]
        for _ in range(TIMED):
            for way, found in zip(ways, times_s, strict=True):
                began = time.perf_counter()
                for first, stop in way:
                    arrays = self.arrays(key, rows, FULL_CONTROL, first=first, stop=stop)
                    self._state, out = self.programs.run(key, self._state, *arrays)
                    self._start_copies(out, size, first)()
                found.append(time.perf_counter() - began)
        return [sorted(found)[TIMED // 2] for found in times_s]

    def arrays(
        self,
        key: Key,
        rows: np.ndarray,
        control: StepControl,
        *,
        deltas: np.ndarray | None = None,
        tokens: np.ndarray | None = None,
        places: np.ndarray | None = None,
        first: int = 0,
        stop: int,
    ) -> list[np.ndarray]:
        """A program's arguments behind the state, padded to its size."""
        padded = empty_rows(self.buckets.rows(key))
        padded[: len(rows)] = rows
        table = empty_deltas(self.buckets.deltas(key))
        if deltas is not None:
            table[: len(deltas)] = deltas
        arrays = [padded, table, np.array([*control, first, stop], np.int32)]
        if key.phase == "prefill":
            arrays.insert(0, _padded(tokens, key.size))
            if self._runs_parts:
                arrays.append(_padded(places, key.size))
        return arrays

    def _warm(self, key: Key) -> None:
        """Runs a program on padding."""
        rows, cfg = empty_rows(self.buckets.rows(key)), self.model.config
        nothing = StepOutput(*jnp.zeros((4, 1), jnp.int32))
        if key.phase in ("sample", "truncate"):
            logits = jnp.zeros((len(rows), cfg.vocab_size), jnp.float32)
            rows[:] = pack_row(-1, kv_len=0, temperature=1.0, top_k=int(key.phase == "truncate"))
            self._state, out = self.programs.sample(
                self._state, nothing._replace(logits=logits), rows
            )
        elif key.phase == "score":
            hidden = jnp.zeros((key.size, cfg.d_model), self.model.dtype)
            tokens = np.zeros(key.size, np.int32)
            out = self.programs.score(nothing._replace(hidden=hidden), tokens, rows)
        else:
            control = StepControl(key.bucket_percent, 0)
            arrays = self.arrays(key, rows, control, stop=self.limits.num_layers)
            self._state, out = self.programs.run(key, self._state, *arrays)
        jax.block_until_ready(out)

    def launch(self, plan: StepPlan, control: StepControl) -> "Future[StepResult]":
        """See Runner."""
        key = self.buckets.choose(
            plan.phase,
            plan.size,
            self._capacity_percent(plan, control),
            prompt_logprobs=plan.prompt_logprobs,
        )
        if not self._parts_by_number and plan.num_layers < self.limits.num_layers:
            layers = plan.first_layer, plan.stop_layer
            key = key._replace(bucket_percent=FULL_CAPACITY, layers=layers)
        arrays = self.arrays(
            key,
            plan.rows,
            control,
            deltas=plan.deltas,
            tokens=plan.tokens,
            places=plan.places,
            first=plan.first_layer,
            stop=plan.stop_layer,
        )
        self._state, out = self.programs.run(key, self._state, *arrays)
        if plan.is_last:
            rows = arrays[plan.phase is Phase.PREFILL]
            if plan.prompt_logprobs:
                out = self.programs.score(out, arrays[0], rows)
            self._state, out = self.programs.sample(self._state, out, rows)
        return self._reader.submit(self._start_copies(out, len(plan.rows), plan.first_layer))

    def _start_copies(
        self, out: StepOutput, count: int, first_layer: int = 0
    ) -> Callable[[], StepResult]:
        """Starts the copies of what the host reads. The result waits for them, and returns them
        without the rows of padding behind the first `count`.
        """
        out = out._replace(logits=None, hidden=None)
        for leaf in jax.tree.leaves(out):
            leaf.copy_to_host_async()
        moe_layers = self.model.config.moe_layers

        def read() -> StepResult:
            read = jax.device_get(out)
            none, expert_rows = [0] * count, read.expert_rows
            if len(expert_rows) < sum(moe_layers):  # of a part's own layers
                before, found = sum(moe_layers[:first_layer]), expert_rows
                expert_rows = np.zeros((sum(moe_layers), found.shape[1]), found.dtype)
                expert_rows[before : before + len(found)] = found
            return StepResult(
                none if read.tokens is None else read.tokens[:count].tolist(),
                none if read.logprobs is None else read.logprobs[:count].tolist(),
                read.degraded[:count].tolist(),
                expert_rows,
                read.prompt_logprobs,
            )

        return read

    def _capacity_percent(self, plan: StepPlan, control: StepControl) -> int:
        """The threshold whose capacity serves the step.

        Experts that exempt rows visit are loaded beside those of the threshold: with m experts and
        K picks a row, each row may add K / m to it.
        """
        cfg = self.model.config
        if control.strategy == 0:
            return FULL_CAPACITY
        pinned = 100 * plan.num_exempt * cfg.experts_per_token
        return min(FULL_CAPACITY, control.threshold_percent + math.ceil(pinned / cfg.num_experts))

    def layers_at_once(self, phase: Phase, size: int) -> int:
        """See Runner; measured at the start, or as the settings say."""
        return self._layers_at_once[phase, self.buckets.bucket(phase, size)]

    @property
    def part_layers_by_size(self) -> dict[str, int]:
        """See Runner."""
        return {f"{phase} {size}": n for (phase, size), n in self._layers_at_once.items()}

    def load_way(self, way: int, layer: int) -> None:
        """See Runner. Every way fits the slots that capacities are reckoned with."""
        self.model.load_way_layer(way, layer)

    def close(self) -> None:
        """Stops counting compilations, and reading."""
        self.programs.close()
        self._reader.close()


def _padded(values: np.ndarray | None, size: int) -> np.ndarray:
    padded = np.zeros(size, np.int32)
    if values is not None:
        padded[: len(values)] = values
    return padded
