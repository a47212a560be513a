"""Process 0 and its followers over a real socket, in threads of one process."""

import contextlib
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from serving.cluster import followers, members
from serving.cluster.followers import Followers, Leader
from serving.cluster.wire import Wire
from serving.errors import Lost, PeerLost, SettingsError, Unavailable
from serving.execution.buckets import Key
from serving.execution.replay import (
    CALLS,
    Led,
    Numbers,
    Ready,
    Seat,
    UseWay,
    Warm,
    replay,
    to_arrays,
    to_message,
)

pytestmark = pytest.mark.usefixtures("processes_meet_at_once")

FACTS = {"engine.page_size": "16"}
ROWS = np.arange(-6, 12, dtype=np.int32).reshape(2, 9)
PART = Key("prefill", 128, 100, 2, 4)


class Recorder:
    """Writes down what it is asked to do."""

    def __init__(self):
        self.made = []

    def compile(self, keys, progress=None):
        self.made.append(("compile", list(keys)))

    def warm(self, key):
        self.made.append(("warm", key))

    def run(self, key, arrays, *, models=(0,), score=False, sample=False):
        self.made.append(("run", key, [a.tolist() for a in arrays], score, sample))
        assert all(a.dtype == np.int32 for a in arrays)

    def seat(self, rank, told):
        self.made.append(("seat", rank, told.tolist()))

    def draw(self, shapes, limited, allowed):
        self.made.append(("draw", shapes.tolist(), limited.tolist(), allowed.tolist()))

    def use_way(self, way):
        self.made.append(("use_way", way))

    def load_way(self, way, layer):
        self.made.append(("load_way", way, layer))

    def host_layer(self, layer, hosts):
        self.made.append(("host_layer", layer, hosts.tolist()))

    def ready(self):
        self.made.append(("ready",))


@contextmanager
def leading(count=2, facts=FACTS, timeout_s=30.0):
    leader = Followers("127.0.0.1:0", count, facts, peer_timeout_s=timeout_s)
    try:
        yield leader
    finally:
        leader.close(stop=False)


def follower(leader, index=1, facts=FACTS, timeout_s=30.0):
    address = f"127.0.0.1:{leader.port}"
    return Leader(address, index, facts, peer_timeout_s=timeout_s)


@contextmanager
def joined(count=2, timeout_s=30.0):
    """Process 0 and the others, which have joined.

    A pool of threads that wait for any of them has to be entered before: its end waits for the
    threads, and they for process 0 or their follower to be closed.
    """
    with ThreadPoolExecutor(count) as pool, leading(count, timeout_s=timeout_s) as leader:
        others = [follower(leader, index) for index in range(1, count)]
        joins = [pool.submit(other.join, 60) for other in others]
        leader.wait_for_all(60)
        leader.begin("10.0.0.1:7001")
        assert {join.result() for join in joins} == {"10.0.0.1:7001"}
        try:
            yield leader, *others
        finally:
            for other in others:
                other.close()


def reason(lost):
    """Why it is lost, once it is."""
    told: Future[str] = Future()
    lost.watch(told.set_result)
    return told.result(60)


def test_followers_make_the_calls_of_process_0_in_their_order():
    here, there = Recorder(), [Recorder(), Recorder()]
    with ThreadPoolExecutor(2) as pool, joined(3) as (leader, *others):
        jobs = [pool.submit(replay, d, o.calls()) for d, o in zip(there, others, strict=True)]
        led = Led(here, leader)
        led.compile([PART, Key("sample", 8, 100)])
        led.warm(PART)
        led.use_way(4)
        for n in range(50):
            led.run(PART, [ROWS + n, np.zeros((0, 3), np.int32)], score=n % 2 == 0, sample=True)
        led.load_way(2, 3)
        led.run(PART, [ROWS])
        led.seat(3, ROWS[:1])
        led.draw(ROWS[:, :5], ROWS[0], ROWS)
        led.ready()
        leader.close()
        for job in jobs:
            job.result(60)
        assert not leader.lost.reason
        assert not any(other.lost.reason for other in others)
    assert len(here.made) == 58
    assert here.made == there[0].made == there[1].made


