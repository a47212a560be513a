"""The digest of loaded code: what changes it, and what does not."""

import os
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import jax
import pytest

from jmoe import steps
from pallas_kernels.routing import reference
from serving.execution.traced_code import digest

SOURCE = """
import helper
TABLE = {"a": 1, "b": (2, 3)}
class Kind:
    size = 3
    @property
    def double(self): return 2 * self.size
def root(x, scale=2):
    def inner(y): return helper.step(y) + TABLE["a"]
    return inner(x) * scale + Kind().double
"""
HELPER = """
def step(x): return other(x) + 1
def other(x): return x * 3
def unrelated(x): return x
"""


def load(source=SOURCE, helper=HELPER):
    """Loads a module and returns its root function, which names another one."""
    other = types.ModuleType("helper")
    exec(compile(helper, "helper.py", "exec"), vars(other))
    module = types.ModuleType("mine")
    sys.modules["helper"] = other
    try:
        exec(compile(source, "mine.py", "exec"), vars(module))
    finally:
        del sys.modules["helper"]
    return module


def test_the_same_code_has_the_same_digest():
    assert digest([load().root]) == digest([load().root])
    assert digest([load().root]) == digest([load("\n\n# moved, commented\n" + SOURCE).root])
    assert digest([load().root]) == digest([load(helper=HELPER.replace("return x\n", "0\n")).root])


@pytest.mark.parametrize(
    "change",
    [
        {"source": SOURCE.replace("* scale", "+ scale")},
        {"source": SOURCE.replace("scale=2", "scale=4")},
        {"source": SOURCE.replace('TABLE["a"]', 'TABLE["b"][0]')},
        {"source": SOURCE.replace("(2, 3)", "(2, 4)")},
        {"source": SOURCE.replace('"a": 1', '"a": 5')},
        {"source": SOURCE.replace("size = 3", "size = 4")},
        {"source": SOURCE.replace("2 * self.size", "3 * self.size")},
        {"helper": HELPER.replace("+ 1", "+ 2")},
        {"helper": HELPER.replace("x * 3", "x * 4")},
    ],
)
def test_a_change_of_anything_that_is_named_changes_it(change):
    assert digest([load().root]) != digest([load(**change).root])


def test_a_patch_changes_it_and_taking_it_back_does_too(monkeypatch):
    module = load()
    before = digest([module.root])
    with monkeypatch.context() as patch:
        patch.setattr(module.helper, "other", lambda x: x * 7)
        assert digest([module.root]) != before
        patch.setattr(module.helper, "other", partial(max, 7))
        assert digest([module.root]) != before
    assert digest([module.root]) == before


@pytest.mark.sized(deep=("_count", "no_less"))
@pytest.mark.parametrize("name", ["_covering", "_count", "targets", "no_less"])
def test_a_step_program_names_the_plan_it_is_made_of(name, monkeypatch):
    roots = (steps.decode_step, steps.prefill_step)
    before = digest(roots)
    monkeypatch.setattr(reference, name, lambda *args, **kwargs: None)
    assert digest(roots) != before


def test_patched_libraries_and_jitted_functions_count(monkeypatch):
    jitted = jax.jit(load().root)
    before, plain = digest([jitted]), digest([steps.decode_step])
    assert before != digest([jax.jit(load(SOURCE.replace("* scale", "- scale")).root)])
    monkeypatch.setattr(jax.lax, "scan", lambda *args: None)
    assert digest([steps.decode_step]) != plain


@pytest.mark.deep
def test_it_is_the_same_in_every_process():
    program = "from jmoe import steps; from serving.execution.traced_code import digest;"
    program += "print(digest([steps.decode_step, steps.prefill_step]))"

    def run(seed):
        env = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        top = Path(__file__).parents[3]
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, cwd=top, capture_output=True, check=True
        )
        return done.stdout

    assert run("1") == run("2") != b""
