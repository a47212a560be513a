"""Brownout: what a step may degrade, and the plan that says which expert serves which visit."""

import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jmoe import display
from jmoe.experts import groups_by_index
from jmoe.numbers import integer
from pallas_kernels import routing
from pallas_kernels.backend import backend

log = logging.getLogger(__name__)


@runtime_checkable
class OwnStrategy(Protocol):
    """A strategy of a user's own: a pure function, traced into the programs that it serves.

    It is part of a config: frozen and hashable; equal ones share programs. It may have a method
    `max_active(threshold_percent, num_experts, num_united)`, the most logical experts that a
    layer's degradable rows visit: a server's steps have room for no more then.
    """

    def __call__(
        self,
        ids: Int[Array, "T K"],
        weights: Float[Array, "T K"],
        groups: Int[Array, "m"],
        threshold_percent: Int[Array, ""],
        valid: Bool[Array, "T"],
        exempt: Bool[Array, "T"],
    ) -> Int[Array, "T K"]:
        """Returns the logical expert that serves each visit of one layer's step: a routed one, m +
        a united one that `groups` names, or -1 for none.

        `ids` and `weights` are the router's. What is returned for rows that are padding or exempt
        is not looked at; at a threshold of 100 nothing is.
        """
        ...


@dataclass(frozen=True)
class LowestGate:
    """Drops visits of least gate weight: a row keeps t percent of its picks, but at least one."""

    def __call__(self, ids, weights, groups, threshold_percent, valid, exempt):
        """See OwnStrategy."""
        rank = jnp.argsort(jnp.argsort(-weights, axis=1), axis=1)
        return jnp.where((rank == 0) | (100 * rank < threshold_percent * ids.shape[1]), ids, -1)


Strategy = Literal["zero", "partial", "full"]
Keep = Literal["visits", "weight"]
"""Which experts stay exact, of as many: those with most visits (the paper's), or with most gate
weight."""


def strategy_code(strategy: str | OwnStrategy, keep: str = "visits") -> int:
    """Returns the traced code of a strategy, or of its name. Raises ValueError for an unknown one.

    All of a user's own, such as `module:Class`, have one code: programs are made for one of them.
    """
    if callable(strategy) or ":" in str(strategy):
        return routing.OWN
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
    those that most visits go to, or those of most gate weight. A strategy may be a user's own.
    `levels`: the threshold is a level of the model's table (`jmoe.levels`), which has a threshold
    for each layer, of as many active experts together.
    """

    strategy: Strategy | OwnStrategy = "partial"
    threshold_percent: int = 100
    way: int | None = None
    keep: Keep = "visits"
    levels: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown strategy, a threshold out of range or not whole, and a
        way that is no integer.
        """
        if isinstance(self.strategy, str):
            if ":" in self.strategy:
                raise ValueError(
                    f"strategy is {self.strategy!r}; give the object itself: import the class, and "
                    "Brownout(Class(), ...)"
                )
        elif not callable(self.strategy) or not isinstance(self.strategy, Hashable):
            raise ValueError(
                f"strategy is {self.strategy!r}; it must be zero, partial, full, or a hashable "
                "object that is called (jmoe.brownout.OwnStrategy)"
            )
        elif self.keep != "visits":
            raise ValueError(
                f"keep is {self.keep!r}, and {self.name} decides by itself what to keep; leave it "
                "out"
            )
        if self.levels and self.strategy != "partial":
            raise ValueError(f"levels are of partial brownout, and strategy is {self.name}")
        strategy_code(self.strategy, self.keep)
        threshold = integer("threshold_percent", self.threshold_percent)
        check_threshold(threshold)
        object.__setattr__(self, "threshold_percent", threshold)
        if self.way is not None:
            object.__setattr__(self, "way", integer("way", self.way))

    @property
    def name(self) -> str:
        """The strategy's name: `module:Class` of a user's own."""
        return self.strategy if isinstance(self.strategy, str) else Own(self.strategy).name

    @property
    def own(self) -> "Own | None":
        """The strategy of a user's own, as a config has it; None: it is none."""
        return None if isinstance(self.strategy, str) else Own(self.strategy)


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


