"""What a stage of half a layer takes on a device, and how many sequences its memory holds.

By a roofline: products and memory traffic overlap perfectly, whichever takes longer decides, and a
fixed time a stage is added. It flatters every system alike. Or as measured, from a file. Arithmetic
on the host; the simulator of `benchmarks.mesh` and the cost model of
`jmoe.parallel.asynchronous` both use it.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jmoe.config import ModelConfig
from jmoe.parallel.cost import Machine


@dataclass(frozen=True)
class Geometry:
    """The sizes of an architecture that decide times: counts of elements."""

    name: str
    num_layers: int  # that have experts
    num_experts: int
    top_k: int
    d_model: int
    attention_weights: int  # of a layer: q, k, v, output projection, router, shared expert, dense
    expert_weights: int
    kv_elements: int  # a token and layer
    head_elements: int  # of a query row, all heads: products with keys and values
    vocab_size: int
    element_bytes: int = 2  # of weights, rows, keys and values

    @classmethod
    def of(cls, name: str, cfg: ModelConfig, element_bytes: int = 2) -> "Geometry":
        """Describes a model. Dense layers belong to the attention stages, in equal parts."""
        d, stages, matrices = cfg.d_model, cfg.num_moe_layers, cfg.up_matrices + 1
        heads = (2 * cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim
        moe = d * cfg.num_experts + matrices * d * cfg.d_ff_shared
        dense = cfg.num_dense_layers * matrices * d * cfg.d_ff_dense
        return cls(
            name,
            stages,
            cfg.num_experts,
            cfg.experts_per_token,
            d,
            moe + (cfg.num_layers * d * heads + dense) // stages,
            matrices * d * cfg.d_ff_expert,
            cfg.num_layers * 2 * cfg.num_kv_heads * cfg.head_dim // stages,
            cfg.num_layers * cfg.num_heads * cfg.head_dim // stages,
            cfg.vocab_size,
            element_bytes,
        )

    def with_experts(self, num_experts: int, top_k: int | None = None) -> "Geometry":
        """Returns the same with another number of experts, or of experts a token."""
        return replace(self, num_experts=num_experts, top_k=top_k or self.top_k)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row between devices."""
        return self.d_model * self.element_bytes


class StageTimes(NamedTuple):
    """Seconds of stages, without the host. Experts take fixed_s + max(products_s, reads_s)."""

    first_s: Float[np.ndarray, "rows"]
    """By rows: attention of layer 0, with head, sampling and embedding of the token before it."""
    attention_s: Float[np.ndarray, "rows"]  # by rows: of any other layer
    products_s: Float[np.ndarray, "visits"]  # by visits
    reads_s: Float[np.ndarray, "experts"]  # by experts that have visits
    fixed_s: float

    def experts_s(self, visits: np.ndarray, active: np.ndarray) -> np.ndarray:
        """Returns the seconds of any number of visits and of experts, whole numbers or between
        them; 0 without any.
        """
        products = np.interp(visits, np.arange(len(self.products_s)), self.products_s)
        reads = np.interp(active, np.arange(len(self.reads_s)), self.reads_s)
        return np.where(visits > 0, self.fixed_s + np.maximum(products, reads), 0.0)


def roofline(device: Machine, geometry: Geometry, max_rows: int, context: float) -> StageTimes:
    """Returns the times of up to `max_rows` rows with `context` tokens of KV each."""
    rows = np.arange(max_rows + 1)
    flops, memory, size = device.flops_per_s, device.memory_bytes_per_s, geometry.element_bytes

    def stage_s(weights: int, row_flops: float, row_bytes: float) -> np.ndarray:
        products = rows * (2 * weights + row_flops) / flops
        return np.maximum(products, (weights * size + rows * row_bytes) / memory)

    kv_flops = 4 * geometry.head_elements * context
    kv_bytes = geometry.kv_elements * size * context
    attention = device.fixed_s + stage_s(geometry.attention_weights, kv_flops, kv_bytes)
    head = stage_s(geometry.vocab_size * geometry.d_model, 0.0, 0.0)
    visits = np.arange(max_rows * geometry.top_k + 1)
    experts = np.arange(geometry.num_experts + 1)
    return StageTimes(
        attention + head,
        attention,
        visits * 2 * geometry.expert_weights / flops,
        experts * geometry.expert_weights * size / memory,
        device.fixed_s,
    )


def measured(path: Path, geometry: Geometry, max_rows: int) -> StageTimes:
    """Returns the times of a JSON file, between its points by straight lines, beyond the last by
    its slope.

    The file has `attention` and `first`, each `{"rows": [...], "seconds": [...]}`, `experts` with
    `visits`, and `reads` with `experts`, the seconds of few visits to so many experts; `fixed_s`
    is contained in all. Raises ValueError for a file that lacks one of them.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        fixed_s = float(found["fixed_s"])
        rows, visits = np.arange(max_rows + 1), np.arange(max_rows * geometry.top_k + 1)
        experts = np.arange(geometry.num_experts + 1)
        return StageTimes(
            _lines(found["first"], "rows", rows),
            _lines(found["attention"], "rows", rows),
            np.maximum(_lines(found["experts"], "visits", visits) - fixed_s, 0.0),
            np.maximum(_lines(found["reads"], "experts", experts) - fixed_s, 0.0),
            fixed_s,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has no stage times: {type(error).__name__}: {error}") from None


def _lines(points: dict[str, Any], key: str, at: np.ndarray) -> np.ndarray:
    x, y = np.array(points[key], float), np.array(points["seconds"], float)
    if len(x) < 2 or len(x) != len(y) or (np.diff(x) <= 0).any():
        raise ValueError(f"{key} and seconds must be two or more points, in order")
    if not (np.isfinite(y).all() and y.min() > 0):
        raise ValueError(f"seconds by {key} must be above 0")
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return np.where(at > x[-1], y[-1] + (at - x[-1]) * slope, np.interp(at, x, y))


def sequences_that_fit(
    device: Machine, geometry: Geometry, context: float, attention_devices: int, expert_devices: int
) -> int:
    """Returns how many sequences' KV fits beside the weights; no `expert_devices`: all devices hold
    both.
    """
    g, size = geometry, geometry.element_bytes
    attention = g.num_layers * g.attention_weights + 2 * g.vocab_size * g.d_model
    room = attention_devices * (device.memory_bytes - size * attention)
    experts = size * g.num_layers * g.num_experts * g.expert_weights
    if expert_devices:
        room *= experts <= expert_devices * device.memory_bytes
    else:
        room -= experts
    return max(0, int(room / (g.num_layers * g.kv_elements * size * context)))
