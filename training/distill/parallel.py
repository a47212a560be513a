"""Data parallelism: one loss over rows that lie spread over the devices of all processes."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

WHOLE = PartitionSpec()
"""On every device, all of it."""


def join(coordinator: str, num_processes: int, process_index: int) -> None:
    """Makes this process one of several that train together; call it before anything uses jax.

    Args:
        coordinator: HOST:PORT on which process 0 listens, for everyone who can reach it.
        num_processes: how many there are.
        process_index: which of them this is, from 0.

    Raises ValueError for numbers that cannot be, and where the others do not come.
    """
    if not 0 <= process_index < num_processes:
        raise ValueError(
            f"process_index is {process_index}; it must be between 0 and {num_processes - 1}"
        )
    if ":" not in coordinator:
        raise ValueError(f"coordinator is {coordinator!r}; it must be HOST:PORT, of process 0")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_index, cluster_detection_method="deactivate"
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"the {num_processes} processes did not meet at {coordinator}: {error}"
        ) from error


def is_first() -> bool:
    """Returns whether this is the process that writes files and says what happens."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns when every process has come to this point."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def on_host(tree: Any) -> Any:
    """Returns copies of arrays as NumPy's, whole, in every process."""
    if jax.process_count() > 1:
        tree = multihost_utils.process_allgather(tree, tiled=True)
    return jax.tree.map(np.array, tree)


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
        return jax.lax.psum(loss, "data"), jax.tree.map(summed, params_specs, grads)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(params_specs, fixed_specs, PartitionSpec("data"), WHOLE),
        out_specs=(WHOLE, params_specs),
        check_vma=False,
    )(params, fixed, rows, key)
