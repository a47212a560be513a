"""The cost model: by hand, by what it may never do, and against the exchange that is served."""

import json
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmoe.config import from_hf
from jmoe.parallel import cost
from jmoe.parallel.delivery import exchange_of
from jmoe.parallel.experts import AXIS, gather_rows
from pallas_kernels.backend import traced_for

PUBLISHED = Path(__file__).parents[2] / "published_configs"
QWEN = from_hf(json.loads((PUBLISHED / "Qwen3-235B-A22B.json").read_text()))
MIXTRAL = from_hf(json.loads((PUBLISHED / "Mixtral-8x7B-v0.1.json").read_text()))
PHI = from_hf(json.loads((PUBLISHED / "Phi-3.5-MoE-instruct.json").read_text()))
# Round numbers: 4 experts of 120 bytes, 2 a row, 60 operations of 2 a visit.
SMALL = replace(
    QWEN, d_model=5, d_ff_expert=4, num_experts=4, experts_per_token=2, moe_layers=(True,) * 94
)
SLOW = cost.H200._replace(flops_per_s=120.0, link_bytes_per_s=120.0, memory_bytes_per_s=1e9)


def fit(cfg=SMALL, devices=2, tokens=1, per_pair=2, machine=SLOW, alpha=0.5):
    step = cost.MeshStep(cfg, devices, tokens, 2, machine, alpha=alpha)
    return step.replicas_that_fit(per_pair)


def test_by_hand():
    assert cost.expert_bytes(SMALL, 2) == 120  # a second on SLOW's link
    # A row's two visits take two seconds, half of them remote; a copy takes one.
    found = fit(tokens=1, per_pair=1)
    assert found[:4] == (1, 1, pytest.approx(1.0), pytest.approx(1.0))
    # Two copies need two seconds: with one of them local, a row's window is half a second.
    assert fit(tokens=3)[:2] == (1, 1)
    found = fit(tokens=4)
    assert found[:4] == (2, 2, pytest.approx(2.0), pytest.approx(2.0))
    # All in the first phase: both copies are of experts that own rows visit, and nothing is remote.
    assert fit(tokens=4, alpha=1.0).num_replicas == 1


def test_weights_are_read_however_few_the_visits():
    machine = SLOW._replace(flops_per_s=1e12, memory_bytes_per_s=60.0)
    found = fit(tokens=1, per_pair=1, machine=machine)
    assert found.window_s == pytest.approx(2.0)  # one remote visit reads one expert: 120 bytes
    assert found.num_replicas == 1


def test_what_is_reported_where_nothing_fits():
    # Of 4 experts a device has one and, of 3 replicas, one for its own rows: half is remote.
    found = fit(devices=4, per_pair=2, tokens=3)
    assert found[:4] == (3, 1, pytest.approx(3.0), pytest.approx(3.0))
    found = fit(devices=4, per_pair=2, tokens=2)
    assert found[:4] == (0, 0, pytest.approx(2.0), pytest.approx(3.0))
    assert "3000.00 ms" in found.reason
    assert "2000.00 ms of computing other devices' tokens, which would hide 2 of 3" in found.reason


def test_one_device_lacks_nothing():
    found = fit(devices=1, tokens=100)
    assert found == (0, 0, 0.0, 0.0, "every device has all experts")
    assert cost.MeshStep(SMALL, 1, 100, 2).exchange_bytes() == (0, 0)


def test_no_more_than_a_device_lacks():
    found = fit(MIXTRAL, devices=2, tokens=10**6, per_pair=100, machine=cost.H200)
    assert found[:2] == (4, 4)
    assert fit(MIXTRAL, devices=64, tokens=10**9, per_pair=5).num_replicas == 7


counts = st.integers(1, 10**5)


