"""Synchronous expert parallelism: all devices do the same layer at the same time.

D devices hold attention and a part of the experts each. A step takes n rows, of which each device
has its even part; a layer is attention, rows to their experts, experts, rows back; each of these
ends when the last device has ended. Nothing else takes time: whole steps are one launch, and the
host is hidden.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from benchmarks.mesh.routing import Placement, Routing
from jmoe.parallel.asynchronous import COLLECTIVE_S, ON_TIME, Late, exchange_s
from jmoe.parallel.stage_times import StageTimes


@dataclass(frozen=True)
class Mesh:
    """Devices that run in step."""

    times: StageTimes
    routing: Routing
    placement: Placement
    num_devices: int
    row_s: float  # of a row's bytes on a link
    exchange_s: float = COLLECTIVE_S  # of a collective beside the bytes, in a node
    layer_overhead_s: float = 0.0  # of the host, that nothing hides
    late: Late = ON_TIME


def visits_of_step(
    mesh: Mesh, num_rows: int, rng: np.random.Generator
) -> Int[np.ndarray, "layers experts"]:
    """Returns the visits that each expert gets in a step of `num_rows`."""
    sets = mesh.routing.sets
    experts = mesh.placement.num_hosts.shape[1]
    found = []
    for layer in sets:
        times = np.bincount(rng.integers(0, len(layer), num_rows), minlength=len(layer))
        weights = np.repeat(times, layer.shape[1])
        found.append(np.bincount(layer.ravel(), weights, minlength=experts))
    return np.array(found).astype(np.int64)


def loads(
    mesh: Mesh, visits: Int[np.ndarray, "layers experts"], shares: np.ndarray
) -> tuple[Float[np.ndarray, "layers devices"], Float[np.ndarray, "layers devices"]]:
    """Returns the visits and experts with any visit, by device."""
    by_host = visits[:, :, None] * shares
    return by_host.sum(axis=1), np.minimum(by_host, 1.0).sum(axis=1)


def _exchange_s(mesh: Mesh, rows: float, received: np.ndarray) -> np.ndarray:
    """Of a layer's rows one way: the busiest end of a link decides; [layers]."""
    own = rows / mesh.num_devices * mesh.routing.sets.shape[2]
    return exchange_s(own, received.max(axis=1), mesh.num_devices, mesh.row_s, mesh.exchange_s)


def _attention_s(mesh: Mesh, rows: float) -> Float[np.ndarray, "layers"]:
    own = int(np.ceil(rows / mesh.num_devices))
    found = np.full(len(mesh.routing.sets), mesh.times.attention_s[own])
    found[0] = mesh.times.first_s[own]
    return found


def _late(
    mesh: Mesh, rng: np.random.Generator, stage_s: np.ndarray
) -> Float[np.ndarray, "layers devices"]:
    """Returns the times of a stage on each device, [layers] or [layers, devices], some of them
    late.
    """
    times = stage_s if stage_s.ndim == 2 else np.tile(stage_s[:, None], mesh.num_devices)
    if not mesh.late.share:
        return times
    return times * np.where(rng.random(times.shape) < mesh.late.share, mesh.late.factor, 1.0)


def step_s(mesh: Mesh, num_rows: int, rng: np.random.Generator) -> float:
    """Returns the seconds of a step of `num_rows`."""
    shares = mesh.placement.shares(mesh.num_devices)
    visits, active = loads(mesh, visits_of_step(mesh, num_rows, rng), shares)
    experts_s = _late(mesh, rng, mesh.times.experts_s(visits, active)).max(axis=1)
    attention_s = _late(mesh, rng, _attention_s(mesh, num_rows)).max(axis=1)
    one_way_s = _exchange_s(mesh, num_rows, visits)
    layers = attention_s + experts_s + 2 * one_way_s + mesh.layer_overhead_s
    return float(layers.sum())


def half_batches_s(mesh: Mesh, num_rows: int, rng: np.random.Generator) -> float:
    """Returns the seconds of a step whose two half batches take turns: one computes while the other
    travels.

    Each device does attention of the first half, attention of the second, experts of the first and
    experts of the second, as soon as it is free and the rows of all devices are there. Exchanges
    take nothing from the devices that compute. A device that waits for the fullest one in one half
    may be ahead with the other.
    """
    shares = mesh.placement.shares(mesh.num_devices)
    halves = [num_rows - num_rows // 2, num_rows // 2]
    times = []
    for rows in halves:
        visits, active = loads(mesh, visits_of_step(mesh, rows, rng), shares)
        experts_s = _late(mesh, rng, mesh.times.experts_s(visits, active))
        attention_s = _late(mesh, rng, _attention_s(mesh, rows))
        times.append((attention_s, experts_s, _exchange_s(mesh, rows, visits)))
    free_s, there_s = np.zeros(mesh.num_devices), [0.0, 0.0]
    for layer in range(len(mesh.routing.sets)):
        for part in (0, 1):  # attention, then experts
            for half, (attention_s, experts_s, one_way_s) in enumerate(times):
                takes_s = attention_s[layer] if part == 0 else experts_s[layer]
                free_s = np.maximum(free_s, there_s[half]) + takes_s
                there_s[half] = float(free_s.max()) + one_way_s[layer]
    return max(there_s)


def tokens_per_s(
    mesh: Mesh, num_rows: int, *, steps: int = 3, halves: bool = False
) -> tuple[float, float]:
    """Returns tokens a second, and seconds of a step (its ITL); means over `steps` that were
    drawn.
    """
    rng = np.random.default_rng(0)
    play = half_batches_s if halves else step_s
    mean = float(np.mean([play(mesh, num_rows, rng) for _ in range(steps)]))
    return num_rows / mean, mean
