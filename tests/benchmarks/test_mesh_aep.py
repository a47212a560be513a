"""Asynchronous expert parallelism, simulated: what is conserved, and what a hand can reckon."""

import importlib.util
import sys
from collections import defaultdict, namedtuple
from contextlib import contextmanager
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.mesh import synchronous
from benchmarks.mesh.core import Picker
from benchmarks.mesh.routing import Placement, Routing, draw_routing, place, zipf
from jmoe.parallel.asynchronous import NO_OVERHEADS, Late, Overheads
from jmoe.parallel.stage_times import StageTimes
from serving.scheduling.layers import compiled
from serving.scheduling.layers.picker import Waiting
from serving.scheduling.layers.rules import Defragging, FirstLayerFirst, MostTokensFirst


@pytest.fixture(scope="module")
def aep():
    """`asynchronous`, with loops in plain Python: they take half a minute to compile. Whoever
    imported it before has compiled ones.
    """
    with pytest.MonkeyPatch.context() as loaded_anew:
        for name in ("core", "asynchronous"):
            loaded_anew.delitem(sys.modules, f"benchmarks.mesh.{name}", raising=False)
            loaded_anew.delattr(f"benchmarks.mesh.{name}", raising=False)
        with pytest.MonkeyPatch.context() as plain:
            if compiled.AVAILABLE:
                plain.setattr("numba.config.DISABLE_JIT", True)
            asynchronous = importlib.import_module("benchmarks.mesh.asynchronous")
        yield asynchronous


Stage = namedtuple("Stage", "chosen_s device_s end_s worker layer rows")


@contextmanager
def watched(aep):
    """A list of stages in the order in which they begin. Rows are visits: token * K + k."""
    stages, core, start = [], aep.core, aep.core.start

    def watching(s, c, worker, layer, group, most):
        rows, row = [], int(s.heads[worker, layer, group])
        for _ in range(min(int(s.counts[worker, layer, group]), most)):
            rows.append(row)
            row = int(s.after[row])
        chosen_s, busy = float(s.seconds[core.NOW]), float(s.busy_s[worker])
        start(s, c, worker, layer, group, most)
        end_s, took_s = float(s.device_s[worker]), float(s.busy_s[worker]) - busy
        stages.append(Stage(chosen_s, end_s - took_s, end_s, worker, layer, rows))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "start", watching)
        yield stages


def pickers(rule=None, waiting=None):
    rule, waiting = rule or Defragging(), waiting or Waiting()
    limits = waiting.min_batch, waiting.max_wait_s, waiting.max_age_s
    picker = Picker(rule.number, rule.weights, *limits)
    return picker, picker


def straight(rows, visits, experts, attention=1.0, product=1.0, read=0.0, fixed=0.0):
    """Times that grow straight with rows: for hands."""
    return StageTimes(
        attention * np.arange(rows + 1),
        attention * np.arange(rows + 1),
        product * np.arange(visits + 1),
        read * np.arange(experts + 1),
        fixed,
    )


def system(aep, shape, times, *, overheads=None, row_s=0.0, spare=0, skew=0.5, same=False, **more):
    """(layers, experts, K, attention workers, expert workers)."""
    layers, experts, top_k, ours, theirs = shape
    routing = draw_routing(layers, zipf(experts, skew), top_k, same, 0)
    placement = place(routing.popularity, theirs, spare)
    overheads = overheads or NO_OVERHEADS
    return aep.System(times, routing, placement, ours, theirs, row_s, overheads, **more)


@pytest.mark.deep
def test_one_worker_of_each_kind_and_one_layer(aep):
    """Ten tokens go round together: attention 10 x 0.5 s, and experts 1 s + max(10 x 0.2, 3) s."""
    times = straight(10, 10, 1, attention=0.5, product=0.2, read=3.0, fixed=1.0)
    simulation = aep.Simulation(system(aep, (1, 1, 1, 1, 1), times), 10, pickers())
    simulation.play(0.5)
    before = simulation.state.busy_s.copy()
    run = simulation.measure(0.0, 90.0)
    assert run.itl_s == pytest.approx(5 + 4)
    assert run.tokens_per_s == pytest.approx(10 / 9)
    assert (simulation.state.busy_s - before) / 90 == pytest.approx([5 / 9, 4 / 9])


