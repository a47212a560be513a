"""Decode steps of two models over one pool: a mixed one against a step of each in turn.

Both give as many rows of each model a token, in the engine's own steps chained through their
donated state (see step_part). The steps in turn are one program with either model's weights, as an
engine launches them: a CUDA graph is updated where weights have moved. Experts are counted in the
steps in turn, for both: a mixed step reports rows by number of the expert, whosever it is.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from benchmarks.gpu import models, step_part
from benchmarks.gpu.part import Case, Context, RunCase
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.step_part import StepProgram
from benchmarks.kernels.timing import Ceilings, Ruler
from jmoe.family import Family
from jmoe.mixed import MixedWeights, mixed_decode_step
from jmoe.steps import State, decode_step, served
from jmoe.weights import Weights

DEPENDS = (*step_part.DEPENDS, "benchmarks/gpu/step_part.py")
START_S = 75.0


def cases(sizes: Sizes) -> list[Case]:
    """Returns a case for each number of rows."""
    about = {"models": 2, "shared_percent": sizes.family_shared_percent, "context": sizes.context}
    return [Case(f"decode/b{b}", 60.0, {**about, "batch": b}) for b in sizes.family_batches]


@contextmanager
def session(context: Context) -> Iterator[RunCase]:
    """Loads one family for all cases and yields what runs a case on it."""
    ruler, ceilings = step_part.rulers(context)
    family = models.make_family(context.sizes)

    def run(case: Case) -> dict[str, Any]:
        return _decode(context.sizes, family, Ruler(ruler.warm_s, ruler.timed_s), ceilings, case)

    yield run


def _decode(
    sizes: Sizes, family: Family, ruler: Ruler, ceilings: Ceilings, case: Case
) -> dict[str, Any]:
    """Times the steps of one number of rows and returns the record."""
    batch = case.about["batch"]
    mixed_us = ruler.measure(_mixed(sizes, family, batch)).span_us
    gc.collect()
    in_turn = _in_turn(sizes, family, batch)
    each_us, seen = ruler.measure(in_turn).span_us, in_turn.carry[1]
    active = float(jnp.sum(seen.active)) / float(jnp.sum(seen.steps))
    both = float(seen.both / seen.steps[1])
    cfg, dtype = family.config, family[0].dtype
    read = partial(models.decode_bytes, cfg, dtype, context=case.about["context"])
    one = read(batch=batch // 2, active_experts=active)
    # A mixed step reads what is a model's own twice, and experts that both visit once.
    mixed = read(batch=batch, active_experts=2 * active - both)
    mixed_bytes = mixed["total"] + mixed["other_weights"]
    floors = [models.floor_us(b, ceilings.copy_tb_s) for b in (mixed_bytes, 2 * one["total"])]
    return {
        "bytes": {"mixed": mixed_bytes, "alternating": 2 * one["total"]},
        "figures": {
            "mixed_us": mixed_us,
            "alternating_us": 2 * each_us,
            "mixed_over_alternating": mixed_us / (2 * each_us),
            "mixed_floor_us": floors[0],
            "alternating_floor_us": floors[1],
            "floors_mixed_over_alternating": floors[0] / floors[1],
            "mixed_over_floor": mixed_us / floors[0],
            "alternating_over_floor": 2 * each_us / floors[1],
            "active_experts_of_each": active,
            "active_experts_of_both": both,
        },
    }


# -- programs -------------------------------------------------------------------------------------


def _weights(family: Family) -> tuple[list[Weights], dict[str, str]]:
    """Returns each model's weights as a server's programs take them, and XLA's options."""
    found = [served(model.params) for model in family]
    each = zip(family, found, strict=True)
    return [model.weights._replace(params=params) for model, (params, _) in each], found[0][1]


def _mixed(sizes: Sizes, family: Family, batch: int) -> StepProgram:
    """Returns a mixed step in which half of the rows are of each model."""
    cfg, (each, options) = family.config, _weights(family)
    weights, rows = MixedWeights.of(each), step_part.decode_rows(range(batch), sizes.context)
    columns = len(family) * cfg.num_experts

    def mixed(carry: State, *given: Any) -> Any:
        weights, *arrays = given
        state, out = mixed_decode_step(cfg, weights, carry, *arrays, max_active=columns)
        return state, out._replace(logits=None)

    carry = step_part.decode_state(sizes, family[0], sizes.family_batches)
    return StepProgram.of(mixed, carry, (weights,), rows, options)


class Visits(NamedTuple):
    """Experts that steps in turn had rows for, counted on the device. A pytree."""

    steps: Int[Array, "2"]  # of each model
    active: Float[Array, "2"]  # experts that had rows, a mean over MoE layers, summed over steps
    first: Bool[Array, "layers m"]  # those of the first model's newest step
    both: Float[Array, ""]  # shared ones that the second's step visited as well, likewise summed

    def after(
        self,
        number: Int[Array, ""],
        visited: Bool[Array, "layers m"],
        shared: Bool[Array, "layers m"],
    ) -> "Visits":
        """Returns the counts after a step of model `number` that visited these experts."""
        layers = visited.shape[0]
        both = jnp.sum(visited & self.first & shared) / layers
        return Visits(
            self.steps.at[number].add(1),
            self.active.at[number].add(jnp.sum(visited) / layers),
            jnp.where(number == 0, visited, self.first),
            self.both + jnp.where(number == 0, 0.0, both),
        )


def _in_turn(sizes: Sizes, family: Family, batch: int) -> StepProgram:
    """Returns a step with half of the rows for each model: the same program with one model's
    weights and rows, then with the next one's. The models' rows have slots of their own.
    """
    cfg, (each, options), half = family.config, _weights(family), batch // 2
    shared = jnp.asarray(family.sharing.owners[1] == 0)
    held = [(weights, jnp.int32(number), shared) for number, weights in enumerate(each)]
    rows = [step_part.decode_rows(range(n * half, (n + 1) * half), sizes.context) for n in range(2)]

    def in_turn(carry: tuple[State, Visits], *given: Any) -> Any:
        (state, seen), (weights, number, shared, *arrays) = carry, given
        state, out = decode_step(cfg, weights, state, *arrays, max_active=cfg.num_experts)
        seen = seen.after(number, out.expert_rows[:, : cfg.num_experts] > 0, shared)
        return (state, seen), out._replace(logits=None)

    nothing = jnp.zeros(2, jnp.int32), jnp.zeros(2), jnp.zeros(shared.shape, bool), jnp.zeros(())
    carry = step_part.decode_state(sizes, family[0], sizes.family_batches), Visits(*nothing)
    call = step_part.compiled(in_turn, carry, *held[0], *rows[0], options=options)
    turns = [*zip(held, rows, strict=True)] * 2
    sets = [step_part.in_other_arrays(*turn, count=1)[0] for turn in turns]
    return StepProgram(call, carry, sets)
