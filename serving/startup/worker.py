"""`python -m serving.startup.worker`: the process of an asynchronous worker on this machine.

It reads its assignment, a line of JSON, from standard input, and ends when that ends, so that no
worker outlives the server.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from jmoe.host_memory import on_the_host
from serving.cluster.hosts import facts
from serving.execution.kv_pages import claim_memory
from serving.execution.programs import Progress, limit_cpu_threads
from serving.pipeline.attention import AttentionWorker
from serving.pipeline.devices import AttentionDevice, ExpertDevice
from serving.pipeline.experts import ExpertWorker
from serving.pipeline.messages import ATTENTION, EXPERTS, RowNumbers
from serving.pipeline.queues import buckets
from serving.pipeline.worker_process import Assignment, Worker, work
from serving.startup.asynchronous import crew_of, hosts_of, make_layer_picker
from serving.telemetry import logs

log = logging.getLogger(__name__)


def make_worker(
    assignment: Assignment, send: Callable[[int, Any], None], progress: Progress
) -> Worker:
    """Loads the model, keeps the worker's part of it, and compiles.

    Raises what `jmoe.load` raises.
    """
    import jax

    limit_cpu_threads(assignment.config.cpu_threads)
    claim_memory(assignment.config.memory_fraction)
    device = jax.local_devices()[0]
    # Read in the CPU's memory: the device gets only the worker's part.
    with on_the_host():
        worker, sizes = _worker_of(assignment, send, device, progress)
    worker.warm(sizes)
    return worker


def _worker_of(
    assignment: Assignment, send: Callable[[int, Any], None], device: Any, progress: Progress
) -> tuple[Worker, list[int]]:
    """Makes the worker; also returns the message sizes to warm it with."""
    config, number = assignment.config, assignment.number

    def reads(num_layers: int, num_experts: int, num_united: int) -> np.ndarray:
        hosts = hosts_of(config.asynchronous, num_layers, num_experts, num_united)
        return (
            hosts[:, :, number] if assignment.kind == EXPERTS else np.zeros(hosts.shape[:2], bool)
        )

    crew = crew_of(config, None, progress, reads)
    own, sizes, model = config.asynchronous, crew.sizes, crew.model
    numbers = RowNumbers(own.attention, sizes.num_rows)
    shared = numbers, number, send, make_layer_picker(own)
    num_visits = sizes.max_visits(model.config.experts_per_token)
    if assignment.kind == ATTENTION:
        on = AttentionDevice(model, crew.ways, sizes, device)
        worker = AttentionWorker(on, model.config.moe_layers, crew.hosts, *shared, sizes)
        return worker, buckets(num_visits)
    on = ExpertDevice(model, crew.ways, crew.hosts[:, :, number], numbers.total, device)
    return ExpertWorker(on, len(crew.hosts), *shared, num_visits), sizes.row_sizes


def main() -> None:
    """Runs a worker process; see the module's docstring."""
    # Streams are to finish first; keys and certificates are the server's.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    logs.configure()
    assignment = Assignment.from_json(sys.stdin.readline())

    def end_with_input() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=end_with_input, daemon=True).start()
    try:
        work(assignment, facts(assignment.config), make_worker)
    except Exception as error:
        log.debug("where it came from", exc_info=True)
        logs.say(f"jmoe: {assignment.name}: {type(error).__name__}: {error}", logging.ERROR)
        os._exit(1)  # an ordinary exit would wait for a device that may hang
    os._exit(0)


if __name__ == "__main__":
    main()
