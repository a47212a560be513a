"""Step programs over a mesh against the same steps on one device. Run by test_mesh_steps.py."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe import checkpoint
from jmoe.attention import FULL, Paged, page_windows
from jmoe.brownout import strategy_code
from jmoe.experts import ExpertPool
from jmoe.model import LOOKAHEAD, layers_of, unstack
from jmoe.packed_rows import NUM_COLUMNS, empty_deltas, empty_rows, pack_row
from jmoe.parallel import cost, delivery
from jmoe.parallel import steps as on
from jmoe.parallel.copies import with_copies
from jmoe.parallel.cost import Delivery
from jmoe.parallel.home import Home, make_mesh
from jmoe.parallel.placement import Placement, contiguous, from_hosts, slots_per_layer
from jmoe.parallel.probe import Probe
from jmoe.parallel.replicas import Replication
from jmoe.random_model import random_model
from jmoe.steps import decode_step, make_state, prefill_step
from jmoe.weights import ResidentWeights
from tests.jmoe.parallel.placements import at_random
from training.evaluation.run import EvaluateConfig, Work

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

GOLDEN = Path(__file__).parents[2] / "golden"
PAGE, BLOCKS, SLOTS, TOKENS, CHUNKS = 4, 4, 3, 16, 2
"""Of each device: positions a page, pages a sequence, slots, and a prefill step's size."""
MOST = 8
"""Devices of the largest mesh: what one device does for any of them is one program."""
ROOM = {"bundled": {4: 21, 8: 48}, "qwen2_moe": {4: 9}, "qwen3_moe_mixed_yarn": {4: 14}}
ROOM |= {name: {4: 14} for name in ("gpt_oss", "deepseek_v3")}
ROOM["windows of qwen3_moe_mixed_yarn"] = ROOM["qwen3_moe_mixed_yarn"]
"""Slots of a layer on each device, by the size of the mesh: enough for the placements below, most
of which leave some empty. Placements with as many slots share one program, and to compile takes
most of what these tests take.
"""
TOLERANCE = 5e-5  # of logits in float32: devices add a row's parts in another order


@cache
def model_of(name):
    if name.endswith("bundled"):
        model = jmoe.load(dtype="float32", ways=[4])
        if name == "skewed bundled":  # all rows choose the first experts
            params = jax.tree.map(lambda leaf: leaf, model.params)
            for segment in params["segments"]:
                if "router" in segment:
                    segment["router"] = 0 * segment["router"]
            model = model.with_weights(params=params)
        model.use_way(4)
        return model
    config = jmoe.load(GOLDEN / name.removeprefix("windows of "), dtype="float32").config
    if name.startswith("windows of "):
        config = replace(config, layer_attention=(Paged(4), FULL, Paged(3), FULL))
    model = random_model(config, seed=3, ways=[2])  # the same geometry, and united experts
    rng = np.random.default_rng(3)

    def drawn(leaf):  # biases and sinks begin as zeros, and slots of united experts
        return leaf if leaf.ndim > 2 or leaf.any() else 0.3 * rng.normal(size=leaf.shape)

    params, pool = (
        jax.tree.map(lambda leaf: jnp.asarray(drawn(np.asarray(leaf)), leaf.dtype), tree)
        for tree in (model.params, model.pool)
    )
    model = model.with_weights(params=params, pool=pool)
    model.use_way(2)
    return model


@cache
def one_device(name):
    cfg = model_of(name).config
    return tuple(
        jax.jit(partial(step, cfg, max_active=cfg.num_experts))
        for step in (prefill_step, decode_step)
    )


@cache
def many_devices(name, count, phase, replication=None, per_pass=None, way="all-gather"):
    """`per_pass` is of visits, where it is not as many as are served; rows travel by `way`."""
    cfg = model_of(name).config
    step = decode_step if phase == "decode" else partial(prefill_step, replication=replication)
    step = partial(step, cfg, max_active=cfg.num_experts)
    sized = cost.MeshStep.visits_of_pass if per_pass is None else lambda step, _: per_pass

    def traced(*arguments):
        with (
            mock.patch.object(cost.MeshStep, "visits_of_pass", sized),
            mock.patch.object(delivery, "exchange_of", return_value=way),
        ):
            return step(*arguments)

    return jax.jit(on.spread(make_mesh(count), traced, on.STEPS[phase]))