@given(
    st.sampled_from([SMALL, QWEN, MIXTRAL]),
    st.integers(1, 300),
    counts,
    st.integers(1, 9),
    st.floats(0, 1),
)
@settings(max_examples=150)
def test_what_fits_is_hidden(cfg, devices, tokens, per_pair, alpha):
    def by(**changes):
        numbers = {"devices": devices, "tokens": tokens, "per_pair": per_pair, **changes}
        return fit(cfg, machine=cost.H200, alpha=alpha, **numbers)

    found = by()
    assert 0 <= found.num_replicas <= cfg.num_experts
    assert found.num_replicas <= found.per_pair * (devices - 1)
    assert found.per_pair <= per_pair
    if found.num_replicas:
        assert found.copy_s <= found.window_s
        copies = found.per_pair * (devices - 1) * cost.expert_bytes(cfg, 2)
        assert found.copy_s == pytest.approx(copies / cost.H200.link_bytes_per_s)
    elif devices > 1:
        assert found.copy_s > found.window_s
    assert by(tokens=2 * tokens).num_replicas >= found.num_replicas
    assert by(per_pair=per_pair + 1).num_replicas >= found.num_replicas


def test_qwen3_235b_on_eight_h200():
    """What docs/expert-parallelism.md says of it, at tokens a device."""
    assert cost.expert_bytes(QWEN, 2) == 3 * 4096 * 1536 * 2 == 37_748_736
    at = {t: fit(QWEN, 8, t, 2, cost.H200) for t in (512, 1024, 2048, 4096)}
    assert {t: found.num_replicas for t, found in at.items()} == {
        512: 0,
        1024: 0,
        2048: 7,
        4096: 14,
    }
    assert at[512].reason.endswith("which would hide 2 of 7")
    assert at[512].window_s == pytest.approx(109 / 128 * 512 * 8 * 6 * 4096 * 1536 / 600e12)
    assert at[512].copy_s == pytest.approx(7 * 37_748_736 / 360e9)


@pytest.mark.parametrize(
    ("machine", "replicas", "tokens"),
    [
        (cost.H200, 7, 13_704),
        (cost.H200, 14, 28_448),
        (cost.H200._replace(flops_per_s=790e12), 7, 18_040),
        (cost.H200._replace(link_bytes_per_s=450e9), 7, 10_968),
        (cost.H200._replace(flops_per_s=169e12), 7, 3_864),
    ],
)
def test_where_qwen3_235b_gets_its_replicas(machine, replicas, tokens):
    """The least tokens a step, as the page says them."""
    enough = fit(QWEN, 8, tokens // 8, 2, machine)
    assert enough.num_replicas == replicas
    assert fit(QWEN, 8, tokens // 8 - 1, 2, machine).num_replicas == replicas - 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 0}, "num_devices is 0; it must be 1 or more"),
        ({"tokens": 0}, "tokens_per_device is 0"),
        ({"per_pair": 0}, "per_pair is 0"),
        ({"alpha": 1.5}, "alpha is 1.5; it must be between 0 and 1"),
    ],
)
def test_wrong_numbers_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        fit(**changes)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_bytes_are_those_of_the_all_gather_that_is_served(dtype):
    rows, devices = 3, 8
    k = QWEN.experts_per_token
    args = (
        jax.ShapeDtypeStruct((rows, QWEN.d_model), dtype),
        jax.ShapeDtypeStruct((rows, k), jnp.float32),
        jax.ShapeDtypeStruct((rows, k), jnp.int32),
        jax.ShapeDtypeStruct((rows,), bool),
        jax.ShapeDtypeStruct((rows,), bool),
    )
    found = jax.make_jaxpr(partial(gather_rows), axis_env=[(AXIS, devices)])(*args)
    sent = [e.invars[0].aval for e in found.eqns if e.primitive.name == "all_gather"]
    assert len(sent) == 1
    per_layer = (devices - 1) * sent[0].size * sent[0].dtype.itemsize
    bytes_ = cost.MeshStep(QWEN, devices, rows, jnp.dtype(dtype).itemsize).exchange_bytes()
    assert bytes_.there == 94 * per_layer
    assert bytes_.home == 94 * 7 * rows * 4096 * jnp.dtype(dtype).itemsize