@dataclass(frozen=True, repr=False)
class Own:
    """A strategy of a user's own, as programs are made with it (`ModelConfig.strategy`).

    `guarded`: where it fails, the paper's plan (partial brownout, by visits) serves, and a line is
    logged; else that is an error.
    """

    strategy: OwnStrategy
    guarded: bool = False

    @property
    def name(self) -> str:
        """Its class, or the function that it is, as `module:Class`."""
        named: Any = self.strategy
        named = named if hasattr(named, "__qualname__") else type(named)
        return f"{named.__module__}:{named.__qualname__}"

    def __repr__(self) -> str:
        state = sorted(getattr(self.strategy, "__dict__", {}).items())
        return f"Own({self.name}, {state}, {self.guarded})"

    def most_active(self, threshold_percent: int, num_experts: int, num_united: int) -> int:
        """Returns the most logical experts that degradable rows visit: all, unless it says less.

        Raises ValueError for what is no such number, unless it is guarded.
        """
        every = num_experts + num_united
        if (bound := getattr(self.strategy, "max_active", None)) is None:
            return every
        try:
            return min(
                integer("max_active", bound(threshold_percent, num_experts, num_united)), every
            )
        except Exception as error:  # whatever a user's code may raise
            self._failed("failed in max_active", error)
            return every

    def instead(
        self,
        plan: routing.Plan,
        ids: Int[Array, "T K"],
        weights: Float[Array, "T K"],
        groups: Int[Array, "m"],
        valid: Bool[Array, "T"],
        exempt: Bool[Array, "T"],
        control: Control,
        room: int | None = None,
    ) -> tuple[routing.Plan, Int[Array, ""]]:
        """Returns its plan in place of the paper's where `control` asks for it, and what was wrong
        with it: ids out of range, and experts beyond `room` (static; None: there is room for all).
        Where anything was, the paper's plan stays.

        Raises ValueError, naming the strategy, where tracing it fails, unless it is guarded.
        """
        if backend() != "cpu":
            _say(f"strategy {self.name}: routing takes no fused kernel, and more launches a layer")
        asked = (control.strategy == routing.OWN) & (control.threshold_percent < 100)
        found = self._traced(ids, weights, groups, control.threshold_percent, valid, exempt)
        if found is None:
            return plan, jnp.int32(0)
        degradable, num_experts = (valid & ~exempt)[:, None], groups.shape[0]
        united = jnp.any((found - num_experts)[:, :, None] == groups[None, None], axis=-1)
        in_range = jnp.where(found < num_experts, found >= -1, united)
        wrong = jnp.sum(degradable & ~in_range, dtype=jnp.int32)
        expert_ids = jnp.where(valid[:, None], jnp.where(degradable, found, ids), -1)
        own = jnp.arange(num_experts, dtype=jnp.int32)
        if room is not None:
            logical = jnp.arange(2 * num_experts, dtype=jnp.int32)
            active = jnp.any(expert_ids[:, :, None] == logical[None, None], axis=(0, 1))
            wrong += jnp.maximum(jnp.sum(active, dtype=jnp.int32) - room, 0)
        degraded = valid[:, None] & (expert_ids != ids)
        chosen = ids[:, :, None] == own[None, None]
        visited = jnp.any(chosen & valid[:, None, None], axis=(0, 1))
        moved = jnp.any(chosen & degraded[:, :, None], axis=(0, 1))
        takes = asked & (wrong == 0)
        mine = routing.Plan(expert_ids, degraded, visited & ~moved)
        chosen_plan = jax.tree.map(partial(jnp.where, takes), mine, routing.Plan(*plan))
        return chosen_plan, jnp.where(asked, wrong, 0)

    def _traced(self, ids: Array, *step: Array) -> Array | None:
        try:
            found = jnp.asarray(self.strategy(ids, *step))
            if found.shape != ids.shape or not jnp.issubdtype(found.dtype, jnp.integer):
                raise TypeError(
                    f"it returned {found.dtype} {list(found.shape)}, not integers {list(ids.shape)}"
                )
            return found.astype(jnp.int32)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # no strategy may end the server, by SystemExit for one
            self._failed("failed", error)
            return None

    def _failed(self, how: str, error: BaseException) -> None:
        how = f"{how} with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if not self.guarded:
            raise ValueError(f"strategy {self.name} {how}") from error
        _say(f"strategy {self.name} {how}; visits (the paper's plan) goes on")

    def check(self, wrong: ArrayLike) -> None:
        """Raises ValueError for what `instead` found wrong in any layer; where it is guarded, logs
        that once.
        """
        if not (count := int(np.sum(np.asarray(wrong)))):
            return
        how = (
            "returned experts out of range: they are -1, a routed one, or m + one that groups "
            "names, and no more of them than max_active says"
        )
        if not self.guarded:
            raise ValueError(f"strategy {self.name} {how}; {count} were not")
        _say(f"strategy {self.name} {how}; visits (the paper's plan) serves such steps")

    def probe(self, num_experts: int, top_k: int) -> None:
        """Traces it once, for what that raises or logs."""
        shape = jax.ShapeDtypeStruct
        ids, weights = shape((8, top_k), jnp.int32), shape((8, top_k), jnp.float32)
        groups, threshold = shape((num_experts,), jnp.int32), shape((), jnp.int32)
        flags = shape((8,), jnp.bool_)
        step = weights, groups, threshold, flags, flags
        jax.eval_shape(lambda *step: self._traced(*step), ids, *step)


