"""Makes a ready runner from settings: loads the model, settles open settings, compiles,
warms up.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jmoe.api import BUNDLED, Model, name_of, resolve
from jmoe.attention import is_recurrent, with_kv_cache_dtype
from jmoe.brownout import Own
from jmoe.checkpoint import TensorFiles, is_native, united_ways
from jmoe.config import read_config
from jmoe.family import Family
from jmoe.offloaded import check_spare
from jmoe.sharing import lends_united
from jmoe.tokenizer import lacking, read_settings
from pallas_kernels.backend import KERNEL, hopper
from serving.cluster.secret import ClusterSecret
from serving.config import EngineConfig
from serving.control.experts_loader import allowed_ways, ways_among
from serving.control.guarded import make_controller
from serving.control.losses import Curves
from serving.control.mover import read_load
from serving.control.slo import starting_strategy
from serving.errors import SettingsError
from serving.execution.executor import Executor
from serving.execution.fitting import fit_to_model, served_len
from serving.execution.kv_pages import claim_memory
from serving.execution.memory import check_balance
from serving.execution.programs import Progress, limit_cpu_threads
from serving.execution.runner import DeviceRunner
from serving.scheduling.policy import make_policy
from serving.settings.composes import RECURRENT, why_not
from serving.settings.plugins import own_strategy
from serving.settings.reading import check_composes, named_models
from serving.startup.asynchronous import make_layer_picker, prepare_crew, with_mode
from serving.startup.loading import (
    check_chat_templates,
    expected_losses,
    family_of,
    levels_of,
    make_mesh_of,
)

if TYPE_CHECKING:
    from serving.cluster.followers import Followers

log = logging.getLogger(__name__)


def check_start(config: EngineConfig) -> None:
    """Checks what can be told before anything is loaded, or another process joins: plugins, the
    models' files, and what their configurations and ways say of the settings.

    Reads no weights, and fetches only what describes a model of the Hub: its weights and ways are
    not checked, nor are ways of a family whose map lends united experts. Raises what `prepare`
    would.
    """
    make_policy(config.policy)
    make_controller(config.salc)
    own_strategy(config.brownout.strategy)
    read_load(config.balance)
    ClusterSecret.of(config)
    if config.family and not Path(config.family).is_file():
        raise SettingsError(
            f"engine.family is {config.family!r}, and no such file is there; `jmoe consolidate "
            "--out FILE` writes one"
        )
    if config.asynchronous.attention:
        make_layer_picker(config.asynchronous)
    lends = bool(config.family) and lends_united(Path(config.family))
    for path in named_models(config.models).values() if config.models else [config.model]:
        directory = resolve(path, config.hub_revision, weights=False)
        if not is_native(directory):
            cfg = read_config(directory, allow_unknown_config=config.allow_unknown_config)
            served_len(config, cfg, name_of(path))
            with_kv_cache_dtype(cfg, config.kv_cache_dtype)
        if path == BUNDLED or Path(path).exists():
            if not is_native(directory):
                TensorFiles(directory)
            read_settings(directory, config.chat_template)
            if lends:
                continue
            ways = ways_among(united_ways(directory), config.brownout)
            if config.mesh and not is_native(directory) and not config.models:
                united = max((-(-cfg.num_experts // way) for way in ways), default=0)
                read_load(config.balance, (cfg.num_moe_layers, cfg.num_experts + united))
            starting_strategy(config.brownout.strategy, ways[0] if ways else 0)


def prepare(
    config: EngineConfig, model: Model | Family | None, progress: Progress
) -> tuple[EngineConfig, Family, Executor, Curves]:
    """Loads the models unless they are given, then compiles and warms every program; this is slow.

    Returns the settings in force, the models, their executor, and their expected loss.

    Raises SettingsError for a strategy that the model does not support and a chat template that
    does not compile, ValueError for an unknown way, what `jmoe.load` raises, and Unavailable if
    another process of the mesh does not come or is lost.
    """
    limit_cpu_threads(config.cpu_threads)
    claim_memory(config.memory_fraction)
    if model is None:
        check_chat_templates(config)
    made = _made(with_mode(config, model), model, progress)
    for one in made[1].models:
        if one.tokenizer is None:
            log.warning("%s has %s: it takes token ids alone", one.name, lacking(one.path))
        elif not one.tokenizer.chat_templates:
            log.info("%s has no chat template: it takes no chats; see --chat-template", one.name)
    return made


def _made(
    config: EngineConfig, model: Model | Family | None, progress: Progress
) -> tuple[EngineConfig, Family, Executor, Curves]:
    if config.mode == "aep":
        return prepare_crew(config, model, progress)
    if not config.coordinator:
        return _prepare(config, model, progress)
    if model is not None:
        raise SettingsError(
            "engine.coordinator is given, and a model, too: each process loads its own part of one;"
            " leave the model out"
        )
    if config.process_index > 0:
        raise SettingsError(
            f"engine.process_index is {config.process_index}: such a process follows process 0 and"
            " serves nothing; start it with `jmoe serve`"
        )
    from serving.cluster.hosts import lead  # needs ZeroMQ, which a server of one process does not

    followers = lead(config)
    try:
        return followers.lost.unless(lambda: _prepare(config, None, progress, followers))
    except BaseException:
        followers.close(stop=False)
        raise


def _prepare(
    config: EngineConfig,
    model: Model | Family | None,
    progress: Progress,
    followers: "Followers | None" = None,
) -> tuple[EngineConfig, Family, DeviceRunner, Curves]:
    fitting, loaded, runner, ways = build(config, model, progress, followers)
    losses = expected_losses(fitting, loaded, ways)
    runner.start(ways[0] if ways else 0, ways, progress)
    return fitting, loaded, runner, losses


def build(
    config: EngineConfig,
    model: Model | Family | None,
    progress: Progress,
    followers: "Followers | None" = None,
) -> tuple[EngineConfig, Family, DeviceRunner, tuple[int, ...]]:
    """Loads the models unless they are given, and makes their runner; does not compile.

    Returns the settings in force, the models, their runner, and the ways that may be served. Raises
    as `prepare`.
    """
    mesh = make_mesh_of(config)
    family = family_of(config, model, mesh, progress)
    loaded = family[0]
    check_composes(config, len(family))
    if is_recurrent(loaded.config) and (why := why_not(config, RECURRENT, len(family))):
        raise SettingsError(
            f"{loaded.name} has {RECURRENT}, which cannot be served {why}; if its experts do not "
            "fit, keep them in fewer bits (engine.quantize)"
        )
    if mesh is not None and (loaded.home is None or loaded.home.mesh != mesh):
        raise SettingsError(
            f"engine.mesh is {config.mesh!r}, and the model given is not spread over such a mesh; "
            "load it with mesh=jmoe.make_mesh(...), or leave engine.mesh empty"
        )
    if config.resident_sets > len(family):
        raise SettingsError(
            f"engine.resident_sets is {config.resident_sets}; it must be 0 (all), or up to the "
            f"number of models, {len(family)}"
        )
    if (offloaded := family.offloaded) is not None:
        # A row that refuses brownout may need so many at once.
        needed = offloaded.needed_by_a_row(family.config.experts_per_token)
        check_spare(len(offloaded.spare), needed)
    if (home := family.home) is not None:
        of_mesh = loaded.config, home.mesh.size, config.balance
        check_balance(*of_mesh, spare=home.spare, num_models=len(family))
    if config.exchange != "auto":
        family = _made_with(family, exchange=config.exchange)
    if (strategy := own_strategy(config.brownout.strategy)) is not None:
        own = Own(strategy, guarded=True)
        own.probe(loaded.config.num_experts, loaded.config.experts_per_token)
        family = _made_with(family, strategy=own)
    ways = allowed_ways(config.brownout, family)
    starting_strategy(config.brownout.strategy, ways[0] if ways else 0)
    if config.brownout.levels:
        for one in family:
            one.resident.use_levels(levels_of(one, config.brownout.keep, ways))
    if config.brownout.strategy == "auto" and not ways and config.process_index <= 0:
        log.warning("brownout is off: %s has no united experts", loaded.name)
    fitting = fit_to_model(config, loaded)
    parks = getattr(make_policy(config.policy), "parks", True)
    runner = DeviceRunner(family, fitting, parks=parks, followers=followers)
    if config.process_index <= 0:
        log_implementations(runner.implementations)
    return fitting, family, runner, ways


def _made_with(family: Family, **fields: Any) -> Family:
    """Returns the same models, whose programs are made with other fields of their config."""
    models = [replace(one, config=replace(one.config, **fields)) for one in family]
    return replace(family, models=tuple(models))


def log_implementations(taken: Mapping[str, str]) -> None:
    """Logs what a GPU's ops run, by phase and op; a warning for those without a kernel."""
    if not taken:  # a CPU
        return
    device = jax.devices()[0].device_kind
    with_kernel = [op for op, form in taken.items() if form == KERNEL]
    others = {op: form for op, form in taken.items() if form != KERNEL}
    if with_kernel:
        log.info("%s: Mosaic kernels run %s", device, ", ".join(with_kernel))
    if not others:
        return
    why = (
        "whose kernels do not take the model's sizes or dtype (docs/kernels.md, What they take)"
        if hopper()
        else "as the Mosaic kernels need a Hopper GPU (H100, H200): 26 to 41 launches a layer in "
        "decode, and weights of experts are read more than once in prefill (docs/kernels.md, "
        "Other GPUs)"
    )
    said = ", ".join(f"{op} ({form})" for op, form in others.items())
    log.warning("%s: without a Mosaic kernel are %s, %s", device, said, why)
