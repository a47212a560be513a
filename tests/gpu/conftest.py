"""What needs a GPU: `JAX_PLATFORMS=cuda python -m pytest -m gpu tests/gpu`. Skipped without one."""

import os
import sys
from pathlib import Path

import jax
import pytest

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "pallas_kernels")]  # of routing_contract


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a Hopper GPU")


def _hopper():
    # Asked before jax is: a machine without a GPU must not look for one in every test run.
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return False
    from pallas_kernels.backend import hopper

    # This process takes memory as it needs it: servers and others that tests start, which do not
    # inherit that, want most of it at once.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return hopper()


def pytest_collection_modifyitems(items):
    own = [item for item in items if "tests/gpu/" in item.path.as_posix()]
    if not own:
        return
    skip = None if _hopper() else pytest.mark.skip(reason="needs a Hopper GPU")
    for item in own:
        item.add_marker(pytest.mark.gpu)
        if skip is not None:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _ordinary_promotion():
    """Allows ordinary promotion: benchmarks' references and whole servers do not keep tests' strict
    rules.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
