"""Budgets, and the rules that choose owners: by hand, and against every map there is."""

import itertools

import numpy as np
import pytest

from jmoe.sharing import MERGED, Sharing
from training.consolidate.budget import slots_of_budget, slots_of_share
from training.consolidate.rules import (
    losses_of,
    owners_functional,
    owners_paper,
    owners_random,
    owners_within,
)


def slots_taken(owners):
    names = tuple(f"m{i}" for i in range(len(owners)))
    return Sharing(names, owners).num_slots


def some_costs(seed, count=3, layers=1, experts=3):
    rng = np.random.default_rng(seed)
    costs = rng.gamma(0.7, size=(count, count, layers, experts)).astype(np.float32)
    costs[range(count), range(count)] = 0
    return costs


# -- budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("percent", "count", "want"), [(0, 2, 600), (25, 2, 525), (75, 4, 525), (100, 3, 300)]
)
def test_a_share_in_slots(percent, count, want):
    assert slots_of_share(percent, count, 300) == want


def test_a_share_that_is_no_whole_number_of_slots_shares_no_more_than_it_says():
    assert slots_of_share(50, 2, 5) == 8  # 2.5 slots to save


@pytest.mark.parametrize("percent", [-1, 100.5, float("nan")])
def test_a_share_out_of_range_is_refused(percent):
    with pytest.raises(ValueError, match="must be from 0"):
        slots_of_share(percent, 2, 300)


@pytest.mark.parametrize(
    ("text", "want"),
    [("350", 350), ("1GiB", 1024), ("1.5GiB", 1536), ("400MiB", 400), ("420mb", 400), ("900", 900)],
)
def test_a_budget_in_slots_or_bytes(text, want):
    assert slots_of_budget(text, 2, 300, 1 << 20) == want


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("12 apples", "slots of experts, such as 300"),
        ("350.5", "whole number"),
        ("-3", "slots of experts"),
        ("299", "one model alone has 300 experts, 300MiB"),
        ("200MiB", "all of 2 models' take 600 slots, 600MiB"),
        ("0", "one model alone"),
    ],
)
def test_a_budget_that_cannot_be_says_what_would_do(text, words):
    with pytest.raises(ValueError, match=words):
        slots_of_budget(text, 2, 300, 1 << 20)


# -- the paper's rule ----------------------------------------------------------------------------


def test_the_closest_positions_are_shared_and_owners_take_turns():
    distances = np.zeros((2, 2, 2, 2), np.float32)
    distances[0, 1] = distances[1, 0] = [[3, 1], [4, 2]]
    owners = owners_paper(distances, slots=5)  # three positions: those at 1, 2 and 3
    assert owners[0].tolist() == [[0, 0], [0, 1]]  # closest: model 0; next: model 1; then 0
    assert owners[1].tolist() == [[0, 0], [1, 1]]
    assert slots_taken(owners) == 5


def test_distances_of_three_models_are_summed_over_all_pairs():
    distances = np.zeros((3, 3, 1, 3), np.float32)
    pairs = {(0, 1): [0, 3, 2], (0, 2): [9, 3, 2], (1, 2): [0, 2, 3]}  # sums 9, 8 and 7
    for (i, j), values in pairs.items():
        distances[i, j, 0] = distances[j, i, 0] = values
    owners = owners_paper(distances, slots=5)
    assert owners[:, 0].tolist() == [[0, 1, 0], [1, 1, 0], [2, 1, 0]]
    assert owners_paper(distances, slots=3)[:, 0].tolist() == [[2, 1, 0]] * 3


def test_ties_go_by_position_and_all_owners_have_as_many():
    owners = owners_paper(np.zeros((3, 3, 2, 3), np.float32), slots=6)
    assert owners[0].tolist() == owners[2].tolist() == [[0, 1, 2], [0, 1, 2]]


def test_merged_experts_take_the_papers_positions():
    distances = np.zeros((2, 2, 1, 4), np.float32)
    distances[0, 1, 0] = distances[1, 0, 0] = [5, 1, 7, 2]
    owners = owners_paper(distances, slots=6, merged=True)
    assert owners[:, 0].tolist() == [[0, MERGED, 0, MERGED], [1, MERGED, 1, MERGED]]