def test_buffers_by_hand():
    # 2 devices, 3 rows each: 6 gathered rows of 5 with float32 sums, 12 visits.
    expected = 6 * 5 * (2 + 4) + 12 * (5 + 4 + 5) * 2
    assert cost.MeshStep(SMALL, 2, 3, 2).gathered_buffer_bytes() == expected
    # 8 devices of 10,000 rows: of 160,000 visits, 20,000 are a device's mean.
    expected = 80_000 * 5 * (2 + 4) + 40_000 * (5 + 4 + 5) * 2
    step = cost.MeshStep(SMALL, 8, 10_000, 2)
    assert step.gathered_buffer_bytes() > expected  # so small rows cost nothing
    wide = replace(SMALL, d_model=1000)
    # Delivered, with room for 3,750 rows of each device, which leave as they arrive.
    expected = 30_000 * 1000 * (2 + 2 + 4) + 60_000 * (1000 + 4 + 1000) * 2
    assert step._replace(cfg=wide).gathered_buffer_bytes() == expected
    step = step._replace(cfg=replace(wide, experts_per_token=4))  # each row is for all
    expected = 80_000 * 1000 * (2 + 4) + 80_000 * (1000 + 4 + 1000) * 2
    assert step.gathered_buffer_bytes() == expected


def test_passes_by_hand():
    """Of 4 devices, 3 rows each with 2 visits of 10 bytes: 24 visits, of which 12 have room."""
    slow = SLOW._replace(memory_bytes_per_s=120.0)  # 12 are saved in a second
    step = cost.MeshStep(SMALL, 4, 3, 2, slow)
    assert step._replace(loop_s=0.99).visits_of_pass() == 12
    assert step._replace(loop_s=1.01).visits_of_pass() is None
    for devices in (1, 2):  # nothing is saved
        assert cost.MeshStep(SMALL, devices, 3, 2, loop_s=0.0).visits_of_pass() is None


def test_copies_gain_by_hand():
    """A visit takes a second, as an expert on the link does; memory is free."""
    step = cost.MeshStep(SMALL, 4, 40, 2, SLOW._replace(memory_bytes_per_s=1e12))
    # 40 rows go to 3 devices: 5 elements, 4 numbers of picks and a flag are 30 bytes. Half of that
    # is hidden, and half of the way home, 40 times 10 bytes.
    assert step.layer_s() == pytest.approx(30 + 80 - 20, rel=1e-3)
    assert step.layer_s(imbalance=1.5) == pytest.approx(30 + 120 - 20, rel=1e-3)
    # Of 4 experts a device has its own, and of 3 copies one for its own rows, that hide the rest.
    hidden = cost.Fit(3, 1, 40.0, 3.0, "")
    assert step.layer_s(hidden) == pytest.approx(40 + 40, rel=1e-3)
    late = hidden._replace(copy_s=80.0)
    assert step.layer_s(late) == pytest.approx(40 + 80, rel=1e-3)
    assert step.break_even(hidden) == 1
    # With all copies of experts that own rows visit, those take 80 s, and nothing hides the copies.
    assert step._replace(alpha=1.0).layer_s(late) == pytest.approx(80 + 80, rel=1e-3)
    assert step.break_even(late) == pytest.approx(110 / 80, rel=1e-3)


def test_halves_save_what_is_hidden_by_hand():
    """As above: 30 s there, 10 s home, a visit a second, of 80."""
    free = SLOW._replace(memory_bytes_per_s=1e12)

    def saved(machine, **loop_s):
        return cost.MeshStep(SMALL, 4, 40, 2, machine, **loop_s).saved_by_halves()

    assert saved(free) == pytest.approx(15 + 5 - cost.HALVES_S)
    # Products a tenth as long: 8 s, half of it under 15 s there, and half over 5 s home: 9 - 4.
    assert saved(free._replace(flops_per_s=1200.0)) == pytest.approx(4 + 4, rel=1e-3)
    # Reading a device's expert takes 100 s for half of the visits, too, and nothing else does.
    read = free._replace(memory_bytes_per_s=1.2, flops_per_s=1e12)
    sorted_s = 2 * 10 * 80 / 1.2  # twice the mean in two passes, at most
    assert 2 * sorted_s > 100
    assert saved(read, loop_s=0.0) == pytest.approx(15 + 5 - 100, rel=1e-3)
    assert saved(read, loop_s=7.0) == pytest.approx(15 + 5 - 100 - 7, rel=1e-3)
    assert cost.MeshStep(SMALL, 1, 40, 2, free).saved_by_halves() < 0  # nothing travels


