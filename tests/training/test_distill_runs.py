"""Distillation as a whole: what it writes, interrupted and other runs in its folder, bad input."""

import dataclasses
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distilled import QUICK
from safetensors.flax import load_file, save_file

import jmoe
import training.distill.run as distillation
from jmoe.checkpoint import CheckpointError
from jmoe.layers import Layers
from jmoe.tokenizer import Tokenizer
from training.distill import DistillConfig, DistillError, distill, refine, sampled
from training.distill.data import pack_files
from training.distill.fit import HELD_OUT

pytestmark = pytest.mark.deep

# -- the whole -------------------------------------------------------------------------------------


def run(tiny_dir, out, progress=lambda *args: None, config=QUICK):
    return distill(tiny_dir.path, [4, 3], [tiny_dir.path / "tasks.jsonl"], out, config, progress)


@pytest.fixture(scope="module")
def finished(tiny_dir, tmp_path_factory):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        out = tmp_path_factory.mktemp("finished")
        seen = []
        return out, run(tiny_dir, out, lambda *args: seen.append(args)), seen


@pytest.mark.exhaustive
def test_what_is_held_out_is_told_by_data_file(tiny_dir, tmp_path):
    """By hand: the whole's divergence is the files' mean, by their tokens that were measured."""
    known, strange = tiny_dir.path / "tasks.jsonl", tmp_path / "strange.txt"
    rng = random.Random(0)
    letters = ("".join(rng.choices("abcdefghij ", k=60)) for _ in range(600))
    strange.write_text("\n".join(letters), encoding="utf-8")
    config = dataclasses.replace(QUICK, refine_steps=2, refine_rows=16)
    empty = tmp_path / "one.txt"
    empty.write_text("ab")
    files = [known, strange, empty]
    _, (refined,) = distill(tiny_dir.path, [4], files, tmp_path / "out", config)
    tokenizer, cfg = Tokenizer.load(tiny_dir.path), jmoe.load(tiny_dir.path).config
    packed = pack_files(files, cfg, tokenizer, config.length, config.seed)
    rows = refine._rows(packed, HELD_OUT, config)
    counts = np.zeros(3)
    for items, weights, of_row in zip(rows.items, rows.weights, rows.families, strict=True):
        for number, file in enumerate(of_row, 1):
            counts[int(file)] += weights[items == number].sum()
    assert counts[2] == 0
    assert np.isnan(refined.by_file[2])
    mean = np.average(refined.by_file[:2], weights=counts[:2])
    assert mean == pytest.approx(refined.after, rel=1e-4)
    assert refined.by_file[0] != pytest.approx(refined.by_file[1], rel=0.01)
    report = (tmp_path / "out" / "distill.md").read_text()
    assert f"| 4 | strange.txt | {refined.by_file[1]:.4f} |\n| 4 | one.txt | nan |" in report
    again = distill(tiny_dir.path, [4], files, tmp_path / "out", config)[1][0]
    np.testing.assert_equal(again.by_file, refined.by_file)


def test_it_writes_what_jmoe_loads(tiny_dir, finished, tmp_path):
    out, (layers, refined), seen = finished
    assert [(r.way, r.layer) for r in layers] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert all(r.error_after <= r.error_before for r in layers)  # the best is kept
    assert any(r.error_after < r.error_before for r in layers)
    assert all(r.after <= r.before for r in refined)
    assert any(r.after < r.before for r in refined)
    assert seen[-1][:3] == ("way 3, end to end", 4, 4)
    assert "divergence" in seen[-1][3]
    assert (out / "distill.png").stat().st_size > 1000
    assert "| 4 | 1 |" in (out / "distill.md").read_text()
    for file in tiny_dir.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "united.safetensors").symlink_to(out / "united.safetensors")
    model = jmoe.load(tmp_path, "float32")
    assert sorted(model.united) == [3, 4]
    assert model.united[3].gate_up.shape == (2, 3, 32, 32)
    assert model.united[3].groups.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2]] * 2
    tokens = np.arange(1, 20)[None]
    exact, browned = (
        jmoe.forward(model, tokens, setting) for setting in (None, jmoe.Brownout("partial", 0, 4))
    )
    assert np.isfinite(browned).all()
    assert float(jnp.max(jnp.abs(exact - browned))) > 0


class Killed(BaseException):
    pass


@pytest.mark.exhaustive
def test_interrupted_at_ten_moments_it_ends_in_the_same_bits(tiny_dir, finished, tmp_path):
    out, results, seen = finished
    rng = random.Random(1)
    for moment in sorted(rng.sample(range(1, len(seen)), 10)):
        at = 0

        def stop(*args, moment=moment):
            nonlocal at
            at += 1
            if at == moment:
                raise Killed

        with pytest.raises(Killed):
            run(tiny_dir, tmp_path / str(moment), stop)
        again = run(tiny_dir, tmp_path / str(moment))
        assert again == results
        got, want = (p / "united.safetensors" for p in (tmp_path / str(moment), out))
        assert got.read_bytes() == want.read_bytes()


