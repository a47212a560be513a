"""Step programs: compiled ahead of time, keyed by (phase, token bucket, threshold bucket)."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from operator import attrgetter
from threading import Lock, get_native_id
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int

from jmoe.config import ModelConfig
from jmoe.family import Family
from jmoe.mixed import MixedWeights, mixed_decode_step
from jmoe.model import LOOKAHEAD
from jmoe.packed_rows import (
    NUM_COLUMNS,
    NUM_CONTROL,
    NUM_DELTA_COLUMNS,
    NUM_SHAPE_COLUMNS,
    num_words,
    seat_size,
)
from jmoe.parallel import steps as on_mesh
from jmoe.parallel.replicas import Replication
from jmoe.shaping import Shaping, make_shaping, seat
from jmoe.steps import (
    State,
    decode_step,
    draw_step,
    prefill_step,
    sample_step,
    score_step,
)
from jmoe.weights import Params, Weights
from pallas_kernels.backend import backend, noting
from pallas_kernels.routing import max_active_experts
from serving.execution import traced_code
from serving.execution.buckets import FULL_CAPACITY, Buckets, Key, sampling_phases
from serving.execution.compilations import Compilations, no_step_waits
from serving.execution.executables import Executables
from serving.execution.param_sets import ParamSets

MAX_COMPILERS = 8  # at a time; each takes up to a gigabyte of host memory
LATE_SWITCH_S = 0.0002
"""After which a thread that traces a late program gives way to the event loop."""
_giving_way_alone = Lock()
"""Engines of one process compile late programs in turn: the interval is the process's."""
Progress = Callable[[str, int, int], None]
"""`(what, done, total)`."""