def state_of(model, num_slots):
    """Slot s owns pages `[s BLOCKS, (s + 1) BLOCKS)` of each group."""
    state = make_state(
        model.config,
        num_slots=num_slots,
        num_pages=num_slots * BLOCKS,
        page_size=PAGE,
        max_blocks=BLOCKS,
        dtype=model.dtype,
    )
    pages = jnp.arange(num_slots * BLOCKS, dtype=jnp.int32).reshape(num_slots, BLOCKS)
    return state._replace(block_table=jnp.repeat(pages, len(page_windows(model.config)), axis=1))


def prompts_of(model, count, seed=0):
    """Two a device, but one on the first and none on the last."""
    rng = np.random.default_rng(seed)
    held = [2] * count
    if count > 2:
        held[0], held[-1] = 1, 0
    return [
        [rng.integers(1, model.config.vocab_size, rng.integers(2, 8)).tolist() for _ in range(n)]
        for n in held
    ]


def packed(devices, *, decode_step_number=None):
    """Tokens and rows of all devices, each padded by itself; slots count from 0 on each. The second
    prompt of every other device refuses brownout: two would visit all experts of the smallest
    models, and leave none to degrade.
    """
    tokens, rows = np.zeros((len(devices), TOKENS), np.int32), []
    for device, prompts in enumerate(devices):
        flat = [token for prompt in prompts for token in prompt]
        tokens[device, : len(flat)] = flat
        own = empty_rows(CHUNKS)
        for slot, prompt in enumerate(prompts):
            length = len(prompt) if decode_step_number is None else 1
            kv_len = len(prompt) + (decode_step_number or 0)
            exempt = (slot, device % 2) == (1, 1)
            own[slot] = pack_row(slot, kv_len=kv_len, q_len=length, exempt=exempt)
        rows.append(own)
    return tokens, np.stack(rows)


def as_one(tokens, rows):
    """The same step for one device: padding at the end alone, and slots that differ."""
    lengths = np.where(rows[:, :, 0] >= 0, rows[:, :, 2], 0).sum(1)
    flat, own_rows = np.zeros(MOST * TOKENS, np.int32), empty_rows(MOST * CHUNKS)
    flat[: lengths.sum()] = np.concatenate(
        [own[:n] for own, n in zip(tokens, lengths, strict=True)]
    )
    rows = rows.copy()
    for device, own in enumerate(rows):
        own[own[:, 0] >= 0, 0] += device * SLOTS
    real = rows[rows[:, :, 0] >= 0]
    own_rows[: len(real)] = real
    return flat, own_rows


def play(model, prefill, decode, state, weights, step_arrays):
    """Outputs of a prefill step and three decode steps."""
    found = []
    for number, arrays in enumerate(step_arrays):
        state, out = (decode if number else prefill)(weights, state, *arrays)
        found.append(jax.device_get(out))
    return found


