"""`jmoe bench balance`: what is read of metrics, by hand; what is refused; a tiny run of all."""

import json

import numpy as np
import pytest

from serving.bench.balance import (
    VARIANTS,
    BalanceBenchConfig,
    between,
    draw,
    heat,
    of_families,
    prompts,
    rows_by_device,
    run_balance,
    table,
    variant_settings,
)
from serving.bench.scrape import parse, value
from serving.bench.workload import BUNDLED_TASKS, WorkloadError, load_tasks

BEFORE = """# HELP jmoe_device_expert_rows_total Rows that a device's experts computed
# TYPE jmoe_device_expert_rows_total counter
jmoe_device_expert_rows_total{device="0",layer="0"} 10.0
jmoe_device_expert_rows_total{device="1",layer="0"} 10.0
# TYPE jmoe_imbalance_ratio histogram
jmoe_imbalance_ratio_bucket{le="+Inf",phase="prefill"} 2.0
jmoe_imbalance_ratio_count{phase="prefill"} 2.0
jmoe_imbalance_ratio_sum{phase="prefill"} 5.0
# TYPE jmoe_expected_visits_total counter
jmoe_expected_visits_total 100.0
# TYPE jmoe_expected_visits_right_total counter
jmoe_expected_visits_right_total 10.0
"""
AFTER = """# TYPE jmoe_device_expert_rows_total counter
jmoe_device_expert_rows_total{device="0",layer="0"} 40.0
jmoe_device_expert_rows_total{device="1",layer="0"} 20.0
jmoe_device_expert_rows_total{device="0",layer="1"} 0.0
jmoe_device_expert_rows_total{device="1",layer="1"} 0.0
# TYPE jmoe_imbalance_ratio histogram
jmoe_imbalance_ratio_bucket{le="+Inf",phase="prefill"} 6.0
jmoe_imbalance_ratio_count{phase="prefill"} 6.0
jmoe_imbalance_ratio_sum{phase="prefill"} 10.0
# TYPE jmoe_padded_rows_perc gauge
jmoe_padded_rows_perc 0.25
# TYPE jmoe_expected_visits_total counter
jmoe_expected_visits_total 300.0
# TYPE jmoe_expected_visits_right_total counter
jmoe_expected_visits_right_total 160.0
# TYPE jmoe_experts_copied_total counter
jmoe_experts_copied_total 7.0
# TYPE jmoe_experts_placed_total counter
jmoe_experts_placed_total 3.0
# TYPE jmoe_expert_copy_bytes_total counter
jmoe_expert_copy_bytes_total 1.5e+06
"""


def two_layers(text):
    """Adds a second layer with a load of its own."""
    return parse(text.replace('0",layer="1"} 0.0', '0",layer="1"} 9.0'))


def test_samples_by_name_and_labels():
    samples = parse(AFTER)
    assert value(samples, "imbalance_ratio_sum", phase="prefill") == 10
    assert value(samples, "imbalance_ratio_sum", phase="decode") == 0
    np.testing.assert_array_equal(rows_by_device(samples), [[40, 20], [0, 0]])
    assert rows_by_device(parse("")).shape == (0, 0)
    with pytest.raises(ValueError, match="could not convert"):
        parse("no metrics at all {")


def test_load_over_the_mean_between_two_scrapes():
    # Layer 0: 30 and 10 more, the mean is 20. Layer 1: nothing, so that nothing is uneven.
    before = parse(BEFORE + 'jmoe_device_expert_rows_total{device="1",layer="1"} 0.0\n')
    np.testing.assert_allclose(heat(before, parse(AFTER)), [[1.5, 0.5], [1, 1]])
    np.testing.assert_allclose(heat({}, two_layers(AFTER)), [[4 / 3, 2 / 3], [2, 0]])
    assert heat({}, {}).size == 0


def test_a_server_that_was_not_asked_yet_has_no_layers_before():
    """The families come with the first step: a scrape before it has none of them."""
    found = between({}, parse(AFTER))
    assert found["imbalance"]["prefill"] == pytest.approx(10 / 6)
    np.testing.assert_allclose(found["heat"], [[4 / 3, 2 / 3], [1, 1]])


def figures():
    before = parse(BEFORE + 'jmoe_device_expert_rows_total{device="1",layer="1"} 0.0\n')
    return between(before, parse(AFTER))


def test_counters_are_what_was_added():
    found = figures()
    assert found["imbalance"] == {"prefill": 5 / 4, "decode": None}
    assert found["steps"] == {"prefill": 4, "decode": 0}
    assert found["right_share"] == 150 / 200
    assert (found["copied"], found["placed"]) == (7, 3)
    assert (found["copy_bytes"], found["padded_share"]) == (1_500_000, 0.25)
    assert between({}, {})["right_share"] is None


