"""Loads the models, and makes the mesh, that settings name."""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jmoe import expected_loss, levels
from jmoe.api import BUNDLED, ExpertsOf, Model, PlacementOf, load, resolve
from jmoe.arrival import Arrival
from jmoe.beside import belongs, digest_in_family, digest_of
from jmoe.checkpoint import config_of, is_native, native_stored
from jmoe.expected_loss import Kind, file_of
from jmoe.family import Family, load_family
from jmoe.parallel.cost import NODE, node_of
from jmoe.parallel.home import make_mesh
from jmoe.parallel.placement import Placement, contiguous
from serving.config import BalanceConfig, EngineConfig
from serving.control.losses import Curve, Curves, Losses
from serving.control.mover import starting_placement
from serving.control.slo import starting_strategy
from serving.errors import SettingsError
from serving.execution.memory import (
    check_family,
    check_mesh,
    check_model,
    free_bytes,
    short_of_memory,
    spare_slots_that_fit,
)
from serving.execution.programs import Progress
from serving.intake.chat_templates import check_templates
from serving.settings.reading import mesh_devices, named_models

log = logging.getLogger(__name__)


def want_cpu_devices(count: int) -> None:
    """Makes jax present the CPU as at least `count` devices, unless jax has been initialized."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", max(count, jax.config.jax_num_cpu_devices))


def make_mesh_of(config: EngineConfig) -> Mesh | None:
    """Makes the mesh of the settings; None without one. Raises SettingsError if it is too large.

    On a CPU, jax is made to present as many devices as needed, unless it has been initialized.
    """
    if not config.mesh:
        return None
    count = mesh_devices(config.mesh)
    if config.exchange == "forwarded" and not 1 < (node := node_of(count)) < count:
        raise SettingsError(
            f"engine.exchange is 'forwarded', and engine.mesh {config.mesh!r} makes nodes of "
            f"{node}: {count // node}; it takes several nodes of 2 to {NODE} devices each"
        )
    own = count // max(1, config.num_processes)
    want_cpu_devices(own)
    have = len(jax.local_devices()), jax.device_count()
    if config.coordinator and have != (own, own * config.num_processes):
        raise SettingsError(
            f"engine.mesh is {config.mesh!r} over {config.num_processes} processes, {own} devices "
            f"each, and this one has {have[0]} of {have[1]}; a mesh "
            "takes all devices of its processes, the same number of each"
        )
    try:
        return make_mesh(count)
    except ValueError as error:
        raise SettingsError(f"engine.mesh is {config.mesh!r}: {error}") from None


def check_chat_templates(config: EngineConfig) -> None:
    """Compiles the chat templates of the models that the settings name, with limits.

    Raises SettingsError for one that fails, and what `jmoe.load` raises.
    """
    named = named_models(config.models).values() if config.models else [config.model]
    found = [resolve(path, config.hub_revision) for path in named]
    check_templates(found, config.chat_template)


def family_of(
    config: EngineConfig,
    model: Model | Family | None,
    mesh: Mesh | None,
    progress: Progress,
    experts: ExpertsOf | None = None,
) -> Family:
    """Returns the models given, or else loads those that the settings name; their caches are as
    the settings say. Raises what `load_models` and `Model.with_kv_cache_dtype` raise.
    """
    family = Family.of(load_models(config, mesh, progress, experts) if model is None else model)
    if config.kv_cache_dtype == "auto":
        return family
    models = tuple(one.with_kv_cache_dtype(config.kv_cache_dtype) for one in family)
    return replace(family, models=models)


def load_models(
    config: EngineConfig, mesh: Mesh | None, progress: Progress, experts: ExpertsOf | None = None
) -> Model | Family:
    """Loads the model or family that the settings name; `experts` as of `jmoe.load`, for one model.

    Raises what `jmoe.load` and `load_family` raise.
    """

    def layers(done: int, total: int) -> None:
        progress("loading", done, total)

    if config.quantize not in ("auto", "none") and jax.default_backend() == "cpu":
        log.warning(
            "engine.quantize is %s: a CPU's steps take longer with it, since experts are "
            "dequantized in each",
            config.quantize,
        )
    named = named_models(config.models)
    directory = resolve(next(iter(named.values()), config.model), config.hub_revision)
    placed, in_ranges = None, None
    native = native_stored(directory) if not named and is_native(directory) else None
    cfg = config_of(directory, allow_unknown_config=config.allow_unknown_config)
    if mesh is None and not named and experts is None:
        stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        check_model(config, cfg, stored, native)
    if mesh is not None:
        if native is not None:
            check_model(config, cfg, 0, native)  # as a whole on the first device
        # Of a family, one model is the least; all is counted once it is known what they share.
        check_mesh(config, cfg, mesh.size, len(named) or 1)
        beside = config, cfg, mesh, free_bytes(), len(named) or 1
        fits = partial(spare_slots_that_fit, *beside, native=native)
        on_cpu = jax.default_backend() == "cpu"  # whose devices share cores: copies only cost
        fits = (lambda slots: 0) if on_cpu else fits
        placed, in_ranges = placements(config.balance, fits, len(named))
    wanted: dict[str, Any] = {
        "dtype": config.dtype,
        "ways": config.brownout.ways or None,
        "progress": layers,
        "check_weights": config.check_weights,
        "allow_unknown_config": config.allow_unknown_config,
        "mesh": mesh,
        "revision": config.hub_revision,
        "chat_template": config.chat_template,
        "quantize": config.quantize,
    }
    if named:
        num_devices = 1 if mesh is None else mesh.size
        with short_of_memory(partial(_too_large, f"engine.models are {len(named)}")):
            return load_family(
                named,
                config.family or None,
                resident_experts=config.resident_experts,
                spare_experts=config.spare_experts,
                params_on_host=0 < config.resident_sets < len(named),
                spare_models=config.spare_models,
                placement=placed,
                fits=partial(check_family, config, cfg, num_devices),
                **wanted,
            )
    if config.model not in (BUNDLED, str(directory)):
        log.info("%s of the Hugging Face Hub, in %s", config.model, directory)
    with short_of_memory(partial(_too_large, f"engine.model is {config.model!r}")):
        return load(config.model, placement=in_ranges, experts=experts, **wanted)


def _too_large(what: str, counted: str) -> str:
    """Returns what to do about weights that have been counted and do not fit all the same."""
    return (
        f"{what}: a device has no memory left for weights:{counted} another process may hold "
        "memory of it; end that process, raise engine.memory_fraction, keep experts in fewer bits "
        "(engine.quantize), or spread them over devices (engine.mesh)"
    )


def placements(
    config: BalanceConfig, fits: Callable[[int], int], num_models: int
) -> tuple[Callable[[Placement], Placement], PlacementOf]:
    """Returns where experts lie at the start: of a family of so many models, and of one by itself.
    `fits` is asked how many spare slots have room beside those of a device's own experts.
    """

    def placed(own: Placement) -> Placement:
        count = own.hosts.shape[1]  # of distinct experts
        if config.spare_slots != "auto" and config.spare_slots > (lacking := count - own.room):
            raise SettingsError(
                f"engine.balance.spare_slots is {config.spare_slots}; a device lacks {lacking} of "
                f"the {count} experts that these models have: set it to {lacking} or less"
            )
        return starting_placement(config, own, partial(fits, own.room), num_models)

    def in_ranges(*shape: int, num_united: int) -> Placement:
        own = contiguous(*shape, num_united=num_united)
        return starting_placement(config, own, partial(fits, own.room))

    return placed, in_ranges


def expected_losses(config: EngineConfig, family: Family, ways: Sequence[int]) -> Curves:
    """Returns the curves of expected loss that lie beside the models, or beside the map by which
    they share experts; none where experts stand in for others that are absent, or the map lies
    nowhere.

    Raises SettingsError for a table of another model, none, or none of what is served, the first of
    `ways`, where `engine.brownout.max_expected_loss` bounds it; without that, one of another is
    only warned of.
    """
    brownout, sharing = config.brownout, family.sharing
    most, beside, unknown = brownout.max_expected_loss, sharing.directory, ""
    if family.offloaded is not None:
        unknown = "what it costs that experts stand in for absent ones is not known"
    elif beside is None and sharing.shared_percent > 0:
        unknown = (
            "the map by which the models share experts lies in no directory, where it would be "
            "told what they cost"
        )
    if unknown and most:
        raise _unbounded(most, unknown)
    if unknown:
        return []

    def curves(number: int, model: Model) -> Mapping[Kind, Curve]:
        if beside is None:
            return curves_of(model.path / expected_loss.FILE, partial(digest_of, model.path), most)
        lender, own = family[sharing.lenders[number]].path, beside / file_of(model.name)
        files = sorted(beside.glob(file_of("*")), key=lambda file: file != own)
        digest = digest_in_family(sharing, number, lender) if files else ""
        path = next((file for file in files if belongs(file, digest)), own)  # under any name
        return curves_of(path, lambda: digest, most)

    found = [{} if at in family.vacant else curves(at, model) for at, model in enumerate(family)]
    found = [found[0] if at in family.vacant else own for at, own in enumerate(found)]
    if most:
        way = ways[0] if ways else 0
        strategy = starting_strategy(brownout.strategy, way)
        losses = Losses(family.names, found, levels=brownout.levels)
        if missing := losses.missing(strategy, way, brownout.keep):
            raise _unbounded(most, missing)
    return found


def _unbounded(most: float, why: object) -> SettingsError:
    return SettingsError(f"engine.brownout.max_expected_loss is {most:g}, and {why}")


def curves_of(path: Path, digest: Callable[[], str], most: float) -> Mapping[Kind, Curve]:
    """Returns the curves of a file of expected loss. `digest` returns what it has to belong to,
    `most` is the bound on it, 0: none. Raises SettingsError as `expected_losses` does for a table.
    """
    there = path.exists()
    try:
        # Weights are hashed only where there is a table to belong to them.
        tables = expected_loss.read(path, digest() if there else "")
    except ValueError as error:
        if most:
            raise _unbounded(most, error) from None
        if there:
            log.warning("expected loss is not known: %s", error)
        tables = {}
    return {kind: table.curve() for kind, table in tables.items()}


def levels_of(model: Model | Arrival, keep: str, ways: Sequence[int]) -> dict[int, np.ndarray]:
    """Returns the levels of a model's file by way, of all that it has. Raises ValueError as
    `levels.read`, and where the way that is served first has none.
    """
    layers, directory = model.config.num_moe_layers, model.path
    tables = levels.read(directory, layers, digest_of(directory))
    if not ways or (ways[0], keep) not in tables:
        have = ", ".join(f"way {way} by {by}" for way, by in tables)
        raise ValueError(
            f"engine.brownout.levels is true, and {directory / levels.FILE} has levels of {have}, "
            f"not of way {ways[0] if ways else 0} by {keep}"
        )
    return {
        way: levels.by_code([t for t in tables.values() if t.way == way], layers)
        for way in model.united
    }
