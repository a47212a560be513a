"""Experts in floats are quantized block by block as they are loaded, with a bound on memory."""

import gc
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jmoe
from jmoe import checkpoint, layout
from jmoe.checkpoint import CheckpointError, HFLayers
from jmoe.config import read_config
from jmoe.experts import QuantizedPool, write_slots
from jmoe.parallel.home import make_mesh
from tests.jmoe.conftest import GOLDEN

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

EXPERTS, AT_ONCE, LAYERS = 12, 3, 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Returns a model of 12 experts a layer, whose sizes are whole blocks of fp8."""
    path = shutil.copytree(GOLDEN / "qwen2_moe", tmp_path_factory.mktemp("floats") / "model")
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128}
    sizes |= {"num_experts": EXPERTS, "num_hidden_layers": LAYERS}
    config = json.loads((path / "config.json").read_text()) | sizes
    (path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=shape).astype(np.float32)
        for parameter in layout.whole(read_config(path))
        for name, shape in zip(parameter.names, parameter.in_file, strict=True)
    }
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", AT_ONCE * 4 * 3 * 128 * 128 + 5)


@pytest.mark.sized(deep=("mxfp4-False", "mxfp4-True"))
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("fmt", ["int4", "fp8", "mxfp4"])
def test_blocks_are_what_a_whole_layer_would_be(directory, fmt, spread):
    floats = jmoe.load(directory, "float32", quantize="none").pool
    whole = jax.jit(lambda pool: QuantizedPool.of(pool, "float32", fmt))
    layers = np.split(np.arange(LAYERS * EXPERTS), LAYERS)
    want = jax.tree.map(
        lambda *parts: np.concatenate(parts), *(whole(floats.read(n)) for n in layers)
    )
    got = jmoe.load(directory, "float32", quantize=fmt, mesh=make_mesh(1) if spread else None)
    jax.tree.map(np.testing.assert_array_equal, got.pool, want)


@pytest.mark.parametrize("on_host", [False, True])
def test_some_experts_of_a_layer_are_filled_up_to_blocks(directory, on_host):
    cfg, kind = read_config(directory), np.dtype("float32")
    files = HFLayers(directory, cfg, kind, quantize="int4", experts_on_host=on_host)
    whole = files.layer(1)[1]
    programs = write_slots._cache_size()
    for numbers in ([7], [0, 11], [1, 2, 5, 6]):
        got = files.layer(1, numbers)[1]
        jax.tree.map(np.testing.assert_array_equal, got, whole.read(np.array(numbers)))
        assert all(isinstance(leaf, np.ndarray) == on_host for leaf in jax.tree.leaves(got))
    assert write_slots._cache_size() == programs


@pytest.mark.parametrize(("most", "want"), [(0, 1), (1, 1), (5, 4), (6, 6), (11, 6), (100, 12)])
def test_blocks_are_alike(directory, monkeypatch, most, want):
    cfg = read_config(directory)
    expert = 4 * layout.expert_parameters(cfg)
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", most * expert + 3)
    assert checkpoint.quantizing_bytes(cfg, "fp8", 0) == 4 * want * expert


def test_memory_beside_the_pool_is_bounded(directory, monkeypatch):
    gc.collect()
    before, seen, stack = live_bytes(), [], checkpoint._stack

    def counted(parts):
        if len(parts) == AT_ONCE:  # of a block; others stack layers
            seen.append(live_bytes() - before)
        return stack(parts)

    monkeypatch.setattr(checkpoint, "_stack", counted)
    write_slots.clear_cache()
    model = jmoe.load(directory, "float32", quantize="int4")
    assert write_slots._cache_size() == 2  # a block's, and a layer's into the pool
    slot, expert = model.pool.slot_bytes, 4 * 3 * 128 * 128
    bound = checkpoint.quantizing_bytes(model.config, "int4", slot)
    assert bound == EXPERTS * slot + 4 * AT_ONCE * expert
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    most = max(seen) - model.pool.num_slots * slot
    assert AT_ONCE * expert < most < bound + params
    assert most < EXPERTS * slot + 2 * AT_ONCE * expert + params < 1.1 * EXPERTS * expert
    assert len(seen) == LAYERS * 2 * EXPERTS // AT_ONCE


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def test_nothing_is_to_quantize_in_floats_or_what_is_stored_so(directory):
    cfg = read_config(directory)
    assert checkpoint.quantizing_bytes(cfg, "none", 100) == 0
    stored = read_config(GOLDEN / "gpt_oss_mxfp4")
    assert checkpoint.quantizing_bytes(stored, "mxfp4", 100) == 0
    assert checkpoint.quantizing_bytes(stored, "int4", 100) > 0


def test_what_four_bits_would_hide_is_named(directory, tmp_path):
    path = shutil.copytree(directory, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    name = f"model.layers.1.mlp.experts.{EXPERTS - 1}.down_proj.weight"
    tensors[name][3, 4] = np.nan
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} holds NaN or infinity"):
        jmoe.load(path, "float32", quantize="int4")


@pytest.mark.deep
def test_a_model_in_jmoes_own_format_is_quantized_block_by_block(directory, tmp_path, monkeypatch):
    """Beside its experts in floats and the pool there are blocks, of an odd number of experts."""
    model = jmoe.load(directory, "float32")
    jmoe.save(model, tmp_path / "native")
    floats = model.pool
    want = jax.jit(lambda pool: QuantizedPool.of(pool, "float32", "int4"))(floats)
    monkeypatch.setattr(checkpoint, "_experts_at_once", lambda cfg: 5)
    sizes, write = [], checkpoint.write_slots
    monkeypatch.setattr(
        checkpoint, "write_slots", lambda *own: (sizes.append(own[2].num_slots), write(*own))[1]
    )
    got = jmoe.load(tmp_path / "native", "float32", quantize="int4").pool
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert sizes == [5] * -(-floats.num_slots // 5)


def test_in_floats_a_layer_is_there_twice_and_no_more(directory, monkeypatch):
    """Its experts as they are read, and stacked; all else that a model has, once."""
    gc.collect()
    before, seen, stack = live_bytes(), [], checkpoint._stack

    def counted(parts):
        found = stack(parts)
        seen.append(live_bytes() - before)
        return found

    monkeypatch.setattr(checkpoint, "_stack", counted)
    model = jmoe.load(directory, "float32")
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    most = max(leaf.nbytes for leaf in jax.tree.leaves(model.params["segments"]))
    layer = EXPERTS * model.pool.slot_bytes
    pool = model.pool.num_slots * model.pool.slot_bytes
    like = model.pool.slot_bytes + 1024
    assert pool + layer < max(seen) <= pool + 2 * layer + params + like
    assert seen[-1] <= pool + params + most + like
