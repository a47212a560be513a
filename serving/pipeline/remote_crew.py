"""Workers in processes of their own, as an engine sees them (AMoE, section 4).

A thread of the server talks to them. Two workers of different kinds may send each other rows once
both have connected to the other's present incarnation and said so, and a worker is up once that
holds with all of the other kind that are there. One that ends is forgotten by all before its
successor is met, so that nothing of the former is taken for the latter's.

Each process is told the way of united experts in force before it is introduced to others, and none
is up, nor any that it might send rows to, before it has said that it has that way: messages of two
senders come in any order, so that rows would otherwise reach experts of another way.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Bool

from serving.cluster.members import GREETINGS, Join, Members, Stop
from serving.cluster.port import Peer, Port
from serving.config import EngineConfig
from serving.errors import Lost, Unavailable
from serving.execution.executor import FailedRows, LostRows, Stages, WayChanged, WorkerSeen
from serving.execution.programs import Progress
from serving.pipeline.crew import Crew
from serving.pipeline.messages import (
    ATTENTION,
    EXPERTS,
    Enter,
    HasWay,
    Left,
    Unit,
    UseWay,
    WorkerDown,
    WorkerUp,
)
from serving.pipeline.recorder import Record
from serving.pipeline.starters import Starter
from serving.pipeline.worker_process import (
    MESSAGES,
    SERVER,
    Assignment,
    Beat,
    Meet,
    Met,
    name_of,
    names_of,
)
from serving.plan import Limits

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 30.0
"""Before a worker that keeps ending is started once more; the first time it is a second."""
STOPS_WITHIN_S = 1.0
HANGS_AFTER = 4
"""Times `worker_timeout_s` after which a worker that is up and has got nothing done counts as gone,
though it gives signs of life: a long stage takes less.
"""
BLAMED_AFTER = 5
"""Signs of life of a worker that gets on, during which another says that it does not hear."""


@dataclass
class _Worker:
    """One of the crew, as the server knows it."""

    kind: str
    number: int
    peer: Peer | None = None  # of the process that runs; None: it has not joined yet
    refusal: str = ""  # why it may not
    met: set[str] = field(default_factory=set)  # incarnations that it has connected to
    change: int = 0  # of ways, the newest that it has made; 0: it has not said yet
    is_up: bool = False
    starts_at: float = math.inf  # again
    num_ends: int = 0  # since it was last up
    run: int = 0  # which process of it this is; what is said of former ones comes too late
    started_at: float = math.nan
    progressed_at: float = math.nan  # when it last got on
    beat: Beat | None = None
    blamed: dict[str, int] = field(default_factory=dict)  # by whom, for how many of its beats

    @property
    def name(self) -> str:
        return name_of(self.kind, self.number)


def _port_at(host: str, key: bytes) -> Port:
    return Port(SERVER, MESSAGES, key, bind=f"tcp://{host}:0", greetings=GREETINGS)


class RemoteCrew(Crew):
    """A Crew whose workers may end, and come back."""

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        hosts: Bool[np.ndarray, "layers E W"],
        starter: Starter,
        key: bytes,
        facts: Mapping[str, str],
        max_len: int = 0,
        way: int = 0,
        make_port: Callable[[str, bytes], Port] = _port_at,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listens.

        `hosts` as of AttentionWorker; `config` is what workers are started with, and `facts` what
        they have to have alike; `key` as of Port; sequences have up to `max_len` positions; `way`
        is the one to start with, 0 for none; `make_port` listens at a host; `clock` is in seconds.
        """
        self._clock, self._key, self._facts = clock, key, facts
        own = config.asynchronous
        self.limits, self._config, self._hosts, self.max_len = limits, config, hosts, max_len
        self._way, self._change, self._is_changing = way, int(way > 0), False
        self._starter, self._join_s = starter, config.join_timeout_s
        # Before the watchdog ends the engine.
        before_s = (own.worker_timeout_s + (config.watchdog_s or math.inf)) / 2
        self._hangs_s = min(HANGS_AFTER * own.worker_timeout_s, before_s)
        counts = {ATTENTION: own.attention, EXPERTS: own.experts}
        self.workers = [_Worker(kind, n) for kind, count in counts.items() for n in range(count)]
        self._by_name = {worker.name: worker for worker in self.workers}
        self._told: list[Any] = []  # before anybody listened
        self._tell: Callable[[Any], None] = self._told.append
        self._failures, self._ready = Lost(), threading.Event()
        self._records = False
        self._closing, self._is_serving = False, False
        port = make_port(starter.host, key)
        self._address = port.peer.address
        self.members = Members(
            port,
            own.worker_timeout_s,
            self._hear,
            self._lose,
            look=self._look_after_all,
            may_be_silent=lambda name: not self._by_name[name].is_up,  # it loads
            clock=clock,
        )

    # ---- as an engine sees it -----------------------------------------------------------------

    @property
    def compilations_since_ready(self) -> int:
        """See Executor: of the processes that run now."""
        return sum(w.beat.compilations for w in self.workers if w.beat is not None)

    @property
    def num_programs(self) -> int:
        """See Executor: not known of other processes."""
        return 0

    @property
    def unreachable(self) -> str:
        """See Crew."""
        alive = np.array([w.is_up for w in self.workers if w.kind == EXPERTS])
        missing = np.argwhere(~(self._hosts & alive).any(axis=-1))
        if not len(missing):
            return ""
        layer, expert = missing[0].tolist()
        had = self._hosts[layer, expert].nonzero()[0].tolist()
        return f"expert {expert} of MoE layer {layer} is gone with {names_of(EXPERTS, had)}"

    def start(self, progress: Progress | None = None) -> None:
        """Starts all workers, and returns when they are up. Raises Unavailable if one ends, or gets
        on with nothing for too long.
        """
        self.members.do(self.open)
        self.members.start()
        shown = -1
        while not self._ready.wait(0.2):
            up = sum(worker.is_up for worker in self.workers)
            if progress is not None and up != shown:
                progress("starting workers", up, len(self.workers))
            shown = up
            if self._failures.reason:
                reason = self._failures.reason
                self.close()
                raise Unavailable(f"workers did not start: {reason}")

    def listen(self, tell: Callable[[Any], None]) -> None:
        """See Crew."""

        def begin() -> None:
            self._tell = tell
            for told in self._told:
                tell(told)

        self.members.do(begin)

    def enter(self, units: Sequence[list[Unit]]) -> None:
        """See Crew."""

        def send() -> None:
            for number, own in enumerate(units):
                if own:
                    self._send(name_of(ATTENTION, number), Enter(own))

        self.members.do(send)

    def change_way(self, way: int) -> None:
        """See ChangesWay."""

        def ask() -> None:
            self._way, self._change, self._is_changing = way, self._change + 1, True
            for worker in self.workers:
                self._send(worker.name, UseWay(way, self._change))
            self._look_whether_changed()

        self.members.do(ask)

    def record(self) -> None:
        """See Crew."""
        self._records = True
        self.members.do(lambda: [self._send(worker.name, Record()) for worker in self.workers])

    def seen(self) -> list[WorkerSeen]:
        """See Crew."""
        found = []
        for worker in self.workers:
            beat = worker.beat or Beat(0, np.zeros(0, np.int64), 0.0, 0, 0, [])
            rows = int(beat.rows.sum())
            found.append(WorkerSeen(worker.name, worker.is_up, beat.stages, rows, beat.oldest_s))
        return found

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """See Executor."""
        self._failures.watch(on_failure)

    def close(self) -> None:
        """See Executor: the processes end."""
        self._closing = True
        self.members.tell(Stop())
        self.members.close(STOPS_WITHIN_S)
        self._starter.close()

    # ---- the thread ---------------------------------------------------------------------------

    def open(self) -> None:
        """Starts all workers. Only the crew's thread calls it."""
        for worker in self.workers:
            self._start(worker)

    def _send(self, name: str, message: Any) -> None:
        if self._by_name[name].peer is not None:
            self.members.send(name, message)

    def _up(self, kind: str) -> list[_Worker]:
        return [w for w in self.workers if w.kind == kind and w.is_up]

    def _others(self, worker: _Worker) -> list[_Worker]:
        """Returns the workers of the other kind that have said where they are."""
        return [w for w in self.workers if w.kind != worker.kind and w.peer is not None]

    def _start(self, worker: _Worker) -> None:
        assignment = Assignment(
            worker.kind,
            worker.number,
            self._address,
            self._config,
            self._key.hex(),
            self._starter.host,
        )
        worker.run += 1
        run, worker.starts_at, worker.refusal = worker.run, math.inf, ""
        worker.started_at = worker.progressed_at = self._clock()

        def end(reason: str) -> None:
            if worker.run == run:
                self._end(worker, worker.refusal or reason)

        self._starter.start(assignment, lambda reason: self.members.do(partial(end, reason)))

    def _answer(self, join: Join) -> None:
        """Lets a process in that has been started, or says why not."""
        if not 0 <= join.index < len(self.workers):
            return
        worker = self.workers[join.index]
        if worker.peer is None and not math.isinf(worker.starts_at):
            return  # a former one
        refusal = self.members.answer(join, worker.name, self._facts)
        if worker.peer is None:
            worker.refusal = refusal
            if not refusal:
                self._meet(worker, Peer(worker.name, join.address, join.incarnation))

    def _meet(self, worker: _Worker, peer: Peer) -> None:
        """Introduces a process that has joined to all workers of the other kind, and them to it."""
        worker.peer = peer
        if self._way:
            self._send(worker.name, UseWay(self._way, self._change))
        self._send(worker.name, Meet([w.peer for w in self._others(worker) if w.peer]))
        for other in self._others(worker):
            self._send(other.name, Meet([peer]))

    def _hear(self, name: str, message: Any) -> None:
        if isinstance(message, Join):
            self._answer(message)
        elif name in self._by_name:
            self._hear_worker(self._by_name[name], message)

    def _hear_worker(self, worker: _Worker, message: Any) -> None:
        match message:
            case Beat(progress=progress, unreached=unreached):
                if worker.beat is None or progress != worker.beat.progress:
                    worker.progressed_at = self._clock()
                    worker.blamed = {name: beats + 1 for name, beats in worker.blamed.items()}
                worker.beat = message
                for other in self.workers:
                    if other.name in unreached:
                        other.blamed.setdefault(worker.name, 0)
                    else:
                        other.blamed.pop(worker.name, None)
            case Met(incarnations):
                worker.met.update(incarnations)
                self._look_at_ways_and_workers()
            case HasWay(change):
                worker.change = change
                self._look_at_ways_and_workers()
            case Left() | LostRows() | FailedRows() | Stages():
                self.report(message)

    def _lose(self, name: str, reason: str) -> None:
        if not name:
            self._failures.say(f"the crew's thread: {reason}")
            return
        self._starter.kill(name)
        self._end(self._by_name[name], reason)

    def _look_at_ways_and_workers(self) -> None:
        self._look_whether_changed()
        for worker in self.workers:
            self._look_whether_up(worker)

    def _look_whether_changed(self) -> None:
        """Reports a change of way once all processes that take messages have made it."""
        if self._is_changing and all(w.change in (0, self._change) for w in self.workers):
            self._is_changing = False
            self.report(WayChanged(self._way))

    def _look_whether_up(self, worker: _Worker) -> None:
        others = self._others(worker)
        if worker.is_up or worker.peer is None or not others:
            return
        own = worker.peer.incarnation
        both = (
            own in other.met
            and other.change == worker.change == self._change
            and other.peer is not None
            and other.peer.incarnation in worker.met
            for other in others
        )
        if not all(both):
            return
        worker.is_up, worker.num_ends = True, 0
        self.retry_after_s = self._clock() - worker.started_at
        if self._is_serving:
            log.warning("worker %s is back", worker.name)
            self._come_back(worker)
        elif all(one.is_up for one in self.workers):
            self._is_serving = True
            self._ready.set()

    def _come_back(self, worker: _Worker) -> None:
        if self._records:
            self._send(worker.name, Record())
        if worker.kind == EXPERTS:
            for attention in self._up(ATTENTION):
                self._send(attention.name, WorkerUp(EXPERTS, worker.number))
            return
        for one in self.workers:  # as they are now: it may have heard of an end, and of no return
            if one.kind == EXPERTS:
                news = WorkerDown if one.peer is None else WorkerUp
                self._send(worker.name, news(EXPERTS, one.number))
        self.report(WorkerUp(ATTENTION, worker.number))

    def _end(self, worker: _Worker, reason: str) -> None:
        """Drops a process that has ended, until there is another."""
        if self._closing:
            return
        worker.run += 1
        was_up, worker.is_up = worker.is_up, False
        if not self._is_serving:
            self._failures.say(f"worker {worker.name}: {reason}")
            return
        if worker.peer is not None:
            for other in self._others(worker):
                other.met.discard(worker.peer.incarnation)
                self._send(other.name, WorkerDown(worker.kind, worker.number))
        self.members.forget(worker.name)
        worker.peer, worker.beat = None, None
        worker.met, worker.blamed, worker.change = set(), {}, 0
        worker.started_at = worker.progressed_at = math.nan
        for other in self.workers:
            other.blamed.pop(worker.name, None)
        pause_s = min(LONGEST_PAUSE_S, 2.0**worker.num_ends)
        worker.num_ends += 1
        worker.starts_at = self._clock() + pause_s
        log.error("worker %s is gone: %s; another is started in %g s", worker.name, reason, pause_s)
        if was_up:
            self.report(WorkerDown(worker.kind, worker.number))
        self._look_at_ways_and_workers()  # one that waited for it alone is up now

    def _look_after_all(self, was_held_up: bool) -> None:
        """Ends workers that get on with nothing, and starts those that are due."""
        now = self._clock()
        for worker in self.workers:
            if was_held_up:
                worker.progressed_at += now - worker.progressed_at  # NaN stays
            if reason := self._why_gone(worker, now):
                self._lose(worker.name, reason)
            if now >= worker.starts_at:
                self._start(worker)

    def _why_gone(self, worker: _Worker, now: float) -> str:
        """Returns why a worker that gives signs of life counts as gone; empty: it does not."""
        idle_s = now - worker.progressed_at
        if not worker.is_up:
            late = idle_s > self._join_s
            return f"it got on with nothing for {idle_s:.0f} s (engine.join_timeout_s)" * late
        if idle_s > self._hangs_s:
            return f"it got nothing done for {idle_s:.0f} s"
        blame = [name for name, beats in worker.blamed.items() if beats >= BLAMED_AFTER]
        blame += [w.name for w in self.workers if w.blamed.get(worker.name, 0) >= BLAMED_AFTER]
        if worker.kind == EXPERTS and blame:  # of the two, the one that nobody's tokens depend on
            return f"it and {blame[0]} live, and nothing gets from one to the other"
        return ""
