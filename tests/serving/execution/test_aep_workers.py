"""Asynchronous workers write what the whole model writes, whoever runs when (AMoE)."""

import random
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import jmoe
from jmoe.packed_rows import KV_LEN, Q_LEN, SLOT, empty_deltas, pack_row
from serving.pipeline.messages import Unit, UseWay, WorkerDown, WorkerUp
from serving.pipeline.queues import Entry, MicroQueues
from serving.scheduling.layers.picker import Waiting, make_picker
from tests.jmoe.conftest import GOLDEN, add_united
from tests.jmoe.numpy_forward import forward
from tests.on_devices import run_on_devices
from tests.serving.execution.aep_sequences import (
    BLOCKS,
    ROWS,
    Sequences,
    some_prompts,
    workers_of,
)
from tests.variants import variant

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


@pytest.fixture(scope="module")
def models():
    return {
        name: jmoe.load(GOLDEN / name, dtype="float32")
        for name in ("qwen2_moe", "mixtral", "qwen3_moe_mixed_yarn")
    }


@pytest.mark.deep
@pytest.mark.sized(exhaustive=("qwen2_moe-2-3-16", "mixtral-1-1-16", "qwen3_moe_mixed_yarn-2-2-16"))
@pytest.mark.parametrize(
    ("name", "attention", "experts", "rounds"),
    [
        ("qwen2_moe", 1, 2, 3),
        ("qwen2_moe", 2, 3, 16),
        ("mixtral", 1, 1, 16),
        ("qwen3_moe_mixed_yarn", 2, 2, 16),
    ],
)
def test_tokens_are_the_whole_models_in_any_order(models, name, attention, experts, rounds):
    """Of a model with shared experts, of one without, of one with dense layers between."""
    model = models[name]
    rng = random.Random(7)
    workers = workers_of(model, rng, attention=attention, experts=experts)
    width = 4 * attention
    prompts = some_prompts(model, rng, rounds * width)
    want = jmoe.generate(model, prompts, 5, stop_token_ids=()).tokens
    for start in range(0, len(prompts), width):
        played = Sequences(workers, prompts[start : start + width], 5, rng.choice([3, 10]))
        played.play(rng)
        assert played.tokens == want[start : start + width]
        assert played.degraded == [0] * width


@pytest.mark.deep
def test_experts_that_several_workers_have_take_turns(models):
    model, rng = models["qwen2_moe"], random.Random(1)
    layers, num_experts = model.table.slots.shape
    hosts = np.random.default_rng(0).random((layers, num_experts, 3)) < 0.5
    hosts[..., 1] |= ~hosts.any(axis=-1)
    workers = workers_of(model, rng, experts=3, hosts=hosts)
    prompts = some_prompts(model, rng, 4)
    played = Sequences(workers, prompts, 6, 10)
    played.play(rng)
    assert played.tokens == jmoe.generate(model, prompts, 6, stop_token_ids=()).tokens
    assert all(worker.stages for worker in workers.experts)


@pytest.mark.deep
def test_a_scheduler_that_a_server_would_have_writes_the_same(models):
    model, rng = models["qwen2_moe"], random.Random(2)
    picker = make_picker("defrag", Waiting(min_batch=2, max_wait_s=3.0, max_age_s=50.0))
    turns = count()
    workers = workers_of(
        model, rng, experts=1, picker=lambda: picker, clock=lambda: float(next(turns))
    )
    prompts = some_prompts(model, rng, 4)
    played = Sequences(workers, prompts, 4, 10)
    played.play(rng)
    assert played.tokens == jmoe.generate(model, prompts, 4, stop_token_ids=()).tokens


@pytest.mark.deep
def test_sampled_tokens_are_those_of_generate(models):
    model, rng = models["qwen2_moe"], random.Random(3)
    workers = workers_of(model, rng)
    prompt = [5, 9, 33]
    played = Sequences(workers, [], 5, 10)
    tokens, done = [], 0
    for step in range(5):
        length = 1 if step else len(prompt)
        done += length
        row = pack_row(0, kv_len=done, q_len=length, seed=11, temperature=0.9, top_k=7)
        unit = Unit(
            row,
            None if step else np.array(prompt, np.int32),
            np.arange(length, dtype=np.int32),
            np.array(
                [[0, block, block] for block in range(BLOCKS)] if not step else [], np.int32
            ).reshape(-1, 3),
        )
        workers.submit(0, unit)
        told = []
        while not told:
            number = rng.randrange(workers.num_workers)
            told = workers.turn(number)
        tokens += told[0].tokens
    assert not played.unit_of
    settings = {"temperature": 0.9, "top_k": 7, "seed": 11}
    want = jmoe.generate(model, [prompt], 5, stop_token_ids=(), **settings).tokens
    assert [tokens] == want


