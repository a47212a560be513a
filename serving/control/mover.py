"""The mover: copies experts that are busy for long to devices that are less so, while serving.

Libra's copies last for one step and pay in large ones. In decode steps, too small for that, load
changes slowly: the mover averages the rows that each expert computed, and every few seconds looks
which copies in the devices' spare slots would even it out. What it wants to change it changes one
layer a tick, between two steps, as another way of united experts is loaded; nothing stops for it.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all
from jaxtyping import Bool, Float, Int

from jmoe.family import Family
from jmoe.parallel.copies import imbalance, spare_that_gains, with_copies
from jmoe.parallel.placement import Placement, contiguous, with_spare
from serving.config import BalanceConfig
from serving.errors import SettingsError
from serving.execution.executor import CopiesExperts, Executor
from serving.plan import StepResult
from serving.scheduling.step import ScheduledStep
from serving.telemetry.observer import Observer

log = logging.getLogger(__name__)

SPARE = 2
"""Slots that `auto` takes without past load: where load drifts, one leaves an imbalance of 1.14,
two 1.07 and four 1.05 (`benchmarks.mesh drift`), two within `min_gain` of four."""


class Mover(Observer):
    """Sees every step's load, and moves one layer's copies at a time."""

    def __init__(
        self,
        config: BalanceConfig,
        executor: CopiesExperts,
        placement: Placement,
        copy_s: float,
        own: Bool[np.ndarray, "L E D"] | None = None,
        numbers: Int[np.ndarray, "N L e"] | None = None,
    ) -> None:
        """`placement` is the one that is served; `copy_s` what copying a layer's experts takes;
        `own` says which device each expert would be on without copies, None: in ranges. `numbers`
        are those that `placement` gives the logical experts of several models: each one's steps,
        and mixed ones, are a kind whose load is seen for itself.
        """
        self._config, self._executor, self._copy_s = config, executor, copy_s
        self._spare = placement.spare if config.spare_slots == "auto" else config.spare_slots
        self.hosts = np.array(placement.hosts)
        layers, experts, devices = self.hosts.shape
        homes = np.asarray(contiguous(layers, experts, devices).hosts if own is None else own)
        if (homes & ~self.hosts).any():  # a placement of a caller's own
            homes = _homes_among(self.hosts)
        self._homes, self._numbers = homes, numbers
        shape = load_shape(placement, None if numbers is None else len(numbers))
        found = read_load(config, shape)
        self.load = np.zeros(shape) if found is None else found
        self._seen_at = self._look_at = -1.0
        self._busy_s = 0.0
        self._to_look_at: list[int] = []  # MoE layers, the worst last
        self._busy = 0.0  # share of the time that the device had work in
        self.layers_looked_at = self.experts_copied = 0
        self.failure = ""

    def step_read(
        self, step: ScheduledStep, result: StepResult, started_at: float, now: float
    ) -> None:
        """See Observer."""
        if self._seen_at >= 0:
            self.load *= 0.5 ** ((now - self._seen_at) / self._config.half_life_s)
        if self._numbers is None:
            self.load += result.expert_rows
        else:
            by_model = result.rows_by_model
            every = result.expert_rows[None] if by_model is None else by_model
            kind = step.models[0] if by_model is None else -1
            for model, rows in zip(step.models, every, strict=True):
                numbers = self._numbers[model]
                self.load[np.arange(len(numbers))[:, None], kind, numbers] += rows
        self._seen_at = now
        self._busy_s += max(0.0, now - started_at)

    def imbalances(self) -> list[float]:
        """Returns the expected imbalance of the served hosts, by MoE layer."""
        return [imbalance(load, hosts) for load, hosts in zip(self.load, self.hosts, strict=True)]

    def advance(self, now: float) -> None:
        """Looks at one layer, every interval at each. Called between two steps."""
        if self.failure:
            return
        if self._to_look_at:
            self._look(self._to_look_at.pop())
        elif self._look_at < 0:
            self._look_at = now + self._config.interval_s
        elif now >= self._look_at:
            elapsed_s = now - self._look_at + self._config.interval_s
            self._busy = min(1.0, self._busy_s / elapsed_s)
            self._look_at, self._busy_s = now + self._config.interval_s, 0.0
            self._to_look_at = np.argsort(self.imbalances()).tolist()
            self._keep_load()

    def _look(self, layer: int) -> None:
        """Changes a layer's copies where others would pay."""
        self.layers_looked_at += 1
        load, hosts = self.load[layer], self.hosts[layer]
        wanted = with_copies(load, self._homes[layer], self._spare)
        gain = 1 - imbalance(load, wanted) / imbalance(load, hosts)
        # What the layer's part of the device's time shrinks by while the load is as it was.
        saved_s = gain * self._busy * self._config.half_life_s / len(self.load)
        if gain >= self._config.min_gain and saved_s > self._copy_s:
            self._move(layer, wanted)

    def _move(self, layer: int, hosts: Bool[np.ndarray, "E D"]) -> None:
        try:
            self._executor.host_layer(layer, hosts)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            log.exception(
                "copies of MoE layer %d's experts could not be moved; they stay where they are from"
                " here on, and the load with them",
                layer,
            )
            return
        self.experts_copied += int((hosts & ~self.hosts[layer]).sum())
        self.hosts[layer] = hosts

    def _keep_load(self) -> None:
        if not self._config.load_file:
            return
        path = Path(self._config.load_file).expanduser()
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            with beside.open("wb") as file:
                np.save(file, self.load.astype(np.float32))
            beside.replace(path)
        except OSError as error:
            log.warning("engine.balance.load_file could not be written: %s", error)


