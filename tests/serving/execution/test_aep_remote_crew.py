"""The server's view of workers in other processes: who has met whom, who is gone, who is back."""

from queue import SimpleQueue
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from serving.cluster.members import Fact, Join, Refused, Stop, Welcome
from serving.cluster.port import STRANGER, Peer
from serving.config import AsynchronousConfig, EngineConfig
from serving.execution.executor import RankDown, RankUp, WayChanged
from serving.pipeline.messages import FromExperts, HasWay, Left, UseWay, WorkerDown, WorkerUp
from serving.pipeline.queues import MicroQueues
from serving.pipeline.remote_crew import RemoteCrew
from serving.pipeline.worker_process import Beat, Loop, Meet, Met, Pulse
from serving.scheduling.layers.picker import make_picker

ALONE = np.array([[[True, False], [False, True]]])  # each of two experts on a worker of its own
FACTS = {"engine.page_size": "16", "the code of jmoe": "c0de"}
NAMES = ["attention-0", "experts-0", "experts-1"]
NONE = np.zeros((0, 0), np.int32)
BEAT = Beat(1, np.array([2, 3]), 0.5, 0, 0, [])


class FakePort:
    """A port that receives what is put into `coming`, and records what is sent in `sent`."""

    def __init__(self):
        self.peer = SimpleNamespace(name="server", address="tcp://here", incarnation="00" * 16)
        self.coming, self.sent, self.forgotten, self.greeted = [], [], [], []

    def receive(self, timeout_s):
        came, self.coming = self.coming, []
        return came

    def connect(self, peer):
        pass

    def forget(self, name):
        self.forgotten.append(name)
        self.coming = [(sender, message) for sender, message in self.coming if sender != name]

    def send(self, to, message):
        self.sent.append((to, message))

    def greet(self, address, message):
        self.greeted.append(message)

    def gone(self):
        return []

    def wake(self):
        pass

    def unreached(self, limit_s):
        return []


class Setup:
    """A crew of 1 + 2, whose processes do what a test says."""

    host = "here"

    def __init__(self, way=0, **settings):
        own = AsynchronousConfig(attention=1, experts=2, workers="processes", **settings)
        config = EngineConfig(mode="aep", asynchronous=own, join_timeout_s=100.0)
        self.port, self.now, self.told = FakePort(), 0.0, []
        self.processes, self.killed, self.peers = {}, [], {}
        limits = SimpleNamespace(num_ranks=1)
        self.crew = RemoteCrew(
            *(config, limits, ALONE, self, bytes(32), FACTS, 0, way),
            make_port=lambda *_: self.port,
            clock=lambda: self.now,
        )
        self.crew.listen(self.told.append)
        self.crew.open()

    # as a Starter
    def start(self, assignment, ended):
        assert assignment.name not in self.processes, "it runs already"
        self.processes[assignment.name] = ended

    def kill(self, name):
        self.killed.append(name)
        self.processes.pop(name, None)

    # as processes
    def listens(self, *names):
        for name in names:
            number = len(self.peers) + len(self.told) + len(self.port.sent)
            self.peers[name] = Peer(name, "tcp://there", f"{number:032x}")
            assert self.joins(name) == Welcome(f"{number:032x}", "00" * 16)

    def joins(self, name, facts=FACTS, incarnation=None):
        """A process asks to join in a worker's place; returns the answer."""
        own = incarnation or self.peers[name].incarnation
        facts = [Fact(*fact) for fact in facts.items()]
        self.says(STRANGER, Join(NAMES.index(name), "tcp://there", own, facts))
        return self.port.greeted.pop()

    def dies(self, name):
        self.processes.pop(name)("its process ended with signal 9")
        self.crew.members.turn()

    def met(self, name, *others):
        self.says(name, Met([self.peers[other].incarnation for other in others]))

    def says(self, name, message):
        self.port.coming.append((name, message))
        self.crew.members.turn()

    def passes(self, seconds, *beating, hanging=(), unreached=()):
        """Lets time pass, in which workers send beats, some without progress (`hanging`); attention
        does not reach the expert workers in `unreached`.
        """
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            for name in beating:
                beat = BEAT._replace(unreached=list(unreached) if "attention" in name else [])
                beat = beat if name in hanging else beat._replace(progress=round(2 * self.now))
                self.port.coming.append((name, beat))
            self.crew.members.turn()

    def made(self, change, *names):
        for name in names:
            self.says(name, HasWay(change))

    def change(self, way):
        self.port.sent.clear()
        self.crew.change_way(way)
        self.crew.members.turn()

    def all_up(self, way=0):
        self.listens("attention-0", "experts-0", "experts-1")
        if way:
            self.made(1, "attention-0", "experts-0", "experts-1")
        self.met("attention-0", "experts-0", "experts-1")
        self.met("experts-0", "attention-0")
        self.met("experts-1", "attention-0")
        assert self.up == ["attention-0", "experts-0", "experts-1"]
        self.port.sent.clear()
        return self

    @property
    def up(self):
        return [seen.name for seen in self.crew.seen() if seen.is_up]

    def sent_to(self, name, *kinds):
        return [message for to, message in self.port.sent if to == name and type(message) in kinds]


