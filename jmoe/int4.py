"""Matrices that a checkpoint packs in four bits, eight in an int32: AWQ, GPTQ, compressed-tensors.

A matrix `[out, in]` has scales for groups of inputs, and zero points unless they are all in the
middle. Formats: `gemm` of AutoAWQ, AutoGPTQ's (`gptq`, and `gptq_v2` of GPTQModel), and
`pack-quantized` of compressed-tensors.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

from jmoe.config_fields import Fields
from pallas_kernels.grouped_gemm.four_bits import PackedWeights, packed_codes

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of eight that each four bits hold, the lowest first."""
_EIGHT, _BITS = 8, 4

_KEYS = {
    "awq": "backend bits do_fuse exllama_config fuse_max_seq_len group_size modules_to_fuse"
    " modules_to_not_convert quant_method version zero_point",
    "gptq": "backend batch_size bits block_name_to_quantize cache_block_outputs checkpoint_format"
    " damp_percent dataset desc_act exllama_config format group_size lm_head max_input_length meta"
    " model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block"
    " modules_in_block_to_quantize pack_dtype pad_token_id quant_method quantizer static_groups sym"
    " tokenizer true_sequential use_cuda_fp16 use_exllama",
}
"""Keys of `quantization_config` that are read, or say nothing that the tensors do not."""


class PackedTensor(NamedTuple):
    """A tensor that a matrix in four bits consists of."""

    name: str
    shape: tuple[int, ...]
    kinds: tuple[str, ...]  # how its elements may be stored, as safetensors names that
    is_needed: bool = True


