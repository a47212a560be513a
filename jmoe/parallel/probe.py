"""A linear guess of the next router's logits, fitted offline: what Libra's own predictor lacks.

Libra takes the next layer's router on this layer's rows as they are. A probe is a matrix of the
same size that was fitted to what that router says of the rows it gets (`training.lookahead`); it
costs what a router costs. Probes of a model lie beside it, in `lookahead.safetensors`.

Letters: T rows, d model width, m routed experts, L MoE layers.
"""

from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jmoe.checkpoint import save_tensors
from jmoe.config import ModelConfig
from jmoe.model_files import regular

PROBE_FILE = "lookahead.safetensors"
TINY = 1e-9


class Probe(NamedTuple):
    """A probe of one layer; or stacked, of all MoE layers but the last."""

    weight: Float[Array, "d m"]  # float32
    bias: Float[Array, "m"]  # float32

    def logits(self, x: Float[Array, "T d"]) -> Float[Array, "T m"]:
        """Returns the logits of rows `x`, float32."""
        return normed(x) @ self.weight + self.bias[None, :]


class Sums(NamedTuple):
    """Sums that least squares needs over the rows seen so far, in float32."""

    count: Float[Array, ""]
    x: Float[Array, "d"]
    y: Float[Array, "m"]
    xx: Float[Array, "d d"]
    xy: Float[Array, "d m"]

    @classmethod
    def of(
        cls, x: Float[Array, "T d"], logits: Float[Array, "T m"], real: Float[Array, "T"]
    ) -> "Sums":
        """Sums rows that enter a layer's MoE block, normed, and the logits of the next one's router
        for them; `real` is 1 for rows that count and 0 for others.
        """
        rows, y = normed(x) * real[:, None], logits.astype(jnp.float32) * real[:, None]
        return cls(jnp.sum(real), jnp.sum(rows, 0), jnp.sum(y, 0), rows.T @ rows, rows.T @ y)

    def fit(self, ridge: float) -> Probe:
        """Returns the probe with least squared error, by ridge regression (solved in one step).
        The penalty `ridge` is a part of the mean square of the normed rows, which is 1.
        """
        mean_x, mean_y = self.x / self.count, self.y / self.count
        gram = self.xx / self.count - jnp.outer(mean_x, mean_x)
        gram = gram + ridge * jnp.eye(gram.shape[0], dtype=jnp.float32)
        weight = jnp.linalg.solve(gram, self.xy / self.count - jnp.outer(mean_x, mean_y))
        return Probe(weight, mean_y - mean_x @ weight)


def normed(x: Float[Array, "T d"]) -> Float[Array, "T d"]:
    """Returns the rows scaled to mean square 1, float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + TINY)


def save_probes(directory: Path, probes: Probe) -> None:
    """Writes stacked probes beside a model."""
    tensors = {name: np.asarray(part, np.float32) for name, part in probes._asdict().items()}
    save_tensors(directory / PROBE_FILE, tensors)


def load_probes(directory: Path, cfg: ModelConfig) -> Probe | None:
    """Returns the stacked probes that lie beside a model; None where there are none.

    Raises ValueError for a file that is none, or is another model's.
    """
    path = directory / PROBE_FILE
    if not path.exists():
        return None
    try:
        found = load_file(regular(path))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not readable: {error}") from None
    layers, m = cfg.num_moe_layers - 1, cfg.num_experts
    shapes = {"weight": (layers, cfg.d_model, m), "bias": (layers, m)}
    have = {name: tensor.shape for name, tensor in found.items()}
    if have != shapes:
        raise ValueError(f"{path} holds {have}; probes of this model are {shapes}")
    if not all(np.isfinite(tensor).all() for tensor in found.values()):
        raise ValueError(f"{path} has weights that are not finite")
    return Probe(*(jnp.asarray(found[name], jnp.float32) for name in Probe._fields))
