"""The mover over a runner that only records calls."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmoe.parallel.copies import device_loads
from jmoe.parallel.placement import contiguous, from_hosts, of_tables, with_spare
from serving.config import BalanceConfig, EngineConfig
from serving.control.mover import SPARE, Mover, make_mover, read_load, starting_placement
from serving.errors import SettingsError
from serving.startup.prepare import check_start
from tests.jmoe.parallel.placements import at_random, by_load

LAYERS, EXPERTS, DEVICES = 3, 8, 4


class Noting:
    def __init__(self, fails=False):
        self.told, self.fails = [], fails

    def host_layer(self, layer, hosts):
        if self.fails:
            raise RuntimeError("out of memory")
        self.told.append((layer, hosts.copy()))


def mover_of(runner, copy_s=0.001, **settings):
    config = BalanceConfig(spare_slots=1, interval_s=10.0, half_life_s=60.0, **settings)
    return Mover(config, runner, contiguous(LAYERS, EXPERTS, DEVICES, spare=1), copy_s)


def read(mover, rows, now, took_s=1.0):
    mover.step_read(None, SimpleNamespace(expert_rows=np.asarray(rows)), now - took_s, now)


def skewed():
    """Returns loads: in layer 1 one expert has most; in other layers all have the same."""
    rows = np.full((LAYERS, EXPERTS), 10)
    rows[1, 2] = 200
    return rows


def test_a_busy_expert_is_copied_one_layer_a_tick():
    runner = Noting()
    mover = mover_of(runner)
    mover.advance(0.0)
    for now in range(1, 10):
        read(mover, skewed(), float(now))
        mover.advance(float(now))
    assert not runner.told  # not before the first look
    mover.advance(10.0)  # looks
    assert not runner.told
    mover.advance(10.1)
    ((layer, hosts),) = runner.told
    assert layer == 1
    assert hosts[2].sum() == DEVICES
    for now in (10.2, 10.3, 20.0, 20.1, 20.2, 20.3):
        mover.advance(now)
    assert len(runner.told) == 1  # it is as it should be
    assert mover.experts_copied == hosts.sum() - EXPERTS
    assert mover.imbalances()[1] < 1.4


def test_experts_stay_where_a_placement_of_ones_own_has_them():
    """Only copies are made, of those that are busy."""
    runner, load = Noting(), np.ones((LAYERS, EXPERTS)) + np.arange(EXPERTS)
    for placement in (
        by_load(load, DEVICES, spare=1),
        at_random(LAYERS, EXPERTS, DEVICES, seed=0, spare=1),
    ):
        mover = Mover(BalanceConfig(spare_slots=1, interval_s=1.0), runner, placement, 0.001)
        for now in range(6):
            read(mover, skewed(), float(now))
            mover.advance(float(now))
        (*_, (layer, hosts)) = runner.told
        assert layer == 1
        assert (hosts >= placement.hosts[1]).all()
        assert hosts[2].all()


def test_homes_are_even_where_a_placement_of_ones_own_has_copies():
    """Or copies would find no room beside them."""
    hosts = np.asarray(at_random(LAYERS, EXPERTS, DEVICES, seed=0).hosts).copy()
    for layer in hosts:
        layer[layer.argmax(axis=1).tolist().index(3), 0] = True  # a copy of the last device's first
    runner, placement = Noting(), from_hosts(hosts, spare=1)
    mover = Mover(BalanceConfig(spare_slots=1, interval_s=1.0), runner, placement, 0.001)
    for now in range(6):
        read(mover, skewed(), float(now))
        mover.advance(float(now))
    assert all(own.sum(axis=0).max() <= placement.room for _, own in runner.told)
    assert runner.told


@st.composite
def hosts_of_ones_own(draw):
    experts, devices = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    where = st.sets(st.integers(0, devices - 1), min_size=1)
    own = draw(st.lists(where, min_size=experts, max_size=experts))
    return np.array([[[at in each for at in range(devices)] for each in own]])


@given(hosts_of_ones_own())
def test_homes_are_even_and_as_few_experts_move_as_can_be(hosts):
    _, experts, devices = hosts.shape
    placement = from_hosts(hosts, spare=experts)
    (homes,) = Mover(BalanceConfig(spare_slots=1), Noting(), placement, 0.001)._homes
    most = -(-experts // devices)
    assert (homes.sum(axis=1) == 1).all()
    assert homes.sum(axis=0).max() <= most
    moved = (
        sum(not own[at] for own, at in zip(hosts[0], each, strict=True))
        for each in product(range(devices), repeat=experts)
        if max(map(each.count, each)) <= most
    )
    assert (homes & ~hosts[0]).sum() == min(moved)


def family_placed(*, models, experts, devices, shared, seed=0, united=0):
    """Returns `of_tables` of models that share a part of their experts."""
    rng = np.random.default_rng(seed)
    owner = np.tile(np.arange(models)[:, None, None], (1, LAYERS, experts))
    owner[:, rng.random((LAYERS, experts)) < shared] = 0
    slots = owner * experts * LAYERS + np.arange(LAYERS * experts).reshape(LAYERS, experts)
    first = models * LAYERS * experts
    own = first + np.arange(models * LAYERS * united).reshape(models, LAYERS, united)
    return of_tables(np.concatenate([slots, own], axis=2).astype(np.int32), experts, devices)


def step_of(*models):
    return SimpleNamespace(models=models)


def mixed_of(rows):
    """What a mixed step tells of each of its models' rows, [N, L, e]."""
    return SimpleNamespace(expert_rows=rows.sum(axis=0), rows_by_model=rows)