def test_where_all_share_a_budget_is_met_up_to_what_a_position_saves():
    for slots in range(5, 16):
        taken = slots_taken(owners_paper(np.ones((3, 3, 1, 5), np.float32), slots))
        assert slots - 1 <= taken <= slots


def test_random_positions_are_the_seeds():
    owners = owners_random((2, 3, 4), 16, seed=5)
    assert slots_taken(owners) == 16
    assert np.array_equal(owners, owners_random((2, 3, 4), 16, seed=5))
    assert not np.array_equal(owners, owners_random((2, 3, 4), 16, seed=6))


# -- the functional rule -------------------------------------------------------------------------


def test_a_position_may_be_shared_by_some():
    costs = np.ones((3, 3, 1, 1), np.float32)
    costs[range(3), range(3)] = 0
    costs[2, 0] = 0.1  # model 2 does well with model 0's
    owners = owners_functional(costs, slots=2)
    assert owners[:, 0, 0].tolist() == [0, 1, 0]


def test_the_owner_is_the_one_whose_expert_costs_the_others_least():
    costs = np.ones((2, 2, 1, 2), np.float32) * 4
    costs[range(2), range(2)] = 0
    costs[0, 1, 0, 0] = 1
    costs[1, 0, 0, 1] = 1
    owners = owners_functional(costs, slots=2)
    assert owners[:, 0].tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_budget_is_met_exactly(count):
    costs = some_costs(count, count, layers=2, experts=4)
    for slots in range(8, 8 * count + 1):
        owners = owners_functional(costs, slots)
        assert slots_taken(owners) == slots
        assert (np.diagonal(costs, 0, 0, 1) == 0).all()
    assert (losses_of(costs, owners) == 0).all()  # the last budget: all of their own


def every_map(costs):
    """Yields the owners of every map: at each position every choice of owners, each owner using its
    own.
    """
    count, _, _, experts = costs.shape
    choices = [
        c for c in itertools.product(range(count), repeat=count) if all(c[o] == o for o in c)
    ]
    for found in itertools.product(choices, repeat=experts):
        yield np.array(found).T[:, None]


@pytest.mark.parametrize("seed", range(6))
def test_the_worst_model_loses_little_more_than_in_the_best_of_all_maps(seed):
    costs = some_costs(seed)
    best = dict.fromkeys(range(3, 10), np.inf)
    for owners in every_map(costs):
        taken = slots_taken(owners.astype(np.int32))
        best[taken] = min(best[taken], losses_of(costs, owners).max())
    for slots, least in best.items():
        worst = losses_of(costs, owners_functional(costs, slots)).max()
        assert worst >= least - 1e-6
        assert worst <= 1.5 * least + 1e-6


def test_a_model_whose_losses_are_small_beside_the_others_sum_is_not_given_up():
    """By the sum, model 1 would bear everything: its expert costs a tenth less to replace
    everywhere.
    """
    costs = np.zeros((2, 2, 1, 10), np.float32)
    costs[0, 1], costs[1, 0] = 1.0, 0.9
    losses = losses_of(costs, owners_functional(costs, slots=10))
    assert losses.max() <= 5.0 + 1e-6


def test_too_many_models_are_refused():
    with pytest.raises(ValueError, match="11 models"):
        owners_functional(np.zeros((11, 11, 1, 1), np.float32), slots=1)


# -- a bound on what is lost ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0])
def test_a_bound_on_loss_is_kept_and_one_slot_less_would_not(seed, share):
    """Two models: every number of shared positions is tried by hand."""
    costs = some_costs(seed, count=2, experts=6)
    most = share * float(losses_of(costs, owners_functional(costs, 6)).max())
    owners = owners_within(costs, most)
    assert losses_of(costs, owners).max() <= most
    fewest = min(
        slots
        for slots in range(6, 13)
        if losses_of(costs, owners_functional(costs, slots)).max() <= most
    )
    assert slots_taken(owners) <= fewest + 1  # by bisection, and greed is not quite monotone
    assert slots_taken(owners) == 12 or share > 0


def test_experts_that_cost_nothing_are_shared_under_a_bound_of_zero():
    costs = some_costs(0, count=3, experts=4)
    costs[:, :, 0, 1] = 0
    costs[0, 2, 0, 3] = 0  # the first may use the third's
    owners = owners_within(costs, 0.0)
    assert losses_of(costs, owners).tolist() == [0, 0, 0]
    assert slots_taken(owners) == 12 - 2 - 1
