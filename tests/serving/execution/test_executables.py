"""Compiled programs on disk: what is found again, what is not, and that warm starts are alike."""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jmoe
from jmoe.brownout import Brownout
from pallas_kernels import native
from pallas_kernels.routing import reference
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.execution import executables as module
from serving.execution.executables import KEPT_S, Executables, sources
from serving.request import BrownoutChange, SamplingParams
from serving.startup.asynchronous import keep_programs

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry", "programs_are_compiled")

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "qwen2_moe"


@pytest.fixture
def compiled():
    return jax.jit(lambda x, y: {"sum": x + y}).lower(jnp.ones(3), jnp.ones(3)).compile()


def test_a_program_is_found_again_by_what_it_is_made_from(tmp_path, compiled):
    kept = Executables(tmp_path)
    assert kept.load("a", "shape 3") is None
    kept.save("a", "shape 3", compiled)
    again = Executables(tmp_path).load("a", "shape 3")
    assert again is not None
    assert again(jnp.arange(3.0), jnp.ones(3))["sum"].tolist() == [1.0, 2.0, 3.0]
    assert kept.load("a", "shape 4") is None
    assert kept.load("b", "shape 3") is None
    assert not list(tmp_path.glob("*.part"))


def test_other_sources_or_switches_are_other_programs(tmp_path, compiled, monkeypatch):
    kept = Executables(tmp_path)
    kept.save("a", "", compiled)
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        assert kept.load("a", "") is None
    with monkeypatch.context() as patch:
        patch.setattr(module, "sources", lambda: "edited")
        assert kept.load("a", "") is None
    with jax.default_matmul_precision("highest"):
        assert kept.load("a", "") is None
    with monkeypatch.context() as patch:
        patch.setattr(module, "_CONFIG", (*module._CONFIG, "jax_debug_nans"))
        assert kept.load("a", "") is None
    assert kept.load("a", "") is not None


def test_a_torn_entry_is_removed_and_an_old_one_too(tmp_path, compiled, caplog):
    kept = Executables(tmp_path)
    kept.save("a", "", compiled)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert kept.load("a", "") is None
    assert "cannot be read" in caplog.text
    assert not path.exists()
    kept.save("a", "", compiled)
    left, fresh = tmp_path / "b.7.part", tmp_path / "c.8.part"  # of a process that was killed
    for one in (left, fresh):
        one.touch()
    for one in (path, left):
        os.utime(one, (time.time() - KEPT_S - 60,) * 2)
    assert Executables(tmp_path).load("a", "") is None
    assert list(tmp_path.iterdir()) == [fresh]


def test_a_full_disk_is_told_and_passed_over(tmp_path, compiled, caplog, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.Path, "write_bytes", full)
    Executables(tmp_path).save("a", "", compiled)
    assert "No space left" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_user_stops_nothing(tmp_path, compiled, caplog, monkeypatch):
    kept = Executables(tmp_path)
    kept.save("a", "", compiled)
    kept.remember("a", "", 1536)
    (tmp_path / "notes").mkdir()
    (path,) = tmp_path.glob("*.bin")

    def refused(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "utime", refused)
        assert kept.load("a", "") is not None
        assert kept.recall("a", "") == 1536
        path.write_bytes(b"torn")
        patch.setattr(module.Path, "unlink", refused)
        assert kept.load("a", "") is None
        patch.setattr(module.Path, "mkdir", refused)
        nowhere = Executables(tmp_path / "new")
    assert "no compiled program is kept" in caplog.text
    nowhere.save("a", "", compiled)
    assert nowhere.load("a", "") is None


