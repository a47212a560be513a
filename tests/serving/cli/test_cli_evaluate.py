"""`jmoe evaluate`: flags reach the run, and bad input is one line."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from jmoe import expected_loss
from jmoe.brownout import Brownout, LowestGate
from jmoe.checkpoint import weights_digest
from jmoe.config import read_config
from jmoe.display import size
from jmoe.expected_loss import ExpectedLoss, Kind, Point
from jmoe.family import load_family
from jmoe.sharing import write_sharing
from serving.cli import main as cli
from serving.config import EngineConfig
from serving.startup.loading import expected_losses
from tests.jmoe.conftest import add_united
from tests.jmoe.family_oracles import drawn_map
from tests.variants import variant
from training.distill import DistillConfig
from training.evaluation import left_out
from training.evaluation import run as run_module
from training.evaluation.items import STRATEGIES, THRESHOLDS, WAYS, ZERO, grid
from training.evaluation.left_out import Compared
from training.evaluation.run import EvaluateConfig


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["jmoe", "evaluate", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code or 0


@pytest.fixture
def calls(monkeypatch):
    """Records what `evaluate` is called with; it scores nothing."""
    seen = []

    def evaluate(config, settings, progress):
        seen.append((config, settings))
        progress("evaluate", 1, 1)
        result = run_module.Result(run_module.ZERO, [True], 0.0, [0.0])
        return run_module.scores([], {Brownout("zero"): result}, ["f"])

    monkeypatch.setattr(run_module, "evaluate", evaluate)
    return seen


def test_defaults_are_the_papers_grid(calls, monkeypatch, capsys) -> None:
    assert run(monkeypatch, "--generate-tasks", "5000") == 0
    ((config, settings),) = calls
    assert settings == grid(WAYS, THRESHOLDS, STRATEGIES)
    assert config == EvaluateConfig(generate_tasks=5000)
    assert "zero brownout: 100.00 % right" in capsys.readouterr().out


def test_another_cache_is_compared_with_another_run(calls, monkeypatch, capsys) -> None:
    seen = []

    def losses_against(config, folder):
        seen.append(folder)
        both = run_module.Compared(1.5, 1.25, 1.75, -0.125, 0.25)
        zero = run_module.Compared(0.123, -0.01, 0.25)
        return {Brownout("zero"): zero, Brownout("partial", 20, 4): both}

    monkeypatch.setattr(run_module, "losses_against", losses_against)
    monkeypatch.setattr(run_module, "right_answers", lambda config, folder: {})
    flags = "--generate-tasks 9 --kv-cache-dtype fp8 --against exact"
    assert run(monkeypatch, *flags.split()) == 0
    assert calls[0][0].kv_cache_dtype == "fp8"
    assert seen == [Path("exact")]
    said = capsys.readouterr().out
    assert "of exact, zero brownout loses 0.12 % (-0.01 to 0.25)\n" in said
    both = "way 4, t 20 % loses 1.50 % (1.25 to 1.75), -0.12 ± 0.25 beyond the sum of both\n"
    assert f"of exact, {both}" in said


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--against none", "none has no inputs.json"),
        ("--against none --sensitivity", "does not go with --sensitivity"),
        ("--against none --leave-one-out", "does not go with --leave-one-out"),
    ],
)
def test_what_nothing_is_compared_with_is_named_before_anything_runs(
    calls, monkeypatch, capsys, flags, named
) -> None:
    assert run(monkeypatch, "--generate-tasks", "9", *flags.split()) != 0
    assert named in capsys.readouterr().err
    assert not calls


def test_no_loss_is_told_where_nothing_was_right(monkeypatch, capsys) -> None:
    results = {
        brownout: run_module.Result(brownout, [False], 0.0, [0.0])
        for brownout in (Brownout("zero"), Brownout("full", 0))
    }
    found = run_module.scores([Brownout("full", 0)], results, ["f"])
    monkeypatch.setattr(run_module, "evaluate", lambda *_: found)
    assert run(monkeypatch, "--generate-tasks", "1") == 0
    assert "full, t 0 %: 0.00 % right, loss -\n" in capsys.readouterr().out


def test_flags_are_the_fields_of_the_configuration() -> None:
    flags = {parameter.name for parameter in get_command(cli.app).commands["evaluate"].params}
    fields = {field.name for field in dataclasses.fields(EvaluateConfig)}
    assert flags == fields - {"united_of"} | {
        "ways",
        "thresholds",
        "strategies",
        "keep",
        "only",
    } | {
        "levels",
        "sensitivity",
        "search_items",
        "sampled",
        "against",
        "borrow_united",
        "leave_one_out",
        "sources",
        "distill_rows",
        "distill_steps",
        "refine_steps",
    }


def test_flags_reach_the_run(calls, monkeypatch) -> None:
    flags = "--data d.jsonl --num 7 --ways 4 --thresholds 30,0 --strategies partial --batch 8"
    more = "--text a.txt --text b.txt --chunk 32 --seed 3 --out o --dtype float32 --model m"
    assert run(monkeypatch, *flags.split(), *more.split()) == 0
    assert run(monkeypatch, "--data", "d.jsonl", "--only", "2:0,full:40") == 0
    assert run(monkeypatch, "--data", "d", "--only", "2:0", "--keep", "visits,weight") == 0
    own = "--generate-tasks 9 --strategies jmoe.brownout:LowestGate --ways 2,4 --thresholds 40"
    assert run(monkeypatch, *own.split()) == 0
    levels = "--generate-tasks 9 --strategies partial --ways 2 --thresholds 40 --levels"
    assert run(monkeypatch, *levels.split()) == 0
    (config, settings), (_, single), (_, both), (_, lowest), (_, by_layer) = calls
    assert lowest == [Brownout(LowestGate(), 40, 2), Brownout(LowestGate(), 40, 4)]
    assert by_layer == [Brownout("partial", 40, 2, levels=True)]
    assert both == [Brownout("partial", 0, 2), Brownout("partial", 0, 2, "weight")]
    assert settings == [Brownout("partial", 30, 4), Brownout("partial", 0, 4)]
    assert (config.data, config.num, config.batch, config.chunk) == (Path("d.jsonl"), 7, 8, 32)
    assert (config.text, config.out) == ((Path("a.txt"), Path("b.txt")), Path("o"))
    assert (config.seed, config.dtype, config.model) == (3, "float32", "m")
    assert single == [Brownout("partial", 0, 2), Brownout("full", 40)]


def test_leaving_one_out_is_as_short_as_it_is_asked_to_be(monkeypatch, capsys, tmp_path) -> None:
    result = run_module.Result(run_module.ZERO, [True], 0.0, [0.0])
    (score,) = run_module.scores([], {Brownout("zero"): result}, ["sort"])
    seen = []

    def leave_one_out(config, settings, distillation, sources, progress):
        seen.append((config, settings, distillation, sources))
        return [Compared("sort", settings[0], score, score, score, score, 9.0)]

    monkeypatch.setattr(left_out, "leave_one_out", leave_one_out)
    flags = "--leave-one-out --sources sort,add --ways 8 --thresholds 40,0 --keep weight --seed 3"
    short = "--distill-rows 100 --distill-steps 20 --refine-steps 7 --sampled 5"
    more = ["--generate-tasks", "9", "--out", str(tmp_path)]
    assert run(monkeypatch, *flags.split(), *short.split(), *more) == 0
    ((config, settings, distillation, sources),) = seen
    assert settings == [Brownout("partial", t, 8, "weight") for t in (40, 0)]
    assert distillation == DistillConfig(rows=100, steps=20, refine_steps=7, seed=3, sampled=5)
    assert (config.generate_tasks, config.seed, sources) == (9, 3, ["sort", "add"])
    assert "sort, way 8, t 40 %: right 100.0 % distilled with it" in capsys.readouterr().out


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Returns flags of a base and two variants with united experts, and of their map."""
    where = tmp_path_factory.mktemp("family")
    golden = Path(__file__).parents[2] / "golden" / "qwen2_moe"
    paths = {name: variant(golden, where / name, at) for at, name in enumerate(("base", "a", "b"))}
    for path in paths.values():
        add_united(path, ways=(4, 2))
    sharing = drawn_map(paths, read_config(golden))
    prints = tuple(map(weights_digest, paths.values()))
    write_sharing(where / "family.json", dataclasses.replace(sharing, fingerprints=prints))
    models = [f"--model={name}={path}" for name, path in paths.items()]
    return paths, ["--family", str(where / "family.json"), *models]