def result_of(*names):
    runs = [
        {"variant": name, "words": VARIANTS[name].words, "failed": 0, "tokens_per_s": 1234.5}
        | figures()
        for name in names
    ]
    return {"machine": {"platform": "cpu cpu"}, "runs": runs}


def test_the_table_has_a_line_a_variant():
    head, first, second = table(result_of("none", "both")).splitlines()
    assert head.endswith("tokens/s on this cpu")
    assert " ".join(first.split()) == "none 1.250 - 75.0 % 7 3 1.5 25.0 % 0 1234"
    assert second.startswith("both ")
    assert len(head) == len(first) == len(second)


def test_the_picture_is_drawn(tmp_path):
    draw(result_of("none", "replicas", "spare", "both"), tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"variants": ("most",)}, "variant 'most' is unknown; there are none, replicas, spare"),
        ({"variants": ()}, "variants is empty"),
        ({"mesh": "ep=1"}, "mesh is 'ep=1'; it must be ep=N with 2 devices or more"),
        ({"mesh": "tp=4"}, "mesh is 'tp=4'; it must be ep=N"),
        ({"requests": 7}, "requests is 7; a mesh of 8 devices needs as many or more"),
        ({"replicas": 0}, r"replicas is 0; it must be 1 or more.*--variants none"),
        ({"spare_slots": -1}, "spare_slots is -1; it must be 1 or more"),
    ],
)
def test_what_leaves_nothing_to_compare_is_named(changes, words):
    with pytest.raises(ValueError, match=words):
        BalanceBenchConfig(**changes)


def test_more_copies_than_make_sense():
    BalanceBenchConfig(replicas=14, spare_slots=52).check_experts(60)
    with pytest.raises(
        ValueError, match=r"the other 7 devices send 2 each at most: set it to 14 or less"
    ):
        BalanceBenchConfig(replicas=15).check_experts(60)
    with pytest.raises(ValueError, match=r"spare_slots is 53; a device lacks 52 of 60 experts"):
        BalanceBenchConfig(spare_slots=53).check_experts(60)
    with pytest.raises(ValueError, match=r"replicas is 4; a device lacks 3 of 4 experts"):
        BalanceBenchConfig(mesh="ep=4", spare_slots=1).check_experts(4)


def test_prompts_follow_from_the_seed():
    tasks = of_families(load_tasks(BUNDLED_TASKS), ("fact", "spell"))
    assert {task.family for task in tasks} == {"fact", "spell"}
    some, same, others = (prompts(tasks, 5, seed) for seed in (1, 1, 2))
    assert some == same != others
    assert all(one.prompt.count("\n") == 2 and one.at_s == 0 for one in some)
    with pytest.raises(WorkloadError, match="task family 'facts' is unknown; there are add, fact"):
        of_families(load_tasks(BUNDLED_TASKS), ("facts",))
    with pytest.raises(WorkloadError, match="no task family is named"):
        of_families(load_tasks(BUNDLED_TASKS), ())


def test_settings_of_a_variant():
    config = BalanceBenchConfig(mesh="ep=4", server_args=("--set", "engine.page_size=32"))
    none, both = (variant_settings(config, VARIANTS[name]) for name in ("none", "both"))
    assert none["engine.max_num_seqs"] == "16"
    assert "engine.page_size" not in none  # the caller's own
    assert none.pop("engine.balance.spare_slots") == "0"
    assert not any("balance" in key for key in none)
    assert both.items() >= none.items()
    assert both["engine.balance.replicas"] == "4"
    assert both["engine.balance.spare_slots"] == "2"
    other = variant_settings(BalanceBenchConfig(model="dir"), VARIANTS["none"])
    assert "engine.dtype" not in other


@pytest.mark.exhaustive
def test_the_whole_bench_on_the_bundled_model(tmp_path):
    said = []
    config = BalanceBenchConfig(
        mesh="ep=2", requests=24, variants=("none", "both"), replicas=2, out=tmp_path
    )
    run_balance(config, said.append)
    stored = json.loads((tmp_path / "balance_served.json").read_text())
    none, both = stored["runs"]
    assert (none["failed"], both["failed"]) == (0, 0)
    assert np.array(none["heat"]).shape == (5, 2)
    np.testing.assert_allclose(np.mean(none["heat"], axis=1), 1)
    assert none["right_share"] is None
    assert none["copied"] == none["copy_bytes"] == 0
    assert 0 < both["right_share"] <= 1
    assert both["copied"] > 0
    assert both["copy_bytes"] > 0
    assert both["imbalance"]["prefill"] < none["imbalance"]["prefill"]
    assert (tmp_path / "balance_served.txt").read_text().startswith(" ")
    assert (tmp_path / "balance_served.png").exists()
    assert stored["config"]["mesh"] == "ep=2"
