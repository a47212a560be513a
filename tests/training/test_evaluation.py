"""Items, settings, the store, losses and tables of `jmoe evaluate`; figures by hand."""

import csv
import inspect
import io
import json
import math
import struct

import numpy as np
import pytest

from jmoe import expected_loss
from jmoe.brownout import Brownout, LowestGate
from jmoe.expected_loss import Kind
from jmoe.ratios import ratio
from jmoe.sharing import Sharing
from training.evaluation.items import ZERO, choose, grid, integers, parse_only, read_tasks
from training.evaluation.picture import draw
from training.evaluation.run import EvaluateConfig, borrowing_within, losses_against
from training.evaluation.store import Result, Store, digest, model_digest
from training.evaluation.tables import (
    expected_losses,
    paired_loss,
    scores,
    write_csv,
    write_markdown,
)
from training.tasks import Task, write_jsonl

TASK = {"prompt": "a", "answer": " b", "family": "f"}


def result(setting, right, **fields):
    return Result(setting, right, 0.25, [0.1, 0.3], **fields)


# -- items and settings --------------------------------------------------------------------------


def test_grid_has_the_papers_44_settings():
    settings = grid()
    assert len(settings) == len(set(settings)) == 44
    assert settings[0] == Brownout("partial", 100, 2)
    assert settings[-1] == Brownout("full", 0)
    assert [s.threshold_percent for s in settings[:11]] == list(range(100, -1, -10))


def test_grid_of_some():
    assert grid([4], [30, 7], ["partial"]) == [
        Brownout("partial", 30, 4),
        Brownout("partial", 7, 4),
    ]
    assert grid([4], [30], ["full"]) == [Brownout("full", 30)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([2], [101], ["full"]), "threshold is 101 %"),
        (([2], [-1], ["partial"]), "threshold is -1 %"),
        (([1], [0], ["partial"]), "way is 1"),
        (([2, 2], [0], ["partial"]), r"ways are \[2, 2\]"),
        (([2], [], ["partial"]), r"thresholds are \[\]"),
        (([2], [0], ["zero"]), "strategy is 'zero'; give partial or full"),
    ],
)
def test_bad_grids_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        grid(*arguments)


def test_single_settings():
    assert parse_only("2:0, 4:20,full:40") == [
        Brownout("partial", 0, 2),
        Brownout("partial", 20, 4),
        Brownout("full", 40),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2", "'2' of '2' is not WAY:PERCENT"),
        ("2:0,x:1", "'x:1' of"),
        ("2:0.5", "is not WAY:PERCENT"),
        ("2:130", "threshold is 130 %"),
        ("1:30", "way is 1"),
        ("2:0,2:0", "is twice"),
    ],
)
def test_bad_single_settings_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_only(text)


def test_integers():
    assert integers("ways", "2,4") == [2, 4]
    with pytest.raises(ValueError, match="--ways is '2;4'; it must be integers with commas"):
        integers("ways", "2;4")


def test_tasks_are_read_and_shuffled_by_seed(tmp_path):
    path = tmp_path / "own.jsonl"
    write_jsonl(path, "eval", 20, seed=3)
    items = read_tasks(path)
    chosen = choose(path, 10, None, seed=1)
    assert sorted(chosen) == sorted(items[:10])
    assert chosen == choose(path, 10, None, seed=1) != choose(path, 10, None, seed=2)
    path.write_text('{"prompt": "a", "answer": " b"}\n\n')
    assert read_tasks(path) == [Task("a", " b", "own")]


def test_fresh_tasks_are_held_out_and_differ_by_seed():
    one, other = choose(None, None, 30, seed=1), choose(None, None, 30, seed=2)
    assert len(one) == len(other) == 30
    assert one != other
    assert one == choose(None, None, 30, seed=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*own.jsonl: .*No such file"),
        (b"\xff\xfe", "cannot read .*own.jsonl"),
        (b"\n\n", "holds no task"),
        (json.dumps(TASK).encode() + b"\nnot json\n", "line 2 is not a task"),
        (b"[1]\n", "line 1 is not a task .a list, not an object"),
        (b'{"prompt": "a"}\n', "line 1 is not a task .answer is None"),
        (b'{"prompt": 3, "answer": "b"}\n', "prompt is 3, not a string"),
        (b'{"prompt": " ", "answer": "b"}\n', "prompt is ' '"),
    ],
)
def test_bad_task_files_are_refused_by_name_and_line(content, message, tmp_path):
    path = tmp_path / "own.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_tasks(path)