def test_workers_are_up_once_both_ends_have_met():
    setup = Setup()
    setup.listens("attention-0", "experts-0", "experts-1")
    met = [[p.name for p in m.peers] for m in setup.sent_to("attention-0", Meet)]
    assert met == [[], ["experts-0"], ["experts-1"]]
    setup.met("attention-0", "experts-0", "experts-1")
    setup.met("experts-0", "attention-0")
    assert setup.up == ["experts-0"]  # attention waits for the other
    setup.met("experts-1", "attention-0")
    assert setup.up == ["attention-0", "experts-0", "experts-1"]


def test_an_expert_worker_that_ends_is_told_of_and_comes_back():
    setup = Setup().all_up()
    setup.dies("experts-1")
    assert setup.sent_to("attention-0", WorkerDown) == [WorkerDown("experts", 1)]
    assert setup.port.forgotten == ["experts-1"]
    assert setup.crew.unreachable == "expert 1 of MoE layer 0 is gone with experts-1"
    assert "experts-1" not in setup.processes
    setup.passes(1.5, "attention-0", "experts-0")
    assert "experts-1" in setup.processes  # after a second
    setup.listens("experts-1")
    setup.met("attention-0", "experts-1")
    assert not setup.sent_to("attention-0", WorkerUp)
    setup.met("experts-1", "attention-0")
    assert setup.sent_to("attention-0", WorkerUp) == [WorkerUp("experts", 1)]
    assert setup.crew.unreachable == ""


def test_the_engine_hears_of_attention_workers_and_of_what_left():
    setup = Setup().all_up()
    left = Left([1], [2], [0.0], [0], np.zeros(0), 0, [100], [100], NONE, NONE, NONE)
    setup.says("attention-0", left)
    setup.dies("attention-0")
    done, down = setup.told
    assert (done.rows, done.result.tokens, done.least_percent) == ([1], [2], [100])
    assert down == RankDown(0, "worker attention-0 is gone")
    assert setup.sent_to("experts-0", WorkerDown) == [WorkerDown("attention", 0)]
    setup.passes(1.5, "experts-0", "experts-1")
    setup.listens("attention-0")
    setup.port.sent.clear()
    setup.met("attention-0", "experts-0", "experts-1")
    setup.met("experts-0", "attention-0")
    setup.met("experts-1", "attention-0")
    assert setup.told[-1] == RankUp(0)


def test_who_comes_back_hears_how_all_others_are_now():
    """Experts end and return while it still loads: the news of their end waits for it."""
    setup = Setup().all_up()
    setup.dies("attention-0")
    setup.passes(1.5, "experts-0", "experts-1")
    setup.listens("attention-0")
    setup.dies("experts-1")
    setup.dies("experts-0")
    setup.passes(1.5)
    setup.listens("experts-1", "experts-0")
    setup.met("attention-0", "experts-0", "experts-1")
    setup.met("experts-1", "attention-0")
    setup.met("experts-0", "attention-0")
    assert len(setup.up) == 3
    newest = {}
    for news in setup.sent_to("attention-0", WorkerDown, WorkerUp):
        newest[news.number] = type(news)
    assert newest == {0: WorkerUp, 1: WorkerUp}