@cache
def _say(line: str) -> None:
    """Logs a line once, however many programs are traced."""
    log.warning("%s", line)


def plan(
    ids: ArrayLike | Sequence[Any],
    *,
    num_experts: int,
    threshold_percent: int,
    way: int | None = None,
    groups: ArrayLike | Sequence[int] | None = None,
    strategy: Strategy | OwnStrategy = "partial",
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
        threshold_percent: whole percent of visits that the originals keep: at least, by `weight`
            about.
        way: experts a group, consecutive by id; give either this or `groups`.
        groups: int [m], the united expert of each routed one.
        strategy: `zero`, `partial`, `full`, or a user's own, which needs `weights`.
        keep: `visits`, or `weight`, which needs `weights`, too.
        weights: float, as `ids`: the router's gate weights, before any scaling.
        valid: bool [T]; rows that are not are padding: never counted, planned as -1.
        exempt: bool [T]; rows that refuse brownout. The experts they visit are in S1.

    Returns a Plan; in `.expert_ids` (int32 [T, K]) united expert j is `num_experts + j` and a
    dropped visit is -1.

    Raises ValueError for a value out of range, shapes that do not agree, or a strategy that fails.
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
    if (own := setting.own) is not None and weights is None:
        raise ValueError(f"strategy {own.name} goes by the gate weights: give weights")
    (expert_ids, degraded, s1), wrong = _plan(
        own,
        jnp.asarray(np.where(counted[:, None], flat, 0), jnp.int32),
        _weights(weights, choices.shape, keep, counted),
        jnp.asarray(_groups(num_experts, setting.way, groups, strategy), jnp.int32),
        jnp.asarray(counted),
        jnp.asarray(_rows("exempt", exempt, rows, default=False)),
        Control.of(setting),
    )
    if own is not None:
        own.check(wrong)
    return Plan(expert_ids.reshape(choices.shape), degraded.reshape(choices.shape), s1)


@partial(jax.jit, static_argnums=0)
def _plan(
    own: Own | None,
    ids: Int[Array, "T K"],
    weights: Float[Array, "T K"] | None,
    groups: Int[Array, "m"],
    valid: Bool[Array, "T"],
    exempt: Bool[Array, "T"],
    control: Control,
) -> tuple[routing.Plan, Array | None]:
    made = routing.brownout_plan(
        ids,
        weights,
        groups=groups,
        threshold_percent=control.threshold_percent,
        strategy=control.strategy,
        valid=valid,
        exempt=exempt,
    )
    if own is None or weights is None:
        return made, None
    return own.instead(made, ids, weights, groups, valid, exempt, control)


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
    num_experts: int, way: int | None, groups: ArrayLike | Sequence[int] | None, strategy: object
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
