"""What a distillation says before it begins."""

import dataclasses
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from distilled import CONFIGS, QUICK
from safetensors.numpy import load_file, save_file

from jmoe import expected_loss, levels
from jmoe.beside import digest_of
from jmoe.config import from_hf
from jmoe.expected_loss import ExpectedLoss, Kind, Point
from serving.cli import main as cli
from training.distill import distill
from training.distill.plan import GIB, Amount, RunPlan, Timing, choose, measure
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
    return RunPlan(qwen(), config, tuple(ways), Amount.assumed(config), free)


def by_hand(layers, experts, d, f, vocab, attention, way, devices, tokens=32 * 128):
    """Returns GiB of the end-to-end stage a device, lowest and highest: bfloat16 model, float32
    master weights, two moments and gradients of the united experts; logits, and a layer's experts
    once, or seven times over.
    """
    routed = layers * experts * 3 * d * f
    rest = 2 * vocab * d + layers * (attention + experts * d + 2 * d) + d
    united, layer = routed // way, 2 * routed // layers
    logits = 4 * tokens // devices * vocab
    kept = 2 * (rest + routed / devices) + (4 + 8 + 4) * united / devices
    return [round((kept + n * logits + m * layer) / 2**30, 1) for n, m in ((1, 1), (2, 7))]


MIXTRAL = by_hand(32, 8, 4096, 14336, 32000, 4096 * (2 * 4096 + 2 * 1024), 2, 4)
QWEN3 = by_hand(94, 128, 4096, 1536, 151936, 4096 * (2 * 8192 + 2 * 512) + 256, 16, 8)


@pytest.mark.parametrize(
    ("name", "way", "devices", "wanted"),
    [("mixtral-8x7b", 2, 4, MIXTRAL), ("qwen3-235b-a22b", 16, 8, QWEN3)],
)
def test_the_plan_of_a_large_model_is_the_arithmetic_by_hand(name, way, devices, wanted):
    """From a machine that has no GPU; what loads the model is the host, not one device."""
    cfg = from_hf(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))
    config = dataclasses.replace(CONFIG, dtype="bfloat16", **FULL)
    free = Room("gpu", devices, int(133 * GIB), None, None)
    made = RunPlan(cfg, config, (way,), Amount.assumed(config), free)
    stage = next(stage for stage in made.stages if stage.end_to_end)
    assert [round(part / GIB, 1) for part in (stage.device.low, stage.device.high)] == wanted
    assert choose(made, named=True).refusal is None
    assert stage.host.low > 2 * cfg.num_moe_layers * cfg.num_experts * 3 * cfg.d_model * (
        cfg.d_ff_expert
    )


def test_default_ways_that_do_not_fit_are_left_out_with_a_warning():
    chosen = choose(plan(room(105)), named=False)
    assert (chosen.ways, chosen.refusal) == ((4, 8), None)
    (warning,) = chosen.warnings
    for words in (
        "way 2 is left out",
        "end to end",
        "122.8 to 127.0 GiB (the model 26.7 GiB, united experts",
        "105.0 GiB are free",
        "it fits with --ways 2 --refine-steps 0, or 2 such devices",
    ):
        assert words in warning
    assert "XLA_CLIENT_MEM_FRACTION" in warning
    for free, ways in [(room(140), (2, 4, 8)), (room(60), (8,)), (room(140, 64), (4, 8))]:
        assert choose(plan(free), named=False).ways == ways
    assert choose(plan(room(140, 1000, 100)), named=False).ways == (4, 8)


def test_what_may_not_fit_is_a_warning():
    chosen = choose(plan(room(125)), named=False)
    assert (chosen.ways, chosen.refusal) == ((2, 4, 8), None)
    assert ["may not fit" in words for words in chosen.warnings] == [True]


def test_named_ways_that_cannot_fit_are_refused_with_sizes():
    refusal = choose(plan(room(105)), named=True).refusal
    assert refusal is not None
    assert re.search(r"way 2, end to end.*122.8 to 127.0 GiB.*105.0 GiB", refusal)
    assert choose(plan(room(105), refine_steps=0), named=True).refusal is None
    offer = "it fits with --ways 2,4,8 --refine-steps 0, or --ways 4,8, or 2 such devices"
    assert offer in refusal
    assert choose(plan(room(40)), named=False).refusal is not None  # no default way fits