@pytest.mark.parametrize(
    ("num", "generate", "with_data", "message"),
    [
        (4, None, True, "num is 4, but .*own.jsonl holds 3 items; lower --num"),
        (0, None, True, "num is 0"),
        (None, 5, True, "either --data FILE or --generate-tasks"),
        (None, None, False, "either --data FILE or --generate-tasks"),
        (None, 0, False, "--generate-tasks is 0"),
        (2, 5, False, "num is 2 beside"),
    ],
)
def test_bad_numbers_of_items_are_refused(num, generate, with_data, message, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text((json.dumps(TASK) + "\n") * 3)
    with pytest.raises(ValueError, match=message):
        choose(path if with_data else None, num, generate, seed=0)


# -- the store -----------------------------------------------------------------------------------


def test_store_gives_back_what_was_added(tmp_path):
    inputs = {"num": 11, "text": {"a": "b"}}
    right = [bool(i % 3) for i in range(11)]
    first = result(Brownout("partial", 40, 8), right, perplexity={"a": 2.5}, seconds=1.5)
    Store(tmp_path / "new", inputs).add(first)
    Store(tmp_path / "new", inputs).add(result(ZERO, right))
    again = Store(tmp_path / "new", inputs).results
    assert list(again) == [Brownout("partial", 40, 8), ZERO]
    assert again[first.setting] == first


def test_results_of_a_users_own_strategy_are_read_while_its_code_is_the_same(tmp_path, monkeypatch):
    setting = Brownout(LowestGate(), 40, 2)
    Store(tmp_path, {}, [setting]).add(result(setting, [True, False]))
    assert list(Store(tmp_path, {}, [setting]).results) == [setting]
    assert list(Store(tmp_path, {}).results) == []  # of one that is not asked for
    monkeypatch.setattr(inspect, "getsource", lambda kind: "other code")
    assert list(Store(tmp_path, {}, [setting]).results) == []


def test_a_line_that_was_cut_off_runs_again(tmp_path):
    Store(tmp_path, {}).add(result(ZERO, [True]))
    path = tmp_path / "results.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[: len(whole) // 2])
    store = Store(tmp_path, {})
    assert list(store.results) == [ZERO]
    store.add(result(Brownout("full", 0), [False]))
    assert list(Store(tmp_path, {}).results) == [ZERO, Brownout("full", 0)]


def test_a_folder_of_other_inputs_is_refused(tmp_path):
    Store(tmp_path, {"num": 3, "batch": 64})
    with pytest.raises(ValueError, match=r"belongs to other inputs: num 3 \(now 4\); name another"):
        Store(tmp_path, {"num": 4, "batch": 64})
    with pytest.raises(ValueError, match=r"text None \(now 'x'\)"):
        Store(tmp_path, {"num": 3, "batch": 64, "text": "x"})
    (tmp_path / "inputs.json").write_text("{")
    with pytest.raises(ValueError, match=r"inputs.json is not readable"):
        Store(tmp_path, {})


def test_a_broken_line_is_named(tmp_path):
    Store(tmp_path, {})
    (tmp_path / "results.jsonl").write_text('{"strategy": "zero"}\n')
    with pytest.raises(ValueError, match=r"results.jsonl, line 1 is not a result"):
        Store(tmp_path, {})


def test_digests_see_what_changes(tmp_path):
    assert digest(["ab", "c"]) != digest(["a", "bc"])
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(100))
    before = model_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("of no matter")
    assert model_digest(tmp_path) == before
    weights.write_bytes(bytes(99) + b"x")
    assert model_digest(tmp_path) != before


