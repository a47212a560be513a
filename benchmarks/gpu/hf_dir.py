"""A model in memory as a Hugging Face directory, a file a layer: what PyTorch and servers load."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import save_file

from benchmarks.gpu import models
from benchmarks.gpu.sizes import Sizes, hf_config
from jmoe import layout
from jmoe.api import Model
from jmoe.architectures import ARCHITECTURES
from jmoe.checkpoint import UNITED_FILE
from jmoe.experts import Pool, UnitedExperts

Tensors = dict[str, np.ndarray]


def write(directory: Path, config: Mapping[str, Any], model: Model) -> None:
    """Writes config.json (last: it marks a whole directory), weights, and united experts.

    `config` holds the contents of config.json that `model` was made from.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    where = {}
    for number, tensors in enumerate(_files(model)):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, directory / name, metadata={"format": "pt"})  # type: ignore[arg-type]
        where |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    if model.united:
        united = _united(model.united)
        save_file(united, directory / UNITED_FILE)  # type: ignore[arg-type]
    kind = {
        "architectures": [ARCHITECTURES[config["model_type"]].class_name],
        "dtype": str(model.dtype),
    }
    (directory / "config.json").write_text(json.dumps({**config, **kind}), encoding="utf-8")


def _files(model: Model) -> Iterator[Tensors]:
    """Yields the tensors outside the layers, then those of each layer; the host holds one file's at
    a time.
    """
    cfg = model.config
    yield _split(layout.top(cfg), model.params)
    moe_layer = 0
    slots = np.asarray(model.table.slots)
    for (is_moe, start, count), segment in zip(
        cfg.segments(), model.params["segments"], strict=True
    ):
        for i in range(count):
            own = {key: weights[i] for key, weights in segment.items()}
            tensors = _split(layout.layer(cfg, start + i, is_moe), own)
            if is_moe:
                tensors |= _experts(model, start + i, slots[moe_layer, : cfg.num_experts])
                moe_layer += 1
            yield tensors


def _split(own: layout.Layout, params: Mapping[str, Any]) -> Tensors:
    """Returns Hugging Face's tensors, the inverse of how a checkpoint is read."""
    tensors = layout.split(own, {key: np.asarray(params[key]) for key in own})
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


@jax.jit
def _layer(pool: Pool, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    gate_up, down = (weights.swapaxes(1, 2) for weights in pool.read(slots).plain().arrays.values())
    return gate_up, down  # [m, 2 f, d], [m, d, f]


def _experts(model: Model, layer: int, slots: np.ndarray) -> Tensors:
    gate_up, down = map(np.asarray, _layer(model.pool, jnp.asarray(slots)))
    tensors, f = {}, model.config.d_ff_expert
    for expert in range(model.config.num_experts):
        own = layout.expert(model.config, layer, expert)
        gate_name, up_name = own["gate_up"].names
        (down_name,) = own["down"].names
        tensors[gate_name], tensors[up_name] = gate_up[expert, :f], gate_up[expert, f:]
        tensors[down_name] = down[expert]
    return tensors


def _united(ways: Mapping[int, UnitedExperts]) -> Tensors:
    tensors = {}
    for way, united in ways.items():
        for layer in range(len(united.gate_up)):
            at = f"way{way}.layers.{layer}."
            tensors[at + "gate_up"] = united.gate_up[layer]
            tensors[at + "down"] = united.down[layer]
            tensors[at + "groups"] = united.groups[layer]
    return tensors


def write_served(directory: Path, sizes: Sizes) -> None:
    """Writes the model that is served, with the united experts of its largest way."""
    write(directory, hf_config(sizes.model), models.make(sizes, ways=(max(sizes.ways),)))