@pytest.mark.deep
def test_siblings_that_lose_little_borrow_united_experts(family, monkeypatch, capsys, tmp_path):
    """Scores are told; what is loaded, written and said to be saved is real."""
    paths, flags = family
    served_map = Path(shutil.copy(flags[1], tmp_path / "served.json"))
    flags = ["--family", str(served_map), *flags[2:]]
    rights, seen = {"base": 100, "a": 100, "b": 60}, []
    losses = dict(zip(paths, (0.5, 0.25, 0.125), strict=True))

    def evaluate(config, settings, progress, model, belongs_to):
        write_table(config.out, losses[model.name], belongs_to)
        seen.append((config.out, config.united_of, model.num_united_slots, model.pool.num_slots))
        after = {s: s == ZERO or s.name == "full" for s in (ZERO, *settings)}
        results = {
            s: run_module.Result(
                s, [every or at < rights[model.name] for at in range(100)], 0, [0.0]
            )
            for s, every in after.items()
        }
        return run_module.scores(settings, results, ["f"] * 100)

    monkeypatch.setattr(run_module, "evaluate", evaluate)
    asked = f"--generate-tasks 100 --borrow-united 3 --ways 4 --thresholds 40 --out {tmp_path}"
    assert run(monkeypatch, *flags, *asked.split()) == 0
    said = capsys.readouterr().out
    base, *others = (entry[:2] for entry in seen)
    assert base == (tmp_path / "base", "")
    lender = weights_digest(paths["base"])
    assert others == [(tmp_path / name / "borrowed", lender) for name in ("a", "b")]
    own = load_family(paths, Path(flags[1]), ways=[4])
    assert list(own[0].united) == [4]
    lent = load_family(paths, tmp_path / "family.json")
    assert lent.sharing.lenders == (0, 0, 2)
    saved = own[0].pool.num_slots - lent[0].pool.num_slots
    assert seen[0][2:] == (own[0].num_united_slots, own[0].pool.num_slots - 2 * saved)
    less = f"{size(saved * own[0].pool.slot_bytes)} of the pool"
    assert f"a uses the united experts of base: loses up to 0.00 % (bound 3 %); {less}" in said
    assert "b keeps its own united experts: loses up to " in said
    assert f"cp {tmp_path / 'family.json'} {served_map}" in said
    assert copied(said) == 3  # the map, and two tables: that of b is of united experts of base
    served = load_family(paths, served_map)
    found = expected_losses(EngineConfig(family=str(served_map)), served, (4,))
    kind = Kind(4, "visits")
    assert [curves.get(kind, [None])[0] for curves in found] == [0.5, 0.25, None]


