"""The GPU benchmark as a command, on a CPU: what it runs, stores, takes up again and reports."""

import itertools
import json
import math
import os
import tarfile
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from benchmarks.gpu import live, report, run, serve_part, sizes, step_part, tests_part
from benchmarks.gpu.part import Case
from benchmarks.gpu.sizes import DRY, SETTINGS, Sizes
from benchmarks.harness import store
from serving.bench.results import Record, Run

FULL = Sizes()


class FakePart:
    """Three cases; `ran` says which were run, `outcome` what they give."""

    DEPENDS = ("benchmarks/gpu/sizes.py",)
    START_S = 0.0

    def __init__(self, **outcome):
        self.ran, self.outcome = [], outcome

    def cases(self, sizes):
        return [Case(name, 10.0, {"of": name}) for name in ("a", "b", "c")]

    @contextmanager
    def session(self, context):
        context.facts["session"] = len(self.ran)

        def run_case(case):
            self.ran.append(case.name)
            found = self.outcome.get(case.name, {"figures": {"us": 1.5, "worst": math.nan}})
            if isinstance(found, Exception):
                raise found
            return found

        yield run_case


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Returns `command(fake, *flags)`, which dry-runs one part and returns the exit status."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # both are what a dry run sets itself
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

    def call(fake, *flags):
        if fake is not None:
            monkeypatch.setattr(run, "module", lambda name: fake)
        return run.main(["--dry-run", "--out", str(tmp_path), "--commit", "abc", *flags])

    return call


def stored(tmp_path, name="step"):
    return {r["case"]["name"]: r for r in json.loads((tmp_path / f"{name}.json").read_text())}


# ---- the command ----


def test_what_is_stored_is_not_run_again_and_says_where_it_is_from(command, tmp_path):
    fake = FakePart()
    assert command(fake, "--parts", "step") == 0
    assert fake.ran == ["a", "b", "c"]
    record = stored(tmp_path)["b"]
    assert record["figures"] == {"us": 1.5, "worst": None}
    assert (record["commit"], record["session"], record["case"]["of"]) == ("abc", 0, "b")
    assert record["machine"]["device"] == "dry-run"
    assert "random" in record["weights"]
    assert command(fake, "--parts", "step") == 0
    assert fake.ran == ["a", "b", "c"]
    assert command(fake, "--parts", "step", "--again", "--match", "b") == 0
    assert fake.ran == ["a", "b", "c", "b"]


def test_other_sources_are_measured_again(command, monkeypatch):
    fake = FakePart()
    command(fake, "--parts", "step")
    monkeypatch.setattr(store, "sources", lambda paths: "other")
    command(fake, "--parts", "step")
    assert fake.ran == ["a", "b", "c"] * 2


def test_sizes_are_changed_by_name_and_kept_apart(command, tmp_path, capsys):
    fake = FakePart()
    command(fake, "--parts", "step")
    assert command(fake, "--parts", "step", "--size", "burst_s=2", "--size", "ways=4,2") == 0
    assert fake.ran == ["a", "b", "c"] * 2
    assert stored(tmp_path)["a"]["sizes"] == ["burst_s=2", "ways=4,2"]
    found = sizes.changed(FULL, ["burst_s=2", "ways=4,2"])
    assert (found.burst_s, found.ways, found.batch) == (2.0, (4, 2), 64)
    for wrong, named in (
        ("burst_s=x", "burst_s is 'x'"),
        ("model=tiny", "'model' is none of seed"),
    ):
        assert command(fake, "--parts", "step", "--size", wrong) == 2
        assert named in capsys.readouterr().err


def test_a_failed_case_harms_no_other_and_is_only_tried_again_if_asked(command, tmp_path):
    fake = FakePart(a=RuntimeError("no memory"), b={"failed": "wrong results", "figures": {}})
    assert command(fake, "--parts", "step") == 1
    assert fake.ran == ["a", "b", "c"]
    assert stored(tmp_path)["a"]["failed"] == "RuntimeError: no memory"
    assert stored(tmp_path)["b"]["failed"] == "wrong results"
    assert command(fake, "--parts", "step") == 0
    assert fake.ran == ["a", "b", "c"]
    fake.outcome.clear()
    assert command(fake, "--parts", "step", "--retry") == 0
    assert fake.ran[3:] == ["a", "b"]
    assert "failed" not in stored(tmp_path)["a"]


def test_a_case_that_ends_the_process_is_known_to_have_been_started(command, tmp_path):
    class Gone(BaseException):
        pass

    class Hangs(FakePart):
        @contextmanager
        def session(self, context):
            def run_case(case):
                raise Gone

            yield run_case

    with pytest.raises(Gone):
        command(Hangs(), "--parts", "step")
    assert stored(tmp_path)["a"]["failed"] == store.STARTED


