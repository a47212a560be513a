"""What a distillation says before it begins."""

import dataclasses
import re

import pytest
import yaml
from test_distill import QUICK
from test_distill_h200 import CONFIGS

from jmoe.config import from_hf
from training.distill import distill
from training.distill.plan import GIB, Amount, choose, make_plan
from training.distill.prepare import prepare
from training.distill.room import Room
from training.distill.sizes import (
    end_to_end_stage,
    model_parameters,
)

CONFIG = dataclasses.replace(QUICK, steps=4, eval_every=2, refine_steps=2)


def qwen():
    return from_hf(yaml.safe_load((CONFIGS / "qwen1.5-moe-a2.7b.yaml").read_text()))


def test_model_parameters_are_those_of_published_models():
    rest, experts = model_parameters(qwen())
    assert round((rest + experts) / 1e9, 1) == 14.3


@pytest.mark.parametrize(("way", "compiled_gib"), [(2, 123.2), (4, 77.1), (8, 55.4)])
def test_the_end_to_end_range_holds_what_was_compiled_for_an_h200(way, compiled_gib):
    stage = end_to_end_stage(qwen(), dataclasses.replace(CONFIG, **FULL), way, 1, 2)
    assert stage.device.low <= compiled_gib * GIB <= stage.device.high
    assert stage.device.high < 1.1 * stage.device.low


FULL = {"refine_steps": 600, "refine_rows": 32, "length": 128, "rows": 65_536, "batch": 4096}


def room(device_gib, host_gib=1000, disk_gib=1000):
    return Room("gpu", 1, int(device_gib * GIB), host_gib * GIB, disk_gib * GIB)


def plan(free, ways=(2, 4, 8), **changes):
    config = dataclasses.replace(CONFIG, dtype="bfloat16", **(FULL | changes))
    return make_plan(qwen(), config, ways, Amount.assumed(config), free)


def test_default_ways_that_do_not_fit_are_left_out_with_a_warning():
    chosen, warnings, refusal = choose(plan(room(105)), named=False)
    assert (chosen.ways, refusal) == ((4, 8), None)
    (warning,) = warnings
    for words in (
        "way 2 is left out",
        "end to end",
        "122.8 GiB to 127.0 GiB",
        "105.0 GiB are free",
    ):
        assert words in warning
    assert "XLA_CLIENT_MEM_FRACTION" in warning
    for free, ways in [(room(140), (2, 4, 8)), (room(60), (8,)), (room(140, 64), (4, 8))]:
        assert choose(plan(free), named=False)[0].ways == ways
    assert choose(plan(room(140, 1000, 100)), named=False)[0].ways == (4, 8)


def test_what_may_not_fit_is_a_warning():
    chosen, warnings, refusal = choose(plan(room(125)), named=False)
    assert (chosen.ways, refusal) == ((2, 4, 8), None)
    assert ["may not fit" in words for words in warnings] == [True]


def test_named_ways_that_cannot_fit_are_refused_with_sizes():
    _, _, refusal = choose(plan(room(105)), named=True)
    assert refusal is not None
    assert re.search(r"way 2, end to end.*122.8 GiB to 127.0 GiB.*105.0 GiB", refusal)
    assert choose(plan(room(105), refine_steps=0), named=True)[2] is None
    assert choose(plan(room(40)), named=False)[2] is not None  # no default way fits


def test_unknown_memory_refuses_nothing():
    chosen, warnings, refusal = choose(plan(Room("gpu", 1, None, None, None)), named=False)
    assert (chosen.ways, warnings, refusal) == ((2, 4, 8), [], None)


def test_a_plan_needs_config_json_alone(tiny_dir, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_dir.path / "config.json").read_bytes())
    found = prepare(tmp_path, None, [], None, CONFIG, need_data=False)
    assert found.data is None
    assert found.plan.ways == (2, 4, 8)
    words = "\n".join(found.lines(measure=True))
    for part in ("not counted", "layer by layer: device", "end to end: host", "disk:", "free:"):
        assert part in words
    assert re.search(r"time, a rough estimate: \S+ \w+ to \S+ \w+", words)


# -- data ------------------------------------------------------------------------------------------


def test_too_little_data_is_refused_with_numbers(tiny_dir, tmp_path):
    data = [tmp_path / "few.txt"]
    data[0].write_text("copy ab\n")
    with pytest.raises(ValueError, match=r"holds \d+ tokens.*At least 32 tokens.*more --data"):
        distill(tiny_dir.path, [4], data, tmp_path / "out", CONFIG)
    assert not (tmp_path / "out").exists()


def test_little_data_is_warned_of(tiny_dir, tmp_path):
    tasks = (tiny_dir.path / "tasks.jsonl").read_text()
    some, more = tmp_path / "some.jsonl", tmp_path / "more.jsonl"
    some.write_text("\n".join(tasks.splitlines()[:15]))
    more.write_text(tasks)
    found = prepare(tiny_dir.path, [4], [some], None, CONFIG)
    assert len(found.warnings) == 2
    assert "--rows wants 1,024" in found.warnings[0]
    assert "2,000 tokens would give 500" in found.warnings[1]
    enough = dataclasses.replace(CONFIG, rows=2048)
    assert prepare(tiny_dir.path, [4], [more], None, enough).warnings == ()
