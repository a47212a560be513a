"""Texts that a model writes for its own distillation."""

import pytest

import jmoe
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