def test_unknown_memory_refuses_nothing():
    chosen = choose(plan(Room("gpu", 1, None, None, None)), named=False)
    assert (chosen.ways, chosen.warnings, chosen.refusal) == ((2, 4, 8), (), None)


@pytest.mark.parametrize(
    ("free", "ways", "offers"),
    [
        (room(9), (2,), ["--ways 2 --refine-steps 0 --rows 32768"]),
        (room(60), (2, 4), ["--ways 2,4 --refine-steps 0", "--ways 8", "4 such devices"]),
        (room(1), (8,), []),
    ],
)
def test_what_is_offered_fits(free, ways, offers):
    refusal = choose(plan(free, ways), named=True).refusal
    assert refusal is not None
    found = re.search("it fits with (.*?);", refusal)
    assert (found[1].split(", or ") if found else []) == offers
    assert found or "no smaller setting fits" in refusal
    for offer in offers:
        words = offer.split()
        given = dict(zip(words[::2], words[1::2], strict=False))
        changes = {key: int(given[flag]) for key, flag in FLAGS.items() if flag in given}
        own = [int(way) for way in given.get("--ways", ",".join(map(str, ways))).split(",")]
        number = int(words[0]) if words[1:] == ["such", "devices"] else 1
        tried = plan(dataclasses.replace(free, num_devices=number), own, **changes)
        assert choose(tried, named=True).refusal is None


FLAGS = {"refine_steps": "--refine-steps", "rows": "--rows"}


def test_memory_of_several_devices():
    one, four = (plan(dataclasses.replace(room(140), num_devices=n)).stages for n in (1, 4))
    assert [stage.device.high for stage in one] > [stage.device.high for stage in four]
    cpus = [Room("cpu", n, None, GIB, None) for n in (1, 4)]  # which share the host's memory
    small = {"rows": 4096, "refine_steps": 0}
    texts = ["".join(s.text for s in plan(cpu, [8], **small).shortages()) for cpu in cpus]
    takes = [float(re.findall(r"takes ([\d.]+)", text)[0]) for text in texts]
    assert takes[1] > 2.5 * takes[0]


def test_rows_that_do_not_divide_are_refused_before_the_run(tiny_dir):
    for changes, words in [
        ({}, "batch is 128; with 3 devices"),
        ({"batch": 96}, "refine_rows is 2: over 3 devices"),
        ({"batch": 96, "refine_rows": 3}, "d_model is 32 and does not divide by 3"),
    ]:
        config, three = dataclasses.replace(CONFIG, **changes), Room("cpu", 3, None, None, None)
        with pytest.raises(ValueError, match=words):
            prepare(tiny_dir.path, None, [], None, config, need_data=False, room=three)


def test_a_plan_fits_a_terminal():
    two = plan(dataclasses.replace(room(105), num_devices=2), steps=600)
    lines = [*choose(two, named=False).lines(TIMING)]
    assert max(map(len, lines)) <= 80
    words = " ".join(line.strip() for line in lines)
    for part in (
        "each of 2 devices",
        "time: about 73 min on this machine: layer by layer 42 min, end to end 31 min",
        "less: --refine-steps 0 leaves out the end-to-end stage: about 42 min",
        "with --steps 200, too, about 22 min",
    ):
        assert part in words


TIMING = Timing(1.0, {2: 0.04, 4: 0.04, 8: 0.04}, 0.04, 0.08)
"""24 layers: 768 s of capture, 3 * 576 s of steps; 3 * 600 steps of 1.04 s."""


def test_a_plan_needs_config_json_alone(tiny_dir, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_dir.path / "config.json").read_bytes())
    packed, found = prepare(tmp_path, None, [], None, CONFIG, need_data=False)
    assert packed is None
    assert found.ways == (2, 4, 8)
    words = "\n".join(found.lines(TIMING))
    for part in ("not counted", "layer by layer", "end to end", "disk:", "free:", "time: about"):
        assert part in words
    elsewhere = "\n".join(found.lines(rate=1e12))
    assert "time: at least 1 s" in elsewhere
    alone = dataclasses.replace(CONFIG, refine_steps=0)  # the whole of it: test_distill_page.py
    timing = measure(dataclasses.replace(found, config=alone, ways=(8,)))
    assert timing.steps.keys() == {8}
    assert min(timing.capture, timing.steps[8]) > 0


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
    _, found = prepare(tiny_dir.path, [4], [some], None, CONFIG)
    assert len(found.warnings) == 2
    assert "--rows wants 1,024" in found.warnings[0]
    assert "2,000 tokens would give 500" in found.warnings[1]
    enough = dataclasses.replace(CONFIG, rows=2048)
    assert prepare(tiny_dir.path, [4], [more], None, enough)[1].warnings == ()


