"""Which loops an XLA reference may use on the backend it is traced for."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def trip_count(dynamic: Int[Array, ""], static: int) -> Int[Array, ""] | int:
    """Trip count of a reference's loop: `dynamic` on a CPU, the bound `static` elsewhere.

    On a CPU the cost of a reference has to follow the work there is. On a GPU a loop with a traced
    trip count makes the host wait for the device in every iteration, so there the loop runs to its
    bound and the surplus iterations are masked by the caller.
    """
    if jax.default_backend() == "cpu":
        return lax.min(dynamic, jnp.int32(static))
    return static