@given(st.data())
def test_load_is_counted_by_distinct_expert_and_kind_of_step(data):
    """Against plain loops: an expert that two models share has the loads of both."""
    models, experts = 3, 5
    own, numbers = family_placed(
        models=models, experts=experts, devices=2, shared=0.5, seed=data.draw(st.integers(0, 99))
    )
    config = BalanceConfig(spare_slots=1)
    mover = Mover(config, Noting(), with_spare(own, 1), 0.0, np.asarray(own.hosts), numbers)
    wanted = np.zeros((LAYERS, models + 1, own.hosts.shape[1]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    steps = st.lists(st.sets(st.integers(0, models - 1), min_size=1, max_size=2), max_size=5)
    for of in map(sorted, data.draw(steps)):
        rows = rng.integers(0, 9, (len(of), LAYERS, numbers.shape[2]))
        alone = SimpleNamespace(expert_rows=rows[0], rows_by_model=None)
        mover.step_read(step_of(*of), mixed_of(rows) if len(of) > 1 else alone, 0.0, 0.0)
        for at, layer, expert in np.ndindex(rows.shape):
            kind = models if len(of) > 1 else of[0]
            wanted[layer, kind, numbers[of[at], layer, expert]] += rows[at, layer, expert]
    np.testing.assert_allclose(mover.load, wanted)


def test_copies_of_a_family_level_the_steps_of_each_model_and_of_both(tmp_path):
    """Of three steps in four one model has all rows; the others are another's, or mixed. Copies are
    by the load of the first half, and judged by steps of the second.
    """
    models, experts, devices, rows = 2, 64, 8, 4096
    own, numbers = family_placed(models=models, experts=experts, devices=devices, shared=0.5)
    rng, homes = np.random.default_rng(5), np.asarray(own.hosts)
    popular = rng.lognormal(0, 1.0, (models, LAYERS, experts))
    popular /= popular.sum(axis=2, keepdims=True)
    settings = {"spare_slots": 2, "interval_s": 1.0, "half_life_s": 60.0}
    config = BalanceConfig(**settings, load_file=str(tmp_path / "load.npy"))
    mover = Mover(config, Noting(), with_spare(own, 2), 0.0, homes, numbers)

    def drawn(share):
        """The rows of a model in a step, of which it has a share."""
        return rng.poisson(rows * share * popular[:, :, :])

    def step(number):
        if number % 4:
            return step_of(0), SimpleNamespace(expert_rows=drawn(1)[0], rows_by_model=None)
        if number % 8:
            return step_of(1), SimpleNamespace(expert_rows=drawn(1)[1], rows_by_model=None)
        return step_of(0, 1), mixed_of(drawn(0.5))

    def on_devices(at, result, hosts):
        by_model = result.rows_by_model
        every = result.expert_rows[None] if by_model is None else by_model
        load = np.zeros(homes.shape[:2])
        for model, own_rows in zip(at.models, every, strict=True):
            np.add.at(load, (np.arange(LAYERS)[:, None], numbers[model]), own_rows)
        return np.stack([device_loads(*one) for one in zip(load, hosts, strict=True)])

    found = {}
    for number in range(600):
        at, result = step(number)
        if number >= 300:
            for name, hosts in (("before", homes), ("after", mover.hosts)):
                loads = on_devices(at, result, hosts)
                ratio = loads.max(axis=1).sum() / loads.mean(axis=1).sum()
                found.setdefault((name, at.models), []).append(ratio)
            continue
        mover.step_read(at, result, number * 0.1, number * 0.1 + 0.1)
        mover.advance(number * 0.1 + 0.1)
    p99 = {key: np.percentile(each, 99) for key, each in found.items()}
    for at, most in (((0,), 1.12), ((1,), 1.2), ((0, 1), 1.2)):
        assert p99["before", at] > 1.3
        assert p99["after", at] < most
    assert mover.experts_copied <= 2 * devices * LAYERS + 20
    # What is kept is what another server starts with, and no file of one model is.
    placed = starting_placement(config, own, num_models=models)
    assert placed.spare == 2
    assert (np.asarray(placed.hosts) != homes).any()
    with pytest.raises(SettingsError, match=r"of these models it must hold .* = \(3, 4, "):
        starting_placement(config, own, num_models=3)


def test_what_would_not_pay_back_is_left():
    runner = Noting()
    mover = mover_of(runner, copy_s=60.0)  # as long as all that it could save
    for now in range(40):
        read(mover, skewed(), float(now))
        mover.advance(float(now))
    assert not runner.told


def test_a_device_that_is_seldom_busy_is_left_alone():
    """It is busy for one ms in ten seconds: less than a copy takes."""
    told = []
    for took_s in (0.0001, 5.0):
        runner = Noting()
        mover = mover_of(runner, copy_s=0.01)
        for now in range(0, 40, 5):
            read(mover, skewed(), float(now), took_s)
            mover.advance(float(now))
        told.append(len(runner.told))
    assert told == [0, 1]


def test_old_load_counts_half_after_the_half_life():
    mover = mover_of(Noting())
    read(mover, np.full((LAYERS, EXPERTS), 8), 0.0)
    read(mover, np.zeros((LAYERS, EXPERTS)), 60.0)
    np.testing.assert_allclose(mover.load, 4)


def test_a_move_that_fails_is_told_and_the_last(caplog):
    mover = mover_of(Noting(fails=True))
    for now in range(40):
        read(mover, skewed(), float(now))
        mover.advance(float(now))
    assert mover.failure == "RuntimeError: out of memory"
    assert caplog.text.count("copies of MoE layer 1's experts could not be moved") == 1
    assert mover.experts_copied == 0
    assert (mover.hosts.sum(-1) == 1).all()


def test_load_is_kept_over_a_restart(tmp_path):
    file = str(tmp_path / "load.npy")
    mover = mover_of(Noting(), load_file=file)
    load = skewed() + np.arange(EXPERTS)  # no ties: they are kept with fewer digits
    for now in range(20):
        read(mover, load, float(now))
        mover.advance(float(now))
    config = BalanceConfig(spare_slots=1, load_file=file)
    placement = starting_placement(config, contiguous(LAYERS, EXPERTS, DEVICES))
    np.testing.assert_array_equal(placement.hosts[1], mover.hosts[1])
    assert placement.hosts[1, 2].all()
    assert Mover(config, Noting(), placement, 0.0).load[1, 2] > 100
    assert [path.name for path in tmp_path.iterdir()] == ["load.npy"]


def test_a_load_that_needs_no_copies_leaves_one_slot_that_a_later_load_may_need(tmp_path):
    """Without any there is no mover, and nobody would store another load."""
    config = BalanceConfig(spare_slots="auto", load_file=str(tmp_path / "load.npy"))
    np.save(config.load_file, np.ones((LAYERS, EXPERTS), np.float32))
    for fits, spare in ((0, 0), (1, 1), (3, 1)):
        own = contiguous(LAYERS, EXPERTS, DEVICES)
        placement = starting_placement(config, own, lambda n=fits: n)
        assert placement.spare == spare


AUTO = BalanceConfig(spare_slots="auto")


def test_auto_takes_what_is_forecast_or_fits():
    def placed(fits):
        found = starting_placement(AUTO, contiguous(LAYERS, EXPERTS, DEVICES), lambda: fits)
        assert found.room == 2 + found.spare  # of eight experts on four devices
        return found.spare

    assert [placed(fits) for fits in (0, 1, 2, 5)] == [0, 1, SPARE, SPARE]


def test_auto_counts_what_gains_by_the_load_that_was_stored(tmp_path, caplog):
    """One of eight experts is busy: a slot on each device levels it."""
    caplog.set_level("INFO")
    config = replace(AUTO, load_file=str(tmp_path / "load.npy"))
    place = partial(starting_placement, config, contiguous(LAYERS, EXPERTS, DEVICES))
    assert place(spare_that_fits=lambda: 5).spare == SPARE  # no server has stored any
    assert "2 a layer and device, by forecast; memory has room for 5" in caplog.text
    np.save(tmp_path / "load.npy", np.array([[0.0, 0, 8, 0, 0, 0, 0, 0]] * LAYERS))
    found = place(spare_that_fits=lambda: 5)
    assert found.spare == 1
    assert found.hosts[:, 2].all()
    assert "1 a layer and device, by what earlier servers saw" in caplog.text
    assert place(spare_that_fits=lambda: 0).spare == 0


class FakeFamily(list):
    """Models over a mesh, one by itself unless they are spread."""

    def __init__(self, models, home, spread=None):
        super().__init__(models)
        self.home, self.spread = home, spread


def test_the_mover_fills_the_slots_that_auto_took():
    executor, home = Noting(), partial(contiguous, LAYERS, EXPERTS, DEVICES)
    mover = Mover(AUTO, executor, home(spare=1), 0.0)
    read(mover, skewed(), 0.0)
    for now in range(20):
        mover.advance(float(now))
    assert executor.told[0][1].sum() == EXPERTS + DEVICES
    for spare, wanted in ((0, False), (1, True)):
        there = SimpleNamespace(placement=home(spare=spare), spare=spare)
        family = FakeFamily([SimpleNamespace(num_united_slots=0)], there)
        executor.copy_s = 0.0
        assert (make_mover(AUTO, executor, family) is not None) is wanted
    own, numbers = family_placed(models=2, experts=8, devices=4, shared=0.5, united=2)
    there = SimpleNamespace(placement=with_spare(own, 1), spare=1)
    spread = SimpleNamespace(own=np.asarray(own.hosts), numbers=numbers)
    mover = make_mover(AUTO, executor, FakeFamily([None, None], there, spread))
    assert mover.load.shape == (LAYERS, 3, own.hosts.shape[1])


PLACES = """
import sys
import jax
import numpy as np
from jmoe.parallel.placement import contiguous
from serving.config import BalanceConfig
from serving.control.mover import starting_placement

address, index, file, kept, spare = sys.argv[1:]
jax.distributed.initialize(address, 2, int(index))
config = BalanceConfig(spare_slots="auto" if spare == "auto" else int(spare), load_file=file)
placed = starting_placement(config, contiguous(3, 8, 4), lambda: 3)
np.savez(kept, hosts=placed.hosts, room=placed.room)
jax.distributed.shutdown()
"""


@pytest.mark.deep
@pytest.mark.parametrize("spare", [1, "auto"])
def test_two_processes_place_experts_by_the_file_of_process_0(tmp_path, spare):
    np.save(tmp_path / "load0.npy", skewed())
    np.save(tmp_path / "load1.npy", skewed()[::-1, ::-1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    placing = []
    for index in range(2):
        files = tmp_path / f"load{index}.npy", tmp_path / f"hosts{index}.npz"
        command = [sys.executable, "-c", PLACES, address, index, *files, spare]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
        root = Path(__file__).parents[3]
        placing.append(subprocess.Popen(list(map(str, command)), cwd=root, env=environment))
    try:
        assert [one.wait(120) for one in placing] == [0, 0]
    finally:
        for one in placing:
            one.kill()
    config = BalanceConfig(spare_slots=spare, load_file=str(tmp_path / "load0.npy"))
    place = partial(starting_placement, config, contiguous(LAYERS, EXPERTS, DEVICES))
    wanted = place(spare_that_fits=lambda: 3)
    assert wanted.hosts[1, 2].all()
    assert wanted.spare > 0
    for index in range(2):
        found = np.load(tmp_path / f"hosts{index}.npz")
        np.testing.assert_array_equal(found["hosts"], wanted.hosts)
        assert found["room"] == wanted.room


def test_a_load_file_that_is_none_is_refused(tmp_path):
    config = BalanceConfig(spare_slots=1, load_file=str(tmp_path / "load.npy"))
    assert read_load(config, (LAYERS, EXPERTS)) is None
    (tmp_path / "load.npy").write_text("no array")
    with pytest.raises(SettingsError, match=r"engine.balance.load_file is .* and cannot be read"):
        read_load(config, (LAYERS, EXPERTS))
    with pytest.raises(SettingsError, match=r"engine.balance.load_file is .* and cannot be read"):
        check_start(EngineConfig(balance=config))
    for none in (np.array(["a"]), np.ones((LAYERS, EXPERTS)) * 1j):
        np.save(tmp_path / "load.npy", none)
        with pytest.raises(SettingsError, match=r"and cannot be read: it holds no table of num"):
            read_load(config)
    for archive in (b"", b"PK\x03\x04 or what begins like one"):
        with (tmp_path / "load.npy").open("wb") as file:
            file.write(archive) if archive else np.savez(file, load=np.ones((LAYERS, EXPERTS)))
        with pytest.raises(SettingsError, match=r"engine.balance.load_file is .* cannot be read"):
            read_load(config)
    np.save(tmp_path / "load.npy", np.ones((2, 2)))
    assert read_load(config) is not None  # of some model
    with pytest.raises(SettingsError, match=r"holds \(2, 2\); of this model it must .*\(3, 8\)"):
        read_load(config, (LAYERS, EXPERTS))
    # Before anybody joins: a process 0 that fails later ends in the crash of jax's own service.
    with pytest.raises(SettingsError, match=r"holds \(2, 2\); of this model it must .*\(5, 90\)"):
        check_start(EngineConfig(mesh="ep=4", balance=config))
    np.save(tmp_path / "load.npy", np.ones((5, 90)))
    check_start(EngineConfig(mesh="ep=4", balance=config))
    lost = BalanceConfig(spare_slots=1, load_file=str(tmp_path / "none" / "load.npy"))
    with pytest.raises(SettingsError, match="there is no folder"):
        read_load(lost, (LAYERS, EXPERTS))


def test_a_file_that_cannot_be_written_is_told_and_nothing_stops(tmp_path, caplog):
    folder = tmp_path / "gone"
    folder.mkdir()
    runner = Noting()
    mover = mover_of(runner, load_file=str(folder / "load.npy"))
    folder.rmdir()
    for now in range(20):
        read(mover, skewed(), float(now))
        mover.advance(float(now))
    assert "engine.balance.load_file could not be written" in caplog.text
    assert runner.told
