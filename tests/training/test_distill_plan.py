"""What a distillation says before it begins, held against what a tiny run really makes."""

import dataclasses
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml
from safetensors import safe_open
from test_distill import QUICK
from test_distill_h200 import CONFIGS

import training.distill.run as whole
from jmoe.config import from_hf, read_config
from training.distill import distill
from training.distill.plan import GIB, Amount, choose, make_plan
from training.distill.prepare import prepare
from training.distill.refine import begin
from training.distill.room import Room
from training.distill.sizes import (
    captured_bytes,
    end_to_end_stage,
    layer_parameters,
    model_parameters,
    optimizer_bytes,
    stream_bytes,
    united_file_bytes,
    united_parameters,
)

CONFIG = dataclasses.replace(QUICK, steps=4, eval_every=2, refine_steps=2)


def qwen():
    return from_hf(yaml.safe_load((CONFIGS / "qwen1.5-moe-a2.7b.yaml").read_text()))


def nbytes(tree):
    """Of all arrays that are not single counts."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if np.ndim(leaf))


@pytest.fixture(scope="module")
def measured(tiny_dir, tmp_path_factory):
    """Sizes of what a run keeps, seen where it keeps it."""
    out = tmp_path_factory.mktemp("measured")
    seen = SimpleNamespace(out=out, rows=[], stream=[], fit=[], state=[], said=[])
    fit_layer, save_stream = whole.fit_layer, whole.Store.save_stream

    def fit(start, members, groups, rows, *args):
        seen.rows.append(nbytes(rows))
        done = fit_layer(start, members, groups, rows, *args)
        seen.fit.append(nbytes(done.params))
        return done

    def stream(store, layer, x):
        seen.stream.append(x.nbytes)
        save_stream(store, layer, x)

    def began(*args):
        at = begin(*args)
        seen.state.append((nbytes(at.united), nbytes(at.state)))
        return at

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "fit_layer", fit)
        patch.setattr(whole.Store, "save_stream", stream)
        patch.setattr(whole, "begin", began)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            data = [tiny_dir.path / "tasks.jsonl"]
            seen.results = distill(tiny_dir.path, [4, 3], data, out, CONFIG, say=seen.said.append)
    return seen


def test_sizes_are_those_of_the_arrays_of_a_run(tiny_dir, measured):
    cfg = read_config(tiny_dir.path)
    data = [tiny_dir.path / "tasks.jsonl"]
    amount = prepare(tiny_dir.path, [4, 3], data, None, CONFIG).plan.amount
    assert amount.captured_tokens < amount.tokens
    assert set(measured.rows) == {captured_bytes(cfg, amount.captured_tokens, 4)}
    assert set(measured.stream) == {stream_bytes(cfg, amount.captured_rows, CONFIG.length)}
    assert measured.fit == [4 * layer_parameters(cfg, way) for way in (4, 3)] * 2
    for way, (united, moments) in zip((4, 3), measured.state, strict=True):
        assert united == 4 * united_parameters(cfg, way)
        assert moments == optimizer_bytes(united_parameters(cfg, way))
    with safe_open(measured.out / "united.safetensors", "flax") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert stored == united_file_bytes(cfg, [4, 3])


def test_the_disk_holds_what_the_plan_said(tiny_dir, measured):
    """Finished layers and stages: what Orbax writes beside the arrays is not counted."""
    cfg = read_config(tiny_dir.path)
    work = measured.out / "distill-work"
    written = sum(
        leaf.nbytes
        for way in (4, 3)
        for at in range(cfg.num_moe_layers)
        for leaf in whole.Store(measured.out, {}, {}).layer(way, at)[0].params.values()
    )
    assert written == 4 * sum(united_parameters(cfg, way) for way in (4, 3))
    assert sorted(path.name[-6:] for path in work.glob("refine-*")) == ["3-done", "4-done"]


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
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in warning
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


def test_a_run_says_its_plan_before_it_begins(measured):
    words = "\n".join(measured.said)
    assert words.startswith("plan: qwen2_moe, 2 MoE layers of 8 experts, ways 4, 3")
    assert "captured a layer" in words
    assert "time, a rough estimate" in words


# -- a run that is over ----------------------------------------------------------------------------


def snapshot(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def forbid(monkeypatch):
    def loaded(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(whole, "Layers", loaded)
    monkeypatch.setattr(whole, "load", loaded)


@pytest.mark.parametrize("ways", [[4, 3], [3, 4]])
def test_a_finished_run_is_left_as_it_is(tiny_dir, measured, monkeypatch, ways):
    before, said = snapshot(measured.out), []
    forbid(monkeypatch)
    data = [tiny_dir.path / "tasks.jsonl"]
    layers, refined = distill(tiny_dir.path, ways, data, measured.out, CONFIG, say=said.append)
    assert said == [f"nothing left to do: {measured.out / 'united.safetensors'} is finished"]
    assert layers == measured.results[0]
    assert [result.way for result in refined] == ways
    assert sorted(refined, key=str) == sorted(measured.results[1], key=str)
    assert snapshot(measured.out) == before


def test_a_file_that_is_gone_is_written_again_from_what_was_kept(
    tiny_dir, measured, monkeypatch, tmp_path
):
    """Also where it was changed; a copy with other times is still finished."""

    def again(out):
        said = []
        data = [tiny_dir.path / "tasks.jsonl"]
        distill(tiny_dir.path, [4, 3], data, out, CONFIG, say=said.append)
        return said

    def no_training(*args, **kwargs):
        raise AssertionError("trained again")

    for name in ("fit_layer", "refine", "load"):
        monkeypatch.setattr(whole, name, no_training)
    want = (measured.out / "united.safetensors").read_bytes()
    out = tmp_path / "copy"
    shutil.copytree(measured.out, out, copy_function=shutil.copyfile)
    assert again(out)[0].startswith("nothing left to do")
    (out / "united.safetensors").unlink()
    assert again(out)[0].startswith("plan:")
    assert (out / "united.safetensors").read_bytes() == want
    (out / "distill.md").write_text("changed")
    assert again(out)[0].startswith("plan:")
    assert "changed" not in (out / "distill.md").read_text()


def test_missing_data_is_not_taken_for_a_finished_run(tiny_dir, measured):
    with pytest.raises(ValueError, match="cannot read data file"):
        distill(tiny_dir.path, [4, 3], [tiny_dir.path / "none.jsonl"], measured.out, CONFIG)


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