@pytest.mark.parametrize("name", ["united.safetensors", "tokenizer.json", "state/d/0"])
def test_a_digest_sees_what_lies_beside_the_weights(tmp_path, name):
    """The last is of a model in jmoe's own format."""
    weights = tmp_path / ("jmoe.json" if name.startswith("state") else "model.safetensors")
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    weights.write_bytes(b"{}")
    path.write_bytes(bytes(100))
    before = model_digest(tmp_path)
    path.write_bytes(bytes(99) + b"x")
    assert model_digest(tmp_path) != before


# -- figures -------------------------------------------------------------------------------------


def test_loss_by_hand():
    before = np.array([1, 1, 1, 1, 0], bool)
    after = np.array([1, 0, 0, 1, 1], bool)
    loss, low, high = paired_loss({"f": (before, after)})
    assert loss == pytest.approx(25)  # 4 right before, 3 after
    assert low < loss < high
    # Two families count the same, whatever their sizes: (1 + 0.5) / 2 against (0.5 + 0.5) / 2.
    pair = np.array([1, 1], bool), np.array([1, 0], bool)
    other = np.array([1, 0] * 50, bool), np.array([1, 0] * 50, bool)
    assert paired_loss({"f": pair, "g": other})[0] == pytest.approx(100 / 3)


def test_interval_is_that_of_resampling_items():
    """Against resampling items one by one, and far narrower than if pairs were torn apart."""
    rng = np.random.default_rng(5)
    before = rng.random(400) < 0.9
    after = before & (rng.random(400) < 0.95)
    _, low, high = paired_loss({"f": (before, after)})
    picks = rng.integers(0, 400, (4000, 400))
    a, b = before[picks].mean(1), after[picks].mean(1)
    want = np.percentile(100 * (a - b) / a, [2.5, 97.5])
    np.testing.assert_allclose([low, high], want, atol=0.35)
    torn = np.percentile(100 * (a - rng.permutation(b)) / a, [2.5, 97.5])
    assert high - low < 0.6 * (torn[1] - torn[0])


def test_loss_without_a_right_answer_is_no_number():
    none = np.zeros(3, bool)
    assert all(map(math.isnan, paired_loss({"f": (none, none)})))


@pytest.fixture
def found():
    """Returns scores of zero brownout and a small grid on six items of two families."""
    families = ["x"] * 4 + ["y"] * 2
    settings = grid([2, 4], [100, 50, 0])
    right = {2: [True] * 5 + [False], 4: [True] * 3 + [False] * 3, None: [False] * 6}
    results = {
        s: result(s, right[s.way], perplexity={"t.txt": 3.0})
        for s in settings
        if s.threshold_percent < 100
    }
    results[ZERO] = result(ZERO, [True] * 6, perplexity={"t.txt": 2.0})
    return scores(settings, results, families)


def test_scores(found):
    assert len(found) == 1 + 9
    by_setting = {score.setting: score for score in found}
    assert by_setting[Brownout("partial", 100, 2)].result is found[0].result
    assert by_setting[Brownout("partial", 100, 2)].loss_percent == 0
    assert by_setting[Brownout("partial", 0, 2)].families == {"x": 1.0, "y": 0.5}
    assert by_setting[Brownout("partial", 0, 2)].loss_percent == pytest.approx(25)
    assert by_setting[Brownout("partial", 0, 4)].accuracy == pytest.approx(0.375)
    assert by_setting[Brownout("full", 0)].loss_percent == 100


def test_expected_losses_by_hand():
    settings = [*grid([2], [100, 50, 0], keeps=("weight",)), Brownout("partial", 40, 4)]
    settings.append(Brownout(LowestGate(), 0, 2))
    costs = {"tokens": [2, 4], "others": [0, 0]}
    results = {
        s: result(s, [True, True], excess=[0.2, 100 - s.threshold_percent], **costs)
        for s in settings
        if s.threshold_percent < 100
    }
    results[ZERO] = result(ZERO, [True, True], excess=[0.0, 0.0], **costs)
    found = {t.kind: t for t in expected_losses(scores(settings, results, ["f", "f"]))}
    assert set(found) == {Kind(2, "weight"), Kind(0, "weight")}  # way 4 was not run at 0
    points = found[Kind(2, "weight")].points
    assert [p[:2] for p in points] == [(50, pytest.approx(50.2 / 6)), (0, pytest.approx(100.2 / 6))]
    mean, margin = ratio(np.array([0.2, 50.0]), np.array([2, 4]))
    assert points[0][2:] == pytest.approx((mean - margin, mean + margin), abs=1e-5)


