"""Asynchronous expert parallelism: workers for attention and for experts, each with its picker."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from benchmarks.aep_simulator import core
from benchmarks.aep_simulator.core import Costs, State
from benchmarks.aep_simulator.routing import Placement, Routing
from jmoe.parallel.asynchronous import DEFAULT_OVERHEADS, Overheads
from jmoe.parallel.stage_times import StageTimes
from serving.scheduling.layers.picker import LayerPicker, make_picker

NUM_ITLS = 1 << 16
UNLIMITED = 1 << 62


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
    num_groups: int = 1
    max_attention_rows: int = UNLIMITED
    max_expert_rows: int = UNLIMITED


@dataclass(frozen=True)
class Traffic:
    """Sequences: `in_flight` that never end, or requests at `arrivals_s` of `num_tokens` each."""

    in_flight: int
    arrivals_s: Float[np.ndarray, "requests"] = field(default_factory=lambda: np.zeros(0))
    num_tokens: Int[np.ndarray, "requests"] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def closed(self) -> bool:
        """Whether sequences never end."""
        return not len(self.arrivals_s)


class Stage(NamedTuple):
    """One stage, as a watcher sees it begin."""

    chosen_s: float
    device_s: float  # at which it begins on the device
    end_s: float
    worker: int
    layer: int
    rows: tuple[int, ...]  # visits: token * K + k


@dataclass
class Run:
    """What a simulation has come to so far. Rates are of what `measure` was told to pass."""

    state: State
    costs: Costs
    tokens_per_s: float = 0.0
    itl_mean_s: float = 0.0
    itl_p50_s: float = 0.0
    itl_p99_s: float = 0.0
    rows_per_stage: float = 0.0
    attention_busy: float = 0.0  # share of the time, mean over workers
    experts_busy: float = 0.0
    fullest_busy: float = 0.0  # of the expert worker that is busiest


def make_state(system: System, num_sequences: int, seed: int) -> State:
    """Returns empty queues, all places free."""
    workers = system.num_attention + system.num_expert_workers
    num_layers, num_sets, top_k = system.routing.sets.shape
    num_experts = system.placement.num_hosts.shape[1]
    visits, shape = num_sequences * top_k, (workers, num_layers, system.num_groups)
    # A batch on its way has a row of its own; a worker has a stage, a choice and old wake-ups.
    events = visits + 64 * workers + 1024
    rng = np.random.default_rng(seed)
    ints, floats = (lambda *n: np.zeros(n, np.int64)), (lambda *n: np.zeros(n))
    return State(
        numbers=ints(9),
        seconds=floats(2),
        event_s=floats(events),
        event_order=ints(events),
        event=ints(events, 5),
        counts=ints(*shape),
        oldest=np.full(shape, np.inf),
        heads=np.full(shape, core.NONE),
        tails=np.full(shape, core.NONE),
        idle=ints(workers) + 1,
        epoch=ints(workers),
        host_s=floats(workers),
        device_s=floats(workers),
        busy_s=floats(workers),
        out_s=floats(workers),
        in_s=floats(workers),
        after=np.full(visits, core.NONE),
        came_s=floats(visits),
        expert=ints(visits),
        missing=ints(num_sequences),
        home=ints(num_sequences),
        tokens_left=ints(num_sequences),
        last_s=np.full(num_sequences, -1.0),
        free=np.arange(num_sequences)[::-1].copy(),
        running=ints(workers),
        itls=floats(NUM_ITLS),
        stamp=ints(num_experts),
        fragment=ints(workers, 3),
        random=rng.integers(0, num_sets, 1 << 18),
        sets=system.routing.sets,
        hosts=system.placement.hosts,
        num_hosts=system.placement.num_hosts,
        # Turns begin anywhere, or all experts' first visits would go to their homes.
        turns=rng.integers(0, system.placement.num_hosts).astype(np.int64),
        group=np.arange(num_experts) % system.num_groups,
        first_s=system.times.first_s,
        attention_s=system.times.attention_s,
        products_s=system.times.products_s,
        reads_s=system.times.reads_s,
    )


class Simulation:
    """Plays a system. `watch` is called with every stage that begins, which is slow.

    Pickers are asked at every choice; built-in rules with numba without a way back to Python.
    """

    def __init__(
        self,
        system: System,
        traffic: Traffic,
        pickers: tuple[LayerPicker, LayerPicker] | None = None,
        *,
        seed: int = 0,
        watch: Callable[[Stage], None] | None = None,
    ) -> None:
        """`pickers` for attention and for experts; None: the paper's Algorithm 1.

        All sequences of a closed load begin at once, at time 0.
        """
        self.system, self.traffic, self.watch = system, traffic, watch
        self.pickers = pickers or (make_picker("defrag"), make_picker("defrag"))
        self.state = make_state(system, traffic.in_flight, seed)
        numbers, over = self.state.numbers, system.overheads
        numbers[core.NUM_FREE] = traffic.in_flight
        self.costs = Costs(
            system.times.fixed_s,
            over.attention_host_s,
            over.expert_host_s,
            over.latency_s,
            over.message_s,
            system.row_s,
            system.num_attention,
        )
        self._next_request = 0
        if traffic.closed:
            for _ in range(traffic.in_flight):
                core.admit(self.state, self.costs, 0)
        else:
            self._expect_request()

    def play(self, until_s: float) -> None:
        """Up to that time of the simulated clock."""
        s, c = self.state, self.costs
        settings = [picker.compiled_settings for picker in self.pickers]
        together = self.watch is None and None not in settings
        while (worker := self._next_choice(until_s, settings if together else [])) != core.NONE:
            if worker == -2:
                core.admit(s, c, int(self.traffic.num_tokens[self._next_request]))
                self._next_request += 1
                self._expect_request()
                continue
            at_experts = bool(worker >= c.num_attention)
            picker, counts, oldest = self.pickers[at_experts], s.counts[worker], s.oldest[worker]
            # An attention worker knows its sequences: with all of them here, nothing else can come.
            more = at_experts or not self.traffic.closed or counts.sum() < s.running[worker]
            now = float(s.seconds[core.NOW])
            picked = picker.pick(counts, oldest, now, more_may_come=bool(more))
            if picked is None:
                core.wait(s, worker, picker.wake_at(counts, oldest))
                continue
            most = (self.system.max_attention_rows, self.system.max_expert_rows)[at_experts]
            if self.watch is not None:
                self._show(worker, *picked, most)
            else:
                core.start(s, c, worker, *picked, most)

    def _next_choice(self, until_s: float, settings: list[Any]) -> int:
        """Returns a worker whose host has to choose, unless pickers and loops are machine code
        alike.
        """
        s, c, system = self.state, self.costs, self.system
        if not settings:
            return core.advance(s, c, until_s)
        most = system.max_attention_rows, system.max_expert_rows
        return core.play(s, c, until_s, self.traffic.closed, *settings, *most)

    def measure(self, warm_s: float, for_s: float) -> Run:
        """Plays `warm_s`, and then `for_s` for figures."""
        s = self.state
        self.play(float(s.seconds[core.NOW]) + warm_s)
        before, busy = s.numbers.copy(), s.busy_s.copy()
        sums = s.seconds.copy()
        begun = float(s.seconds[core.NOW])
        self.play(begun + for_s)
        passed = for_s
        counted = s.numbers - before
        num_itls = int(counted[core.NUM_ITL])
        # The newest of a ring of samples.
        newest = np.arange(
            s.numbers[core.NUM_ITL] - min(num_itls, NUM_ITLS), s.numbers[core.NUM_ITL]
        )
        itls = s.itls[newest % NUM_ITLS] if num_itls else np.full(1, np.nan)
        itl_s = float((s.seconds - sums)[core.ITL_SUM]) / num_itls if num_itls else np.nan
        produced = float(counted[core.PRODUCED])
        shares = (s.busy_s - busy) / passed
        ours, experts = shares[: self.costs.num_attention], shares[self.costs.num_attention :]
        return Run(
            s,
            self.costs,
            # Waves pass: of a closed load, Little's law counts better than a window does.
            self.traffic.in_flight / itl_s if self.traffic.closed else produced / passed,
            itl_s,
            *(float(q) for q in np.quantile(itls, [0.5, 0.99])),
            float(counted[core.ROWS]) / max(int(counted[core.STAGES]), 1),
            float(ours.mean()),
            float(experts.mean()),
            float(experts.max()),
        )

    def _expect_request(self) -> None:
        if self._next_request < len(self.traffic.arrivals_s):
            at_s = float(self.traffic.arrivals_s[self._next_request])
            core.push(self.state, at_s, core.REQUEST, 0, 0, core.NONE, 0)

    def _show(self, worker: int, layer: int, group: int, most: int) -> None:
        s = self.state
        count = min(int(s.counts[worker, layer, group]), most)
        rows, row = [], int(s.heads[worker, layer, group])
        for _ in range(count):
            rows.append(row)
            row = int(s.after[row])
        chosen_s, busy = float(s.seconds[core.NOW]), float(s.busy_s[worker])
        core.start(s, self.costs, worker, layer, group, most)
        end_s = float(s.device_s[worker])
        assert self.watch is not None
        took_s = float(s.busy_s[worker]) - busy
        self.watch(Stage(chosen_s, end_s - took_s, end_s, worker, layer, tuple(rows)))
