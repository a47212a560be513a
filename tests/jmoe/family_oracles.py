"""Directories equal to what a family serves for a model, as oracles for its logits."""

import re

import numpy as np
from safetensors.numpy import load_file

import jmoe
from jmoe.residuals import tensor_name
from jmoe.sharing import MERGED, WEIGHTS_FILE, Sharing
from tests.jmoe.conftest import add_united
from tests.variants import change, tensors, variant

TOKENS = np.array([[3, 17, 60, 5, 41, 22, 9, 70]], np.int32)


def logits(model, brownout=None):
    return np.asarray(jmoe.forward(model, TOKENS, brownout=brownout))


def alone(directory, **options):
    return jmoe.load(directory, dtype="float32", **options)


def three_models(golden, where):
    """Makes a base with united experts and two variants; one of them has the base's embeddings.
    Returns their directories by name.
    """
    base = variant(golden, where / "base", 0, scale=0.0)
    own = {
        "base": base,
        "law": variant(base, where / "law", 1, only="layers"),
        "code": variant(base, where / "code", 2),
    }
    for seed, directory in enumerate(own.values()):
        add_united(directory, seed=seed)
    return own


def drawn_map(names, cfg, seed=0, merged=False):
    shape = len(names), cfg.num_moe_layers, cfg.num_experts
    low = MERGED if merged else 0
    owners = np.random.default_rng(seed).integers(low, len(names), shape)
    return Sharing(tuple(names), owners.astype(np.int32))


def with_owners_experts(directories, sharing, number, to, merged=None):
    """Makes the oracle: a model's directory with its owners' experts written into it."""
    names = list(directories)
    every = [tensors(directories[name]) for name in names]
    cfg = jmoe.config.read_config(directories[names[number]])
    moe_layers = [at for at, is_moe in enumerate(cfg.moe_layers) if is_moe]

    def changed(name, tensor):
        found = re.match(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight", name)
        if not found:
            return tensor
        layer, expert = moe_layers.index(int(found[1])), int(found[2])
        owner = int(sharing.owners[number, layer, expert])
        if owner != MERGED:
            return every[owner][name]
        gate_up = merged[f"layers.{layer}.experts.{expert}.gate_up"]
        half = gate_up.shape[1] // 2
        part = {"gate": gate_up[:, :half], "up": gate_up[:, half:]}
        part["down"] = merged[f"layers.{layer}.experts.{expert}.down"]
        return np.ascontiguousarray(part[found[3]].T)

    path = variant(directories[names[number]], to, 0, scale=0.0)
    change(path, changed)
    return path


def oracle(directories, sharing, number, there, to):
    """Makes a model's directory with its owners' experts, and its differences where they are
    `there`.
    """
    path = with_owners_experts(directories, sharing, number, to)
    factors = load_file(sharing.directory / WEIGHTS_FILE)

    def changed(name, tensor):
        found = re.match(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight", name)
        if not found or (number, int(found[1]), int(found[2])) not in there:
            return tensor
        key = "down" if found[3] == "down" else "gate_up"
        left, right = (
            factors[
                tensor_name(sharing.fingerprints[number], int(found[1]), int(found[2]), key, side)
            ].astype(np.float32)
            for side in ("left", "right")
        )
        part = left @ right
        if key == "gate_up":
            part = np.split(part, 2, axis=1)[("gate", "up").index(found[3])]
        return tensor + part.T

    change(path, changed)
    return path
