"""Asynchronous expert parallelism: workers for attention and for experts, each with its picker."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.mesh import core
from benchmarks.mesh.core import UNLIMITED, Costs, Picker, State
from benchmarks.mesh.routing import Placement, Routing
from jmoe.parallel.asynchronous import DEFAULT_OVERHEADS, ON_TIME, Late, Overheads
from jmoe.parallel.stage_times import StageTimes


@dataclass(frozen=True)
class System:
    """Workers and what they have. `placement` counts expert workers from 0."""

    times: StageTimes
    routing: Routing
    placement: Placement
    num_attention: int
    num_expert_workers: int
    row_s: float  # of a row's bytes on a link
    overheads: Overheads = DEFAULT_OVERHEADS
    max_attention_rows: int = UNLIMITED
    late: Late = ON_TIME


class Run(NamedTuple):
    """What `measure` counted."""

    tokens_per_s: float
    itl_s: float  # mean


def make_state(system: System, num_sequences: int, seed: int) -> State:
    """Returns empty queues, and sequences dealt out to attention workers in turn."""
    workers = system.num_attention + system.num_expert_workers
    num_layers, num_sets, top_k = system.routing.sets.shape
    num_experts = system.placement.num_hosts.shape[1]
    visits, shape = num_sequences * top_k, (workers, num_layers, 1)
    rng, home = np.random.default_rng(seed), np.arange(num_sequences) % system.num_attention
    ints, floats = (lambda *n: np.zeros(n, np.int64)), (lambda *n: np.zeros(n))
    seconds = ("host_s", "device_s", "busy_s", "out_s", "in_s")
    return State(
        numbers=ints(5),
        seconds=floats(2),
        events=core.no_events(),
        counts=ints(*shape),
        oldest=np.full(shape, np.inf),
        heads=np.full(shape, core.NONE),
        tails=np.full(shape, core.NONE),
        idle=ints(workers) + 1,
        epoch=ints(workers),
        running=np.bincount(home, minlength=workers),
        **{name: floats(workers) for name in seconds},
        after=np.full(visits, core.NONE),
        came_s=floats(visits),
        expert=ints(visits),
        missing=ints(num_sequences),
        home=home,
        last_s=np.full(num_sequences, -1.0),
        stamp=ints(num_experts),
        fragment=ints(workers, 3),
        random=rng.integers(0, num_sets, 1 << 18),
        sets=system.routing.sets,
        hosts=system.placement.hosts,
        num_hosts=system.placement.num_hosts,
        # Turns begin anywhere, or all experts' first visits would go to their homes.
        turns=rng.integers(0, system.placement.num_hosts).astype(np.int64),
        late=np.where(rng.random(1 << 16) < system.late.share, system.late.factor, 1.0),
        **{name: time for name, time in system.times._asdict().items() if name != "fixed_s"},
    )


class Simulation:
    """Plays a system."""

    def __init__(
        self,
        system: System,
        in_flight: int,
        pickers: tuple[Picker, Picker],
        *,
        seed: int = 0,
    ) -> None:
        """`pickers` for attention and for experts.

        All sequences begin at once, at time 0, and never end.
        """
        self.system, self.in_flight, self.pickers = system, in_flight, pickers
        self.state, over = make_state(system, in_flight, seed), system.overheads
        own = {name: value for name, value in vars(over).items() if name in Costs._fields}
        of_system = {"row_s": system.row_s, "num_attention": system.num_attention}
        self.costs = Costs(fixed_s=system.times.fixed_s, **own, **of_system)
        for token in range(in_flight):
            core.enter(self.state, token)

    def play(self, until_s: float) -> None:
        """Up to that time of the simulated clock."""
        core.play(self.state, self.costs, until_s, *self.pickers, self.system.max_attention_rows)

    def measure(self, warm_s: float, for_s: float) -> Run:
        """Plays `warm_s`, and then `for_s` for figures."""
        s = self.state
        self.play(float(s.seconds[core.NOW]) + warm_s)
        before, sums = s.numbers.copy(), s.seconds.copy()
        self.play(float(sums[core.NOW]) + for_s)
        num_itls = int((s.numbers - before)[core.NUM_ITL])
        itl_s = float((s.seconds - sums)[core.ITL_SUM]) / num_itls if num_itls else np.nan
        # Waves pass: Little's law counts better than a window does.
        return Run(self.in_flight / itl_s, itl_s)
