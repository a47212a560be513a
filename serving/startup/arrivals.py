"""Reads a model that joins a family while others of it are served (`serving.control.models`)."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax

from jmoe.api import resolve
from jmoe.arrival import Arrival, arrival_bytes, read_arrival
from jmoe.beside import digest_of
from jmoe.expected_loss import FILE, Kind
from jmoe.family import Family
from jmoe.free_memory import free_host_bytes
from jmoe.weights import Params
from serving.config import EngineConfig
from serving.control.experts_loader import allowed_ways
from serving.control.losses import Curve
from serving.errors import SettingsError
from serving.execution.executor import TakesModels
from serving.execution.memory import GIB, SHARE, free_bytes
from serving.execution.programs import be_nice, giving_way
from serving.intake.chat_templates import check_templates
from serving.startup.loading import curves_of, levels_of


def arriving(
    config: EngineConfig,
    family: Family,
    executor: TakesModels,
    name: str,
    directory: str,
    check: Callable[[Mapping[Kind, Curve]], None],
) -> tuple[Arrival, Params, Mapping[Kind, Curve]]:
    """Reads a model, and puts its weights but the experts onto the device; returns it, those, and
    its curves of expected loss. This is slow, and gives way to other threads.

    Raises SettingsError where memory does not suffice, what `check` raises of the curves, before
    any weight is read, and what `jmoe.arrival.read_arrival` raises.
    """

    def read() -> tuple[Arrival, Params, Mapping[Kind, Curve]]:
        with giving_way():
            path = resolve(directory, config.hub_revision)
            check_templates([path], config.chat_template)
            _check_memory(family, name)
            curves = curves_of(path / FILE, partial(digest_of, path), 0.0)
            check(curves)
            ways = allowed_ways(config.brownout, family)
            arrival = read_arrival(
                family,
                name,
                path,
                check_weights=config.check_weights,
                allow_unknown_config=config.allow_unknown_config,
                chat_template=config.chat_template,
            )
            if config.brownout.levels:
                arrival.levels = levels_of(arrival, config.brownout.keep, ways)
            return arrival, executor.place_params(arrival.params), curves

    with ThreadPoolExecutor(1, initializer=be_nice) as pool:
        return pool.submit(read).result()


def _check_memory(family: Family, name: str) -> None:
    on_device, on_host = arrival_bytes(family)
    is_cpu = jax.local_devices()[0].platform == "cpu"
    for where, wanted, free in (
        ("host", on_host + is_cpu * on_device, free_host_bytes()),
        ("device", on_device, None if is_cpu else free_bytes()),
    ):
        if free is not None and wanted > SHARE * free:
            raise SettingsError(
                f"{name} takes up to {wanted / GIB:.3g} GiB of the {where}'s memory, and "
                f"{free / GIB:.3g} GiB are free; unload another model first"
            )
