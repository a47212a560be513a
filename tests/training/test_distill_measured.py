"""What `jmoe distill` says before it begins against what a tiny run makes; and finished runs."""

import dataclasses
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from distilled import QUICK
from safetensors import safe_open

import training.distill.run as whole
from jmoe.config import read_config
from training.distill import distill
from training.distill.prepare import prepare
from training.distill.refine import begin
from training.distill.sizes import (
    captured_bytes,
    layer_parameters,
    stream_bytes,
    united_file_bytes,
    united_parameters,
)

pytestmark = pytest.mark.exhaustive

CONFIG = dataclasses.replace(QUICK, steps=4, eval_every=2, refine_steps=2)


def nbytes(tree):
    """Returns the bytes of all arrays that are not single counts."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if np.ndim(leaf))


@pytest.fixture(scope="module")
def measured(tiny_dir, tmp_path_factory):
    """Returns the sizes of what a run keeps, measured where it keeps it."""
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
    amount = prepare(tiny_dir.path, [4, 3], data, None, CONFIG)[1].amount
    assert amount.captured_tokens < amount.tokens
    assert set(measured.rows) == {captured_bytes(cfg, amount.captured_tokens, 4)}
    assert set(measured.stream) == {stream_bytes(cfg, amount.captured_rows, CONFIG.length)}
    assert measured.fit == [4 * layer_parameters(cfg, way) for way in (4, 3)] * 2
    for way, (united, moments) in zip((4, 3), measured.state, strict=True):
        assert united == 4 * united_parameters(cfg, way)
        assert moments == 2 * 4 * united_parameters(cfg, way)  # Adam's, float32
    with safe_open(measured.out / "united.safetensors", "flax") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert stored == united_file_bytes(cfg, [4, 3])


def test_the_disk_holds_what_the_plan_said(tiny_dir, measured):
    """Finished layers and stages: what Orbax writes beside the arrays is not counted."""
    cfg = read_config(tiny_dir.path)
    work = measured.out / "distill-work"
    store = whole.Store(measured.out, {}, {}, measured.out)
    written = sum(
        leaf.nbytes
        for way in (4, 3)
        for at in range(cfg.num_moe_layers)
        for leaf in store.layer(way, at)[0].params.values()
    )
    assert written == 4 * sum(united_parameters(cfg, way) for way in (4, 3))
    assert sorted(path.name[-6:] for path in work.glob("refine-*")) == ["3-done", "4-done"]


def test_a_run_says_its_plan_before_it_begins(measured):
    words = "\n".join(measured.said)
    assert words.startswith("plan: qwen2_moe, 2 MoE layers of 8 experts, ways 4, 3")
    assert "captured a layer" in words


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