def check_same(
    name,
    count,
    placement,
    percent,
    strategy,
    replication=None,
    served=None,
    moved=None,
    per_pass=None,
    way="all-gather",
):
    """`served` makes parameters of the model's, and `moved` changes the weights on the mesh, before
    they are used; `per_pass` and `way` are as of `many_devices`.
    """
    model, (prefill, decode) = model_of(name), one_device(name)
    control = np.array([percent, strategy_code(strategy)], np.int32)
    devices = prompts_of(model, count)
    steps = [packed(devices), *(packed(devices, decode_step_number=n) for n in (1, 2, 3))]
    deltas = empty_deltas(1)
    alone = []
    for number, (tokens, rows) in enumerate(steps):
        flat, own = as_one(tokens, rows)
        alone.append((own, deltas, control) if number else (flat, own, deltas, control))
    want = play(model, prefill, decode, state_of(model, MOST * SLOTS), model.weights, alone)

    mesh = make_mesh(count)
    sent = {"per_pass": per_pass, "way": way}
    prefill = many_devices(name, count, "prefill", replication, **sent)
    decode = many_devices(name, count, "decode", **sent)
    home = Home(mesh, placement)
    resident = ResidentWeights(home.spread(model.weights), model.united, home=home)
    resident.use_way(model.way)
    if moved is not None:
        moved(resident)
        placement = resident.home.placement
    weights = resident.weights
    if served is not None:
        weights = weights._replace(params=served(weights.params))
    deltas = np.concatenate([deltas] * count)
    together = []
    for number, (tokens, rows) in enumerate(steps):
        rows = rows.reshape(-1, rows.shape[-1])
        step = (rows, deltas, control)
        together.append(step if number else (tokens.reshape(-1), *step))
    state = on.make_states(mesh, partial(state_of, model, SLOTS))
    got = play(model, prefill, decode, state, weights, together)

    real = [
        row
        for _, rows in steps[:1]
        for row in np.flatnonzero(rows.reshape(-1, NUM_COLUMNS)[:, 0] >= 0)
    ]
    layers = model.config.num_moe_layers
    for one, many in zip(want, got, strict=True):
        logits, degraded = one.logits[: len(real)], one.degraded[: len(real)]
        np.testing.assert_allclose(many.logits[real], logits, atol=TOLERANCE, rtol=0)
        np.testing.assert_array_equal(many.degraded[real], degraded)
        by_device = many.expert_rows.reshape(count, layers, -1)
        np.testing.assert_array_equal(by_device.sum(0), one.expert_rows)
        if replication is None or many is not got[0]:
            absent = ~np.moveaxis(placement.hosts, -1, 0)
            assert not by_device[absent].any()
    if strategy != "zero" and percent < 100:
        assert sum(out.degraded.sum() for out in want)
    return got


def in_ranges(name, count):
    spare = spare_of(name, count) if count in ROOM.get(name, {}) else 0
    return contiguous(*size_of(model_of(name)), count, spare=spare)


@cache
def check_everywhere(name, count, per_pass, strategy):
    """Checks steps whose rows go to all devices, once for all tests that compare others with
    them.
    """
    return check_same(name, count, in_ranges(name, count), 30, strategy, per_pass=per_pass)


def size_of(model):
    return model.config.num_moe_layers, model.config.num_experts + model.num_united_slots


def spare_of(name, count):
    """Slots of a layer beyond each device's part of its experts."""
    return ROOM[name][count] - slots_per_layer(size_of(model_of(name))[1], count)


def replicated(model, count, seed=1, spare=None):
    """Every expert on one to three devices; as many slots as are used, unless `spare` is given."""
    layers, experts = size_of(model)
    rng = np.random.default_rng(seed)
    hosts = np.array(contiguous(layers, experts, count).hosts)
    for _ in range(2):
        extra = rng.integers(0, count, (layers, experts))
        hosts |= np.eye(count, dtype=bool)[extra] & (rng.random((layers, experts, 1)) < 0.5)
    return from_hosts(hosts, spare=int(hosts.sum(1).max()) if spare is None else spare)


def only_on(model, count, devices, spare):
    layers, experts = size_of(model)
    hosts = np.zeros((layers, experts, count), bool)
    hosts[:, np.arange(experts), np.asarray(devices)[np.arange(experts) % len(devices)]] = True
    return from_hosts(hosts, spare=spare)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_bundled_model_on_more_and_more_devices(count):
    """Without spare slots on one and two."""
    spare = spare_of("bundled", count) if count in ROOM["bundled"] else 0
    placement = contiguous(*size_of(model_of("bundled")), count, spare=spare)
    check_same("bundled", count, placement, 30, "partial")


@pytest.mark.parametrize("strategy", ["zero", "full"])
def test_strategies(strategy):
    spare = spare_of("bundled", 4)
    placement = contiguous(*size_of(model_of("bundled")), 4, spare=spare)
    check_same("bundled", 4, placement, 40, strategy)


