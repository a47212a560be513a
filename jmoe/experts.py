"""Paged experts: the pool of slots, the table from logical expert to slot, and united experts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jmoe import display
from jmoe.int4 import Int4
from jmoe.numbers import integer
from pallas_kernels import grouped_gemm
from pallas_kernels.activation import Activation
from pallas_kernels.grouped_gemm import PackedWeights, QuantizedWeights, four_bits
from pallas_kernels.grouped_gemm.quantized import BLOCK, dequantize
from pallas_kernels.routing import Dispatch, RowTiles, TableRow

FETCHED, ABSENT = 1, 2
"""Of `ExpertTable.offloaded`."""


class Pool(ABC):
    """Weights of every routed and united expert; a slot holds one expert.

    A pytree of arrays whose first axis is the slots: so far all kinds of pools are alike, and so
    they are read, written, copied and counted here. What a kind has of its own is what the arrays
    say of an expert. Programs only read a pool. `write_slots` is the one writer, and it donates.
    """

    @property
    @abstractmethod
    def dtype(self) -> jnp.dtype:
        """The dtype of the rows that experts are given."""

    @property
    def format(self) -> str:
        """What `quantize` makes pools of this kind; `none`: floating point."""
        return "none"

    @abstractmethod
    def mlp(
        self, h: Float[Array, "T d"], work: Dispatch, activation: Activation
    ) -> Float[Array, "T d"]:
        """Computes the sum of each row's experts as `grouped_gemm.moe_mlp` does, float32. `work`
        names slots of the whole pool: nothing is to be cut out of it.
        """

    @abstractmethod
    def plain(self) -> "ExpertPool":
        """Returns the same experts in floating point, in the pool's dtype."""

    @abstractmethod
    def kept(self, experts: "ExpertPool") -> "Pool":
        """Returns floating-point experts as this pool keeps them."""

    def block_rows(self, num_visits: int, max_active: int) -> int:
        """Returns the rows of a dispatch's blocks for `mlp`; see `grouped_gemm.block_rows`."""
        return grouped_gemm.block_rows(num_visits, max_active)

    def row_tiles(self, num_rows: int, top_k: int, num_experts: int) -> RowTiles | None:
        """Returns the row tiles that `mlp` wants mapped beforehand, as `grouped_gemm.row_tiles`
        does; None: it needs no map.
        """
        return None

    @property
    def num_slots(self) -> int:
        """Experts that there is room for."""
        return jax.tree.leaves(self)[0].shape[0]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(self))

    def read(self, slots: Int[Array | np.ndarray, "..."]) -> "Pool":
        """Returns a pool of the same kind with what is in `slots`, in their order and shape."""
        return jax.tree.map(lambda leaf: leaf[slots], self)

    def empty(self, num_slots: int, device: Any = None) -> "Pool":
        """Returns a zeroed pool of the same kind; `device` is as of `jnp.zeros`."""
        return jax.tree.map(
            lambda leaf: jnp.zeros((num_slots, *leaf.shape[1:]), leaf.dtype, device=device), self
        )

    def with_experts(self, slots: Int[Array, "n"], experts: "Pool") -> "Pool":
        """Returns the pool with `experts`, of any kind, in `slots`; one out of range is dropped.

        Eight bits are moved as integers: a CPU would convert a whole pool of floats.
        """
        is_alike = jax.tree.structure(experts) == jax.tree.structure(self)
        kept = experts if is_alike else self.kept(experts.plain())

        def written(held: Array, new: Array) -> Array:
            moved = jnp.uint8 if held.dtype.itemsize == 1 else held.dtype
            was, new = (lax.bitcast_convert_type(a, moved) for a in (held, new.astype(held.dtype)))
            return lax.bitcast_convert_type(was.at[slots].set(new, mode="drop"), held.dtype)

        return jax.tree.map(written, self, kept)


class _Plain(NamedTuple):
    gate_up: Float[Array, "slots d f2"]  # columns [:f] gate, [f:] up; up alone without a gate
    down: Float[Array, "slots f d"]
    gate_up_bias: Float[Array, "slots f2"] | None = None
    down_bias: Float[Array, "slots d"] | None = None  # there are both or none


