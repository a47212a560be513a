"""How long planning takes: one program plans the next layer's replicas and this one's shares."""

import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.balance.traces import Trace, draw
from jmoe.parallel import placement
from pallas_kernels import planning

MEDIANS, ACCURACY = 5, 0.85


def plan_time(
    devices: int, experts: int, num_replicas: int, per_pair: int | None, seed: int, calls: int
) -> dict[str, Any]:
    """Returns the milliseconds of a call that waits for its result: the best of five medians of
    `calls`.

    `floor_ms` is a call of a program that does next to nothing with the same arguments.
    """
    traces = draw(8, seed, devices, experts)
    hosts = jnp.asarray(placement.contiguous(1, experts, devices).hosts[0])
    program = partial(_plan, num_replicas=num_replicas, per_pair=per_pair)
    args = [_arguments(trace, hosts) for trace in traces]
    return {
        "devices": devices,
        "experts": experts,
        "num_replicas": num_replicas,
        "per_pair": per_pair,
        "ms": _best_median_ms(program, args, calls),
        "floor_ms": _best_median_ms(_nothing, args, calls),
    }


def _arguments(trace: Trace, hosts: jax.Array) -> tuple[jax.Array, ...]:
    return jnp.asarray(trace.predicted(ACCURACY)), jnp.asarray(trace.made), hosts


@partial(jax.jit, static_argnames=("num_replicas", "per_pair"))
def _plan(expected, made, hosts, *, num_replicas, per_pair):
    replicas = planning.plan_replicas(expected, hosts, num_replicas=num_replicas, per_pair=per_pair)
    home = planning.home_of(hosts)
    return replicas, planning.shard_visits(made, hosts | replicas, home=home)


@jax.jit
def _nothing(expected, made, hosts):
    return ~hosts, (expected + 1, made + 1)


def _best_median_ms(program: Any, args: list[tuple[jax.Array, ...]], calls: int) -> float:
    medians = []
    for _ in range(MEDIANS):
        times = []
        for n in range(calls + len(args)):
            start = time.perf_counter()
            jax.block_until_ready(program(*args[n % len(args)]))
            times.append(1e3 * (time.perf_counter() - start))
        medians.append(statistics.median(times[len(args) :]))  # the first ones compile
    return min(medians)
