"""Rotary position embedding (arXiv 2104.09864), halves rotated as in Hugging Face checkpoints."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `kind` is `default`, `dynamic`, `linear`, `llama3`, `yarn`,
    `longrope`, or `none`: heads do not turn.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0  # dynamic: alpha
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # scales cos and sin
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    short_factor: tuple[float, ...] = ()  # longrope: what each frequency is divided by
    partial: float = 1.0  # of a head's elements, the first ones turn
    query_scaling: float = 0.0
    """Beta of Llama 4's scaling: queries grow by `1 + beta log(1 + n)`, n being how often
    `original_max_position` fits into their position. Of latent attention only.
    """

    def turned(self, head_dim: int) -> int:
        """Returns how many elements of a head turn."""
        return int(head_dim * self.partial)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns float32 [half of what turns]: radians a position, scaled as the rope kind says."""
    head_dim = rope.turned(head_dim)
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    theta = rope.theta
    if rope.kind == "dynamic":
        theta *= rope.factor ** (head_dim / (head_dim - 2))
    freq = 1.0 / (theta**exponent)
    if rope.kind == "none":
        freq = np.zeros_like(freq)
    if rope.kind == "linear":
        freq = freq / rope.factor
    elif rope.kind == "llama3":
        freq = _llama3(rope, freq)
    elif rope.kind == "longrope":
        freq = freq / np.asarray(rope.short_factor, np.float32)
    elif rope.kind == "yarn":
        freq = _yarn(rope, freq, head_dim)
    return freq.astype(np.float32)


def _llama3(rope: RopeConfig, freq: np.ndarray) -> np.ndarray:
    """Divides long wavelengths by the factor, keeps short ones, and blends the band between."""
    wavelength = 2 * math.pi / freq
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * freq / rope.factor + blend * freq
    scaled = np.where(wavelength > longest, freq / rope.factor, freq)
    return np.where((wavelength <= longest) & (wavelength >= shortest), blended, scaled)


def _yarn(rope: RopeConfig, freq: np.ndarray, head_dim: int) -> np.ndarray:
    """Scales by YaRN (arXiv 2309.00071): interpolates slow dimensions, keeps fast ones, a ramp
    between.
    """

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return freq / rope.factor * ramp + freq * (1 - ramp)


class Rotation(NamedTuple):
    """What positions do to a step's rows, float32; the same in every layer. A pytree."""

    cos: Float[Array, "T half"]  # of each row's angles
    sin: Float[Array, "T half"]
    query_scale: Float[Array, "T"] | None = None  # what all elements of queries are multiplied by


def rotation(positions: Int[Array, "T"], rope: RopeConfig, head_dim: int) -> Rotation:
    """Returns what heads at these positions (from 0 on) turn by, and what their queries are
    multiplied by, where `rope` scales them (transformers' `get_llama_4_attn_scale`).
    """
    freq = jnp.asarray(inverse_frequencies(rope, head_dim))
    angle = positions.astype(jnp.float32)[:, None] * freq[None, :]
    cos, sin = (turn(angle) * rope.attention_factor for turn in (jnp.cos, jnp.sin))
    if not rope.query_scaling:
        return Rotation(cos, sin)
    fits = (positions // rope.original_max_position).astype(jnp.float32)
    return Rotation(cos, sin, 1 + rope.query_scaling * jnp.log1p(fits))
