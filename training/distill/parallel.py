"""Data parallelism: one loss over rows that lie spread over all devices."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float


def data_mesh() -> Mesh:
    """All devices, on an axis named `data`."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def over_devices(value: Array) -> Array:
    """Sum over the devices, inside a `share`."""
    return jax.lax.psum(value, "data")


def loss_and_grads(
    share: Callable[[Any, Any, Any, Array], Float[Array, ""]],
    mesh: Mesh,
    params: Any,
    fixed: Any,
    rows: Any,
    key: Array,
) -> tuple[Float[Array, ""], Any]:
    """Sum over devices of `share(params, fixed, rows, key)`, and its gradient by `params`.

    Every device holds all of `params` and `fixed`, its part of `rows` (split along the first axis
    of every leaf) and a key of its own.
    """

    def local(params: Any, fixed: Any, rows: Any, key: Array) -> tuple[Array, Any]:
        own_key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        loss, grads = jax.value_and_grad(share)(params, fixed, rows, own_key)
        return jax.lax.psum(loss, "data"), jax.lax.psum(grads, "data")

    whole, split = PartitionSpec(), PartitionSpec("data")
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(whole, whole, split, whole),
        out_specs=(whole, whole),
        check_vma=False,
    )(params, fixed, rows, key)
