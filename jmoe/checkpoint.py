"""Checkpoints: Hugging Face directories as they stand, and jmoe's own format through Orbax."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import islice
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
    num_united_slots,
    write_slots,
)
from jmoe.finite import fault, seem_finite
from jmoe.weights import Weights

UNITED_FILE = "united.safetensors"
FLOATS = ("BF16", "F16", "F32", "F64")  # as safetensors names them
FAULTS_SHOWN, FAULTS_COUNTED = 20, 1000


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; names every tensor at fault."""


def _refuse(first: str, faults: Iterable[str]) -> None:
    """Raises one CheckpointError that names the faults, where there are any."""
    found = list(islice(faults, FAULTS_COUNTED))
    if not found:
        return
    lines = [first, *found[:FAULTS_SHOWN]]
    if len(found) > FAULTS_SHOWN:
        at_least = "at least " if len(found) == FAULTS_COUNTED else ""
        lines.append(f"and {at_least}{len(found) - FAULTS_SHOWN} more")
    raise CheckpointError("\n  ".join(lines))


class TensorFiles:
    """Tensors of a directory's safetensors files by name, read one at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError where there are no readable safetensors files."""
        names = _file_names(directory)
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            raise CheckpointError(
                f"{directory} lacks {', '.join(missing)}; a Hugging Face directory has "
                "model.safetensors, or shards and model.safetensors.index.json"
            )
        self._open: dict[str, Any] = {}
        for name in names:
            try:
                file = safe_open(directory / name, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{directory / name} is not readable: {error}") from None
            twice = sorted(self._open.keys() & file.keys())
            if twice:
                raise CheckpointError(f"{directory / name} holds {twice[0]}, and another file too")
            self._open.update(dict.fromkeys(file.keys(), file))

    def names(self) -> list[str]:
        """Every tensor there is."""
        return sorted(self._open)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, or None where there is none of that name."""
        file = self._open.get(name)
        return None if file is None else tuple(file.get_slice(name).get_shape())

    def kind(self, name: str) -> str:
        """How a tensor's elements are stored, as safetensors names it."""
        return self._open[name].get_slice(name).get_dtype()

    def raw(self, name: str) -> np.ndarray:
        """One tensor in host memory, as it is stored."""
        return self._open[name].get_tensor(name)

    def read(self, name: str, dtype: jnp.dtype) -> jax.Array | np.ndarray:
        """One tensor in `dtype`, where it is assembled: on the device, or in a CPU's memory, where
        every shape of an operation would be a program to compile.
        """
        raw = self.raw(name)
        if jax.default_backend() != "cpu":
            return jnp.asarray(raw).astype(dtype)
        with np.errstate(over="ignore"):  # to infinity, which is looked for later
            return raw.astype(dtype, copy=False)


def _file_names(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        if not all(isinstance(name, str) for name in names):
            raise TypeError("weight_map names files that are not text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not readable: {error!r}") from None
    return names


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
    if cfg.o_bias:
        out["bo"] = ((attn + "o_proj.bias",), ((d,),), False)
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
    """Raises CheckpointError for tensors that are missing, misshapen, not floats, or never read."""
    read: set[str] = set()
    _refuse(f"{directory} does not fit its config.json:", _unlike(files, cfg, read))
    unread = [name for name in files.names() if name not in read]
    if cfg.tie_embeddings and files.shape("lm_head.weight") is not None:
        unread.remove("lm_head.weight")
        if not _equal(files, "lm_head.weight", "model.embed_tokens.weight"):
            raise CheckpointError(
                f"{directory}: lm_head.weight is not model.embed_tokens.weight, though "
                "tie_word_embeddings is true; with false it is read"
            )
    _refuse(
        f"{directory} holds tensors that a {cfg.architecture} of its config.json does not have, "
        "and that would be left out:",
        (name for name in unread if not name.endswith(".rotary_emb.inv_freq")),
    )


def _unlike(files: TensorFiles, cfg: ModelConfig, read: set[str]) -> Iterator[str]:
    """Every tensor that is not as the model needs it. Collects the names of all it needs."""
    for names, shapes, _ in _all_sources(cfg):
        read.update(names)
        for name, shape in zip(names, shapes, strict=True):
            found = files.shape(name)
            if found is None:
                yield f"{name} is missing"
            elif found != shape:
                yield f"{name} is {list(found)}, expected {list(shape)}"
            elif files.kind(name) not in FLOATS:
                yield f"{name} is {files.kind(name)}; jmoe reads {', '.join(FLOATS)}"


def _equal(files: TensorFiles, one: str, other: str) -> bool:
    return files.shape(one) == files.shape(other) and bool(
        (files.raw(one) == files.raw(other)).all()
    )


def _assemble(files: TensorFiles, source: Source, dtype: jnp.dtype) -> jax.Array:
    names, _, transpose = source
    parts = [files.read(name, dtype) for name in names]
    if transpose:
        parts = [part.T for part in parts]
    if parts[0].ndim == 2 and parts[0].shape[0] == 1 and not transpose:
        parts = [part[0] for part in parts]  # shared_gate [1, d] -> [d]
    if len(parts) == 1:
        return jnp.asarray(parts[0])
    on_host = isinstance(parts[0], np.ndarray)
    return jnp.asarray((np if on_host else jnp).concatenate(parts, axis=-1))


def _stack(parts: Sequence[jax.Array]) -> jax.Array:
    """Like `jnp.stack`, where the arrays are (see `TensorFiles.read`)."""
    if jax.default_backend() != "cpu":
        return jnp.stack(parts)
    return jnp.asarray(np.stack([np.asarray(part) for part in parts]))


class HFLayers:
    """A Hugging Face directory read a layer at a time."""

    def __init__(
        self, directory: Path, cfg: ModelConfig, dtype: jnp.dtype, check_weights: bool = True
    ) -> None:
        """Checks every tensor's name and shape. Raises CheckpointError."""
        self._files, self._cfg, self._dtype = TensorFiles(directory), cfg, dtype
        self._directory, self._check_weights = directory, check_weights
        _check(self._files, cfg, directory)

    def top(self) -> dict[str, Any]:
        """Parameters outside the layers. Raises CheckpointError for weights that are not finite."""
        sources = top_sources(self._cfg)
        params = self._read(sources)
        self._refuse_not_finite(params, [sources])
        return params

    def layer(self, index: int) -> tuple[dict[str, Any], ExpertPool | None]:
        """One layer's parameters, and its routed experts in order; None for a dense layer.

        Raises CheckpointError for weights that are not finite.
        """
        is_moe = self._cfg.moe_layers[index]
        sources = layer_sources(self._cfg, index, is_moe)
        params, pool, experts = self._read(sources), None, []
        if is_moe:
            count = self._cfg.num_experts
            experts = [expert_sources(self._cfg, index, expert) for expert in range(count)]
            parts = [self._read(expert) for expert in experts]
            pool = ExpertPool(*(_stack([p[key] for p in parts]) for key in parts[0]))
        self._refuse_not_finite((params, pool), [sources, *experts])
        return params, pool

    def _refuse_not_finite(self, read: Any, sources: Iterable[Mapping[str, Source]]) -> None:
        if not self._check_weights or seem_finite(read):
            return
        names = (name for group in sources for source in group.values() for name in source[0])
        faults = (fault(name, self._files.raw(name), self._dtype) for name in names)
        _refuse(f"{self._directory} has weights that are not finite:", filter(None, faults))

    def _read(self, sources: Mapping[str, Source]) -> dict[str, Any]:
        return {key: _assemble(self._files, s, self._dtype) for key, s in sources.items()}


def load_hf(
    directory: Path,
    cfg: ModelConfig,
    dtype: jnp.dtype,
    ways: Mapping[int, UnitedExperts],
    progress: Callable[[int, int], None] | None = None,
    check_weights: bool = True,
) -> Weights:
    """Loads a Hugging Face directory, one layer's experts in flight at a time.

    The pool is allocated once on the device, with slots for the largest of `ways`, and filled in
    place; host memory never holds a second copy of the model. `progress(done, total)` counts
    layers. Raises CheckpointError.
    """
    files = HFLayers(directory, cfg, dtype, check_weights)
    params = files.top()
    table = make_table(cfg.num_moe_layers, cfg.num_experts, num_united_slots(ways))
    slots = np.asarray(table.slots)
    pool = empty_pool(cfg, slots.size, dtype)
    segments, moe_layer = [], 0
    for _, start, count in cfg.segments():
        layers = []
        for layer in range(start, start + count):
            own, experts = files.layer(layer)
            layers.append(own)
            if experts is not None:
                routed = jnp.asarray(slots[moe_layer, : cfg.num_experts])
                pool = write_slots(pool, routed, *experts)
                moe_layer += 1
            if progress is not None:
                progress(layer + 1, cfg.num_layers)
        segments.append(jax.tree.map(lambda *parts: _stack(parts), *layers))
    params["segments"] = tuple(segments)
    return Weights(params, pool, table)


def empty_pool(cfg: ModelConfig, num_slots: int, dtype: jnp.dtype) -> ExpertPool:
    """A zeroed pool of `num_slots` experts of the model's shape."""
    d, f = cfg.d_model, cfg.d_ff_expert
    return ExpertPool(jnp.zeros((num_slots, d, 2 * f), dtype), jnp.zeros((num_slots, f, d), dtype))


def load_united(
    directory: Path, cfg: ModelConfig, dtype: jnp.dtype | None = None
) -> dict[int, UnitedExperts]:
    """United experts beside a model, by way; empty where there are none. Raises CheckpointError.

    With `dtype` they must be finite in it.
    """
    path = directory / UNITED_FILE
    if not path.exists():
        return {}
    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not readable: {error}") from None
    prefixes = {name.split(".")[0].removeprefix("way"): name for name in tensors}
    for prefix, name in prefixes.items():
        if not (prefix.isascii() and prefix.isdigit() and 2 <= int(prefix[:9]) == int(prefix[:10])):
            raise CheckpointError(f"{path}: {name} is not named way<2 or more>.layers.<layer>.*")
    united = {way: _united(tensors, way, cfg, path) for way in sorted(map(int, prefixes))}
    read = {
        name
        for way in united
        for layer in range(cfg.num_moe_layers)
        for name in _united_shapes(cfg, way, layer)
    }
    _refuse(f"{path} holds tensors that are not read:", sorted(tensors.keys() - read))
    if dtype is not None:
        weights = ((n, t) for n, t in tensors.items() if jnp.issubdtype(t.dtype, jnp.floating))
        faults = (fault(name, tensor, dtype) for name, tensor in weights)
        _refuse(f"{path} has weights that are not finite:", filter(None, faults))
    return united


def _united_shapes(cfg: ModelConfig, way: int, layer: int) -> dict[str, tuple[int, ...]]:
    count, d, f = -(-cfg.num_experts // way), cfg.d_model, cfg.d_ff_expert
    shapes = {"gate_up": (count, d, 2 * f), "down": (count, f, d), "groups": (cfg.num_experts,)}
    return {f"way{way}.layers.{layer}.{key}": shape for key, shape in shapes.items()}


def _united(
    tensors: Mapping[str, np.ndarray], way: int, cfg: ModelConfig, path: Path
) -> UnitedExperts:
    stacked: dict[str, list[np.ndarray]] = {"gate_up": [], "down": [], "groups": []}
    for layer in range(cfg.num_moe_layers):
        shapes = _united_shapes(cfg, way, layer)
        wrong = [n for n in shapes if n not in tensors or tensors[n].shape != shapes[n]]
        if wrong:
            wanted = ", ".join(str(shapes[name]) for name in wrong)
            raise CheckpointError(f"{path}: {', '.join(wrong)} missing or not of shape {wanted}")
        for name in shapes:
            key = name.split(".")[-1]
            want, words = (np.integer, "integers") if key == "groups" else (jnp.floating, "floats")
            if not jnp.issubdtype(tensors[name].dtype, want):
                raise CheckpointError(f"{path}: {name} and the others must be {words}")
            stacked[key].append(tensors[name])
    try:
        return UnitedExperts(way, **{key: np.stack(parts) for key, parts in stacked.items()})
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def save_native(
    directory: Path,
    cfg: ModelConfig,
    weights: Weights,
) -> None:
    """Writes jmoe's own format: `jmoe.json` and an Orbax tree. Raises FileExistsError."""
    import orbax.checkpoint as ocp

    directory = directory.absolute()
    if (directory / "jmoe.json").exists():
        raise FileExistsError(f"{directory} already holds a model; choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "state", _tree(weights))
    (directory / "jmoe.json").write_text(json.dumps(asdict(cfg), indent=1), encoding="utf-8")


def is_native(directory: Path) -> bool:
    """Whether the directory was written by `save_native`."""
    return (directory / "jmoe.json").exists()


def load_native(
    directory: Path, dtype: jnp.dtype, check_weights: bool = True
) -> tuple[ModelConfig, Weights]:
    """Reads what `save_native` wrote, floating-point arrays as `dtype`. Raises CheckpointError."""
    import orbax.checkpoint as ocp

    directory = directory.absolute()
    try:
        cfg = _config_from_json(json.loads((directory / "jmoe.json").read_text(encoding="utf-8")))
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.restore(directory / "state")
        stored = dict(tree["params"]), ExpertPool(**tree["pool"]), ExpertTable(**tree["table"])
        _check_native(cfg, stored[0])
    except Exception as error:  # whatever Orbax raises for a damaged tree
        raise CheckpointError(f"{directory} is not readable: {error}") from error

    def cast(a: Any) -> jax.Array:
        return jnp.asarray(a, dtype if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype)

    params, pool, table = jax.tree.map(cast, stored)
    if check_weights and not seem_finite((params, pool)):
        leaves = jax.tree_util.tree_leaves_with_path({"params": stored[0], "pool": stored[1]})
        faults = (fault(jax.tree_util.keystr(at), leaf, dtype) for at, leaf in leaves)
        _refuse(f"{directory} has weights that are not finite:", filter(None, faults))
    params["segments"] = tuple(params["segments"])
    return cfg, Weights(params, pool, table)


def _tree(weights: Weights) -> dict[str, Any]:
    params, pool, table = weights
    plain = {**params, "segments": list(params["segments"])}
    return {"params": plain, "pool": pool._asdict(), "table": table._asdict()}


def _check_native(cfg: ModelConfig, params: Mapping[str, Any]) -> None:
    """Raises ValueError where parameters are not those of the configuration."""
    want: dict[str, Any] = {key: _param_shape(s) for key, s in top_sources(cfg).items()}
    want["segments"] = [
        {k: (count, *_param_shape(s)) for k, s in layer_sources(cfg, start, is_moe).items()}
        for is_moe, start, count in cfg.segments()
    ]
    found = jax.tree.map(lambda leaf: tuple(leaf.shape), dict(params))
    if found != want:
        raise ValueError("its parameters are not those of a model as jmoe.json describes it")


def _param_shape(source: Source) -> tuple[int, ...]:
    """Shape of what `_assemble` makes of a source."""
    _, shapes, transpose = source
    if transpose:
        return shapes[0][1], sum(shape[0] for shape in shapes)
    if len(shapes[0]) == 2 and shapes[0][0] == 1:
        return shapes[0][1:]
    return shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes),)


def _config_from_json(raw: dict[str, Any]) -> ModelConfig:
    """Raises TypeError, KeyError or ValueError for what `save_native` would not write."""
    raw = {**raw, "rope": RopeConfig(**raw["rope"])}
    for key in ("moe_layers", "eos_token_ids"):
        raw[key] = tuple(raw[key])
    cfg = ModelConfig(**raw)
    for one in (cfg, cfg.rope):
        for field in fields(one):
            value, kind = getattr(one, field.name), str(field.type)
            plain = {"int": int, "float": (int, float), "bool": bool, "str": str}.get(
                getattr(field.type, "__name__", kind), object
            )
            if not isinstance(value, plain) or (isinstance(value, bool) and plain is not bool):
                raise TypeError(f"{field.name} is {value!r}")
    return cfg