def test_a_step_travels_in_halves_where_that_saves_some():
    rows = partial(jnp.zeros, dtype=jnp.bfloat16)
    large, small, odd = (rows((n, QWEN.d_model)) for n in (1024, 512, 1025))
    assert exchange_of(QWEN, large, 8) == "all-gather"  # on a CPU
    asked = replace(QWEN, exchange="halves")
    assert [exchange_of(asked, h, 8) for h in (small, odd)] == ["halves", "all-gather"]
    with traced_for("cuda"):
        found = [exchange_of(QWEN, h, 8) for h in (large, small, odd)]
        assert found == ["halves", "all-gather", "all-gather"]
        assert exchange_of(QWEN, large, 2) == "all-gather"
        assert exchange_of(replace(QWEN, exchange="all-gather"), large, 8) == "all-gather"


@pytest.mark.parametrize(
    ("devices", "tokens", "ms"),
    [(8, 32, -0.19), (8, 512, -0.02), (8, 1024, 0.08), (8, 2048, 0.24), (2, 2048, -0.10)],
)
def test_halves_gain_in_large_steps_over_several_devices(devices, tokens, ms):
    saved_s = cost.MeshStep(QWEN, devices, tokens, 2).saved_by_halves()
    assert 1e3 * saved_s == pytest.approx(ms, abs=0.006)


def test_copies_of_a_large_model_gain_from_less_imbalance_with_passes():
    """By the same arithmetic, where copies begin to be hidden and at 16,384 tokens."""
    for tokens, before, after in ((1713, 1.72, 1.50), (2048, 1.68, 1.47)):
        found = fit(QWEN, 8, tokens, machine=cost.H200)
        step = cost.MeshStep(QWEN, 8, tokens, 2)
        assert found.per_pair == 1
        assert step._replace(loop_s=math.inf).break_even(found) == pytest.approx(before, abs=0.01)
        assert step.break_even(found) == pytest.approx(after, abs=0.01)


def test_passes_of_a_large_model():
    """Prefill steps have them, and no decode step of a usual size."""
    assert cost.MeshStep(QWEN, 8, 2048, 2).visits_of_pass() == 2 * 2048 * 8
    assert cost.MeshStep(QWEN, 8, 256, 2).visits_of_pass() is None


def test_delivery_by_hand():
    """Of 8 experts on 8 devices a row needs 2: a quarter of the rows for each device."""
    step = cost.MeshStep(MIXTRAL, 8, 2048, 2)
    way = step.exchange()
    assert way == cost.Delivery(768)  # 1.5 times
    assert (way.block(8), step.received(way)) == (768, 8 * 768)
    numbers, elements = 4 * 5, 2 * 4096
    there = 7 * 768 * (elements + 4 * 4) + 7 * 2048 * numbers
    assert step.exchange_bytes() == (32 * there, 32 * 7 * 768 * elements)
    # Of all devices' rows' ways, 2 x 7 x 2048, are left 1.5 quarters; sorted rows are fewer.
    way_s = 7 * 2048 * 2 * elements / 360e9
    sorted_s = (step._sorted_s() - step._sorted_s(8 * 768)) - 7 * 2048 * 16 * 0.375 / 360e9
    saved_s = way_s * 0.625 + sorted_s - cost.LOOP_S - cost.DELIVERY_S
    assert step.saved_by_delivery(way) == pytest.approx(saved_s, rel=1e-3)
    assert saved_s > step.saved_by_halves() > 0
    # Two nodes: a row is for each with a chance of 11 / 14, which leaves no room to save.
    assert cost.MeshStep(MIXTRAL, 16, 2048, 2).exchange() == "halves"
    assert cost.Delivery(9, 4, 13).block(8) == 6  # rows for one device may all come from both nodes