@pytest.mark.parametrize(
    ("name", "lies"),
    [
        ("qwen2_moe", "random"),
        ("qwen2_moe", "replicated"),
        ("qwen2_moe", "one device empty"),
        ("qwen3_moe_mixed_yarn", "replicated"),
        ("qwen3_moe_mixed_yarn", "all on one"),
        ("windows of qwen3_moe_mixed_yarn", "replicated"),
        ("gpt_oss", "replicated"),
        ("deepseek_v3", "replicated"),
    ],
)
def test_placements(name, lies):
    model, spare = model_of(name), spare_of(name, 4)
    placement: Placement = {
        "random": lambda: at_random(*size_of(model), 4, seed=5, spare=spare),
        "replicated": lambda: replicated(model, 4, spare=spare),
        "one device empty": lambda: only_on(model, 4, [0, 2, 3], spare),
        "all on one": lambda: only_on(model, 4, [2], spare),
    }[lies]()
    check_same(name, 4, placement, 30, "partial" if name == "qwen2_moe" else "full")


@pytest.mark.parametrize(
    ("lies", "replication", "percent", "strategy"),
    [
        ("ranges", Replication(6, 2), 30, "partial"),
        ("ranges", Replication(6, 2), 30, "full"),
        ("ranges", Replication(6, 2), 100, "partial"),
        ("replicated", Replication(3, 1, alpha=0.0), 30, "partial"),
    ],
)
def test_experts_copied_while_a_step_runs(lies, replication, percent, strategy):
    """Of the bundled model, whose five layers are one scan."""
    model, count = model_of("bundled"), 4
    placement = contiguous(*size_of(model), count, spare=spare_of("bundled", count))
    if lies == "replicated":
        placement = replicated(model, count)
    got = check_same("bundled", count, placement, percent, strategy, replication)[0]
    right, copied = (np.reshape(part, (count, -1)) for part in got.balance)
    assert (right == right[0]).all()
    assert (copied == copied[0]).all()
    assert not copied[0, 0]  # nothing precedes the first layer
    assert copied[0, 1:].all()
    bound = min(replication.num_replicas, count * replication.per_pair)
    assert copied.max() <= count * bound
    made = got.expert_rows.reshape(count, model.config.num_moe_layers, -1).sum((0, 2))
    assert (right[0] <= made).all()
    assert right[0, 1:].sum() > 0.3 * made[1:].sum()


@pytest.mark.parametrize(
    ("name", "count", "per_pass", "strategy", "replication"),
    [
        ("bundled", 1, 2, "partial", None),
        ("bundled", 2, 1, "full", None),
        ("bundled", 8, 3, "partial", None),
        ("bundled", 4, 2, "partial", Replication(6, 2)),
        ("skewed bundled", 8, None, "zero", None),
        ("qwen2_moe", 4, 2, "full", None),
        ("gpt_oss", 4, 1, "full", None),
        ("deepseek_v3", 4, 3, "full", Replication(2, 1)),
    ],
)
def test_rows_over_the_bound_wait_for_another_pass(name, count, per_pass, strategy, replication):
    """In every layer of every step; of the skewed model, whose visits are all on one device, with
    the bound that is served.
    """
    model = model_of(name)
    if replication is None:
        got = check_everywhere(name, count, per_pass, strategy)
    else:
        placement = in_ranges(name, count)
        got = check_same(name, count, placement, 30, strategy, replication, per_pass=per_pass)
    by_device = got[0].expert_rows.reshape(count, model.config.num_moe_layers, -1).sum(2)
    bound = per_pass or cost.OVER * TOKENS * model.config.experts_per_token
    assert (by_device.max(0) > bound).all()


