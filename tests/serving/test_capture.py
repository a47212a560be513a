"""Requests captured for distillation: which, into what, and what a file that is full does."""

import json
import logging
import os
import random
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from counting import collect, counting_engine

from serving.errors import SettingsError
from serving.telemetry import capture as capture_module
from serving.telemetry.capture import Capture
from training.distill.data import read_texts

PROMPTS = [[one, 2, 3] for one in range(20)]


async def captured(path, share=1.0, max_mib=1.0, **request):
    """Asks every prompt of an engine that counts up, and returns the file's lines."""
    capture = Capture(path, share, max_mib)
    engine = counting_engine(observer=capture)
    for prompt in PROMPTS:
        await collect(engine, prompt, 4, **request)
    await engine.stop()
    capture.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_what_was_asked_and_answered_is_data_of_a_distillation(tmp_path):
    path = tmp_path / "asked.jsonl"
    lines = await captured(path)
    assert lines == [{"prompt_token_ids": p, "token_ids": [4, 5, 6, 7]} for p in PROMPTS]
    texts = [text.token_ids for text in read_texts(path)]
    assert texts == [(prompt, [4, 5, 6, 7]) for prompt in PROMPTS]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_file_that_is_there_is_added_to(tmp_path):
    for _ in range(2):
        lines = await captured(tmp_path / "asked.jsonl")
    assert len(lines) == 2 * len(PROMPTS)


async def test_a_share_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(random, "random", random.Random(0).random)
    lines = await captured(tmp_path / "asked.jsonl", share=0.4)
    drawn = random.Random(0)
    of = [prompt for prompt in PROMPTS if drawn.random() < 0.4]
    assert 0 < len(of) < len(PROMPTS)
    assert [line["prompt_token_ids"] for line in lines] == of


async def test_who_refuses_is_left_out(tmp_path):
    assert await captured(tmp_path / "asked.jsonl", allow_audit=False) == []


async def test_a_full_file_takes_no_more_says_so_once_and_goes_on_when_it_is_moved(
    tmp_path, caplog
):
    path, whole = tmp_path / "asked.jsonl", 56 / 2**20
    with caplog.at_level(logging.WARNING):
        lines = await captured(path, max_mib=2.5 * whole)
    assert len(lines) == 2
    assert [r.getMessage() for r in caplog.records] == [
        f"no requests are captured to {path}: it has the 0.000134 MiB of capture_max_mib"
    ]
    path.rename(tmp_path / "before.jsonl")
    assert len(await captured(path)) == len(PROMPTS)


async def test_a_disk_that_is_full_costs_no_answer(tmp_path, caplog):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("/dev/full is not there")
    path = tmp_path / "asked.jsonl"
    capture = Capture(path, 1.0, 1.0)
    path.unlink()
    path.symlink_to(full)
    engine = counting_engine(observer=capture)
    answers = [await collect(engine, prompt, 4) for prompt in PROMPTS]
    await engine.stop()
    capture.close()
    assert all(len(answer) == 4 for answer in answers)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert line == f"no requests are captured to {path}: No space left on device"


async def test_a_disk_that_hangs_holds_up_no_end(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(capture_module, "CLOSE_S", 0.1)
    path, hangs, goes_on = tmp_path / "asked.jsonl", threading.Event(), threading.Event()
    capture = Capture(path, 1.0, 1.0)
    append = capture._append

    def slowly(line):
        hangs.set()
        assert goes_on.wait(60)
        return append(line)

    capture._append = slowly
    engine = counting_engine(observer=capture)
    for prompt in PROMPTS:
        await collect(engine, prompt, 4)
    await engine.stop()
    assert hangs.wait(60)
    capture.close()
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert line == f"20 captured requests are lost: {path} did not take them within 0.1 s"
    (writer,) = [thread for thread in threading.enumerate() if thread.name == "jmoe-capture"]
    assert writer.daemon  # or the interpreter would wait for it
    caplog.clear()
    monkeypatch.setattr(capture_module, "CLOSE_S", 60.0)
    goes_on.set()
    for _ in range(2):
        capture.close()
    assert not caplog.records
    assert len(path.read_text().splitlines()) == 20
    assert not writer.is_alive()


def test_what_a_process_captured_is_written_when_it_ends(tmp_path):
    code = (
        "import sys; from pathlib import Path; from types import SimpleNamespace as Any\n"
        "from serving.telemetry.capture import Capture\n"
        "capture = Capture(Path(sys.argv[1]), 1.0, 100.0)\n"
        "asked = Any(request=Any(allow_audit=True), prompt=[*range(20_000)], tokens=[1])\n"
        "for _ in range(60):\n"
        "    capture.request_finished(asked, None, 0.0)\n"
    )
    path = tmp_path / "asked.jsonl"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert len(path.read_text().splitlines()) == 60


def test_a_file_that_cannot_be_written_is_known_at_the_start(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SettingsError, match=r"capture is '.*pipe': No such device"):
        Capture(tmp_path / "pipe", 1.0, 1.0)
    with pytest.raises(SettingsError, match=r"capture is '.*none/asked.jsonl': No such file"):
        Capture(tmp_path / "none" / "asked.jsonl", 1.0, 1.0)