class Programs:
    """Compiled programs of one architecture, and the count of compilations since they were ready.

    Models of a family run the same ones: a program's weights are an argument.

    On a Hopper GPU a step is one CUDA graph; all weights of layers but the routed experts are there
    twice then (`jmoe.steps.served`).
    """

    def __init__(
        self,
        family: Family,
        buckets: Buckets,
        state: State,
        params: ParamSets,
        *,
        parts_by_number: bool,
        replication: Mapping[int, Replication] | None = None,
    ) -> None:
        """`params` are of each model. A model that is spread over a mesh has programs that run on
        all of it.

        `parts_by_number`: one program runs any part of a step, as its arguments say; else there is
        a program for each. `replication` says how prefill programs copy experts, by their tokens a
        device; sizes that are not there do not.
        """
        self._parts_by_number = parts_by_number
        self._replication = replication or {}
        self._family, self._model = family, family[0]  # programs are made by the first
        self._buckets = buckets
        self._state = jax.tree.map(_abstract, state)
        self._params, self._options = params, dict(params.options)
        home = self._model.home
        self._mesh = None if home is None else home.mesh
        self._ranks = 1 if self._mesh is None else self._mesh.size
        vocab = self._model.config.vocab_size
        split, _ = on_mesh.shardings(self._mesh)
        make = partial(make_shaping, state.last_token.shape[0], vocab)
        self._shaping: Shaping = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=split),
            jax.eval_shape(make),
        )
        self._compiled: dict[Key, Any] = {}
        self.num_from_disk = 0  # of them, read rather than compiled
        self.compilations = Compilations()

    def compile_all(
        self,
        keys: Sequence[Key],
        executables: Executables,
        progress: Progress | None = None,
        *,
        late: bool = False,
    ) -> None:
        """Compiles programs, several at a time; what the disk has is read from there. `late` ones
        while others serve: one at a time, by a thread that takes the cores' idle time alone.
        """
        before = len(self._compiled)
        code = _traced_code(self._model.config)

        def tell() -> None:
            if progress is not None:
                progress("compiling", len(self._compiled) - before, len(keys))

        def compiled(key: Key, cache_key: str, lowered: jax.stages.Lowered) -> None:
            with no_step_waits() if late else nullcontext():
                found = lowered.compile(compiler_options=self._options or None)
            executables.save(key.name, cache_key, found)
            self._compiled[key] = found

        tell()
        # XLA's compiler lets other threads run; tracing and lowering do not, and stay in this one.
        workers = 1 if late else min(MAX_COMPILERS, os.cpu_count() or 1)
        with (
            giving_way() if late else nullcontext(),
            ThreadPoolExecutor(workers, initializer=be_nice if late else None) as pool,
        ):
            jobs = []
            try:
                for key in keys:
                    cache_key = self._cache_key(key, code)
                    kept = executables.load(key.name, cache_key)
                    if kept is not None:
                        self._compiled[key] = kept
                        self.num_from_disk += 1
                    else:
                        jobs.append(pool.submit(compiled, key, cache_key, self._lower(key)))
                    tell()
                for job in as_completed(jobs):
                    job.result()
                    tell()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        _trim()

    def step_bytes(self, executables: Executables) -> int:
        """Returns the device memory that a step needs beside its arguments, by XLA's reckoning of
        the largest program of each phase. What was compiled is kept, and what was reckoned as well:
        an executable that was read from the disk does not say.
        """
        code = _traced_code(self._model.config)
        by_size = sorted(
            self._buckets.keys(),
            key=attrgetter("models", "size", "bucket_percent", "copies"),
        )
        largest = {(key.phase, key.num_decodes > 0): key for key in by_size}
        needed = list[int]()
        jobs: list[Future[int]] = []

        def compiled(name: str, cache_key: str, lowered: jax.stages.Lowered) -> int:
            compiled = lowered.compile(compiler_options=self._options or None)
            found = _bytes_beside_arguments(compiled)
            executables.save(name, cache_key, compiled)
            executables.remember(name, cache_key, found)
            return found

        with ThreadPoolExecutor(len(largest)) as pool:  # as `compile_all` does
            for key in largest.values():
                cache_key = self._cache_key(key, code)
                found = executables.recall(key.name, cache_key)
                if found is not None:
                    needed.append(found)
                else:
                    jobs.append(pool.submit(compiled, key.name, cache_key, self._lower(key)))
        return max(needed + [job.result() for job in jobs])

    def compiled(self) -> list[Key]:
        """Returns the programs that there are."""
        return list(self._compiled)

    def run(self, key: Key, state: State, *arrays: Any, models: Sequence[int] = (0,)) -> Any:
        """Launches a program on the weights of its models, one but for a mixed step; `state` is
        donated. Returns (state, output).
        """
        return self._compiled[key](self._weights(models), state, *arrays)

    def _weights(self, models: Sequence[int]) -> Weights | MixedWeights:
        each = [self._family[at].weights._replace(params=self._params[at]) for at in models]
        return each[0] if len(each) == 1 else MixedWeights.of(each)

    def run_behind(self, phase: str, size: int, *arguments: Any) -> Any:
        """Launches a program that runs behind a step, of `size` rows or tokens on all devices;
        donates as `jmoe.steps` says.
        """
        return self._compiled[Key(phase, size // self._ranks, FULL_CAPACITY)](*arguments)

    def seat(self, shaping: Shaping, told: Int[np.ndarray, "D n"]) -> Shaping:
        """Launches the program that seats a sequence on each device, or none where the slot is
        -1.
        """
        return self._compiled[self._buckets.seat](shaping, told)

    def beside_layers(self, model: int) -> Params:
        """Returns a model's parameters that `embed` and `head` read."""
        params = self._params[model]
        return {key: leaf for key, leaf in params.items() if key not in ("segments", LOOKAHEAD)}

    def implementations(self) -> dict[str, str]:
        """Returns which implementation of each op the largest step of a phase runs, such as "decode
        attention" (`pallas_kernels.backend.noting`). Traces it; nothing on a CPU, which has one.
        """
        found: dict[str, str] = {}
        for phase, sizes in (("decode", self._buckets.decode), ("prefill", self._buckets.prefill)):
            key = Key(phase, sizes[-1], FULL_CAPACITY)
            with noting() as ops:
                if backend() != "cpu":
                    self._jitted(key).trace(*self._arguments(key))
            found |= {f"{phase} {op}": taken for op, taken in ops.items()}
        return found

    def _lower(self, key: Key) -> jax.stages.Lowered:
        return self._jitted(key).lower(*self._arguments(key))

    def _jitted(self, key: Key) -> Any:
        """Returns a program as it runs on all devices of the model's mesh."""
        step, lies, donated = self._step(key)
        spread = step if self._mesh is None else on_mesh.spread(self._mesh, step, lies)
        if key.phase in on_mesh.STEPS:
            spread.__name__ = key.name.replace("-", "_")  # type: ignore[attr-defined]
        return jax.jit(spread, donate_argnums=donated)

    def _step(self, key: Key) -> tuple[Callable, on_mesh.Specs, tuple[int, ...]]:
        """Returns what a program runs, how that lies over a mesh, and the arguments it donates."""
        cfg = self._model.config
        match key.phase:
            case "sample" | "truncate":
                step = partial(sample_step, truncate=key.phase == "truncate")
                return step, on_mesh.SAMPLE, (0,)
            case "draw":
                truncate = None if len(sampling_phases()) == 1 else True
                return partial(draw_step, truncate=truncate), on_mesh.DRAW, (0, 1)
            case "seat":
                return seat, on_mesh.SEAT, (0,)
            case "score":
                return partial(score_step, cfg), on_mesh.SCORE, ()
        layers, max_active = self._layers(key), self._max_active(key)
        if key.models > 1:
            step = partial(mixed_decode_step, cfg, max_active=max_active)
            return step, on_mesh.mixed(key.models), (1,)
        if key.phase == "decode":
            step = partial(decode_step, cfg, max_active=max_active, layers=layers)
        else:  # `score` follows the largest one alone
            keep = key.size == self._buckets.prefill[-1] and not key.num_decodes
            keep &= layers is None or layers.stop == cfg.num_layers
            step = partial(
                prefill_step,
                cfg,
                max_active=max_active,
                keep_hidden=keep,
                layers=layers,
                replication=self._replicates(key),
                num_decodes=key.num_decodes,
            )
        return step, on_mesh.STEPS[key.phase], (1,)

    @property
    def resident(self) -> Sequence[int]:
        """Models that programs can run now."""
        return self._params.resident

    def _layers(self, key: Key) -> range | None:
        """Returns the layers that a step's program runs; None: those that its arguments say."""
        if key.stop_layer:
            return range(key.first_layer, key.stop_layer)
        return None if self._parts_by_number else range(self._model.config.num_layers)

    def _replicates(self, key: Key) -> Replication | None:
        """Returns how a step copies experts while it runs; None: it copies none."""
        copies = key.phase == "prefill" and key.copies
        return self._replication.get(key.size) if copies else None

    def _max_active(self, key: Key) -> int:
        num_experts = key.models * self._model.config.num_experts
        num_united = key.models * self._model.num_united_slots
        return max_active_experts(key.bucket_percent, num_experts, num_united, num_experts)

    def _arguments(self, key: Key) -> tuple[Any, ...]:
        """Returns shapes and dtypes of a program's arguments, and how they lie over a mesh."""
        buckets, model, held = self._buckets, self._model, partial(jax.tree.map, _abstract)
        split, whole = on_mesh.shardings(self._mesh)

        def by_rank(count: int, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            rows = self._ranks * key.models * count
            return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=split)

        rows, tokens = by_rank(buckets.rows(key), NUM_COLUMNS), by_rank(key.size)
        if key.phase == "seat":
            return self._shaping, jax.ShapeDtypeStruct(
                (self._ranks, seat_size(key.size)), jnp.int32, sharding=split
            )
        vocab = model.config.vocab_size
        if key.phase in ("sample", "truncate", "draw"):
            logits = by_rank(key.size, vocab, dtype=jnp.float32)
            if key.phase != "draw":
                return held(self._state.last_token), logits, rows
            shapes = by_rank(key.size, NUM_SHAPE_COLUMNS)
            allowed = by_rank(key.size, num_words(vocab))
            last_token = held(self._state.last_token)
            return last_token, self._shaping, logits, rows, shapes, allowed
        if key.phase == "score":
            hidden = by_rank(key.size, model.config.d_model, dtype=model.dtype)
            return held(self.beside_layers(0)), hidden, tokens, rows
        deltas = by_rank(buckets.deltas(key), NUM_DELTA_COLUMNS)
        control = jax.ShapeDtypeStruct((NUM_CONTROL,), jnp.int32, sharding=whole)
        packed = [rows, deltas, control]
        if key.phase == "prefill":
            packed.insert(0, tokens)
            if self._state.hidden is not None:
                packed.append(tokens)  # where their rows wait
        first = self.resident[: key.models]
        return *held((self._weights(first), self._state)), *packed

    def _cache_key(self, key: Key, code: str) -> str:
        """Returns what identifies this program among all of the same versions on the same
        device.
        """
        return repr(
            (
                code,
                self._model.config,
                key,
                self._layers(key),
                self._max_active(key),
                self._replicates(key),
                self._arguments(key),
                self._options,
            )
        )


@contextmanager
def giving_way() -> Iterator[None]:
    """Lets other threads take the interpreter soon, and counts no compilation of this one."""
    with _giving_way_alone:
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, LATE_SWITCH_S))
        try:
            with no_step_waits():
                yield
        finally:
            sys.setswitchinterval(before)


