"""Texts that a model writes for its own distillation."""

import sys

import pytest

import jmoe
from serving.cli import main as cli
from training.distill.data import read_texts
from training.distill.sampled import write_texts


@pytest.mark.deep
def test_texts_begin_anywhere_and_are_decided_by_the_seed(tiny_dir, tmp_path):
    model = jmoe.load(tiny_dir.path, "float32")
    files = [tmp_path / name for name in ("a.jsonl", "again.jsonl", "other.jsonl")]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        write_texts(model, file, 40, length=8, seed=seed)
    texts, again, other = ([text.answer for text in read_texts(file)] for file in files)
    assert texts == again != other
    assert 30 < len(texts) <= 40  # of white space alone is no text, and passed over
    assert len({text[0] for text in texts}) > 10
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

    run()
    (file,) = out.glob("sampled-30-0-*")
    assert 20 < len(list(read_texts(file))) <= 30
    assert file.name in (out / "distill.md").read_text(encoding="utf-8")
    before = file.read_bytes()
    assert run().startswith("nothing left to do")
    (again,) = out.glob("sampled-*")
    assert again.read_bytes() == before
    monkeypatch.setattr(sys, "argv", ["jmoe", "distill", *map(str, words), "--sampled", "-1"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "--sampled is -1; it must be 0 or more" in capsys.readouterr().err
