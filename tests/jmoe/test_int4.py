"""Checkpoints in four bits are loaded as their formats say, and experts are kept so.

Files are written here number by number from the formats' descriptions (AutoAWQ's `gemm`, AutoGPTQ's
and GPTQModel's, compressed-tensors' `pack-quantized`): nothing is shared with what reads them.
"""

import json
import shutil
import tracemalloc
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jmoe
from jmoe import layout
from jmoe.checkpoint import CheckpointError
from jmoe.config import read_config
from jmoe.config_fields import ConfigError
from jmoe.experts import ExpertPool
from jmoe.int4 import Int4
from jmoe.parallel.home import make_mesh
from serving.cli.model_info import num_parameters, quantized_bytes
from tests.jmoe.conftest import GOLDEN, add_united

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

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
    [
        *(("qwen2_moe", fmt) for fmt in FORMATS),
        *(("mixtral", "awq"), ("glm4_moe", "gptq"), ("afmoe", "compressed")),
    ],
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
        ({"bias": np.eye(1, 32, 3, np.float16)[0]}, r"would be left out:\s+\S+down_proj.bias$"),
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


def test_biases_of_zeros_that_autogptq_writes_are_left_out(four_bits, caplog):
    path = four_bits / "model.safetensors"
    want, tensors = jmoe.load(four_bits, "float32").weights, load_file(path)
    stems = {name.removesuffix("qweight") for name in tensors if name.endswith("qweight")}
    new = {f"{stem}bias" for stem in stems} - set(tensors)
    save_file(tensors | dict.fromkeys(new, np.zeros(32, np.float16)), path)
    got = jmoe.load(four_bits, "float32").weights
    jax.tree.map(np.testing.assert_array_equal, got, want)
    told = f"{min(new)} and {len(new) - 1} more are not used: they are all zero"
    assert told in caplog.text


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


TOKENS = np.array([[5, 60, 17, 33, 8, 2, 71], [41, 12, 3, 9, 40, 90, 7]], np.int32)
IN_ORDER = [fmt for fmt in FORMATS if "act-order" not in fmt]