def write_table(out, loss, belongs_to):
    table = ExpectedLoss(Kind(4, "visits"), (Point(0, loss, 0, 1),))
    out.mkdir(parents=True)
    expected_loss.write(out / expected_loss.FILE, [table], belongs_to)


def copied(said):
    """Runs the commands that copy; returns how many there were."""
    lines = [line for line in said.splitlines() if line.startswith("cp ")]
    for line in lines:
        subprocess.run(line, shell=True, check=True)
    return len(lines)


def test_what_a_family_costs_is_known_once_it_is_copied(family, monkeypatch, capsys, tmp_path):
    paths, flags = family
    losses = dict(zip(paths, (0.5, 0.25, 0.125), strict=True))

    def evaluate(config, settings, progress, model, belongs_to):
        write_table(config.out, losses[model.name], belongs_to)
        result = run_module.Result(run_module.ZERO, [True], 0, [0.0])
        return run_module.scores([], {ZERO: result}, ["f"])

    monkeypatch.setattr(run_module, "evaluate", evaluate)
    asked = f"--generate-tasks 1 --ways 4 --thresholds 0 --out {tmp_path / 'out'}"
    assert run(monkeypatch, *flags, *asked.split()) == 0
    assert copied(capsys.readouterr().out) == 3
    map_of = Path(flags[1])
    served = load_family(dict(reversed(paths.items())), map_of)
    found = expected_losses(EngineConfig(family=str(map_of)), served, (4,))
    assert [curves[Kind(4, "visits")][0] for curves in found] == [0.125, 0.25, 0.5]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--generate-tasks 100 --borrow-united 2.9", "100 items show no loss below 3 %; give 104"),
        ("--generate-tasks 9 --borrow-united 0", "--borrow-united is 0.0; it must be above 0"),
        ("--generate-tasks 9 --borrow-united nan", "--borrow-united is nan; it must be above 0"),
        ("--generate-tasks 300 --borrow-united 3 --strategies full", "needs partial brownout at a"),
        (
            "--generate-tasks 300 --borrow-united 3 --ways 5 --thresholds 0",
            "united experts for: 2, 4",
        ),
    ],
)
def test_what_cannot_be_borrowed(family, more, message, monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, *family[1], *more.split(), "--out", str(tmp_path / "out")) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --data FILE or --generate-tasks N"),
        (["--data", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["--generate-tasks", "9", "--ways", "2;4"], "--ways is '2;4'"),
        (["--generate-tasks", "9", "--thresholds", "110"], "threshold is 110 %"),
        (["--generate-tasks", "9", "--strategies", "most"], "strategy is 'most'"),
        (["--generate-tasks", "9", "--strategies", "no:X"], "strategy 'no:X' cannot be made"),
        (["--generate-tasks", "9", "--levels"], "levels are of partial brownout, and strategy is"),
        (["--generate-tasks", "9", "--sensitivity"], "--search-items is 256; it must be less than"),
        (["--generate-tasks", "9", "--only", "2:x"], "'2:x' of '2:x' is not WAY:PERCENT"),
        (["--generate-tasks", "9", "--batch", "0"], "batch is 0; it must be at least 1"),
        (["--generate-tasks", "9", "--ways", "3"], "bundled has united experts for: 2, 4, 8"),
        (["--generate-tasks", "9", "--text", "no.txt"], "cannot read no.txt"),
        (["--generate-tasks", "9", "--sources", "add"], "--refine-steps need --leave-one-out"),
        (["--generate-tasks", "9", "--distill-rows", "9"], "--refine-steps need --leave-one-out"),
        (["--generate-tasks", "9", "--borrow-united", "1"], "--borrow-united needs --family"),
        (["--leave-one-out", "--only", "8:40"], "--only does not go with --leave-one-out"),
        (["--leave-one-out", "--strategies", "full"], "--strategies does not go with --leave-one"),
        (["--leave-one-out", "--text", "a.txt"], "--text does not go with --leave-one-out"),
        (["--sensitivity", "--only", "8:40"], "--only does not go with --sensitivity"),
        (["--sensitivity", "--thresholds", "40"], "--thresholds does not go with --sensitivity"),
        (["--sensitivity", "--strategies", "full"], "--strategies does not go with --sensitivity"),
        (["--only", "8:40", "--thresholds", "40"], "--thresholds does not go with --only"),
        (["--only", "8:40", "--ways", "4"], "--ways does not go with --only"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert len([line for line in error.splitlines() if line.startswith("jmoe: ")]) == 1
    assert not (tmp_path / "out").exists()