@pytest.mark.deep
def test_what_does_not_fit_is_refused(models):
    model, rng = models["qwen2_moe"], random.Random(4)
    workers = workers_of(model, rng)
    row, none = pack_row(0, kv_len=17, q_len=17), empty_deltas(0)
    with pytest.raises(ValueError, match="a chunk has 17 tokens; a stage takes 16"):
        workers.submit(0, Unit(row, np.arange(17, dtype=np.int32), np.arange(17), none))
    unit = Unit(row, None, np.array([3], np.int32), none)
    workers.submit(0, unit)
    with pytest.raises(ValueError, match="place 3 is another unit's"):
        workers.submit(0, Unit(row, None, np.array([3], np.int32), none))
    for places in ([], [-1], [ROWS]):
        with pytest.raises(ValueError, match=r"places are \[.*each of 0 to 39"):
            workers.submit(0, Unit(row, None, np.array(places, np.int32), none))
    offloaded = model.with_weights(table=model.table._replace(offloaded=model.table.groups))
    with pytest.raises(ValueError, match="offloaded experts"):
        workers_of(offloaded, rng)


def test_queues_say_what_waits_and_for_how_long():
    queues = MicroQueues(3, 2, make_picker("mtfs"))
    for at, (rows, urgent) in enumerate([(4, 0), (2, 2), (5, 1)]):
        queues.put(1, 0, [Entry(rows, urgent, float(at), at)])
    assert queues.counts.tolist() == [[0, 0], [11, 0], [0, 0]]
    assert [e.what for e in queues.take(1, 0, 6)] == [0, 1]
    assert (queues.counts[1, 0], queues.urgent[1, 0], queues.oldest[1, 0]) == (5, 1, 2.0)
    assert [e.what for e in queues.take(1, 0, 1)] == [2]  # more than fit, alone
    assert queues.num_rows == 0
    assert queues.oldest[1, 0] == np.inf
    with pytest.raises(ValueError, match="0 rows"):
        queues.put(0, 0, [Entry(0, 0, 0.0, None)])


@pytest.mark.exhaustive
def test_workers_on_devices_of_their_own():
    """Two for attention, six for experts."""
    run_on_devices(Path(__file__).with_name("aep_on_devices.py"), 8)


def recording(device, moe_layers):
    """Records the experts that rows go to, by slot, MoE layer and position, as stages run from now
    on.
    """
    found, attend = {}, device.attend

    def attend_and_note(layer, tokens, rows, deltas, control, places):
        attended = attend(layer, tokens, rows, deltas, control, places)
        if attended.expert_ids is not None:
            ids = iter(attended.expert_ids)
            moe_layer = sum(moe_layers[:layer])
            for row in rows[rows[:, SLOT] >= 0]:
                for position in range(row[KV_LEN] - row[Q_LEN], row[KV_LEN]):
                    found[row[SLOT], moe_layer, position] = set(next(ids).tolist())
        return attended

    device.attend = attend_and_note
    return found


@pytest.mark.exhaustive
def test_under_brownout_tokens_are_those_of_the_plans_that_stages_made():
    """Each stage's plan is made of whom it met; replayed in float64, plans give the same tokens."""
    model, rng = jmoe.load(dtype="float32", ways=[4]), random.Random(6)
    control = model.prepare(jmoe.Brownout("partial", 40, way=4))
    workers = workers_of(model, rng, experts=2)
    plans = recording(workers.attention[0].device, model.config.moe_layers)
    prompts = some_prompts(model, rng, 3)
    played = Sequences(workers, prompts, 3, 10, control=(40, control.strategy))
    played.play(rng)
    groups, num_experts = np.asarray(model.table.groups), model.config.num_experts
    assert sum(played.degraded) > 20
    for slot, prompt in enumerate(prompts):
        for at, token in enumerate(played.tokens[slot]):

            def served(moe_layer, position, expert, slot=slot):
                met = plans[slot, moe_layer, position]
                if expert in met:
                    return expert
                assert num_experts + groups[moe_layer, expert] in met
                return num_experts + groups[moe_layer, expert]

            context = prompt + played.tokens[slot][:at]
            logits = forward(model, [context], served)[0]
            assert logits.max() - logits[token] < 1e-4
        assert abs(logits - forward(model, [context])[0]).max() > 1e-3  # plans were followed