# -- what a finished run says ----------------------------------------------------------------------


@pytest.mark.parametrize("beside", [True, False])
def test_the_last_line_of_a_run_serves_its_result(tiny_dir, tmp_path, monkeypatch, capsys, beside):
    """A shell runs it: `jmoe` is this command line, whose settings name the model. Levels that were
    searched are of the model as it is then.
    """
    model, served, data = tmp_path / "a model", [], tiny_dir.path / "tasks.jsonl"
    shutil.copytree(tiny_dir.path, model)
    out = model if beside else tmp_path / "out"

    def finish(model_dir, ways, files, out, *_):
        out.mkdir(exist_ok=True)
        save_file({"made": np.zeros(1)}, out / "united.safetensors")
        return [SimpleNamespace(way=2, error_before=1.0, error_after=0.5)], []

    async def serve(config, *_):
        served.append(config.engine)

    def search(config, ways, keep, searched, progress):
        assert (config.data, config.num, searched) == (data, 10, 5)
        digest = digest_of(Path(config.model))
        levels.write(config.out / levels.FILE, [levels.Levels(2, keep, rows)], digest)

    def price(config, settings, progress):
        assert (config.data, config.num) == (data, 10)
        assert {(s.way, s.keep) for s in settings} == {(2, "weight")}
        digest = digest_of(Path(config.model))
        config.out.mkdir()
        expected_loss.write(config.out / expected_loss.FILE, [expected], digest)

    expected = ExpectedLoss(Kind(2, "weight"), (Point(0, 0.2, 0.1, 0.3),))
    rows = tuple((level,) * 2 for level in range(101))
    monkeypatch.setattr("training.distill.distill", finish)
    monkeypatch.setattr("training.evaluation.sensitivity.evaluate_levels", search)
    monkeypatch.setattr("training.evaluation.run.evaluate", price)
    monkeypatch.setattr("serving.frontend.server.serve", serve)
    flags = ["--model", model, "--data", data, "--out", out, "--allow-unknown-config", "auto_map"]
    flags += ["--levels-items", "5"]
    last = command_line(monkeypatch, capsys, "distill", *flags).splitlines()[-1]
    *copies, line = last.split(" && ")
    assert len(copies) == (not beside)
    for copy in copies:
        subprocess.run(copy, shell=True, check=True)
    assert load_file(model / "united.safetensors").keys() == {"made"}
    assert levels.read(model, 2, digest_of(model))[2, "weight"].rows == rows
    assert expected_loss.read(model / expected_loss.FILE, digest_of(model)) == {
        expected.kind: expected
    }
    command_line(monkeypatch, capsys, *shlex.split(line)[1:])
    assert served[0].model == str(model)
    assert served[0].allow_unknown_config == ("auto_map",)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a plain text\n", "line 1 is not a task"),
        ('{"prompt": "2+2=", "answer": "4"}\n' * 9, "takes 10 tasks; .*data holds 9"),
    ],
)
def test_tasks_that_levels_need_are_looked_for_before_training(
    tiny_dir, tmp_path, monkeypatch, capsys, text, named
):
    monkeypatch.setattr("training.distill.distill", lambda *_: pytest.fail("it trained"))
    (tmp_path / "data").write_text(text, encoding="utf-8")
    words = ["distill", "--model", tiny_dir.path, "--data", tmp_path / "data", "--out", tmp_path]
    monkeypatch.setattr("sys.argv", ["jmoe", *map(str, words), "--levels-items", "5"])
    with pytest.raises(SystemExit):
        cli.main()
    assert re.search(named, capsys.readouterr().err)


def command_line(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["jmoe", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    return said.out
