"""Tests run with array shapes checked and without silent dtype or rank promotion."""

import gc
import hashlib
import os
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads of an interpreted kernel wait for one another on threads of XLA's pool. With one for each
# of two cores, two that wait leave none for what they wait for. Six run at a time: two blocks.
os.environ.setdefault("PJRT_NPROC", "8")
# XLA makes a compiler of MLIR anew for each fusion on a CPU. The emitters it had before take 0.6 of
# the time, and tests spend most of theirs compiling.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    " --xla_cpu_parallel_codegen_split_count=1",
)

import jax
import pytest
from hypothesis import settings
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jaxtyping import install_import_hook

import tests.typechecked  # noqa: F401  (the hook finds it by its name)

# An example's time is the machine's: the first one may compile, and others run beside it.
settings.register_profile("any_time", deadline=None)
settings.load_profile("any_time")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Programs that took longer to compile than to read are kept from one run, and one worker, to the
# next: a folder for each kind of processor.
MACHINE = Path("/proc/cpuinfo").read_bytes() if Path("/proc/cpuinfo").exists() else b""
FLAGS = b"".join(line for line in MACHINE.splitlines() if line.startswith((b"flags", b"Features")))
PROGRAMS = Path(__file__).parents[1] / ".cache" / "xla" / hashlib.sha256(FLAGS).hexdigest()[:8]
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)

install_import_hook(["jmoe", "pallas_kernels"], "tests.typechecked.unless_local")


MAPPINGS = Path("/proc/self/maps")
BEGAN = time.monotonic()


@pytest.fixture(scope="module", autouse=True)
def release_programs():
    """Drops compiled programs after a module once the process has many memory mappings.

    Linux allows 65,530 of them, and XLA takes about a dozen for each program. A process that ran
    some hundred deep tests had nearly as many, and one in CI was ended by a segmentation fault in
    the compiler, probably at the limit.
    """
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def any_http_port(monkeypatch):
    """Lets HTTP take any free port: two tests at a time would dispute 8000, and the loser logs
    that.
    """
    openai = sys.modules.get("serving.frontend.openai.app")
    if openai is not None:
        monkeypatch.setattr(openai, "FIRST_PORT", 0)


@pytest.fixture(scope="module")
def programs_are_compiled():
    """Lets no program come out of XLA's cache: on a CPU such a one cannot be serialized again."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    reset_cache()


@pytest.fixture
def interpreted_in_a_hurry():
    """Compiles with little optimization what a test interprets, where others of its module read
    what XLA makes for a GPU.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def compiled_in_a_hurry():
    """Compiles with little optimization: for programs that run once or a dozen times, compiling
    takes most of a test's time.

    What XLA makes of them when it takes its time is judged in test_united.py and test_generate.py.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


ROTA_S = 90.0
"""How long tests of a rota are started for."""
TOO_LONG = "tests/serving/test_engine_emulated.py", "tests/test_wheel.py"
"""Take ten minutes a case, or an environment of their own, and so are not in a rota."""


def pytest_addoption(parser):
    parser.addoption(
        "--rota", type=int, default=0, help="Begin where this number says, for a minute and a half."
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keeps collections of garbage from looking at what is imported and at tests, which stay, and
    makes the others rarer: of what JAX traces little is garbage.
    """
    gc.disable()
    collected = yield
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()
    return collected


@pytest.hookimpl(tryfirst=True)  # before xdist is told of the order
def pytest_collection_finish(session):
    if (number := session.config.getoption("--rota")) and session.items:
        session.items[:] = [i for i in session.items if not i.nodeid.startswith(TOO_LONG)]
        first = number // 3600 * 97 % len(session.items)  # seconds; another place every hour
        session.items[:] = session.items[first:] + session.items[:first]


def pytest_runtest_setup(item):
    late = time.monotonic() - BEGAN > ROTA_S
    if item.config.getoption("--rota") and late:
        pytest.skip("not this time: `make test-exhaustive` runs them all")


ROUTING = "tests/pallas_kernels/test_routing.py"  # its smallest interpreted case takes 20 seconds
THINNED = {"tests/pallas_kernels/test_odd_shapes.py": 3, "tests/pallas_kernels/": 1000}
THINNED |= {"tests/jmoe/": 2, "tests/training/": 2}
"""Of each deep test of these files, every n-th case is not exhaustive."""
MOST_TESTS = {"mosaic": 2, "sm90": 5}


def pytest_collection_modifyitems(config, items):
    """Marks cases that `sized` names, and of kernels' contract suites those that a rule makes deep:
    all that are emulated, and interpreted ones but for the first of a file. Of deep ones two
    interpreted tests a file and five emulated ones are not exhaustive.
    """
    count, interpreted, named = Counter(), defaultdict(set), {}
    for item in items:
        file, _, test = item.nodeid.partition("::")
        function, _, case = test.partition("[")
        for mark in item.iter_markers("sized"):
            for size, cases in mark.kwargs.items():
                named.setdefault((file, function), set(cases)).discard(case[:-1])
                if case[:-1] in cases:
                    item.add_marker(size)

        def is_past(most, file=file, function=function):
            tests = interpreted[file, most]
            if function in tests or len(tests) == most:
                return True
            tests.add(function)
            return False

        how = next((one for one in ("sm90", "mosaic", "batched") if one in case), "")
        is_deep = any(item.iter_markers("deep")) or any(item.iter_markers("exhaustive"))
        if not is_deep and how == "mosaic":
            is_deep = file == ROUTING or is_past(1)
        elif not is_deep and how == "batched" and file == ROUTING:
            is_deep = count[file, function, "batched"] > 0
            count[file, function, "batched"] += 1
        if is_deep or how == "sm90":
            item.add_marker("deep")
            if not any(item.iter_markers("exhaustive")):
                step = next((n for start, n in THINNED.items() if file.startswith(start)), 1)
                at = file, test.partition("[")[0], how.replace("batched", "")
                most = MOST_TESTS.get(how)
                if count[at] % step or (most and is_past(most)):
                    item.add_marker("exhaustive")
                count[at] += 1
    unknown = {at: cases for at, cases in named.items() if cases}
    if unknown and config.args == config.getini("testpaths") and not config.option.keyword:
        raise pytest.UsageError(f"`sized` names cases that are not there: {unknown}")
