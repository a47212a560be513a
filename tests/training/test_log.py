"""Losses of a training, as JSON lines and as TensorBoard reads them."""

import json
import struct

import pytest
from distilled import QUICK

from training.distill import distill
from training.log import FILE, LossLog

pytest.importorskip("tensorboardX")


def scalars(folder):
    """Returns (tag, step, value) of all events: records of TFRecord files (length, checksum,
    content, checksum).
    """
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events.*")):
        raw, at = path.read_bytes(), 0
        while at < len(raw):
            (size,) = struct.unpack_from("<Q", raw, at)
            event = Event.FromString(raw[at + 12 : at + 12 + size])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += 12 + size + 4
    return found


def test_losses_are_lines_and_events(tmp_path):
    with LossLog(tmp_path / "logs") as log:
        log.write("way 4, layer 0", 10, {"loss": 0.5, "held-out": 0.25})
        log.write("way 4, layer 0", 10, {})
        assert len((tmp_path / "logs" / FILE).read_text().splitlines()) == 1  # at once
    with LossLog(tmp_path / "logs") as log:  # of the run that goes on
        log.write("way 4, end to end", 1, {"divergence": 2.0})
    lines = [json.loads(line) for line in (tmp_path / "logs" / FILE).read_text().splitlines()]
    times = [line.pop("time") for line in lines]
    assert times == sorted(times)
    assert lines == [
        {"what": "way 4, layer 0", "step": 10, "loss": 0.5, "held-out": 0.25},
        {"what": "way 4, end to end", "step": 1, "divergence": 2.0},
    ]
    assert sorted(scalars(tmp_path / "logs")) == [
        ("way_4/end_to_end/divergence", 1, 2.0),
        ("way_4/layer_0/held-out", 10, 0.25),
        ("way_4/layer_0/loss", 10, 0.5),
    ]


def test_no_folder_no_log():
    with LossLog(None) as log:
        log.write("way 4, layer 0", 10, {"loss": 0.5})


@pytest.mark.exhaustive
def test_a_distillation_logs_what_it_shows(tiny_dir, tmp_path):
    shown = []
    distill(
        tiny_dir.path,
        [4],
        [tiny_dir.path / "tasks.jsonl"],
        tmp_path / "out",
        QUICK,
        progress=lambda *args: shown.append(args),
        log_dir=tmp_path / "logs",
    )
    lines = [json.loads(line) for line in (tmp_path / "logs" / FILE).read_text().splitlines()]
    told = [(what, step, text) for what, step, _, text in shown if text]
    names = ("loss", "held-out", "divergence")
    assert told == [
        (
            line["what"],
            line["step"],
            " ".join(f"{name} {line[name]:.4f}" for name in names if name in line),
        )
        for line in lines
    ]
    assert len(lines) == 3 * 2 + QUICK.refine_steps
