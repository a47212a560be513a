"""Runs workers as Ray actors, on whichever machine has a device for them (extra `ray`).

Ray finds the machine, starts the process and reports its death; then another actor is made, maybe
elsewhere. Rows and messages do not go through Ray, whose calls take longer than most stages.
"""

import logging
import os
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from serving.cluster.hosts import facts
from serving.errors import SettingsError
from serving.pipeline.starters import Ended
from serving.pipeline.worker_process import Assignment, work
from serving.startup.worker import make_worker

CONNECTS_WITHIN_S = 5.0
LOCAL_TRIES = 3
STOPS_WITHIN_S = 5.0


class _Actor:
    """A Ray actor that runs a worker."""

    def __init__(self, assignment: str) -> None:
        own = Assignment.from_json(assignment)
        self._assignment = replace(own, host=ray.util.get_node_ip_address())
        self._ended: Future[str] = Future()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        reason = "the server said so"
        try:
            config = self._assignment.config
            silence_s = config.asynchronous.worker_timeout_s
            work(self._assignment, facts(config), make_worker, silence_s)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
        self._ended.set_result(reason)

    def ended(self) -> str:
        """Waits until the worker has ended, and returns why."""
        return self._ended.result()


class RayStarter:
    """A Starter that uses Ray: the cluster at an address (`ray start`), or a new local one."""

    def __init__(self, address: str) -> None:
        """Joins or starts the cluster. Raises SettingsError if that fails."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            _look_for(address)
            _join(address)
        except Exception as error:  # Ray raises plain ones, too
            cause = " ".join(str(error).split())
            if not address:
                raise SettingsError(
                    f"engine.asynchronous.workers is 'ray', and Ray starts no cluster here ({cause}"
                    "); start one with `ray start --head` and set engine.asynchronous.ray_address "
                    "to auto, or set workers to processes"
                ) from None
            raise SettingsError(
                f"engine.asynchronous.ray_address is {address!r}, and no cluster of Ray is there "
                f"({cause}); start one with `ray start --head`, or leave it empty"
            ) from None
        self.host = ray.util.get_node_ip_address()
        self._actors: dict[str, Any] = {}
        self._watchers: set[threading.Thread] = set()

    def start(self, assignment: Assignment, ended: Ended) -> None:
        """See Starter. A worker has a GPU of its own where the cluster has any."""
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        kind: Any = ray.remote(_Actor).options(
            num_cpus=0, num_gpus=gpus, scheduling_strategy="SPREAD"
        )
        actor = self._actors[assignment.name] = kind.remote(assignment.to_json())

        def watch() -> None:
            try:
                reason = str(ray.get(actor.ended.remote()))
                ray.kill(actor)
            except RayActorError:
                reason = "its process died"
            except RayError as error:
                reason = " ".join(str(error).split())
            finally:
                self._watchers.discard(threading.current_thread())
            ended(reason)

        watcher = threading.Thread(target=watch, daemon=True)
        self._watchers.add(watcher)
        watcher.start()

    def kill(self, name: str) -> None:
        """See Starter."""
        if name in self._actors:
            ray.kill(self._actors[name])

    def close(self) -> None:
        """See Starter. A cluster that was joined keeps running."""
        for name in self._actors:
            with suppress(RayError):  # the cluster may be gone
                self.kill(name)
        until = time.monotonic() + STOPS_WITHIN_S
        for watcher in list(self._watchers):  # a call under way while Ray ends can end the process
            watcher.join(max(0.0, until - time.monotonic()))
        ray.shutdown()


def _join(address: str) -> None:
    """Joins or starts a cluster. Starting is retried: 30 s, Ray's timeout, may not be enough on a
    busy machine.
    """
    for attempt in range(1 if address else LOCAL_TRIES):
        try:
            ray.init(
                address=address or "local", include_dashboard=False, logging_level=logging.WARNING
            )
            return
        except Exception:
            ray.shutdown()
            if address or attempt == LOCAL_TRIES - 1:
                raise


def _look_for(address: str) -> None:
    """Raises OSError if nothing listens at HOST:PORT; Ray itself would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if colon:
        socket.create_connection((host, int(port)), CONNECTS_WITHIN_S).close()
