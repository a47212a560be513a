"""What a distillation holds in memory and on disk, in bytes, from the model's geometry alone.

Arrays that a run keeps are counted exactly (tests compare them with those of a run). What a
compiler adds while a step runs is a range: from what must be there to a little more than compiled
steps take (tests/training/test_distill_h200.py).
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jmoe.config import ModelConfig
from jmoe.layout import expert_parameters
from jmoe.random_model import random_params
from training.distill.config import DistillConfig

SAVE_EVERY = 100
"""End-to-end steps between two states on disk."""

CAPTURE_ROWS = 16
"""Packed rows that go through a layer at a time."""

_MASTER, _MOMENTS = 4, 8  # bytes a parameter: float32, and Adam's two in float32
_COMPRESSED = 0.85  # of the size of arrays on disk, at least: Orbax compresses


@dataclasses.dataclass(frozen=True)
class Span:
    """From the least to the most, in bytes."""

    low: float
    high: float

    def __add__(self, other: "Span | float") -> "Span":
        other = other if isinstance(other, Span) else Span(other, other)
        return Span(self.low + other.low, self.high + other.high)

    def __mul__(self, times: float) -> "Span":
        return Span(self.low * times, self.high * times)


def united_a_layer(cfg: ModelConfig, way: int) -> int:
    """Returns the number of united experts of one MoE layer."""
    return -(-cfg.num_experts // way)


def layer_parameters(cfg: ModelConfig, way: int) -> int:
    """Returns the parameters of one layer's united experts."""
    return united_a_layer(cfg, way) * expert_parameters(cfg)


def united_parameters(cfg: ModelConfig, way: int) -> int:
    """Returns the parameters of all layers' united experts."""
    return cfg.num_moe_layers * layer_parameters(cfg, way)


def united_file_bytes(cfg: ModelConfig, ways: Sequence[int]) -> int:
    """Returns the bytes of `united.safetensors` without its header: bfloat16 weights and int32
    groups.
    """
    groups = 4 * cfg.num_moe_layers * cfg.num_experts
    return sum(2 * united_parameters(cfg, way) + groups for way in ways)


def captured_bytes(cfg: ModelConfig, num_tokens: int, weight_bytes: int) -> int:
    """Returns the bytes of one layer's captured rows: inputs, router choice, gate weights, float32
    outputs.
    """
    visit = 4 + 4 + 4 * cfg.d_model
    return num_tokens * (cfg.d_model * weight_bytes + cfg.experts_per_token * visit)


def stream_bytes(cfg: ModelConfig, num_rows: int, length: int) -> int:
    """Returns the bytes of the residual stream of packed rows, float32."""
    return 4 * num_rows * length * cfg.d_model


def model_parameters(cfg: ModelConfig) -> tuple[int, int]:
    """Returns the parameters outside the routed experts, and those of the routed experts."""
    build = partial(random_params, cfg, dtype=jnp.dtype("bfloat16"))
    shapes = jax.eval_shape(build, jax.eval_shape(lambda: jax.random.key(0)))
    rest = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    return rest, cfg.num_moe_layers * cfg.num_experts * expert_parameters(cfg)


