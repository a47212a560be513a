"""How many KV pages a GPU gets: memory is made up here, what steps need is what XLA says."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

import jmoe
from jmoe.attention import FULL, Paged, page_bytes
from jmoe.free_memory import DeviceMemory
from jmoe.parallel.steps import abstract_states, make_states
from jmoe.steps import make_state
from serving.config import EngineConfig
from serving.errors import SettingsError
from serving.execution import kv_pages, memory, runner
from serving.execution.fitting import fit_to_model
from serving.execution.kv_pages import by_memory, pages_that_fit
from serving.plan import Limits

GIB = 2**30


def limits(**change):
    sizes = {"num_slots": 6, "num_pages": 0, "page_size": 4} | change
    return Limits(**sizes, max_prefill_tokens=16, max_prefill_seqs=4)


def pages_of(size):
    """Returns what says the bytes of pages of `size` bytes each, and the padding page."""
    return lambda count: (count + 1) * size


def devices(monkeypatch, *memories):
    """Fakes devices with these memories, all of one process."""
    each = dict(enumerate(memories))
    monkeypatch.setattr(kv_pages.jax, "local_devices", lambda: list(each))
    monkeypatch.setattr(kv_pages, "device_memory", each.get)


def on_mesh(model, count, several_processes=False):
    mesh = SimpleNamespace(local_devices=range(count), is_multi_process=several_processes)
    return SimpleNamespace(**vars(model) | {"home": SimpleNamespace(mesh=mesh)})


CONFIG = EngineConfig(max_model_len=64, page_size=4)  # 16 pages a sequence


def test_pages_fill_what_weights_and_two_steps_leave(model, monkeypatch, caplog):
    """By hand: 95 % of 120,000 - 60,000 - 2 x 5,000 bytes are 30 pages of 1,536 and a padding page.
    Numbers below 64 are round enough.
    """
    caplog.set_level(logging.INFO)
    devices(monkeypatch, DeviceMemory(120_000, 60_000))
    asked = []

    def step_bytes(of):
        asked.append(of.num_pages)
        return 5_000

    found = by_memory(CONFIG, limits(), model, step_bytes)
    assert found.num_pages == int(0.95 * 50_000) // 1536 - 1 == 29
    assert asked == [6 * 16]  # steps are looked at with the pages of all slots
    assert replace(found, num_pages=0) == limits()
    (line,) = caplog.records
    assert (line.in_use_bytes, line.step_bytes, line.kv_bytes) == (60_000, 10_000, 29 * 1536)
    assert "29 KV pages of 4 tokens" in line.getMessage()
    assert "(all slots could fill 96)" in line.getMessage()


def test_what_another_process_holds_is_told(model, monkeypatch, caplog):
    devices(monkeypatch, DeviceMemory(120_000, 60_000, wanted=240_000))
    found = by_memory(CONFIG, limits(), model, lambda _: 5_000)
    assert found.num_pages == 29  # as with 120,000 bytes in all
    (line,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "another process holds memory of it" in line.getMessage()


@pytest.mark.parametrize(
    ("platform", "num_pages", "lower"),
    [
        ("gpu", 0, r"lower engine.memory_fraction \(it is 0.9\)\."),
        ("gpu", 96, r"lower engine.num_pages \(it is 96\) or engine.max_num_seqs\."),
        ("cpu", 96, r"lower engine.num_pages \(it is 96\)"),
    ],
)
def test_pages_that_another_process_left_no_room_for(
    model, monkeypatch, platform, num_pages, lower
):
    """By hand: 96 pages of 1,536 bytes and a padding page. What XLA counts it has not got yet."""
    device = SimpleNamespace(platform=platform)
    monkeypatch.setattr(kv_pages.jax, "local_devices", lambda: [device])
    found = DeviceMemory(4 * GIB, GIB) if platform == "gpu" else None
    monkeypatch.setattr(memory, "device_memory", lambda _: found)
    config = replace(CONFIG, num_pages=num_pages, memory_fraction=0.9)
    said = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 148992 bytes."
    failed = jax.errors.JaxRuntimeError(f"{said}\nAllocator says more")
    with (
        pytest.raises(SettingsError, match=lower) as refused,
        kv_pages.allocating(config, limits(num_pages=96), model),
    ):
        raise failed
    told = str(refused.value)
    assert told.startswith(f"96 KV pages, {97 * 1536 / GIB:.4g} GiB on a device")
    assert ("of 4 GiB that XLA may take, it counts 3 GiB free" in told) == (platform == "gpu")
    assert told.endswith(said)
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"),
        kv_pages.allocating(config, limits(num_pages=96), model),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: another fault")


def test_a_server_that_cannot_allocate_its_pages_says_so(monkeypatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(runner.States, "make", fails)
    loaded = jmoe.load("bundled", "float32")
    with pytest.raises(SettingsError, match=r"KV pages, .* could not be allocated: another proc"):
        runner.DeviceRunner(loaded, fit_to_model(EngineConfig(max_num_seqs=2), loaded))


def test_no_more_pages_than_every_slot_can_fill(model, monkeypatch):
    devices(monkeypatch, DeviceMemory(GIB, 0))
    assert by_memory(CONFIG, limits(), model, lambda _: 0).num_pages == 6 * 16


def test_a_window_takes_few_pages_and_leaves_the_rest_to_other_layers(model, monkeypatch):
    """By hand: six sequences decode over a page of the window's layer, an edge and one that is not
    back yet, and two prefill steps write 4 pages each. Those and a padding page take 512 bytes
    each, and what they leave of 47,500 are 31 pages and a padding page of the two other layers.
    """
    windowed = SimpleNamespace(**vars(model))
    windowed.config = replace(model.config, layer_attention=(Paged(4), FULL, FULL))
    devices(monkeypatch, DeviceMemory(50_000, 0))
    found = by_memory(CONFIG, limits(windows=(0, 4)), windowed, lambda _: 0)
    assert found.group_pages == ((47_500 - 27 * 512) // 1024 - 1, 6 * (1 + 2) + 2 * 4) == (31, 26)
    windowed.config = replace(model.config, layer_attention=(Paged(4),) * 3)
    long = replace(CONFIG, max_model_len=6400)
    assert by_memory(long, limits(windows=(4,)), windowed, lambda _: 0).group_pages == (26,)


def test_what_is_still_to_be_taken_is_left(model, monkeypatch):
    devices(monkeypatch, DeviceMemory(120_000, 0))
    found = by_memory(CONFIG, limits(), model, lambda _: 5_000, beside=60_000)
    assert found.num_pages == 29


def test_one_sequence_has_to_fit(model, monkeypatch):
    enough = int((16 + 1) * 1536 / 0.95) + 2
    devices(monkeypatch, DeviceMemory(enough + 1_000, 0))
    assert by_memory(CONFIG, limits(), model, lambda _: 500).num_pages == 16
    devices(monkeypatch, DeviceMemory(enough + 1_000, 100))
    with pytest.raises(SettingsError) as refused:
        by_memory(CONFIG, limits(), model, lambda _: 500)
    said = str(refused.value)
    assert said.startswith("engine.max_model_len is 64: one such sequence needs 16 KV pages")
    assert "15 fit" in said
    for fix in ("max_model_len", "max_prefill_tokens", "memory_fraction", "engine.mesh"):
        assert f"lower engine.{fix}" in said or fix in said.split("; ")[1]


def test_the_fullest_device_of_a_mesh_counts(model, monkeypatch):
    roomy, tight = DeviceMemory(200_000, 0), DeviceMemory(200_000, 130_000)
    devices(monkeypatch, roomy, tight, roomy)
    spread = replace(limits(num_slots=18), num_ranks=3)
    found = by_memory(CONFIG, spread, on_mesh(model, 3), lambda _: 0)
    assert found.pages_per_rank == pages_that_fit(tight, 0, pages_of(1536), 96) == 42
    assert found.num_pages == 3 * 42


def test_the_smallest_process_counts(model, monkeypatch):
    from jax.experimental import multihost_utils

    told = []

    def gathered(own):
        told.append(int(own))
        return np.array([[int(own)], [20]])

    monkeypatch.setattr(multihost_utils, "process_allgather", gathered)
    devices(monkeypatch, DeviceMemory(120_000, 60_000), DeviceMemory(120_000, 60_000))
    spread = replace(limits(num_slots=12), num_ranks=2)
    found = by_memory(CONFIG, spread, on_mesh(model, 2, several_processes=True), lambda _: 5_000)
    assert (told, found.pages_per_rank) == ([29], 20)


def test_a_device_that_says_nothing_gets_what_every_slot_can_fill(model, monkeypatch, caplog):
    devices(monkeypatch, None)
    assert by_memory(CONFIG, limits(), model, lambda _: 0).num_pages == 6 * 16
    assert "does not say what memory it has" in caplog.text


@given(
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.integers(0, 2**34),
    st.integers(1, 2**24),
    st.integers(1, 2**20),
)
def test_pages_fit_and_few_are_left(limit, in_use, steps, page, most):
    pages = pages_that_fit(DeviceMemory(limit, in_use), steps, pages_of(page), most)
    room = 0.95 * (limit - in_use - steps)
    assert 0 <= pages <= most
    assert pages == 0 or (pages + 1) * page <= room
    if pages < most:
        assert room < (1.033 * pages + 3) * page


def test_pages_are_the_same_where_a_little_more_is_in_use():
    """Weights of a 30B model on an H200; what other buffers there are differs by a few MiB."""
    page, base = 6_291_456, 61 * GIB
    found = {
        pages_that_fit(DeviceMemory(126 * GIB, base + extra * 2**20), GIB, pages_of(page), 2**20)
        for extra in range(0, 64)
    }
    assert len(found) <= 2
    assert min(found) * page > 0.9 * 64 * GIB


TINY = EngineConfig(
    model="bundled",
    dtype="float32",
    max_num_seqs=4,
    max_model_len=64,
    page_size=8,
    max_prefill_tokens=16,
    decode_buckets=(4,),
    prefill_buckets=(16,),
    threshold_buckets_percent=(100,),
)


@pytest.mark.deep
def test_a_runner_takes_what_its_programs_leave(
    monkeypatch, compiled_in_a_hurry, programs_are_compiled, tmp_path
):
    """What steps need is more than the largest logits, and is remembered by the disk."""
    loaded = jmoe.load("bundled", "float32")
    (size,) = page_bytes(loaded.config, 8, loaded.dtype)
    monkeypatch.setattr(runner, "goes_by_memory", lambda _: True)
    told = []

    def memory(device):
        assert device in jax.local_devices()
        return DeviceMemory(told[0], 10**9)

    monkeypatch.setattr(kv_pages, "device_memory", memory)
    config = replace(TINY, compilation_cache=str(tmp_path))
    told.append(10**12)
    roomy = runner.DeviceRunner(loaded, fit_to_model(config, loaded))
    slots, blocks = 4 + 1, 64 // 8
    assert roomy.limits.num_pages == slots * blocks
    assert roomy.device.state.pages.k.shape[1] == slots * blocks + 1
    roomy.close()
    remembered = [int(path.read_text()) for path in (tmp_path / "steps").glob("*.bytes")]
    logits = 4 * 16 * loaded.config.vocab_size  # float32, of every token of a prompt to score
    step = max(remembered)
    assert logits <= step < 100 * logits

    def saved(*_):
        raise AssertionError("nothing is compiled to look at what is known")

    monkeypatch.setattr(runner.Executables, "save", saved)
    beside = 2 * 4 * slots * loaded.config.vocab_size  # counts of tokens, and their biases
    told[0] = 10**9 + 2 * step + beside + int(21 * size / 0.95) + 100
    tight = runner.DeviceRunner(loaded, fit_to_model(config, loaded))
    assert tight.limits.num_pages == 20
    tight.close()
    told[0] -= 15 * size
    with pytest.raises(SettingsError, match="one such sequence needs 8 KV pages"):
        runner.DeviceRunner(loaded, fit_to_model(config, loaded))


def test_states_over_a_mesh_are_what_is_said_of_them():
    cfg = jmoe.load("bundled", "float32").config
    mesh = jmoe.make_mesh(1)

    def make():
        return make_state(
            cfg, num_slots=3, num_pages=5, page_size=4, max_blocks=2, dtype=jnp.dtype("float32")
        )

    real, said = make_states(mesh, make), abstract_states(mesh, make)
    assert jax.tree.structure(real) == jax.tree.structure(said)
    for one, other in zip(jax.tree.leaves(real), jax.tree.leaves(said), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


def test_memory_is_claimed_unless_the_environment_says_how_much(monkeypatch):
    names = kv_pages.FRACTION, kv_pages.OLD_FRACTION

    def claimed(**given):
        """Returns the fraction that XLA takes."""
        for name in names:
            monkeypatch.setenv(name, given.get(name, ""))
        kv_pages.claim_memory(0.9)
        return generate_pjrt_gpu_plugin_options()["memory_fraction"]

    assert claimed() == 0.9
    for name in names:
        assert claimed(**{name: "0.5"}) == 0.5


def test_on_a_cpu_pages_are_what_full_sequences_need():
    assert not kv_pages.goes_by_memory(TINY)
    assert runner.limits_of(TINY).num_pages == 4 * 8
    windowed = runner.limits_of(TINY, windows=(64, 10))
    assert (windowed.windows, windowed.num_pages) == ((0, 10), 4 * 8)  # none has more than 64
    assert runner.limits_of(TINY, windows=(9,)).num_pages == 4 * (1 + 2) + 2 * 2
