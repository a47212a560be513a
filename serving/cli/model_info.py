"""`jmoe info MODEL`: what a model, or a family of them, needs in memory, and what of it fits in one
device; with `--mesh ep=N`, what lies and travels where, and where replicas of experts fit.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from safetensors import SafetensorError, safe_open

from jmoe import attention, layout
from jmoe.attention import Latent, Paged, page_windows, sequence_bytes
from jmoe.checkpoint import UNITED_FILE, CheckpointError, empty_pool, is_native, native_stored
from jmoe.config import ModelConfig, from_hf
from jmoe.display import count, seconds, size
from jmoe.family import check_family, table_slots
from jmoe.model_files import regular
from jmoe.parallel.cost import MeshStep, expert_bytes
from jmoe.parallel.placement import of_tables, slots_per_layer
from jmoe.recurrent import Recurrent
from jmoe.router import fused
from jmoe.sharing import read_sharing
from pallas_kernels.paged_attention import mosaic
from serving.cli.info import Section
from serving.config import EngineConfig
from serving.execution.fitting import limits_of
from serving.execution.memory import COPIES_SHARE, SHARE, STEPS_UNDER_WAY, spare_slots_in
from serving.settings import reading as settings

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
WAYS = (2, 4, 8, 16)
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


# -- sizes ---------------------------------------------------------------------------------------


def load_model_config(name: str | Path) -> ModelConfig:
    """Reads a geometry from a YAML file with the keys of `config.json`, or a preset in
    `configs/models`.

    Raises SettingsError for a file that cannot be read, ConfigError for what it says.
    """
    return from_hf(settings.read_yaml(settings.find("models", name)))


def num_parameters(cfg: ModelConfig, experts_a_layer: int | None = None) -> int:
    """Returns the weights of a model with all its experts, or with so many a MoE layer (K: active
    ones).
    """
    experts = cfg.num_experts if experts_a_layer is None else experts_a_layer
    parts = [layout.top(cfg), *(layout.layer(cfg, *of) for of in enumerate(cfg.moe_layers))]
    others = sum(math.prod(one.shape) for part in parts for one in part.values())
    return others + cfg.num_moe_layers * experts * layout.expert_parameters(cfg)


def kv_bytes_per_token(cfg: ModelConfig, dtype: str, past: int = 0) -> int:
    """Returns the bytes of what layers keep of one position; of one behind `past` others, those of
    layers without a window that ends before. `fp8`: keys and values in eight bits, 0 where none are
    kept.
    """
    if dtype == "fp8":
        try:
            cfg, dtype = attention.with_kv_cache_dtype(cfg, dtype), "bfloat16"
        except ValueError:
            return 0
    groups = zip(page_windows(cfg), attention.page_bytes(cfg, 1, jnp.dtype(dtype)), strict=True)
    return sum(size for window, size in groups if not window or window > past)


def has_attention_kernel(cfg: ModelConfig) -> bool:
    """Returns whether a kernel attends in all layers of decode steps that have keys and values on a
    Hopper GPU, in bfloat16 and pages of 64 tokens.
    """

    def taken(kind: Any) -> bool:
        if not isinstance(kind, Paged):
            return False
        latents = isinstance(kind, Latent)
        heads, width = (1, kind.width) if latents else (cfg.num_kv_heads, cfg.head_dim)
        q = jax.ShapeDtypeStruct((1, cfg.num_heads, width), jnp.bfloat16)
        pages = jax.ShapeDtypeStruct((1, 1, heads, 64, width), jnp.bfloat16)
        return mosaic.supports(q, pages, None if latents else pages, kind.latent)

    return all(taken(kind) for kind in cfg.attention_kinds if not isinstance(kind, Recurrent))


def attention_on_hopper(cfg: ModelConfig) -> str:
    """Returns what runs attention on a Hopper GPU, in words."""
    form = "a kernel" if has_attention_kernel(cfg) else "XLA"
    return form + "; recurrent layers XLA" * attention.is_recurrent(cfg)


def quantized_bytes(cfg: ModelConfig) -> dict[str, int]:
    """Returns the bytes of a model with experts in each format that `--quantize` knows and that the
    model can have, and the rest in bfloat16.
    """
    count, found = cfg.num_moe_layers * cfg.num_experts, {}
    rest = (num_parameters(cfg) - count * layout.expert_parameters(cfg)) * BYTES["bfloat16"]
    for fmt in ("fp8", "int4", "mxfp4"):
        make = partial(empty_pool, cfg, 1, jnp.dtype("bfloat16"), fmt)
        try:
            pool = jax.eval_shape(make)
        except ValueError:
            continue
        expert = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
        found[fmt] = count * expert + rest
    return found


def united_bytes(directory: Path) -> Mapping[int, int]:
    """Returns the bytes of the united experts in a directory by way, as its file's header says.

    Raises CheckpointError for a file that is not one of united experts.
    """
    path, ways = directory / UNITED_FILE, dict[int, int]()
    if not path.exists():
        return ways
    try:
        with safe_open(regular(path), framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                way = int(name.partition(".")[0].removeprefix("way"))
                tensor = file.get_slice(name)
                bits = int(tensor.get_dtype().lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
                ways[way] = ways.get(way, 0) + math.prod(tensor.get_shape()) * bits // 8
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable: {error}") from None
    return dict(sorted(ways.items()))


# -- in words ------------------------------------------------------------------------------------


def describe(
    cfg: ModelConfig, directory: Path | None, mesh: str | None, device_gb: float
) -> list[Section]:
    """Describes what a model needs, in one device or over a mesh, and which united experts its
    directory has.
    """
    total, active = num_parameters(cfg), num_parameters(cfg, cfg.experts_per_token)
    rows = [
        *_geometry(cfg),
        ("parameters", f"{count(total)}, {count(active)} active a token"),
        *_memory(cfg, total),
    ]
    for fmt, whole in quantized_bytes(cfg).items():
        rows.append((f"weights in bfloat16, experts in {fmt}", size(whole)))
    if directory is not None and is_native(directory):
        dtype, slots = native_stored(directory)
        room = f"room for {slots} united experts a layer"
        rows.append(("stored in jmoe's own format", f"{dtype}, not quantized, {room}"))
    there = {} if directory is None else united_bytes(directory)
    others = [way for way in WAYS if way <= cfg.num_experts and way not in there]
    lacking = [
        (f"way {way}", f"{_a_layer(cfg, way)}, {size(_united_bytes_of(cfg, way))} in bfloat16")
        for way in others
    ]
    sections: list[Section] = [("", rows)]
    if directory is not None:
        sections.append(("United experts that are there", _on_disk(cfg, there)))
    further = "What each further way would take" if there else "What united experts would take"
    if lacking:
        sections.append((further, lacking))
    if mesh:
        sections.append(parallel_section(cfg, parse_mesh(mesh), device_gb, tuple(there)))
    else:
        sections.append(device_section(cfg, device_gb))
    return sections


def facts(cfg: ModelConfig, directory: Path | None, device_gb: float) -> dict[str, Any]:
    """Returns what `describe` says of a model in one device, as numbers; names are those of
    ModelInfo where it has them.
    """
    total, rest = num_parameters(cfg), "bfloat16, experts in "
    weights = {dtype: total * taken for dtype, taken in BYTES.items()}
    weights |= {rest + fmt: whole for fmt, whole in quantized_bytes(cfg).items()}
    stored = {} if directory is None else united_bytes(directory)
    return {
        "architecture": cfg.architecture,
        "num_layers": cfg.num_layers,
        "num_moe_layers": cfg.num_moe_layers,
        "num_experts": cfg.num_experts,
        "experts_per_token": cfg.experts_per_token,
        "max_position": cfg.max_position,
        "num_parameters": total,
        "num_active_parameters": num_parameters(cfg, cfg.experts_per_token),
        "has_attention_kernel": has_attention_kernel(cfg),
        "weight_bytes": weights,
        "kv_bytes_per_token": {
            dtype: kept for dtype in (*BYTES, "fp8") if (kept := kv_bytes_per_token(cfg, dtype))
        },
        "united_bytes_on_disk": {f"way{way}": taken for way, taken in stored.items()},
        "united_bytes": {
            f"way{way}": _united_bytes_of(cfg, way) for way in WAYS if way <= cfg.num_experts
        },
        "device_gb": device_gb,
        "kv_tokens": {
            form: kv_tokens(cfg, device_gb, whole)
            for form, whole in weights.items()
            if form.startswith("bfloat16")
        },
    }


def describe_family(
    directories: Mapping[str, str],
    path: Path,
    mesh: str | None,
    device_gb: float,
    allowed: Sequence[str],
    revision: str,
) -> list[Section]:
    """Describes what a family needs in one device, or in each of a mesh, and whose experts its
    models use.
    """
    found, cfgs, _ = check_family(directories, allowed, revision)
    cfg = next(iter(cfgs.values()))
    sharing = read_sharing(path, found, (cfg.num_moe_layers, cfg.num_experts))
    num_models, expert, others = len(found), layout.expert_parameters(cfg), num_parameters(cfg, 0)
    lenders = {name: sharing.names[at] for name, at in zip(found, sharing.lenders, strict=True)}
    stored = [united_bytes(found[name]) for name in dict.fromkeys(lenders.values())]
    ways = [way for way in stored[0] if all(way in each for each in stored)]
    if sharing.united_ways:
        ways = [way for way in ways if way in sharing.united_ways]
    united = -(-cfg.num_experts // min(ways)) if ways else 0
    slots = sharing.num_slots + len(stored) * cfg.num_moe_layers * united
    of_one = sharing.residual_rank * sum(map(sum, layout.expert_shapes(cfg).values()))
    differences = of_one * int(sharing.differs.sum())
    own = num_models * cfg.num_moe_layers * cfg.num_experts
    rows = [
        ("models", ", ".join(found)),
        *_geometry(cfg),
        ("routed experts", f"{sharing.num_slots:,} slots for {own:,} of all models"),
        ("shared", f"{sharing.shared_percent:.1f} % of what could be"),
        (
            "slots of united experts",
            f"{slots - sharing.num_slots:,}, {united} a layer of each model that has its own",
        ),
        *((f"united experts of {n}", f"those of {at}") for n, at in lenders.items() if n != at),
        ("pool in bfloat16", size(2 * slots * expert)),
        (
            "other weights of each model",
            f"{size(2 * others)} in bfloat16; what two have alike once",
        ),
        *_memory(cfg, slots * expert + num_models * others + differences),
    ]
    if differences:
        words = f"{size(2 * differences)} of all models, rank {sharing.residual_rank}"
        rows.append(("differences from shared experts", words))
    taken = {way: sum(each[way] for each in stored) for way in ways}
    pool = sharing.num_slots, slots - sharing.num_slots
    spread = None
    if mesh:
        own = table_slots(sharing.slots()[0], sharing.lenders, united, sharing.num_slots)
        placement, _ = of_tables(own, cfg.num_experts, devices := parse_mesh(mesh))
        spread = devices, cfg.num_moe_layers * placement.room
        rows.append((f"slots on each device, --mesh {mesh}", f"{spread[1]:,}"))
    return [
        ("", rows),
        ("United experts that all models have", _on_disk(cfg, taken)),
        family_section(cfg, num_models, *pool, differences, device_gb, spread),
    ]


def _geometry(cfg: ModelConfig) -> list[tuple[str, str]]:
    """Describes what models of a family have in common, but for their number of weights."""
    unfused = ": without the fused kernel" if fused(cfg, {}) is None else ""
    return [
        ("architecture", cfg.architecture),
        ("layers", f"{cfg.num_layers}, {cfg.num_moe_layers} of them MoE"),
        ("experts a layer", f"{cfg.num_experts}, {cfg.experts_per_token} a token"),
        ("router", "softmax" if cfg.router is None else f"{cfg.router}{unfused}"),
        ("attention on Hopper", attention_on_hopper(cfg)),
        ("positions", f"{cfg.max_position:,}"),
    ]


def _memory(cfg: ModelConfig, parameters: int) -> list[tuple[str, str]]:
    """Describes the bytes of so many weights, and of a token's keys and values, by dtype."""
    rows = []
    for dtype in ("bfloat16", "float32", "fp8"):
        if dtype in BYTES:
            rows.append((f"weights in {dtype}", size(parameters * BYTES[dtype])))
        elif not kv_bytes_per_token(cfg, dtype):
            continue
        kv = f"{kv_bytes_per_token(cfg, dtype):,} bytes a token"
        for window in filter(None, reversed(page_windows(cfg))):
            kv += f", {kv_bytes_per_token(cfg, dtype, window):,} past {window:,}"
        if kept := sequence_bytes(cfg, jnp.dtype("bfloat16" if dtype == "fp8" else dtype)):
            kv += f", {size(kept)} a sequence"
        rows.append((f"KV cache in {dtype}", kv))
    return rows


