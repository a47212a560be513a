"""Makes a ready crew of asynchronous workers from settings (AMoE)."""

import logging
import time
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from jmoe.api import ExpertsOf, Model, resolve
from jmoe.attention import is_recurrent, page_windows
from jmoe.checkpoint import config_of
from jmoe.family import Family
from jmoe.parallel.asynchronous import Deployment, advise
from jmoe.parallel.placement import contiguous
from serving.cluster.secret import ClusterSecret
from serving.config import AsynchronousConfig, EngineConfig
from serving.control.experts_loader import allowed_ways
from serving.control.losses import Curves
from serving.control.slo import starting_strategy
from serving.errors import SettingsError
from serving.execution.fitting import fit_to_model, limits_of
from serving.execution.programs import Progress
from serving.pipeline.devices import Sizes
from serving.pipeline.local import LocalCrew, LocalWorkers
from serving.plan import Limits
from serving.scheduling.layers.picker import LayerPicker, Waiting, make_picker
from serving.settings.composes import AEP, COMPOSES
from serving.startup.loading import expected_losses, family_of

if TYPE_CHECKING:
    from serving.pipeline.remote_crew import RemoteCrew
    from serving.pipeline.starters import Starter

log = logging.getLogger(__name__)


def with_mode(config: EngineConfig, model: Model | Family | None = None) -> EngineConfig:
    """Returns the settings with mode `steps` or `aep`.

    Without attention workers that is `steps`. If mode is `auto`, the cost model decides; if `aep`
    does not pay, the devices form a mesh. If mode is `aep` and the cost model advises against it, a
    warning is logged. Raises what reading a model's configuration raises.
    """
    own = config.asynchronous
    if not own.attention:
        return replace(config, mode="steps")
    if model is not None:
        cfg = Family.of(model).config
    else:
        directory = resolve(config.model, config.hub_revision)
        cfg = config_of(directory, allow_unknown_config=config.allow_unknown_config)
    devices, dtype_bytes = own.attention + own.experts, jnp.dtype(config.dtype).itemsize
    advice = advise(Deployment.of(cfg, devices, config.max_num_seqs, dtype_bytes))
    if config.mode == "aep" or advice.pays:
        if not advice.pays:
            log.warning(
                "engine.mode is aep, and the forecast for H200s is against it: %s", advice.reason
            )
        return replace(config, mode="aep")
    log.warning(
        "engine.mode is auto: %d devices take steps together (engine.mesh ep=%d), since by the "
        "forecast for H200s %s",
        devices,
        devices,
        advice.reason,
    )
    return replace(config, mode="steps", mesh=f"ep={devices}", asynchronous=AsynchronousConfig())


class CrewParts(NamedTuple):
    """The parts from which a crew's workers are made."""

    config: EngineConfig  # in force
    family: Family  # with one model
    limits: Limits
    sizes: Sizes  # of an attention worker
    hosts: Bool[np.ndarray, "layers E W"]  # expert workers that have each logical expert
    ways: tuple[int, ...]  # that may be served, the one to start with first

    @property
    def model(self) -> Model:
        """The family's only model."""
        return self.family[0]


def crew_of(
    config: EngineConfig,
    model: Model | Family | None,
    progress: Progress,
    experts: ExpertsOf | None = None,
) -> CrewParts:
    """Loads the model unless it is given, and plans how to divide it among workers; `experts` as of
    `jmoe.load`.

    Raises SettingsError for what a crew does not support, and what `jmoe.load` raises.
    """
    own = config.asynchronous
    make_layer_picker(own)  # fail early on a bad rule
    keep_programs(config.compilation_cache)
    family = family_of(config, model, None, progress, experts)
    if len(family) > 1:
        raise SettingsError(
            f"engine.mode is 'aep', and {len(family)} models are given: "
            f"{COMPOSES[AEP, 'engine.models']}"
        )
    loaded = family[0]
    ways = allowed_ways(config.brownout, family)
    starting_strategy(config.brownout.strategy, ways[0] if ways else 0)
    if ways:
        loaded.use_way(ways[0])
    fitting = fit_to_model(config, loaded, own.attention)
    # What has no effect here is off, wherever the settings in force are shown.
    fitting = replace(fitting, threshold_buckets_percent=(), prefill_company=False)
    cfg = loaded.config
    limits = limits_of(fitting, cfg.num_layers, own.attention, page_windows(cfg), is_recurrent(cfg))
    num_layers, num_experts = loaded.table.slots.shape
    hosts = hosts_of(own, num_layers, num_experts, num_experts - cfg.num_experts)
    return CrewParts(fitting, family, limits, sizes_of(fitting, limits), hosts, ways)


