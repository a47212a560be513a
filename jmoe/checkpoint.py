"""Checkpoints: Hugging Face directories as they stand, and jmoe's own format through Orbax."""

import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jmoe import layout
from jmoe.architectures import naming
from jmoe.attention import Latent, Paged
from jmoe.config import ModelConfig, RopeConfig, read_config
from jmoe.digests import file_digests, stamp_of
from jmoe.experts import (
    ExpertPool,
    ExpertTable,
    Pool,
    QuantizedPool,
    UnitedExperts,
    make_table,
    num_united_slots,
    write_slots,
)
from jmoe.extras import need
from jmoe.finite import fault, seem_finite
from jmoe.int4 import Int4, PackedTensor
from jmoe.model_files import instead, lfs_pointer, read_text, regular, stays_inside
from jmoe.parallel.home import Home
from jmoe.parameter import MXFP4_NAN, Layout, Parameter
from jmoe.recurrent import GatedDelta, Mamba, ShortConv
from jmoe.router import ScoredTopK, SparseMixer
from jmoe.weights import PoolHolder, Weights
from pallas_kernels.activation import ClampedSwiglu, Gelu, Relu2, Silu
from pallas_kernels.grouped_gemm import QuantizedWeights
from pallas_kernels.grouped_gemm.four_bits import PackedWeights
from pallas_kernels.grouped_gemm.quantized import BLOCK

log = logging.getLogger(__name__)

UNITED_FILE = "united.safetensors"
DISTILLED_FROM = "distilled_from"
"""In the metadata of that file: `weights_digest` of the model whose experts it stands in for."""
QUANTIZE = ("auto", "none", "fp8", "int4", "mxfp4")
BLOCK_BYTES = 128 << 20
"""Of experts that are quantized at once, in float32; one larger expert is by itself."""
FLOATS = ("BF16", "F16", "F32", "F64")  # as safetensors names them
FP8 = "F8_E4M3"
SCALES = ("_scale_inv", "_scale")
"""Behind the name of a matrix in fp8: its scales, as DeepSeek and compressed-tensors call them."""
UNUSED_SCALES = {
    r"(\.input|[._]activation)_scale$": "activations are not quantized",
    r"(self_attn|mixer)\.(k_proj\.|v_proj\.)?[kv]_scale$": "keys and values in fp8 have a scale "
    "for each token and head, which clips nothing",
}
"""What scales of a quantized checkpoint are called that are not used, and why not."""
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


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """Opens a safetensors file. Raises CheckpointError for one that is not readable."""
    try:
        with safe_open(regular(path), framework="numpy") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not readable: {error}") from None


def checked_tensor(
    file: Any, path: Path, name: str, shape: tuple[int, ...], dtype: Any, check_weights: bool
) -> np.ndarray:
    """Returns a tensor of an open file as `dtype`. Raises CheckpointError for another shape, and,
    if it is to be checked, for weights that are not finite.
    """
    tensor = file.get_tensor(name).astype(dtype)
    if tensor.shape != shape:
        raise CheckpointError(f"{path}: {name} is {list(tensor.shape)}, expected {list(shape)}")
    if check_weights and not seem_finite(tensor):
        raise CheckpointError(f"{path}: {name} has weights that are not finite")
    return tensor