def be_nice() -> None:
    """Gives this thread what the machine's cores have left, on Linux, where that goes by thread."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)


def _trim() -> None:
    """Gives back the memory that compiling has freed, where the C library can (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _traced_code(cfg: ModelConfig) -> str:
    own = None if cfg.strategy is None else cfg.strategy.strategy
    return traced_code.digest(
        (
            *map(type, cfg.attention_kinds),
            type(cfg.router),
            own if isinstance(own, FunctionType) else type(own),
            Programs._jitted,
            Programs._step,
            Programs._max_active,
        )
    )


def _bytes_beside_arguments(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes a program works in, and those it returns that are not in the place of an
    argument.
    """
    stats: Any = compiled.memory_analysis()
    returned = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.temp_size_in_bytes + max(0, returned)


def _abstract(a: Any) -> jax.ShapeDtypeStruct:
    spread = isinstance(a.sharding, NamedSharding)
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding if spread else None)


def limit_cpu_threads(count: int) -> None:
    """Lets XLA use `count` threads on a CPU (0: all). Works until jax makes its first array.

    A decode step is many small operations; where the host needs a core as well, a second thread
    costs more in waiting than it brings.
    """
    if count:
        os.environ["NPROC"] = str(count)  # what XLA reads when it makes its CPU client