def test_what_was_measured_of_a_model_makes_no_other_of_it(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    before = model_digest(tmp_path)
    (tmp_path / expected_loss.FILE).write_text("{}")
    assert model_digest(tmp_path) == before
    (tmp_path / "levels.json").write_text("{}")
    assert model_digest(tmp_path) != before


def test_csv(found):
    rows = list(csv.DictReader(io.StringIO(write_csv(found))))
    assert len(rows) == 10
    assert rows[0]["strategy"] == "zero"
    row = next(r for r in rows if (r["way"], r["threshold_percent"]) == ("2", "50"))
    assert row["accuracy_percent"] == "75.0000"
    assert row["accuracy_loss_percent"] == "25.0000"
    assert row["accuracy_percent_y"] == "50.0000"
    assert row["degraded_visits_percent"] == "25.0000"
    assert row["perplexity_t.txt"] == "3.0000"
    assert (row["output_error"], row["output_error_layer_1"]) == ("0.2000", "0.3000")


def test_markdown_is_laid_out_as_table_1(found):
    text = write_markdown(
        found, {"model": "m", "items": "i", "dtype": "float32", "batch": 4, "chunk": 8}
    )
    lines = text.splitlines()
    at = lines.index("| threshold | way 2 | way 4 | full brownout |")
    assert lines[at + 2] == "| 100 % | 0.00 | 0.00 | 0.00 |"
    assert [line.split(" |")[0] for line in lines[at + 2 : at + 5]] == [
        "| 100 %",
        "| 50 %",
        "| 0 %",
    ]
    assert lines[at + 4].endswith("| 100.00 (100.00 to 100.00) |")
    assert "25.00 (" in lines[at + 4]
    assert "## Perplexity of t.txt" in text


def test_single_settings_leave_empty_cells():
    settings = parse_only("full:0,4:20,2:0")
    results = {s: result(s, [True, False]) for s in [ZERO, *settings]}
    inputs = {"model": "m", "items": "i", "dtype": "float32", "batch": 4, "chunk": 8}
    text = write_markdown(scores(settings, results, ["f", "f"]), inputs)
    assert "| threshold | way 2 | way 4 | full brownout |" in text
    assert "| 20 % |  | 0.00 (0.00 to 0.00) |  |" in text
    assert "| 0 % | 0.00 (0.00 to 0.00) |  | 0.00 (0.00 to 0.00) |" in text


def test_picture_has_its_size(found, tmp_path):
    draw(found, tmp_path / "new" / "evaluate.png", "title")
    content = (tmp_path / "new" / "evaluate.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24])[0] == 1600


def test_what_another_format_loses_is_paired_with_the_run_it_is_compared_with(tmp_path):
    config = EvaluateConfig(generate_tasks=40, out=tmp_path / "other")
    items = choose(None, None, 40, 0)
    inputs = {"items_digest": digest(part for item in items for part in item)}
    right = [number % 5 > 0 for number in range(40)]
    for folder, answers in ((tmp_path / "exact", [True] * 40), (config.out, right)):
        Store(folder, inputs).add(Result(ZERO, answers, 0.0, [0.0]))
    [(setting, (lost, low, high, beyond, margin))] = losses_against(
        config, tmp_path / "exact"
    ).items()
    assert (setting, beyond, margin) == (ZERO, 0, 0)
    families = [item.family for item in items]
    by_name = [
        [r for r, family in zip(right, families, strict=True) if family == name]
        for name in set(families)
    ]
    share = np.mean(list(map(np.mean, by_name)))
    assert lost == pytest.approx(100 * (1 - share))
    assert low < lost < high
    assert losses_against(config, config.out)[ZERO].loss_percent == 0
    with pytest.raises(ValueError, match=r"none has no inputs.json; name the --out of another run"):
        losses_against(config, tmp_path / "none")
    other = EvaluateConfig(generate_tasks=39, out=config.out)
    with pytest.raises(ValueError, match="exact has no zero brownout of these 39 items"):
        losses_against(other, tmp_path / "exact")


def test_losses_of_a_format_and_of_brownout_add_or_not(tmp_path):
    """Of each family's ten items the format has the first wrong, brownout the second; together
    they have three wrong, and so one of ten more than both by themselves, of nothing wrong.
    """
    names, setting = ["a", "b"], Brownout("partial", 20, 4)
    rows = [Task("p", str(number), names[number % 2]) for number in range(20)]
    text = "\n".join(json.dumps(row._asdict()) for row in rows)
    (tmp_path / "items.jsonl").write_text(text, encoding="utf-8")
    config = EvaluateConfig(data=tmp_path / "items.jsonl", out=tmp_path / "other")
    items = choose(config.data, None, None, 0)
    inputs = {"items_digest": digest(part for item in items for part in item)}

    def stored(folder, *wrongs):
        store = Store(folder, inputs)
        for one, wrong in zip((ZERO, setting), wrongs, strict=True):
            right = [int(item.answer) // 2 not in wrong for item in items]
            store.add(Result(one, right, 0.0, [0.0]))

    stored(tmp_path / "exact", (), (1,))
    stored(config.out, (0,), (0, 1, 2))
    found = losses_against(config, tmp_path / "exact")
    assert found[ZERO].loss_percent == pytest.approx(10)
    both = found[setting]
    assert both.loss_percent == pytest.approx(30)
    assert both.beyond == pytest.approx(10)
    assert both.margin == pytest.approx(100 * 1.96 * np.sqrt(2 * 0.09 / 10) / 2)


def scored_rights(*rights):
    """Returns scores of zero brownout and of partial at 40 and 0, of which so many items of 40 are
    right.
    """
    settings = Brownout("partial", 40, 2), Brownout("partial", 0, 2), Brownout("full", 0)
    results = {
        setting: Result(setting, [at < right for at in range(40)], 0.0, [0.0])
        for setting, right in zip((ZERO, *settings), (*rights, 0), strict=True)
    }
    return scores(settings, results, ["f"] * 40)


def test_siblings_borrow_united_experts_where_every_loss_is_within_the_bound():
    plain = Sharing.none(("base", "good", "fair", "poor"), 2, 8)
    found = {
        "base": scored_rights(40, 0, 0),
        "good": scored_rights(40, 40, 40),
        "fair": scored_rights(40, 40, 38),  # loses 5 %, and up to 12.5 % by the interval
        "poor": scored_rights(20, 20, 0),
    }
    high = found["fair"][2].high_percent
    assert found["fair"][2].loss_percent == pytest.approx(5)
    assert 5 < high < 20
    for bound, united in ((0, (0, 0, 2, 3)), (5, (0, 0, 2, 3)), (high, (0, 0, 0, 3))):
        sharing = borrowing_within(plain, found, bound)
        assert sharing.lenders == united
        facts = sharing.facts["united"]
        assert (facts["of"], facts["bound_percent"]) == ("base", bound)
        assert facts["loss_percent"]["good"]["way 2, t 0 %"] == [0, 0, 0]
        assert facts["loss_percent"]["poor"]["way 2, t 0 %"] == [100, 100, 100]
        assert len(facts["loss_percent"]["poor"]) == 2  # full brownout has no united experts
    every = borrowing_within(plain, dict.fromkeys(found, found["poor"]), 50)
    assert (every.united, every.lenders) == ((), (0, 1, 2, 3))
    with pytest.raises(ValueError, match="good has nothing right without brownout"):
        borrowing_within(plain, found | {"good": scored_rights(0, 0, 0)}, 5)
