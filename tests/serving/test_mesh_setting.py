"""What can be wrong with `engine.mesh`."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jmoe
from jmoe.checkpoint import HFLayers, NativeStored, empty_pool
from jmoe.config import EXCHANGES, ConfigError, read_config
from jmoe.parallel.cost import MeshStep
from jmoe.parallel.home import make_mesh
from jmoe.parallel.placement import contiguous
from jmoe.random_model import random_params
from serving.config import BalanceConfig, EngineConfig, described
from serving.errors import SettingsError
from serving.execution import memory
from serving.settings import reading as settings
from serving.settings.reading import mesh_devices
from serving.startup import loading
from serving.startup.loading import load_models
from serving.startup.prepare import prepare
from tests.variants import variant

GOLDEN = Path(__file__).parents[1] / "golden"


def test_devices_of_a_mesh():
    assert mesh_devices("") == 1
    assert mesh_devices("ep=8") == 8


@pytest.mark.parametrize("mesh", ["8", "ep=0", "ep=", "tp=2", "ep=2,dp=2", "ep=-1", "ep=1.5"])
def test_what_is_no_mesh_is_refused_by_name(mesh):
    with pytest.raises(SettingsError, match=r"engine.mesh is .*ep=N for experts spread over N"):
        settings.load("demo", {"engine.mesh": mesh})


def test_decode_buckets_have_to_hold_the_rows_of_one_device():
    sizes = {"engine.max_num_seqs": 32, "engine.decode_buckets": (8,)}
    settings.load("demo", {**sizes, "engine.mesh": "ep=4"})
    with pytest.raises(SettingsError, match="reach 16"):
        settings.load("demo", {**sizes, "engine.mesh": "ep=2"})


def test_a_mesh_needs_its_devices():
    count = jax.device_count() + 1  # jax has counted them: no CPU becomes several now
    with pytest.raises(SettingsError, match=f"engine.mesh is 'ep={count}'.*there are {count - 1}"):
        prepare(EngineConfig(mesh=f"ep={count}"), None, lambda *_: None)


def test_a_model_has_to_lie_on_the_mesh_that_is_asked_for():
    model = jmoe.load("bundled", "float32")
    with pytest.raises(SettingsError, match="not spread over such a mesh"):
        prepare(EngineConfig(mesh="ep=1"), model, lambda *_: None)
    assert make_mesh(1).size == 1


def test_an_exchange_of_no_such_name_is_refused_in_a_notebook_too():
    assert described()["engine.exchange"].range.choices == EXCHANGES
    with pytest.raises(ConfigError, match=r"exchange is 'dirct'; it must be one of auto, all-g"):
        replace(geometry(), exchange="dirct")


def test_an_exchange_needs_a_mesh_and_forwarding_several_nodes():
    with pytest.raises(
        SettingsError, match=r"engine.exchange is 'direct'; .*auto unless engine.me"
    ):
        settings.load("demo", {"engine.exchange": "direct"})
    with pytest.raises(SettingsError, match=r"engine.exchange is .all.; .*all-gather"):
        settings.load("demo", {"engine.exchange": "all", "engine.mesh": "ep=2"})
    for count, nodes in ((8, "nodes of 8: 1"), (13, "nodes of 1: 13")):
        config = EngineConfig(mesh=f"ep={count}", exchange="forwarded")
        with pytest.raises(SettingsError, match=f"'ep={count}' makes {nodes}; it takes several"):
            prepare(config, None, lambda *_: None)


@pytest.mark.parametrize("name", ["replicas", "spare_slots"])
def test_copies_need_a_mesh(name):
    key = f"engine.balance.{name}"
    with pytest.raises(SettingsError, match=rf"{key} is 2; it must be 0 or auto unless"):
        settings.load("demo", {key: 2})
    settings.load("demo", {key: 2, "engine.mesh": "ep=2"})
    with pytest.raises(SettingsError, match=rf"{key} is -1"):
        settings.load("demo", {key: -1, "engine.mesh": "ep=2"})


@pytest.mark.parametrize("name", ["replicas", "spare_slots"])
def test_copies_may_be_left_to_auto(name, tmp_path):
    key, mesh = f"engine.balance.{name}", {"engine.mesh": "ep=2"}
    found = settings.load("demo", {key: "auto", **mesh})
    assert getattr(found.engine.balance, name) == "auto"
    assert getattr(settings.load("demo", {key: "3", **mesh}).engine.balance, name) == 3
    file = tmp_path / "own.yaml"
    file.write_text(f"engine:\n  mesh: ep=2\n  balance:\n    {name}: auto\n")
    assert getattr(settings.load(file).engine.balance, name) == "auto"
    wanted = "it must be an integer, or auto"
    with pytest.raises(SettingsError, match=f"{key} is 'most'; {wanted}"):
        settings.load("demo", {key: "most", **mesh})
    file.write_text(f"engine:\n  mesh: ep=2\n  balance:\n    {name}: 2.5\n")
    with pytest.raises(SettingsError, match=f"own.yaml: {key} is 2.5; {wanted}$"):
        settings.load(file)
    settings.load("demo", {key: "auto"})  # as many as gain without a mesh: none


@pytest.mark.parametrize("given", [{}, {"engine.mesh": "ep=2", "engine.balance.spare_slots": 0}])
def test_a_file_for_load_that_nobody_looks_at_is_refused(given):
    with pytest.raises(
        SettingsError, match=r"load_file is .* empty unless engine.mesh .*spare_slots not 0"
    ):
        settings.load("demo", {"engine.balance.load_file": "load.npy", **given})


def geometry():
    """Returns a geometry with 64 experts of 24,576 bytes in bfloat16 in each of two layers."""
    found = read_config(Path(__file__).parents[1] / "golden/qwen2_moe")
    found = replace(found, num_layers=2, num_experts=64, d_model=64, d_ff_expert=64)
    assert found.num_moe_layers == 2
    return found


def with_copies(**balance):
    return EngineConfig(dtype="bfloat16", balance=BalanceConfig(**balance))


@pytest.fixture
def room(monkeypatch):
    """Returns a function that sets how many experts a device has room for beside other weights."""

    def has_room_for(num_experts, num_devices, loading=LAYER_TWICE):
        free = family_free(num_experts + 0.5, num_devices, loading)  # a CPU's share it
        monkeypatch.setattr(memory, "free_bytes", lambda: free)

    return has_room_for


def test_a_mesh_too_small_names_the_smallest_that_works(room):
    room(40, 2)
    message = r"engine.mesh is 'ep=2': .* too small: each would hold 64 .* room for 40; 4 devices"
    with pytest.raises(SettingsError, match=message):
        memory.check_mesh(with_copies(), geometry(), 2)
    room(40, 4)
    memory.check_mesh(with_copies(), geometry(), 4)


def test_experts_are_counted_as_they_are_kept(room):
    """In four bits, and a scale for each group, they take less than a third."""
    room(32 // 3, 2)
    config = with_copies()
    with pytest.raises(SettingsError, match="each would hold 64 experts and has room for"):
        memory.check_mesh(config, geometry(), 2)
    config = replace(config, quantize="int4")
    meanwhile = memory._loading_bytes(config, geometry(), 2)
    room(64 // 3, 2, 2 * meanwhile)
    memory.check_mesh(config, geometry(), 2)


LAYER_TWICE = 2 * 64 * 24_576
"""In floats: as experts are read, and as they are stacked."""


def family_free(num_experts, num_devices=1, loading=LAYER_TWICE):
    """Returns what has to be free for so many experts on each device, one model's rest, and what
    the devices take together while it loads.
    """
    cfg = geometry()
    rest = jax.eval_shape(partial(random_params, cfg, dtype=np.dtype("float32")), jax.random.key(0))
    rest = 2 * sum(leaf.size for leaf in jax.tree.leaves(rest))
    wanted = num_experts * 24_576 + rest + loading // num_devices
    return math.ceil(wanted / memory.SHARE) * num_devices


@pytest.mark.parametrize(
    ("num_devices", "words"),
    [
        (1, "engine.models are 2, whose 256 experts take, .*; name fewer models, or have them sh"),
        (2, "GiB on each device of engine.mesh 'ep=2', and .*, or take a larger mesh"),
    ],
)
def test_a_family_is_counted_as_a_whole(monkeypatch, num_devices, words):
    config = replace(with_copies(), models=("a=a", "b=b"), mesh=f"ep={num_devices}")
    own = config, geometry(), num_devices, 256, 24_576
    monkeypatch.setattr(memory, "free_bytes", lambda: family_free(256, num_devices))
    memory.check_family(*own)
    monkeypatch.setattr(memory, "free_bytes", lambda: family_free(255, num_devices))
    with pytest.raises(SettingsError, match=words):
        memory.check_family(*own)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(monkeypatch):
    config = EngineConfig(model=str(GOLDEN / "qwen2_moe"), dtype="float32")
    model = load_models(config, None, lambda *_: None)
    experts = model.config.num_moe_layers * model.config.num_experts * model.pool.slot_bytes
    layer = model.config.num_experts * model.pool.slot_bytes
    least = experts + 2 * layer + sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    monkeypatch.setattr(memory, "free_bytes", lambda: math.ceil(least / memory.SHARE))
    load_models(config, None, lambda *_: None)
    monkeypatch.setattr(memory, "free_bytes", lambda: int(least / memory.SHARE) - 1)
    monkeypatch.setattr(HFLayers, "layer", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(SettingsError, match=r"engine.model is .*qwen2_moe', whose weights take"):
        load_models(config, None, lambda *_: None)


def test_weights_that_do_not_fit_all_the_same_say_what_to_do(monkeypatch):
    """Where another process has memory that was counted free."""

    def fails(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")

    monkeypatch.setattr(loading, "load", fails)
    monkeypatch.setattr(loading, "load_family", fails)
    path = GOLDEN / "qwen2_moe"
    with pytest.raises(SettingsError, match=r"engine.model is .*qwen2_moe': .*: Out of memory$"):
        load_models(EngineConfig(model=str(path)), None, lambda *_: None)
    models = tuple(f"{name}={path}" for name in ("base", "law"))
    with pytest.raises(SettingsError, match=r"engine.models are 2: a device has no memory left"):
        load_models(EngineConfig(models=models), None, lambda *_: None)


def test_that_experts_are_dequantized_is_told_once(monkeypatch, caplog):
    """However often they are counted before."""
    caplog.set_level("INFO")
    monkeypatch.setattr(memory, "MOST_GROWTH", 10**9)  # or so small a model is not counted
    config = EngineConfig(model=str(GOLDEN / "gpt_oss_mxfp4"), dtype="float32")
    load_models(config, None, lambda *_: None)
    assert caplog.text.count("are dequantized") == 1


@pytest.mark.parametrize("num_devices", [1, 2])
def test_what_quantizing_takes_is_counted(monkeypatch, num_devices):
    """Experts that are kept in fewer bits than the files have, while they load."""
    config = replace(with_copies(), model="m", quantize="int4", enforce_eager=True)
    kept = jax.eval_shape(partial(empty_pool, geometry(), 1, np.dtype("float32"), "int4"))
    slot = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
    layer = 64 * slot + 4 * 64 * 4 * 3 * 64 * 64  # as it is kept, and four blocks in float32
    own = (2 * 64 * slot // num_devices + layer) / memory.SHARE + family_free(0, loading=0)
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform="gpu")])

    def check():
        if num_devices == 1:
            memory.check_model(config, geometry(), 1 << 40)
        else:
            memory.check_mesh(config, geometry(), num_devices)

    def check_family():
        memory.check_family(config, geometry(), num_devices, 2 * 64 // num_devices, slot)

    monkeypatch.setattr(memory, "free_bytes", lambda: math.ceil(own) + 1)
    check()
    check_family()
    monkeypatch.setattr(memory, "free_bytes", lambda: int(own) - 2 * slot)
    with pytest.raises(SettingsError, match=r"while they are quantized|mesh is 'ep=2': .*small"):
        check()
    with pytest.raises(SettingsError, match=r"engine.models are"):
        check_family()


@pytest.mark.parametrize(
    ("dtype", "quantize", "loading"),
    [
        ("bfloat16", "none", 0),  # as it is stored
        ("float32", "none", 24_576),  # beside it, as it is stored
        ("bfloat16", "int4", 24_576),
        ("float32", "int4", 2 * 24_576),  # what was stored is gone by then
    ],
)
def test_a_model_in_jmoes_own_format_is_counted_as_a_whole(monkeypatch, dtype, quantize, loading):
    """Two layers of 64 experts, and six slots for united ones, in bfloat16."""
    config = EngineConfig(model="m", dtype=dtype, quantize=quantize)
    native = NativeStored("bfloat16", 6)
    kept = jax.eval_shape(partial(empty_pool, geometry(), 1, np.dtype(dtype), quantize))
    slot = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
    params = jax.eval_shape(
        partial(random_params, geometry(), dtype=np.dtype(dtype)), jax.random.key(0)
    )
    least = 140 * (slot + loading)
    least += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    if quantize != "none":
        least += 64 * slot + 4 * 64 * 4 * 3 * 64 * 64
    monkeypatch.setattr(memory, "free_bytes", lambda: math.ceil(least / memory.SHARE))
    memory.check_model(config, geometry(), 0, native)
    monkeypatch.setattr(memory, "free_bytes", lambda: int(least / memory.SHARE) - 1)
    with pytest.raises(SettingsError, match=r"whose weights take .*Hugging Face's format"):
        memory.check_model(config, geometry(), 0, native)


@pytest.mark.parametrize("eager", [False, True])
def test_on_a_gpu_layers_are_counted_twice_but_without_graphs(monkeypatch, eager):
    """Their experts beside that, as they load, if that takes more."""
    monkeypatch.setattr(memory, "_loading_bytes", lambda *_: 0)
    config = EngineConfig(model="m", dtype="bfloat16", enforce_eager=eager)
    params = jax.eval_shape(
        partial(random_params, geometry(), dtype=np.dtype("float32")), jax.random.key(0)
    )
    held = [params] if eager else [params, params["segments"]]
    experts = geometry().num_moe_layers * geometry().num_experts * 24_576
    least = experts + 2 * sum(leaf.size for leaf in jax.tree.leaves(held))
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform="gpu")])
    monkeypatch.setattr(memory, "free_bytes", lambda: math.ceil(least / memory.SHARE))
    memory.check_model(config, geometry(), 1 << 40)
    monkeypatch.setattr(memory, "free_bytes", lambda: int(least / memory.SHARE) - 1)
    with pytest.raises(SettingsError, match="whose weights take"):
        memory.check_model(config, geometry(), 1 << 40)
    memory.check_model(config, geometry(), least // 8 - 1)  # so few bytes fit however they grow


def test_copies_of_a_step_are_counted_beside_a_whole_family(monkeypatch):
    """What loading takes, 32 experts, is free again by then."""
    config = with_copies(replicas=6, replicas_per_pair=3)
    monkeypatch.setattr(memory, "free_bytes", lambda: family_free(64 + 34, 4, loading=0))
    with pytest.raises(SettingsError, match=r"replicas_per_pair is 3: .*36 .*room for 34; 2 would"):
        memory.check_family(config, geometry(), 4, 64, 24_576)
    monkeypatch.setattr(memory, "free_bytes", lambda: family_free(64 + 36, 4, loading=0))
    memory.check_family(config, geometry(), 4, 64, 24_576)


@pytest.mark.parametrize("spread", [False, True])
def test_a_family_that_does_not_fit_is_refused_before_it_is_loaded(tmp_path, monkeypatch, spread):
    """What is counted is what the pool takes: experts that two models store alike once."""
    paths = {"base": GOLDEN / "qwen2_moe"}
    paths["law"] = variant(paths["base"], tmp_path / "law", seed=1)
    paths["near"] = variant(paths["base"], tmp_path / "near", 3, only="self_attn")
    mesh = make_mesh(1) if spread else None
    models = tuple(f"{name}={path}" for name, path in paths.items())
    config = EngineConfig(dtype="float32", models=models)
    seen, check = [], loading.check_family
    monkeypatch.setattr(loading, "check_family", lambda *own: (seen.append(own), check(*own)))
    family = load_models(config, mesh, lambda *_: None)
    (*_, num_slots, slot_bytes) = seen[0]
    assert (num_slots, slot_bytes) == (family[0].pool.num_slots, family[0].pool.slot_bytes)
    cfg = family.config
    assert num_slots == 2 * cfg.num_moe_layers * cfg.num_experts
    layer = cfg.num_experts * slot_bytes
    others = sum(leaf.nbytes for leaf in jax.tree.leaves(family[0].params))
    least = num_slots * slot_bytes + 2 * layer + others
    monkeypatch.setattr(memory, "free_bytes", lambda: math.ceil(least / memory.SHARE))
    load_models(config, mesh, lambda *_: None)
    monkeypatch.setattr(memory, "free_bytes", lambda: int(least / memory.SHARE) - 1)
    monkeypatch.setattr(HFLayers, "layer", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(SettingsError, match=r"engine.models are 3, whose .* experts take"):
        load_models(config, mesh, lambda *_: None)


def test_models_of_a_family_are_checked_before_they_are_loaded(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 1)
    models = tuple(f"{name}={GOLDEN / 'qwen2_moe'}" for name in ("base", "law"))
    with pytest.raises(SettingsError, match=r"engine.mesh is 'ep=2': .* no mesh is large enough"):
        load_models(EngineConfig(mesh="ep=2", models=models), on_mesh(2), lambda *_: None)


def test_more_copies_than_fit_name_how_many_would(room):
    room(32 + 34, 4, loading=0)
    with pytest.raises(SettingsError, match=r"replicas_per_pair is 3: .*36 .*room for 34; 2 would"):
        memory.check_mesh(with_copies(replicas=6, replicas_per_pair=3), geometry(), 4)
    memory.check_mesh(with_copies(replicas=6, replicas_per_pair=2), geometry(), 4)
    room(8 + 20, 16, loading=0)
    with pytest.raises(SettingsError, match=r"room for 20; set engine.balance.replicas to 0"):
        memory.check_mesh(with_copies(replicas=6, replicas_per_pair=2), geometry(), 16)
    room(32 + 5, 4)
    with pytest.raises(SettingsError, match=r"each would hold 40 experts and has room for 37"):
        memory.check_mesh(with_copies(spare_slots=4), geometry(), 4)


@pytest.mark.parametrize(
    ("copies", "words"),
    [
        (
            {"replicas": 7},
            "engine.balance.replicas is 7; the other 3 devices send 2 each at most: ",
        ),
        ({"replicas": 7}, "set it to 6 or less"),
        (
            {"replicas": 60, "replicas_per_pair": 64},
            "a device lacks 48 of 64 experts: set it to 48",
        ),
        ({"spare_slots": 49}, "engine.balance.spare_slots is 49; .*set it to 48 or less"),
    ],
)
def test_more_copies_than_a_device_can_get_are_refused(copies, words, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: None)  # whether memory is known or not
    with pytest.raises(SettingsError, match=words):
        memory.check_mesh(with_copies(**copies), geometry(), 4)


def on_mesh(devices):
    return SimpleNamespace(size=devices, is_multi_process=False)


def test_spare_slots_are_what_kv_pages_leave_or_a_tenth():
    """Two sequences a device, of 32 positions, are 4 pages and one for padding."""
    cfg, slot = geometry(), 24_576
    config = EngineConfig(dtype="bfloat16", max_num_seqs=8, max_model_len=32, page_size=16)
    kv = 5 * 2 * 2 * cfg.num_kv_heads * 16 * cfg.head_dim * 2

    def found(left, config=config):
        return memory.spare_slots_in(left, config, cfg, 4, slot)

    assert found(kv + 2 * 3 * slot) == 3  # of two layers
    assert found(kv + 2 * 3 * slot - 1) == 2
    assert found(kv + 2 * 60 * slot) == 48  # all that a device lacks
    assert found(2 * 40 * slot, replace(config, max_num_seqs=10**6)) == 4
    assert found(2 * 40 * slot, replace(config, max_num_seqs=10**6, num_pages=4 * 10**6)) == 0
    assert found(-1) == 0
    # With sequences of 32,000 positions one takes 2,000 pages, and one for padding.
    cfg = replace(cfg, max_position=32_000)
    large = replace(config, max_num_seqs=4 * 10**6, max_model_len=32_000)
    one = 2001 * kv // 5
    assert [found(one + n * 2 * slot, large) for n in (-1, 0, 1, 7)] == [0, 0, 1, 7]
    assert one > 10 * 7 * 2 * slot


def test_memory_beside_weights_and_steps_has_room_for_spare_slots():
    """Twice: a device of four, with 16 experts of 64 and one of two united ones in each layer."""
    cfg = replace(geometry(), d_ff_shared=0)
    config = EngineConfig(
        dtype="bfloat16", max_num_seqs=8, max_model_len=32, page_size=16, max_prefill_tokens=64
    )
    shapes = jax.eval_shape(
        partial(random_params, cfg, dtype=np.dtype("float32")), jax.random.key(0)
    )
    others = 2 * sum(leaf.size for leaf in jax.tree.leaves(shapes))
    rows = MeshStep(cfg, 4, 64, 2).gathered_buffer_bytes()
    kv = 5 * 2 * 2 * cfg.num_kv_heads * 16 * cfg.head_dim * 2
    held = others + 2 * 17 * 24_576 + 2 * rows + kv
    for room, wanted in ((2 * 3 * 24_576 + 100, 3), (2 * 3 * 24_576 - 100, 2)):
        free = int((held + room) / memory.SHARE * 4)
        assert memory.spare_slots_that_fit(config, cfg, on_mesh(4), free, 1, 17) == wanted
        free = int(
            (held + 2 * others + 2 * 8 * 24_576 + room) / memory.SHARE * 4
        )  # of three models
        assert memory.spare_slots_that_fit(config, cfg, on_mesh(4), free, 3, 25) == wanted
    assert memory.spare_slots_that_fit(config, cfg, on_mesh(4), None, 1, 17) == 0


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_spare_slots_fit_beside_what_loading_takes(monkeypatch, platform):
    """Quantizing needs more than steps and KV pages of one short sequence."""
    cfg = replace(geometry(), d_ff_shared=0)
    config = EngineConfig(
        dtype="bfloat16", quantize="int4", max_num_seqs=4, max_model_len=16, max_prefill_tokens=64
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform=platform)])
    kept = jax.eval_shape(partial(empty_pool, cfg, 1, np.dtype("bfloat16"), "int4"))
    slot = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
    shapes = jax.eval_shape(
        partial(random_params, cfg, dtype=np.dtype("float32")), jax.random.key(0)
    )
    others = 2 * sum(leaf.size for leaf in jax.tree.leaves(shapes))
    quantizing = 64 * slot + 4 * 64 * 4 * 3 * 64 * 64
    sharing = 4 if platform == "cpu" else 1
    held = others + 2 * 16 * slot + quantizing // sharing
    for spare in (0, 2, 5):
        for more, wanted in ((100, spare), (-100, spare - 1)):
            free = int((held + 2 * spare * slot + more) / memory.SHARE * sharing)
            found = memory.spare_slots_that_fit(config, cfg, on_mesh(4), free, 1, 16)
            assert found == max(wanted, 0)


def test_spare_slots_of_a_family_are_bounded_by_all_its_experts():
    """Three models of 64 experts each are 192, of which each of four devices has 48 of its own."""
    family = partial(memory.check_balance, geometry(), 4, num_models=3)
    family(BalanceConfig(spare_slots=144))
    with pytest.raises(SettingsError, match=r"spare_slots is 145; a device lacks 144 of 192 exp"):
        family(BalanceConfig(spare_slots=145))
    with pytest.raises(SettingsError, match=r"replicas is 49; a device lacks 48 of 64"):
        family(BalanceConfig(replicas=49, replicas_per_pair=64))
    config = EngineConfig(dtype="bfloat16", max_num_seqs=8, max_model_len=32, page_size=16)
    of_three = partial(memory.spare_slots_in, 1 << 40, config, geometry(), 4, 24_576)
    assert (of_three(), of_three(3)) == (48, 144)
    # As soon as it is known what they share, no more slots than a device lacks of that.
    shared = contiguous(2, 80, 4)
    placed, _ = loading.placements(BalanceConfig(spare_slots=60), lambda slots: 0, 3)
    assert placed(shared).spare == 60
    placed, _ = loading.placements(BalanceConfig(spare_slots=61), lambda slots: 0, 3)
    with pytest.raises(SettingsError, match=r"is 61; a device lacks 60 of the 80 .*: set it to 60"):
        placed(shared)


def test_copies_of_a_step_are_bounded_by_a_tenth_of_the_memory(monkeypatch):
    """One of each of four devices, three times, is 12 experts, and two steps are under way."""
    for experts, pairs in ((239, 0), (241, 1), (481, 2), (1000, 2)):
        monkeypatch.setattr(memory, "free_bytes", lambda n=experts: n * 24_576)
        assert memory.pairs_that_fit(geometry(), 2, on_mesh(4), 2) == pairs
    monkeypatch.setattr(memory, "free_bytes", lambda: None)
    assert memory.pairs_that_fit(geometry(), 2, on_mesh(4), 2) == 2


def test_a_model_given_has_to_have_the_spare_slots():
    memory.check_balance(geometry(), 4, BalanceConfig(spare_slots="auto", replicas="auto"), spare=0)
    memory.check_balance(geometry(), 4, BalanceConfig(spare_slots=2), spare=2)
    with pytest.raises(
        SettingsError, match=r"spare_slots is 3, and the model .* with 2: set it to"
    ):
        memory.check_balance(geometry(), 4, BalanceConfig(spare_slots=3), spare=2)


@pytest.mark.parametrize("copies", [{"replicas": 1}, {"spare_slots": 1}])
def test_copies_of_a_model_that_is_given_are_checked_too(copies):
    model = jmoe.load("bundled", "float32", mesh=make_mesh(1))
    with pytest.raises(SettingsError, match="is 1; a device lacks 0 of 60 experts: set it to 0"):
        prepare(EngineConfig(mesh="ep=1", balance=BalanceConfig(**copies)), model, lambda *_: None)
