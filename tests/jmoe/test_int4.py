"""Checkpoints in four bits are loaded as their formats say.

Files are written here number by number from the formats' descriptions (AutoAWQ's `gemm`, AutoGPTQ's
and GPTQModel's, compressed-tensors' `pack-quantized`): nothing is shared with what reads them.
"""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jmoe
from jmoe.checkpoint import CheckpointError
from jmoe.config_fields import ConfigError
from tests.jmoe.conftest import GOLDEN

COLUMNS_OF_AWQ = [0, 2, 4, 6, 1, 3, 5, 7]
MATRICES = ("gate_proj.weight", "up_proj.weight", "down_proj.weight", "q_proj.weight", "w1.weight")


def word(numbers):
    """Packs eight numbers of 0 to 15, the first in the lowest bits, into an int32."""
    found = sum(int(number) << (4 * at) for at, number in enumerate(numbers))
    return found - (1 << 32) if found >= 1 << 31 else found


def along_rows(numbers, order=range(8)):
    """Packs each eight columns of a row, padded with zeros, into one."""
    count, width = numbers.shape
    padded = np.zeros((count, -(-width // 8) * 8), int)
    padded[:, :width] = numbers
    words = [[word(row[at + np.array(order)]) for at in range(0, len(row), 8)] for row in padded]
    return np.array(words, np.int32)


class Packed:
    """A matrix `[out, in]` of drawn four-bit numbers, and what it is in floats."""

    def __init__(self, rng, shape, group, *, symmetric=False, act_order=False):
        out, size = shape
        group = group or size
        self.values = rng.integers(0, 16, shape)
        groups = -(-size // group)
        self.scales = rng.uniform(0.01, 0.1, (out, groups)).astype(np.float16)
        self.zeros = np.full((out, groups), 8) if symmetric else rng.integers(1, 16, (out, groups))
        self.group_of = np.arange(size) // group
        if act_order:
            self.group_of = rng.permutation(self.group_of)
        self.floats = np.zeros(shape, np.float32)
        for row in range(out):
            for column in range(size):
                at = row, self.group_of[column]
                steps = int(self.values[row, column]) - int(self.zeros[at])
                self.floats[row, column] = np.float32(steps) * np.float32(self.scales[at])


def awq(stem, packed):
    return {
        f"{stem}qweight": along_rows(packed.values.T, COLUMNS_OF_AWQ),
        f"{stem}qzeros": along_rows(packed.zeros.T, COLUMNS_OF_AWQ),
        f"{stem}scales": np.ascontiguousarray(packed.scales.T),
    }


def gptq(stem, packed, *, less=1):
    return {
        f"{stem}qweight": np.ascontiguousarray(along_rows(packed.values).T),
        f"{stem}qzeros": along_rows(packed.zeros.T - less),
        f"{stem}scales": np.ascontiguousarray(packed.scales.T),
        f"{stem}g_idx": packed.group_of.astype(np.int32),
    }


def compressed(stem, packed):
    return {
        f"{stem}weight_packed": along_rows(packed.values),
        f"{stem}weight_scale": packed.scales,
        f"{stem}weight_shape": np.array(packed.values.shape, np.int64),
    }


def with_zeros(stem, packed):
    zeros = {f"{stem}weight_zero_point": np.ascontiguousarray(along_rows(packed.zeros.T).T)}
    return compressed(stem, packed) | zeros


def of_compressed(**weights):
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "actorder": None} | weights
    group = {"weights": weights, "input_activations": None, "targets": ["Linear"]}
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return method | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": False, "lm_head": False}
FORMATS = {  # writer, group, how numbers are drawn, quantization_config
    "awq": (awq, 8, {}, AWQ | {"group_size": 8, "modules_to_not_convert": ["gate"]}),
    "awq-whole": (awq, 0, {}, AWQ | {"group_size": -1, "version": "GEMM"}),
    "gptq": (gptq, 16, {}, GPTQ | {"group_size": 16, "damp_percent": 0.01}),
    "gptq-act-order": (gptq, 8, {"act_order": True}, GPTQ | {"group_size": 8, "desc_act": True}),
    "gptq_v2": (
        lambda *given: gptq(*given, less=0),
        8,
        {},
        GPTQ | {"group_size": 8, "checkpoint_format": "gptq_v2", "pack_dtype": "int32"},
    ),
    "compressed": (
        compressed,
        8,
        {"symmetric": True},
        of_compressed(strategy="group", group_size=8),
    ),
    "compressed-channel": (compressed, 0, {"symmetric": True}, of_compressed(strategy="channel")),
    "compressed-zeros": (
        with_zeros,
        16,
        {},
        of_compressed(strategy="group", group_size=16, symmetric=False),
    ),
}


def write(case, to, fmt):
    """Writes a golden case with matrices in four bits; and another with what they are in floats."""
    writer, group, drawn, config = FORMATS[fmt]
    rng = np.random.default_rng(7)
    source = GOLDEN / case
    for name in ("packed", "plain"):
        shutil.copytree(source, to / name)
    plain = load_file(source / "model.safetensors")
    packed = dict(plain)
    for name, tensor in plain.items():
        if name.endswith(MATRICES):
            one = Packed(rng, tensor.shape, group, **drawn)
            plain[name] = one.floats
            del packed[name]
            packed |= writer(name.removesuffix("weight"), one)
    assert len(packed) > len(plain)
    save_file(packed, to / "packed" / "model.safetensors")
    save_file(plain, to / "plain" / "model.safetensors")
    edit(to / "packed", quantization_config=config)
    return to / "packed", to / "plain"


def edit(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("case", "fmt"),
    [*(("qwen2_moe", fmt) for fmt in FORMATS), ("mixtral", "awq"), ("glm4_moe", "gptq")],
)
def test_a_checkpoint_is_what_its_format_says(tmp_path, case, fmt):
    packed, plain = write(case, tmp_path, fmt)
    got, want = (jmoe.load(path, "float32").weights for path in (packed, plain))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.fixture
def four_bits(tmp_path):
    return write("qwen2_moe", tmp_path, "gptq")[0]


EXPERT = "model.layers.0.mlp.experts.0.down_proj."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qzeros": None}, r"down_proj.qzeros is missing: the matrix is in four bits"),
        ({"qweight": None}, r"down_proj.weight is missing"),
        ({"scales": np.ones((2, 2), np.float16)}, r"scales is \[2, 2\], expected \[\d+, \d+\]"),
        ({"g_idx": np.full(19, 9, np.int32)}, r"down_proj.g_idx names group 9 of 2"),
        ({"weight_scale": np.ones(1, np.float16)}, r"down_proj.weight_scale"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(four_bits, change, words):
    path = four_bits / "model.safetensors"
    tensors = load_file(path)
    for name, value in change.items():
        tensors.pop(EXPERT + name, None)
        tensors |= {} if value is None else {EXPERT + name: value}
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=words):
        jmoe.load(four_bits, "float32")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPTQ | {"bits": 8, "group_size": 8}, r"quantization_config.bits is 8; it must be 4"),
        (GPTQ | {"group_size": 0}, r"group_size is 0; it must be a number of inputs, or -1"),
        (GPTQ | {"group_size": 8, "checkpoint_format": "marlin"}, "'gptq' or 'gptq_v2'"),
        (GPTQ | {"group_size": 8, "dynamic": {"-:x": {}}}, "dynamic .*does not know this key"),
        (AWQ | {"group_size": 8, "version": "gemv"}, "version is 'gemv'; it must be 'gemm'"),
        (of_compressed(strategy="group", group_size=8, num_bits=8), "num_bits is 8; it must be 4"),
        (of_compressed(strategy="tensor"), "strategy is 'tensor'; it must be group or channel"),
        (
            of_compressed(strategy="channel") | {"format": "int-quantized"},
            "format is 'int-quantized'; it must be 'pack-quantized'",
        ),
    ],
)
def test_formats_that_are_not_loaded_are_named(four_bits, config, words):
    edit(four_bits, quantization_config=config)
    with pytest.raises(ConfigError, match=words):
        jmoe.load(four_bits, "float32")


def test_experts_of_a_family_that_are_packed_alike_share_a_slot(four_bits, tmp_path):
    other = shutil.copytree(four_bits, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors[EXPERT + "qzeros"].flat[-1] ^= 1
    save_file(tensors, other / "model.safetensors")
    owners = jmoe.load_family({"one": four_bits, "other": other}, dtype="float32").sharing.owners
    assert np.argwhere(owners[1]).tolist() == [[0, 0]]
