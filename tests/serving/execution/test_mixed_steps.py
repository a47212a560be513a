"""When a mixed decode step pays, by what was measured; and how its rows lie."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest

from jmoe.family import Family
from jmoe.packed_rows import SLOT, empty_deltas, pack_row
from jmoe.router import ScoredTopK
from serving.config import BrownoutConfig, EngineConfig
from serving.execution.buckets import Buckets, Key
from serving.execution.mixed import MixedSteps, mixed_models
from serving.execution.ranks import ByRank
from serving.plan import Limits, Phase, StepPlan

LIMITS = Limits(num_slots=18, num_pages=32, page_size=4, max_prefill_tokens=16, max_prefill_seqs=4)


@pytest.fixture
def buckets():
    config = EngineConfig(
        max_num_seqs=16,
        decode_buckets=(4, 8, 16),
        prefill_buckets=(16,),
        threshold_buckets_percent=(40, 100),
    )
    return Buckets(config, LIMITS, num_models=3)


@pytest.fixture
def steps(buckets):
    device = SimpleNamespace(buckets=buckets, limits=LIMITS)
    found = MixedSteps(cast("Any", device), cast("Any", device))
    found.alone_s = {4: 1.0, 8: 1.5, 16: 2.5}
    found.mixed_s = {(2, 4): 1.6, (2, 8): 2.6, (2, 16): 3.7, (3, 4): 3.5}
    return found


@pytest.mark.parametrize(
    ("counts", "pays"),
    [
        ((4, 1), True),
        ((8, 8), True),
        ((8, 4), False),  # 2.6 beside 1.5 + 1.0: much of it would be padding
        ((9, 8), True),
        ((9, 1), False),
        ((12, 8), False),  # more rows than a step may have
        ((2, 2, 2), False),
        ((8, 1, 1), False),  # not measured
        ((1, 1, 1, 1), False),
        ((5,), False),
    ],
)
def test_a_mixed_step_pays_where_it_takes_less_than_its_models_steps(steps, counts, pays):
    assert steps.pays(np.array(counts)[:, None]) is pays


@pytest.mark.parametrize(
    ("counts", "pays"),
    [
        ([[4, 4], [4, 4]], True),
        ([[8, 0], [8, 0]], True),
        ([[8, 0], [0, 4]], False),  # not 4 and 2 on each: 2.6 beside 1.5 + 1.0
        ([[8, 0], [1, 1]], False),
        ([[4, 4], [1, 0]], True),
        ([[0, 9], [0, 8]], False),  # more rows than a rank may have
        ([[1, 0], [0, 1]], True),
    ],
)
def test_over_a_mesh_a_model_has_the_rows_of_its_fullest_rank(steps, counts, pays):
    steps._device.limits = replace(LIMITS, num_slots=32, num_ranks=2)
    assert steps.pays(np.array(counts)) is pays


@pytest.mark.parametrize(
    ("wanted", "models", "resident", "found"),
    [(2, 3, 0, 2), (4, 3, 0, 3), (3, 3, 2, 2), (0, 3, 0, 1), (1, 3, 0, 1), (2, 1, 0, 1)],
)
def test_how_many_models_a_step_may_have(wanted, models, resident, found):
    config = EngineConfig(mixed_models=wanted, resident_sets=resident)
    family = MagicMock(spec=Family, config=MagicMock(router=None, strategy=None))
    family.__len__.return_value = models
    assert mixed_models(config, family) == found
    by_layer = EngineConfig(mixed_models=wanted, brownout=BrownoutConfig(levels=True))
    assert mixed_models(by_layer, family) == 1
    for kind in ("router", "strategy"):  # would choose among all models' experts
        family.config = MagicMock(**{"router": None, "strategy": None} | {kind: ScoredTopK()})
        assert mixed_models(config, family) == 1


def test_there_is_a_program_for_each_number_of_models_and_rows(buckets):
    keys = buckets.keys()
    mixed = [key for key in keys if key.models > 1]
    assert len(mixed) == len({key.name for key in mixed}) == 2 * 3 * 2
    assert {key.phase for key in mixed} == {"decode"}
    sampled = {key.size for key in keys if key.phase == "draw"}
    assert {count * size for count in (1, 2, 3) for size in (4, 8, 16)} <= sampled
    chosen = buckets.choose("decode", 5, 30, prompt_logprobs=False, models=2)
    assert chosen == Key("decode", 8, 40, models=2)
    assert all(key.models == 1 for key in buckets.step_keys())


def test_a_rank_has_a_slot_for_each_model_of_a_mixed_step():
    """A step of more, which could not be measured, has no program."""
    config = EngineConfig(decode_buckets=(4,), prefill_buckets=(16,))
    for slots, most in ((16, 2), (8, 1), (32, 3)):
        limits = Limits(slots, 64, 4, 16, 4, num_ranks=8)
        mixed = Buckets(config, limits, num_models=3).mixed_keys()
        assert max((key.models for key in mixed), default=1) == most


def test_rows_lie_in_a_segment_for_each_model():
    rows = np.stack([pack_row(slot, kv_len=slot + 1) for slot in (5, 2, 7, 0, 3)])
    plan = StepPlan(
        Phase.DECODE,
        rows,
        empty_deltas(0),
        np.zeros(0, np.int32),
        False,
        model=4,
        row_models=np.array([4, 1, 4, 1, 1], np.int32),
    )
    assert plan.models == (1, 4)
    step = ByRank.of(plan, LIMITS)
    assert (step.num_ranks, step.size, plan.size) == (2, 3, 5)
    _, packed, deltas, _ = step.arrays(4, 4, 4)
    assert packed[:, SLOT].tolist() == [2, 0, 3, -1, 5, 7, -1, -1]
    assert step.row_at(4).tolist() == [4, 0, 5, 1, 2]
    assert len(deltas) == 8


def test_every_segment_has_room_for_what_rows_are_given():
    """As many pages as rows, though all rows but one are of one model."""
    rows = np.stack([pack_row(slot, kv_len=1) for slot in range(5)])
    deltas = np.array([(slot, 0, 9 - slot) for slot in range(5)], np.int32)
    row_models = np.array([0, 0, 0, 0, 2], np.int32)
    step = ByRank.of(StepPlan(Phase.DECODE, rows, deltas, row_models=row_models), LIMITS)
    *_, packed, _ = step.arrays(4, 4, 4)
    given = packed[packed[:, 0] >= 0]
    assert sorted(map(tuple, given.tolist())) == sorted(map(tuple, deltas.tolist()))


def test_over_a_mesh_every_rank_has_a_segment_for_each_model():
    limits = Limits(16, 32, 4, 16, 4, num_ranks=2)
    assert limits.slots_per_rank == 8
    slots, models = (9, 2, 15, 0, 3), (4, 1, 4, 1, 1)
    rows = np.stack([pack_row(slot, kv_len=slot + 1) for slot in slots])
    deltas = np.array([(slot, 0, 16 * (slot // 8) + slot % 8) for slot in slots], np.int32)
    plan = StepPlan(Phase.DECODE, rows, deltas, row_models=np.array(models, np.int32))
    step = ByRank.of(plan, limits)
    assert (step.num_ranks, step.size) == (4, 3)
    _, packed, given, _ = step.arrays(4, 4, 4)
    assert packed[:, SLOT].tolist() == [2, 0, 3, -1, *[-1] * 4, *[-1] * 4, 1, 7, -1, -1]
    assert step.row_at(4).tolist() == [12, 0, 13, 1, 2]
    on_rank = [{tuple(one) for one in part.tolist() if one[0] >= 0} for part in np.split(given, 2)]
    assert on_rank == [{(slot, 0, slot) for slot in (2, 0, 3)}, {(1, 0, 1), (7, 0, 7)}]
