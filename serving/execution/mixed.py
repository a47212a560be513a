"""Mixed decode steps, and when they pay: measured at the start (Multi-MoE).

A mixed step reads an expert that two models share once, and starts one program where there would be
two; but what is a model's own runs on as many rows for each model as the fullest one has. Whether
that is less than the models' steps one after another is a question of the machine, of the rows and
of what is shared, so it is measured.
"""

import logging
import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int

from jmoe.family import Family
from jmoe.packed_rows import pack_row
from serving.config import EngineConfig
from serving.execution.buckets import FULL_CAPACITY, Key
from serving.execution.device import Device
from serving.execution.ranks import ByRank
from serving.execution.replay import Led
from serving.plan import Phase, StepControl, StepPlan

log = logging.getLogger(__name__)

TIMED = 7  # runs of a step whose median counts
LEAST_GAIN = 0.05
"""Of the time of a step for each model: what less is as likely noise."""
STRIDE = 7919
"""Between two rows' tokens as steps are measured: other tokens visit other experts."""


def mixed_models(config: EngineConfig, family: Family) -> int:
    """Returns how many models a decode step may have rows of: no more than can have weights on the
    device, and one where a router or a strategy of their own would choose among all models'
    experts, or each model has levels of its own.
    """
    cfg, there = family.config, len(family) - len(family.vacant)
    own = {
        "routers": cfg.router is not None,
        "a strategy": cfg.strategy is not None,
        "levels": config.brownout.levels,
    }
    if any(own.values()):
        if there > 1 < config.mixed_models:
            kinds = " and ".join(kind for kind, holds in own.items() if holds)
            log.info("no decode step has rows of several models: they have %s of their own", kinds)
        return 1
    return max(1, min(config.mixed_models, there, config.resident_sets or there))


class MixedSteps:
    """Seconds of decode steps by the rows of a model: of one model's, and of mixed ones.

    They are those of the models that are on the device at the start, the first of them; a map of
    shared experts that differs much from pair to pair is not told apart.
    """

    def __init__(self, device: Device, calls: Device | Led) -> None:
        """`device` is warmed before anything is measured; it runs what `calls` are made."""
        self._device, self._calls = device, calls
        self.alone_s: dict[int, float] = {}  # by rows that a program has: mean of the models
        self.mixed_s: dict[tuple[int, int], float] = {}  # by models, and rows of each

    def pays(self, counts: Int[np.ndarray, "models ranks"]) -> bool:
        """Returns whether a step with so many rows of each of several models takes less than their
        steps. On each rank a model's rows are as many as on the rank with most.

        False for more models than there are programs for, or more rows than a step may have.
        """
        buckets, limits = self._device.buckets, self._device.limits
        if counts.sum(axis=0).max() > limits.decode_rows // limits.num_ranks:
            return False
        sizes = [buckets.bucket("decode", most) for most in counts.max(axis=1).tolist()]
        mixed_s = self.mixed_s.get((len(counts), max(sizes)))
        if mixed_s is None:
            return False
        return mixed_s < (1 - LEAST_GAIN) * sum(self.alone_s[size] for size in sizes)

    def measure(self) -> None:
        """Times steps of every size, mixed and alone in turn."""
        if not self._device.buckets.mixed:
            return
        self._spread_tokens()
        self.alone_s.clear()
        for count in self._device.buckets.mixed:
            for size in self._device.buckets.decode:
                mixed_s, alone_s = self._time(count, size)
                self.mixed_s[count, size] = mixed_s
                self.alone_s.setdefault(size, alone_s)
                log.info(
                    "a decode step of %d models, up to %d rows of each: %.3g ms mixed, %.3g ms "
                    "one after another",
                    count,
                    size,
                    1e3 * mixed_s,
                    1e3 * count * alone_s,
                )

    def _time(self, count: int, size: int) -> tuple[float, float]:
        """Times a step of `count` models with as many rows of each as a rank has slots, up to
        `size`; returns that and the mean of their own.
        """
        rows = min(size, self._device.limits.slots_per_rank // count)
        models = list(self._device.programs.resident[:count])
        every = self._step(models, rows)
        mixed, alone = Key("decode", size, FULL_CAPACITY, models=count), []
        own = Key("decode", size, FULL_CAPACITY)
        mixed_s: list[float] = []
        for _ in range(TIMED):
            mixed_s.append(self._run(mixed, every, models))
            alone.append(
                [
                    self._run(own, self._step([model], rows, first=at * rows), [model])
                    for at, model in enumerate(models)
                ]
            )
        alone_s = [statistics.median(of_model) for of_model in zip(*alone, strict=True)]
        return statistics.median(mixed_s), statistics.fmean(alone_s)

    def _run(self, key: Key, step: ByRank, models: Sequence[int]) -> float:
        began = time.perf_counter()
        arrays = self._device.arrays(key, step, StepControl(100, 0))
        out = self._calls.run(key, arrays, models=models)
        self._device.read(out, key, step)()
        return time.perf_counter() - began

    def _step(self, models: Sequence[int], rows: int, first: int = 0) -> ByRank:
        """Returns a decode step with `rows` rows of each model on each rank, at slots from `first`
        on, which own no page yet: all are in the padding page.
        """
        limits = self._device.limits
        slots = np.arange(rows * len(models)) + first
        slots = np.add.outer(limits.slots_per_rank * np.arange(limits.num_ranks), slots).ravel()
        packed = np.stack([pack_row(slot, kv_len=1) for slot in slots.tolist()])
        of_rows = np.tile(np.repeat(np.array(models, np.int32), rows), limits.num_ranks)
        layers = limits.num_layers
        plan = StepPlan(Phase.DECODE, packed, row_models=of_rows, stop_layer=layers)
        return ByRank.of(plan, limits)

    def _spread_tokens(self) -> None:
        """Gives every slot another newest token, as when requests are served; of several processes,
        none can without the others.
        """
        if self._device.several_processes:
            return
        state, vocab = self._device.state, self._device.model.config.vocab_size
        tokens = np.arange(len(state.last_token), dtype=np.int64) * STRIDE % vocab
        last_token = jax.device_put(tokens.astype(np.int32), state.last_token.sharding)
        self._device.state = state._replace(last_token=last_token)
