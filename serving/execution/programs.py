"""Step programs: compiled ahead of time, keyed by (phase, token bucket, threshold bucket).

A threshold bucket b is a capacity that serves every threshold up to b: it sizes the dispatch for as
many experts as a step at t <= b can touch. The threshold itself is traced and never rounded.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import astuple, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int

from jmoe.family import Family
from jmoe.mixed import MixedWeights, mixed_decode_step
from jmoe.model import LOOKAHEAD
from jmoe.packed_rows import NUM_COLUMNS, NUM_CONTROL, NUM_DELTA_COLUMNS, sampling_mode
from jmoe.parallel import steps as on_mesh
from jmoe.parallel.replicas import Replication
from jmoe.steps import State, StepOutput, decode_step, prefill_step, sample_step, score_step
from jmoe.weights import Params, Weights
from pallas_kernels.backend import backend
from pallas_kernels.routing import max_active_experts
from serving.config import EngineConfig
from serving.execution import traced_code
from serving.execution.compilations import Compilations
from serving.execution.executables import Executables
from serving.execution.param_sets import ParamSets
from serving.plan import Limits

FULL_CAPACITY = 100
MAX_COMPILERS = 8  # at a time; each takes up to a gigabyte of host memory
Progress = Callable[[str, int, int], None]
"""`(what, done, total)`."""


class Key(NamedTuple):
    """Which program. `size` is tokens of a `prefill` step and of `score`, else rows.

    `layers` are the first and the one to stop at of a program for a part of a step, None of others.
    A mixed decode step has `size` rows of each of several `models`.
    `score` and `sample` run behind a step whose rows ask for it; `truncate` is `sample` with top-k
    and top-p, where that is a program of its own (`sampling_phases`).
    """

    phase: str
    size: int
    bucket_percent: int
    layers: tuple[int, int] | None = None
    models: int = 1

    @property
    def name(self) -> str:
        """Of its entry on disk."""
        part = "" if self.layers is None else "-layers-{}-{}".format(*self.layers)
        part += "" if self.models == 1 else f"-models-{self.models}"
        return f"{self.phase}-{self.size}-{self.bucket_percent}{part}"


def sampling_phases() -> tuple[str, ...]:
    """A GPU has a program for each sampling mode; a CPU, where compiling is slow, one for both."""
    return ("sample",) if backend() == "cpu" else ("sample", "truncate")


def sizes_up_to(largest: int, smallest: int, factor: Callable[[int], int]) -> tuple[int, ...]:
    """`smallest`, `factor(size)` times a size for as long as that is below `largest`, `largest`."""
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= factor(smallest)
    return (*sizes, largest)


def with_default_buckets(config: EngineConfig, num_ranks: int = 1) -> EngineConfig:
    """`config`, with the buckets that it leaves open, and without those that no step reaches.

    Over a mesh a size is each rank's.

    On a GPU powers of two and four capacities. On a CPU, where a program takes four seconds of a
    core to compile, few: sizes above 16 rows are four times apart, and a step at full capacity
    takes no longer than one at less, as its loop runs over the experts that are visited.
    """
    on_cpu = backend() == "cpu"
    most = -(-config.max_num_seqs // num_ranks)
    decode = sizes_up_to(most, 4, lambda n: 4 if on_cpu and n >= 16 else 2)
    prefill = sizes_up_to(config.max_prefill_tokens, 32, lambda n: 4 if on_cpu else 2)
    thresholds = (FULL_CAPACITY,) if on_cpu else (20, 40, 70, FULL_CAPACITY)
    return replace(
        config,
        decode_buckets=_up_to(config.decode_buckets or decode, most),
        prefill_buckets=_up_to(config.prefill_buckets or prefill, config.max_prefill_tokens),
        threshold_buckets_percent=config.threshold_buckets_percent or thresholds,
    )


def _up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    return sizes[: bisect_left(sizes, most) + 1]


class Buckets:
    """Sizes that programs are compiled for, on each device of a mesh, and the choice among them."""

    def __init__(self, config: EngineConfig, limits: Limits, num_models: int = 1) -> None:
        """`num_models` is how many a decode step may have rows of."""
        config = with_default_buckets(config, limits.num_ranks)
        self.mixed = range(2, num_models + 1)
        self.decode = config.decode_buckets
        self.prefill = config.prefill_buckets
        self.thresholds = config.threshold_buckets_percent
        self.chunks = limits.max_prefill_seqs
        self._page_size = limits.page_size

    def keys(self) -> list[Key]:
        """Every program that serving may need, the ones most needed first."""
        thresholds = sorted(self.thresholds, reverse=True)
        keys = [Key("decode", n, t) for t in thresholds for n in reversed(self.decode)]
        keys += [Key("prefill", n, t) for t in thresholds for n in reversed(self.prefill)]
        keys += self.mixed_keys()
        keys.append(Key("score", self.prefill[-1], FULL_CAPACITY))
        mixed = {count * size for count in self.mixed for size in self.decode}
        rows = sorted({*self.decode, self.chunks, *mixed})
        return keys + [Key(phase, n, FULL_CAPACITY) for phase in sampling_phases() for n in rows]

    def mixed_keys(self) -> list[Key]:
        """Those of mixed decode steps."""
        thresholds = sorted(self.thresholds, reverse=True)
        return [
            Key("decode", size, percent, models=count)
            for count in self.mixed
            for percent in thresholds
            for size in reversed(self.decode)
        ]

    def step_keys(self) -> list[Key]:
        """Those of whole steps of one model."""
        steps = (key for key in self.keys() if key.phase in ("prefill", "decode"))
        return [key for key in steps if key.models == 1]

    def parts(self, phase: str, num_layers: int, at_once: int) -> list[Key]:
        """Programs for parts of a phase's steps, of `at_once` layers each; the last may have fewer.

        They have capacity for every threshold: less would multiply them.
        """
        sizes = self.decode if phase == "decode" else self.prefill
        return [
            Key(phase, size, FULL_CAPACITY, (first, min(first + at_once, num_layers)))
            for size in reversed(sizes)
            for first in range(0, num_layers, at_once)
        ]

    def choose(
        self,
        phase: str,
        size: int,
        threshold_percent: int,
        *,
        prompt_logprobs: bool,
        models: int = 1,
    ) -> Key:
        """The smallest program that serves a step whose experts a threshold bounds.

        With `prompt_logprobs` it is the largest prefill program, the one that `score` follows.
        """
        sizes = self.decode if phase == "decode" else self.prefill
        fits = sizes[-1] if prompt_logprobs else self.bucket(phase, size)
        percent = self.thresholds[bisect_left(self.thresholds, threshold_percent)]
        return Key(phase, fits, percent, models=models)

    def bucket(self, phase: str, size: int) -> int:
        """The smallest size of a phase's programs that holds `size`."""
        sizes = self.decode if phase == "decode" else self.prefill
        return sizes[bisect_left(sizes, size)]

    def rows(self, key: Key) -> int:
        """Packed rows of a program."""
        return self.chunks if key.phase in ("prefill", "score") else key.size

    def deltas(self, key: Key) -> int:
        """Block-table deltas a step can have: a page a row, and those its tokens fill."""
        return key.size if key.phase == "decode" else key.size // self._page_size + self.chunks


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
        options: Mapping[str, str],
        *,
        parts_by_number: bool,
        replication: Mapping[int, Replication] | None = None,
    ) -> None:
        """`params`, of each model, and XLA's options are those of `jmoe.steps.served`. A model that
        is spread over a mesh has programs that run on all of it.

        `parts_by_number`: one program runs any part of a step, as its arguments say; else there is
        a program for each. `replication` says how prefill programs copy experts, by their tokens a
        device; sizes that are not there do not.
        """
        self._parts_by_number = parts_by_number
        self._replication = replication or {}
        self._family, self._model = family, family[0]  # programs are made by the first
        self._buckets, self._state = buckets, state
        self._params, self._options = params, dict(options)
        home = self._model.home
        self._mesh = None if home is None else home.mesh
        self._ranks = 1 if self._mesh is None else self._mesh.size
        self._compiled: dict[Key, Any] = {}
        self.num_from_disk = 0  # of them, read rather than compiled
        self._compilations = Compilations()

    @property
    def compilations_since_ready(self) -> int:
        """Each one is a fault."""
        return self._compilations.since_ready

    def compile_all(
        self, keys: Sequence[Key], executables: Executables, progress: Progress | None = None
    ) -> None:
        """Compiles programs, several at a time; what the disk has is read from there."""
        before = len(self._compiled)
        code = traced_code.digest(
            (
                decode_step,
                mixed_decode_step,
                prefill_step,
                sample_step,
                score_step,
                Programs._lower,
                Programs._max_active,
            )
        )

        def tell() -> None:
            if progress is not None:
                progress("compiling", len(self._compiled) - before, len(keys))

        def compiled(key: Key, cache_key: str, lowered: jax.stages.Lowered) -> None:
            found = lowered.compile(compiler_options=self._options or None)
            executables.save(key.name, cache_key, found)
            self._compiled[key] = found

        tell()
        # XLA's compiler lets other threads run; tracing and lowering do not, and stay in this one.
        with ThreadPoolExecutor(min(MAX_COMPILERS, os.cpu_count() or 1)) as pool:
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

    def mark_ready(self) -> None:
        """From here on every compilation counts as one too many."""
        self._compilations.ready()

    def close(self) -> None:
        """Stops counting."""
        self._compilations.close()

    def compiled(self) -> list[Key]:
        """Programs that there are."""
        return list(self._compiled)

    def run(self, key: Key, state: State, *arrays: Any, models: Sequence[int] = (0,)) -> Any:
        """Launches a program on the weights of its models, one but for a mixed step; `state` is
        donated. Returns (state, output).
        """
        return self._compiled[key](self._weights(models), state, *arrays)

    def _weights(self, models: Sequence[int]) -> Weights | MixedWeights:
        each = [self._family[at].weights._replace(params=self._params[at]) for at in models]
        return each[0] if len(each) == 1 else MixedWeights.of(each)

    def sample(
        self, state: State, out: StepOutput, rows: Int[np.ndarray, "B C"]
    ) -> tuple[State, StepOutput]:
        """After a step: launches what samples tokens where its rows want that."""
        if (mode := sampling_mode(rows)) == "greedy":
            return state, out
        phase = mode if mode in sampling_phases() else "sample"
        program = self._compiled[Key(phase, len(rows) // self._ranks, FULL_CAPACITY)]
        last, tokens, logprobs = program(state.last_token, out.logits, rows)
        return state._replace(last_token=last), out._replace(tokens=tokens, logprobs=logprobs)

    def score(
        self,
        out: StepOutput,
        tokens: Int[np.ndarray, "T"],
        rows: Int[np.ndarray, "B C"],
        model: int = 0,
    ) -> StepOutput:
        """After a prefill step of the largest size: launches what scores its prompts' tokens."""
        program = self._compiled[Key("score", len(tokens) // self._ranks, FULL_CAPACITY)]
        scores = program(_without_layers(self._params[model]), out.hidden, tokens, rows)
        return out._replace(prompt_logprobs=scores)

    def _lower(self, key: Key) -> jax.stages.Lowered:
        cfg, max_active = self._model.config, self._max_active(key)
        if key.phase in ("sample", "truncate"):
            truncate = None if len(sampling_phases()) == 1 else key.phase == "truncate"
            step = self._spread(partial(sample_step, truncate=truncate), on_mesh.SAMPLE)
            return jax.jit(step, donate_argnums=0).lower(*self._arguments(key))
        if key.phase == "score":
            step = self._spread(partial(score_step, cfg), on_mesh.SCORE)
            return jax.jit(step).lower(*self._arguments(key))
        layers = self._layers(key)
        if key.models > 1:
            step = partial(mixed_decode_step, cfg, max_active=max_active)
        elif key.phase == "decode":
            step = partial(decode_step, cfg, max_active=max_active, layers=layers)
        else:  # `score` follows the largest one alone
            keep = key.size == self._buckets.prefill[-1]
            keep &= layers is None or layers.stop == cfg.num_layers
            step = partial(
                prefill_step,
                cfg,
                max_active=max_active,
                keep_hidden=keep,
                layers=layers,
                replication=self._replicates(key),
            )
        step = self._spread(step, on_mesh.STEPS[key.phase])
        step.__name__ = key.name.replace("-", "_")  # type: ignore[attr-defined]
        return jax.jit(step, donate_argnums=1).lower(*self._arguments(key))

    def _spread(self, step: Callable, lies: on_mesh.Specs) -> Callable:
        """A step as it runs on all devices of the model's mesh."""
        return step if self._mesh is None else on_mesh.spread(self._mesh, step, lies)

    @property
    def resident(self) -> Sequence[int]:
        """Models that programs can run now."""
        return range(len(self._params)) if self._params.all_resident else self._params.resident

    def _layers(self, key: Key) -> range | None:
        """Layers that a step's program runs; None: those that its arguments say."""
        if key.layers is not None:
            return range(*key.layers)
        return None if self._parts_by_number else range(self._model.config.num_layers)

    def _replicates(self, key: Key) -> Replication | None:
        """How a step copies experts while it runs; None: not at all."""
        return self._replication.get(key.size) if key.phase == "prefill" else None

    def _max_active(self, key: Key) -> int:
        num_experts = key.models * self._model.config.num_experts
        num_united = key.models * self._model.num_united_slots
        return max_active_experts(key.bucket_percent, num_experts, num_united, num_experts)

    def _arguments(self, key: Key) -> tuple[Any, ...]:
        """Shapes and dtypes of a program's arguments, and how they lie over a mesh."""
        buckets, model, held = self._buckets, self._model, partial(jax.tree.map, _abstract)
        split, whole = on_mesh.shardings(self._mesh)

        def by_rank(count: int, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            rows = self._ranks * key.models * count
            return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=split)

        rows, tokens = by_rank(buckets.rows(key), NUM_COLUMNS), by_rank(key.size)
        if key.phase in ("sample", "truncate"):
            logits = by_rank(key.size, model.config.vocab_size, dtype=jnp.float32)
            return held(self._state.last_token), logits, rows
        if key.phase == "score":
            hidden = by_rank(key.size, model.config.d_model, dtype=model.dtype)
            return held(_without_layers(self._params[0])), hidden, tokens, rows
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
        """All that tells this program from any other of the same versions on the same device."""
        return repr(
            (
                code,
                astuple(self._model.config),
                key,
                self._layers(key),
                self._max_active(key),
                self._replicates(key),
                self._arguments(key),
                self._options,
            )
        )


def _abstract(a: Any) -> jax.ShapeDtypeStruct:
    spread = isinstance(a.sharding, NamedSharding)
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding if spread else None)


def _without_layers(params: Params) -> Params:
    """What `embed` and `head` read."""
    return {key: leaf for key, leaf in params.items() if key not in ("segments", LOOKAHEAD)}


def limit_cpu_threads(count: int) -> None:
    """Lets XLA use `count` threads on a CPU (0: all). Works until jax makes its first array.

    A decode step is many small operations; where the host needs a core as well, a second thread
    costs more in waiting than it brings.
    """
    if count:
        os.environ["NPROC"] = str(count)  # what XLA reads when it makes its CPU client