def test_without_a_home_nothing_is_kept(monkeypatch, compiled, caplog):
    def homeless(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    kept, before = Executables.at("~/.cache/jmoe/xla"), jax.config.jax_compilation_cache_dir
    kept.save("a", "", compiled)
    assert kept.load("a", "") is None
    keep_programs("~/.cache/jmoe/xla")
    assert jax.config.jax_compilation_cache_dir == before
    assert caplog.text.count("home directory.); no compiled program is kept") == 2


def test_beside_xlas_own_cache_nothing_is_kept(tmp_path, compiled):
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
        Executables(tmp_path).save("a", "", compiled)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert not list(tmp_path.glob("*.bin"))


def test_without_a_folder_nothing_is_kept(compiled):
    Executables(None).save("a", "", compiled)
    assert Executables(None).load("a", "") is None


REQUESTS = (
    ({}, Brownout("zero")),
    ({"temperature": 1.0, "seed": 3}, Brownout("zero")),
    ({"temperature": 1.0, "top_k": 5, "seed": 4}, Brownout("zero")),
    ({}, Brownout("full", 20, keep="weight")),
)


def few_programs(cache):
    return EngineConfig(
        model=str(GOLDEN),
        dtype="float32",
        max_num_seqs=4,
        max_model_len=64,
        page_size=8,
        max_prefill_tokens=16,
        max_prefill_seqs=2,
        decode_buckets=(4,),
        prefill_buckets=(16,),
        threshold_buckets_percent=(40, 100),
        compilation_cache=str(cache),
        brownout=BrownoutConfig(salc=False),
    )


@pytest.mark.deep
async def test_a_warm_start_lowers_nothing_and_answers_alike(tmp_path, monkeypatch):
    """The second engine's programs are the first's: greedy, drawn, cut, and under brownout."""

    async def answers():
        engine = await Engine.start(few_programs(tmp_path))
        try:
            found = []
            for own, brownout in REQUESTS:
                await engine.set_brownout(
                    BrownoutChange(
                        strategy=brownout.strategy,
                        prefill_threshold_percent=brownout.threshold_percent,
                        decode_threshold_percent=brownout.threshold_percent,
                    )
                )
                tokens = []
                sampling = SamplingParams(max_new_tokens=6, **own)
                async for out in engine.generate([5, 6, 7], sampling):
                    tokens += out.token_ids
                found.append(tokens)
            assert engine.stats().compilations_since_ready == 0
            return found
        finally:
            await engine.stop()

    first = await answers()

    class NoJobs(ThreadPoolExecutor):
        def submit(self, job, key, *_):
            pytest.fail(f"{key} was lowered")

    monkeypatch.setattr("serving.execution.programs.ThreadPoolExecutor", NoJobs)
    assert await answers() == first
    model = jmoe.load(GOLDEN, "float32")
    for (own, brownout), tokens in zip(REQUESTS, first, strict=True):
        assert tokens == jmoe.generate(model, [[5, 6, 7]], 6, brownout, **own).tokens[0]
    assert first[3] != first[0]  # the brownout was one


ALONE = """
import asyncio, sys
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.request import SamplingParams

async def main():
    config = EngineConfig(
        model=sys.argv[1], dtype="float32", max_num_seqs=4, max_model_len=64, page_size=8,
        decode_buckets=(4,), prefill_buckets=(16,), max_prefill_tokens=16,
        threshold_buckets_percent=(100,), compilation_cache=sys.argv[2],
        brownout=BrownoutConfig(salc=False),
    )
    engine = await Engine.start(config)
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    print([out.token_ids async for out in engine.generate(list(range(20)), sampling)])
    await engine.stop()

asyncio.run(main())
"""


@pytest.mark.deep
@pytest.mark.sized(exhaustive=("granitemoehybrid", "lfm2_moe", "nemotron_h", "qwen2_moe"))
@pytest.mark.parametrize(
    "case", ["qwen3_next", "granitemoehybrid", "lfm2_moe", "nemotron_h", "qwen2_moe"]
)
def test_a_process_that_has_lowered_nothing_runs_what_another_kept(tmp_path, case):
    """A call of LAPACK, say, would find no function there."""
    answers = []
    for _ in range(2):
        of = [sys.executable, "-c", ALONE, str(GOLDEN.parent / case), str(tmp_path / "programs")]
        done = subprocess.run(of, capture_output=True, text=True, timeout=300, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout.splitlines()[-1])
    assert answers[0] == answers[1]
    assert len(list((tmp_path / "programs").rglob("*.bin"))) > 1


@pytest.mark.exhaustive
async def test_a_patched_run_leaves_nothing_that_an_unpatched_one_finds(tmp_path, monkeypatch):
    """A researcher's plan that degrades every visit, and then the plan as it is."""

    async def degraded():
        engine = await Engine.start(few_programs(tmp_path))
        try:
            await engine.set_brownout(BrownoutChange(strategy="full", decode_threshold_percent=90))
            stream = engine.generate([5, 6, 7], SamplingParams(max_new_tokens=6))
            return [out async for out in stream][-1].usage.degraded_visits
        finally:
            await engine.stop()

    monkeypatch.setattr(native, "routes", lambda weights: False)  # whose plan is C++
    covering = reference._covering

    def nothing(*args, **kwargs):
        return jnp.zeros_like(covering(*args, **kwargs))

    with monkeypatch.context() as patch:
        patch.setattr(reference, "_covering", nothing)
        everything = await degraded()
    few = await degraded()
    assert few < everything
    shutil.rmtree(tmp_path)
    assert await degraded() == few


def test_code_differs_by_the_files_of_other_folders(tmp_path):
    for name in ("one", "another", "one_again"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text(name.removesuffix("_again"))
    one, another, again = (sources(tmp_path / name) for name in ("one", "another", "one_again"))
    assert one == again
    assert len({one, another, sources()}) == 3
