"""Checkpoints in fp8 are loaded as their formats say; and experts are kept in fp8.

Files are written here from the formats' descriptions (DeepSeek-V3's README_WEIGHTS, and
compressed-tensors' `float-quantized`): nothing is shared with what reads them.
"""

import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jmoe
from jmoe import layout
from jmoe.checkpoint import CheckpointError
from jmoe.config import from_hf, read_config
from jmoe.config_fields import ConfigError
from jmoe.experts import QuantizedPool
from jmoe.parallel.home import make_mesh
from pallas_kernels import routing
from pallas_kernels.activation import SILU
from serving.cli.model_info import quantized_bytes
from serving.config import EngineConfig
from serving.startup.loading import load_models
from tests.compile_for import compile_for, h200_mesh
from tests.jmoe.conftest import GOLDEN, add_united

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

FP8 = ml_dtypes.float8_e4m3fn
TOKENS = np.array([[5, 60, 17, 33, 8, 2, 71], [41, 12, 3, 9, 40, 90, 7]], np.int32)
DEEPSEEK = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
CASES = ["qwen2_moe", "qwen3_moe_attention_bias", "mixtral_tied_llama3", "glm4_moe", "olmoe"]
CASES += ["deepseek_v2", "deepseek_v3", "phimoe", "qwen3_next", "qwen3_5_moe_types_tied"]
CASES += ["afmoe"]


def compressed(strategy, **more):
    """Returns a quantization_config as compressed-tensors writes it."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}
    group = {"weights": weights, "input_activations": None, "targets": ["Linear"]}
    method = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return method | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


FORMATS = {
    # Blocks of which few tiny matrices have whole ones, and of the published size.
    "blocks": (DEEPSEEK | {"weight_block_size": [7, 5]}, (7, 5), "_scale_inv"),
    "published": (DEEPSEEK | {"weight_block_size": [128, 128]}, (128, 128), "_scale_inv"),
    # Of Mistral: a matrix, also of each expert of those that are joined, has one scale.
    "static": (
        DEEPSEEK | {"activation_scheme": "static", "weight_block_size": None},
        (0, 0),
        "_scale_inv",
    ),
    "tensor": (
        compressed("tensor") | {"sparsity_config": {"format": "dense"}, "transform_config": {}},
        (0, 0),
        "_scale",
    ),
    "modelopt": (
        {
            "config_groups": compressed("tensor")["config_groups"],
            "ignore": ["lm_head", "model.layers.0.self_attn*"],
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "producer": {"name": "modelopt", "version": "0.29.0"},
            "quant_algo": "FP8",
            "quant_method": "modelopt",
        },
        (0, 0),
        "_scale",
    ),
    "channel": (compressed("channel"), (1, 0), "_scale"),
    "block": (compressed("block", block_structure=[16, 8]), (16, 8), "_scale"),
}


def quantized(matrix, block):
    """Returns fp8 values, a scale for each block, and the float32 matrix that they stand for."""
    out, k = matrix.shape
    rows, columns = block[0] or out, block[1] or k
    values, whole = np.zeros(matrix.shape, FP8), np.zeros(matrix.shape, np.float32)
    scales = np.zeros((-(-out // rows), -(-k // columns)), np.float32)
    for at in np.ndindex(scales.shape):
        here = tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, (rows, columns), strict=True))
        scales[at] = np.abs(matrix[here]).max() / 448
        values[here] = (matrix[here] / scales[at]).astype(FP8)
        whole[here] = values[here].astype(np.float32) * scales[at]
    return values, scales, whole


def write(source, to, fmt, keep=()):
    """Writes a directory's matrices in a format, and beside it what they stand for, in float32."""
    config, block, suffix = FORMATS[fmt]
    plain = to.with_name(f"{to.name}-plain")
    for path in (to, plain):
        shutil.copytree(source, path)
    tensors, wholes = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensor = tensor.astype(np.float32)
        left = ("gate.weight", "embed_tokens.weight", "lm_head.weight", *keep)
        joined = tensor.ndim == 3 and ".experts." in name
        if not (tensor.ndim == 2 or joined) or name.endswith(left):
            tensors[name] = wholes[name] = tensor
            continue
        if joined:
            parts = (quantized(one, block) for one in tensor)
            values, scales, wholes[name] = map(np.stack, zip(*parts, strict=True))
        else:
            values, scales, wholes[name] = quantized(tensor, block)
        tensors[name] = values
        one = {"tensor": (1,), "modelopt": ()}
        tensors[name + suffix] = scales.reshape(one.get(fmt, scales.shape))
        if fmt == "modelopt":  # of activations and of the cache
            tensors[name.replace("weight", "input_scale")] = np.full((), 0.5, np.float32)
            if "k_proj" in name:
                tensors[name.replace("weight", "k_scale")] = np.ones((), np.float32)
        if fmt == "static":
            at = f"{name}_" if joined else name.removesuffix("weight")
            tensors[f"{at}activation_scale"] = np.ones(len(tensor) if joined else 1, np.float32)
    save_file(tensors, to / "model.safetensors")
    save_file(wholes, plain / "model.safetensors")
    edit(to, quantization_config=config)
    return to, plain


