"""Plots for notebooks draw the numbers that they are given."""

import matplotlib
import numpy as np
import pytest

from jmoe import plots

matplotlib.use("Agg")


@pytest.fixture
def ax():
    from matplotlib import pyplot

    figure, ax = pyplot.subplots()
    yield ax
    pyplot.close(figure)


def test_router_loads_are_shares_of_an_even_load_the_busiest_first(ax):
    assert plots.router_loads(np.array([[1, 6, 2], [0, 0, 0]]), ax) is ax
    np.testing.assert_allclose(ax.images[0].get_array(), [[2, 2 / 3, 1 / 3], [0, 0, 0]])


def test_losses_are_a_curve_a_name_by_what_is_on_the_axis(ax):
    plots.losses({"way 2": [(100, 0.0), (0, 0.5)], "way 8": [(50, 0.25)]}, ax, over="experts")
    assert [line.get_xydata().tolist() for line in ax.lines] == [[[0, 0.5], [100, 0]], [[50, 0.25]]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["way 2", "way 8"]
    assert ax.get_xlabel() == "experts"


def test_p90_is_of_the_last_second_and_in_order_of_time(ax):
    at_s = np.array([0.5, 0.0, 2.0, 0.9])  # nothing of the first second counts at 2.0
    plots.p90_over_time({"leg": (at_s, np.array([10.0, 20.0, 5.0, 1.0]))}, 15.0, ax)
    line, objective = ax.lines
    assert line.get_xydata().tolist() == [[0, 20], [0.5, 20], [0.9, 20], [2, 5]]
    assert set(objective.get_ydata()) == {15.0}


def test_an_expert_map_has_a_row_a_layer_of_every_model(ax):
    owners = np.array([[[0, 1], [0, 0]], [[1, 1], [0, 1]]])
    plots.expert_map(owners, ["base", "legal"], ax)
    assert ax.images[0].get_array().tolist() == [[0, 1], [0, 0], [1, 1], [0, 1]]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["base", "legal"]


def test_the_current_axes_are_drawn_into_without_any(ax):
    assert plots.losses({"a": [(0, 1.0)]}) is ax
