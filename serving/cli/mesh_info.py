"""`jmoe info MODEL`: what of it fits in one device; with `--mesh ep=N`, what lies and travels
where, and where replicas of experts fit.
"""

import math
from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING

from serving.cli.info import (
    Section,
    expert_parameters,
    kv_bytes_per_token,
    num_parameters,
    quantized_bytes,
)

if TYPE_CHECKING:
    from jmoe.config import ModelConfig

DEVICE_GB = 141.0
"""Memory of an H200, in 1e9 bytes."""
DECODE_BUCKET, PREFILL_BUCKETS = 64, (512, 1024, 2048, 4096)
"""Tokens a device in a step. Replicas are copied in prefill only."""
KV_BUCKET = 2048
"""The largest step that KV pages are to leave room for."""
PER_PAIR = 2
"""Experts from one device to another at most, as the balance benchmark bounds them."""
DTYPE, DTYPE_BYTES = "bfloat16", 2
_REPLICAS = "busy experts that a device copies for one layer of a prefill step"
_MESHES = (2, 4, 8, 16, 32, 64)


def parse_mesh(mesh: str) -> int:
    """Returns the devices of `ep=N`, read as the setting `engine.mesh`; 1 where it is empty.

    Raises SettingsError for what is no mesh.
    """
    from serving.settings import reading as settings

    loaded = settings.load(overrides={"engine.mesh": mesh})
    return settings.mesh_devices(loaded.engine.mesh)


def device_section(cfg: "ModelConfig", device_gb: float = DEVICE_GB) -> Section:
    """Describes what KV cache fits in one device beside a model, in each form that it is served in,
    and over how few devices its experts have to be spread if none does.

    Raises ValueError for an invalid memory size.
    """
    from jmoe.parallel.placement import slots_per_layer

    _check(device_gb)
    rows, whole = [], num_parameters(cfg) * DTYPE_BYTES
    forms = {
        f"all in {DTYPE}": whole,
        **{f"experts in {fmt}": size for fmt, size in quantized_bytes(cfg).items()},
    }
    for form, weights in forms.items():
        rows.append((f"left for KV, {form}", _kv(cfg, 1, _left(cfg, 1, device_gb, weights))))
    if _left(cfg, 1, device_gb, whole) <= 0:
        for n in _MESHES:
            slots = cfg.num_moe_layers * slots_per_layer(cfg.num_experts, n)
            weights = num_parameters(cfg, 0) + slots * expert_parameters(cfg)
            if (left := _left(cfg, n, device_gb, weights * DTYPE_BYTES)) > 0:
                rows.append((f"left for KV, --mesh ep={n}", _kv(cfg, n, left)))
                break
    return f"What fits in a GPU of {device_gb:g} GB, reckoned and not measured", rows


def kv_tokens(cfg: "ModelConfig", device_gb: float, weights: int) -> int:
    """Returns the tokens of KV cache in bfloat16 that fit beside so many bytes of weights in one
    device, or raises ValueError for an invalid memory size.
    """
    _check(device_gb)
    per_token = kv_bytes_per_token(cfg, DTYPE)
    return max(0, _left(cfg, 1, device_gb, weights)) // per_token if per_token else 0


def family_section(
    cfg: "ModelConfig",
    num_models: int,
    routed: int,
    united: int,
    differences: int,
    device_gb: float = DEVICE_GB,
    spread: tuple[int, int] | None = None,
) -> Section:
    """Describes what KV cache fits in one device beside a family: whole, with as much as can be in
    host memory there, and over a mesh. Everything is in bfloat16.

    Args:
        cfg: of each model.
        num_models: of the family.
        routed: slots of its pool for routed experts.
        united: those for united ones.
        differences: weights of all experts' differences from those that serve them.
        device_gb: memory of the device, in 1e9 bytes.
        spread: devices of a mesh, and slots on each.

    Raises ValueError for an invalid memory size.
    """
    from jmoe.display import size

    _check(device_gb)
    others, expert = num_parameters(cfg, 0), expert_parameters(cfg)
    fewest, pool = cfg.num_moe_layers * cfg.num_experts, (routed + united) * expert + differences
    forms = {"": num_models * others + pool, ", engine.resident_sets=1": others + pool}
    if not differences and routed > fewest:
        away = (routed - fewest) * expert
        forms[f", and resident_experts={fewest}"] = others + pool - away
    rows = []
    for form, weights in forms.items():
        left = _left(cfg, 1, device_gb, weights * DTYPE_BYTES)
        said = _kv(cfg, 1, left) if left > 0 else f"nothing: {size(-left)} are missing"
        rows.append((f"left for KV{form}", said))
    if spread is not None:
        devices, slots = spread
        weights = (num_models * others + slots * expert) * DTYPE_BYTES
        left = _left(cfg, devices, device_gb, weights)
        rows.append((f"left for KV on each device, --mesh ep={devices}", _kv(cfg, devices, left)))
        rows.append(_spare(cfg, devices, device_gb, weights, num_models))
    return f"What fits in a GPU of {device_gb:g} GB, reckoned and not measured", rows


