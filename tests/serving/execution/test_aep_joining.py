"""Workers join a crew over real sockets, in threads, with what has to be alike."""

import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from serving.cluster import hosts
from serving.config import AsynchronousConfig, EngineConfig
from serving.errors import SettingsError, Unavailable
from serving.pipeline.queues import MicroQueues
from serving.pipeline.remote_crew import RemoteCrew
from serving.pipeline.worker_process import Assignment, work
from serving.scheduling.layers.picker import make_picker

pytestmark = pytest.mark.usefixtures("processes_meet_at_once")

CONFIG = EngineConfig(
    mode="aep", asynchronous=AsynchronousConfig(attention=1, experts=2, workers="processes")
)
ALONE = np.array([[[True, False], [False, True]]])
KEY, SOON_S = bytes(range(32)), 60.0


class Idle:
    """A worker without rows, which ends when it is told to."""

    stages, queues = 0, MicroQueues(1, 1, make_picker("mtfs"))

    def __init__(self, ends):
        self._ends = ends

    def take(self, message, now):
        pass

    def advance(self, now):
        if self._ends.is_set():
            raise RuntimeError("as told")


class Threads:
    """A Starter of workers as threads. What `changed` has for a name changes the assignment and the
    facts of its next one, which joins once two others have.
    """

    host = "127.0.0.1"

    def __init__(self, **changed):
        self.changed, self.ends, self.ended, self.running = changed, {}, [], []
        self.joined = set()

    def start(self, assignment, ended):
        own = Assignment.from_json(assignment.to_json())
        facts, change = hosts.facts(own.config), self.changed.pop(own.name.replace("-", "_"), None)
        if change is not None:
            own, facts = change(own, facts)
        self.ends[own.name] = threading.Event()
        args = own, facts, ended, 0 if change is None else 2
        thread = threading.Thread(target=self._work, args=args)
        self.running.append(thread)
        thread.start()

    def _work(self, own, facts, ended, after):
        def make(*_):
            self.joined.add(own.name)
            return Idle(self.ends[own.name])

        reason = "it was told to"
        try:
            until(lambda: len(self.joined) >= after)
            work(own, facts, make, silence_s=SOON_S)
        except Exception as error:
            reason = error
        self.ended.append((own.name, reason))
        ended(f"its thread ended: {type(reason).__name__}")

    def kill(self, name):
        self.ends[name].set()

    def close(self):
        for thread in self.running:
            thread.join(SOON_S)
            assert not thread.is_alive()


def crew_of(starter):
    return RemoteCrew(
        CONFIG, SimpleNamespace(num_ranks=1), ALONE, starter, KEY, hosts.facts(CONFIG)
    )


@contextmanager
def serving(starter):
    crew = crew_of(starter)
    crew.start()
    try:
        yield crew
    finally:
        crew.close()


def until(condition):
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def with_config(own, _, **changes):
    own = replace(own, config=replace(own.config, **changes))
    return own, hosts.facts(own.config)


def older(own, facts):
    return own, facts | {"the code of jmoe": "older"}


@pytest.fixture
def changes(tmp_path):
    """Returns what makes a worker differ, by the fact that then does."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    return {
        "engine.page_size": partial(with_config, page_size=2 * CONFIG.page_size),
        "the model in engine.model": partial(with_config, model=str(tmp_path)),
        "the code of jmoe": older,
    }


def test_all_that_are_alike_join_and_end_with_the_server():
    starter = Threads()
    with serving(starter) as crew:
        assert [seen.is_up for seen in crew.seen()] == [True, True, True]
        assert crew.unreachable == ""
    assert sorted(starter.ended) == [
        (name, "it was told to") for name in ("attention-0", "experts-0", "experts-1")
    ]


@pytest.mark.parametrize(
    "name", ["engine.page_size", "the model in engine.model", "the code of jmoe"]
)
def test_a_start_with_one_that_differs_ends_and_names_what_does(name, changes):
    starter = Threads(experts_1=changes[name])
    with pytest.raises(Unavailable) as failed:
        crew_of(starter).start()
    wanted, got = hosts.facts(CONFIG)[name], rf"{name} is .* in experts-1 and "
    refused = dict(starter.ended)["experts-1"]
    assert isinstance(refused, SettingsError)
    assert failed.match(rf"^workers did not start: worker experts-1: {got}")
    assert str(failed.value).endswith(str(refused))
    assert str(refused).endswith(f" and {wanted} in server; it has to be alike in every process")


def test_one_that_differs_is_refused_alone_and_a_right_one_joins_later(caplog, monkeypatch):
    monkeypatch.setattr("serving.pipeline.remote_crew.LONGEST_PAUSE_S", 2.0)
    starter = Threads()
    with serving(starter) as crew:
        starter.changed["experts_1"] = older
        starter.ends["experts-1"].set()
        until(lambda: len(starter.ended) == 2)
        assert [seen.is_up for seen in crew.seen()] == [True, True, False]
        assert "experts-1" in crew.unreachable
        until(lambda: all(seen.is_up for seen in crew.seen()))
    died, refused = starter.ended[:2]
    assert died[0] == refused[0] == "experts-1"
    assert isinstance(refused[1], SettingsError)
    assert f"worker experts-1 is gone: {refused[1]}; another is started in 2 s" in caplog.text
    assert str(refused[1]).startswith("the code of jmoe is older in experts-1 and ")
    assert sorted(who for who, _ in starter.ended[2:]) == ["attention-0", "experts-0", "experts-1"]


def test_without_the_secret_a_worker_neither_joins_nor_hears_why():
    told = Future()

    def other_key(own, facts):
        told.set_result(own.name)
        config = replace(own.config, join_timeout_s=0.5)
        return replace(own, key=bytes(32).hex(), config=config), facts

    starter = Threads(experts_1=other_key)
    with pytest.raises(Unavailable, match="worker experts-1: its thread ended: TimeoutError"):
        crew_of(starter).start()
    assert told.result(0) == "experts-1"
    assert isinstance(dict(starter.ended)["experts-1"], TimeoutError)
