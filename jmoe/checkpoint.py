"""Checkpoints: Hugging Face directories as they stand, and jmoe's own format through Orbax."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jmoe.config import ModelConfig, RopeConfig
from jmoe.experts import (
    ExpertPool,
    ExpertTable,
    UnitedExperts,
    make_table,
    united_places,
    write_slots,
)

UNITED_FILE = "united.safetensors"


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; names every tensor at fault."""


class TensorFiles:
    """Tensors of a directory's safetensors files by name, read one at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError where there are no readable safetensors files."""
        index = directory / "model.safetensors.index.json"
        if index.exists():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                names = sorted(set(weight_map.values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{index} is not readable: {error!r}") from None
        else:
            names = ["model.safetensors"]
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            raise CheckpointError(f"{directory} lacks {', '.join(missing)}")
        self._open = {}
        for name in names:
            try:
                file = safe_open(directory / name, framework="flax")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{directory / name} is not readable: {error}") from None
            self._open.update(dict.fromkeys(file.keys(), file))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, or None where there is none of that name."""
        file = self._open.get(name)
        return None if file is None else tuple(file.get_slice(name).get_shape())

    def read(self, name: str, dtype: jnp.dtype) -> jax.Array:
        """One tensor on the device, in `dtype`."""
        return self._open[name].get_tensor(name).astype(dtype)


# What a parameter is made of: (names, shape in the file, transpose). Several names are joined
# along the output axis.
Source = tuple[tuple[str, ...], tuple[tuple[int, ...], ...], bool]


def layer_sources(cfg: ModelConfig, layer: int, is_moe: bool) -> dict[str, Source]:
    """Hugging Face names and shapes ([out, in]) of one layer's parameters, experts left out."""
    at = f"model.layers.{layer}."
    d, q, kv = cfg.d_model, cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    attn = at + "self_attn."
    qkv = tuple(f"{attn}{p}_proj." for p in "qkv")
    out: dict[str, Source] = {
        "attn_norm": ((at + "input_layernorm.weight",), ((d,),), False),
        "mlp_norm": ((at + "post_attention_layernorm.weight",), ((d,),), False),
        "wqkv": (tuple(p + "weight" for p in qkv), ((q, d), (kv, d), (kv, d)), True),
        "wo": ((attn + "o_proj.weight",), ((d, q),), True),
    }
    if cfg.qkv_bias:
        out["bqkv"] = (tuple(p + "bias" for p in qkv), ((q,), (kv,), (kv,)), False)
    if cfg.qk_norm:
        out["q_norm"] = ((attn + "q_norm.weight",), ((cfg.head_dim,),), False)
        out["k_norm"] = ((attn + "k_norm.weight",), ((cfg.head_dim,),), False)
    mlp = at + ("block_sparse_moe." if cfg.architecture == "mixtral" else "mlp.")
    if not is_moe:
        out |= _swiglu_sources("", mlp, d, cfg.d_ff_dense)
        return out
    out["router"] = ((mlp + "gate.weight",), ((cfg.num_experts, d),), True)
    if cfg.d_ff_shared:
        out |= _swiglu_sources("shared_", mlp + "shared_expert.", d, cfg.d_ff_shared)
        out["shared_gate"] = ((mlp + "shared_expert_gate.weight",), ((1, d),), False)
    return out


def _swiglu_sources(
    key: str,
    at: str,
    d: int,
    f: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, Source]:
    gate, up, down = (f"{at}{name}.weight" for name in names)
    return {
        f"{key}gate_up": ((gate, up), ((f, d), (f, d)), True),
        f"{key}down": ((down,), ((d, f),), True),
    }


def expert_sources(cfg: ModelConfig, layer: int, expert: int) -> dict[str, Source]:
    """Hugging Face names and shapes of one routed expert."""
    mixtral = cfg.architecture == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    at = f"model.layers.{layer}.{block}.experts.{expert}."
    return _swiglu_sources("", at, cfg.d_model, cfg.d_ff_expert, names)


def top_sources(cfg: ModelConfig) -> dict[str, Source]:
    """Hugging Face names and shapes of what is outside the layers."""
    d, vocab = cfg.d_model, cfg.vocab_size
    out: dict[str, Source] = {
        "embed": (("model.embed_tokens.weight",), ((vocab, d),), False),
        "final_norm": (("model.norm.weight",), ((d,),), False),
    }
    if not cfg.tie_embeddings:
        out["lm_head"] = (("lm_head.weight",), ((vocab, d),), True)
    return out


def _all_sources(cfg: ModelConfig) -> Iterator[Source]:
    yield from top_sources(cfg).values()
    for layer, is_moe in enumerate(cfg.moe_layers):
        yield from layer_sources(cfg, layer, is_moe).values()
        if is_moe:
            for expert in range(cfg.num_experts):
                yield from expert_sources(cfg, layer, expert).values()


def _check(files: TensorFiles, cfg: ModelConfig, directory: Path) -> None:
    """Raises one CheckpointError that names every missing and every misshapen tensor."""
    faults = []
    for names, shapes, _ in _all_sources(cfg):
        for name, shape in zip(names, shapes, strict=True):
            found = files.shape(name)
            if found is None:
                faults.append(f"{name} is missing")
            elif found != shape:
                faults.append(f"{name} is {list(found)}, expected {list(shape)}")
    if faults:
        shown = "\n  ".join(faults[:20])
        more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise CheckpointError(f"{directory} does not fit its config.json:\n  {shown}{more}")


def _assemble(files: TensorFiles, source: Source, dtype: jnp.dtype) -> jax.Array:
    names, _, transpose = source
    parts = [files.read(name, dtype) for name in names]
    if transpose:
        parts = [part.T for part in parts]
    if parts[0].ndim == 2 and parts[0].shape[0] == 1 and not transpose:
        parts = [part[0] for part in parts]  # shared_gate [1, d] -> [d]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


class HFLayers:
    """A Hugging Face directory read a layer at a time."""

    def __init__(self, directory: Path, cfg: ModelConfig, dtype: jnp.dtype) -> None:
        """Checks every tensor's name and shape. Raises CheckpointError."""
        self._files, self._cfg, self._dtype = TensorFiles(directory), cfg, dtype
        _check(self._files, cfg, directory)

    def top(self) -> dict[str, Any]:
        """Parameters outside the layers."""
        return self._read(top_sources(self._cfg))

    def layer(self, index: int) -> tuple[dict[str, Any], ExpertPool | None]:
        """One layer's parameters, and its routed experts in order; None for a dense layer."""
        is_moe = self._cfg.moe_layers[index]
        params = self._read(layer_sources(self._cfg, index, is_moe))
        if not is_moe:
            return params, None
        parts = [
            self._read(expert_sources(self._cfg, index, expert))
            for expert in range(self._cfg.num_experts)
        ]
        return params, ExpertPool(*(jnp.stack([p[key] for p in parts]) for key in parts[0]))

    def _read(self, sources: Mapping[str, Source]) -> dict[str, Any]:
        return {key: _assemble(self._files, s, self._dtype) for key, s in sources.items()}


def load_hf(
    directory: Path,
    cfg: ModelConfig,
    dtype: jnp.dtype,
    ways: Mapping[int, UnitedExperts],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], ExpertPool, ExpertTable]:
    """Loads a Hugging Face directory, one layer's experts in flight at a time.

    The pool is allocated once on the device, with places for the largest of `ways`, and filled in
    place; host memory never holds a second copy of the model. `progress(done, total)` counts
    layers. Raises CheckpointError.
    """
    files = HFLayers(directory, cfg, dtype)
    params = files.top()
    table = make_table(cfg.num_moe_layers, cfg.num_experts, united_places(ways))
    slots = np.asarray(table.slots)
    pool = empty_pool(cfg, slots.size, dtype)
    segments, moe_layer = [], 0
    for _, start, count in cfg.segments():
        layers = []
        for layer in range(start, start + count):
            own, experts = files.layer(layer)
            layers.append(own)
            if experts is not None:
                places = jnp.asarray(slots[moe_layer, : cfg.num_experts])
                pool = write_slots(pool, places, *experts)
                moe_layer += 1
            if progress is not None:
                progress(layer + 1, cfg.num_layers)
        segments.append(jax.tree.map(lambda *parts: jnp.stack(parts), *layers))
    params["segments"] = tuple(segments)
    return params, pool, table


def empty_pool(cfg: ModelConfig, num_slots: int, dtype: jnp.dtype) -> ExpertPool:
    """A zeroed pool of `num_slots` experts of the model's shape."""
    d, f = cfg.d_model, cfg.d_ff_expert
    return ExpertPool(jnp.zeros((num_slots, d, 2 * f), dtype), jnp.zeros((num_slots, f, d), dtype))


def load_united(directory: Path, cfg: ModelConfig) -> dict[int, UnitedExperts]:
    """United experts beside a model, by way; empty where there are none. Raises CheckpointError."""
    path = directory / UNITED_FILE
    if not path.exists():
        return {}
    try:
        with safe_open(path, framework="flax") as file:
            tensors = {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not readable: {error}") from None
    prefixes = {name.split(".")[0].removeprefix("way"): name for name in tensors}
    for prefix, name in prefixes.items():
        if not (prefix.isascii() and prefix.isdigit() and int(prefix) >= 2):
            raise CheckpointError(f"{path}: {name} is not named way<2 or more>.layers.<layer>.*")
    return {way: _united(tensors, way, cfg, path) for way in sorted(map(int, prefixes))}


def _united(
    tensors: Mapping[str, np.ndarray], way: int, cfg: ModelConfig, path: Path
) -> UnitedExperts:
    count, d, f = -(-cfg.num_experts // way), cfg.d_model, cfg.d_ff_expert
    shapes = {"gate_up": (count, d, 2 * f), "down": (count, f, d), "groups": (cfg.num_experts,)}
    stacked = {}
    for key, shape in shapes.items():
        names = [f"way{way}.layers.{layer}.{key}" for layer in range(cfg.num_moe_layers)]
        wrong = [n for n in names if n not in tensors or tensors[n].shape != shape]
        if wrong:
            raise CheckpointError(f"{path}: {', '.join(wrong)} missing or not of shape {shape}")
        stacked[key] = np.stack([tensors[name] for name in names])
    if not np.issubdtype(stacked["groups"].dtype, np.integer):
        raise CheckpointError(f"{path}: way{way}.layers.0.groups and the others must be integers")
    try:
        return UnitedExperts(way, stacked["gate_up"], stacked["down"], stacked["groups"])
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def save_native(
    directory: Path,
    cfg: ModelConfig,
    params: Mapping[str, Any],
    pool: ExpertPool,
    table: ExpertTable,
) -> None:
    """Writes jmoe's own format: `jmoe.json` and an Orbax tree. Raises FileExistsError."""
    import orbax.checkpoint as ocp

    directory = directory.absolute()
    if (directory / "jmoe.json").exists():
        raise FileExistsError(f"{directory} already holds a model; choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "state", _tree(params, pool, table))
    (directory / "jmoe.json").write_text(json.dumps(asdict(cfg), indent=1), encoding="utf-8")


def is_native(directory: Path) -> bool:
    """Whether the directory was written by `save_native`."""
    return (directory / "jmoe.json").exists()


def load_native(
    directory: Path, dtype: jnp.dtype
) -> tuple[ModelConfig, dict[str, Any], ExpertPool, ExpertTable]:
    """Reads what `save_native` wrote, floating-point arrays as `dtype`. Raises CheckpointError."""
    import orbax.checkpoint as ocp

    directory = directory.absolute()
    try:
        cfg = _config_from_json(json.loads((directory / "jmoe.json").read_text(encoding="utf-8")))
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.restore(directory / "state")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{directory} is not readable: {error}") from error

    def cast(a: Any) -> jax.Array:
        return jnp.asarray(a, dtype if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype)

    tree = jax.tree.map(cast, tree)
    params = dict(tree["params"])
    params["segments"] = tuple(params["segments"])
    return cfg, params, ExpertPool(**tree["pool"]), ExpertTable(**tree["table"])


def _tree(params: Mapping[str, Any], pool: ExpertPool, table: ExpertTable) -> dict[str, Any]:
    plain = {**params, "segments": list(params["segments"])}
    return {"params": plain, "pool": pool._asdict(), "table": table._asdict()}


def _config_from_json(raw: dict[str, Any]) -> ModelConfig:
    raw = {**raw, "rope": RopeConfig(**raw["rope"])}
    for key in ("moe_layers", "eos_token_ids"):
        raw[key] = tuple(raw[key])
    return ModelConfig(**raw)