def test_killed_processes_leave_work_that_goes_on(tiny_dir, finished, tmp_path):
    """SIGKILL, not an exception: nothing gets to clean up."""
    code = (
        "import sys, jax; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from types import SimpleNamespace\n"
        "from test_distill_runs import run\n"
        "run(SimpleNamespace(path=Path(sys.argv[2])), Path(sys.argv[3]),"
        " lambda *a: print(*a, flush=True))"
    )
    arguments = [os.path.dirname(__file__), str(tiny_dir.path), str(tmp_path)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    for lines in (4, 3):
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], env=env, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(lines):
            assert process.stdout.readline()
        time.sleep(0.05 * lines)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    run(tiny_dir, tmp_path)
    assert (tmp_path / "united.safetensors").read_bytes() == (
        finished[0] / "united.safetensors"
    ).read_bytes()


def test_a_full_disk_keeps_what_was_finished(tiny_dir, finished, tmp_path, monkeypatch):
    calls = []
    save = np.save

    def full(file, x):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(file, x)

    monkeypatch.setattr("training.distill.store.np.save", full)
    with pytest.raises(DistillError, match=r"No space left.*free some space"):
        run(tiny_dir, tmp_path)
    monkeypatch.undo()
    kept = sorted(p.name for p in (tmp_path / "distill-work").glob("way-*"))
    assert "way-3-layer-0" in kept
    run(tiny_dir, tmp_path)
    assert (tmp_path / "united.safetensors").read_bytes() == (
        finished[0] / "united.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("function", "advice"), [("fit_layer", "lower rows"), ("refine", "refine_steps 0")]
)
def test_a_device_that_is_too_small_is_told_what_helps(
    tiny_dir, tmp_path, monkeypatch, function, advice
):
    def exhausted(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes")

    monkeypatch.setattr(f"training.distill.run.{function}", exhausted)
    with pytest.raises(DistillError, match=rf"Out of memory.*{advice}"):
        run(tiny_dir, tmp_path)


@pytest.mark.exhaustive
def test_finished_layers_serve_other_ways_and_another_end_to_end_stage(
    tiny_dir, finished, tmp_path
):
    """Bit for bit what a fresh run gives, also where a first run stopped between two layers."""
    out = finished[0]
    data = [tiny_dir.path / "tasks.jsonl"]
    other = dataclasses.replace(QUICK, refine_steps=2, refine_learning_rate=1e-3)
    distill(tiny_dir.path, [2, 3], data, tmp_path / "fresh", other)

    shutil.copytree(out, tmp_path / "done")
    again = []
    distill(tiny_dir.path, [2, 3], data, tmp_path / "done", other, lambda *args: again.append(args))
    assert not any(what.startswith("way 3, layer") for what, *_ in again)
    assert any(what.startswith("way 2, layer") for what, *_ in again)

    def stop(what, *rest):
        if what == "layer 1: capture":
            raise Killed

    with pytest.raises(Killed):
        run(tiny_dir, tmp_path / "killed", stop)
    distill(tiny_dir.path, [2, 3], data, tmp_path / "killed", other)
    fresh, done, killed, before = (
        load_file(path / "united.safetensors")
        for path in (tmp_path / "fresh", tmp_path / "done", tmp_path / "killed", out)
    )
    others = {name: leaf for name, leaf in before.items() if name.startswith("way4.")}
    for found, want in [(killed, fresh), (done, fresh | others)]:  # way 4 stays in the file
        assert set(found) == set(want)
        for name, leaf in want.items():
            np.testing.assert_array_equal(found[name], leaf)


def test_another_run_does_not_mix_with_what_is_there(tiny_dir, finished, tmp_path):
    with pytest.raises(ValueError, match="another settings"):
        run(tiny_dir, finished[0], config=dataclasses.replace(QUICK, seed=1))


@pytest.fixture
def sibling(tiny_dir, tmp_path):
    """Returns a model whose file has the same size and another last bit."""
    path = shutil.copytree(tiny_dir.path, tmp_path / "sibling")
    change_a_bit(path)
    return SimpleNamespace(path=path)


def change_a_bit(path):
    weights = path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)


def unfinished(finished, out):
    """Makes a run as if it was killed: a layer is missing, or only the record that it was
    finished.
    """
    shutil.copytree(finished[0], out)
    (out / "distill-work" / "finished.json").unlink()
    return out