def test_what_has_to_be_alike_is_refused_by_name_and_may_come_again():
    with ThreadPoolExecutor(1) as pool, leading() as leader:
        with pytest.raises(SettingsError, match=r"engine.page_size differs from process 0's"):
            follower(leader, facts={"engine.page_size": "32"}).join(60)
        with pytest.raises(
            SettingsError, match=r"engine.process_index is 2; .* below engine.num_processes"
        ):
            follower(leader, index=2).join(60)
        right = follower(leader)
        join = pool.submit(right.join, 60)
        leader.wait_for_all(60)
        with pytest.raises(SettingsError, match="process 1 of 2 has joined already"):
            follower(leader, timeout_s=0.5).join(60)
        leader.begin("there:1")
        assert join.result() == "there:1"
        right.close()


def test_who_comes_back_before_its_own_death_is_noticed_is_not_taken_for_another():
    """It asks until process 0 has missed the one before, and finds the next process 0."""
    with ThreadPoolExecutor(1) as pool, leading(timeout_s=1.0) as leader:
        there = f"127.0.0.1:{leader.port}"
        before = followers._port_of("process 1", "127.0.0.1", 0, None)
        members.join(before, "process 0", f"tcp://{there}", 1, FACTS, 60)
        right = follower(leader)  # the one before says nothing more
        again = pool.submit(right.join, 60)
        assert "process 1 of 2 is gone" in reason(leader.lost)
        leader.close(stop=False)
        with contextlib.closing(Followers(there, 2, FACTS, peer_timeout_s=30)) as after:
            after.wait_for_all(60)
            after.begin("there:2")
            assert again.result(60) == "there:2"
            right.close()
        before.close()


def test_who_does_not_come_is_named():
    with ThreadPoolExecutor(1) as pool, leading(4) as leader:
        other = follower(leader, 2)
        join = pool.submit(other.join, 60)
        with leader._changed:
            assert leader._changed.wait_for(lambda: leader._joined, 60)
        with pytest.raises(Unavailable, match=r"of 4 processes, 1, 3 did not join .*index 1, and"):
            leader.wait_for_all(0.01)
        leader.close(stop=False)
        with pytest.raises(PeerLost, match=r"process 0 at .* is gone"):
            join.result()


def test_process_0_may_be_missing():
    with leading() as leader:
        nobody = follower(leader)
    with pytest.raises(Unavailable, match=r"process 0 did not answer at .* start it with"):
        nobody.join(0.05)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(SettingsError, match=r"engine.coordinator is '192.0.2.1:7000', and this"):
        Followers("192.0.2.1:7000", 2, FACTS, peer_timeout_s=30)


def test_a_follower_that_is_gone_is_named_at_once_and_calls_are_refused():
    with joined(3) as (leader, one, two):
        two._members.close(0.0)  # as if its process had died
        assert reason(leader.lost) == (
            "process 2 of 3 is gone; start all of them again (nobody listens there any more)"
        )
        with pytest.raises(PeerLost, match="process 2 of 3"):
            leader.call(Ready())
        leader.close(stop=False)
        assert "process 0 at 127.0.0.1" in reason(one.lost)


def test_a_follower_that_fails_says_why():
    with joined() as (leader, other):
        other.fail("CheckpointError: weights that are not finite")
        assert reason(leader.lost) == (
            "process 1 of 2 failed: CheckpointError: weights that are not finite"
        )
        assert not other.lost.reason


def test_a_failed_leader_is_no_stopped_one():
    with joined() as (leader, other):
        leader.call(UseWay(4))
        calls = other.calls()
        assert next(calls) == UseWay(4)
        leader.close(stop=False)
        with pytest.raises(PeerLost, match="is gone; start all processes again"):
            next(calls)
        assert "is gone; start all processes again" in reason(other.lost)


def test_whoever_closes_waits_for_no_further_call():
    with ThreadPoolExecutor(1) as pool, joined() as (leader, other):
        leader.call(UseWay(4))
        calls = other.calls()
        assert next(calls) == UseWay(4)
        rest = pool.submit(list, calls)
        other.close()
        assert rest.result(60) == []
        assert not other.lost.reason


