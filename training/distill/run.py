"""`distill`: united experts of a model, layer by layer, then end to end."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from safetensors import safe_open
from safetensors.flax import save_file

from jmoe.api import Model, load
from jmoe.checkpoint import UNITED_FILE
from jmoe.config import ModelConfig
from jmoe.experts import ExpertPool, groups_by_index
from jmoe.layers import Layers
from jmoe.tokenizer import Tokenizer
from training.distill.config import DistillConfig
from training.distill.data import digest, pack_files
from training.distill.expert import outputs_on_all
from training.distill.fit import DistillError, Fit, fit_layer
from training.distill.grouping import make_groups
from training.distill.refine import Progressing, begin, freeze, refine
from training.distill.report import LayerResult, RefineResult, write_report
from training.distill.start import make_start
from training.distill.store import Store
from training.distill.stream import LayerRows, first_rows, run_layer
from training.packing import Batch

Progress = Callable[[str, int, int, str], None]
"""`(what is being done, units done, units in all, what to show beside)`."""

_PROBE = 512  # rows that experts are compared on, for grouping by similarity


def _silent(what: str, done: int, total: int, text: str) -> None:
    pass


def distill(
    model_dir: Path,
    ways: Sequence[int],
    data: Sequence[Path],
    out: Path,
    config: DistillConfig | None = None,
    progress: Progress = _silent,
    allow_unknown_config: Sequence[str] = (),
) -> tuple[list[LayerResult], list[RefineResult]]:
    """Distils united experts of every way and writes `out/united.safetensors` (bfloat16).

    Ways that the file has besides stay in it.

    The device holds one layer's weights and captured rows at a time. What is finished is kept in
    `out`: a run that was killed goes on where it was and ends in the same bits, and one with other
    ways or another end-to-end stage takes the layers that are there.

    Args:
        model_dir: model directory, as `jmoe.load` takes it.
        ways: experts a group, one set of united experts each.
        data: files of texts (see `training.distill.data.read_texts`); united experts imitate the
            model on them.
        out: directory, made if absent; may be `model_dir`. Also gets a report and its picture.
        config: settings; None for the defaults.
        progress: called with what is done, how much of it, and the loss.
        allow_unknown_config: as of `jmoe.load`.

    Raises ValueError for ways, data and settings that cannot be used and for an `out` with another
    run in it, DistillError where training cannot go on, and what `jmoe.load` raises.
    """
    config = config or DistillConfig()
    # A CPU's reference of the grouped GEMM is fast in float32, a GPU's kernel in bfloat16.
    dtype = "float32" if jax.default_backend() == "cpu" else config.dtype
    layers = Layers(model_dir, dtype, allow_unknown_config=allow_unknown_config)
    cfg = layers.cfg
    if not ways or len(set(ways)) != len(ways):
        raise ValueError(f"ways are {list(ways)}; give at least one, each once")
    for way in ways:
        groups_by_index(cfg.num_experts, way)  # raises for a way that cannot be
    tokenizer = Tokenizer.load(layers.directory)
    packed = pack_files(data, cfg, tokenizer, config.length, config.seed)
    out.mkdir(parents=True, exist_ok=True)
    settings, end_to_end = config.stages()
    fingerprint = {
        "settings": settings,
        "data": digest(data),
        "model": _model_digest(layers.directory),
    }
    store = Store(out, fingerprint, end_to_end)
    found = _all_layers(layers, ways, packed, store, config, progress)
    results = [
        LayerResult(way, at, fit.error_before, fit.error_after, fit.steps)
        for (way, at), (fit, _) in sorted(found.items())
    ]
    united = {way: _stack(found, way) for way in ways}
    refined = []
    if config.refine_steps:
        whole = partial(
            load, model_dir, config.dtype, ways=(), allow_unknown_config=allow_unknown_config
        )
        for way in ways:
            united[way], result = _refine(
                whole, cfg, way, united[way], packed, store, config, progress
            )
            refined.append(result)
    _write(out, united)
    store.close()
    write_report(out, results, refined, f"Settings: {config}")
    return results, refined


United = dict[str, np.ndarray]
"""`gate_up [L, U, d, 2f]`, `down [L, U, f, d]` and `groups [L, m]` of one way."""


def _all_layers(
    layers: Layers,
    ways: Sequence[int],
    data: Batch,
    store: Store,
    config: DistillConfig,
    progress: Progress,
) -> dict[tuple[int, int], tuple[Fit, np.ndarray]]:
    cfg = layers.cfg
    data = first_rows(data, config.rows)
    found = {
        (way, at): kept
        for way in ways
        for at in range(cfg.num_moe_layers)
        if (kept := store.layer(way, at)) is not None
    }
    moe_layers = [index for index, is_moe in enumerate(cfg.moe_layers) if is_moe]
    needed = [
        index for at, index in enumerate(moe_layers) if not all((way, at) in found for way in ways)
    ]
    if not needed:
        return found
    first, x = store.load_stream(needed[0]) or (0, _embedded(layers, data))
    for index in range(first, needed[-1] + 1):
        at = sum(cfg.moe_layers[:index])
        params, experts = layers.layer(index)
        name = f"layer {index}"
        rows = run_layer(
            cfg,
            params,
            experts,
            x,
            data,
            progress=lambda done, total, name=name: progress(f"{name}: capture", done, total, ""),
        )
        if rows is not None:
            assert experts is not None
            for way in ways:
                if (way, at) not in found:
                    found[way, at] = _fit(way, at, rows, experts, config, progress)
                    store.save_layer(way, at, *found[way, at])
        store.save_stream(index + 1, x)
    return found


def _embedded(layers: Layers, data: Batch) -> np.ndarray:
    embed = np.asarray(layers.top()["embed"], np.float32)
    return embed[data.tokens]


def _fit(
    way: int,
    at: int,
    rows: LayerRows,
    experts: ExpertPool,
    config: DistillConfig,
    progress: Progress,
) -> tuple[Fit, np.ndarray]:
    members = {key: np.asarray(leaf) for key, leaf in experts._asdict().items()}
    visits = np.bincount(rows.ids.reshape(-1), minlength=len(members["down"]))
    answers = np.zeros((len(visits), 0, 0), np.float32)
    if config.grouping == "similarity":
        probe = jnp.asarray(rows.h[:: max(1, len(rows.h) // _PROBE)], jnp.float32)
        answers = np.asarray(outputs_on_all({k: jnp.asarray(v) for k, v in members.items()}, probe))
    groups = make_groups(config.grouping, way, rows, answers)
    with _room_for(f"way {way}, layer {at}", f"lower rows ({config.rows} now)"):
        fit = fit_layer(
            make_start(config.start, members, groups, visits),
            {key: jnp.asarray(leaf) for key, leaf in members.items()},
            groups,
            rows,
            _key(config, way, at),
            config,
            lambda done, total, text: progress(f"way {way}, layer {at}", done, total, text),
        )
    return fit, groups


@contextmanager
def _room_for(what: str, advice: str) -> Iterator[None]:
    """Says what helps where the devices have no room."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DistillError(
            f"{what} does not fit the devices ({error}): {advice}, or use more devices. Finished "
            "layers are kept"
        ) from error