class TensorFiles:
    """Tensors of a directory's safetensors files by name, read one at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError where there are no readable safetensors files."""
        names = _file_names(directory)
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise CheckpointError(
                f"{directory} lacks {', '.join(missing[:3])}{more}; a Hugging Face directory has "
                "model.safetensors, or shards and model.safetensors.index.json" + instead(directory)
            )
        self._open: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        self._maps: dict[Path, tuple[np.ndarray, dict[str, Any]]] = {}  # and where tensors begin
        for name in names:
            try:
                file = safe_open(regular(directory / name), framework="numpy")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{directory / name} is not readable: {error}{lfs_pointer(directory / name)}"
                ) from None
            twice = sorted(self._open.keys() & file.keys())
            if twice:
                raise CheckpointError(f"{directory / name} holds {twice[0]}, and another file too")
            self._open.update(dict.fromkeys(file.keys(), file))
            self._paths.update(dict.fromkeys(file.keys(), directory / name))

    def names(self) -> list[str]:
        """Returns the name of every tensor."""
        return sorted(self._open)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a tensor, or None where there is none of that name."""
        file = self._open.get(name)
        return None if file is None else tuple(file.get_slice(name).get_shape())

    def get(self, name: str) -> np.ndarray | None:
        """Returns one tensor in host memory, as it is stored; None where there is none."""
        return self.raw(name) if name in self._open else None

    def kind(self, name: str) -> str:
        """Returns how a tensor's elements are stored, as safetensors names it."""
        return self._open[name].get_slice(name).get_dtype()

    def has_packed(self, name: str, int4: Int4 | None) -> bool:
        """Returns whether a matrix is there in four bits, and not by itself."""
        return int4 is not None and name not in self._open and int4.packed(name) in self._open

    def raw(self, name: str, part: tuple[int, int] | None = None) -> np.ndarray:
        """Returns one tensor in host memory, as it is stored; or a part (`Parameter.part`)."""
        file = self._open[name]
        if self.kind(name) == FP8:  # NumPy has no such dtype, so safetensors cannot give it
            shape = file.get_slice(name).get_shape()
            values = self.stored(name, part)[1].view(jnp.float8_e4m3fn)
            return values.reshape(shape if part is None else shape[1:])
        return file.get_tensor(name) if part is None else file.get_slice(name)[part[0]]

    def stored(self, name: str, part: tuple[int, int] | None = None) -> tuple[str, np.ndarray]:
        """Returns how a tensor's elements are stored, and its bytes, or a part's, as a map of the
        file: what is not looked at is not read.
        """
        path = self._paths[name]
        if path not in self._maps:
            raw = np.memmap(path, np.uint8, "r")
            first = 8 + int.from_bytes(raw[:8].tobytes(), "little")
            self._maps[path] = raw[first:], json.loads(raw[8:first].tobytes())
        raw, header = self._maps[path]
        kind, shape, (begin, end) = (header[name][k] for k in ("dtype", "shape", "data_offsets"))
        found = raw[begin:end]
        return kind, found if part is None else found.reshape(shape[0], -1)[part[0]]

    def scales(self, name: str) -> str:
        """Returns the name of the scales of a matrix in fp8: the one that there is, or would be."""
        return next((name + end for end in SCALES if name + end in self._open), name + SCALES[0])

    def dequantized(
        self, name: str, block: Sequence[int], part: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Returns a matrix in fp8, or a part of several, as float32; `block` is as
        `ModelConfig.fp8_block`.
        """
        values, scales = (self.raw(own, part) for own in (name, self.scales(name)))
        scales = scales.astype(np.float32)
        rows, columns = (size or most for size, most in zip(block, values.shape, strict=True))
        scales = scales.reshape(-(-values.shape[0] // rows), -1)
        spread = np.repeat(np.repeat(scales, rows, axis=0), columns, axis=1)
        return values.astype(np.float32) * spread[: values.shape[0], : values.shape[1]]


def _file_names(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return _without_index(directory)
    try:
        weight_map = json.loads(read_text(index))["weight_map"]
        names = sorted(set(weight_map.values()))
        if not all(isinstance(name, str) for name in names):
            raise TypeError("weight_map names files that are not text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not readable: {error!r}") from None
    if outside := [name for name in names if not stays_inside(name)]:
        raise CheckpointError(
            f"{index} names {outside[0]!r}, which is no file in its folder; shards lie beside it"
        )
    return names


def _without_index(directory: Path) -> list[str]:
    """Returns the names of a checkpoint's files: one, or all shards, by how many the first says
    there are.
    """
    whole, first = "model.safetensors", sorted(directory.glob("model-00001-of-*.safetensors"))
    if (directory / whole).exists() or not first:
        return [whole]
    count = first[-1].stem.rpartition("-")[2]
    if not re.fullmatch(r"\d{5}", count):
        return [whole]
    return [f"model-{at:05}-of-{count}.safetensors" for at in range(1, int(count) + 1)]


def weights_digest(directory: Path) -> str:
    """Returns a hash of a model's weights as they are stored, every byte of every file.

    Large files are remembered (`jmoe.digests`). Raises CheckpointError for files that cannot be
    read.
    """
    if is_native(directory):
        state = (directory / "state").rglob("*")
        names = sorted(str(path.relative_to(directory)) for path in state if not path.is_dir())
    else:
        names = _file_names(directory)
    try:
        digests = file_digests(regular(directory / name) for name in names)
    except OSError as error:
        raise CheckpointError(f"{directory} is not readable: {error}") from None
    return f"sha256:{sha256(json.dumps([names, digests]).encode()).hexdigest()}"


def file_stamps(directory: Path) -> dict[Path, list[int]]:
    """Returns `digests.stamp_of` each file of a Hugging Face directory's weights, by its resolved
    path; empty where one is missing. What is equal at two times is of equal weights.
    """
    with suppress(OSError, CheckpointError):
        files = [(directory / name).resolve(strict=True) for name in _file_names(directory)]
        return {file: stamp_of(file) for file in files}
    return {}


def _as_stored(files: TensorFiles, cfg: ModelConfig) -> ModelConfig:
    """Returns a configuration that says whether the files have experts joined, where they may."""
    if not naming(cfg.architecture).may_be_apart:
        return cfg
    layers = (at for at, is_moe in enumerate(cfg.moe_layers) if is_moe)
    experts = (layout.expert(cfg, at, 0).values() for at in layers)
    joined = (name for own in experts for parameter in own for name in parameter.names)
    return replace(cfg, experts_apart=not any(map(files.shape, joined)))


def _check(files: TensorFiles, cfg: ModelConfig, directory: Path) -> None:
    """Raises CheckpointError for tensors that are missing, misshapen, not floats, or never read."""
    read: set[str] = set()
    _refuse(f"{directory} does not fit its config.json:", _unlike(files, cfg, read))
    names = naming(cfg.architecture)
    unread = [name for name in files.names() if name not in read]
    if beside := [name for name in unread if names.beside and name.startswith(names.beside)]:
        log.info("%s: %d tensors are not read: jmoe serves text alone", directory, len(beside))
        unread = [name for name in unread if name not in set(beside)]
    head, embed = f"{names.head}weight", names.embedding
    if cfg.tie_embeddings and files.shape(head) is not None:
        unread.remove(head)
        if not _equal(files, head, embed):
            raise CheckpointError(
                f"{directory}: {head} is not {embed}, though "
                "tie_word_embeddings is true; with false it is read"
            )
    unread = _without_unused(unread, read, cfg, files, directory)
    after = range(cfg.num_layers, cfg.num_layers + cfg.unused_layers)
    behind = tuple(map(names.layer, after))
    if names.predicting:
        behind += (names.predicting,)
    if extra := [name for name in unread if name.startswith(behind)]:
        layers = ", ".join(f"{at}*" for at in behind)
        log.info(
            "%s: %d tensors are not read, %s: they predict further tokens than the next one",
            directory,
            len(extra),
            layers,
        )
    _refuse(
        f"{directory} holds tensors that a {cfg.architecture} of its config.json does not have, "
        "and that would be left out:",
        (
            name
            for name in unread
            if not name.endswith(".rotary_emb.inv_freq") and name not in extra
        ),
    )


def _without_unused(
    unread: Sequence[str], read: set[str], cfg: ModelConfig, files: TensorFiles, directory: Path
) -> list[str]:
    """Returns the names that are none of `UNUSED_SCALES` beside a tensor that is read, and none of
    AutoGPTQ's biases of zeros; says which are, and why they are not used.
    """
    if not (cfg.fp8_block or cfg.int4):
        return list(unread)
    modules = {name.rpartition(".")[0] for name in read}
    modules |= {name.rpartition(".")[0] for name in modules}
    unused = {
        why: [n for n in unread if re.search(pattern, n) and n.rpartition(".")[0] in modules]
        for pattern, why in UNUSED_SCALES.items()
    }
    if cfg.int4 is not None and cfg.int4.method.startswith("gptq"):
        biases = (n for n in unread if n.removesuffix("bias") + "qweight" in read)
        unused["they are all zero"] = [name for name in biases if not files.raw(name).any()]
    for why, found in unused.items():
        if found:
            more = "" if len(found) == 1 else f" and {len(found) - 1} more"
            log.warning("%s: %s%s are not used: %s", directory, found[0], more, why)
    gone = set().union(*unused.values())
    return [name for name in unread if name not in gone]


def _unlike(files: TensorFiles, cfg: ModelConfig, read: set[str]) -> Iterator[str]:
    """Yields an error for each tensor that is not as the model needs it; adds the names it needs to
    `read`.
    """
    for parameter in layout.whole(cfg):
        for name, shape in zip(parameter.names, parameter.in_file, strict=True):
            if name in read:  # it has the parts of several
                continue
            read.add(name)
            found = files.shape(name)
            int4 = cfg.int4 if parameter.kind == "matrix" and found is None else None
            if int4 is not None and files.has_packed(name, int4):
                yield from _unlike_packed(files, int4.tensors(name, shape), read)
            elif found is None:
                yield f"{name} is missing"
            elif found != shape and not (parameter.swapped and found == _swapped(shape)):
                yield f"{name} is {list(found)}, expected {list(shape)}"
            elif parameter.swapped and shape == _swapped(shape):
                yield f"{name} is square: {list(shape)} does not say which way round it lies"
            elif files.kind(name) == FP8 and cfg.fp8_block and parameter.kind == "matrix":
                read.add(scales := files.scales(name))
                yield from _unlike_scales(files, scales, shape, cfg.fp8_block)
            elif files.kind(name) not in (
                kinds := ("U8",) if parameter.kind == "mxfp4" else FLOATS
            ):
                yield f"{name} is {files.kind(name)}; jmoe reads {', '.join(kinds)}"


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _unlike_packed(
    files: TensorFiles, tensors: Iterable[PackedTensor], read: set[str]
) -> Iterator[str]:
    """Yields an error for each tensor of a matrix in four bits that is not as its format says."""
    for tensor in tensors:
        found = files.shape(tensor.name)
        read.add(tensor.name)
        if found is None and tensor.is_needed:
            yield f"{tensor.name} is missing: the matrix is in four bits"
        elif found is not None and found != tensor.shape:
            yield f"{tensor.name} is {list(found)}, expected {list(tensor.shape)}"
        elif found is not None and files.kind(tensor.name) not in tensor.kinds:
            kinds = ", ".join(tensor.kinds)
            yield f"{tensor.name} is {files.kind(tensor.name)}; jmoe reads {kinds}"


def _unlike_scales(
    files: TensorFiles, name: str, shape: tuple[int, ...], block: Sequence[int]
) -> Iterator[str]:
    """Yields an error for scales that are not one for each block of a matrix in fp8."""
    block = (*(1 for _ in shape[2:]), *block)  # of several matrices, each by itself
    counts = [-(-size // (each or size)) for size, each in zip(shape, block, strict=True)]
    found = files.shape(name)
    if found is None:
        yield f"{name} is missing: the matrix is in fp8"
    elif list(found) != counts and not (math.prod(found) == 1 == math.prod(counts)):
        yield f"{name} is {list(found)}, expected {counts}: one for each block of the matrix"
    elif files.kind(name) not in FLOATS:
        yield f"{name} is {files.kind(name)}; jmoe reads {', '.join(FLOATS)}"


def _equal(files: TensorFiles, one: str, other: str) -> bool:
    return files.shape(one) == files.shape(other) and bool(
        (files.raw(one) == files.raw(other)).all()
    )


def _stack(parts: Sequence[Any]) -> Any:
    """Stacks arrays as `jnp.stack` does, where they are (see `HFLayers._tensor`)."""
    if isinstance(parts[0], np.ndarray):
        return np.stack(parts)
    if jax.default_backend() != "cpu":
        return jnp.stack(parts)
    return jnp.asarray(np.stack([np.asarray(part) for part in parts]))


class HFLayers:
    """A Hugging Face directory read a layer at a time."""

    def __init__(
        self,
        directory: Path,
        cfg: ModelConfig,
        dtype: jnp.dtype,
        check_weights: bool = True,
        *,
        experts_on_host: bool = False,
        params_on_host: bool = False,
        quantize: str = "none",
    ) -> None:
        """Checks every tensor's name and shape. Raises CheckpointError.

        Where experts are kept as `quantize` says, those that the files have in that format are read
        as they are, and others are quantized from float32.

        `experts_on_host` leaves them there, for who places each on a device of its own, and
        `params_on_host` all other weights.
        """
        self._files, self._dtype = TensorFiles(directory), dtype
        self._cfg = cfg = _as_stored(self._files, cfg)
        self._quantize = quantize
        self._is_stored = quantize != "none" and stored_format(cfg) == quantize
        self._experts_on_host, self._params_on_host = experts_on_host, params_on_host
        self._directory, self._check_weights = directory, check_weights
        _check(self._files, cfg, directory)

    def top(self) -> dict[str, Any]:
        """Returns the parameters outside the layers. Raises CheckpointError for weights that are
        not finite.
        """
        own = layout.top(self._cfg)
        params = self._read(own, on_host=self._params_on_host)
        self._refuse_not_finite(params, [own])
        return params

    def layer(
        self, index: int, numbers: Sequence[int] | None = None, like: Pool | None = None
    ) -> tuple[dict[str, Any], Pool | None]:
        """Returns one layer's parameters, and its routed experts in order; None for a dense layer,
        and where there are no `numbers` of experts to read (None: of all).

        Experts that are quantized are kept as those of `like`, of which only shapes and dtypes are
        looked at (None: those of the method `like`). Raises CheckpointError for weights that are
        not finite.
        """
        is_moe = self._cfg.moe_layers[index]
        own = layout.layer(self._cfg, index, is_moe)
        params, pool = self._read(own, on_host=self._params_on_host), None
        experts: list[Layout] = []
        if is_moe:
            numbers = range(self._cfg.num_experts) if numbers is None else numbers
            experts = [layout.expert(self._cfg, index, number) for number in numbers]
        if self._is_stored and all(map(self._as_kept, experts)) and experts:
            pool = self._kept(experts)
        elif self._quantize != "none" and experts:
            self._refuse_not_finite(params, [own, *experts])
            return params, self._quantized(experts, like or self.like(), [own, *experts])
        elif experts:
            on_host = self._experts_on_host
            parts = [self._read(expert, on_host=on_host) for expert in experts]
            stack: Any = np.stack if on_host else _stack
            pool = ExpertPool(**{key: stack([p[key] for p in parts]) for key in parts[0]})
        self._refuse_not_finite((params, pool), [own, *experts])
        return params, pool

    def _quantized(
        self, experts: Sequence[Layout], like: Pool, layouts: Sequence[Layout]
    ) -> QuantizedPool:
        """Reads experts in float32 and quantizes them block by block (see `quantizing_bytes`), by
        one program for all layers: fewer experts are filled up to whole blocks.

        What is not finite is looked for before: four bits would hide it.
        """
        count, size = len(experts), _experts_at_once(self._cfg)
        pool: Any = like.empty(self._cfg.num_experts)
        for first in range(0, count, size):
            block = experts[first : first + size]
            parts = [self._read(expert, dtype=jnp.dtype(jnp.float32)) for expert in block]
            parts += parts[-1:] * (size - len(parts))
            jax.block_until_ready(pool)  # or any number of blocks would wait to be quantized
            floats = ExpertPool(**{key: _stack([p[key] for p in parts]) for key in parts[0]})
            del parts
            self._refuse_not_finite(floats, layouts)
            pool = write_slots(pool, first + jnp.arange(size), floats)
            del floats
        if self._experts_on_host:
            return jax.tree.map(lambda leaf: np.asarray(leaf)[:count], pool)
        return pool if count == pool.num_slots else jax.tree.map(lambda a: a[:count], pool)

    def like(self) -> Pool:
        """Returns one slot's worth of how experts are kept; what is in it is not to be looked at.

        Raises ValueError as `QuantizedPool.of`, and CheckpointError.
        """
        if self._is_stored:
            for index, is_moe in enumerate(self._cfg.moe_layers):
                one = layout.expert(self._cfg, index, 0) if is_moe else {}
                if is_moe and self._as_kept(one):
                    return self._kept([one])
        return empty_pool(self._cfg, 1, self._dtype, self._quantize)

    def _as_kept(self, expert: Layout) -> bool:
        """Returns whether all matrices of an expert are stored as they are to be kept."""
        int4 = self._cfg.int4
        matrices = [p for p in expert.values() if p.kind == "matrix"]
        if any(p.part is not None for p in matrices):
            return False
        names = [name for p in matrices for name in p.names]
        if self._quantize == "fp8":
            return all(self._files.shape(n) and self._files.kind(n) == FP8 for n in names)
        return all(self._files.has_packed(name, int4) for name in names)

    def _kept(self, experts: Sequence[Layout]) -> QuantizedPool:
        """Reads experts as they are stored, into host memory, where they are there once."""
        stacked: Any = None
        for at, own in enumerate(experts):
            one = {key: self._kept_as(p) for key, p in own.items()}
            if stacked is None:
                stacked = jax.tree.map(lambda a: np.empty((len(experts), *a.shape), a.dtype), one)
            jax.tree.map(lambda to, leaf, at=at: to.__setitem__(at, leaf), stacked, one)
        return QuantizedPool(
            **stacked, width=self._cfg.d_ff_expert, row_dtype=str(jnp.dtype(self._dtype))
        )

    def _kept_as(self, parameter: Parameter) -> Any:
        """Reads a parameter of an expert as it is kept: gate and up side by side."""
        names, shapes, files = parameter.names, parameter.stored, self._files
        if parameter.kind == "mxfp4":
            return parameter.kept(*(files.raw(name, parameter.part) for name in names))
        if parameter.kind == "bias":
            return self._read({"": parameter}, on_host=True)[""]
        if self._cfg.int4 is None:
            # Scales lie for each matrix by itself, so that each is filled up to whole blocks.
            found: Any = [_whole_blocks(files.raw(n), files.raw(files.scales(n))) for n in names]
            values, scales = (np.concatenate(parts) for parts in zip(*found, strict=True))
            return QuantizedWeights(values, scales)  # pyright: ignore[reportArgumentType]
        try:
            packed = [self._cfg.int4.kept(files.get, *of) for of in zip(names, shapes, strict=True)]
        except ValueError as error:
            raise CheckpointError(f"{self._directory}: {error}") from None
        values = np.concatenate([part.values for part in packed])
        scales = np.concatenate([part.scales for part in packed], axis=1)
        zeros = [part.zeros for part in packed if part.zeros is not None]
        return replace(
            packed[0],
            values=values,
            scales=scales,
            zeros=np.concatenate(zeros, axis=1) if zeros else None,
        )

    def same_expert(self, other: "HFLayers", index: int, number: int) -> bool:
        """Returns whether a layer's expert is stored byte for byte as in another directory of the
        same architecture. Of experts that differ little is read.
        """
        both = zip(self._stored(index, number), other._stored(index, number), strict=False)
        return all(
            kind == its_kind and np.array_equal(a[:4096], b[:4096]) and np.array_equal(a, b)
            for (kind, a), (its_kind, b) in both
        )

    def _stored(self, index: int, number: int) -> Iterator[tuple[str, np.ndarray]]:
        """Yields how each tensor of an expert is stored, and its bytes."""
        for parameter in layout.expert(self._cfg, index, number).values():
            for name, shape in zip(parameter.names, parameter.stored, strict=True):
                int4 = self._cfg.int4
                if int4 is not None and self._files.has_packed(name, int4):
                    found = (each.name for each in int4.tensors(name, shape))
                    yield from map(self._files.stored, filter(self._files.shape, found))
                    continue
                yield self._files.stored(name, parameter.part)
                if self._files.kind(name) == FP8:
                    yield self._files.stored(self._files.scales(name), parameter.part)

    def _refuse_not_finite(self, read: Any, layouts: Iterable[Layout]) -> None:
        if not self._check_weights or (seem_finite(read) and not _has_nan_exponents(read)):
            return
        faults = (
            self._fault(name, shape, parameter)
            for own in layouts
            for parameter in own.values()
            for name, shape in zip(parameter.names, parameter.stored, strict=True)
        )
        found = dict.fromkeys(filter(None, faults))  # once for a tensor that several parts are of
        _refuse(f"{self._directory} has weights that are not finite:", found)

    def _fault(self, name: str, shape: tuple[int, ...], parameter: Parameter) -> str | None:
        if (raw := self._dequantized(name, shape, parameter.part)) is None:
            raw = self._files.raw(name, parameter.part)
        if parameter.kind != "mxfp4":
            return fault(name, raw, self._dtype)
        if name == parameter.names[-1] and (raw == MXFP4_NAN).any():
            return f"{name} holds scales that are NaN"
        return None

    def _read(
        self, own: Layout, *, on_host: bool = False, dtype: jnp.dtype | None = None
    ) -> dict[str, Any]:
        placed, found = np.asarray if on_host else jnp.asarray, {}
        for key, p in own.items():
            kind = jnp.dtype(jnp.float32) if p.float32 else dtype or self._dtype
            stored = jnp.dtype(jnp.uint8) if p.kind == "mxfp4" else kind
            read = partial(self._tensor, part=p.part, dtype=stored, on_host=on_host)
            found[key] = placed(p.assemble(list(map(read, p.names, p.stored))).astype(kind))
        return found

    def _tensor(
        self, name: str, shape: tuple[int, ...], *, part: Any, dtype: jnp.dtype, on_host: bool
    ) -> Any:
        """Returns one tensor in `dtype`, where it will be assembled: on the device, or in a CPU's
        memory, where every shape of an operation would be a program to compile; `on_host` is there
        always.
        """
        on_device = not on_host and jax.default_backend() != "cpu"
        if (found := self._dequantized(name, shape, part)) is None:
            found = self._files.raw(name, part)
            if found.shape != shape:  # `Parameter.swapped`
                found = found.T
            if on_device:
                return jnp.asarray(found).astype(dtype)
        with np.errstate(over="ignore"):  # to infinity, which is looked for later
            found = found.astype(dtype, copy=False)
        return jnp.asarray(found) if on_device else found

    def _dequantized(
        self, name: str, shape: tuple[int, ...], part: tuple[int, int] | None
    ) -> np.ndarray | None:
        """Returns a matrix in eight or four bits as float32; None for what is stored as it is."""
        files, int4 = self._files, self._cfg.int4
        if files.has_packed(name, int4):
            assert int4 is not None
            try:
                return int4.dequantized(files.get, name, shape)
            except ValueError as error:
                raise CheckpointError(f"{self._directory}: {error}") from None
        if files.kind(name) == FP8:
            return files.dequantized(name, self._cfg.fp8_block, part)
        return None


def _whole_blocks(values: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fills a matrix in fp8 up with zeros to blocks of `BLOCK`."""
    padding = [(0, -size % BLOCK) for size in values.shape]
    scales = scales.astype(np.float32).reshape(-(-values.shape[0] // BLOCK), -1)
    return np.pad(values, padding), scales


def _has_nan_exponents(read: Any) -> bool:
    """Returns whether a scale of MXFP4 among what was read is no number."""
    leaves = jax.tree.leaves(read, is_leaf=lambda leaf: isinstance(leaf, PackedWeights))
    packed = (leaf for leaf in leaves if isinstance(leaf, PackedWeights) and leaf.is_mxfp4)
    return any((np.asarray(leaf.scales) == MXFP4_NAN).any() for leaf in packed)


def stored_format(cfg: ModelConfig) -> str:
    """Returns what `quantize` keeps a checkpoint's experts as they are stored: `fp8`, `int4`,
    `mxfp4`, or `none`.
    """
    if cfg.mxfp4:
        return "mxfp4"
    if cfg.int4 is not None:
        return "int4"
    is_fp8 = cfg.fp8_block == (BLOCK, BLOCK) and cfg.d_model % BLOCK == 0
    return "fp8" if is_fp8 else "none"


def quantize_as(quantize: str, cfg: ModelConfig, *, says_why: bool = True) -> str:
    """Returns how experts of a checkpoint are to be kept; `says_why`: logs it where they are not
    kept as stored. Raises ValueError.
    """
    if quantize not in QUANTIZE:
        raise ValueError(f"quantize is {quantize!r}; it must be one of {', '.join(QUANTIZE)}")
    if quantize != "auto" or (stored := stored_format(cfg)) == "none":
        return quantize.replace("auto", "none")
    if jax.default_backend() != "cpu":
        return stored
    if says_why:
        log.info("experts in %s are dequantized: a CPU's steps take longer with them", stored)
    return "none"


def load_hf(
    directory: Path,
    cfg: ModelConfig,
    dtype: jnp.dtype,
    ways: Mapping[int, UnitedExperts],
    progress: Callable[[int, int], None] | None = None,
    check_weights: bool = True,
    home: Home | None = None,
    quantize: str = "none",
    numbers: Sequence[Sequence[int]] | None = None,
) -> Weights:
    """Loads a Hugging Face directory, one layer's experts in flight at a time.

    The pool is allocated once, with slots for the largest of `ways`, and filled in place, on the
    device or where `home` says; host memory never holds a second copy of the model.
    `progress(done, total)` counts layers. Experts that are kept in fewer bits are taken as they are
    stored, where that is as `quantize` says, or quantized from float32, which a block of them is in
    meanwhile (`quantizing_bytes`). Of each MoE layer only the experts of `numbers` are read, where
    there are any, and slots of others stay zero; for who has no `home`. Raises CheckpointError, and
    ValueError as `empty_pool`.
    """
    on_host = home is not None
    files = HFLayers(
        directory, cfg, dtype, check_weights, experts_on_host=on_host, quantize=quantize
    )
    table = make_table(cfg.num_moe_layers, cfg.num_experts, num_united_slots(ways))
    slots = np.asarray(table.slots)[:, : cfg.num_experts]
    like = files.like()
    held = PoolHolder(like.empty(table.slots.size) if home is None else home.empty_pool(like))

    def write(layer: int, experts: Pool) -> None:
        if home is None:
            own = slots[layer] if numbers is None else slots[layer][[*numbers[layer]]]
            held.pool = write_slots(held.pool, jnp.asarray(own), experts)
        else:
            held.pool = home.write(held.pool, layer, experts)

    params = read_layers(files, cfg, progress, write, numbers, like)
    if home is None:
        return Weights(params, held.pool, table)
    return Weights(home.whole(params), held.pool, home.table(cfg.num_experts))


def read_layers(
    files: HFLayers,
    cfg: ModelConfig,
    progress: Callable[[int, int], None] | None,
    write: Callable[[int, Pool], None],
    numbers: Sequence[Sequence[int]] | None = None,
    like: Pool | None = None,
) -> dict[str, Any]:
    """Reads a model layer by layer, and returns all but its experts; those of each MoE layer go to
    `write(MoE layer, experts)`. `numbers` says which, by MoE layer; None: all. `like` is as of
    `HFLayers.layer`.

    Raises CheckpointError.
    """
    params, segments, moe_layer = files.top(), [], 0
    for is_moe, start, count in cfg.segments():
        layers = []
        for layer in range(start, start + count):
            wanted = numbers[moe_layer] if is_moe and numbers is not None else None
            own, experts = files.layer(layer, wanted, like)
            layers.append(own)
            if experts is not None:
                write(moe_layer, experts)
                del experts  # or it would be in memory beside the next layer's
            moe_layer += is_moe
            if progress is not None:
                progress(layer + 1, cfg.num_layers)
        # Array by array, each in memory twice only while it is stacked.
        segments.append({k: _stack([own.pop(k) for own in layers]) for k in list(layers[0])})
    params["segments"] = tuple(segments)
    return params


def quantizing_bytes(cfg: ModelConfig, quantize: str, slot_bytes: int) -> int:
    """Returns the most bytes of a device that quantizing on load takes beside the pool, whose slots
    have `slot_bytes`: a layer as it is kept, and four blocks in float32. One is read, with what its
    last expert is assembled from, while the one before is quantized, in less than another. 0 where
    experts are kept in floats, or as the files have them.
    """
    if quantize in ("none", stored_format(cfg)):
        return 0
    block = 4 * layout.expert_parameters(cfg) * _experts_at_once(cfg)
    return cfg.num_experts * slot_bytes + 4 * block


def _experts_at_once(cfg: ModelConfig) -> int:
    """Returns the experts of a block of at most `BLOCK_BYTES` in float32, or one: blocks are alike,
    and whole layers are whole blocks.
    """
    most = BLOCK_BYTES // (4 * layout.expert_parameters(cfg))
    sizes = range(1, cfg.num_experts + 1)
    return max((n for n in sizes if n <= most and cfg.num_experts % n == 0), default=1)


def quantized(pool: ExpertPool, cfg: ModelConfig, dtype: jnp.dtype, quantize: str) -> Pool:
    """Returns a pool that was in floats as `quantize` says, quantized block by block, as
    `quantizing_bytes` counts beside both pools. Raises ValueError as `QuantizedPool.of`.
    """
    found = empty_pool(cfg, pool.num_slots, dtype, quantize)
    size = _experts_at_once(cfg)
    for first in range(0, pool.num_slots, size):
        slots = jnp.minimum(jnp.arange(first, first + size), pool.num_slots - 1)
        jax.block_until_ready(found)  # or any number of blocks would wait to be quantized
        found = write_slots(found, slots, pool.read(slots))
    return found


def empty_pool(cfg: ModelConfig, num_slots: int, dtype: jnp.dtype, quantize: str = "none") -> Pool:
    """Returns a zeroed pool of `num_slots` experts of the model's shape, kept as `quantize` says
    (`none`, `fp8`, `int4` or `mxfp4`). Raises ValueError as `QuantizedPool.of`.
    """
    shapes = layout.expert_shapes(cfg)

    def zeros(count: int) -> ExpertPool:
        return ExpertPool(**{key: jnp.zeros((count, *s), dtype) for key, s in shapes.items()})

    if quantize == "none":
        return zeros(num_slots)
    one = QuantizedPool.of(zeros(1), str(jnp.dtype(dtype)), quantize, cfg.int4)
    return one.empty(num_slots)


def load_united(
    directory: Path, cfg: ModelConfig, dtype: jnp.dtype | None = None
) -> dict[int, UnitedExperts]:
    """Returns the united experts beside a model, by way; empty where there are none.

    With `dtype` they must be finite in it. Raises CheckpointError, also for those that were
    distilled from a model with other weights.
    """
    path = directory / UNITED_FILE
    if not path.exists():
        return {}
    with reading(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        origin = (file.metadata() or {}).get(DISTILLED_FROM)
    if origin is not None and origin != (own := weights_digest(directory)):
        raise CheckpointError(
            f"{path} was distilled from a model with the weights {origin[:19]}, and {directory} "
            f"has {own[:19]}; distil this model with `jmoe distill`, or move the file away"
        )
    prefixes = {name.split(".")[0].removeprefix("way"): name for name in tensors}
    for prefix, name in prefixes.items():
        if not (prefix.isascii() and prefix.isdigit() and 2 <= int(prefix[:9]) == int(prefix[:10])):
            raise CheckpointError(f"{path}: {name} is not named way<2 or more>.layers.<layer>.*")
    united = {way: _united(tensors, way, cfg, path) for way in sorted(map(int, prefixes))}
    read = {
        name
        for way in united
        for layer in range(cfg.num_moe_layers)
        for name in united_shapes(cfg, way, layer)
    }
    _refuse(f"{path} holds tensors that are not read:", sorted(tensors.keys() - read))
    if dtype is not None:
        weights = ((n, t) for n, t in tensors.items() if jnp.issubdtype(t.dtype, jnp.floating))
        faults = (fault(name, tensor, dtype) for name, tensor in weights)
        _refuse(f"{path} has weights that are not finite:", filter(None, faults))
    return united


def united_ways(directory: Path) -> list[int]:
    """Returns the ways that a model has united experts for, by their names; reads no weights.

    Raises CheckpointError for a file that is not readable.
    """
    path = directory / UNITED_FILE
    if not path.exists():
        return []
    with reading(path) as file:
        prefixes = {name.split(".")[0].removeprefix("way") for name in file.keys()}  # noqa: SIM118
    return sorted(int(prefix) for prefix in prefixes if prefix.isdecimal())


def copy_united(source: Path, to: Path) -> None:
    """Copies united experts from one directory of a model to another of the same model, whose files
    are others. Raises CheckpointError.
    """
    with reading(source / UNITED_FILE) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    if DISTILLED_FROM in metadata:
        metadata[DISTILLED_FROM] = weights_digest(to)
    save_tensors(to / UNITED_FILE, tensors, metadata)


def save_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file that everyone may read: the library by itself makes it private.
    Raises OSError.
    """
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(0o644)


def united_shapes(cfg: ModelConfig, way: int, layer: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor that a way has for a MoE layer, by its name in the file."""
    count = -(-cfg.num_experts // way)
    shapes = {key: (count, *shape) for key, shape in layout.expert_shapes(cfg).items()}
    shapes["groups"] = (cfg.num_experts,)
    return {f"way{way}.layers.{layer}.{key}": shape for key, shape in shapes.items()}


def _united(
    tensors: Mapping[str, np.ndarray], way: int, cfg: ModelConfig, path: Path
) -> UnitedExperts:
    stacked: dict[str, list[np.ndarray]] = {"groups": []}
    for layer in range(cfg.num_moe_layers):
        shapes = united_shapes(cfg, way, layer)
        wrong = [n for n in shapes if n not in tensors or tensors[n].shape != shapes[n]]
        if wrong:
            wanted = ", ".join(str(shapes[name]) for name in wrong)
            raise CheckpointError(f"{path}: {', '.join(wrong)} missing or not of shape {wanted}")
        for name in shapes:
            key = name.split(".")[-1]
            want, words = (np.integer, "integers") if key == "groups" else (jnp.floating, "floats")
            if not jnp.issubdtype(tensors[name].dtype, want):
                raise CheckpointError(f"{path}: {name} and the others must be {words}")
            stacked.setdefault(key, []).append(tensors[name])
    try:
        return UnitedExperts(way, **{key: np.stack(parts) for key, parts in stacked.items()})
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def save_native(
    directory: Path,
    cfg: ModelConfig,
    weights: Weights,
) -> None:
    """Writes jmoe's own format: `jmoe.json` and an Orbax tree. Raises FileExistsError; ValueError
    for a router, an activation or an attention that is not jmoe's own.
    """
    stored = asdict(cfg) | {
        "router": cfg.router and _named("router", cfg.router),
        "activation": _named("activation", cfg.activation),
        "layer_attention": [_named("layer_attention", kind) for kind in cfg.layer_attention],
    }
    for kind in stored["layer_attention"]:
        kind.pop("fp8", None)  # of caches
    for name in ("strategy", "exchange", "fp8_block", "int4"):  # of programs, and of other files
        del stored[name]
    need("train", "orbax")
    import orbax.checkpoint as ocp

    directory = directory.absolute()
    if (directory / "jmoe.json").exists():
        raise FileExistsError(f"{directory} already holds a model; choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "state", _tree(weights))
    (directory / "jmoe.json").write_text(json.dumps(stored, indent=1), encoding="utf-8")


_NAMED: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        ScoredTopK,
        SparseMixer,
        Silu,
        Gelu,
        ClampedSwiglu,
        Relu2,
        Paged,
        Latent,
        GatedDelta,
        Mamba,
        ShortConv,
    )
}
"""What `jmoe.json` can name of a configuration."""


def _named(field: str, value: Any) -> dict[str, Any]:
    if _NAMED.get(kind := type(value).__name__) is not type(value):
        raise ValueError(
            f"{field} is {value!r}; jmoe's own format can name jmoe's own kinds "
            f"({', '.join(sorted(_NAMED))}), so keep the weights in Hugging Face's"
        )
    return {"kind": kind, **asdict(value)}


def is_native(directory: Path) -> bool:
    """Returns whether the directory was written by `save_native`."""
    return (directory / "jmoe.json").exists()


def native_config(directory: Path) -> ModelConfig:
    """Returns the configuration in a directory that `save_native` wrote. Raises CheckpointError."""
    try:
        return _config_from_json(json.loads(read_text(directory / "jmoe.json")))
    except Exception as error:  # whatever a damaged file lacks
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{directory / 'jmoe.json'} is not readable: {why}") from error


def config_of(directory: Path, *, allow_unknown_config: Collection[str] = ()) -> ModelConfig:
    """Returns the configuration of a Hugging Face directory, or of one in jmoe's own format. Raises
    ConfigError as `read_config`, and CheckpointError as `native_config`.
    """
    if is_native(directory):
        return native_config(directory)
    return read_config(directory, allow_unknown_config=allow_unknown_config)


class NativeStored(NamedTuple):
    """How `save_native` wrote experts."""

    dtype: str
    num_united: int  # slots of united experts in each layer


def native_stored(directory: Path) -> NativeStored:
    """Returns how `save_native` wrote experts; reads no weights. Raises CheckpointError."""
    need("train", "orbax")
    import orbax.checkpoint as ocp

    try:
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.metadata(directory.absolute() / "state").item_metadata
        table = tree["table"]
        united = table["slots"].shape[1] - table["groups"].shape[1]
        return NativeStored(str(jnp.dtype(tree["pool"]["down"].dtype)), united)
    except Exception as error:  # whatever Orbax raises for a damaged tree
        raise CheckpointError(f"{directory} is not readable: {error}") from error


def load_native(
    directory: Path, dtype: jnp.dtype, check_weights: bool = True
) -> tuple[ModelConfig, Weights]:
    """Reads what `save_native` wrote, floating-point arrays as `dtype`. Raises CheckpointError."""
    need("train", "orbax")
    import orbax.checkpoint as ocp

    directory = directory.absolute()
    cfg = native_config(directory)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.restore(directory / "state")
        stored = dict(tree["params"]), ExpertPool(**tree["pool"]), ExpertTable(**tree["table"])
        _check_native(cfg, stored[0])
    except Exception as error:  # whatever Orbax raises for a damaged tree
        raise CheckpointError(f"{directory} is not readable: {error}") from error

    layouts = (layout.layer(cfg, start, is_moe) for is_moe, start, _ in cfg.segments())
    wide = {
        key
        for own in (layout.top(cfg), *layouts)
        for key, parameter in own.items()
        if parameter.float32
    }

    def cast(at: Any, a: Any) -> jax.Array:
        kept = not jnp.issubdtype(a.dtype, jnp.floating)
        kept = kept or getattr(at[-1], "key", None) in wide
        return jnp.asarray(a, a.dtype if kept else dtype)

    params, pool, table = jax.tree_util.tree_map_with_path(cast, stored)
    if check_weights and not seem_finite((params, pool)):
        leaves = jax.tree_util.tree_leaves_with_path({"params": stored[0], "pool": stored[1]})
        faults = (fault(jax.tree_util.keystr(at), leaf, dtype) for at, leaf in leaves)
        _refuse(f"{directory} has weights that are not finite:", filter(None, faults))
    params["segments"] = tuple(params["segments"])
    return cfg, Weights(params, pool, table)


def _tree(weights: Weights) -> dict[str, Any]:
    params, pool, table = weights
    plain = {**params, "segments": list(params["segments"])}
    stored = {"slots": table.slots, "groups": table.groups}
    return {"params": plain, "pool": pool.plain().arrays, "table": stored}


def _check_native(cfg: ModelConfig, params: Mapping[str, Any]) -> None:
    """Raises ValueError where parameters are not those of the configuration."""
    want: dict[str, Any] = {key: p.shape for key, p in layout.top(cfg).items()}
    want["segments"] = [
        {key: (count, *p.shape) for key, p in layout.layer(cfg, start, is_moe).items()}
        for is_moe, start, count in cfg.segments()
    ]
    found = jax.tree.map(lambda leaf: tuple(leaf.shape), dict(params))
    if found != want:
        raise ValueError("its parameters are not those of a model as jmoe.json describes it")


def _config_from_json(raw: dict[str, Any]) -> ModelConfig:
    """Raises TypeError, KeyError or ValueError for what `save_native` would not write."""

    def rope_of(stored: dict[str, Any]) -> RopeConfig:
        given: dict[str, Any] = {**stored, "short_factor": tuple(stored.get("short_factor", ()))}
        return RopeConfig(**given)

    raw = {**raw, "rope": rope_of(raw["rope"])}
    for key in ("moe_layers", "eos_token_ids"):
        raw[key] = tuple(raw[key])
    raw["blocks"] = tuple(map(tuple, raw.get("blocks", ())))

    def kind_of(stored: dict[str, Any], default: str = "") -> Any:
        return _NAMED[stored.get("kind", default)](
            **{key: value for key, value in stored.items() if key != "kind"}
        )

    def attention_of(stored: dict[str, Any]) -> Any:
        if rope := stored.get("rotary"):
            stored = {**stored, "rotary": rope_of(rope)}
        return kind_of(stored, "Paged")

    # Files of before these had names have plain attention, and nothing of the others.
    raw["layer_attention"] = tuple(map(attention_of, raw.get("layer_attention", ())))
    raw["router"] = raw.get("router") and kind_of(raw["router"])
    raw["activation"] = kind_of(raw.get("activation") or {"kind": "Silu"})
    if raw.pop("sliding_window", 0):  # as files once said it, for all layers
        raise ValueError("jmoe.json has a sliding_window; convert the model once more")
    cfg = ModelConfig(**raw)
    own: list[Any] = [cfg.router, cfg.activation, *cfg.attention_kinds]
    own += map(cfg.rope_of, cfg.attention_kinds)
    for one in (cfg, cfg.rope, *(one for one in own if one is not None)):
        for field in fields(one):
            value, kind = getattr(one, field.name), str(field.type)
            plain = {"int": int, "float": (int, float), "bool": bool, "str": str}.get(
                getattr(field.type, "__name__", kind), object
            )
            if not isinstance(value, plain) or (isinstance(value, bool) and plain is not bool):
                raise TypeError(f"{field.name} is {value!r}")
    return cfg