def parallel_section(
    cfg: "ModelConfig", num_devices: int, device_gb: float = DEVICE_GB, ways: Collection[int] = ()
) -> Section:
    """Describes memory, exchanges and replicas of a model over a mesh. Everything is in bfloat16.

    Args:
        cfg: the model.
        num_devices: of the mesh.
        device_gb: memory of each, in 1e9 bytes.
        ways: of its united experts; the pool has slots for the way that has most of them.

    Raises ValueError for an invalid memory size.
    """
    from jmoe.display import size
    from jmoe.parallel.placement import slots_per_layer

    _check(device_gb)
    united = -(-cfg.num_experts // min(ways)) if ways else 0
    slots = slots_per_layer(cfg.num_experts + united, num_devices)
    held = f"{slots} of {cfg.num_experts}" + f" and {united} united ones" * bool(united)
    experts = cfg.num_moe_layers * slots * expert_parameters(cfg) * DTYPE_BYTES
    others = num_parameters(cfg, 0) * DTYPE_BYTES
    return (
        f"Expert parallelism, ep={num_devices}, {DTYPE}, reckoned and not measured",
        [
            ("experts a device and layer", held),
            ("experts a device", size(experts)),
            ("other weights a device", size(others)),
            *_room(cfg, num_devices, device_gb, experts + others),
            *_steps(cfg, num_devices),
        ],
    )


def _check(device_gb: float) -> None:
    if not (math.isfinite(device_gb) and device_gb > 0):
        raise ValueError(f"--device-gb is {device_gb}; it must be above 0")


def _beside(cfg: "ModelConfig", num_devices: int) -> tuple[int, int]:
    """Returns the bytes of layers without experts, which CUDA graphs have again, and of the rows of
    the largest step.
    """
    from jmoe.parallel.cost import MeshStep

    embeddings = cfg.vocab_size * cfg.d_model * (1 if cfg.tie_embeddings else 2)
    again = (num_parameters(cfg, 0) - embeddings) * DTYPE_BYTES
    return again, MeshStep(cfg, num_devices, KV_BUCKET, DTYPE_BYTES).gathered_buffer_bytes()


def _left(cfg: "ModelConfig", num_devices: int, device_gb: float, weights: int) -> int:
    """Returns the bytes of each device for KV cache, beside what recurrent layers keep of as many
    sequences as are served by default.
    """
    import jax.numpy as jnp

    from jmoe.attention import sequence_bytes
    from serving.config import EngineConfig
    from serving.execution.fitting import limits_of

    slots = limits_of(EngineConfig(), num_ranks=num_devices).slots_per_rank
    kept = slots * sequence_bytes(cfg, jnp.dtype(DTYPE))
    return int(1e9 * device_gb) - weights - kept - sum(_beside(cfg, num_devices))


def _kv(cfg: "ModelConfig", num_devices: int, left: int) -> str:
    """Says what KV cache so many bytes of each device hold."""
    from jmoe.attention import page_windows
    from jmoe.display import size
    from serving.config import EngineConfig

    if left <= 0:
        rows = _beside(cfg, num_devices)[1]
        advice = "more devices, or larger ones" if left + rows <= 0 else "a smaller step"
        return f"nothing: {size(-left)} are missing; take {advice}"
    if not kv_bytes_per_token(cfg, DTYPE):
        return f"{size(left)}, which no layer needs: they keep the same of sequences of any length"
    page_size = EngineConfig().page_size
    pages = left // (page_size * kv_bytes_per_token(cfg, DTYPE))
    tokens = left // kv_bytes_per_token(cfg, DTYPE)
    kv = f"{size(left)}, {tokens:,} tokens"
    kv += f" in {pages:,} pages of {page_size}"
    if in_fp8 := kv_bytes_per_token(cfg, "fp8"):
        kv += f" ({left // in_fp8:,} with fp8 KV)"
    if num_devices > 1:
        kv += f"; {num_devices * tokens:,} on all devices"
    if any(windows := page_windows(cfg)):
        ends = [0, *(min(w or cfg.max_position, cfg.max_position) for w in reversed(windows))]
        long = sum(
            (end - begin) * kv_bytes_per_token(cfg, DTYPE, begin) for begin, end in pairwise(ends)
        )
        kv += f"; {left // long:,} sequences of {cfg.max_position:,}"
        kv += " on each" * (num_devices > 1)
    return kv


def _room(
    cfg: "ModelConfig", num_devices: int, device_gb: float, weights: int
) -> list[tuple[str, str]]:
    """Describes what a device has left for KV pages beside its weights and the largest step."""
    from jmoe.display import size

    again, rows = _beside(cfg, num_devices)
    left = _left(cfg, num_devices, device_gb, weights)
    return [
        ("layers without experts, again", f"{size(again)}, on a GPU, for CUDA graphs"),
        (f"a step of {KV_BUCKET:,} tokens a device", size(rows)),
        (f"left for KV of {device_gb:g} GB", _kv(cfg, num_devices, left)),
        _spare(cfg, num_devices, device_gb, weights),
    ]


def _spare(
    cfg: "ModelConfig", num_devices: int, device_gb: float, weights: int, num_models: int = 1
) -> tuple[str, str]:
    """Describes how many copies that stay a device has room for, beside so many bytes of weights of
    all models.
    """
    from jmoe.display import size
    from serving.config import EngineConfig
    from serving.execution.memory import COPIES_SHARE, SHARE, STEPS_UNDER_WAY, spare_slots_in

    again, rows = _beside(cfg, num_devices)
    one, config = expert_parameters(cfg) * DTYPE_BYTES, EngineConfig()
    taken = int(1e9 * device_gb * SHARE * config.memory_fraction)
    room = taken - weights - num_models * again - STEPS_UNDER_WAY * rows
    spare = spare_slots_in(room, config, cfg, num_devices, one)
    text = f"{spare}, {size(cfg.num_moe_layers * one)} each"
    text += f", beside KV of {EngineConfig().max_num_seqs} full sequences, or in "
    text += f"{100 * COPIES_SHARE:g} % of its room"
    return "spare slots of auto, at most", text


def _steps(cfg: "ModelConfig", num_devices: int) -> list[tuple[str, str]]:
    """Describes, by bucket, what a device sends in a step, and how many replicas' copies are
    hidden.
    """
    from jmoe.display import seconds, size
    from jmoe.parallel.cost import MeshStep, expert_bytes

    sent, replicas = [], [("replicas", "engine.balance.replicas: " + _REPLICAS)]
    for tokens in (DECODE_BUCKET, *PREFILL_BUCKETS):
        step = MeshStep(cfg, num_devices, tokens, DTYPE_BYTES)
        there, home = map(size, step.exchange_bytes())
        if not isinstance(way := step.exchange(), str):
            text = f"{there} and {home} back, to the devices alone that need a row"
            text += f", inside nodes of {way.node}" if way.node else ""
            text += f": takes {seconds(step.saved())} a layer less than to all"
        else:
            text = f"{there} by all-gather, {home} by reduce-scatter"
            if way == "halves":
                text += f"; in halves, which takes {seconds(step.saved())} a layer less"
        sent.append((f"sent at {tokens:,} tokens a device", text))
    for tokens in PREFILL_BUCKETS:
        step = MeshStep(cfg, num_devices, tokens, DTYPE_BYTES)
        fit = step.replicas_that_fit(PER_PAIR)
        room = 2 * fit.num_replicas * expert_bytes(cfg, DTYPE_BYTES)
        takes = f" ({size(room)} of memory)" if room else ""
        text = f"{fit.num_replicas}{takes}: {fit.reason}"
        gaining, least = step.replicas_that_gain(PER_PAIR)
        if math.isfinite(least):
            which = "they pay" if fit.num_replicas else f"even so, {gaining.num_replicas} pay"
            text += f"; {which} once the busiest device has {least:.2f} times the mean load"
            best, least = step.best_replicas(PER_PAIR)
            if fit.num_replicas and best.per_pair != fit.per_pair:
                text += f"; auto makes {best.num_replicas}, which pay from {least:.2f} times"
        replicas.append((f"replicas at {tokens:,} tokens a device", text))
    return sent + replicas
