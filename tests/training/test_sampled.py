"""Texts that a model writes for its own distillation."""

import dataclasses
import gc
import json
import re
import sys

import jax
import pytest

import jmoe
from jmoe.brownout import Brownout
from jmoe.free_memory import free_host_bytes
from serving.cli import main as cli
from tests.training.distilled import QUICK
from training.distill import distill
from training.distill.data import read_texts
from training.distill.room import Room
from training.distill.sampled import with_num_texts, write_texts
from training.distill.store import Store
from training.evaluation.left_out import leave_one_out
from training.evaluation.run import EvaluateConfig


@pytest.mark.deep
def test_texts_begin_anywhere_and_are_decided_by_the_seed(tiny_dir, tmp_path):
    model = jmoe.load(tiny_dir.path, "float32")
    files = [tmp_path / name for name in ("a.jsonl", "again.jsonl", "other.jsonl")]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        write_texts(model, file, 40, length=8, seed=seed)
    texts, again, other = ([text.token_ids for text in read_texts(file)] for file in files)
    assert texts == again != other
    assert len(texts) == 40
    ends = set(model.config.eos_token_ids)
    for ids, answer in texts:
        assert answer == []  # or what is written would count ten times as much
        assert 1 <= len(ids) <= 8
        assert ends.isdisjoint(ids)
    assert len({ids[0] for ids, _ in texts}) > 10
    with pytest.raises(ValueError, match=r"num is 0 and length 8"):
        write_texts(model, files[0], 0, length=8)


@pytest.mark.deep
def test_a_distillation_trains_on_them_and_is_finished_the_second_time(
    tiny_dir, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    words = ["--model", tiny_dir.path, "--data", tiny_dir.path / "tasks.jsonl", "--out", out]
    words += ["--sampled", 30, "--ways", 4, "--rows", 512, "--steps", 2, "--batch", 128]
    words += ["--decode-batch", 32, "--eval-every", 1, "--length", 64, "--refine-steps", 1]
    words += ["--refine-rows", 2, "--dtype", "float32"]

    def run(*more) -> str:
        monkeypatch.setattr(sys, "argv", ["jmoe", "distill", *map(str, (*words, *more))])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        said = capsys.readouterr()
        assert not caught.value.code, said.err
        return said.out

    before_it = sum(array.nbytes for array in jax.live_arrays())
    run()
    gc.collect()
    left = sum(array.nbytes for array in jax.live_arrays())
    assert left - before_it < jmoe.load(tiny_dir.path, "float32").weights.params["embed"].nbytes
    (file,) = out.glob("own-texts-30-0-*")
    assert len(list(read_texts(file))) == 30
    assert file.name in (out / "distill.md").read_text(encoding="utf-8")
    before = file.read_bytes()
    assert run().startswith("nothing left to do")
    (again,) = out.glob("own-texts-*")
    assert again.read_bytes() == before
    monkeypatch.setattr(sys, "argv", ["jmoe", "distill", *map(str, words), "--sampled", "-1"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "sampled is -1; it must be 0 or more" in capsys.readouterr().err


def test_by_default_a_model_that_one_device_holds_writes_ten_thousand(tiny_dir):
    def number(platform, device, host, sampled=None):
        config = dataclasses.replace(QUICK, sampled=sampled)
        room = Room(platform, 8, device, host, None)
        return with_num_texts(config, tiny_dir.path, room).sampled

    model = jmoe.load(tiny_dir.path, "float32", ways=())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights))
    assert number("gpu", 2 * size, None) == number("cpu", None, 2 * size) == 10_000
    assert number("gpu", None, None) == 10_000  # not known
    assert number("gpu", size, 100 * size) == number("cpu", None, size) == 0
    assert number("gpu", size, None, sampled=7) == 7
    assert number("gpu", 2 * size, None, sampled=0) == 0


class Killed(Exception):
    pass


@pytest.mark.deep
def test_a_run_goes_on_with_the_number_of_texts_that_it_began_with(tiny_dir, tmp_path, monkeypatch):
    """Whatever memory is free then; a number of one's own is refused by name."""

    def stop(what, *_):
        if what.startswith("layer"):
            raise Killed

    def begin(config):
        distill(tiny_dir.path, [4], [tiny_dir.path / "tasks.jsonl"], tmp_path, config, stop)

    began = dataclasses.replace(QUICK, sampled=3, rows=128)
    with pytest.raises(Killed):
        begin(began)
    for free in (0, 1 << 40):
        here = Room("cpu", 1, None, free, None)
        monkeypatch.setattr("training.distill.run.room_here", lambda out, here=here: here)
        with pytest.raises(Killed):
            begin(dataclasses.replace(began, sampled=None))
    differing = re.escape(
        "(optimizer adam, and now lion; rows 128, and now 256; sampled 3, and now 2)"
    )
    with pytest.raises(ValueError, match=f"another settings {differing}"):
        begin(dataclasses.replace(began, sampled=2, rows=256, optimizer="lion"))


def test_where_memory_runs_out_over_texts_that_nobody_asked_for_there_are_none(
    tiny_dir, tmp_path, monkeypatch
):
    def exhausted(model, out, *args, **kwargs):
        out.touch()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes")

    monkeypatch.setattr("training.distill.sampled.write_texts", exhausted)
    begun, said = [], []

    def stop(what, *_):
        begun.append(what)
        raise Killed

    def begin(sampled):
        config = dataclasses.replace(QUICK, sampled=sampled, rows=128)
        data = [tiny_dir.path / "tasks.jsonl"]
        distill(tiny_dir.path, [4], data, tmp_path, config, stop, say=said.append)

    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        begin(3)
    with pytest.raises(Killed):
        begin(None)
    assert begun == ["layer 0: capture"]
    assert sum("it writes no texts of its own" in line for line in said) == 1
    assert not [*tmp_path.glob("own-texts-10000-*")]


def test_so_does_one_that_leaves_sources_out(tiny_dir, tmp_path, monkeypatch):
    settings = dataclasses.replace(QUICK, sampled=3).stages()[0]
    Store(tmp_path / "all", {"settings": settings}, {}, tiny_dir.path)
    asked = []

    def stop(directory, out, config, *_, **__):
        asked.append(config.sampled)
        raise Killed

    monkeypatch.setattr("training.evaluation.left_out.sampled_texts", stop)
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{at}", "answer": "1", "family": f"{at % 2}"} for at in range(8)]
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    config = EvaluateConfig(str(tiny_dir.path), data=data, num=4, out=tmp_path)
    with pytest.raises(Killed):
        leave_one_out(config, [Brownout("partial", 0, 4)], dataclasses.replace(QUICK, sampled=None))
    assert asked == [3]


def test_memory_that_a_group_of_processes_can_give_back_is_free(tmp_path, monkeypatch):
    """Files that it read stay in the memory of a container until something else needs it."""
    files = {
        "memory.max": "1000",
        "memory.current": "900",
        "memory.stat": "anon 1\ninactive_file 7",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n", encoding="ascii")
    roots = {"/sys/fs/cgroup": tmp_path, "/proc/meminfo": tmp_path / "absent"}
    monkeypatch.setattr("jmoe.free_memory.Path", lambda name: roots[name])
    assert free_host_bytes() == 107
    (tmp_path / "memory.stat").unlink()
    assert free_host_bytes() == 100