def _key(config: DistillConfig, way: int, at: int) -> Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), way), at)


def _stack(found: dict[tuple[int, int], tuple[Fit, np.ndarray]], way: int) -> United:
    own = [kept for (of, _), kept in sorted(found.items()) if of == way]
    united = {key: np.stack([fit.params[key] for fit, _ in own]) for key in ("gate_up", "down")}
    return united | {"groups": np.stack([groups for _, groups in own])}


def _refine(
    load_model: Callable[[], Model],
    cfg: ModelConfig,
    way: int,
    united: United,
    data: Batch,
    store: Store,
    config: DistillConfig,
    progress: Progress,
) -> tuple[United, RefineResult]:
    weights = {key: united[key] for key in ("gate_up", "down")}
    advice = f"lower refine_rows ({config.refine_rows} now), leave this stage out (refine_steps 0)"
    with _room_for(f"way {way}, end to end,", advice):
        frozen = freeze(load_model(), united["groups"])
        at = begin(weights, config, cfg.d_model)
        kept = store.refinement(way, at._asdict())
        if kept is not None:
            at = Progressing(**{**kept, "step": int(kept["step"]), "before": float(kept["before"])})
        trained, before, after = refine(
            cfg,
            frozen,
            at,
            data,
            _key(config, way, 1_000_000),
            config,
            save=lambda state: store.save_refinement(way, state.step, state._asdict()),
            note=partial(progress, f"way {way}, end to end"),
        )
    if after >= before:  # united experts that were that good already are left as they were
        return united, RefineResult(way, before, before)
    return united | trained, RefineResult(way, before, after)


def _write(out: Path, united: dict[int, United]) -> None:
    """Replaces these ways in `out`'s file, or makes it; ways that it has besides stay."""
    tensors = _of_other_ways(out / UNITED_FILE, united)
    for way, leaves in united.items():
        for key, stacked in leaves.items():
            kind = jnp.int32 if key == "groups" else jnp.bfloat16
            for at, leaf in enumerate(stacked):
                tensors[f"way{way}.layers.{at}.{key}"] = jnp.asarray(leaf, kind)
    part = out / f"{UNITED_FILE}.part"
    save_file(tensors, part)
    part.chmod(0o644)  # written as private by the library
    part.rename(out / UNITED_FILE)


def _of_other_ways(path: Path, ways: Collection[int]) -> dict[str, Array]:
    if not path.exists():
        return {}
    with safe_open(path, framework="flax") as file:
        names = file.keys()
        kept = [name for name in names if not name.startswith(tuple(f"way{w}." for w in ways))]
        return {name: file.get_tensor(name) for name in kept}


def _model_digest(directory: Path) -> str:
    """Of the configuration and of the names and sizes of the weight files."""
    out = hashlib.sha256()
    for path in sorted([*directory.glob("*.json"), *directory.glob("model*.safetensors")]):
        out.update(f"{path.name} {path.stat().st_size}".encode())
        if path.suffix == ".json":
            out.update(path.read_bytes())
    return out.hexdigest()