def test_a_way_has_changed_once_every_worker_has_it():
    setup = Setup(2).all_up(2)
    setup.change(4)
    assert {to for to, message in setup.port.sent if message == UseWay(4, 2)} == set(setup.up)
    setup.made(2, "attention-0", "experts-1")
    assert not setup.told
    setup.made(2, "experts-0")
    assert setup.told == [WayChanged(4)]
    setup.change(2)
    setup.made(3, "experts-0", "experts-1", "attention-0")
    assert setup.told == [WayChanged(4), WayChanged(2)]
    assert len(setup.up) == 3


@pytest.mark.parametrize("says_so", [True, False])
def test_a_worker_that_ends_as_the_way_changes_is_not_waited_for(says_so):
    """It comes back with the way in force, whatever it started with."""
    setup = Setup(2).all_up(2)
    setup.change(4)
    setup.made(2, "attention-0", "experts-0")
    if says_so:
        setup.made(2, "experts-1")
    setup.dies("experts-1")
    assert setup.told == [WayChanged(4)]
    setup.passes(1.5, "attention-0", "experts-0")
    setup.listens("experts-1")
    kinds = [type(message) for message in setup.sent_to("experts-1", UseWay, Meet)]
    assert kinds[-2:] == [UseWay, Meet]  # in this order
    assert setup.sent_to("experts-1", UseWay)[-1] == UseWay(4, 2)
    setup.met("attention-0", "experts-1")
    setup.met("experts-1", "attention-0")
    assert "experts-1" not in setup.up
    setup.made(2, "experts-1")
    assert setup.sent_to("attention-0", WorkerUp) == [WorkerUp("experts", 1)]


@pytest.mark.parametrize("first", ["attention-0", "experts-0"])
def test_who_loads_as_the_way_changes_is_up_once_it_has_both(first):
    """Nobody waits for it, and nothing is sent to it, or by it, before."""
    setup = Setup(2).all_up(2)
    setup.dies(first)
    setup.passes(1.5, *setup.up)
    setup.listens(first)
    others = [name for name in ("attention-0", "experts-0", "experts-1") if name != first]
    setup.change(4)
    setup.made(2, *others)
    assert setup.told[-1] == WayChanged(4)
    setup.made(1, first)
    for name in others:
        if name.split("-")[0] != first.split("-")[0]:
            setup.met(first, name)
            setup.met(name, first)
    setup.met("attention-0", "experts-0", "experts-1")
    assert first not in setup.up
    setup.made(2, first)
    assert first in setup.up


def test_who_loads_during_changes_there_and_back_is_up_after_the_last():
    setup = Setup(2).all_up(2)
    setup.dies("experts-1")
    setup.passes(1.5, "attention-0", "experts-0")
    setup.listens("experts-1")
    for change, way in ((2, 4), (3, 2)):
        setup.change(way)
        setup.made(change, "attention-0", "experts-0")
    setup.met("attention-0", "experts-1")
    setup.made(1, "experts-1")  # of the same way as the third
    setup.met("experts-1", "attention-0")
    setup.made(2, "experts-1")
    assert "experts-1" not in setup.up
    setup.made(3, "experts-1")
    assert "experts-1" in setup.up


def test_who_comes_back_waits_until_those_that_it_met_have_the_way():
    """Otherwise its rows might reach experts before what the server told them."""
    setup = Setup(2).all_up(2)
    setup.dies("attention-0")
    setup.dies("experts-0")
    setup.passes(1.5, "experts-1")
    setup.listens("experts-0", "attention-0")
    setup.change(4)
    setup.made(2, "experts-1", "attention-0")
    setup.met("attention-0", "experts-0", "experts-1")
    setup.met("experts-1", "attention-0")
    setup.made(1, "experts-0")
    setup.met("experts-0", "attention-0")
    assert setup.up == ["experts-1"]
    setup.made(2, "experts-0")
    assert len(setup.up) == 3