@pytest.mark.parametrize("silent", ["the follower", "process 0"])
def test_a_silent_end_is_noticed_within_the_time(silent):
    """Its connections stay, as of a process that is stopped."""
    with joined(timeout_s=1.0) as (leader, other):
        held, over = threading.Event(), threading.Event()

        def hold():
            held.set()
            over.wait(60)

        quiet, notices = (leader, other) if silent == "process 0" else (other, leader)
        notices._members._heard.silence_s = 1.0
        quiet._members.do(hold)
        assert held.wait(60)
        began = time.monotonic()
        assert "is gone" in reason(notices.lost)
        assert time.monotonic() - began < 2.5
        over.set()


def test_who_is_held_up_itself_does_not_take_others_for_gone():
    with joined(timeout_s=1.0) as (leader, other):
        assert not leader.lost.reason
        leader._members._heard.silence_s = 1.0
        leader._members.do(lambda: time.sleep(1.2))
        leader.call(UseWay(4))
        assert next(other.calls()) == UseWay(4)
        assert not leader.lost.reason


def test_calls_that_a_process_does_not_take_are_bounded(monkeypatch):
    monkeypatch.setattr("serving.cluster.followers.MOST_CALLS", 20)
    with joined() as (leader, other):
        for number in range(22):
            leader.call(UseWay(number))
        assert reason(leader.lost) == "process 1 of 2 failed: 20 calls wait here"
    with joined() as (leader, other):
        over = threading.Event()
        other._members.do(lambda: over.wait(60))
        sent = 0
        while not leader.lost.reason and sent < 200_000:
            leader._members.tell(UseWay(sent))
            sent += 1
        assert "process 1 of 2 is gone; start all of them again (PeerBehind: 20" in reason(
            leader.lost
        )
        over.set()


def test_a_start_that_hangs_ends_with_the_process_it_waits_for():
    lost, hangs, for_ever = Lost(), threading.Event(), threading.Event()

    def start():
        hangs.set()
        for_ever.wait()

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(lost.unless, start)
        try:
            assert hangs.wait(60)
            lost.say("process 1 of 2 is gone")
            lost.say("what comes of that")
            with pytest.raises(PeerLost, match="process 1 of 2 is gone"):
                job.result(60)
        finally:
            for_ever.set()
    assert Lost().unless(lambda: 7) == 7


def test_a_fault_has_its_own_name_or_that_of_the_process_it_comes_of(monkeypatch):
    def fail(error):
        raise error

    lost = Lost()
    with pytest.raises(ValueError, match="bad input"):  # without waiting
        lost.named(lambda: fail(ValueError("bad input")))
    monkeypatch.setattr("serving.errors.NAMED_WITHIN_S", 0.0)
    with pytest.raises(RuntimeError, match="of its own"):
        lost.named(lambda: fail(RuntimeError("of its own")))
    lost.say("process 1 of 2 is gone")
    with pytest.raises(PeerLost, match="process 1 of 2 is gone"):
        lost.named(lambda: fail(RuntimeError("a collective broke")))


@pytest.mark.parametrize("key", [PART, Key("prefill", 32, 40, copies=False)])
def test_keys_travel(key):
    assert sent(Warm(key)) == Warm(key)


def sent(call):
    """Returns what a call is at the other end."""
    wire = Wire(CALLS)
    frames = [bytes(frame) for frame in wire.encode(call)]
    return wire.decode(frames)


def test_arrays_travel_and_what_is_none_is_refused():
    for array in (ROWS, ROWS.T, ROWS[0], np.zeros((0, 3), np.int32)):
        there = to_arrays(sent(Seat(0, to_message(array, ROWS))).told)[0]
        assert there.dtype == np.int32
        np.testing.assert_array_equal(there, array)
    with pytest.raises(TypeError, match="float64"):
        to_message(np.zeros(3))
    with pytest.raises(ValueError, match="reshape"):
        to_arrays(Numbers([1], [3], np.zeros(2, np.int32)))
    for sizes in ([1], [-1], []):
        with pytest.raises(ValueError, match=r"in none|reshape|negative"):
            to_arrays(Numbers([1], sizes, np.zeros(2, np.int32)))
    with pytest.raises(ValueError, match="not known here"):
        replay(Recorder(), [None])
