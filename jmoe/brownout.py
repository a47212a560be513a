"""Brownout: what a step may degrade, and the plan that says which expert serves which visit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from jmoe import display
from jmoe.experts import groups_by_index
from jmoe.numbers import integer
from pallas_kernels import routing

Strategy = Literal["zero", "partial", "full"]
Keep = Literal["visits", "weight"]
"""Which experts stay exact, of as many: those with most visits (the paper's), or with most gate
weight."""


def strategy_code(strategy: str, keep: str = "visits") -> int:
    """Returns the traced code of a strategy's name. Raises ValueError for an unknown one."""
    if strategy not in routing.STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}; it must be one of zero, partial, full")
    if keep not in ("visits", "weight"):
        raise ValueError(f"keep is {keep!r}; it must be one of visits, weight")
    code = routing.STRATEGIES[strategy]
    return code + routing.BY_WEIGHT if code and keep == "weight" else code


def check_threshold(threshold_percent: int | float, name: str = "threshold") -> None:
    """Raises ValueError, about what is called `name`, unless 0 <= threshold_percent <= 100."""
    if not 0 <= threshold_percent <= 100:
        raise ValueError(f"{name} is {threshold_percent} %; it must be between 0 and 100")


@dataclass(frozen=True)
class Brownout:
    """A brownout setting: strategy, threshold in percent of visits, way of united experts.

    At 100 % nothing is degraded; at 0 % everything that may be is. `way` None keeps the way that
    is loaded. `keep` says which experts stay exact: of as many as the threshold keeps by visits,
    those that most visits go to, or those of most gate weight.
    """

    strategy: Strategy = "partial"
    threshold_percent: int = 100
    way: int | None = None
    keep: Keep = "visits"

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown strategy, a threshold out of range or not whole, and a
        way that is no integer.
        """
        strategy_code(self.strategy, self.keep)
        threshold = integer("threshold_percent", self.threshold_percent)
        check_threshold(threshold)
        object.__setattr__(self, "threshold_percent", threshold)
        if self.way is not None:
            object.__setattr__(self, "way", integer("way", self.way))


class Control(NamedTuple):
    """A brownout setting as a program takes it: traced, so that a change compiles nothing."""

    threshold_percent: Int[Array, ""]
    strategy: Int[Array, ""]

    @classmethod
    def of(cls, brownout: Brownout | None) -> "Control":
        """Makes the control of a setting; None is zero brownout."""
        setting = brownout or Brownout("zero")
        code = strategy_code(setting.strategy, setting.keep)
        return cls(jnp.int32(setting.threshold_percent), jnp.int32(code))


class Plan(routing.Plan):
    """What `plan` decided; `...` is [T], or [batch, length] where the choices had these axes.

    `expert_ids` int32 [..., K]: logical expert of each visit, -1: dropped or padding.
    `degraded` bool [..., K]: visits that go elsewhere than the router said.
    `s1` bool [m]: experts whose visits stay with the original.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return display.arrays(self)


