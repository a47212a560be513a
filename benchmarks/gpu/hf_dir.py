"""A model in memory as a Hugging Face directory, a file a layer: what PyTorch and servers load."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.flax import save_file

from benchmarks.gpu import models
from benchmarks.gpu.sizes import Sizes, hf_config
from jmoe import layout
from jmoe.api import Model
from jmoe.architectures import ARCHITECTURES
from jmoe.checkpoint import UNITED_FILE
from jmoe.experts import UnitedExperts


def write(directory: Path, config: Mapping[str, Any], model: Model) -> None:
    """Writes config.json (last: it marks a whole directory), weights, and united experts.

    `config` holds the contents of config.json that `model` was made from.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    where = {}
    for number, tensors in enumerate(_files(model)):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, directory / name, metadata={"format": "pt"})
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


def _files(model: Model) -> Iterator[dict[str, jax.Array]]:
    """Yields the tensors outside the layers, then those of each layer; the host holds one file's at
    a time.
    """
    cfg, moe_layer, slots = model.config, 0, model.table.slots[:, : model.config.num_experts]
    yield layout.split(layout.top(cfg), model.params)
    for (is_moe, start, count), segment in zip(
        cfg.segments(), model.params["segments"], strict=True
    ):
        for i in range(count):
            own = {key: weights[i] for key, weights in segment.items()}
            tensors = layout.split(layout.layer(cfg, start + i, is_moe), own)
            if is_moe:
                experts = model.pool.read(slots[moe_layer]).plain().arrays
                for number in range(cfg.num_experts):
                    of_one = {key: weights[number] for key, weights in experts.items()}
                    tensors |= layout.split(layout.expert(cfg, start + i, number), of_one)
                moe_layer += 1
            yield tensors


def _united(ways: Mapping[int, UnitedExperts]) -> dict[str, np.ndarray]:
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
