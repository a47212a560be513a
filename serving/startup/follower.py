"""A process that follows process 0: its devices belong to the same mesh, but it has no clients."""

import logging
import os
import signal
from types import FrameType

from serving.cluster import hosts
from serving.cluster.followers import Leader
from serving.config import EngineConfig
from serving.errors import Unavailable
from serving.execution.kv_pages import claim_memory
from serving.execution.programs import Progress
from serving.execution.replay import replay
from serving.execution.runner import DeviceRunner
from serving.startup.asynchronous import with_mode
from serving.startup.prepare import build, limit_cpu_threads
from serving.telemetry import logs

log = logging.getLogger(__name__)


def follow(config: EngineConfig, progress: Progress) -> None:
    """Joins process 0, loads this process's part of the model, and repeats process 0's calls until
    that stops.

    Prints `jmoe follows HOST:PORT as process N of M` when it has joined. If process 0 is lost, this
    process ends at once with a message and status 1, since a running program would wait for it for
    ever. Raises SettingsError, Unavailable, and what `jmoe.load` raises.
    """
    signal.signal(signal.SIGHUP, _read_nothing)
    who = f"process {config.process_index} of {config.num_processes}"
    limit_cpu_threads(config.cpu_threads)
    claim_memory(config.memory_fraction)
    config = with_mode(config)
    leader = hosts.join(config)
    print(f"jmoe follows {config.coordinator} as {who}", flush=True)
    leader.lost.watch(_exit)
    _leave_signals_to_the_leader(who)
    try:
        _, _, runner, _ = build(config, None, progress)
    except BaseException as error:
        leader.fail(f"{type(error).__name__}: {error}")
        raise
    _make_calls(leader, runner, progress, who)
    runner.close()
    leader.close()
    log.info("%s ends, as process 0 does", who)


def _make_calls(leader: Leader, runner: DeviceRunner, progress: Progress, who: str) -> None:
    try:
        leader.lost.named(lambda: replay(runner.device, leader.calls(), progress))
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        log.debug("where it came from", exc_info=True)
        leader.fail(reason)
        raise Unavailable(f"{who} failed: {reason}") from None


def _exit(reason: str) -> None:
    logs.say(f"jmoe: {reason}", logging.ERROR)
    os._exit(1)


def _leave_signals_to_the_leader(who: str) -> None:
    """Ignores the first SIGTERM or SIGINT; a second one ends this process.

    When all processes are stopped at once, streams should finish first, and process 0 knows when
    they have.
    """
    seen: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        if seen:
            os._exit(1)
        seen.append(number)
        name = signal.Signals(number).name
        logs.say(f"jmoe: {name}: {who} ends when process 0 does; a second signal ends it at once")

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, on_signal)


def _read_nothing(*_: object) -> None:
    logs.say("jmoe: SIGHUP: keys and certificates are process 0's; nothing is read again here")
