"""`jmoe evaluate --leave-one-out`: what a run without a source reads, and what it compares."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from distilled import QUICK

import training.distill.run as distillation
from jmoe.brownout import Brownout
from jmoe.tokenizer import Tokenizer
from training.distill import distill
from training.evaluation.items import read_tasks
from training.evaluation.left_out import leave_one_out, mean_loss, united_without, without
from training.evaluation.run import EvaluateConfig
from training.tasks import Task

SHORT = dataclasses.replace(QUICK, rows=600, steps=2, refine_steps=1, eval_every=2)
PARTIAL = Brownout("partial", 40, 4)


@pytest.fixture
def two_sources(tmp_path):
    """Returns a file of items of two sources, mixed; one digit tells which an item is of."""
    rng = np.random.default_rng(0)
    rows = [
        {
            "prompt": " ".join(
                "7" if source == "sevens" else "3" for _ in range(rng.integers(9, 20))
            )
            + f" {word} =",
            "answer": " done",
            "family": source,
        }
        for word in ("sort", "move", "add", "spell") * 12
        for source in ("sevens", "threes")
    ]
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, rows


@pytest.mark.deep
def test_nothing_of_the_left_out_source_is_captured(tiny_dir, two_sources, tmp_path, monkeypatch):
    data, captured = two_sources[0], []
    run_layer = distillation.run_layer

    def spy(*args, **kwargs):
        captured.append(args[5].tokens)
        return run_layer(*args, **kwargs)

    monkeypatch.setattr(distillation, "run_layer", spy)
    config = EvaluateConfig(str(tiny_dir.path), data=data, out=tmp_path / "out")
    short = dataclasses.replace(SHORT, refine_steps=0)
    united_without(config, [4], read_tasks(data), "sevens", short)
    decode = Tokenizer.load(tiny_dir.path).decode
    texts = [decode(tokens.reshape(-1).tolist()) for tokens in captured]
    assert ["3" in text for text in texts] == [True, True]  # a layer each
    assert ["7" in text for text in texts] == [False, False]


@pytest.mark.exhaustive
def test_a_source_is_scored_by_united_experts_of_the_other_alone(tiny_dir, two_sources, tmp_path):
    """Those are, in their bits, of a distillation on the other source's items and no others, beside
    texts that the model writes, which are written once.
    """
    data, rows = two_sources
    short = dataclasses.replace(SHORT, sampled=8)
    config = EvaluateConfig(
        str(tiny_dir.path), "float32", data, num=16, batch=4, error_steps=1, out=tmp_path / "out"
    )
    (found,) = leave_one_out(config, [PARTIAL], short, ["sevens"])
    assert len(found.unseen.result.right) == sum(row["family"] == "sevens" for row in rows[:16])
    assert found.full.setting.strategy == "full"
    assert 0 < found.full.setting.threshold_percent < 100
    assert "| sevens |" in (config.out / "leave_one_out.md").read_text()
    left = [row for row in rows[16:] if row["family"] == "threes"]
    alone = tmp_path / "alone.jsonl"
    alone.write_text("".join(json.dumps(row) + "\n" for row in left))
    distill(tiny_dir.path, [4], [alone], tmp_path / "alone", short)
    assert len({*tmp_path.rglob("own-texts-8-*")}) == 4  # one, and a copy for each of the others
    files = [folder / "united.safetensors" for folder in (tmp_path / "alone", config.out / "all")]
    own = (config.out / "without-sevens" / "united.safetensors").read_bytes()
    assert [own == file.read_bytes() for file in files] == [True, False]


def test_a_prompt_of_the_source_does_not_come_in_by_another():
    texts = [Task("a", " 1", "x"), Task("b", " 2", "x"), Task("a", " 1", "y"), Task("c", " 3", "y")]
    assert without(texts, "x") == [Task("c", " 3", "y")]
    assert without(texts, "y") == [Task("b", " 2", "x")]


def test_the_mean_over_sources_passes_over_one_without_any_right():
    losses = [(10.0, 7.0, 14.0), (20.0, 16.0, 23.0), (math.nan,) * 3]
    scores = [
        SimpleNamespace(seen=SimpleNamespace(loss_percent=mean, low_percent=low, high_percent=high))
        for mean, low, high in losses
    ]
    assert mean_loss(scores, "seen") == (15.0, 12.5, 17.5)  # 3-4-5, halved


@pytest.mark.parametrize(
    ("changes", "settings", "sources", "message"),
    [
        ({}, [PARTIAL], ["eights"], "source is 'eights'; the items are of: sevens, threes"),
        ({"num": None}, [PARTIAL], [], "num is None; with --leave-one-out"),
        ({}, [Brownout("partial", 100, 4)], [], "thresholds are 100"),
        ({}, [Brownout("full", 40)], [], "compares partial brownout"),
    ],
)
def test_bad_input_is_named(changes, settings, sources, message, two_sources, tmp_path):
    config = EvaluateConfig("nowhere", data=two_sources[0], num=8, out=tmp_path / "out")
    config = dataclasses.replace(config, **changes)
    with pytest.raises(ValueError, match=message):
        leave_one_out(config, settings, SHORT, sources)
    assert not config.out.exists()