def test_a_silent_worker_is_killed_and_replaced():
    setup = Setup(worker_timeout_s=4.0).all_up()
    setup.passes(3.5, "attention-0", "experts-0")
    assert not setup.killed
    setup.passes(2.0, "attention-0", "experts-0")
    assert setup.killed == ["experts-1"]
    assert setup.sent_to("attention-0", WorkerDown) == [WorkerDown("experts", 1)]
    setup.passes(1.5, "attention-0", "experts-0")
    assert "experts-1" in setup.processes


def test_one_that_gives_signs_of_life_and_gets_nothing_done_has_longer_and_is_replaced():
    setup, all_names = (
        Setup(worker_timeout_s=4.0).all_up(),
        ("attention-0", "experts-0", "experts-1"),
    )
    setup.passes(15.0, *all_names, hanging=["experts-1"])
    assert not setup.killed
    setup.passes(3.0, *all_names, hanging=["experts-1"])
    assert setup.killed == ["experts-1"]
    assert setup.sent_to("attention-0", WorkerDown) == [WorkerDown("experts", 1)]


@pytest.mark.parametrize("hanging", [[], ["experts-1"]])
def test_of_two_that_live_and_do_not_hear_each_other_the_expert_worker_is_replaced(hanging):
    """Not before it makes progress, and has had the time to acknowledge what came."""
    setup, all_names = (
        Setup(worker_timeout_s=4.0).all_up(),
        ("attention-0", "experts-0", "experts-1"),
    )
    setup.passes(1.5, *all_names, unreached=["experts-1"])
    setup.passes(1.5, *all_names)
    setup.passes(5.0, *all_names, unreached=["experts-1"], hanging=hanging)
    assert setup.killed == ([] if hanging else ["experts-1"])


def test_one_that_gets_on_with_loading_is_waited_for():
    setup = Setup().all_up()
    setup.dies("experts-1")
    setup.passes(1.5, "attention-0", "experts-0")
    setup.listens("experts-1")
    setup.passes(150.0, "attention-0", "experts-0", "experts-1")
    assert not setup.killed
    setup.passes(101.0, "attention-0", "experts-0", "experts-1", hanging=["experts-1"])
    assert setup.killed == ["experts-1"]


def test_nobody_is_taken_for_silent_while_the_server_itself_was_held_up():
    setup = Setup(worker_timeout_s=4.0).all_up()
    setup.now += 60.0
    setup.crew.members.turn()
    assert not setup.killed
    assert len(setup.up) == 3


def test_one_that_hangs_as_it_loads_is_killed_and_started_once_more():
    setup = Setup().all_up()
    setup.dies("experts-1")
    setup.passes(1.5, "attention-0", "experts-0")
    setup.listens("experts-1")
    setup.passes(101.0, "attention-0", "experts-0")
    assert setup.killed == ["experts-1"]
    setup.passes(3.0, "attention-0", "experts-0")
    assert "experts-1" in setup.processes


def test_one_that_keeps_ending_is_started_less_and_less_often():
    setup, starts = Setup().all_up(), []
    for _ in range(7):
        setup.dies("experts-1")
        began = setup.now
        while "experts-1" not in setup.processes:
            setup.passes(0.5, "attention-0", "experts-0")
        starts.append(setup.now - began)
    assert starts == pytest.approx([1, 2, 4, 8, 16, 30, 30], abs=0.6)


@pytest.mark.parametrize("name", FACTS)
def test_a_process_that_is_not_alike_is_refused_by_name_and_another_may_come(name):
    """The others go on; who was refused ends by itself, and is started again."""
    setup = Setup().all_up()
    setup.dies("experts-1")
    setup.passes(1.5, "attention-0", "experts-0")
    wanted = f"{name} is other in experts-1 and {FACTS[name]} in server; it has to be alike"
    answer = setup.joins("experts-1", FACTS | {name: "other"}, "ab" * 16)
    assert isinstance(answer, Refused)
    assert answer.to == "ab" * 16
    assert answer.reason.startswith(wanted)
    assert setup.up == ["attention-0", "experts-0"]
    assert not setup.sent_to("experts-1", Meet)
    setup.dies("experts-1")
    setup.passes(2.5, "attention-0", "experts-0")
    setup.listens("experts-1")
    setup.met("attention-0", "experts-1")
    setup.met("experts-1", "attention-0")
    assert len(setup.up) == 3
    again = setup.joins("experts-1", FACTS, "cd" * 16)
    assert again == Refused(
        "cd" * 16, "experts-1 has joined already; give each process a number of its own", False
    )
    assert len(setup.up) == 3