def pool_bytes(cfg, group, of_group):
    """Returns an expert's bytes: two codes a byte of whole 64s, and each group's scale."""
    d, f = cfg.d_model, cfg.d_ff_expert
    found = 0
    for k, columns in ((d, 2 * f), (f, d)):
        found += columns * (-(-k // 64) * 32 + -(-k // (group or k)) * of_group)
    return found


@pytest.mark.sized(deep=("compressed-zeros",))
@pytest.mark.parametrize(
    "fmt",
    [
        fmt if fmt == "compressed-zeros" else pytest.param(fmt, marks=pytest.mark.deep)
        for fmt in IN_ORDER
    ],
)
def test_experts_are_kept_as_they_come(tmp_path, fmt):
    packed, plain = write("qwen2_moe", tmp_path, fmt)
    kept, want = jmoe.load(packed, "float32", quantize="int4"), jmoe.load(plain, "float32")
    assert kept.pool.format == "int4"
    got = kept.pool.plain()
    jax.tree.map(np.testing.assert_array_equal, got, want.pool)
    _, group, drawn, _ = FORMATS[fmt]
    of_group = 2 if drawn.get("symmetric") else 3  # float16, and a zero point
    assert kept.pool.slot_bytes == pool_bytes(kept.config, group, of_group)
    got, want = (jmoe.forward(model, TOKENS) for model in (kept, want))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_a_cpu_dequantizes_what_nothing_is_said_of(four_bits):
    assert type(jmoe.load(four_bits, "float32").pool) is ExpertPool


@pytest.mark.deep
def test_united_experts_are_kept_like_the_others(tmp_path):
    packed, _ = write("qwen2_moe", tmp_path, "compressed-zeros")
    add_united(packed)
    model = jmoe.load(packed, "float32", quantize="int4")
    before = model.pool.plain().read(np.arange(7))
    model.use_way(2)
    slots = np.asarray(model.table.slots)[0, 7:11]
    got, want = model.pool.read(slots), model.united_of(2).layer(0)
    assert got.down.group == 16
    steps = np.asarray(got.down.scales, np.float32)[:, np.arange(19) // 16]
    assert (np.abs(np.asarray(got.plain().down) - want.down) <= 0.51 * steps).all()
    jax.tree.map(np.testing.assert_array_equal, model.pool.plain().read(np.arange(7)), before)


def test_a_family_keeps_them_too(four_bits, tmp_path):
    other = shutil.copytree(four_bits, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors[EXPERT + "qzeros"].flat[-1] ^= 1
    save_file(tensors, other / "model.safetensors")
    directories = {"one": four_bits, "other": other}
    family = jmoe.load_family(directories, dtype="float32", quantize="int4")
    assert family[0].pool.format == "int4"
    for model, path in zip(family, directories.values(), strict=True):
        want, slots = jmoe.load(path, "float32", quantize="int4").pool, model.table.slots
        got = model.pool.read(np.asarray(slots).reshape(-1))
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_groups_that_are_no_neighbours_are_named(tmp_path):
    packed, _ = write("qwen2_moe", tmp_path, "gptq-act-order")
    with pytest.raises(CheckpointError, match=r"g_idx orders inputs .*quantize 'none', or 'fp8'"):
        jmoe.load(packed, "float32", quantize="int4")


def test_a_layer_that_is_not_packed_is_quantized(tmp_path):
    """As other modules than the router may be left as they are."""
    packed, plain = write("qwen2_moe", tmp_path, "gptq")
    tensors, floats = (load_file(path / "model.safetensors") for path in (packed, plain))
    at = "model.layers.0.mlp.experts."
    left = {name: each for name, each in tensors.items() if not name.startswith(at)}
    save_file(
        left | {name: each for name, each in floats.items() if name.startswith(at)},
        packed / "model.safetensors",
    )
    got = jmoe.load(packed, "float32", quantize="int4").pool
    want = jmoe.load(plain, "float32").pool.read(np.arange(7))
    assert got.down.group == 16
    steps = np.asarray(got.down.scales, np.float32)[:7, np.arange(19) // 16]
    assert (np.abs(np.asarray(got.plain().down[:7]) - want.down) <= 0.51 * steps).all()


@pytest.mark.deep
def test_mxfp4_is_kept_as_it_comes():
    kept, want = (
        jmoe.load(GOLDEN / "gpt_oss_mxfp4", "float32", quantize=one) for one in ("mxfp4", "none")
    )
    assert kept.pool.format == "mxfp4"
    jax.tree.map(np.testing.assert_array_equal, kept.pool.plain(), want.pool)
    cfg = kept.config
    biases = 4 * (2 * cfg.d_ff_expert + cfg.d_model)
    assert kept.pool.slot_bytes == pool_bytes(cfg, 32, 1) + biases
    got, want = (jmoe.forward(model, TOKENS % cfg.vocab_size) for model in (kept, want))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_exponents_that_are_no_numbers_are_named(tmp_path):
    path = shutil.copytree(GOLDEN / "gpt_oss_mxfp4", tmp_path / "model") / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 0, 0] = 255
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="down_proj_scales holds scales that are NaN"):
        jmoe.load(path.parent, "float32", quantize="mxfp4")


@pytest.mark.deep
@pytest.mark.parametrize("fmt", ["int4", "mxfp4"])
def test_weights_in_floats_are_quantized_as_they_are_loaded(tmp_path, fmt):
    kept = jmoe.load("bundled", "float32", quantize=fmt)
    exact = jmoe.load("bundled", "float32")
    assert kept.pool.format == fmt
    assert kept.pool.slot_bytes == pool_bytes(kept.config, 32, 3 if fmt == "int4" else 1)
    kept.use_way(8)
    plain = exact.with_weights(pool=kept.pool.plain())
    plain.use_way(8)  # in floats
    plain.resident.weights = plain.weights._replace(pool=kept.pool.plain())
    brownout = jmoe.Brownout("partial", 20, 8)
    got, want = (jmoe.forward(model, TOKENS, brownout) for model in (kept, plain))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    assert np.abs(got - jmoe.forward(exact, TOKENS)).max() > 1e-3
    if fmt == "int4":
        spread = jmoe.load("bundled", "float32", quantize=fmt, mesh=make_mesh(1))
        want = jmoe.forward(kept, TOKENS)
        np.testing.assert_array_equal(jmoe.forward(spread, TOKENS), want)
        return
    jmoe.save(kept, tmp_path / "saved")  # what is quantized once more stays as it is
    again = jmoe.load(tmp_path / "saved", "float32", quantize=fmt).pool.plain()
    routed = np.arange(60)
    jax.tree.map(np.testing.assert_array_equal, again.read(routed), plain.pool.read(routed))


@pytest.mark.exhaustive
def test_one_layer_is_in_memory_beside_the_result(tmp_path):
    """What NumPy holds at most while experts go to the pool."""
    directory, group, rng = tmp_path / "large", 32, np.random.default_rng(0)
    shutil.copytree(GOLDEN / "qwen2_moe", directory)
    edit(
        directory,
        hidden_size=256,
        moe_intermediate_size=256,
        num_experts=24,
        num_hidden_layers=3,
        quantization_config=of_compressed(strategy="group", group_size=group),
    )
    cfg = read_config(directory)
    tensors = {}
    for parameter in layout.whole(cfg):
        for name, shape in zip(parameter.names, parameter.in_file, strict=True):
            if ".experts." not in name:
                tensors[name] = rng.normal(size=shape).astype(np.float32)
                continue
            out, size = shape
            stem = name.removesuffix("weight")
            words = rng.integers(-(2**31), 2**31, (out, size // 8))
            tensors[f"{stem}weight_packed"] = words.astype(np.int32)
            tensors[f"{stem}weight_scale"] = rng.random((out, size // group)).astype(np.float16)
    save_file(tensors, directory / "model.safetensors")
    others = sum(t.nbytes for name, t in tensors.items() if ".experts." not in name)
    layer = cfg.num_experts * pool_bytes(cfg, group, 2)
    del tensors

    def peak(quantize):
        tracemalloc.start()
        try:
            pool = jmoe.load(directory, "float32", quantize=quantize).pool
            return pool, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    pool, most = peak("int4")
    assert pool.num_slots * pool.slot_bytes == cfg.num_moe_layers * layer
    expert = 12 * 2 * 256 * 256  # gate and up, unpacked to 32 bits on the way
    assert most < 1.1 * others + layer + expert
    assert peak("mxfp4")[1] > 1.5 * (others + layer + expert)  # a layer of it is in floats


def test_info_counts_every_format():
    cfg = read_config(jmoe.api.resolve("bundled"))
    found, count = quantized_bytes(cfg), cfg.num_moe_layers * cfg.num_experts
    others = found["mxfp4"] - count * pool_bytes(cfg, 32, 1)
    assert found["int4"] == others + count * pool_bytes(cfg, 32, 3)
    own = replace(cfg, int4=Int4("awq", 64, has_zeros=False))
    assert quantized_bytes(own)["int4"] == others + count * pool_bytes(cfg, 64, 2)
    experts = count * 3 * cfg.d_model * cfg.d_ff_expert
    assert others == 2 * (num_parameters(cfg) - experts)
