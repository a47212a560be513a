"""Systems side by side: one case at a time, each system at its best by a cost model."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.aep_simulator import core, synchronous
from benchmarks.aep_simulator.asynchronous import UNLIMITED, Run, Simulation, System, Traffic
from benchmarks.aep_simulator.routing import Routing, draw_routing, exponential, place, zipf
from jmoe.parallel.asynchronous import Overheads, collective_s
from jmoe.parallel.stage_times import (
    H200,
    Device,
    Geometry,
    StageTimes,
    measured,
    roofline,
    sequences_that_fit,
)
from serving.cli.info import load_model_config
from serving.scheduling.layers.picker import LayerPicker, Waiting, make_picker

SPARE = 2  # slots for copies a device, where there are replicas
WAVES = 4  # parts of an attention worker's rows that it takes at once, where it has enough
ENOUGH_ROWS = 1024
WARM, COUNTED = 3, 5  # tokens a sequence
MAX_AGE_S = 1.0
LONG = 3_000_000  # visits an iteration, from which on fewer iterations are played


A100 = Device("A100 80GB", 0.6 * 312e12, 0.9 * 2.039e12, 0.8 * 300e9, 6.25e9, 0.9 * 80e9, 40e-6)
"""The paper's machine: the data sheet's 312 TFLOP/s (dense bfloat16), 2,039 GB/s and 600 GB/s of
NVLink in both directions together, at the shares that the H200 is taken at; its p4d instance has
400 Gb/s for eight devices, 6.25 GB/s each."""


@dataclass(frozen=True)
class Case:
    """What the systems are compared on."""

    model: str
    top_k: int
    devices: int
    in_flight: int
    skew: float  # Zipf's exponent; with `law`, the rate of an exponential
    same: bool  # the same experts are busy in every layer
    context: float = 256.0  # tokens of KV a row
    law: str = "zipf"
    device: Device = H200
    multi_query: bool = False  # one head of keys and values, as in the paper's evaluation
    times_file: str = ""  # measured stage times; none: the roofline's

    def geometry(self) -> Geometry:
        """Of the model; with as many experts as devices where it has fewer."""
        cfg = load_model_config(self.model)
        if self.multi_query:
            cfg = replace(cfg, num_kv_heads=1)
        geometry = Geometry.of(self.model, cfg)
        return geometry.with_experts(max(geometry.num_experts, self.devices), self.top_k)

    def words(self) -> dict[str, Any]:
        """For a record."""
        return asdict(self) | {"device": self.device.name}


@lru_cache(maxsize=4)
def _routing(case: Case) -> Routing:
    geometry = case.geometry()
    weights = {"zipf": zipf, "exponential": exponential}[case.law](geometry.num_experts, case.skew)
    return draw_routing(geometry.num_layers, weights, case.top_k, case.same, 20)


def routing_of(case: Case) -> Routing:
    """The same draws whatever is in flight."""
    return _routing(replace(case, in_flight=0))


def times_of(case: Case) -> StageTimes:
    """By roofline, or as measured. Raises ValueError for a file that holds none."""
    if case.times_file:
        return measured(Path(case.times_file), case.geometry(), case.in_flight)
    return roofline(case.device, case.geometry(), case.in_flight, case.context)


def mesh_of(case: Case, spare: int) -> synchronous.Mesh:
    """Returns all devices in step; `spare` slots for copies."""
    geometry, routing = case.geometry(), routing_of(case)
    return synchronous.Mesh(
        times_of(case),
        routing,
        place(routing.popularity, case.devices, spare),
        case.devices,
        geometry.row_bytes / case.device.bandwidth(case.devices),
        collective_s(case.devices),
    )


def system_of(
    case: Case, num_attention: int, spare: int, overheads: Overheads | None = None
) -> System:
    """Returns the workers of each kind, that many for attention."""
    geometry, routing = case.geometry(), routing_of(case)
    experts = case.devices - num_attention
    own = -(-case.in_flight // num_attention)
    return System(
        times_of(case),
        routing,
        place(routing.popularity, experts, spare),
        num_attention,
        experts,
        geometry.row_bytes / case.device.bandwidth(case.devices),
        overheads or Overheads(),
        max_attention_rows=-(-own // WAVES) if own >= ENOUGH_ROWS else UNLIMITED,
    )


def split(case: Case, spare: int, overheads: Overheads | None = None) -> int:
    """Returns the attention workers of the split whose busiest worker has least to do for a token
    of each.

    Devices' own times, with whole batches, and at least a host's launch a stage; experts by
    popularity, level where there are replicas.
    """
    times, routing, over = times_of(case), routing_of(case), overheads or Overheads()
    num_layers, num_experts = routing.popularity.shape
    found = {}
    for ours in range(max(1, case.devices // 16), case.devices, max(1, case.devices // 16)):
        rows, theirs = -(-case.in_flight // ours), case.devices - ours
        stage_s = max(times.attention_s[rows], over.attention_host_s)
        attention_s = (num_layers - 1) * stage_s + max(times.first_s[rows], over.attention_host_s)
        visits = case.in_flight * case.top_k * routing.popularity
        shares = np.full((num_layers, num_experts, theirs), 1 / theirs)
        if not spare:
            shares = place(routing.popularity, theirs, 0).shares(theirs)
        loads = np.einsum("le,led->ld", visits, shares)
        active = np.full(loads.shape, min(num_experts, -(-num_experts // theirs) + spare))
        experts_s = np.maximum(times.experts_s(loads, active), over.expert_host_s).sum(axis=0)
        found[ours] = max(attention_s, experts_s.max())
    return min(found, key=lambda ours: found[ours])


WAITS_S = (0.0, 4e-3)
"""For a batch of half of what a worker would have, were all rows in one layer: each is tried."""


def pickers_of(rule: str, system: System, in_flight: int, wait_s: float) -> tuple[LayerPicker, ...]:
    """For attention and for experts."""
    rows = in_flight / system.num_attention
    visits = in_flight * system.routing.sets.shape[2] / system.num_expert_workers
    return tuple(
        make_picker(rule, Waiting(max(1, int(full / 2)) if wait_s else 1, wait_s, MAX_AGE_S))
        for full in (min(rows, system.max_attention_rows), visits)
    )


def play(
    system: System,
    in_flight: int,
    pickers: tuple[LayerPicker, ...],
    begin_s: float,
    warm: int = WARM,
    counted: int = COUNTED,
) -> Run:
    """Returns a closed load, until each sequence has `warm` and then `counted` tokens on average.

    `begin_s` is a guess of an iteration's time.
    """
    simulation = Simulation(system, Traffic(in_flight), (pickers[0], pickers[1]))
    numbers, passed = simulation.state.numbers, 0.0
    while numbers[core.PRODUCED] < warm * in_flight:
        passed += begin_s
        simulation.play(passed)
    iteration = passed / max(1, numbers[core.PRODUCED] / in_flight)
    simulation.state.seconds[core.NOW] = passed
    return simulation.measure(0.0, counted * iteration)


def compare(
    case: Case,
    *,
    no_replicas_at: int = 0,
    overheads: Overheads | None = None,
    rule: str = "defrag",
) -> dict[str, Any]:
    """Returns tokens a second and ITL of every system on a case."""
    found: dict[str, Any] = {}
    plain, level = mesh_of(case, 0), mesh_of(case, SPARE)
    for name, mesh, halves in (
        ("synchronous", plain, False),
        ("half batches", plain, True),
        ("libra", level, False),
        ("libra, half batches", level, True),
    ):
        rate, itl_s = synchronous.tokens_per_s(mesh, case.in_flight, halves=halves)
        found[name] = {"tokens_per_s": rate, "itl_ms": 1e3 * itl_s}
    bare = [("async, no replicas", 0)] if case.in_flight == no_replicas_at else []
    for name, spare in [("async", SPARE), *bare]:
        guess_s = found["synchronous"]["itl_ms"] / 1e3
        found[name] = best_async(case, spare, guess_s, overheads, rule)
    geometry, ours = case.geometry(), found["async"]["attention_devices"]
    room = [
        sequences_that_fit(case.device, geometry, case.context, *shape)
        for shape in ((case.devices, 0), (ours, case.devices - ours))
    ]
    return case.words() | {
        "systems": found,
        "sequences_that_fit": room[0],
        "sequences_that_fit_async": room[1],
        "ratio": found["async"]["tokens_per_s"] / found["synchronous"]["tokens_per_s"],
        "ratio_to_best": found["async"]["tokens_per_s"]
        / max(v["tokens_per_s"] for k, v in found.items() if not k.startswith("async")),
    }


def best_async(
    case: Case, spare: int, guess_s: float, overheads: Overheads | None = None, rule: str = "defrag"
) -> dict[str, Any]:
    """Returns the better of the cost model's split and one with more attention, then
    of `WAITS_S`.
    """

    def one(ours: int, wait_s: float) -> dict[str, Any]:
        system = system_of(case, ours, spare, overheads)
        pickers = pickers_of(rule, system, case.in_flight, wait_s)
        long = case.in_flight * case.top_k * case.geometry().num_layers > LONG
        counts = (2, 3) if long else (WARM, COUNTED)
        run = play(system, case.in_flight, pickers, guess_s, *counts)
        return figures(run) | {"attention_devices": ours, "wait_ms": 1e3 * wait_s}

    def better(found: list[dict[str, Any]]) -> dict[str, Any]:
        return max(found, key=lambda one: one["tokens_per_s"])

    model = split(case, spare, overheads)
    more = min(case.devices - 1, model + max(1, case.devices // 8))
    chosen = better([one(ours, WAITS_S[0]) for ours in sorted({model, more})])
    return better([chosen, *(one(chosen["attention_devices"], w) for w in WAITS_S[1:])])


def figures(run: Run) -> dict[str, Any]:
    """Of a run, for a record."""
    return {
        "tokens_per_s": run.tokens_per_s,
        "itl_ms": 1e3 * run.itl_mean_s,
        "itl_p99_ms": 1e3 * run.itl_p99_s,
        "rows_per_stage": run.rows_per_stage,
        "attention_busy": run.attention_busy,
        "experts_busy": run.experts_busy,
        "fullest_busy": run.fullest_busy,
    }


def all_of(cases: Iterator[Case], say: Callable[[str], None], **more: Any) -> list[dict[str, Any]]:
    """Compares each and says so in a line."""
    found = []
    for case in cases:
        one = compare(case, **more)
        rates = {k: round(v["tokens_per_s"]) for k, v in one["systems"].items()}
        where = f"{case.model} top-{case.top_k} D={case.devices} N={case.in_flight}"
        say(f"{where} skew {case.skew} {'same' if case.same else 'different'}: {rates}")
        found.append(one)
    return found


PAPER = Case("mixtral-8x7b", 1, 8, 8192, 0.4, True, 100.0, "exponential", A100, True)
"""The paper's section 5: eight A100, Mixtral-8x7B with one head of keys and values, short requests.
It prints neither the rate of its exponential nor whether layers share the order of experts."""
