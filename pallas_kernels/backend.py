"""Which loops an XLA reference may use on the backend it is traced for."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

_named: ContextVar[str | None] = ContextVar("backend that is traced for", default=None)


def backend() -> str:
    """The platform programs are traced for: one named by `traced_for`, or the default backend."""
    return _named.get() or jax.default_backend()


@contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """Within it, references are traced for `platform` rather than for the default backend.

    A machine without a GPU needs it to compile for one. `jax.jit` keeps what it has traced: give it
    a function object that no other platform was traced with.
    """
    token = _named.set(platform)
    try:
        yield
    finally:
        _named.reset(token)


def trip_count(dynamic: Int[Array, ""], static: int) -> Int[Array, ""] | int:
    """Trip count of a reference's loop: `dynamic` on a CPU, the bound `static` elsewhere.

    On a CPU the cost of a reference has to follow the work there is. On a GPU a loop with a traced
    trip count makes the host wait for the device in every iteration, so there the loop runs to its
    bound and the surplus iterations are masked by the caller.
    """
    if backend() == "cpu":
        return lax.min(dynamic, jnp.int32(static))
    return static