def test_an_unfinished_case_is_taken_up_again(command):
    fake = FakePart(b={"unfinished": "out of time"})
    command(fake, "--parts", "step")
    command(fake, "--parts", "step")
    assert fake.ran == ["a", "b", "c", "b"]


def test_no_case_is_begun_that_the_time_does_not_hold(command, monkeypatch, capsys):
    now = itertools.count(step=8.0)  # 0 as it starts, 8 before the first case, 16 before the second
    fake = FakePart()
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert command(fake, "--parts", "step", "--limit-s", "20") == 0
    assert fake.ran == ["a"]
    assert "2 cases left" in capsys.readouterr().out


def test_several_parts_have_a_process_each_with_what_time_is_left(command, monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(run, "_child", lambda command, *_: commands.append(command) or 0)
    assert command(FakePart(), "--limit-s", "500", "--match", "a") == 0
    assert [c[c.index("--parts") + 1] for c in commands] == list(run.PARTS)
    for c in commands:
        assert c[c.index("--out") + 1] == str(tmp_path)
        assert 490 < float(c[c.index("--limit-s") + 1]) <= 500
        assert {"--dry-run", "--commit", "abc"} <= set(c)
        assert c[c.index("--match") + 1] == "a"
    commands.clear()
    assert command(FakePart(), "--limit-s", "5") == 0
    assert commands == []


def test_a_part_that_outruns_its_time_is_killed(capfd, monkeypatch):
    env = dict(os.environ)
    sleeps = ["python3", "-c", "import time; time.sleep(60)"]
    assert run._child(sleeps, 0.3, env) == 1
    assert "out of time" in capfd.readouterr().out
    monkeypatch.setattr(run, "LOOK_S", 0.01)
    at = iter([("start", 60.0), ("a", 60.0)])
    assert run._child(sleeps, 60, env, lambda: next(at, ("b", 0.2))) == run.LOST
    assert "b: nothing for 0 s" in capfd.readouterr().out
    assert run._child(["python3", "-c", "raise SystemExit(3)"], 60, env) == 3
    assert run._child(["python3", "-c", ""], 60, env) == 0


def test_what_is_first_comes_first_and_the_rest_is_a_second_list(command, monkeypatch):
    commands = []
    monkeypatch.setattr(run, "_child", lambda command, *_: commands.append(command) or 0)
    assert command(FakePart(), "--limit-s", "500") == 0
    asked = [(c[c.index("--parts") + 1], c[c.index("--match") + 1]) for c in commands]
    first = [(part, match) for part, match in run.FIRST if match in ("", "a")]
    assert asked[: len(first)] == first
    assert [part for part, _ in asked[len(first) :]] == list(run.PARTS)


def test_a_part_that_cannot_be_imported_costs_itself_alone(command, monkeypatch, capsys, tmp_path):
    fake, children = FakePart(), []

    def module(name):
        if name == "serve":
            raise ModuleNotFoundError("No module named 'grpc_health'")
        return fake

    monkeypatch.setattr(run, "_child", lambda command, *_: children.append(command) or 0)
    assert command(None, "--parts", "step,mesh") == 0  # keeps the fixture's own settings
    children.clear()
    monkeypatch.setattr(run, "module", module)
    assert run.main(["--dry-run", "--out", str(tmp_path / "x"), "--parts", "serve,mesh"]) == 1
    assert [c[c.index("--parts") + 1] for c in children] == ["mesh"]
    text = capsys.readouterr().out
    assert "serve: left out, as No module named 'grpc_health'" in text
    assert "- serve: left out, as No module named 'grpc_health'" in text
    assert "## mesh" in text
    assert "## serve" not in text
    with tarfile.open(tmp_path / "x.tar.gz") as packed:
        assert "x/table.md" in packed.getnames()


def test_a_lost_device_ends_a_process_and_a_new_one_goes_on(command, monkeypatch):
    fake, statuses = FakePart(a=RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")), []

    def child(words, *_):
        part = words[words.index("--parts") + 1]
        statuses.append(command(fake, "--parts", part) if part == "step" else 0)
        return statuses[-1]

    monkeypatch.setattr(run, "_child", child)
    assert command(fake, "--parts", "step,mesh") == 1
    assert statuses == [run.LOST, 0, 0]
    assert fake.ran == ["a", "b", "c"]


def test_a_case_that_hangs_or_ends_the_process_costs_itself_alone(command, monkeypatch, tmp_path):
    fake, ended, limits = FakePart(), iter([-6, run.LOST, 0]), []
    monkeypatch.setattr(run, "module", lambda name: fake)
    revision = {"sources": store.sources(run.depends("step")), "sizes": []}
    kept = store.Store(tmp_path, revision)

    def child(words, limit_s, env, most_s):
        """Ends at its first case, as if that had ended the process; the third one goes on."""
        limits.append(most_s())
        status = next(ended)
        if status == 0:
            return command(fake, "--parts", "step")
        name = run.todo(run.parse(words[3:], ""), kept, "step", DRY)[0].name
        kept.put("step", {"case": {"name": name}, **revision, "failed": store.STARTED})
        limits.append(most_s())
        return status

    monkeypatch.setattr(run, "_child", child)
    args = run.parse(["--dry-run", "--out", str(tmp_path)], "")
    assert run._some(args, DRY, run.time.monotonic() + 500, "step", "") == 1
    assert fake.ran == ["c"]
    assert {name: r.get("failed") for name, r in stored(tmp_path).items()} == {
        "a": "CRASH: its process was ended by SIGABRT",
        "b": "HANG: nothing for 110 s, and it was killed",
        "c": None,
    }
    begins = ("start", run.SLACK_S)
    assert limits == [begins, ("a", run.SLACK_S + 20), begins, ("b", run.SLACK_S + 20), begins]


def test_without_a_gpu_it_says_what_can_be_done(monkeypatch, capsys):
    monkeypatch.setattr(store, "nvidia_smi", lambda field: None)
    assert run.main(["--parts", "step"]) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert run.parse([], "").parts == list(run.PARTS)
    assert run.parse(["--parts", "step,sweep"], "").parts == ["step", "sweep"]
    with pytest.raises(SystemExit):
        run.main(["--parts", "step,speed"])
    assert "'speed' is none of light, kernels" in capsys.readouterr().err


@pytest.mark.parametrize("of", [FULL, DRY], ids=["full", "dry"])
def test_every_part_names_its_cases_and_what_they_depend_on(of):
    for name in (*run.PARTS, *run.ON_DEMAND):
        module = run.module(name)
        names = [case.name for case in module.cases(of)]
        assert names
        assert len(set(names)) == len(names)
        assert all(case.estimate_s > 0 for case in module.cases(of))
        for path in run.depends(name):
            assert (store.ROOT / path).exists(), path
        # The longest piece of work and its start fit a call of nine minutes.
        assert module.START_S + max(case.estimate_s for case in module.cases(of)) < 540


def test_the_grid_is_the_papers():
    assert [s.name for s in SETTINGS] == ["zero", "way2-t0", "way4-t20", "way8-t40"]
    assert sorted(FULL.batches) == [1, 8, 32, 64, 128, 256]
    assert (FULL.batch, FULL.max_model_len, FULL.burst_s) == (64, 2048, 250.0)
    step = [case.name for case in run.module("step").cases(FULL)]
    assert step[0] == "decode/zero/b64"  # what has a target comes first
    assert len(step) == 4 * 6 + 2 + 2 * 3  # two without CUDA graphs


# ---- what is made of a run ----


def test_window_counts_what_came_in_it_and_keeps_the_unanswered():
    def record(at_s, token_s, code="OK", **more):
        return Record("", at_s, at_s, end_s=token_s[-1] if token_s else 9.0, code=code,
                      token_s=token_s, **more)  # fmt: skip

    records = [
        record(1.0, [1.5, 2.5, 3.5], expert_visits=30, degraded_visits=10),  # came before
        record(2.0, [3.0, 3.25], expert_visits=10),
        record(3.0, [], code="DEADLINE_EXCEEDED"),  # still waits when the run ends
    ]
    found = serve_part.window(Run(records, [], 4.0, 0.0), 2.0, 4.0)
    assert found["output_tokens_s"] == 4 / 2.0
    assert found["requests_done_s"] == 2 / 2.0
    assert (found["requests_due"], found["unanswered"]) == (2, 1)
    assert found["ttft_p50_ms"] == 1000.0
    assert found["itl_p50_ms"] == 1000.0  # gaps of 1, 1 and 0.25 s end in the window
    assert found["tpot_p99_ms"] == pytest.approx(992.5)
    assert found["degraded_share"] == 0.25


def test_between_two_probes():
    def probe(at_s, **decode):
        return {
            "at_s": at_s,
            "compilations_since_ready": 0,
            "phases": {"prefill": {}, "decode": decode},
        }

    counts = {"steps": 10, "rows": 40, "tokens": 40, "busy_s": 1.0, "active_experts": 300.0}
    more = {k: 3 * v for k, v in counts.items()} | {"full_steps": 4, "full_s": 0.8}
    found = live.between(probe(5.0, **counts), probe(9.0, **more))
    assert found["decode"]["steps"] == 20
    assert found["decode"]["rows_a_step"] == 4
    assert found["decode"]["ms_a_step"] == pytest.approx(100)
    assert found["decode"]["full_batch_ms"] == pytest.approx(200)
    assert found["decode"]["active_experts"] == 30
    assert found["host_idle_share"] == pytest.approx(0.5)
    assert found["prefill"]["ms_a_step"] is None


def test_junit_reports_are_counted():
    text = """<testsuites><testsuite>
      <testcase name="fine"/><testcase name="off"><failure message="error 0.2"/></testcase>
      <testcase name="late"><error message="no memory"/></testcase>
      <testcase name="not"><skipped/></testcase></testsuite></testsuites>"""
    counts, faults = tests_part.read_junit(text)
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert faults == {"off": "error 0.2", "late": "no memory"}


# ---- the report ----


def step_record(setting, batch, span_us, floor_us, **more):
    figures = {"span_us": span_us, "kernels_us": span_us, "floor_us": floor_us}
    figures |= {"over_floor": span_us / floor_us, "active_experts": 50.0}
    about = {"machine": {"device": "NVIDIA H200", "driver": "1"}, "commit": "abc", "skew": 4.0}
    about |= {"date": "2026-01-02", "weights": "random"}
    case = {"name": f"decode/{setting.name}/b{batch}"}
    return {"case": case, **about, "figures": figures, **more}


def test_brownout_is_held_to_its_own_zero_brownout():
    cases = {case.name: case for case in run.module("step").cases(FULL)}
    zero = step_record(SETTINGS[0], 64, 8000, 7500)["figures"]
    found = {
        setting: step_part.beside_zero(
            cases[f"decode/{setting.name}/b64"], step_record(setting, 64, *us), zero
        )
        for setting, us in zip(
            SETTINGS[1:], [(7000, 6000), (6300, 6000), (7900, 6000)], strict=True
        )
    }
    shares = [record["figures"]["share_of_floors"] for record in found.values()]
    # 8000/7000 over 7500/6000 is 91 %; 8000/6300 of it more than all; 8000/7900 too little.
    assert shares == pytest.approx([0.914, 1.016, 0.810], abs=1e-3)
    assert [record["target"]["met"] for record in found.values()] == [True, True, False]
    eager = next(case for name, case in cases.items() if name.startswith("decode/zero-eager"))
    beside = step_part.beside_zero(eager, step_record(SETTINGS[0], 64, 12000, 7500), zero)
    assert beside["figures"]["over_graph"] == 1.5
    assert "target" not in beside


def test_the_report_has_a_table_a_kind_and_names_what_is_missing(tmp_path, capsys):
    met = {"over_floor": 1.15, "met": True}
    records = [
        step_record(SETTINGS[0], 64, 8000.0, 7500.0, target=met),
        step_record(SETTINGS[1], 64, 7000.0, 6000.0),
        {**step_record(SETTINGS[3], 64, 1, 1), "failed": "no memory"},
    ]
    records[2].pop("figures")
    prefill = {**records[1], "case": {"name": "prefill/zero/t4096"}, "figures": {"tflop_s": 412.34}}
    (tmp_path / "step.json").write_text(json.dumps([*records, prefill]))
    assert report.main(tmp_path, FULL) == 0
    text = capsys.readouterr().out
    assert "| case | span_us | kernels_us | floor_us | over_floor | active_experts |" in text
    row = "| decode/zero/b64 | 8,000 | 8,000 | 7,500 | 1.067 | 50 | met (over_floor 1.15) |"
    assert row in text
    assert "| decode/way2-t0/b64 | 7,000 | 7,000 | 6,000 | 1.167 | 50 |  |" in text
    assert "| case | tflop_s |\n|---|---|\n| prefill/zero/t4096 | 412.3 |" in text
    assert "FAILED decode/way8-t40/b64: no memory" in text
    assert "decode/zero/b128" in text.split("not measured:")[1]
    assert "- device: NVIDIA H200" in text
    assert text.count("Nothing is stored.") == len(run.PARTS) - 1


def test_a_report_of_nothing_says_so(tmp_path, capsys):
    assert run.main(["--report", "--out", str(tmp_path)]) == 1
    assert "nothing has been run" in capsys.readouterr().out


def test_a_steeper_skew_than_mixtral_can_have_is_not_asked_of_it():
    assert sizes.skew_of(FULL, "mixtral-8x7b") == 1.0
    assert sizes.skew_of(FULL, "qwen3-30b-a3b") == 4.0