@pytest.mark.exhaustive
def test_each_way_has_its_own_united_experts_whoever_hosts_them(tmp_path):
    folder = variant(GOLDEN / "qwen2_moe", tmp_path / "model", 0)
    add_united(folder, ways=(2, 3, 4))
    model, rng = jmoe.load(folder, dtype="float32"), random.Random(2)
    control = model.prepare(jmoe.Brownout("partial", 30, way=3))
    layers, num_experts = model.table.slots.shape
    hosts = np.random.default_rng(0).random((layers, num_experts, 3)) < 0.5
    hosts[..., 1] |= ~hosts.any(axis=-1)
    workers = workers_of(model, rng, experts=3, hosts=hosts, ways=(3, 2, 4))
    for expert_worker in workers.experts:
        expert_worker.warm([4])  # ends with the first way
    (prompt,), found = some_prompts(model, rng, 1), []
    for way in (3, 2, 4, 3):
        for worker in workers.workers if found else ():
            worker.take(UseWay(way), 0.0)
        played = Sequences(workers, [prompt], 5, 10, control=(30, control.strategy))
        played.play(rng)
        found.append((way, played.tokens, played.degraded))
    for way, tokens, degraded in found:
        want = jmoe.generate(
            model, [prompt], 5, jmoe.Brownout("partial", 30, way), stop_token_ids=()
        )
        assert (tokens, degraded) == (want.tokens, list(want.degraded_visits))
    assert len({tuple(tokens[0]) for _, tokens, _ in found}) == 3


@pytest.mark.deep
@pytest.mark.parametrize("strategy", ["zero", "full", "partial"])
def test_without_a_worker_its_experts_visits_go_where_brownout_lets_them(strategy):
    """Odd experts are gone: united ones stand in, or none does; requests that refuse that get an
    error.
    """
    model, rng = jmoe.load(dtype="float32", ways=[4]), random.Random(8)
    control = model.prepare(jmoe.Brownout(strategy, 100, way=4))
    layers, num_experts = model.table.slots.shape
    groups, routed = np.asarray(model.table.groups), model.config.num_experts
    hosts = np.zeros((layers, num_experts, 2), bool)
    hosts[:, :, 0] = (np.arange(num_experts) % 2 == 0) | (np.arange(num_experts) >= routed)
    hosts[:, :, 1] = ~hosts[:, :, 0]
    workers = workers_of(model, rng, hosts=hosts)
    attention = workers.attention[0]
    attention.take(WorkerDown("experts", 1), 0.0)
    prompts = some_prompts(model, rng, 2)
    played = Sequences(workers, prompts, 2, 10, exempt=[1], control=(100, control.strategy))
    for unit, number in played.unit_of.items():
        unit.number = number
    failed = []
    for _ in range(10_000):
        if not attention.num_units:
            break
        failed += played.accept(workers.turn(rng.choice([0, 1])))
    gone = [0, 1] if strategy == "zero" else [1]
    assert sorted(n for told in failed for n in told.rows) == gone
    assert all(told.reason.endswith("(experts-1 gone)") for told in failed)
    assert len(played.tokens[0]) == (0 if strategy == "zero" else 2)

    def served(moe_layer, position, expert):
        united = routed + groups[moe_layer, expert] if strategy == "partial" else -1
        return united if expert % 2 else expert

    for at, token in enumerate(played.tokens[0]):
        logits = forward(model, [prompts[0] + played.tokens[0][:at]], served)[0]
        assert logits.max() - logits[token] < 1e-4
    if strategy != "zero":
        assert played.degraded[0] > 0
        attention.take(WorkerUp("experts", 1), 0.0)
        assert not attention.told()


@pytest.mark.deep
@pytest.mark.sized(exhaustive=("True",))
@pytest.mark.parametrize("refuses", [False, True])
def test_brownout_to_nothing_and_rows_that_refuse_it(refuses):
    """All visits are served by united experts then, whatever a stage saw; or one row is exact."""
    model, setting = jmoe.load(dtype="float32", ways=[4]), jmoe.Brownout("full", 0, way=4)
    rng = random.Random(5)
    control = model.prepare(setting)
    workers = workers_of(model, rng, experts=2)
    given = control.threshold_percent, control.strategy
    prompts = some_prompts(model, rng, 3)
    played = Sequences(workers, prompts, 4, 10, exempt=[1] if refuses else [], control=given)
    played.play(rng)
    if refuses:
        assert played.degraded[1] == 0 < played.degraded[0]
        assert [played.tokens[1]] == jmoe.generate(model, prompts[1:2], 4, stop_token_ids=()).tokens
        return
    want = jmoe.generate(model, prompts, 4, setting, stop_token_ids=())
    assert played.degraded == want.degraded_visits == want.expert_visits
    assert played.tokens == want.tokens