def prepare_crew(
    config: EngineConfig, model: Model | Family | None, progress: Progress
) -> tuple[EngineConfig, Family, "LocalCrew | RemoteCrew", Curves]:
    """Starts workers, in threads or in separate processes, and waits until they are ready.

    Returns the settings in force, the model, the crew, and the expected loss.

    Raises SettingsError for what a crew does not support and for more workers than devices,
    Unavailable for a worker that does not start, and what `jmoe.load` raises.
    """
    own = config.asynchronous
    if own.workers != "threads" and model is not None:
        raise SettingsError(
            f"engine.asynchronous.workers is {own.workers!r}, and a model is given: each process "
            "loads its own part of one; leave the model out, or set it to threads"
        )
    starter = None if own.workers == "threads" else starter_of(own)  # before jax has threads
    if starter is not None:
        jax.config.update("jax_platforms", "cpu")  # the devices are for workers
    try:
        parts = crew_of(config, model, progress)
        losses = expected_losses(config, parts.family, parts.ways)
    except BaseException:
        if starter is not None:
            starter.close()
        raise
    if config.brownout.strategy == "auto" and not parts.ways:
        log.warning("brownout is off: %s has no united experts", parts.model.name)
    if starter is not None:
        from serving.cluster.hosts import facts
        from serving.pipeline.remote_crew import RemoteCrew

        secret = ClusterSecret.of(config) or ClusterSecret.random()
        key = secret.derive("connections between asynchronous workers")
        way, max_len = parts.ways[0] if parts.ways else 0, parts.sizes.max_len
        crew = RemoteCrew(
            config, parts.limits, parts.hosts, starter, key, facts(config), max_len, way
        )
    else:
        devices = worker_devices(own)
        workers = LocalWorkers.of(
            parts.model,
            devices[: own.attention],
            devices[own.attention :],
            parts.sizes,
            parts.hosts,
            partial(make_layer_picker, own),
            time.monotonic,
            ways=parts.ways,
        )
        crew = LocalCrew(workers, parts.limits, parts.sizes.max_len)
    crew.start(progress)
    return parts.config, parts.family, crew, losses


def starter_of(config: AsynchronousConfig) -> "Starter":
    """Returns what starts the workers' processes.

    Raises SettingsError for a missing package or an unreachable cluster.
    """
    extra = "serve,ray" if config.workers == "ray" else "serve"
    try:
        if config.workers == "ray":
            from serving.startup.ray_starter import RayStarter

            return RayStarter(config.ray_address)
        from serving.pipeline.starters import ProcessStarter

        return ProcessStarter()
    except ImportError as error:
        raise SettingsError(
            f"engine.asynchronous.workers is {config.workers!r}, and {error.name} is not installed;"
            f" install it with `pip install 'jmoe[{extra}]'`, or set it to threads"
        ) from None


def keep_programs(folder: str) -> None:
    """Caches workers' programs in XLA's own cache; steps have another one
    (`execution.executables`).
    """
    if folder and not jax.config.jax_compilation_cache_dir:
        try:
            own = Path(folder).expanduser() / "asynchronous"
        except RuntimeError as error:  # there is no home
            log.warning("%s cannot be used (%s); no compiled program is kept", folder, error)
            return
        jax.config.update("jax_compilation_cache_dir", str(own))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def make_layer_picker(config: AsynchronousConfig) -> LayerPicker:
    """Makes a worker's layer picker. Raises SettingsError for an unknown or failing rule."""
    waiting = Waiting(config.min_batch, config.max_wait_s, config.max_age_s)
    try:
        return make_picker(config.layer_rule, waiting)
    except ValueError as error:
        raise SettingsError(f"engine.asynchronous.layer_rule: {error}") from None


def worker_devices(config: AsynchronousConfig) -> list[Any]:
    """Returns a device for each worker, attention workers first; on a CPU they may share devices.

    Raises SettingsError for more workers than GPUs.
    """
    count, have = config.attention + config.experts, jax.local_devices()
    if have[0].platform == "cpu":
        return list(islice(cycle(have), count))
    if count > len(have):
        raise SettingsError(
            f"engine.asynchronous.attention is {config.attention} and engine.asynchronous.experts "
            f"{config.experts}: a worker has a device of its own, and jax sees {len(have)} "
            f"({have[0].platform}); {len(have)} workers together can be had"
        )
    return have[:count]


def hosts_of(
    config: AsynchronousConfig, num_layers: int, num_experts: int, num_united: int
) -> Bool[np.ndarray, "layers E W"]:
    """Returns the expert workers that have each logical expert, of which the last are united: a
    range of them each; with copies, those of others, too.
    """
    placed = contiguous(num_layers, num_experts, config.experts, num_united=num_united)
    hosts = np.asarray(placed.hosts)
    every = [np.roll(hosts, shift, axis=-1) for shift in range(config.copies)]
    return np.logical_or.reduce(every)


def sizes_of(config: EngineConfig, limits: Limits) -> Sizes:
    """Returns the sizes of an attention worker, which has a row per token of steps under way."""
    return Sizes(
        num_slots=limits.slots_per_rank,
        num_pages=limits.group_pages,
        page_size=limits.page_size,
        max_blocks=limits.pages_for(config.max_model_len),
        num_rows=limits.hidden_per_rank,
        num_groups=len(limits.windows),
        decode_buckets=config.decode_buckets,
        prefill_buckets=config.prefill_buckets,
    )