@pytest.mark.parametrize(
    ("name", "count", "per_pass", "strategy"),
    [
        ("bundled", 1, None, "partial"),
        ("bundled", 2, None, "full"),
        ("bundled", 8, None, "partial"),
        ("bundled", 8, 3, "partial"),
        ("skewed bundled", 8, None, "zero"),
        ("qwen2_moe", 4, None, "full"),
        ("qwen3_moe_mixed_yarn", 4, 2, "full"),
        ("gpt_oss", 4, None, "full"),
        ("deepseek_v3", 4, 1, "full"),
    ],
)
def test_rows_that_travel_in_halves(name, count, per_pass, strategy):
    """As on one device; and with the bits of those that travel at once."""
    whole = check_everywhere(name, count, per_pass, strategy)
    given = name, count, in_ranges(name, count), 30, strategy
    halves = check_same(*given, per_pass=per_pass, way="halves")
    for one, other in zip(whole, halves, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logits, other.logits)


@pytest.mark.parametrize(
    ("name", "count", "way", "per_pass", "strategy"),
    [
        ("bundled", 1, Delivery(16), None, "partial"),
        ("bundled", 2, Delivery(16), None, "full"),
        ("bundled", 8, Delivery(16), None, "partial"),
        ("bundled", 8, Delivery(3), 3, "partial"),
        ("bundled", 8, Delivery(16, 2, 64), None, "partial"),
        ("bundled", 8, Delivery(16, 4, 32), 5, "full"),
        ("bundled", 8, Delivery(4, 4, 4), None, "partial"),
        ("bundled", 8, Delivery(16, 2, 9), None, "zero"),
        ("skewed bundled", 8, Delivery(6), None, "zero"),
        ("skewed bundled", 8, Delivery(9, 4, 12), 3, "zero"),
        ("skewed bundled", 8, Delivery(1, 4, 2), None, "zero"),
        ("qwen2_moe", 4, Delivery(5), 2, "full"),
        ("qwen3_moe_mixed_yarn", 4, Delivery(16, 2, 32), None, "full"),
        ("gpt_oss", 4, Delivery(1), None, "full"),
        ("deepseek_v3", 4, Delivery(2, 2, 3), 1, "full"),
    ],
)
def test_rows_that_go_where_they_are_needed_alone(name, count, way, per_pass, strategy):
    """As on one device, whether they have room or go in blocks; in one hop, with the bits of rows
    that go everywhere.
    """
    given = name, count, in_ranges(name, count), 30, strategy
    got = check_same(*given, per_pass=per_pass, way=way)
    if not way.node:
        everywhere = check_everywhere(name, count, per_pass, strategy)
        for one, other in zip(everywhere, got, strict=True):
            np.testing.assert_array_equal(one.logits, other.logits)


def router_as_probes(model):
    """Probes that say what the next layer's router says of a layer's rows."""
    layers = [layer for layer, is_moe in layers_of(model.config, model.params) if is_moe]
    weights = [layer["mlp_norm"][:, None] * layer["router"] for layer in layers[1:]]
    stacked = jnp.stack(weights).astype(jnp.float32)
    return Probe(stacked, jnp.zeros((len(weights), stacked.shape[2]), jnp.float32))


@pytest.mark.parametrize("apart", [False, True])
def test_copies_where_dense_layers_are_between(apart):
    """Scanned; and one after another as on a GPU, by the next router's guess and by probes."""
    name, replication = "qwen3_moe_mixed_yarn", Replication(2, 1)
    model, found = model_of(name), []
    placement = contiguous(*size_of(model), 4, spare=spare_of(name, 4))
    probes = router_as_probes(model)
    for more in ({}, {LOOKAHEAD: probes}) if apart else ({},):
        found += check_same(
            name,
            4,
            placement,
            30,
            "full",
            replication,
            served=lambda params, more=more: {**(unstack(params) if apart else params), **more},
        )[:1]
    for other in found[1:]:
        for router, probe in zip(found[0].balance, other.balance, strict=True):
            np.testing.assert_array_equal(router, probe)
    assert found[0].balance.copied.any()