def make_mover(config: BalanceConfig, executor: Executor, family: Family | None) -> Mover | None:
    """Makes the mover that the settings ask for; None: experts stay where they are."""
    if not config.spare_slots or family is None or not isinstance(executor, CopiesExperts):
        return None
    if (home := family.home) is None or not home.spare:
        return None
    placement, spread = home.placement, family.spread
    if spread is not None:
        return Mover(config, executor, placement, executor.copy_s, spread.own, spread.numbers)
    ranges = contiguous(*placement.hosts.shape, num_united=family[0].num_united_slots)
    return Mover(config, executor, placement, executor.copy_s, np.asarray(ranges.hosts))


def _homes_among(hosts: Bool[np.ndarray, "L m N"]) -> Bool[np.ndarray, "L m N"]:
    """Returns a home for each expert: no device has more than its part, and as many as can be are
    where they are.
    """
    from scipy.optimize import linear_sum_assignment  # takes 0.3 s, and few servers need it

    _, experts, devices = hosts.shape
    places = np.arange(-(-experts // devices) * devices) % devices
    found = [places[linear_sum_assignment(~own[:, places])[1]] for own in hosts]
    return np.stack(found)[..., None] == np.arange(devices)


def load_shape(placement: Placement, num_models: int | None) -> tuple[int, ...]:
    """Returns the shape of the load of experts placed so: by layer and expert and, of several
    models (None: one by itself), by the kind of step, too: each model's, then mixed ones.
    """
    layers, experts, _ = placement.hosts.shape
    return (layers, experts) if num_models is None else (layers, num_models + 1, experts)


def read_load(
    config: BalanceConfig, shape: tuple[int, ...] | None = None
) -> Float[np.ndarray, "layers *kinds E"] | None:
    """Reads the load that an earlier server stored; None where none did.

    Raises SettingsError for a file that is something else, or not of `shape`, where that is known.
    """
    if not config.load_file:
        return None
    path, key = Path(config.load_file).expanduser(), "engine.balance.load_file"
    if not path.parent.is_dir():
        raise SettingsError(f"{key} is {config.load_file!r}; there is no folder {path.parent}")
    if not path.exists():
        return None
    try:
        with path.open("rb") as file:
            load = np.lib.format.read_array(file, allow_pickle=False)
        if load.dtype.kind not in "biuf":
            raise ValueError("it holds no table of numbers")
    except (OSError, ValueError) as error:
        raise SettingsError(f"{key} is {config.load_file!r}, and cannot be read: {error}") from None
    shape = shape or load.shape
    if load.shape != shape or not np.isfinite(load).all() or load.min(initial=0) < 0:
        whose = "this model it must hold [MoE layers, logical experts]"
        if len(shape) > 2:
            whose = "these models it must hold [MoE layers, kinds of steps, distinct experts]"
        raise SettingsError(
            f"{key} is {config.load_file!r}, which holds {load.shape}; of {whose} = {shape}; name "
            "another file, or remove it"
        )
    return load.astype(np.float64)


def starting_placement(
    config: BalanceConfig,
    own: Placement,
    spare_that_fits: Callable[[], int] = lambda: 0,
    num_models: int | None = None,
) -> Placement:
    """Returns a placement of experts on their `own` devices, with copies by the load that an
    earlier server stored.

    Where the settings leave spare slots to `auto` there are as many as gain by that load
    (`spare_that_gains`), or `SPARE`, up to those that fit. `num_models` is as of `load_shape`.

    Of several processes, process 0 alone reads the load and tells the others, which wait for that.
    Raises SettingsError as `read_load` does.
    """
    hosts = np.asarray(own.hosts)
    is_first = jax.process_index() == 0
    load = read_load(config, load_shape(own, num_models)) if is_first else None
    spare, most = config.spare_slots, 0
    if spare == "auto":
        most = spare_that_fits()
        spare = min(SPARE, most)
        by = "forecast"
        if load is not None and load.any():
            # At least one: without any, no later load would be stored.
            gains = spare_that_gains(load, hosts, most, config.min_gain)
            spare, by = max(min(1, most), gains), "what earlier servers saw"
        if jax.process_count() > 1:
            spare = int(broadcast_one_to_all(np.int32(spare)))
        if most:
            log.info(
                "engine.balance.spare_slots is auto: %d a layer and device, by %s; memory has room "
                "for %d",
                spare,
                by,
                most,
            )
    if not config.load_file:
        return with_spare(own, spare)
    if load is not None:
        hosts = np.stack([with_copies(*one, spare) for one in zip(load, hosts, strict=True)])
    return with_spare(own, spare, broadcast_one_to_all(hosts))
