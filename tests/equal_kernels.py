"""Equal Mosaic kernels are lowered and compiled once a process: most of what it takes to compile a
program for an H200, and nearly all that a second layer or program has in common with the first.

XLA keeps what it has compiled by a hash of the kernel, and jax writes a number of its own into
each, for the names of dumped files: without it and the lines of source that a kernel came from,
what was compiled before is found. Lowering is Python's, and jax keeps it for one program only.
"""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
from jax._src.core import Jaxpr, Literal, Tracer, Var
from jax._src.lib.mlir import ir, passmanager
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.mosaic.gpu import core

NUMBERED = "mosaic_gpu.dump_basename"


def signature(value: Any, names: dict[Any, int]) -> Any:
    """Returns a value that is equal for arguments that are lowered alike. `names` numbers a jaxpr's
    variables; what it does not know how to compare is equal to itself alone.
    """
    if isinstance(value, Jaxpr):
        bound = [(signature(v, names), v.aval) for v in (*value.constvars, *value.invars)]
        lines = [
            (
                each.primitive,
                signature(list(each.invars), names),
                [(signature(v, names), v.aval) for v in each.outvars],
                signature(each.params, names),
            )
            for each in value.eqns
        ]
        consts = [None if isinstance(c, Tracer) else c for c in value.consts]  # given as arguments
        ends = signature([*value.outvars, *consts], names)
        return value.debug_info.func_name, _tuples(bound), _tuples(lines), ends
    if isinstance(value, Literal):
        return value.aval, type(value.val), np.asarray(value.val).tobytes()
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, value.tobytes()
    if isinstance(value, dict):
        return tuple((key, signature(value[key], names)) for key in sorted(value, key=str))
    if isinstance(value, list | tuple):
        return type(value), *(signature(each, names) for each in value)
    if isinstance(value, float):
        return repr(value)  # zero has a sign
    if isinstance(value, Var):
        return names.setdefault(value, len(names))
    return type(value), value


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


@dataclass
class Kept:
    """Lowered and serialized kernels, by what they were made from."""

    lowered: dict[Any, lowering.LoweringResult]
    serialized: dict[int, ir.Module]

    def lower(self, jax_mesh, axis_names, grid, block, cluster, ins, outs, jaxpr, params, *rest,
              lower=lowering.lower_jaxpr_to_module, **options):  # fmt: skip
        """Calls `lower_jaxpr_to_module` unless it has lowered the same before."""
        shapes = [(aval.shape, aval.dtype) for aval in (*ins, *outs)]
        given = jax_mesh, vars(axis_names), grid, block, cluster, len(ins), shapes, params, rest
        key = signature([jaxpr, *given], {})
        if key not in self.lowered:
            arguments = jax_mesh, axis_names, grid, block, cluster, ins, outs, jaxpr, params
            self.lowered[key] = lower(*arguments, *rest, **options)
        return self.lowered[key]

    def serialize(self, module, *, run=core._run_serde_pass, **options):
        """Calls `_run_serde_pass` on a kernel whose name depends on nothing but itself."""
        assert options == {"serialize": True, "ir_version": None}
        if id(module) not in self.serialized:
            with module.context, ir.Location.unknown(module.context):
                attributes = module.operation.attributes
                assert NUMBERED in attributes
                attributes[NUMBERED] = attributes["sym_name"]
                strip = passmanager.PassManager.parse("builtin.module(strip-debuginfo)")
                strip.run(module.operation)
            self.serialized[id(module)] = run(module, **options)
        return self.serialized[id(module)]


@pytest.fixture(autouse=True, scope="module")
def equal_kernels_are_compiled_once():
    kept = Kept({}, {})
    with (
        mock.patch.object(lowering, "lower_jaxpr_to_module", kept.lower),
        mock.patch.object(core, "_run_serde_pass", kept.serialize),
    ):
        yield
