"""From settings to a runner that is ready: loading, choosing what is open, compiling, warming."""

import logging

from jmoe.api import Model, load
from serving.config import EngineConfig
from serving.control.experts_loader import allowed_ways
from serving.control.slo import starting_strategy
from serving.execution.programs import Progress, limit_cpu_threads
from serving.execution.runner import DeviceRunner, fit_to_model
from serving.scheduling.policy import make_policy

log = logging.getLogger(__name__)


def prepare(
    config: EngineConfig, model: Model | None, progress: Progress
) -> tuple[EngineConfig, Model, DeviceRunner]:
    """Loads the model unless it is given; compiles and warms every program. Takes its time.

    Returns the settings as they are served, the model, and its runner.

    Raises SettingsError for a strategy that cannot be had, ValueError for a way that is not there,
    and what `jmoe.load` raises.
    """
    limit_cpu_threads(config.cpu_threads)
    loaded = model or _load(config, progress)
    ways = allowed_ways(config.brownout, loaded)
    first = ways[0] if ways else 0
    starting_strategy(config.brownout.strategy, first)
    if config.brownout.strategy == "auto" and not ways:
        log.warning("brownout is off: %s has no united experts", loaded.name)
    fitting = fit_to_model(config, loaded)
    parks = getattr(make_policy(config.policy), "parks", True)
    runner = DeviceRunner(loaded, fitting, parks=parks)
    runner.start(first, ways, progress)
    return fitting, loaded, runner


def _load(config: EngineConfig, progress: Progress) -> Model:
    def layers(done: int, total: int) -> None:
        progress("loading", done, total)

    return load(
        config.model,
        config.dtype,
        ways=config.brownout.ways or None,
        progress=layers,
        check_weights=config.check_weights,
        allow_unknown_config=config.allow_unknown_config,
    )
