"""The file of a model's united experts: written by a distillation, read and saved as modules."""

from collections.abc import Collection, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from jmoe import checkpoint
from jmoe.api import resolve
from jmoe.checkpoint import DISTILLED_FROM, UNITED_FILE, save_tensors, weights_digest
from jmoe.layers import Layers
from training.distill.expert import Experts

United = dict[str, np.ndarray]
"""`gate_up [L, U, d, 2f]`, `down [L, U, f, d]` and `groups [L, m]` of one way; and biases, where
experts have any.
"""


def narrow(united: United) -> United:
    """Returns united experts as they are stored: bfloat16 weights, int32 groups; on the host."""

    def kept(key: str, leaf: np.ndarray) -> np.ndarray:
        return np.asarray(jnp.asarray(leaf, jnp.int32 if key == "groups" else jnp.bfloat16))

    return {k: np.stack([kept(k, leaf) for leaf in stacked]) for k, stacked in united.items()}


def load_united(model: str | Path, way: int) -> list[Experts]:
    """Returns the united experts beside a model as modules, one a MoE layer, in float32.

    Raises ValueError for a way that the model has no united experts of, and what `jmoe.load` raises
    for a directory that cannot be read.
    """
    directory = resolve(model)
    cfg = Layers(directory).cfg
    found = checkpoint.load_united(directory, cfg)
    if way not in found:
        have = ", ".join(map(str, found)) or "none"
        raise ValueError(f"way is {way}; {directory} has united experts of ways: {have}")
    own = found[way]

    def module(layer: int) -> Experts:
        arrays = own.layer(layer).arrays
        weights = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in arrays.items()}
        return Experts(weights, cfg.activation, own.groups[layer])

    return [module(layer) for layer in range(cfg.num_moe_layers)]


def save_united(
    model: str | Path, way: int, layers: Sequence[Experts], out: Path | None = None
) -> Path:
    """Writes united experts, one module a MoE layer, for the model to be served with; returns the
    file. They are stored in bfloat16; other ways of the file stay.

    Args:
        model: whose they are.
        way: experts a group.
        layers: modules with groups, as `load_united` returns them.
        out: folder of the file; None: beside the model.

    Raises ValueError for modules that are not the model's, by number or shape, and for a file that
    holds other ways of another model.
    """
    directory = resolve(model)
    cfg, digest = Layers(directory).cfg, weights_digest(directory)
    file = (directory if out is None else out) / UNITED_FILE
    wanted = checkpoint.united_shapes(cfg, way, 0)
    for number, experts in enumerate(layers):
        leaves = experts.weights | ({"groups": experts.groups[...]} if experts.groups else {})
        shapes = {name: leaf.shape for name, leaf in leaves.items()}
        own = {name.rpartition(".")[2]: shape for name, shape in wanted.items()}
        if shapes != own:
            raise ValueError(f"layer {number} has {shapes}; way {way} of {directory} has {own}")
    if len(layers) != cfg.num_moe_layers:
        raise ValueError(f"{len(layers)} layers are given; {directory} has {cfg.num_moe_layers}")
    check_united(file, [way], directory, digest)
    stacked = {
        name: np.stack([np.asarray(experts.weights[name]) for experts in layers])
        for name in layers[0].weights
    }
    groups = np.stack([np.asarray(experts.groups) for experts in layers])
    file.parent.mkdir(parents=True, exist_ok=True)
    write_united(file.parent, {way: narrow(stacked | {"groups": groups})}, digest)
    return file


def write_united(out: Path, united: dict[int, United], model: str) -> None:
    """Replaces these ways, as they are to be stored, in `out`'s file, or makes it; ways that it has
    besides stay. `model` is its `weights_digest`.
    """
    tensors = _of_other_ways(out / UNITED_FILE, united)
    for way, leaves in united.items():
        for key, stacked in leaves.items():
            for at, leaf in enumerate(stacked):
                tensors[f"way{way}.layers.{at}.{key}"] = leaf
    part = out / f"{UNITED_FILE}.part"
    save_tensors(part, tensors, {DISTILLED_FROM: model})
    part.rename(out / UNITED_FILE)


def beside(model: Path, out: Path, folder: Path) -> Path:
    """Makes `folder` a model directory of links: the model's files, and the united experts in
    `out`. Returns it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {path.name: path for path in (*model.iterdir(), out / UNITED_FILE)}
    for name, path in files.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(path.resolve())
    return folder


def check_united(path: Path, ways: Collection[int], model_dir: Path, model: str) -> None:
    """Raises ValueError for a file whose other ways, which stay in it, are not of this model."""
    kept = sorted({name.partition(".")[0] for name in _of_other_ways(path, ways)})
    if not kept:
        return
    with safe_open(path, framework="numpy") as file:
        origin = (file.metadata() or {}).get(DISTILLED_FROM)
    if origin != model:
        of = "does not say of which model" if origin is None else f"has the model {origin[:19]}"
        raise ValueError(
            f"{path} holds {', '.join(kept)} and {of}, and {model_dir} is {model[:19]}: one file "
            "would mix two; name another --out, or move the file away"
        )


def _of_other_ways(path: Path, ways: Collection[int]) -> dict[str, np.ndarray]:
    if not path.exists():
        return {}
    with safe_open(path, framework="flax") as file:
        names = file.keys()
        kept = [name for name in names if not name.startswith(tuple(f"way{w}." for w in ways))]
        return {name: np.asarray(file.get_tensor(name)) for name in kept}
