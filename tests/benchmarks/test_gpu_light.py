"""First light: what a process of a case printed is judged; planted faults cost their case alone."""

import itertools
import json
import subprocess
import sys

import pytest

from benchmarks.gpu import light, light_part, part
from benchmarks.gpu.part import Context
from benchmarks.gpu.run import PARTS
from benchmarks.gpu.sizes import DRY, Sizes
from benchmarks.harness import store

pytestmark = pytest.mark.deep

RESULT = "result: "


@pytest.mark.parametrize(
    ("lines", "status", "hung", "verdict"),
    [
        (["phase: import", RESULT + '{"ok": true}'], 0, False, "ok"),
        (["phase: import", "phase: run"], -9, True, "HANG in run, killed after 75 s"),
        (["phase: compile", "Fatal: x"], -6, False, "CRASH in compile, status -6: Fatal: x"),
        ([], 1, False, "CRASH in start, status 1: "),
        (
            [
                "phase: compare",
                RESULT
                + json.dumps(
                    {
                        "ok": False,
                        "first": [3, 0],
                        "share": 0.25,
                        "nan": 7,
                        "tiles": [[0, 0]],
                        "runs_differ": True,
                    }
                ),
            ],
            0,
            False,
            "WRONG: first [3, 0], share 0.25, nan 7, tiles [[0, 0]], runs_differ True",
        ),
    ],
)
def test_verdicts(lines, status, hung, verdict):
    assert light_part.judged(lines, status, hung, 75.0)[0] == verdict


@pytest.mark.parametrize("sizes", [DRY, Sizes()], ids=["dry", "full"])
def test_cases_begin_with_the_smallest_and_fit_three_minutes(sizes):
    cases = light_part.cases(sizes)
    assert cases[0].name == "smoke"
    assert {case.name.split("/")[0] for case in cases} >= {"step", "routing", "kv_write"}
    assert sum(case.estimate_s for case in cases) <= 200


def test_where_results_differ():
    import numpy as np

    want = np.ones((130, 4), np.float32)
    out = want.copy()
    out[70:72] = np.nan
    found = light._difference([want, out], [want, want])
    assert found == {
        "ok": False,
        "result": 1,
        "share": pytest.approx(8 / 520),
        "nan": 8,
        "first": [70, 0],
        "tiles": [(1, 0)],
    }
    assert light._difference([want], [want]) == {"ok": True}


LACKS = {"beartype", "hypothesis", "importlinter", "openai", "playwright"}
LACKS |= {"pytest_asyncio", "ray", "zmq"}
"""Packages that neither a GPU image nor `make gpu-pack` brings."""
PACKED = {"fastapi", "grpc_health", "grpc_reflection", "httptools", "jiter", "llguidance", "orjson"}
PACKED |= {"pydantic", "starlette", "uvicorn"}
FIRST = ("light", "kernels", "tests", "step")


@pytest.mark.parametrize(
    ("hidden", "parts"), [(LACKS | PACKED, FIRST), (LACKS, PARTS)], ids=["image", "pack"]
)
def test_parts_need_nothing_that_a_gpu_machine_lacks(hidden, parts):
    code = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
import benchmarks.gpu.light, benchmarks.gpu.run as run
import benchmarks.gpu.models, benchmarks.kernels.problems, jmoe
for part in {parts}:
    run.module(part)
"""
    subprocess.run([sys.executable, "-c", code], cwd=store.ROOT, check=True, timeout=120)


@pytest.mark.exhaustive
def test_planted_faults_cost_their_cases_alone(tmp_path, monkeypatch):
    plants = {
        "smoke": "hang",
        "routing/tiny/decode/t4": "abort",
        "grouped_gemm/tiny/decode/t4/exponential": "wrong",
    }
    monkeypatch.setenv(part.PLANT, ",".join(f"light/{k}={v}" for k, v in plants.items()))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setattr(light_part, "AT_ONCE", 2)
    monkeypatch.setattr(light_part, "DRY_LIMIT_S", 45.0)
    kept = store.Store(tmp_path, {"sources": "1"})
    with light_part.session(Context(DRY, kept, tmp_path, tmp_path)) as run_case:
        pairs = itertools.pairwise(light_part.cases(DRY))  # a case that fails, and the next one
        cases = [case for pair in pairs if pair[0].name in plants for case in pair]
        found = {case.name: run_case(case)["figures"]["verdict"] for case in cases}
    assert found.pop("smoke").startswith("HANG in run")
    assert found.pop("routing/tiny/decode/t4").startswith("CRASH in run, status -6")
    wrong = found.pop("grouped_gemm/tiny/decode/t4/exponential")
    assert wrong.startswith("WRONG: first [1, 0], share 0.5, nan ")
    assert set(found.values()) == {"ok"}
    assert len(found) == len(plants)


def test_a_core_dump_says_where_a_kernel_failed(tmp_path, monkeypatch):
    debugger = tmp_path / "cuda-gdb"
    debugger.write_text("#!/bin/sh\necho kernel routing; echo no symbols >&2\n")
    debugger.chmod(0o755)
    core = tmp_path / "a.core"
    assert light_part.where_it_failed(core) == []
    for path, told in (
        (f"{tmp_path}:/bin", ["kernel routing", "no symbols"]),
        ("/nowhere", ["cuda-gdb: [Errno 2] No such file or directory: 'cuda-gdb'"]),
    ):
        core.write_bytes(b"")
        monkeypatch.setenv("PATH", path)
        assert light_part.where_it_failed(core) == told
        assert not core.exists()
