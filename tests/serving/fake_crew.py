"""A crew that counts up as FakeRunner does, whose units leave when and with whom a test draws."""

import asyncio
from dataclasses import replace

import numpy as np

from jmoe.packed_rows import EXEMPT, KV_LEN, Q_LEN, SLOT
from serving.config import EngineConfig
from serving.control.experts_loader import ExpertsLoader
from serving.engine import Engine
from serving.execution.executor import LostRows, WayChanged, WorkerSeen
from serving.pipeline.crew import Crew
from serving.pipeline.messages import Left, WorkerDown
from serving.plan import Limits, Phase, StepControl, StepPlan
from tests.serving.fake_runner import FakeRunner

LIMITS = Limits(
    num_slots=8,
    num_pages=64,
    page_size=4,
    max_prefill_tokens=8,
    max_prefill_seqs=4,
    num_layers=2,
    num_ranks=2,
    max_decode_seqs=6,
)


class FakeCrew(Crew):
    """Runs a unit's first layer as it enters and its last as it leaves: what is written to its
    pages in between is another's fault, and found.
    """

    compilations_since_ready, num_programs = 0, 0
    records, retry_after_s, max_len = False, 3.0, 200

    def __init__(self, limits, rng, *, slowest_s=0.05, lost_share=0.0):
        self.limits, self.rng, self.slowest_s = limits, rng, slowest_s
        self.lost_share = lost_share
        alone = replace(
            limits,
            num_slots=limits.slots_per_rank,
            num_pages=limits.pages_per_rank,
            max_decode_seqs=limits.decode_rows // limits.num_ranks,
            num_ranks=1,
        )
        self.ranks = [FakeRunner(alone) for _ in range(limits.num_ranks)]
        self.inside = [[] for _ in self.ranks]
        self.kept = [
            {} for _ in self.ranks
        ]  # positions that each slot has left in recurrent layers
        self.most_inside, self.num_lost = 0, 0
        self.failed = []
        self.ways, self.way_changes = [], False  # that it was to change to; whether it is at it

    def record(self):
        self.records = True

    def seen(self):
        units = enumerate(self.inside)
        return [WorkerSeen(f"attention-{n}", True, 7, len(own), 0.5) for n, own in units]

    def lose(self, rank):
        """Ends a worker, and loses its units."""
        self.inside[rank] = []
        self.ranks[rank] = FakeRunner(self.ranks[rank].limits)
        self.report(WorkerDown("attention", rank))

    def change_way(self, way):
        assert not any(self.inside), "rows are under way"
        assert not self.way_changes
        self.ways.append(way)
        self.way_changes = True
        later_s = self.rng.uniform(0, self.slowest_s)
        asyncio.get_running_loop().call_later(later_s, self.has_way, way)

    def has_way(self, way):
        self.way_changes = False
        self.report(WayChanged(way))

    def enter(self, units):
        assert not self.way_changes, "the way of united experts changes"
        for rank, own in enumerate(units):
            for unit in own:
                unit.note_threshold(100 if unit.row[EXEMPT] else unit.percent)
                if self.limits.recurrent:
                    slot, end, first = (int(unit.row[at]) for at in (SLOT, KV_LEN, Q_LEN))
                    first = end - (first if unit.tokens is not None else 1)
                    assert first in (0, self.kept[rank].get(slot)), "a row has run twice"
                    self.kept[rank][slot] = end
                self._run(rank, unit, 0)
                self.inside[rank].append(unit)
                later_s = self.rng.uniform(0, self.slowest_s)
                asyncio.get_running_loop().call_later(later_s, self._some_leave, rank)
        self.most_inside = max(self.most_inside, sum(map(len, self.inside)))

    def _some_leave(self, rank):
        """Lets at least one unit leave for each one that has entered, until none is left."""
        inside = self.inside[rank]
        if not inside:
            return
        first = self.rng.choice(inside)
        together = [u for u in inside if u.group == first.group]
        self.rng.shuffle(together)
        leaving = together[: self.rng.randint(1, len(together))]
        self.inside[rank] = [u for u in inside if u not in leaving]
        if self.rng.random() < self.lost_share:
            self.num_lost += len(leaving)
            self.report(LostRows([u.number for u in leaving]))
            return
        done = [self._run(rank, unit, 1) for unit in leaving]
        scores = [np.full((len(u.places), 2), np.nan, np.float32) for u in leaving]
        for unit, of_unit in zip(leaving, scores, strict=True):
            if unit.scores:  # of the token at position p: -p
                end = int(unit.row[1])
                of_unit[:] = -np.arange(end - len(of_unit) + 1, end + 1)[:, None]
        numbers = [u.number for u in leaving]
        tokens = [result.tokens[0] for result in done]
        none = [0] * len(leaving)
        wanted = np.concatenate(scores) if any(u.scores for u in leaving) else np.zeros((0, 2))
        least = [u.least_percent for u in leaving]
        most = [u.most_percent for u in leaving]
        left = Left(
            numbers,
            tokens,
            [-0.5] * len(none),
            none,
            wanted,
            first.strategy,
            least,
            most,
            np.zeros((0, 0), np.int32),
            np.zeros((0, 0), np.float32),
            np.full((1, 3), len(leaving), np.int32),
        )
        self.report(left)

    def _run(self, rank, unit, layer):
        prefill = unit.tokens is not None
        plan = StepPlan(
            phase=Phase.PREFILL if prefill else Phase.DECODE,
            rows=unit.row[None],
            deltas=unit.deltas if not layer else unit.deltas[:0],
            tokens=unit.tokens if prefill else np.zeros(0, np.int32),
            prompt_logprobs=False,
            places=unit.places if prefill else np.zeros(0, np.int32),
            first_layer=layer,
            stop_layer=layer + 1,
            is_last=layer == 1,
        )
        return self.ranks[rank].launch(plan, StepControl(100, 0)).result()

    def watch(self, on_failure):
        self.failed.append(on_failure)

    def close(self):
        pass


def asynchronous_engine(
    rng, limits=LIMITS, *, slowest_s=0.05, lost_share=0.0, observer=(), ways=(), **config
) -> Engine:
    """Returns a ticking engine on the running loop's clock."""
    crew = FakeCrew(limits, rng, slowest_s=slowest_s, lost_share=lost_share)
    config = EngineConfig(max_model_len=200, watchdog_s=0, **config)
    engine = Engine(config, crew, None, observer, asyncio.get_running_loop().time)
    if ways:
        engine.slo.way = ways[0]
        engine.loader = ExpertsLoader(crew, None, ways, engine.slo)
    engine.run()
    return engine
