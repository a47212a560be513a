"""`python -m benchmarks.hostile` against the real server: what does not depend on time holds."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from serving.frontend.openai.app import BODIES

from .conftest import FEW_PROGRAMS

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[2]


def hostile(*arguments):
    settings = [part for value in FEW_PROGRAMS for part in ("--set", value)]
    command = [sys.executable, "-m", "benchmarks.hostile", *map(str, arguments), *settings]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


@pytest.mark.exhaustive
async def test_a_server_withstands_a_small_run(tmp_path):
    out = tmp_path / "hostile.json"
    sizes = ("--requests", 200, "--clients", 16, "--fuzz", 300, "--idle-s", 1)
    ended = await asyncio.to_thread(hostile, "--out", out, *sizes)
    assert ended.returncode in (0, 1), ended.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    lines = {line["name"]: line for line in found["lines"]}
    assert sum(line["by_machine"] for line in lines.values()) == 10
    wrong = [line for line in lines.values() if not line["by_machine"] and not line["ok"]]
    if wrong:  # whole, which an assertion's message is not
        pytest.fail(f"{wrong}\n{ended.stdout}")
    assert lines["KV pages used after the load"]["seen"] == "0"
    assert lines["compilations by the end of the fuzz of Admin"]["seen"] == "0"
    assert sum(sum(codes.values()) for codes in found["codes"].values()) == 200
    own = {"Generation", "Admin", "GRPCInferenceService"}
    assert set(found["fuzz"]) == own | {"Health", "ServerReflection"}
    assert found["memory"]["samples"] > 10
    assert found["health"]["load"]["count"] > 10
    failed = any(line["ok"] is False for line in lines.values())
    assert ended.returncode == int(failed)
    assert all(name in ended.stdout for name in lines)


@pytest.mark.exhaustive
async def test_a_server_withstands_the_same_in_another_protocol(tmp_path):
    out = tmp_path / "hostile.json"
    sizes = ("--requests", 200, "--clients", 16, "--fuzz", 0, "--idle-s", 1)
    ended = await asyncio.to_thread(hostile, "--protocol", "kserve", "--out", out, *sizes)
    assert ended.returncode in (0, 1), ended.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    wrong = [line for line in found["lines"] if not line["by_machine"] and not line["ok"]]
    if wrong:  # whole, which an assertion's message is not
        pytest.fail(f"{wrong}\n{ended.stdout}")
    codes = found["codes"]
    assert sum(sum(one.values()) for one in codes.values()) == 200
    assert set(codes["fine: text"]) <= {"OK", "RESOURCE_EXHAUSTED"}
    assert any("INVALID_ARGUMENT" in one for name, one in codes.items() if "malformed" in name)


@pytest.mark.exhaustive
async def test_a_server_withstands_a_small_run_over_http(tmp_path):
    out = tmp_path / "hostile.json"
    sizes = ("--requests", 200, "--clients", 16, "--fuzz", 2000, "--idle-s", 1)
    ended = await asyncio.to_thread(hostile, "--protocol", "http", "--out", out, *sizes)
    assert ended.returncode in (0, 1), ended.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    wrong = [line for line in found["lines"] if not line["by_machine"] and not line["ok"]]
    assert not wrong, (wrong, found["problems"], found["fuzz"]["HTTP"]["examples"], ended.stdout)
    assert sum(sum(codes.values()) for codes in found["codes"].values()) == 200
    codes = found["fuzz"]["HTTP"]["codes"]
    assert all(codes[f"right {path}: 200"] > 10 for path in BODIES)
    assert found["memory"]["samples"] > 10
