"""Cases, and the systems that are played on them, each at its best by a cost model."""

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.mesh import core, synchronous
from benchmarks.mesh.asynchronous import Run, Simulation, System
from benchmarks.mesh.core import UNLIMITED, Picker
from benchmarks.mesh.rates import A100, H200
from benchmarks.mesh.routing import Routing, draw_routing, exponential, place, zipf
from jmoe.parallel.asynchronous import DEFAULT_OVERHEADS, ON_TIME, Late, Overheads, collective_s
from jmoe.parallel.cost import Machine
from jmoe.parallel.stage_times import Geometry, StageTimes, roofline, sequences_that_fit
from serving.cli.model_info import load_model_config
from serving.scheduling.layers.rules import Defragging

DEFRAG = Defragging()
SPARE = 2  # slots for copies a device, where there are replicas
WAVES = 4  # parts of an attention worker's rows that it takes at once, where it has enough
ENOUGH_ROWS = 1024
WARM, COUNTED = 3, 5  # tokens a sequence
STEPS, LATE_STEPS = 3, 30  # of a synchronous system
MAX_AGE_S = 1.0
LONG = 3_000_000  # visits an iteration, from which on fewer iterations are played
WAITS_S = (0.0, 4e-3)
"""For a batch of half of what a worker would have, were all rows in one layer: each is tried."""


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
    device: Machine = H200
    multi_query: bool = False  # one head of keys and values, as in the paper's evaluation
    late: Late = ON_TIME

    def geometry(self) -> Geometry:
        """Describes the model; with as many experts as devices where it has fewer."""
        cfg = load_model_config(self.model)
        if self.multi_query:
            cfg = replace(cfg, num_kv_heads=1)
        geometry = Geometry.of(self.model, cfg)
        return geometry.with_experts(max(geometry.num_experts, self.devices), self.top_k)

    def times(self) -> StageTimes:
        """Returns the seconds of stages, by the roofline."""
        return roofline(self.device, self.geometry(), self.in_flight, self.context)

    def routing(self) -> Routing:
        """Returns the same draws whatever is in flight."""
        return _routing(replace(self, in_flight=0, late=ON_TIME))

    def mesh(self, spare: int) -> synchronous.Mesh:
        """Returns all devices in step; `spare` slots for copies."""
        routing = self.routing()
        return synchronous.Mesh(
            self.times(),
            routing,
            place(routing.popularity, self.devices, spare),
            self.devices,
            self.geometry().row_bytes / self.device.bandwidth(self.devices),
            collective_s(self.devices),
            late=self.late,
        )

    def system(
        self, num_attention: int, spare: int, overheads: Overheads = DEFAULT_OVERHEADS
    ) -> System:
        """Returns the workers of each kind, that many for attention."""
        routing, experts = self.routing(), self.devices - num_attention
        own = -(-self.in_flight // num_attention)
        return System(
            self.times(),
            routing,
            place(routing.popularity, experts, spare),
            num_attention,
            experts,
            self.geometry().row_bytes
            / min(self.device.bandwidth(self.devices), overheads.bytes_per_s),
            overheads,
            max_attention_rows=-(-own // WAVES) if own >= ENOUGH_ROWS else UNLIMITED,
            late=self.late,
        )


PAPER = Case("mixtral-8x7b", 1, 8, 8192, 0.4, True, 100.0, "exponential", A100, True)
"""The paper's section 5: eight A100, Mixtral-8x7B with one head of keys and values, short requests.
It prints neither the rate of its exponential nor whether layers share the order of experts."""


@lru_cache(maxsize=4)
def _routing(case: Case) -> Routing:
    geometry = case.geometry()
    weights = {"zipf": zipf, "exponential": exponential}[case.law](geometry.num_experts, case.skew)
    return draw_routing(geometry.num_layers, weights, case.top_k, case.same, 20)


def split(case: Case, overheads: Overheads = DEFAULT_OVERHEADS) -> int:
    """Returns the attention workers of the split whose busiest worker has least to do for a token
    of each.

    Devices' own times, with whole batches, and at least a host's launch a stage; copies level the
    experts' load.
    """
    times, over = case.times(), overheads
    popularity = case.routing().popularity
    num_layers, num_experts = popularity.shape
    found = {}
    for ours in range(max(1, case.devices // 16), case.devices, max(1, case.devices // 16)):
        rows, theirs = -(-case.in_flight // ours), case.devices - ours
        stage_s = max(times.attention_s[rows], over.attention_host_s)
        attention_s = (num_layers - 1) * stage_s + max(times.first_s[rows], over.attention_host_s)
        shares = np.full((num_layers, num_experts, theirs), 1 / theirs)
        loads = np.einsum("le,led->ld", case.in_flight * case.top_k * popularity, shares)
        active = np.full(loads.shape, min(num_experts, -(-num_experts // theirs) + SPARE))
        experts_s = np.maximum(times.experts_s(loads, active), over.expert_host_s).sum(axis=0)
        found[ours] = max(attention_s, experts_s.max())
    return min(found, key=lambda ours: found[ours])


def least_attention(case: Case) -> int:
    """Returns the fewest attention workers whose memory holds the KV of all that is in flight.
    Raises ValueError where no split has room.
    """
    for ours in range(1, case.devices):
        sizes = case.device, case.geometry(), case.context, ours, case.devices - ours
        if sequences_that_fit(*sizes) >= case.in_flight:
            return ours
    raise ValueError(f"KV of {case.in_flight} sequences fits on no split of {case.devices} devices")


def pickers_of(system: System, in_flight: int, wait_s: float = 0.0) -> tuple[Picker, Picker]:
    """Returns the paper's Algorithm 1 for attention and for experts."""
    rows = min(in_flight / system.num_attention, system.max_attention_rows)
    visits = in_flight * system.routing.sets.shape[2] / system.num_expert_workers

    def picker(full: float) -> Picker:
        least = max(1, int(full / 2)) if wait_s else 1
        return Picker(DEFRAG.number, DEFRAG.weights, least, wait_s, MAX_AGE_S)

    return picker(rows), picker(visits)


def play(
    system: System,
    in_flight: int,
    pickers: tuple[Picker, Picker],
    begin_s: float,
    warm: int = WARM,
    counted: int = COUNTED,
) -> Run:
    """Plays a closed load until each sequence has `warm` and then `counted` tokens on average.

    `begin_s` is a guess of an iteration's time.
    """
    simulation = Simulation(system, in_flight, pickers)
    numbers, passed = simulation.state.numbers, 0.0
    while numbers[core.PRODUCED] < warm * in_flight:
        passed += begin_s
        simulation.play(passed)
    iteration = passed / max(1, numbers[core.PRODUCED] / in_flight)
    simulation.state.seconds[core.NOW] = passed
    return simulation.measure(0.0, counted * iteration)


def best_async(
    case: Case, guess_s: float, overheads: Overheads = DEFAULT_OVERHEADS, *, least: int = 1
) -> dict[str, Any]:
    """Returns the better of the cost model's split, with `least` attention workers or more, and one
    with more attention, then of `WAITS_S`.
    """

    def one(ours: int, wait_s: float) -> dict[str, Any]:
        system = case.system(ours, SPARE, overheads)
        long = case.in_flight * case.top_k * case.geometry().num_layers > LONG
        pickers = pickers_of(system, case.in_flight, wait_s)
        run = play(system, case.in_flight, pickers, guess_s, *((2, 3) if long else ()))
        figures = {"tokens_per_s": run.tokens_per_s, "itl_ms": 1e3 * run.itl_s}
        return figures | {"attention_devices": ours, "wait_ms": 1e3 * wait_s}

    def better(found: list[dict[str, Any]]) -> dict[str, Any]:
        return max(found, key=lambda one: one["tokens_per_s"])

    model = max(least, split(case, overheads))
    more = min(case.devices - 1, model + max(1, case.devices // 8))
    chosen = better([one(ours, WAITS_S[0]) for ours in sorted({model, more})])
    return better([chosen, *(one(chosen["attention_devices"], w) for w in WAITS_S[1:])])


def compare(case: Case, overheads: Overheads = DEFAULT_OVERHEADS) -> dict[str, Any]:
    """Returns tokens a second and ITL of every system on a case."""
    found = together(case)
    best = max(one["tokens_per_s"] for one in found.values())
    found["async"] = best_async(case, found["synchronous"]["itl_ms"] / 1e3, overheads)
    ours, rate = found["async"]["attention_devices"], found["async"]["tokens_per_s"]
    return asdict(case) | {
        "device": case.device.name,
        "systems": found,
        "sequences_that_fit_async": sequences_that_fit(
            case.device, case.geometry(), case.context, ours, case.devices - ours
        ),
        "ratio": rate / found["synchronous"]["tokens_per_s"],
        "ratio_to_best": rate / best,
    }


def together(case: Case) -> dict[str, dict[str, Any]]:
    """Returns tokens a second and ITL of every synchronous system on a case."""
    found, steps = {}, LATE_STEPS if case.late.share else STEPS
    plain, level = case.mesh(0), case.mesh(SPARE)
    for name, mesh, halves in (
        ("synchronous", plain, False),
        ("half batches", plain, True),
        ("libra", level, False),
        ("libra, half batches", level, True),
    ):
        rate, itl_s = synchronous.tokens_per_s(mesh, case.in_flight, steps=steps, halves=halves)
        found[name] = {"tokens_per_s": rate, "itl_ms": 1e3 * itl_s}
    return found
