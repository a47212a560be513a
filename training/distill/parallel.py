"""Data parallelism: one loss over rows that lie spread over all devices."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

WHOLE = PartitionSpec()
"""On every device, all of it."""


def data_mesh() -> Mesh:
    """Returns a mesh of all devices, on an axis named `data`."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def over_devices(value: Array) -> Array:
    """Returns the sum over the devices; for use inside a `share`."""
    return jax.lax.psum(value, "data")


def on_all_rows(function: Callable[[Array], Array], own: Array) -> Array:
    """Returns the device's part of what `function` makes of the rows of all devices; for use inside
    a `share`.

    What is drawn for rows, or chosen among them, is so the same on any number of devices.
    """
    rows = jax.lax.all_gather(own, "data", axis=0, tiled=True)
    first = jax.lax.axis_index("data") * own.shape[0]
    return jax.lax.dynamic_slice_in_dim(function(rows), first, own.shape[0])


def gathered(part: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Returns the whole of an array of which every device holds a part along `axis`; for use inside
    a `share`.

    Its gradient goes back summed over the devices and in parts.
    """
    return jax.lax.all_gather(part, "data", axis=axis, tiled=True)


def loss_and_grads(
    share: Callable[[Any, Any, Any, Array], Float[Array, ""]],
    mesh: Mesh,
    params: Any,
    fixed: Any,
    rows: Any,
    key: Array,
    *,
    params_specs: Any = WHOLE,
    fixed_specs: Any = WHOLE,
) -> tuple[Float[Array, ""], Any]:
    """Returns the sum over devices of `share(params, fixed, rows, key)`, and its gradient by
    `params`.

    Every device gets its part of `rows` (split along the first axis of every leaf), the same key,
    and of `params` and `fixed` what their specs say, all of them where those are WHOLE. Of a leaf
    in parts, `share` sees the device's own: see `gathered`.
    """

    def summed(spec: PartitionSpec, grads: Any) -> Any:
        return grads if any(spec) else jax.lax.psum(grads, "data")

    def local(params: Any, fixed: Any, rows: Any, key: Array) -> tuple[Array, Any]:
        loss, grads = jax.value_and_grad(share)(params, fixed, rows, key)
        is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
        return jax.lax.psum(loss, "data"), jax.tree.map(
            summed, params_specs, grads, is_leaf=is_spec
        )

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(params_specs, fixed_specs, PartitionSpec("data"), WHOLE),
        out_specs=(WHOLE, params_specs),
        check_vma=False,
    )(params, fixed, rows, key)