class Int4(NamedTuple):
    """How a checkpoint packs a matrix, whose name ends in `.weight`."""

    method: Literal["awq", "gptq", "gptq_v2", "compressed-tensors"]
    group: int  # inputs that share a scale; 0: all
    has_zeros: bool = True  # zero points; else they are 8

    def packed(self, name: str) -> str:
        """Returns the name of the packed tensor."""
        end = "weight_packed" if self.method == "compressed-tensors" else "qweight"
        return name.removesuffix("weight") + end

    def tensors(self, name: str, shape: tuple[int, ...]) -> Iterator[PackedTensor]:
        """Yields the tensors of a matrix `[out, in]`."""
        (out, size), stem, ints = shape, name.removesuffix("weight"), ("I32",)
        groups = -(-size // self.group) if self.group else 1
        floats, eighths = ("BF16", "F16", "F32"), (-(-out // _EIGHT), -(-size // _EIGHT))
        if self.method == "compressed-tensors":
            yield PackedTensor(f"{stem}weight_packed", (out, eighths[1]), ints)
            yield PackedTensor(f"{stem}weight_scale", (out, groups), floats)
            if self.has_zeros:
                yield PackedTensor(f"{stem}weight_zero_point", (eighths[0], groups), ints)
            yield PackedTensor(f"{stem}weight_shape", (2,), ("I64", "I32"), is_needed=False)
            yield PackedTensor(f"{stem}weight_g_idx", (size,), ints, is_needed=False)
            return
        packed = (size, eighths[0]) if self.method == "awq" else (eighths[1], out)
        yield PackedTensor(f"{stem}qweight", packed, ints)
        yield PackedTensor(f"{stem}scales", (groups, out), floats)
        if self.has_zeros:
            yield PackedTensor(f"{stem}qzeros", (groups, eighths[0]), ints)
        if self.method != "awq":
            yield PackedTensor(f"{stem}g_idx", (size,), ints, is_needed=False)

    def codes(
        self, read: Callable[[str], np.ndarray | None], name: str, shape: tuple[int, ...]
    ) -> "Codes":
        """Returns a matrix as it is stored; `read` returns a tensor by its name, None where there
        is none. Raises ValueError for groups that are none.
        """
        (out, size), stem = shape, name.removesuffix("weight")
        at = np.arange(size) // (self.group or size)
        is_compressed = self.method == "compressed-tensors"
        own = read(f"{stem}weight_g_idx" if is_compressed else f"{stem}g_idx")
        scales = read(f"{stem}weight_scale" if is_compressed else f"{stem}scales")
        assert scales is not None
        scales = scales if is_compressed else scales.T
        if own is not None and own.min() >= 0:  # -1: in order
            if own.max() >= scales.shape[1]:
                raise ValueError(f"{stem}g_idx names group {own.max()} of {scales.shape[1]}")
            at = own  # inputs were ordered by their activations before they were grouped
        packed = read(self.packed(name))
        zeros = read(f"{stem}weight_zero_point" if is_compressed else f"{stem}qzeros")
        assert packed is not None
        if is_compressed:
            values = unpacked(packed, axis=1)
            middle = None if zeros is None else unpacked(zeros, axis=0)
        elif self.method == "awq":
            values = unpacked(packed, axis=1, order=AWQ_ORDER).T
            middle = None if zeros is None else unpacked(zeros, axis=1, order=AWQ_ORDER).T
        else:
            assert zeros is not None
            values = unpacked(packed, axis=0).T
            # The first format stores a zero point less one.
            middle = unpacked(zeros, axis=1).T + np.uint8(self.method == "gptq")
        return Codes(values[:out, :size], scales, None if middle is None else middle[:out], at)

    def dequantized(
        self, read: Callable[[str], np.ndarray | None], name: str, shape: tuple[int, ...]
    ) -> Float[np.ndarray, "out in"]:
        """Returns a matrix as float32; see `codes`."""
        values, scales, zeros, at = self.codes(read, name, shape)
        zero = np.float32(8) if zeros is None else zeros[:, at].astype(np.float32)
        return (values.astype(np.float32) - zero) * scales.astype(np.float32)[:, at]

    def kept(
        self, read: Callable[[str], np.ndarray | None], name: str, shape: tuple[int, ...]
    ) -> PackedWeights:
        """Returns a matrix as an expert pool keeps it; see `codes`. Raises ValueError for groups
        whose inputs are no neighbours.
        """
        values, scales, zeros, at = self.codes(read, name, shape)
        group = self.group or shape[1]
        if (at != np.arange(shape[1]) // group).any():
            raise ValueError(
                f"{name.removesuffix('weight')}g_idx orders inputs by their activations (desc_act),"
                " and experts kept in four bits need groups of neighbours; load the model with "
                "quantize 'none', or 'fp8'"
            )
        of_groups = scales.T, None if zeros is None else zeros.T
        return PackedWeights(packed_codes(values), *of_groups, k=shape[1], group=group)


class Codes(NamedTuple):
    """A matrix in four bits, unpacked."""

    values: UInt8[np.ndarray, "out in"]
    scales: Float[np.ndarray, "out groups"]
    zeros: UInt8[np.ndarray, "out groups"] | None  # None: they are 8
    group_of: Int[np.ndarray, " in"]


def unpacked(
    packed: Int[np.ndarray, "a b"], *, axis: int, order: tuple[int, ...] = tuple(range(8))
) -> UInt8[np.ndarray, "c d"]:
    """Returns the eight numbers of 0 to 15 in every int32, side by side along an axis; the i-th
    four bits, from the lowest, hold number `order[i]`.
    """
    bits = _BITS * np.argsort(order).astype(np.uint32)
    words = packed.view(np.uint32)
    if axis == 0:
        found = ((words[:, None] >> bits[:, None]) & 15).reshape(-1, packed.shape[1])
    else:
        found = ((words[:, :, None] >> bits) & 15).reshape(packed.shape[0], -1)
    return found.astype(np.uint8)


def int4(fields: Fields) -> Int4 | None:
    """Returns how the matrices of a checkpoint are packed, as `quantization_config` says; None:
    they are not in four bits. Raises ConfigError for a format that jmoe does not load.
    """
    section = fields.section("quantization_config")
    method = section.given("quant_method")
    if method == "compressed-tensors":
        return _compressed(section)
    if method not in ("awq", "gptq"):
        return None
    for key in section.values.keys() - set(_KEYS[method].split()):
        if section.given(key):  # such as other bits for some modules
            raise section.wrong(key, "absent or empty: jmoe does not know this key")
    if section.given("bits") != _BITS:
        raise section.wrong("bits", "4")
    group = _group(section, "group_size")
    if method == "awq":
        if str(section.given("version") or "gemm").lower() != "gemm":
            raise section.wrong("version", "'gemm'")
        return Int4("awq", group, section.given("zero_point") is not False)
    kind = section.given("checkpoint_format") or "gptq"
    if kind not in ("gptq", "gptq_v2"):
        raise section.wrong("checkpoint_format", "'gptq' or 'gptq_v2'")
    if section.given("pack_dtype") not in (None, "int32"):
        raise section.wrong("pack_dtype", "'int32'")
    return Int4(kind, group)


def _compressed(section: Fields) -> Int4 | None:
    groups = section.section("config_groups")
    weights = groups.section(next(iter(groups.values), "")).section("weights")
    if weights.given("type") != "int":
        return None
    if len(groups.values) != 1:
        raise section.wrong("config_groups", "one group, of all matrices that are quantized")
    if weights.given("num_bits") != _BITS:
        raise weights.wrong("num_bits", "4")
    if section.given("format") != "pack-quantized":
        raise section.wrong("format", "'pack-quantized'")
    strategy = weights.given("strategy")
    if strategy not in ("group", "channel"):
        raise weights.wrong("strategy", "group or channel")
    group = _group(weights, "group_size") if strategy == "group" else 0
    return Int4("compressed-tensors", group, weights.given("symmetric") is False)


def _group(fields: Fields, key: str) -> int:
    size = fields.given(key)
    if not isinstance(size, int) or not (size == -1 or size > 0):
        raise fields.wrong(key, "a number of inputs, or -1")
    return max(size, 0)