@pytest.mark.parametrize("then", ["as they are", "another way and back"])
def test_experts_with_other_hosts_answer_alike(then):
    """Copies in every layer, of united experts too, some given up and some new."""
    model, count = model_of("bundled"), 4
    placement = contiguous(*size_of(model), count, spare=spare_of("bundled", count))
    rng, seen = np.random.default_rng(4), []

    def host_anew(resident):
        for layer, home in enumerate(np.array(placement.hosts)):
            load = rng.gamma(0.3, size=len(home))
            resident.host_layer(layer, with_copies(load, home, spare_of("bundled", count)))
            seen.append(int(resident.home.placement.hosts[layer].sum()) - len(home))

    def moved(resident):
        host_anew(resident)
        compiled = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, _, **__: compiled.append(event)
        )
        host_anew(resident)
        if then != "as they are":
            united = resident.united[4]
            resident.united[2] = replace(united, way=2, gate_up=0 * united.gate_up)
            resident.use_way(2)
            resident.use_way(4)
        assert "/jax/core/compile/backend_compile_duration" not in compiled

    check_same("bundled", count, placement, 30, "partial", moved=moved)
    assert min(seen) > 4


def test_hosts_without_a_slot_are_refused():
    home = Home(make_mesh(2), contiguous(2, 8, 2, spare=1))
    one = ExpertPool(jnp.zeros((1, 4, 8)), jnp.zeros((1, 4, 4)))
    pool = home.empty_pool(one)
    with pytest.raises(ValueError, match="device 0 would host 8 experts of MoE layer 1 and has 5"):
        home.host_layer(pool, 1, np.ones((8, 2), bool))


def test_copies_level_the_load():
    """All experts on two of eight devices: with copies the others compute, too."""
    model, count = model_of("bundled"), 8
    placement, loads = only_on(model, count, [0, 5], spare_of("bundled", count)), []
    for replication in (None, Replication(8, 4)):
        out = check_same("bundled", count, placement, 100, "partial", replication)[0]
        loads.append(out.expert_rows.reshape(count, model.config.num_moe_layers, -1).sum(-1))
    alone, copied = ((load.max(0) / load.mean(0))[1:] for load in loads)
    assert (alone >= 4).all()
    assert (copied < 2).all()


@pytest.mark.parametrize(
    "name", ["qwen2_moe", "glm4_moe", "granitemoe", "phimoe", "ernie4_5_moe", "afmoe"]
)
def test_forward_over_a_mesh(name):
    """Of a batch that does not divide into the devices, loaded straight onto them."""
    whole = jmoe.load(GOLDEN / name, dtype="float32")
    spread = jmoe.load(GOLDEN / name, dtype="float32", mesh=make_mesh(4))
    tokens = np.random.default_rng(0).integers(0, whole.config.vocab_size, (5, 7))
    keep = "weight" if name in ("glm4_moe", "phimoe", "ernie4_5_moe", "afmoe") else "visits"
    setting = jmoe.Brownout("full", 40, keep=keep)
    want, stats = jmoe.forward(
        whole, tokens, setting, exempt=[False, True, False, False, False], return_stats=True
    )
    got, parts = jmoe.forward(
        spread, tokens, setting, exempt=[False, True, False, False, False], return_stats=True
    )
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)
    np.testing.assert_array_equal(parts.router_choices, stats.router_choices)
    np.testing.assert_array_equal(parts.degraded_visits, stats.degraded_visits)
    np.testing.assert_array_equal(parts.expert_rows, stats.expert_rows)
    assert stats.degraded_visits.sum()


PROMPTS = ["The capital of", "3 + 4 =", "a", "Sort these letters: d b a c =", "Once"]