def plan(
    ids: ArrayLike | Sequence[Any],
    *,
    num_experts: int,
    threshold_percent: int,
    way: int | None = None,
    groups: ArrayLike | Sequence[int] | None = None,
    strategy: Strategy = "partial",
    keep: Keep = "visits",
    weights: ArrayLike | Sequence[Any] | None = None,
    valid: ArrayLike | Sequence[Any] | None = None,
    exempt: ArrayLike | Sequence[Any] | None = None,
) -> Plan:
    """BrownoutServe's Algorithm 1 on router choices `ids` int [T, K] of one layer's step.

    `ids` may also be [batch, length, K], as `ForwardStats.router_choices[layer]` is: all rows are
    one step. T then stands for [batch, length], here and in what is returned.

    Args:
        ids: router choices, each in `[0, num_experts)`.
        num_experts: routed experts m of the layer.
        threshold_percent: whole percent of visits that the originals keep at least.
        way: experts a group, consecutive by id; give either this or `groups`.
        groups: int [m], the united expert of each routed one.
        strategy: `zero`, `partial` or `full`.
        keep: `visits`, or `weight`, which needs `weights`.
        weights: float, as `ids`: the router's gate weights, before any scaling.
        valid: bool [T]; rows that are not are padding: never counted, planned as -1.
        exempt: bool [T]; rows that refuse brownout. The experts they visit are in S1.

    Returns a Plan; in `.expert_ids` (int32 [T, K]) united expert j is `num_experts + j` and a
    dropped visit is -1.

    Raises ValueError for a value out of range, or shapes that do not agree.
    """
    num_experts = integer("num_experts", num_experts)
    choices = np.asarray(ids)
    if choices.ndim not in (2, 3) or not np.issubdtype(choices.dtype, np.integer):
        raise ValueError(f"ids must be integers [T, K]; got {choices.dtype} {choices.shape}")
    rows, flat = choices.shape[:-1], choices.reshape(-1, choices.shape[-1])
    counted = _rows("valid", valid, rows, default=True)
    seen = flat[counted]
    if seen.size and (seen.min() < 0 or seen.max() >= num_experts):
        raise ValueError(
            f"ids span {seen.min()} to {seen.max()}; experts are 0 to {num_experts - 1}"
        )
    setting = Brownout(strategy, threshold_percent, way, keep)
    expert_ids, degraded, s1 = _plan(
        jnp.asarray(np.where(counted[:, None], flat, 0), jnp.int32),
        _weights(weights, choices.shape, keep, counted),
        groups=jnp.asarray(_groups(num_experts, setting.way, groups, strategy), jnp.int32),
        threshold_percent=jnp.int32(setting.threshold_percent),
        strategy=jnp.int32(strategy_code(strategy, keep)),
        valid=jnp.asarray(counted),
        exempt=jnp.asarray(_rows("exempt", exempt, rows, default=False)),
    )
    return Plan(expert_ids.reshape(choices.shape), degraded.reshape(choices.shape), s1)


_plan = jax.jit(routing.brownout_plan)


def _weights(
    weights: ArrayLike | Sequence[Any] | None,
    shape: tuple[int, ...],
    keep: str,
    counted: np.ndarray,
) -> Array | None:
    """Returns the weights of all rows, flat. Raises ValueError for another shape, and for one of a
    row that counts that is less than 0 or not finite.
    """
    if weights is None:
        if keep == "weight":
            raise ValueError("keep is 'weight', and needs the gate weights: give weights")
        return None
    array = np.asarray(weights)
    if array.shape != shape or not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"weights must be floats {shape}, as ids; got {array.dtype} {array.shape}")
    flat = array.reshape(-1, shape[-1])
    wrong = counted[:, None] & ~((flat >= 0) & np.isfinite(flat))
    if wrong.any():
        raise ValueError(f"weights have {flat[wrong][0]}; they must be finite, and 0 or more")
    return jnp.asarray(flat, jnp.float32)


def _groups(
    num_experts: int, way: int | None, groups: ArrayLike | Sequence[int] | None, strategy: str
) -> np.ndarray:
    if way is not None and groups is not None:
        raise ValueError("give either way or groups, not both")
    if groups is None and way is None:
        if strategy == "partial":
            raise ValueError("partial brownout needs way or groups")
        return np.full(num_experts, -1, np.int32)
    if groups is None:
        assert way is not None
        return groups_by_index(num_experts, way)
    array = np.asarray(groups)
    if array.shape != (num_experts,) or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"groups must be {num_experts} integers; got {array.dtype} {array.shape}")
    if array.min() < -1 or array.max() >= num_experts:
        raise ValueError(
            f"groups span {array.min()} to {array.max()}; expected -1 to {num_experts - 1}"
        )
    return array.astype(np.int32)


def _rows(
    name: str, mask: ArrayLike | Sequence[Any] | None, rows: tuple[int, ...], *, default: bool
) -> np.ndarray:
    """Returns a mask of the rows, flat. Raises ValueError for another shape."""
    if mask is None:
        return np.full(math.prod(rows), default)
    array = np.asarray(mask)
    if array.shape != rows or array.dtype != np.bool_:
        raise ValueError(f"{name} must be bool {list(rows)}; got {array.dtype} {array.shape}")
    return array.reshape(-1)
