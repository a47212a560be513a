"""`jmoe info MODEL --mesh ep=N --in-flight T`: every split, both ways, and the advice."""

import re
import sys

import numpy as np
import pytest

from jmoe.parallel.asynchronous import Deployment, Late, advise
from serving.cli import main as cli
from serving.cli.async_info import asynchronous_section, parse_imbalance, parse_late
from serving.cli.model_info import load_model_config
from serving.execution.executor import Stages
from serving.telemetry.timeline import Timeline

MODEL = ("--model-config", "mixtral-8x7b")
HEADING = "Asynchronous expert parallelism, "


def run(monkeypatch, capsys, *arguments):
    """Returns a function that runs the command and returns exit code and output."""
    monkeypatch.setattr(sys, "argv", ["jmoe", "info", *MODEL, *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    said = capsys.readouterr()
    return caught.value.code, said.out, said.err


def test_the_section_follows_that_of_the_mesh(monkeypatch, capsys):
    code, alone, _ = run(monkeypatch, capsys, "--mesh", "ep=4")
    assert not code
    assert HEADING not in alone
    code, text, _ = run(monkeypatch, capsys, "--mesh", "ep=4", "--in-flight", "2048")
    assert not code
    ours, theirs = (re.sub(" +", " ", part) for part in (text, alone))  # columns are wider
    heading = f"{HEADING}4 devices, 2,048 in flight, 256 tokens of KV each, bfloat16"
    assert ours.startswith(theirs.rstrip("\n") + f"\n\n{heading}")


def test_what_is_shown_is_what_is_forecast():
    cfg = load_model_config("mixtral-8x7b")
    more = {"context": 100.0, "imbalance": (1.7, 1.3)}
    heading, rows = asynchronous_section(cfg, 8, 8192, device_gb=141.0, **more)
    shown = dict(rows)
    found = advise(
        Deployment.of(cfg, 8, 8192, context=100.0, imbalance=1.7, imbalance_with_copies=1.3)
    )
    assert "stage times by a roofline, a forecast" in heading
    assert [name.split(",")[0] for name in shown][:7] == [f"{a} + {8 - a}" for a in range(1, 8)]
    assert shown["synchronous"] == f"{found.synchronous_tokens_per_s:,.0f} tokens/s"
    assert shown["synchronous with copies"] == f"{found.copies_tokens_per_s:,.0f} tokens/s"
    assert shown["asynchronous"].startswith(f"{found.forecast.tokens_per_s:,.0f} tokens/s, ")
    assert shown["host of a stage"] == "1.30 ms and 0.60 ms, as built"
    assert shown["rows travel at"] == "1.3 GB/s, as built"
    given = dict(asynchronous_section(cfg, 8, 8192, device_gb=141.0, host_us=100.0, **more)[1])
    assert given["host of a stage"] == "100.00 us, given and not measured"
    assert given["asynchronous"] != shown["asynchronous"]
    assert shown["advice"] == f"do not use it: {found.reason}"
    best = f"{found.forecast.attention_devices} + {found.forecast.expert_devices}"
    assert f"stages of whole batches, {best}" in shown
    assert shown[f"{best}, attention + experts"].startswith(
        f"{found.forecast.tokens_per_s:,.0f} tokens/s"
    )


def test_many_devices_show_the_advised_split_alone():
    cfg = load_model_config("mixtral-8x7b")
    rows = asynchronous_section(cfg, 32, 2048, device_gb=141.0)[1]
    assert sum(name.endswith("attention + experts") for name, _ in rows) == 1


def test_smaller_devices_have_less_room():
    cfg = load_model_config("mixtral-8x7b")
    rows = dict(asynchronous_section(cfg, 8, 8192, device_gb=20.0)[1])
    assert "fits on no split" in rows["advice"]


MESH = ("--mesh", "ep=8")
FORECAST = (*MESH, "--in-flight", "64")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--in-flight", "64"), "--in-flight needs --mesh ep=N"),
        ((*MESH, "--host-us", "50"), "--host-us needs --mesh ep=N and --in-fl"),
        (("--mesh", "ep=1", "--in-flight", "64"), "--mesh is ep=1; for --in-flight it must be"),
        ((*MESH, "--in-flight", "0"), "--in-flight is 0; it must be between 1 and 1,000,000"),
        ((*FORECAST, "--context", "0"), "--context is 0; it must be above 0"),
        ((*FORECAST, "--host-us", "-1"), "--host-us is -1; it must be 0 or more"),
        ((*FORECAST, "--imbalance", "2"), "--imbalance is '2'; write two numbers, as 1.7,1.3"),
        ((*FORECAST, "--imbalance", "9,1"), "--imbalance is 9,1; both must be between 1 and the"),
        ((*FORECAST, "--stage-times", "/none.json"), "/none.json has no stage times"),
        ((*FORECAST, "--late", "/none.json"), "--late is '/none.json'; write two numbers, as 10,0"),
        ((*FORECAST, "--late", "0.5,0.1"), "late is (0.5, 0.1); it must be a factor of 1 or more"),
        (("--late", "10,0.02"), "--late needs --mesh ep=N and --in-flight T"),
    ],
)
def test_bad_values_are_named_with_the_fix(monkeypatch, capsys, arguments, message):
    code, _, said = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert message in said


def test_late_stages_are_those_of_a_timeline(tmp_path):
    """Of two workers, as the server writes it: of 80 stages 4 take 10 times as long as others of
    their rows, which differ, and one of two that are too few to say so is left out.
    """
    timeline, file = Timeline(), tmp_path / "timeline.json"
    for worker, us in (("attention 0", 1000.0), ("experts 0", 500.0)):
        layers, rows = np.tile([1, 2], 20), np.repeat([8, 64], 20)
        took = us * np.where(rows == 8, 1, 3)
        took[[3, 33]] *= 10
        began = np.arange(40.0)
        timeline.stages_ran(
            Stages(worker, layers, rows, began, began + 1e-6 * took, np.zeros((40, 3), int))
        )
    few = np.array([0.0, 1.0])
    timeline.stages_ran(
        Stages("experts 0", np.array([0, 0]), np.array([8, 8]), few, few + 1e-3, np.zeros((2, 3)))
    )
    timeline.write(file)
    assert parse_late(str(file)) == pytest.approx(Late(10.0, 4 / 80))
    cfg = load_model_config("mixtral-8x7b")
    shown, alone = (
        dict(asynchronous_section(cfg, 8, 2048, device_gb=141.0, late=late)[1])
        for late in (str(file), "")
    )
    assert shown["late"] == f"5 % of stages take 10 times as long, by {file}"
    assert alone["late"] == "none"
    found = advise(Deployment.of(cfg, 8, 2048, late=Late(10.0, 0.05)))
    assert shown["synchronous"] == f"{found.synchronous_tokens_per_s:,.0f} tokens/s"
    assert shown["synchronous"] != alone["synchronous"]
    file.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match=r"a timeline without stages: it has no 20 stages of one"):
        parse_late(str(file))


def test_an_imbalance_is_two_numbers():
    assert parse_imbalance("1.7,1.3") == (1.7, 1.3)