@pytest.mark.parametrize(
    ("count", "num_prompts", "brownout", "drawn"),
    [
        (2, 5, None, {}),
        (4, 5, jmoe.Brownout("partial", 40, 4), {"temperature": 0.8, "seed": 5}),
        (4, 3, jmoe.Brownout("full", 60), {"temperature": 1.0, "top_k": 20, "top_p": 0.9}),
    ],
)
def test_generate_over_a_mesh(count, num_prompts, brownout, drawn):
    """Prompts in several chunks, as many as do not divide into the devices, or fewer than these."""
    setting = {"max_new_tokens": 9, "brownout": brownout, "chunk_size": 12, "page_size": 4, **drawn}
    want, got = (
        jmoe.generate(jmoe.load(dtype="float32", mesh=mesh), PROMPTS[:num_prompts], **setting)
        for mesh in (None, make_mesh(count))
    )
    assert got.tokens == want.tokens
    assert got.texts == want.texts
    assert got.degraded_visits == want.degraded_visits
    assert (brownout is None) != any(want.degraded_visits)
    for own, other in zip(got.logprobs, want.logprobs, strict=True):
        np.testing.assert_allclose(own, other, atol=TOLERANCE, rtol=0)


def test_pages_left_behind_are_used_again_on_each_device():
    """Longer than the windows, whose pages are used in turn, on each device by itself."""
    name = "windows of qwen3_moe_mixed_yarn"
    model, mesh = model_of(name), make_mesh(2)
    home = Home(mesh, contiguous(*size_of(model), 2))
    resident = ResidentWeights(home.spread(model.weights), model.united, home=home)
    prompts = [[5, 9, 2, 7, 1, 3, 8, 4, 6], [11, 2], [3, 3, 4, 1, 9, 5]]
    want, got = (
        jmoe.generate(one, prompts, 8, page_size=2, chunk_size=8, stop_token_ids=())
        for one in (model, replace(model, resident=resident))
    )
    assert got.tokens == want.tokens


@pytest.mark.parametrize(("count", "lies"), [(2, "ranges"), (4, "replicated")])
def test_what_is_saved_over_a_mesh_is_what_one_device_saves(tmp_path, count, lies):
    whole, mesh = jmoe.load(dtype="float32", ways=[4]), make_mesh(count)
    placement = None if lies == "ranges" else replicated(whole, count)
    spread = jmoe.load(dtype="float32", ways=[4], mesh=mesh, placement=placement)
    for model, name in ((whole, "one"), (spread, "many")):
        model.use_way(4)
        jmoe.save(model, tmp_path / name)
    stored = [checkpoint.load_native(tmp_path / name, whole.dtype) for name in ("one", "many")]
    (cfg, one), (its_cfg, many) = stored
    assert cfg == its_cfg
    assert jax.tree.structure(one) == jax.tree.structure(many)
    for want, got in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        assert want.dtype == got.dtype
        np.testing.assert_array_equal(got, want)
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.is_file()}
        for name in ("one", "many")
    ]
    assert files[0] == files[1]
    again = jmoe.load(tmp_path / "many", dtype="float32", ways=[4], mesh=mesh)
    setting = jmoe.Brownout("partial", 30, 4)
    tokens = [[5, 9, 2, 7]]
    want, got = (jmoe.forward(model, tokens, setting) for model in (spread, again))
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


def test_no_device_holds_all_experts():
    spread = jmoe.load(GOLDEN / "qwen2_moe", dtype="float32", mesh=make_mesh(4))
    cfg, held = spread.config, {s.device: s.data for s in spread.pool.down.addressable_shards}
    assert len(held) == 4
    room = cfg.num_moe_layers * -(-cfg.num_experts // 4)
    assert {part.shape[0] for part in held.values()} == {room}


def test_what_a_spread_model_cannot_do_is_said(tmp_path):
    with pytest.raises(ValueError, match="a mesh of 9 devices was asked for, and there are 8"):
        make_mesh(9)
    spread = jmoe.load(GOLDEN / "qwen2_moe", dtype="float32", mesh=make_mesh(2))
    with pytest.raises(ValueError, match="load it without one to evaluate it"):
        Work(spread, [], EvaluateConfig())
    wrong = contiguous(1, spread.config.num_experts, 2)
    with pytest.raises(ValueError, match=r"placement.hosts is \(1, "):
        jmoe.load(GOLDEN / "qwen2_moe", mesh=make_mesh(2), placement=wrong)
    with pytest.raises(ValueError, match="no mesh"):
        jmoe.load(GOLDEN / "qwen2_moe", placement=wrong)