def _buffer_rows(cfg: ModelConfig, tokens: int, way: int) -> int:
    """Returns the rows of all united experts' buffers, for a batch of so many tokens."""
    united, visits = united_a_layer(cfg, way), tokens * cfg.experts_per_token
    return united * min(tokens, max(8, 2 * visits // united))


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one stage takes at its peak, in bytes: on each device, and on the host.

    `parts` says what the devices hold: (what, bytes), the compiler's share left out.
    """

    way: int
    end_to_end: bool
    device: Span
    host: Span
    parts: tuple[tuple[str, float], ...]


def layer_stage(
    cfg: ModelConfig,
    config: DistillConfig,
    way: int,
    num_tokens: int,
    num_rows: int,
    weight_bytes: int,
) -> Stage:
    """Returns what capture and training of one layer take; every device holds all of it."""
    parameters = layer_parameters(cfg, way)
    rows = captured_bytes(cfg, num_tokens, weight_bytes)
    rest, experts = model_parameters(cfg)
    routed = weight_bytes * experts / cfg.num_moe_layers
    layer = 2 * routed  # in the layer, and once more as members
    kept = (_MASTER + _MOMENTS) * parameters
    buffers = _buffer_rows(cfg, config.batch, way) * 2 * weight_bytes
    active = buffers * (cfg.d_model + cfg.up_matrices * cfg.d_ff_expert)
    active += captured_bytes(cfg, config.batch, weight_bytes)
    if config.objective == "equation4":
        width = cfg.up_matrices * cfg.d_ff_expert + 3 * cfg.d_model
        active += 4 * config.batch * width * (cfg.num_experts + united_a_layer(cfg, way))
    other = weight_bytes * rest / cfg.num_layers
    spare = Span(_MASTER * parameters, 1.5 * _MASTER * parameters + active + other)
    stream = stream_bytes(cfg, num_rows, config.length)
    host = stream + rows + routed + 2 * _MASTER * parameters
    return Stage(
        way,
        False,
        spare + (layer + rows + kept),
        Span(host, host + rows + stream),
        (
            ("the layer's routed experts, twice", layer),
            ("captured rows", rows),
            ("united experts and optimizer, float32", kept),
            ("gradients", _MASTER * parameters),
        ),
    )


def end_to_end_stage(
    cfg: ModelConfig, config: DistillConfig, way: int, num_devices: int, weight_bytes: int
) -> Stage:
    """Returns what training all layers' united experts takes; devices share out experts and
    moments.
    """
    parameters = united_parameters(cfg, way)
    rest, experts = model_parameters(cfg)
    model = weight_bytes * (rest + experts / num_devices)
    kept = (_MASTER + _MOMENTS) * parameters / num_devices
    gradients = _MASTER * parameters / num_devices
    tokens = config.refine_rows * config.length / num_devices
    logits = 4 * tokens * cfg.vocab_size
    layer = weight_bytes * experts / cfg.num_moe_layers
    # Compiled for an H200 (docs/distillation.md): logits and a layer's experts beside the
    # gradients; over several devices, several copies of that layer.
    spare = Span(logits + layer, 2 * logits + (3 if num_devices == 1 else 7) * layer)
    loading = weight_bytes * (rest + experts)
    device = spare + (model + kept + gradients)
    stacked = _MASTER * parameters
    saved = (_MASTER + _MOMENTS) * parameters if config.refine_steps > SAVE_EVERY else stacked
    return Stage(
        way,
        True,
        device,
        Span(stacked + max(saved, loading), 2 * stacked + max(2 * saved, loading)),
        (
            ("the model", model),
            ("united experts and optimizer, float32", kept),
            ("gradients", gradients),
        ),
    )


def writing_host(cfg: ModelConfig, ways: Sequence[int]) -> Span:
    """Returns the host memory while `united.safetensors` is written: its tensors, and once more as
    bytes.
    """
    size = united_file_bytes(cfg, ways)
    return Span(2 * size, 3 * size)


def disk(cfg: ModelConfig, config: DistillConfig, ways: Sequence[int], num_rows: int) -> Span:
    """Returns the bytes of `OUT`: finished layers, residual stream, states of the end-to-end stage,
    the file itself.
    """
    found = [united_parameters(cfg, way) for way in ways]
    stream = stream_bytes(cfg, num_rows, config.length)
    file = united_file_bytes(cfg, ways)
    state = (_MASTER + _MOMENTS) * max(found) if config.refine_steps > SAVE_EVERY else 0
    layers = _MASTER * sum(found)
    refined = 2 * sum(found) if config.refine_steps else 0
    kept = Span(_COMPRESSED * (layers + refined), layers + refined)
    # A state is replaced by the next, and the file by the new one, only once that is whole.
    return kept + Span(file + max(_COMPRESSED * state, stream), 2 * file + 2 * state + 2 * stream)