def _on_disk(cfg: ModelConfig, stored: Mapping[int, int]) -> list[tuple[str, str]]:
    """Describes united experts by their way and bytes."""
    rows = [
        (f"way {way}", f"{_a_layer(cfg, way)}, {size(taken)} on disk")
        for way, taken in stored.items()
    ]
    return rows or [("none", "")]


def _a_layer(cfg: ModelConfig, way: int) -> str:
    return f"{-(-cfg.num_experts // way)} a layer"


def _united_bytes_of(cfg: ModelConfig, way: int) -> int:
    """Returns the bytes of a way's united experts in bfloat16."""
    experts = cfg.num_moe_layers * -(-cfg.num_experts // way)
    return experts * layout.expert_parameters(cfg) * BYTES["bfloat16"]


# -- what fits, in one device and over a mesh ----------------------------------------------------


def parse_mesh(mesh: str) -> int:
    """Returns the devices of `ep=N`, read as the setting `engine.mesh`; 1 where it is empty.

    Raises SettingsError for what is no mesh.
    """
    loaded = settings.load(overrides={"engine.mesh": mesh})
    return settings.mesh_devices(loaded.engine.mesh)


def device_section(cfg: ModelConfig, device_gb: float = DEVICE_GB) -> Section:
    """Describes what KV cache fits in one device beside a model, in each form that it is served in,
    and over how few devices its experts have to be spread if none does.

    Raises ValueError for an invalid memory size.
    """
    _check(device_gb)
    rows, whole = [], num_parameters(cfg) * DTYPE_BYTES
    forms = {
        f"all in {DTYPE}": whole,
        **{f"experts in {fmt}": taken for fmt, taken in quantized_bytes(cfg).items()},
    }
    for form, weights in forms.items():
        rows.append((f"left for KV, {form}", _kv(cfg, 1, _left(cfg, 1, device_gb, weights))))
    if _left(cfg, 1, device_gb, whole) <= 0:
        for n in _MESHES:
            slots = cfg.num_moe_layers * slots_per_layer(cfg.num_experts, n)
            weights = num_parameters(cfg, 0) + slots * layout.expert_parameters(cfg)
            if (left := _left(cfg, n, device_gb, weights * DTYPE_BYTES)) > 0:
                rows.append((f"left for KV, --mesh ep={n}", _kv(cfg, n, left)))
                break
    return f"What fits in a GPU of {device_gb:g} GB, reckoned and not measured", rows


def kv_tokens(cfg: ModelConfig, device_gb: float, weights: int) -> int:
    """Returns the tokens of KV cache in bfloat16 that fit beside so many bytes of weights in one
    device, or raises ValueError for an invalid memory size.
    """
    _check(device_gb)
    per_token = kv_bytes_per_token(cfg, DTYPE)
    return max(0, _left(cfg, 1, device_gb, weights)) // per_token if per_token else 0


def family_section(
    cfg: ModelConfig,
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
    _check(device_gb)
    others, expert = num_parameters(cfg, 0), layout.expert_parameters(cfg)
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
    cfg: ModelConfig, num_devices: int, device_gb: float = DEVICE_GB, ways: Collection[int] = ()
) -> Section:
    """Describes memory, exchanges and replicas of a model over a mesh. Everything is in bfloat16.

    Args:
        cfg: the model.
        num_devices: of the mesh.
        device_gb: memory of each, in 1e9 bytes.
        ways: of its united experts; the pool has slots for the way that has most of them.

    Raises ValueError for an invalid memory size.
    """
    _check(device_gb)
    united = -(-cfg.num_experts // min(ways)) if ways else 0
    slots = slots_per_layer(cfg.num_experts + united, num_devices)
    held = f"{slots} of {cfg.num_experts}" + f" and {united} united ones" * bool(united)
    experts = cfg.num_moe_layers * slots * layout.expert_parameters(cfg) * DTYPE_BYTES
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


def _beside(cfg: ModelConfig, num_devices: int) -> tuple[int, int]:
    """Returns the bytes of layers without experts, which CUDA graphs have again, and of the rows of
    the largest step.
    """
    embeddings = cfg.vocab_size * cfg.d_model * (1 if cfg.tie_embeddings else 2)
    again = (num_parameters(cfg, 0) - embeddings) * DTYPE_BYTES
    return again, MeshStep(cfg, num_devices, KV_BUCKET, DTYPE_BYTES).gathered_buffer_bytes()


def _left(cfg: ModelConfig, num_devices: int, device_gb: float, weights: int) -> int:
    """Returns the bytes of each device for KV cache, beside what recurrent layers keep of as many
    sequences as are served by default.
    """
    slots = limits_of(EngineConfig(), num_ranks=num_devices).slots_per_rank
    kept = slots * sequence_bytes(cfg, jnp.dtype(DTYPE))
    return int(1e9 * device_gb) - weights - kept - sum(_beside(cfg, num_devices))


def _kv(cfg: ModelConfig, num_devices: int, left: int) -> str:
    """Says what KV cache so many bytes of each device hold."""
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
    cfg: ModelConfig, num_devices: int, device_gb: float, weights: int
) -> list[tuple[str, str]]:
    """Describes what a device has left for KV pages beside its weights and the largest step."""
    again, rows = _beside(cfg, num_devices)
    left = _left(cfg, num_devices, device_gb, weights)
    return [
        ("layers without experts, again", f"{size(again)}, on a GPU, for CUDA graphs"),
        (f"a step of {KV_BUCKET:,} tokens a device", size(rows)),
        (f"left for KV of {device_gb:g} GB", _kv(cfg, num_devices, left)),
        _spare(cfg, num_devices, device_gb, weights),
    ]


def _spare(
    cfg: ModelConfig, num_devices: int, device_gb: float, weights: int, num_models: int = 1
) -> tuple[str, str]:
    """Describes how many copies that stay a device has room for, beside so many bytes of weights of
    all models.
    """
    again, rows = _beside(cfg, num_devices)
    one, config = layout.expert_parameters(cfg) * DTYPE_BYTES, EngineConfig()
    taken = int(1e9 * device_gb * SHARE * config.memory_fraction)
    room = taken - weights - num_models * again - STEPS_UNDER_WAY * rows
    spare = spare_slots_in(room, config, cfg, num_devices, one)
    text = f"{spare}, {size(cfg.num_moe_layers * one)} each"
    text += f", beside KV of {EngineConfig().max_num_seqs} full sequences, or in "
    text += f"{100 * COPIES_SHARE:g} % of its room"
    return "spare slots of auto, at most", text


def _steps(cfg: ModelConfig, num_devices: int) -> list[tuple[str, str]]:
    """Describes, by bucket, what a device sends in a step, and how many replicas' copies are
    hidden.
    """
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