def test_who_joins_in_the_place_of_a_worker_that_is_not_started_is_not_answered():
    setup = Setup().all_up()
    setup.dies("experts-1")
    facts = [Fact(*fact) for fact in FACTS.items()]
    for index in (2, 3, -1, 2**63):
        setup.says(STRANGER, Join(index, "tcp://there", "ab" * 16, facts))
    assert not setup.port.greeted
    assert setup.up == ["attention-0", "experts-0"]


def test_metrics_have_what_workers_said_last():
    setup = Setup().all_up()
    setup.says("experts-0", BEAT)
    assert [seen.rows for seen in setup.crew.seen()] == [0, 5, 0]
    assert setup.crew.seen()[1].oldest_s == 0.5


class FakeWorker:
    """A worker that stores what it is given."""

    stages = 0
    queues = MicroQueues(1, 1, make_picker("mtfs"))

    def __init__(self):
        self.taken = []

    def take(self, message, now):
        self.taken.append(message)

    def advance(self, now):
        return False


def test_signs_of_life_come_though_a_process_is_busy_and_say_whether_it_gets_on():
    told = SimpleQueue()
    pulse = Pulse(told.put)
    pulse.start()
    try:
        first = told.get(timeout=10)
        pulse.get_on("loading", 1, 2)
        jax.jit(lambda x: 3 * x - 1)(1.0)  # compiles
        second = pulse.beat()
        pulse.has(FakeWorker())
        third = pulse.beat()
    finally:
        pulse.stop()
    assert second.progress >= first.progress + 2
    assert third.progress == second.progress
    assert third.compilations == 0


def test_a_process_says_that_it_has_a_way_behind_what_it_was_told_before():
    port, worker = FakePort(), FakeWorker()
    met = Meet([Peer("experts-1", "tcp://there", "ab" * 16)])
    port.coming = [("server", UseWay(4, 7)), ("server", met), ("server", Stop())]
    Loop("attention-0", port, worker, Pulse(print)).run()
    assert worker.taken == [UseWay(4, 7)]
    assert port.sent == [("server", HasWay(7)), ("server", Met(["ab" * 16]))]


@pytest.mark.parametrize("news", ["down", "meet"])
def test_what_a_former_process_sent_is_not_taken_behind_the_news_of_its_end(news):
    """It may stand in one batch with it: a port forgets what is to come, not what has come."""
    parts = [FromExperts(1, None, np.arange(n), np.arange(n)) for n in range(3)]
    port, worker = FakePort(), FakeWorker()
    told = WorkerDown("experts", 1)
    if news == "meet":
        told = Meet([Peer("experts-1", "tcp://there", "ab" * 16)])
    port.coming = [
        ("experts-1", parts[0]),
        ("server", told),
        ("experts-1", parts[1]),
        ("experts-0", parts[2]),
        ("server", Stop()),
    ]
    Loop("attention-0", port, worker, Pulse(print)).run()
    taken = [message for message in worker.taken if isinstance(message, FromExperts)]
    assert [message is part for message, part in zip(taken, [parts[0], parts[2]], strict=True)] == [
        True,
        True,
    ]


def test_a_worker_whose_server_is_silent_ends(monkeypatch):
    clock = iter(range(1000))
    fake = SimpleNamespace(monotonic=lambda: 0.2 * next(clock))
    monkeypatch.setattr("serving.pipeline.worker_process.time", fake)
    with pytest.raises(TimeoutError, match="nothing came from the server for 5 s"):
        Loop("attention-0", FakePort(), FakeWorker(), Pulse(print), 5.0).run()
