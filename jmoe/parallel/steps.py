"""Step programs that run on all devices of a mesh.

Attention is data-parallel: each device has KV pages, block table, slots and rows of its own, so
that a step program runs on each as if it were alone; experts are spread over the devices
(`jmoe.parallel.experts`). Arrays are global ones, in the order of devices along the axis that is
split: rows `[D B, C]` are B rows a device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmoe.experts import ExpertTable
from jmoe.mixed import MixedWeights
from jmoe.parallel.experts import AXIS
from jmoe.parallel.home import SPLIT, WEIGHTS, WHOLE
from jmoe.shaping import Shaping
from jmoe.steps import State, StepOutput
from jmoe.weights import Weights


class Specs(NamedTuple):
    """How a step's arguments and results lie."""

    arguments: tuple[Any, ...]
    results: Any
    read: Any
    """The results where they leave the program of several processes: what a host reads is whole, so
    that each process has all of it."""


STATE = State._make((P(None, AXIS), SPLIT, SPLIT, SPLIT))
"""How the state lies: a prefix of its pytree."""

READ = StepOutput._make([WHOLE] * len(StepOutput._fields))._replace(logits=SPLIT, hidden=SPLIT)
"""A step's output, once it is gathered."""

STEPS = {
    "decode": Specs((WEIGHTS, STATE, SPLIT, SPLIT, WHOLE), (STATE, SPLIT), (STATE, READ)),
    "prefill": Specs(
        (WEIGHTS, STATE, SPLIT, SPLIT, SPLIT, WHOLE, SPLIT), (STATE, SPLIT), (STATE, READ)
    ),
}
"""Of `jmoe.steps.decode_step` and `prefill_step`, the latter with or without places."""


def mixed(count: int) -> Specs:
    """Returns how arguments and results of a mixed decode step of `count` models lie: on each
    device, a segment of rows for each model.
    """
    arguments, *results = STEPS["decode"]
    weights = MixedWeights(SPLIT, WHOLE, (WEIGHTS.table,) * count)  # type: ignore[arg-type]
    return Specs((weights, *arguments[1:]), *results)


SAMPLE = Specs((SPLIT, SPLIT, SPLIT), SPLIT, (SPLIT, WHOLE, WHOLE))
"""Of `sample_step`."""
DRAW = Specs((SPLIT,) * 6, SPLIT, (SPLIT, SPLIT, WHOLE))
"""Of `draw_step`."""
SEAT = Specs((SPLIT, SPLIT), SPLIT, SPLIT)
"""Of `jmoe.shaping.seat`: each device is told of a slot of its own."""
SCORE = Specs((WHOLE, SPLIT, SPLIT, SPLIT), SPLIT, WHOLE)
"""Of `score_step`."""


def spread(mesh: Mesh, step: Callable[..., Any], lies: Specs) -> Callable[..., Any]:
    """Returns a step of `jmoe.steps` that runs on all devices, each with its part of what is
    split.
    """

    def one_device(*arguments: Any) -> Any:
        first, *others = arguments
        if isinstance(first, Weights):
            first = first._replace(table=_own(first.table))
        elif isinstance(first, MixedWeights):
            first = first._replace(tables=tuple(map(_own, first.tables)))
        return step(first, *others)

    def call(*arguments: Any) -> Any:
        results = jax.shard_map(
            one_device,
            mesh=mesh,
            in_specs=lies.arguments[: len(arguments)],
            out_specs=lies.results,
            check_vma=False,
        )(*arguments)
        if not mesh.is_multi_process:
            return results
        place = partial(NamedSharding, mesh)
        read = jax.tree.map(place, lies.read, is_leaf=lambda spec: isinstance(spec, P))
        return jax.lax.with_sharding_constraint(results, read)

    return call


def _own(table: ExpertTable) -> ExpertTable:
    """Returns a table as a device sees it, which was given its own slots alone."""
    return table._replace(slots=table.slots[0])


def make_states(mesh: Mesh, make: Callable[[], State]) -> State:
    """Returns the state that `make` returns, on each device."""
    return jax.jit(jax.shard_map(make, mesh=mesh, in_specs=(), out_specs=STATE, check_vma=False))()


def make_shapings(mesh: Mesh, make: Callable[[], Shaping]) -> Shaping:
    """Returns what `make` returns, on each device."""
    return jax.jit(jax.shard_map(make, mesh=mesh, in_specs=(), out_specs=SPLIT, check_vma=False))()


def abstract_states(mesh: Mesh, make: Callable[[], State]) -> State:
    """Returns the shapes and dtypes of what `make_states` returns, and how it lies; nothing is
    allocated.
    """
    shapes = jax.eval_shape(
        jax.shard_map(make, mesh=mesh, in_specs=(), out_specs=STATE, check_vma=False)
    )

    def lies(spec: P, below: Any) -> Any:
        place = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place), below
        )

    return jax.tree.map(lies, STATE, shapes, is_leaf=lambda spec: isinstance(spec, P))


def shardings(mesh: Mesh | None) -> tuple[NamedSharding | None, NamedSharding | None]:
    """Returns the shardings of arrays that are split, and of those that every device has; None
    without a mesh.
    """
    if mesh is None:
        return None, None
    return NamedSharding(mesh, SPLIT), NamedSharding(mesh, WHOLE)
