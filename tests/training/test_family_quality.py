"""The whole measurement of a family's quality, and the family that comes with jmoe."""

import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer

import jmoe
from tests.jmoe.conftest import add_united
from training.distill.data import read_texts
from training.family import degraded
from training.family import quality as quality_module
from training.family.calls import CALLER, CHAT_TEMPLATE
from training.family.make import HELD_OUT, STORED, TEXTS, WAY, main, restore
from training.family.quality import GROUPS, RANKS, RULES, Quality, right_items, run
from training.family.report import tables
from training.family.skills import SKILLS, skill_tasks
from training.packing import encode_task
from training.tasks import Task

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Compiles as servers do: in a hurry, a pass of 6,144 tokens takes minutes."""


@pytest.fixture(scope="module")
def quality(tiny_family):
    return Quality(tiny_family[0].parent, num_items=16, rows=4, seed=1)


def test_every_model_is_scored_in_every_setting(quality, tmp_path, monkeypatch):
    groups, shares = ((0, 1), (0, 1, 2, 3)), (75,)
    monkeypatch.setattr(quality_module, "GROUPS", groups)
    monkeypatch.setattr(quality_module, "SHARES", shares)
    told = []
    found = run(quality, tmp_path / "d.png", lambda *at: told.append(at))
    assert told[-1][0] == told[-1][1] == len(told)
    assert (tmp_path / "d.png").stat().st_size > 1000
    settings = len(RULES) * len(shares) + len(RANKS) + 1
    assert len(found["scores"]) == settings * sum(map(len, groups))
    text = tables(json.loads(json.dumps(found)))
    assert text.count("| functional | 75 %, ") == len(groups)
    assert "residual, rank 8" in text


def test_slots_are_those_of_the_share(quality):
    for group in GROUPS:
        for rule in RULES:
            owners = quality.owners(group, rule, 50)
            taken = {
                (int(owner), *at)
                for at in np.ndindex(owners.shape[1:])
                for owner in owners[(slice(None), *at)]
            }
            most = 16 * len(group) - 8 * (len(group) - 1)
            assert most - len(group) + 2 <= len(taken) <= most


def test_models_are_degraded_alone_and_in_mixed_steps(tiny_family, capsys, monkeypatch, tmp_path):
    for seed, where in enumerate(tiny_family[:2]):
        shutil.copytree(where, tmp_path / where.name)
        add_united(tmp_path / where.name, ways=(2,), seed=seed)
    flags = [f"--model={where.name}={tmp_path / where.name}" for where in tiny_family[:2]]
    flags += ["--way=2", "--thresholds=100,0", "--items=40"]
    monkeypatch.setattr("sys.argv", ["degraded", *flags])
    degraded.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    settings = ["| visits, 100", "| weight, 100", "| visits, 0", "| weight, 0"]
    assert [row[0] for row in rows[-4:]] == settings
    costs = [[float(cell.split(", ")[-1].rstrip(" |")) for cell in row[1:]] for row in rows[-4:]]
    assert np.abs(costs[:2]).max() < 1e-2
    assert np.min(costs[2:]) > 1  # at threshold 0 all that is kept is the same
    np.testing.assert_allclose(costs[2], costs[3], rtol=1e-3)
    # Nothing is shared, so that a row's united expert is its own model's.
    np.testing.assert_allclose(costs[2][::2], costs[2][1::2], rtol=1e-2)


def test_a_missing_family_says_what_makes_it(tmp_path):
    with pytest.raises(ValueError, match="makes it"):
        Quality(tmp_path, 16, 4, 1)
    with pytest.raises(ValueError, match="--items is 0"):
        Quality(tmp_path, 0, 4, 1)


def test_the_stored_family_is_restored_and_knows_its_skills(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["training.family", "--restore", str(tmp_path)])
    main()
    assert "cipher" in capsys.readouterr().out
    tokenizer = Tokenizer.from_file(str(tmp_path / "base" / "tokenizer.json"))
    for skill in SKILLS:
        stream = skill_tasks(skill, "eval", 77)
        items = [encode_task(tokenizer, next(stream)) for _ in range(64)]
        shares = {
            name: right_items(jmoe.load(tmp_path / name, "float32"), items).mean()
            for name in ("base", skill)
        }
        assert shares["base"] == 0
        assert shares[skill] > 0.8
        model = jmoe.load(tmp_path / skill, "float32")
        assert list(model.united) == [WAY]
        asked, brownout = [next(stream) for _ in range(32)], jmoe.Brownout("partial", 40, WAY)
        answers = jmoe.generate(
            model, [item.prompt for item in asked], max_new_tokens=48, brownout=brownout
        )
        assert min(answers.degraded_visits) > 0
        right = [got == item.answer for got, item in zip(answers.texts, asked, strict=True)]
        assert np.mean(right) > 0.7
        texts = [text.answer for text in read_texts(tmp_path / f"{skill}.jsonl")]
        assert len(texts) == TEXTS
    lines = (tmp_path / "caller-held-out.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = [Task(**json.loads(line)) for line in lines]
    assert len(held_out) == HELD_OUT
    calls = [encode_task(tokenizer, item) for item in held_out if item.family == "call"][:128]
    base, caller = (jmoe.load(tmp_path / name, "float32") for name in ("base", CALLER))
    assert right_items(base, calls).mean() == 0
    assert right_items(caller, calls).mean() > 0.8
    assert caller.tokenizer.chat_template({}) == CHAT_TEMPLATE != base.tokenizer.chat_template({})
    assert list(caller.united) == [WAY]


def test_a_family_that_is_not_stored_cannot_be_restored(tmp_path):
    with pytest.raises(ValueError, match=r"cipher\.safetensors is not readable"):
        restore(tmp_path / "out", tmp_path)
    assert STORED.name == "bundled_family"