class GroupedPool(Pool):
    """A pool whose weights the grouped GEMM takes as they are, in either number format."""

    gate_up: Any
    down: Any
    gate_up_bias: Any
    down_bias: Any

    def mlp(
        self, h: Float[Array, "T d"], work: Dispatch, activation: Activation
    ) -> Float[Array, "T d"]:
        """See Pool."""
        biases = None
        if self.gate_up_bias is not None and self.down_bias is not None:
            biases = self.gate_up_bias, self.down_bias
        return grouped_gemm.moe_mlp(h, self.gate_up, self.down, work, activation, biases)

    def row_tiles(self, num_rows: int, top_k: int, num_experts: int) -> RowTiles | None:
        """See Pool."""
        return grouped_gemm.row_tiles(num_rows, top_k, num_experts, self.down)


class ExpertPool(GroupedPool, _Plain):
    """The plain kind of pool: weights in the dtype of the rows."""

    @property
    def dtype(self) -> jnp.dtype:
        """See Pool."""
        return self.down.dtype

    @property
    def arrays(self) -> dict[str, Any]:
        """The pool's arrays by name, without biases that there are not."""
        return {key: leaf for key, leaf in self._asdict().items() if leaf is not None}

    def plain(self) -> "ExpertPool":
        """See Pool."""
        return self

    def kept(self, experts: "ExpertPool") -> "ExpertPool":
        """See Pool."""
        return experts

    def __repr__(self) -> str:
        return display.arrays(self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class QuantizedPool(GroupedPool):
    """Weights in eight bits (float8_e4m3fn), with a float32 scale for each block of 128 x 128, or
    in four, with a scale a group along k.

    In eight bits the experts' width is padded to whole blocks with zeros, which add nothing to a
    row.
    """

    gate_up: QuantizedWeights | PackedWeights  # columns: gate, then up, each padded
    down: QuantizedWeights | PackedWeights
    gate_up_bias: Any = None  # [slots, columns], in the dtype of the rows
    down_bias: Any = None  # [slots, d]
    width: int = field(default=0, metadata={"static": True})  # f, without padding
    row_dtype: str = field(default="bfloat16", metadata={"static": True})

    @classmethod
    def of(
        cls, experts: ExpertPool, row_dtype: str, fmt: str, int4: Int4 | None = None
    ) -> "QuantizedPool":
        """Quantizes experts to `fp8`, `int4` (in groups of 32 with zero points, or as a checkpoint
        has them) or `mxfp4`. Raises ValueError where d_model is not whole blocks of fp8.
        """
        if fmt == "fp8":
            if (d_model := experts.down.shape[-1]) % BLOCK:
                raise ValueError(
                    f"quantize is 'fp8', and d_model is {d_model}: experts in fp8 have blocks of "
                    f"{BLOCK}, of which it must be a multiple; load the model without"
                )
            return cls._made(experts, row_dtype, grouped_gemm.quantize, grouped_gemm.quantize)
        to = partial(four_bits.quantize, scales=jnp.dtype(jnp.bfloat16))
        if fmt == "mxfp4":
            to = partial(four_bits.quantize, scales=jnp.dtype(jnp.uint8))
        elif int4 is not None:
            to = partial(to, group=int4.group, has_zeros=int4.has_zeros)
        return cls._made(experts, row_dtype, to, to)

    @classmethod
    def _made(
        cls, experts: ExpertPool, row_dtype: str, to_gate_up: Callable, to_down: Callable
    ) -> "QuantizedPool":
        width = experts.down.shape[1]
        padding = -width % BLOCK if to_down is grouped_gemm.quantize else 0
        bias = experts.gate_up_bias
        return cls(
            to_gate_up(_padded(experts.gate_up, width, padding)),
            to_down(jnp.pad(experts.down, ((0, 0), (0, padding), (0, 0)))),
            None if bias is None else _padded(bias, width, padding).astype(row_dtype),
            None if experts.down_bias is None else experts.down_bias.astype(row_dtype),
            width,
            row_dtype,
        )

    @property
    def dtype(self) -> jnp.dtype:
        """See Pool."""
        return jnp.dtype(self.row_dtype)

    @property
    def format(self) -> str:
        """See Pool."""
        if isinstance(self.down, QuantizedWeights):
            return "fp8"
        return "mxfp4" if self.down.is_mxfp4 else "int4"

    def plain(self) -> ExpertPool:
        """See Pool."""
        gate_up, down = (dequantize(w, self.dtype) for w in (self.gate_up, self.down))
        bias = self.gate_up_bias
        return ExpertPool(
            _unpadded(gate_up, self.width, down.shape[1]),
            down[:, : self.width],
            None if bias is None else _unpadded(bias, self.width, down.shape[1]),
            self.down_bias,
        )

    def kept(self, experts: ExpertPool) -> "QuantizedPool":
        """See Pool."""
        to = (getattr(w, "of", grouped_gemm.quantize) for w in (self.gate_up, self.down))
        return self._made(experts, self.row_dtype, *to)

    def __repr__(self) -> str:
        parts = (
            f"{name}: {display.array(getattr(self, name).values)}" for name in ("gate_up", "down")
        )
        return f"QuantizedPool({self.format}, {', '.join(parts)})"


def _padded(columns: Float[Array, "*n f2"], width: int, padding: int) -> Float[Array, "*n F2"]:
    """Pads gate and up, or the one part that there is, with zeros."""
    parts = jnp.split(columns, columns.shape[-1] // width, axis=-1)
    axes = [(0, 0)] * (columns.ndim - 1) + [(0, padding)]
    return jnp.concatenate([jnp.pad(part, axes) for part in parts], axis=-1)


def _unpadded(columns: Float[Array, "*n F2"], width: int, padded: int) -> Float[Array, "*n f2"]:
    parts = jnp.split(columns, columns.shape[-1] // padded, axis=-1)
    return jnp.concatenate([part[..., :width] for part in parts], axis=-1)


class ExpertTable(NamedTuple):
    """Where logical experts live. Logical ids: m routed experts, then U united ones.

    With `hosts` they are spread over D devices. `slots` is [D, layers, E] then: of each device's
    own pool, -1 where it does not have the expert. Inside `jax.shard_map` a device sees its own.
    """

    slots: Int[Array, "layers E"]  # pool slot of (MoE layer, logical expert); E = m + U
    groups: Int[Array, "layers m"]  # united expert of each routed one; -1: none is loaded
    hosts: Bool[Array, "layers E D"] | None = None  # which devices have the expert
    offloaded: Int[Array, "layers m"] | None = None
    """Where some routed experts lie in host memory: 0 for one that is on the device for good,
    `FETCHED` for one that is there now, `ABSENT` for one whose slot is its substitute's.
    """
    levels: Int[Array, "layers codes percents"] | None = None
    """Thresholds by strategy code and level (`jmoe.levels`); None: the level itself. Those of one
    step are [layers, 1] (`at_level`).
    """

    def at_level(self, strategy: Int[Array, ""], level: Int[Array, ""]) -> "ExpertTable":
        """Returns the table with the thresholds of one step, where it has levels."""
        if self.levels is None:
            return self
        return self._replace(levels=self.levels[:, strategy, level][:, None])

    def __repr__(self) -> str:
        return display.arrays(self)


@dataclass(frozen=True, repr=False)
class UnitedExperts:
    """United experts of one way, in host memory: L MoE layers of U experts each."""

    way: int
    gate_up: np.ndarray  # [L, U, d, 2 f]
    down: np.ndarray  # [L, U, f, d]
    groups: np.ndarray  # int32 [L, m]
    gate_up_bias: np.ndarray | None = None  # [L, U, 2 f]
    down_bias: np.ndarray | None = None  # [L, U, d]

    def __post_init__(self) -> None:
        """Raises ValueError where groups name a united expert that is not there."""
        if self.groups.min() < 0 or self.groups.max() >= self.gate_up.shape[1]:
            raise ValueError(
                f"groups of way {self.way} name united experts {self.groups.min()} to "
                f"{self.groups.max()}, but there are {self.gate_up.shape[1]}"
            )

    def __repr__(self) -> str:
        layers, count = self.gate_up.shape[:2]
        parts = f"gate_up: {display.array(self.gate_up)}, down: {display.array(self.down)}"
        return f"UnitedExperts(way {self.way}, {layers} MoE layers of {count}, {parts})"

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in host memory."""
        return sum(leaf.nbytes for leaf in self.experts.arrays.values())

    @property
    def experts(self) -> ExpertPool:
        """All of them, in host memory: arrays begin with layers."""
        return ExpertPool._make((self.gate_up, self.down, self.gate_up_bias, self.down_bias))

    def layer(self, layer: int) -> ExpertPool:
        """Returns the united experts of one MoE layer, in host memory."""
        return jax.tree.map(lambda leaf: leaf[layer], self.experts)


def groups_by_index(num_experts: int, way: int) -> np.ndarray:
    """Returns int32 [m]: consecutive experts, `way` a group; the last may be short. Raises
    ValueError.
    """
    way = integer("way", way)
    if not 2 <= way <= num_experts:
        raise ValueError(
            f"way is {way}; it must be between 2 and the {num_experts} experts there are"
        )
    return np.arange(num_experts, dtype=np.int32) // way


def make_table(num_layers: int, num_experts: int, num_united_slots: int) -> ExpertTable:
    """Returns the table of a pool that holds each layer's routed experts first, then its united
    ones.

    Layer l owns slots `[l * E, (l + 1) * E)` with E = num_experts + num_united_slots.
    """
    logical = num_experts + num_united_slots
    slots = np.arange(num_layers * logical, dtype=np.int32).reshape(num_layers, logical)
    groups = np.full((num_layers, num_experts), -1, np.int32)
    return ExpertTable(jnp.asarray(slots), jnp.asarray(groups))


def uncut(row: Any, table: Any, layer: int) -> Any:
    """Returns `row`, cut out of the tables of `table`, but for slots, groups and levels: the
    routing kernel reads them in the table, and cut out they would be a launch in every layer.
    """
    at = np.int32(layer)
    row = row._replace(slots=TableRow(table.slots, at), groups=TableRow(table.groups, at))
    levels = getattr(table, "levels", None)  # a mixed step's table has none
    return row if levels is None else row._replace(levels=TableRow(levels, at))


@partial(jax.jit, donate_argnums=0)
def write_slots(pool: Pool, slots: Int[Array, "n"], experts: Pool) -> Pool:
    """Overwrites `slots` in place. The pool passed in is gone afterwards (donated)."""
    return pool.with_experts(slots, experts)


@jax.jit
def set_groups(
    groups: Int[Array, "layers m"], layer: Int[Array, ""], row: Int[Array, "m"]
) -> Int[Array, "layers m"]:
    """Replaces one layer's groups."""
    return groups.at[layer].set(row)


def load_layer(
    pool: Pool,
    table: ExpertTable,
    united: UnitedExperts,
    layer: int,
    write: Callable[[Pool, int, ExpertPool, int], Pool] | None = None,
) -> tuple[Pool, ExpertTable]:
    """Puts one layer's united experts into its united slots and points its groups at them.

    Both happen between two programs, so none sees new weights behind old groups. `write` is
    `jmoe.parallel.home.Home.write` where the pool is spread. Raises ValueError where it has too few
    slots.
    """
    experts, first = united.layer(layer), table.groups.shape[1]
    count, room = experts.num_slots, table.slots.shape[-1] - first
    if count > room:
        raise ValueError(
            f"way {united.way} has {count} united experts a layer, but the pool has {room} slots "
            "for them; load the model with that way among its ways"
        )
    if write is not None:
        pool = write(pool, layer, experts, first)
    else:
        slots = np.asarray(table.slots)[layer, first : first + count]
        experts = jax.tree.map(lambda leaf: jnp.asarray(leaf, pool.dtype), experts)
        pool = write_slots(pool, jnp.asarray(slots), experts)
    row = jnp.asarray(united.groups[layer], jnp.int32)
    return pool, table._replace(groups=set_groups(table.groups, jnp.int32(layer), row))


def num_united_slots(ways: Mapping[int, UnitedExperts]) -> int:
    """Returns the slots a layer needs so that any one of the ways fits."""
    return max((united.gate_up.shape[1] for united in ways.values()), default=0)