def edit(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def retensor(directory, **changes):
    """Changes tensors of a directory by name (dots as two underscores); None drops one."""
    path = directory / "model.safetensors"
    tensors = load_file_fp8(path)
    for name, value in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None) if value is None else tensors.update({name: value})
    save_file(tensors, path)


def load_file_fp8(path):
    """Reads tensors by the format's header, fp8 ones too."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    kinds = {"F8_E4M3": FP8, "F32": np.float32}
    found = {}
    for name, what in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = (8 + size + at for at in what["data_offsets"])
            values = np.frombuffer(raw[begin:end], kinds[what["dtype"]])
            found[name] = values.reshape(what["shape"])
    return found


@pytest.mark.parametrize(
    ("case", "fmt"),
    [
        *((case, "blocks") for case in (*CASES, "mistral4")),
        *((CASES[1], fmt) for fmt in list(FORMATS)[1:]),
        ("mistral4", "static"),
    ],
)
def test_a_checkpoint_is_what_its_format_says(tmp_path, case, fmt):
    directory, plain = write(GOLDEN / case, tmp_path / "fp8", fmt)
    got, want = (jmoe.load(path, "float32").weights for path in (directory, plain))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.fixture
def fp8(tmp_path):
    return write(GOLDEN / "qwen3_moe_attention_bias", tmp_path / "fp8", "blocks")[0]


EXPERT = "model__layers__0__mlp__experts__0__down_proj__weight"


def test_scales_of_activations_and_of_the_cache_are_not_used_and_named(fp8, caplog):
    one = np.ones(1, np.float32)
    at = "model__layers__0__self_attn__"
    more = {f"{at}q_proj__input_scale": one, f"{at}k_proj__k_scale": one, f"{at}v_scale": one}
    before = jmoe.load(fp8, "float32").weights
    assert "not used" not in caplog.text
    retensor(fp8, **more)
    jax.tree.map(np.testing.assert_array_equal, jmoe.load(fp8, "float32").weights, before)
    at = at.replace("__", ".")
    assert f"{at}q_proj.input_scale are not used: activations are not quantized" in caplog.text
    assert f"{at}k_proj.k_scale and 1 more are not used: keys and values in fp8" in caplog.text


def test_scales_of_joined_experts_are_one_for_each(tmp_path, caplog):
    directory, _ = write(GOLDEN / "mistral4", tmp_path / "fp8", "static")
    jmoe.load(directory, "float32")
    assert "activation_scale and 27 more are not used: activations are not" in caplog.text
    at = "model__layers__1__mlp__experts__gate_up_proj_scale_inv"
    retensor(directory, **{at: np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match=r"scale_inv is \[1\], expected \[9, 1, 1\]"):
        jmoe.load(directory, "float32")
    retensor(directory, **{at: np.full((9, 1, 1), np.nan, np.float32)})
    with pytest.raises(CheckpointError, match=r"experts.gate_up_proj holds NaN"):
        jmoe.load(directory, "float32")


@pytest.mark.parametrize(
    "name",
    [
        "model__layers__0__self_attn__q_scale",  # no such scale is known,
        "model__layers__0__mlp__k_scale",  # nor here,
        "model__layers__9__self_attn__k_scale",  # nor beside layers that there are not
        "model__layers__0__mlp__experts__99__down_proj__input_scale",
    ],
)
def test_a_scale_that_belongs_to_nothing_is_named(fp8, name):
    retensor(fp8, **{name: np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match=f"left out:\n  {name.replace('__', '.')}"):
        jmoe.load(fp8, "float32")


def test_experts_with_other_scales_are_not_stored_alike(fp8, tmp_path):
    """Models of a family share what their files have alike."""
    other = shutil.copytree(fp8, tmp_path / "other")
    name = EXPERT.replace("__", ".") + "_scale_inv"
    scales = load_file_fp8(fp8 / "model.safetensors")[name].copy()
    scales.flat[-1] *= 2
    retensor(other, **{name: scales})
    owners = jmoe.load_family({"one": fp8, "other": other}, dtype="float32").sharing.owners
    assert np.argwhere(owners[1]).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({f"{EXPERT}_scale_inv": None}, r"down_proj.weight_scale_inv is missing: the matrix is in"),
        (
            {f"{EXPERT}_scale_inv": np.ones((2, 2), np.float32)},
            r"is \[2, 2\], expected \[\d+, \d+\]",
        ),
        ({f"{EXPERT}_scale_inv": np.ones((1,), np.int32)}, r"weight_scale_inv is \[1\], expected"),
        ({"model__norm__weight_scale_inv": np.ones(1, np.float32)}, r"norm.weight_scale_inv"),
        ({"model__layers__0__mlp__gate__weight": np.ones((7, 32), FP8)}, "gate.weight is"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(fp8, change, words):
    retensor(fp8, **change)
    with pytest.raises(CheckpointError, match=words):
        jmoe.load(fp8, "float32")


def test_fp8_that_no_setting_tells_of_is_refused(fp8):
    edit(fp8, quantization_config=None)
    with pytest.raises(CheckpointError, match="is F8_E4M3; jmoe reads BF16, F16, F32, F64"):
        jmoe.load(fp8, "float32")


def test_scales_that_are_not_finite_are_named(fp8):
    retensor(fp8, **{f"{EXPERT}_scale_inv": np.full((5, 5), np.nan, np.float32)})
    with pytest.raises(CheckpointError):
        jmoe.load(fp8, "float32")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DEEPSEEK | {"fmt": "e5m2"}, r"quantization_config.fmt is 'e5m2'; it must be 'e4m3'"),
        (DEEPSEEK | {"weight_block_size": [128]}, r"weight_block_size is \[128\]; it must be two"),
        (compressed("group", group_size=32), "strategy is 'group'; it must be tensor, channel or"),
        (compressed("tensor", num_bits=4), "num_bits is 4; it must be 8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'; it must be"),
        (DEEPSEEK | {"transform_config": {"R1": {}}}, r"transform_config is .*; it must be absent"),
        (compressed("tensor") | {"sparsity_config": {"format": "sparse"}}, "sparsity_config is"),
        (
            {"quant_method": "hqq", "bits": 4},
            "loads weights of a Qwen3MoeForCausalLM in fp8 or compressed",
        ),
    ],
)
def test_formats_that_are_not_loaded_are_named(fp8, config, words):
    edit(fp8, quantization_config=config)
    with pytest.raises(ConfigError, match=words):
        jmoe.load(fp8)


# ---- experts kept in fp8 -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models():
    """Returns the bundled model with experts in fp8, and the same experts in float32."""
    kept = jmoe.load("bundled", "float32", quantize="fp8")
    plain = jmoe.load("bundled", "float32")
    return kept, plain.with_weights(pool=kept.pool.plain())


@pytest.mark.deep
def test_its_op_is_that_of_the_weights_it_stands_for(models):
    kept, plain = models
    cfg, rng = kept.config, np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(9, cfg.d_model)), jnp.float32)
    ids = jnp.asarray([rng.permutation(cfg.num_experts)[:4] for _ in range(9)], jnp.int32)
    weights = jnp.asarray(rng.random((9, 4)), jnp.float32)
    work = routing.dispatch(
        ids, weights, kept.table.slots[1], block_m=kept.pool.block_rows(36, 60), max_active=60
    )
    want = plain.pool.mlp(h, work, SILU)
    assert float(jnp.abs(want).max()) > 0.1
    np.testing.assert_allclose(kept.pool.mlp(h, work, SILU), want, rtol=0, atol=2e-5)


@pytest.mark.deep
def test_weights_are_off_by_half_a_step_of_eight_bits_at_most(models):
    exact = jmoe.load("bundled", "float32").pool.arrays
    for name, got in models[0].pool.plain().arrays.items():
        want = np.asarray(exact[name])
        error = np.abs(np.asarray(got) - want)
        # Three bits behind the leading one, or a step of the smallest numbers of the block.
        assert (error <= np.maximum(np.abs(want) / 16, np.abs(want).max() / 448 * 2**-10)).all()
        assert error.max() > 0


@pytest.mark.deep
@pytest.mark.parametrize("way", [None, 8])
def test_forward_and_generate_run_over_it(models, way):
    brownout = None if way is None else jmoe.Brownout("partial", 20, way)
    kept, plain = models
    if way is not None:  # united experts are quantized as they are loaded
        kept.use_way(way)
        plain = plain.with_weights(pool=kept.pool.plain())
        plain.use_way(way)  # in floats
        plain.resident.weights = plain.weights._replace(pool=kept.pool.plain())
    got, want = (jmoe.forward(m, TOKENS, brownout) for m in (kept, plain))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    got, want = (jmoe.generate(m, TOKENS.tolist(), 6, brownout) for m in (kept, plain))
    assert got.tokens == want.tokens


@pytest.mark.deep
def test_a_checkpoint_of_whole_blocks_keeps_its_bits(tmp_path):
    source = jmoe.api.resolve("bundled")
    directory, _ = write(source, tmp_path / "fp8", "published", keep=("shared_expert_gate.weight",))
    # Not what quantizing would choose: the largest element is not 448.
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    halved = load_file_fp8(directory / "model.safetensors")[name].astype(np.float32) / 4
    retensor(directory, **{name: halved.astype(FP8)})
    pool, cfg = jmoe.load(directory, quantize="fp8", ways=[]).pool, read_config(directory)
    at = "model.layers.1.mlp.experts.3."
    tensors, slot = load_file_fp8(directory / "model.safetensors"), cfg.num_experts + 3
    gate, up, down = (tensors[f"{at}{name}_proj.weight"] for name in ("gate", "up", "down"))
    width, row = cfg.d_ff_expert, pool.gate_up.values[slot].shape[0] // 2
    got = np.asarray(pool.gate_up.values[slot])
    np.testing.assert_array_equal(got[:width], gate)
    np.testing.assert_array_equal(got[row : row + width], up)
    assert not got[width:row].astype(np.float32).any()
    np.testing.assert_array_equal(np.asarray(pool.down.values[slot])[:, :width], down)
    scales = [tensors[f"{at}{name}_proj.weight_scale_inv"][0, 0] for name in ("gate", "up")]
    np.testing.assert_array_equal(pool.gate_up.scales[slot][:, 0], scales)


def test_a_server_on_a_cpu_says_that_it_is_slower(caplog):
    config = EngineConfig(model="bundled", dtype="float32", quantize="fp8")
    model = load_models(config, None, lambda *_: None)
    assert isinstance(model, jmoe.api.Model)
    assert isinstance(model.pool, QuantizedPool)
    assert "engine.quantize is fp8: a CPU's steps take longer" in caplog.text


def test_it_takes_a_byte_a_weight(models):
    pool, cfg = models[0].pool, models[0].config
    experts = cfg.num_moe_layers * cfg.num_experts
    rest = models[0].num_parameters - experts * 3 * cfg.d_model * cfg.d_ff_expert
    assert quantized_bytes(cfg)["fp8"] == experts * pool.slot_bytes + 2 * rest
    d, f = 128, 128  # 96 wide, padded
    assert pool.slot_bytes == 3 * d * f + 3 * 4
    assert isinstance(pool.empty(4), QuantizedPool)
    assert pool.empty(4).num_slots == 4


@pytest.mark.exhaustive
def test_it_is_spread_and_saved(models, tmp_path):
    kept, _ = models
    spread = jmoe.load("bundled", "float32", quantize="fp8", mesh=make_mesh(1))
    want = jmoe.forward(kept, TOKENS)
    np.testing.assert_array_equal(jmoe.forward(spread, TOKENS), want)
    jmoe.save(kept, tmp_path / "saved")
    again = jmoe.load(tmp_path / "saved", "float32", quantize="fp8")
    np.testing.assert_allclose(jmoe.forward(again, TOKENS), want, rtol=0, atol=1e-4)


def test_what_cannot_be_kept_in_fp8_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"quantize is 'int3'; .* auto, none, fp8, int4, mxfp4"):
        jmoe.load("bundled", quantize="int3")
    shutil.copytree(GOLDEN / "qwen2_moe", tmp_path / "model")
    add_united(tmp_path / "model")
    with pytest.raises(ValueError, match=r"quantize is 'fp8', and d_model is \d+: .*multiple"):
        jmoe.load(tmp_path / "model", quantize="fp8")


# ---- what is not kept in fp8 ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "more_gb", "share"),
    [("DeepSeek-V3-bf16", 15.16, 0.022), ("Qwen3-30B-A3B", 0.91, 0.028)],
)
def test_attention_and_dense_matrices_in_bfloat16_take_little_more_than_in_fp8(
    name, more_gb, share
):
    published = Path(__file__).parents[1] / "published_configs" / f"{name}.json"
    cfg = from_hf(json.loads(published.read_text(encoding="utf-8")))
    layers = (layout.layer(cfg, at, is_moe) for at, is_moe in enumerate(cfg.moe_layers))
    matrices = (p.shape for layer in layers for p in layer.values() if p.kind == "matrix")
    more = sum(map(math.prod, matrices))  # a byte each
    assert more / 1e9 == pytest.approx(more_gb, abs=0.01)
    assert more / quantized_bytes(cfg)["fp8"] == pytest.approx(share, abs=0.001)


@pytest.mark.deep
@pytest.mark.parametrize("gemm", [False, True], ids=["cuBLAS", "Triton"])
def test_xla_would_write_a_matrix_in_blocks_in_bfloat16_in_every_step(gemm):
    """Which is why they are not kept so. A scale a column goes into Triton's product."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    rows, k, columns = 64, 7168, 18432  # DeepSeek-V3's dense layers

    def blocks(x, values, scales):
        whole = values.astype(jnp.float32).reshape(columns // 128, 128, k // 128, 128)
        whole = (whole * scales[:, None, :, None]).reshape(columns, k).astype(jnp.bfloat16)
        return jnp.einsum("tk,ck->tc", x, whole)

    def by_column(x, values, scales):
        whole = values.astype(jnp.bfloat16)
        out = jnp.einsum("tk,ck->tc", x, whole, preferred_element_type=jnp.float32)
        return (out * scales[None]).astype(jnp.bfloat16)

    def is_written(product, *scales):
        args = (
            jax.ShapeDtypeStruct((rows, k), jnp.bfloat16),
            jax.ShapeDtypeStruct((columns, k), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct(scales, jnp.float32),
        )
        options = {"xla_gpu_enable_triton_gemm": gemm}
        program = compile_for(h200_mesh(), product, *args, options=options)
        return program.memory_analysis().temp_size_in_bytes >= 2 * k * columns

    assert is_written(blocks, columns // 128, k // 128)
    assert is_written(by_column, columns) != gemm
