"""What the ops may use on the backend they are traced for: Mosaic kernels, batched or loops."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

SHARED_BYTES = 226 * 1024
"""Shared memory a block may have on a Hopper GPU, a kilobyte of it left for barriers."""

NUM_SMS = 132
"""Multiprocessors of an H100 (SXM) or H200: of the GPU that is compiled for where there is none."""

_MISCOMPILING = {87: "12.8", 88: "12.9"}
"""CUDA releases by the PTX version of their ptxas, times ten. CUDA 12.9.1 has been repaired and
cannot be told from 12.9.0 by it. Mosaic attention that comes with jax refuses them, too."""

_named: ContextVar[str | None] = ContextVar("backend that is traced for", default=None)
_references_only: ContextVar[bool] = ContextVar("ops run their XLA references", default=False)
_noted: ContextVar[dict[str, str] | None] = ContextVar("implementations by op", default=None)
_batched_only: ContextVar[bool] = ContextVar("ops run their batched forms", default=False)


def backend() -> str:
    """Returns the platform that programs are traced for: that of `traced_for`, or jax's default."""
    return _named.get() or jax.default_backend()


def traced_for(platform: str) -> AbstractContextManager[str]:
    """Traces references for `platform` rather than for the default backend within it.

    A machine without a GPU needs it to compile for one. `jax.jit` keeps what it has traced: give it
    a function object that no other platform was traced with.
    """
    return _within(_named, platform)


def hopper() -> bool:
    """Returns whether Mosaic kernels may run: on a Hopper GPU, or compiled for one (`traced_for`).

    The kernels use sm_90a instructions, which no other generation has; there ops are batched
    (`batched`). Raises RuntimeError on a Hopper GPU where jax finds a ptxas known to compile them
    wrongly (`check_ptxas`).
    """
    if is_reference_wanted():
        return False
    if _named.get() is not None:
        return _named.get() == "cuda"
    if jax.default_backend() != "gpu":
        return False
    if getattr(jax.devices()[0], "compute_capability", "") != "9.0":
        return False
    _check_ptxas_found()
    return True


def num_sms() -> int:
    """Returns the multiprocessors of the GPU that programs are traced for: an H100 PCIe has 114, an
    H20 78.
    """
    if _named.get() is not None or jax.default_backend() != "gpu":
        return NUM_SMS
    return getattr(jax.devices()[0], "core_count", None) or NUM_SMS


def batched() -> bool:
    """Returns whether an op without a Mosaic kernel runs its batched form: on every GPU.

    It is XLA, too, but of few large launches where the reference loops over small blocks. A CPU
    runs the reference, whose cost follows the work there is.
    """
    if _batched_only.get():
        return True
    return not _references_only.get() and backend() != "cpu"


KERNEL = "Mosaic kernel"
NATIVE = "C++"
"""How `noting` names the implementations of an op that are none in XLA."""


def noting() -> AbstractContextManager[dict[str, str]]:
    """Yields which implementation each op takes that is traced within it, by its name.

    That is `KERNEL`, `NATIVE`, "batched XLA" or "XLA": the op's sizes and dtypes decide, too. For
    an op that is traced several times it is the last one.
    """
    return _within(_noted, {})


def note(op: str, form: str = "", *, has_batched: bool = True) -> None:
    """Notes which implementation an op takes; "" is this backend's form in XLA."""
    if (noted := _noted.get()) is not None:
        noted[op] = form or ("batched XLA" if has_batched and batched() else "XLA")


@contextmanager
def _within[T](choice: ContextVar[Any], value: T) -> Iterator[T]:
    token = choice.set(value)
    try:
        yield value
    finally:
        choice.reset(token)


def batched_only() -> AbstractContextManager[bool]:
    """Takes the batched form of every op that is traced within it, on any backend, as on an
    A100.
    """
    return _within(_batched_only, True)


def check_ptxas(version: int | None) -> None:
    """Raises RuntimeError for a ptxas that miscompiles causal masks.

    `version` is of its PTX, times ten; None where there is no ptxas but what XLA has built in. An
    error rather than a warning and references: tokens would be wrong without a sign of it, or
    several times slower, and another ptxas is one installation away.
    """
    release = _MISCOMPILING.get(version or 0)
    if release is not None:
        raise RuntimeError(
            f"ptxas is that of CUDA {release}, which miscompiles causal masks: attention would be "
            "wrong. Install CUDA 13 (pip install 'jax[cuda13]' brings its ptxas), or remove the "
            "older one from PATH and CUDA_ROOT"
        )


@cache
def _check_ptxas_found() -> None:
    check_ptxas(ptxas_version())


def ptxas_version() -> int | None:
    """Returns ten times the PTX version of the ptxas that jax finds; None where there is none or it
    says none.
    """
    try:
        from jax._src.lib import mosaic_gpu

        private: Any = mosaic_gpu  # jax has no public name for it
        return private._mosaic_gpu_ext._get_ptxas_isa_version()
    except (ImportError, AttributeError, RuntimeError):
        return None


def is_reference_wanted() -> bool:
    """Returns whether an op is traced for its XLA form, reference or batched, and no other."""
    return _references_only.get() or _batched_only.get()


def references_only() -> AbstractContextManager[bool]:
    """Takes the XLA reference of every op that is traced within it, on any backend, for
    comparison.
    """
    return _within(_references_only, True)


def trip_count(dynamic: Int[Array, ""], static: int) -> Int[Array, ""] | int:
    """Returns the trip count of a reference's loop: `dynamic` on a CPU, the bound `static`
    elsewhere.

    On a CPU the cost of a reference has to follow the work there is. On a GPU a loop with a traced
    trip count makes the host wait for the device in every iteration, so there the loop runs to its
    bound and the surplus iterations are masked by the caller.
    """
    if backend() == "cpu":
        return lax.min(dynamic, jnp.int32(static))
    return static