@given(
    st.sampled_from([SMALL, QWEN, MIXTRAL, PHI]),
    st.integers(2, 600),
    st.integers(1, 3000),
)
def test_a_block_of_rows_fits_whatever_they_visit(cfg, devices, tokens):
    """All of them one device, of both hops."""
    for _, way in cost.MeshStep(cfg, devices, tokens, 2)._deliveries():
        block = way.block(devices)
        assert 1 <= block <= way.room <= tokens
        if way.node:
            assert block * (devices // way.node) <= way.inside


def test_what_is_forwarded_on_many_devices_saves_as_the_page_says():
    step = cost.MeshStep(PHI, 64, 2048, 2)
    assert step.exchange() == cost.Delivery(743, 8, 768)
    assert 1e3 * step.saved() == pytest.approx(3.22, abs=0.01)
    assert 1e3 * step.saved_by_halves() == pytest.approx(0.99, abs=0.01)


@pytest.mark.parametrize(
    ("cfg", "devices", "tokens", "node"),
    [
        *((QWEN, devices, 2048, None) for devices in (2, 8, 16, 64)),
        (QWEN, 128, 2048, 8),
        (MIXTRAL, 8, 32, None),
        (MIXTRAL, 8, 2048, 0),
        (MIXTRAL, 64, 2048, 0),
        (PHI, 64, 2048, 8),
        (PHI, 1, 2048, None),
        (PHI, 13, 2048, 0),
    ],
)
def test_rows_are_delivered_where_that_saves_most(cfg, devices, tokens, node):
    """Few picks a row, or many devices; of many picks nearly all devices are visited."""
    step = cost.MeshStep(cfg, devices, tokens, 2)
    way = step.exchange()
    assert (way.node if isinstance(way, cost.Delivery) else None) == node
    assert step.saved() >= max(0, step.saved_by_halves() if devices > 1 else 0)
    h = jnp.zeros((tokens, cfg.d_model), jnp.bfloat16)
    assert exchange_of(cfg, h, devices) == "all-gather"  # on a CPU
    with traced_for("cuda"):
        assert exchange_of(cfg, h, devices) == way


def test_an_exchange_that_is_asked_for_is_taken():
    """Whatever it costs."""

    def taken(name, devices, tokens=8):
        return cost.MeshStep(replace(QWEN, exchange=name), devices, tokens, 2).exchange()

    assert taken("direct", 8) == cost.Delivery(8)  # all rows have room
    assert taken("direct", 64, 64) == cost.Delivery(12)
    assert taken("forwarded", 16, 64) == cost.Delivery(64, 8, 80)
    assert taken("halves", 8) == "halves"
    for name, devices in (("forwarded", 8), ("direct", 1), ("halves", 1), ("forwarded", 13)):
        assert taken(name, devices) == "all-gather"


@pytest.mark.parametrize(
    ("experts", "top_k", "parts"), [(128, 8, 16), (128, 8, 8), (160, 8, 64), (60, 4, 8), (8, 2, 16)]
)
def test_distinct_parts_by_sampling(experts, top_k, parts):
    rng = random.Random(7)
    short, longer = divmod(experts, parts)
    part_of = [p for p in range(parts) for _ in range(short + (p < longer))]
    draws = 4000
    seen = sum(len({part_of[e] for e in rng.sample(range(experts), top_k)}) for _ in range(draws))
    assert cost.distinct_parts(experts, top_k, parts) == pytest.approx(seen / draws, rel=0.01)


def test_distinct_parts_by_hand():
    assert cost.distinct_parts(4, 2, 2) == pytest.approx(1 / 3 * 1 + 2 / 3 * 2)
    assert cost.distinct_parts(4, 2, 1) == 1
    assert cost.distinct_parts(4, 2, 512) == pytest.approx(2)


@pytest.mark.parametrize("devices", [8, 16, 64])
def test_rows_moved_by_counting_them(devices):
    """Each row's way, hop by hop, from drawn picks: what the average device receives."""
    rng, draws = random.Random(3), 3000
    experts, top_k = QWEN.num_experts, QWEN.experts_per_token
    counts = {way: [0, 0] for way in ("all-gather", "direct", "forwarded")}  # by NVLink, by network
    for _ in range(draws):
        sender = rng.randrange(devices)
        needed = {e * devices // experts for e in rng.sample(range(experts), top_k)}
        for way, there in (("all-gather", set(range(devices))), ("forwarded", needed)):
            for node in {device // 8 for device in there}:
                landing = 8 * node + sender % 8
                counts[way][1] += node != sender // 8
                counts[way][0] += sum(d // 8 == node and d != landing for d in there)
        for device in needed - {sender}:
            counts["direct"][device // 8 != sender // 8] += 1
    for way, (nvlink, nic) in counts.items():
        expected = pytest.approx((nvlink / draws, nic / draws), rel=0.03, abs=1e-9)
        assert cost.rows_moved(way, experts, top_k, devices) == expected