def test_a_folder_of_another_model_is_refused_finished_or_not(
    tiny_dir, finished, sibling, tmp_path
):
    out = unfinished(finished, tmp_path / "out")
    shutil.rmtree(out / "distill-work" / "way-3-layer-1")
    for folder in (finished[0], out):
        with pytest.raises(ValueError, match="holds a run of another model") as refused:
            run(sibling, folder)
        for words in (tiny_dir.path, sibling.path, "remove", "--out"):
            assert str(words) in str(refused.value)
        assert len(re.findall(r"sha256:[0-9a-f]{12}\b", str(refused.value))) == 2


def test_a_folder_of_a_model_with_another_template_is_refused(tiny_dir, finished, tmp_path):
    model = SimpleNamespace(path=shutil.copytree(tiny_dir.path, tmp_path / "model"))
    run(model, finished[0])
    template = model.path / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ tools }}")
    with pytest.raises(ValueError, match="another configuration or tokenizer"):
        run(model, finished[0])


def test_another_kind_of_devices_is_refused_until_it_is_finished(
    tiny_dir, finished, tmp_path, monkeypatch
):
    out = unfinished(finished, tmp_path / "out")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match=r"kind of devices \(1 cpu, and here are 1 gpu\)"):
        run(tiny_dir, out)
    assert run(tiny_dir, finished[0]) == finished[1]


def test_weights_that_change_under_a_run_end_it(finished, tiny_dir, tmp_path, monkeypatch):
    model = SimpleNamespace(path=shutil.copytree(tiny_dir.path, tmp_path / "model"))
    out, layers = unfinished(finished, tmp_path / "out"), distillation._Run.train

    def meanwhile(*args):
        change_a_bit(model.path)
        return layers(*args)

    monkeypatch.setattr(distillation._Run, "train", meanwhile)
    (out / "united.safetensors").unlink()
    with pytest.raises(DistillError, match=r"weights of .*model changed during the run"):
        run(model, out)
    assert not (out / "united.safetensors").exists()


def test_one_file_never_holds_united_experts_of_two_models(finished, sibling, tmp_path):
    """Where the folder with the work is gone, the file itself says of which model it is."""
    for united in (load_file(finished[0] / "united.safetensors"), None):
        (tmp_path / "out").mkdir(exist_ok=True)
        if united is None:
            shutil.copy(finished[0] / "united.safetensors", tmp_path / "out")
        else:  # as an older jmoe wrote it
            save_file(united, tmp_path / "out" / "united.safetensors")
        words = "does not say of which model" if united else "has the model sha256:"
        with pytest.raises(ValueError, match=rf"holds way3, way4 and {words}.*would mix two"):
            distill(sibling.path, [2], [sibling.path / "tasks.jsonl"], tmp_path / "out", QUICK)


def test_united_experts_of_another_model_are_not_served(finished, tiny_dir, sibling, tmp_path):
    shutil.copy(finished[0] / "united.safetensors", sibling.path)
    with pytest.raises(CheckpointError, match=r"was distilled from a model with the weights"):
        jmoe.load(sibling.path, "float32")
    assert not jmoe.load(sibling.path, "float32", ways=()).united
    own = shutil.copytree(tiny_dir.path, tmp_path / "own")
    shutil.copy(finished[0] / "united.safetensors", own)
    jmoe.save(jmoe.load(own, "float32"), tmp_path / "saved")  # in another format, from float32
    assert sorted(jmoe.load(tmp_path / "saved", "float32").united) == [3, 4]


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ways", [[1], [9], [2, 2], []])
def test_bad_ways_are_refused(tiny_dir, tmp_path, ways):
    with pytest.raises(ValueError, match="way"):
        distill(tiny_dir.path, ways, [tiny_dir.path / "tasks.jsonl"], tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": 3}\n', "line 2"),
        ("a.jsonl", b"nonsense\n", "line 1"),
        ("a.txt", b"\xff\xfe\x00", "cannot read"),
        ("a.txt", b"\n\n", "holds no text"),
        ("a.txt", None, "cannot read"),
    ],
)
def test_bad_data_is_named_before_texts_are_written(
    tiny_dir, tmp_path, monkeypatch, name, content, message
):
    monkeypatch.setattr(sampled, "write_texts", lambda *_, **__: pytest.fail("texts are written"))
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        distill(tiny_dir.path, [2], [path], tmp_path)


def test_another_models_tokenizer_is_refused(tiny_dir):
    cfg = dataclasses.replace(Layers(tiny_dir.path).cfg, vocab_size=40)
    tokenizer = Tokenizer.load(tiny_dir.path)
    with pytest.raises(ValueError, match=r"has token .*another model's"):
        pack_files([tiny_dir.path / "tasks.jsonl"], cfg, tokenizer, 64, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"objective": "best"},
        {"rows": 0},
        {"batch": 100},
        {"held_out": 0.0},
        {"learning_rate": -1.0},
        {"dtype": "int8"},
    ],
)
def test_settings_that_cannot_be_used_are_named(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        DistillConfig(**change)