@pytest.mark.deep
def test_overheads_by_hand(aep):
    """One token, one layer. Attention: 2 s of host and 1 of device; to the expert 0.5 s of link
    (0.1 for its bytes, 0.5 for the message) and 3 s on the way; there 4 s of host, 1 + 1 of device;
    back 0.5 + 3 s. No host is hidden, as nothing else runs."""
    over = Overheads(2.0, 4.0, 3.0, 0.5)
    times = straight(1, 1, 1, fixed=1.0)
    one = system(aep, (1, 1, 1, 1, 1), times, overheads=over, row_s=0.1)
    run = aep.Simulation(one, 1, pickers()).measure(1.0, 300.0)
    assert run.itl_s == pytest.approx(2 + 1 + 3.5 + 4 + 2 + 3.5)


def test_a_host_launches_while_its_device_works(aep):
    """Two tokens that never meet; attention takes 1 s of device and 0.4 of host, hidden."""
    over = Overheads(0.4, 0.0, 0.0, 0.0)
    times = straight(2, 2, 1, product=0.0)
    more = {"max_attention_rows": 1}
    two = system(aep, (1, 1, 1, 1, 1), times, overheads=over, **more)
    simulation = aep.Simulation(two, 2, pickers())
    simulation.play(10.0)
    before = simulation.state.busy_s[0]
    run = simulation.measure(0.0, 100.0)
    assert run.itl_s == pytest.approx(2.0)
    assert simulation.state.busy_s[0] - before == pytest.approx(100.0)


def test_a_late_stage_takes_so_many_times_as_long(aep):
    """All of them: as if times were doubled. A quarter of them, by five: twice on average, and a
    worker that always finds rows makes half as many."""
    times, over = straight(10, 10, 1, product=0.5), Overheads(0.1, 0.1, 0.2, 0.1, inf)
    double = straight(10, 10, 1, attention=2.0, product=1.0)

    def run(times, late, for_s=300.0):
        one = system(aep, (1, 1, 1, 1, 1), times, overheads=over, late=late)
        return aep.Simulation(one, 10, pickers()).measure(10.0, for_s)

    assert run(times, Late(2.0, 1.0)) == run(double, Late())
    busy = straight(1, 1, 1, product=0.0)  # a second of attention a token, and nothing else
    one = system(aep, (1, 1, 1, 1, 1), busy, late=Late(5.0, 0.25), max_attention_rows=1)
    got = aep.Simulation(one, 1, pickers()).measure(10.0, 8000.0)
    assert got.tokens_per_s == pytest.approx(1 / 2, rel=0.05)


def test_even_load_without_overheads_is_the_closed_form(aep):
    """Times straight in rows, so that cutting batches costs nothing: who has most work decides.

    Each token takes 4 layers x 1 s of one of two attention workers; experts are faster. So 2 / 4
    tokens a second. With experts at 3 s a visit, two visits a row, on three workers evenly loaded:
    3 / (4 x 2 x 3).
    """
    shape, count = (4, 6, 2, 2, 3), 60
    times = straight(count, 2 * count, 6, product=0.1)
    fast = system(aep, shape, times, skew=0.0)
    run = aep.Simulation(fast, count, pickers()).measure(200.0, 500.0)
    assert run.tokens_per_s == pytest.approx(2 / 4, rel=0.02)
    slow = system(aep, shape, straight(count, 2 * count, 6, product=3.0), skew=0.0)
    run = aep.Simulation(slow, count, pickers()).measure(1000.0, 2500.0)
    assert run.tokens_per_s == pytest.approx(3 / 24, rel=0.03)


