"""The runner: device state, launches, and reads. The only one that touches the device."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.api import Model
from jmoe.packed_rows import empty_deltas, empty_rows, pack_row
from jmoe.steps import StepOutput, make_state
from serving.config import EngineConfig
from serving.execution.executables import Executables
from serving.execution.memory import check_memory
from serving.execution.programs import Buckets, Key, Programs, Progress, with_default_buckets
from serving.execution.reader import ResultReader
from serving.plan import Limits, Phase, StepControl, StepPlan, StepResult

log = logging.getLogger(__name__)


class Runner(Protocol):
    """What an engine asks of a device; `serving.fake.FakeRunner` answers without one."""

    limits: Limits

    @property
    def compilations_since_ready(self) -> int:
        """Compilations since the runner was ready; each one is a fault."""
        ...

    def launch(self, plan: StepPlan, control: StepControl) -> "Future[StepResult]":
        """Starts a step under `control` and returns at once.

        The future is done when the step is, in a thread of the runner's.
        """
        ...

    def load_way(self, way: int, layer: int) -> None:
        """Puts one layer's united experts of `way` into the pool, between two steps."""
        ...

    def close(self) -> None:
        """Releases what the runner holds outside the device."""
        ...


def limits_of(config: EngineConfig) -> Limits:
    """Sizes of a configuration; `num_pages` 0 means enough for every slot at full length."""
    blocks = -(-config.max_model_len // config.page_size)
    return Limits(
        num_slots=config.max_num_seqs,
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

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.model = model
        self.limits = limits_of(config)
        check_memory(model, self.limits)
        self.buckets = Buckets(config, self.limits)
        self._executables = Executables.at(config.compilation_cache)
        self._state = make_state(
            model.config,
            num_slots=self.limits.num_slots,
            num_pages=self.limits.num_pages,
            page_size=self.limits.page_size,
            max_blocks=self.limits.pages_for(config.max_model_len),
            dtype=model.dtype,
        )
        self.programs = Programs(model, self.buckets, self._state, eager=config.enforce_eager)
        self._reader = ResultReader()

    @property
    def compilations_since_ready(self) -> int:
        """Compilations after `start`; each one is a fault."""
        return self.programs.compilations_since_ready

    def start(self, way: int, ways: Sequence[int], progress: Progress | None = None) -> None:
        """Compiles every program, runs each once on padding, and loads `way` (0: none)."""
        self.programs.compile_all(self._executables, progress)
        keys = self.programs.keys()
        for done, key in enumerate(keys):
            if progress is not None:
                progress("warming", done, len(keys))
            self._warm(key)
        for other in [w for w in ways if w != way] + [way] * bool(way):
            self.model.use_way(other)  # every way once: switching compiles nothing later
        jax.block_until_ready((self._state, self.model.pool))
        self.programs.mark_ready()

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
            arrays = [
                rows,
                empty_deltas(self.buckets.deltas(key)),
                np.array([key.bucket_percent, 0], np.int32),
            ]
            if key.phase == "prefill":
                arrays.insert(0, np.zeros(key.size, np.int32))
            self._state, out = self.programs.run(key, self._state, *arrays)
        _start_copies(out, 1)()

    def launch(self, plan: StepPlan, control: StepControl) -> "Future[StepResult]":
        """See Runner."""
        key = self.buckets.choose(
            plan.phase,
            plan.size,
            control.threshold_percent,
            full=control.strategy == 0 or plan.any_exempt,
            prompt_logprobs=plan.prompt_logprobs,
        )
        rows = empty_rows(self.buckets.rows(key))
        rows[: len(plan.rows)] = plan.rows
        deltas = empty_deltas(self.buckets.deltas(key))
        deltas[: len(plan.deltas)] = plan.deltas
        arrays = [rows, deltas, np.array(control, np.int32)]
        if plan.phase is Phase.PREFILL:
            tokens = np.zeros(key.size, np.int32)
            tokens[: plan.size] = plan.tokens
            arrays.insert(0, tokens)
        self._state, out = self.programs.run(key, self._state, *arrays)
        if plan.prompt_logprobs:
            out = self.programs.score(out, arrays[0], rows)
        self._state, out = self.programs.sample(self._state, out, rows)
        return self._reader.submit(_start_copies(out, len(plan.rows)))

    def load_way(self, way: int, layer: int) -> None:
        """See Runner. Every way fits the slots that capacities are reckoned with."""
        self.model.load_way_layer(way, layer)

    def close(self) -> None:
        """Stops counting compilations, and reading."""
        self.programs.close()
        self._reader.close()


def _start_copies(out: StepOutput, count: int) -> Callable[[], StepResult]:
    """Starts the copies of what the host reads. The result waits for them, and returns them without
    the rows of padding behind the first `count`.
    """
    out = out._replace(logits=None, hidden=None)
    for leaf in jax.tree.leaves(out):
        leaf.copy_to_host_async()

    def read() -> StepResult:
        read = jax.device_get(out)
        return StepResult(
            read.tokens[:count].tolist(),
            read.logprobs[:count].tolist(),
            read.degraded[:count].tolist(),
            read.expert_rows,
            read.prompt_logprobs,
        )

    return read