@settings(max_examples=25)
@given(
    layers=st.integers(1, 4),
    experts=st.integers(1, 5),
    picks=st.integers(1, 3),
    workers=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    rule=st.sampled_from([MostTokensFirst(), FirstLayerFirst(), Defragging()]),
    least=st.integers(1, 4),
    cap=st.sampled_from([3, 1 << 40]),
    spare=st.integers(0, 1),
    seed=st.integers(0, 999),
)
def test_what_comes_in_goes_out_and_every_layer_is_visited_in_order(
    aep, layers, experts, picks, workers, rule, least, cap, spare, seed
):
    """Watched stage by stage; sequences never end."""
    top_k, until_s = min(picks, experts), 60.0
    times = straight(40, 120, experts, 0.3, 0.2, 0.5, 0.1)
    played = system(
        aep, (layers, experts, top_k, *workers), times,
        overheads=Overheads(0.05, 0.03, 0.2, 0.01), row_s=0.02, spare=spare,
        max_attention_rows=cap,
    )  # fmt: skip
    in_flight = 5 if seed % 2 else 12
    waiting = pickers(rule, Waiting(least, 0.5, 5.0))
    simulation = aep.Simulation(played, in_flight, waiting, seed=seed)
    with watched(aep) as stages:
        simulation.play(until_s)
    s, ours = simulation.state, played.num_attention
    first = [one for one in stages if one.worker < ours and not one.layer]
    done = sum(len(one.rows) for one in first if one.end_s <= until_s)
    assert s.numbers[aep.core.PRODUCED] == done > 0
    assert s.running.sum() == in_flight
    # A device does one thing at a time, and nothing before it was chosen.
    ends = defaultdict(float)
    for stage in sorted(stages, key=lambda stage: stage.device_s):
        assert stage.device_s >= max(ends[stage.worker], stage.chosen_s) - 1e-9
        ends[stage.worker] = stage.end_s
    # Each place's story: attention of a layer, its K visits, attention of the next.
    story = defaultdict(list)
    for stage in sorted(stages, key=lambda stage: (stage.chosen_s, stage.end_s)):
        assert len(stage.rows) == len(set(stage.rows))
        assert stage.worker >= ours or len(stage.rows) <= cap
        for row in stage.rows:
            story[row // top_k].append((stage.worker < ours, stage.layer, stage.worker))
    for events in story.values():
        layer, missing, home = 0, top_k, None
        for attention, at, worker in events:
            assert at == layer
            if attention:
                assert home is None or (missing == 0 and worker == home)
                missing, home = top_k, worker
            else:
                assert missing > 0
                missing -= 1
                layer = layer if missing else (layer + 1) % layers
    assert len(story) == in_flight


@pytest.mark.deep
@pytest.mark.skipif(not compiled.AVAILABLE, reason="no numba")
def test_compiled_loops_are_the_plain_ones(aep, monkeypatch):
    """The same events in the same order, whichever plays them."""
    spec = importlib.util.find_spec("benchmarks.mesh.core")
    machine_code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(machine_code)
    times = straight(30, 60, 6, 0.3, 0.2, 0.5, 0.1)
    over = Overheads(0.05, 0.03, 0.2, 0.01)
    played = system(aep, (3, 6, 2, 2, 3), times, overheads=over, row_s=0.02)
    states = []
    for loops in (aep.core, machine_code):
        with monkeypatch.context() as patch:
            patch.setattr(aep, "core", loops)
            simulation = aep.Simulation(played, 30, pickers(waiting=Waiting(2, 0.5)))
            simulation.measure(50.0, 100.0)
            states.append(simulation.state)
    for one, two in zip(*states, strict=True):
        np.testing.assert_array_equal(one, two)


def test_queues_in_the_picture_are_those_of_the_scheduler(aep):
    """An aged queue runs under any rule: what the picker is told is what the simulator has."""
    times = straight(8, 8, 1, product=0.1)
    two = system(aep, (2, 1, 1, 1, 1), times)
    waiting = pickers(FirstLayerFirst(), Waiting(8, 100.0))
    with watched(aep) as stages:
        aep.Simulation(two, 8, waiting).play(200.0)
    assert {len(stage.rows) for stage in stages if stage.worker == 0} == {8}


def mesh(times, sets, hosts, devices, **more):
    """A mesh of one layer and given sets; `hosts` by expert, one each."""
    sets = np.array(sets, np.int32)[None]
    experts = len(hosts)
    popularity = np.bincount(sets.ravel(), minlength=experts)[None] / sets.size
    placement = Placement(np.array(hosts, np.int32)[None, :, None], np.ones((1, experts), np.int32))
    return synchronous.Mesh(times, Routing(popularity, sets), placement, devices, **more)


def test_synchronous_steps_by_hand():
    """Two devices, 8 rows that all visit expert 0: 4 s of attention each, exchanges of 0.5 s and
    half of 8 visits' 0.1 s, the fullest device 1 + max(8 x 2, 3) s."""
    times = straight(8, 8, 2, product=2.0, read=3.0, fixed=1.0)
    one = mesh(times, [[0]], [0, 1], 2, row_s=0.1, exchange_s=0.5)
    rng = np.random.default_rng(0)
    assert synchronous.step_s(one, 8, rng) == pytest.approx(4 + 2 * (0.5 + 0.4) + 17)
    slow = mesh(times, [[0]], [0, 1], 2, row_s=0.1, exchange_s=0.5, layer_overhead_s=2.0)
    assert synchronous.step_s(slow, 8, rng) == pytest.approx(4 + 1.8 + 17 + 2)
    late = replace(one, late=Late(3.0, 1.0))
    assert synchronous.step_s(late, 8, rng) == pytest.approx(3 * 4 + 1.8 + 3 * 17)
    rate, step = synchronous.tokens_per_s(one, 8)
    assert (rate, step) == pytest.approx((8 / 22.8, 22.8))


def test_half_batches_by_hand():
    """Halves of 4 rows: attention 2 s, exchange 0.5 + 0.2, experts 9 s on device 0.

    Attention of the halves ends at 2 and 4; rows are there at 2.7 and 4.7; device 0 has experts
    from 4 to 13 and from 13 to 22, rows are home at 13.7 and 22.7. In turn instead of overlapped it
    would be 2 x (2 + 0.7 + 9 + 0.7).
    """
    times = straight(8, 8, 2, product=2.0, read=3.0, fixed=1.0)
    one = mesh(times, [[0]], [0, 1], 2, row_s=0.1, exchange_s=0.5)
    assert synchronous.half_batches_s(one, 8, np.random.default_rng(0)) == pytest.approx(22.7)


def test_even_replicas_level_a_synchronous_layer():
    times = straight(4000, 4000, 4)
    routing = draw_routing(2, np.array([0.7, 0.1, 0.1, 0.1]), 1, True, 0)
    found = []
    for spare in (0, 1):
        placed = place(routing.popularity, 4, spare)
        one = synchronous.Mesh(times, routing, placed, 4, 0.0, exchange_s=0.0)
        found.append(synchronous.step_s(one, 4000, np.random.default_rng(1)))
    assert found[0] == pytest.approx(2 * (1000 + 2800), rel=0.02)
    # Three devices have the busy expert beside their own: 0.7 / 4 + 0.1 of the visits.
    assert found[1] == pytest.approx(2 * (1000 + 4000 * 0.275), rel=0.03)


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2), st.booleans())
def test_every_expert_is_somewhere_and_a_device_holds_what_it_may(
    layers, experts, devices, spare, same
):
    routing = draw_routing(layers, zipf(experts, 1.0), min(2, experts), same, 3)
    placed = place(routing.popularity, devices, spare)
    shares = placed.shares(devices)
    np.testing.assert_allclose(shares.sum(axis=2), 1)
    held = (shares > 0).sum(axis=1)
    home = -(-experts // devices)
    assert held.min() >= 1
    assert held.max() <= home + spare
    assert len({tuple(p) for p in routing.popularity}) == 1 or not same


def test_popularity_is_zipfs():
    routing = draw_routing(20, zipf(8, 1.0), 1, True, 0)
    mean = np.sort(routing.popularity.mean(axis=0))[::-1]
    np.testing.assert_allclose(mean, zipf(8, 1.0) / zipf(8, 1.0).sum(), rtol=0.05)
    sets = draw_routing(2, zipf(16, 1.0), 8, False, 0).sets
    assert all(len(set(row)) == 8 for row in sets.reshape(-1, 8))
