"""Whether KV pages fit, told before they are allocated, and how many copies of experts may."""

import contextlib
import logging
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jmoe.api import Model
from jmoe.attention import page_bytes, page_windows, sequence_bytes, with_kv_cache_dtype
from jmoe.checkpoint import NativeStored, empty_pool, quantize_as, quantizing_bytes
from jmoe.config import ModelConfig
from jmoe.free_memory import device_memory, free_device_bytes, free_host_bytes
from jmoe.parallel.cost import MeshStep, check_copies, expert_bytes
from jmoe.parallel.placement import check_room, slots_per_layer
from jmoe.random_model import random_params
from serving.config import BalanceConfig, CountOrAuto, EngineConfig
from serving.errors import SettingsError
from serving.execution.fitting import limits_of, served_len
from serving.plan import Limits

log = logging.getLogger(__name__)

GIB = 2**30
SHARE = 0.95
"""Of the free memory that pages may take; step programs need a little, too."""
STEPS_UNDER_WAY = 2
"""Each with memory of its own: the one that runs, and the one that is launched behind it."""
HELD = 3
"""Layers whose copies a step holds: the one that computes, the next one, and what is being sent."""
COPIES_SHARE = 0.1
"""Of the memory beside weights and steps, what copies of experts that are left to `auto` may take
though KV pages of all sequences at full length would fill it."""


def check_memory(model: Model, limits: Limits, *, beside: int = 0) -> None:
    """Raises SettingsError, with the number of pages that would fit, where these do not.

    Over a mesh each device has its part of them, and takes `beside` bytes for other things as
    well; CPU devices share the host's memory.
    """
    free, ranks = free_bytes(), limits.num_ranks
    if free is not None and jax.local_devices()[0].platform != "cpu":
        free *= ranks
    kv_bytes = partial(kv_bytes_of, limits, page_bytes(model.config, limits.page_size, model.dtype))
    wanted = ranks * kv_bytes(limits.pages_per_rank)
    if free is None:
        return
    room = int(SHARE * free) - ranks * beside
    if wanted <= room:
        return
    if room < 0:
        raise SettingsError(
            f"engine.max_num_seqs is {limits.decode_rows}: what is kept of each beside KV "
            "pages, and for models to come (engine.spare_models), takes "
            f"{ranks * beside / GIB:.4g} GiB and {free / GIB:.4g} GiB are free; lower it, or them"
        )
    fewer = range(1, limits.pages_per_rank)
    if fitting := ranks * bisect_right(fewer, room // ranks, key=kv_bytes):
        advice = f"set engine.num_pages to {fitting} or less, or lower max_num_seqs, max_model_len"
    else:
        advice = "lower engine.page_size"
    raise SettingsError(
        f"engine.num_pages is {limits.num_pages}: with engine.page_size {limits.page_size} the KV "
        f"pages take {wanted / GIB:.4g} GiB and {free / GIB:.4g} GiB are free; {advice}"
    )


def kv_bytes_of(limits: Limits, sizes: tuple[int, ...], num_pages: int) -> int:
    """Returns the bytes of a rank's pages where its first group has `num_pages`, with those that
    take padding rows; `sizes` of a page are those of `page_bytes`.
    """
    groups = replace(limits, num_pages=limits.num_ranks * num_pages).group_pages
    return sum(size * (count + 1) for size, count in zip(sizes, groups, strict=True))


def check_balance(
    cfg: ModelConfig,
    num_devices: int,
    balance: BalanceConfig,
    *,
    spare: int | None = None,
    num_models: int = 1,
) -> None:
    """Raises SettingsError for more copies than a device can get or use of `num_models` that share
    no experts, or than a loaded model has spare slots for: `spare` of each layer.
    """
    try:
        check_copies(
            cfg.num_experts,
            num_devices,
            replicas=_asked(balance.replicas),
            per_pair=balance.replicas_per_pair,
            spare_slots=_asked(balance.spare_slots),
            num_models=num_models,
        )
    except ValueError as error:
        raise SettingsError(f"engine.balance.{error}") from None
    if spare is not None and _asked(balance.spare_slots) > spare:
        raise SettingsError(
            f"engine.balance.spare_slots is {balance.spare_slots}, and the model given was spread "
            f"with {spare}: set it to {spare}, or load the model with a placement that has as many"
        )
    if spare == 0 and balance.spare_slots == "auto":
        log.warning(
            "engine.balance.spare_slots is auto, and the model given was spread without any: no "
            "copies stay; load it with a placement that has some"
        )


def check_mesh(
    config: EngineConfig, cfg: ModelConfig, num_devices: int, num_models: int = 1
) -> None:
    """Raises SettingsError, before weights load, as `check_balance` does, and where a device's part
    of a model's routed experts and its copies do not fit beside other weights, which each has.
    """
    balance = config.balance
    check_balance(cfg, num_devices, balance, num_models=num_models)
    free = _free_on_each(num_devices)
    if free is None:
        return
    slot_bytes = _slot_bytes(config, cfg)
    rest = _rest_bytes(config, cfg, _loading_bytes(config, cfg, num_devices))
    room = max(0, int(SHARE * free) - rest) // slot_bytes
    layers, spare = cfg.num_moe_layers, _asked(balance.spare_slots)
    try:
        check_room(layers, cfg.num_experts, num_devices, room, spare=spare)
    except ValueError as error:
        raise SettingsError(f"engine.mesh is 'ep={num_devices}': {error}") from None
    held = layers * slots_per_layer(cfg.num_experts, num_devices, spare)
    left = int(SHARE * free) - _rest_bytes(config, cfg) - held * slot_bytes
    _check_copies_of_steps(config, cfg, num_devices, left)


MOST_GROWTH = 8
"""Of weights as they load: from four bits to float32. Others grow less, though a GPU may have them
twice."""


def check_model(
    config: EngineConfig, cfg: ModelConfig, stored: int, native: NativeStored | None = None
) -> None:
    """Raises SettingsError, before weights load, where one model's routed experts and other weights
    do not fit into a device, or not with what loading them takes meanwhile. They are not counted
    where so many bytes as are stored surely fit. `native` is how jmoe's own format has them, which
    is read as a whole.
    """
    free = _free_on_each(1)
    if free is None:
        return
    loading = _loading_bytes(config, cfg, 1, native)
    if native is None and MOST_GROWTH * stored + loading <= SHARE * free:
        return
    each = cfg.num_experts + (0 if native is None else native.num_united)
    experts = cfg.num_moe_layers * each * _slot_bytes(config, cfg)
    wanted = experts + _rest_bytes(config, cfg, loading)
    quantizing = quantizing_bytes(cfg, quantize_as(config.quantize, cfg, says_why=False), 0) > 0
    if wanted > SHARE * free:
        fixes = ["take a smaller model"]
        if native is not None:
            fixes.append("keep it in Hugging Face's format, which is loaded layer by layer")
        elif jax.local_devices()[0].platform != "cpu":
            fixes.append("spread it over devices (engine.mesh)")
        if config.quantize in ("auto", "none") and native is None:
            fixes.append("keep its experts in fewer bits (engine.quantize)")
        raise SettingsError(
            f"engine.model is {config.model!r}, whose weights take {wanted / GIB:.4g} GiB"
            f"{' while they are quantized' * quantizing}, and {free / GIB:.4g} GiB are free; "
            f"{', or '.join(fixes)}"
        )


def check_family(
    config: EngineConfig, cfg: ModelConfig, num_devices: int, num_slots: int, slot_bytes: int
) -> None:
    """Raises SettingsError where a family's experts, in `num_slots` of each device, do not fit
    beside one model's other weights and the copies of a step; what else the other models have of
    their own is not counted, since they may share it.
    """
    free = _free_on_each(num_devices)
    if free is None:
        return
    loading = _loading_bytes(config, cfg, num_devices)
    wanted = num_slots * slot_bytes + _rest_bytes(config, cfg, loading)
    if wanted > SHARE * free:
        fixes = ["name fewer models"]
        fixes += ["lower engine.spare_models"] * bool(config.spare_models)
        fixes += ["have them share experts (engine.family)"] * (not config.family)
        if num_devices > 1:
            fixes.append("take a larger mesh")
        elif jax.local_devices()[0].platform != "cpu":
            fixes.append("keep some in host memory (engine.resident_experts)")
        where = f" on each device of engine.mesh {config.mesh!r}" if num_devices > 1 else ""
        raise SettingsError(
            f"engine.models are {len(config.models)}, whose {num_slots} experts take, with one "
            f"model's other weights, {wanted / GIB:.4g} GiB{where}, and {free / GIB:.4g} GiB are "
            f"free; {', or '.join(fixes)}"
        )
    left = int(SHARE * free) - num_slots * slot_bytes - _rest_bytes(config, cfg)
    _check_copies_of_steps(config, cfg, num_devices, left)


def _check_copies_of_steps(
    config: EngineConfig, cfg: ModelConfig, num_devices: int, left: int
) -> None:
    """Raises SettingsError where the copies of a step do not fit into the bytes that are left of a
    device.
    """
    balance = config.balance
    if num_devices == 1 or not _asked(balance.replicas):
        return
    left //= expert_bytes(cfg, jnp.dtype(config.dtype).itemsize)
    of_one = HELD * num_devices
    if of_one * balance.replicas_per_pair > left:
        fits = left // of_one
        advice = f"{fits} would fit" if fits else "set engine.balance.replicas to 0"
        raise SettingsError(
            f"engine.balance.replicas_per_pair is {balance.replicas_per_pair}: copies of as many "
            f"from each of {num_devices} devices, held three times, are "
            f"{of_one * balance.replicas_per_pair} experts, and beside its own a device has room "
            f"for {left}; {advice}"
        )


def _free_on_each(num_devices: int) -> int | None:
    """Returns the bytes that are free for each device; None where that is not known."""
    free = free_bytes()
    if free is not None and jax.local_devices()[0].platform == "cpu":  # which share the host's
        free //= num_devices
    return free


def _slot_bytes(config: EngineConfig, cfg: ModelConfig, kind: str | None = None) -> int:
    """Returns the bytes of an expert that is kept as `kind`; None: as the settings say."""
    kind = quantize_as(config.quantize, cfg, says_why=False) if kind is None else kind
    return _size(jax.eval_shape(partial(empty_pool, cfg, 1, jnp.dtype(config.dtype), kind)))


def _loading_bytes(
    config: EngineConfig, cfg: ModelConfig, num_devices: int, native: NativeStored | None = None
) -> int:
    """Returns the most bytes of each device that loading takes beside all weights, which CPU
    devices share: what quantizing takes; in floats, a layer's experts as they are read and again as
    they are stacked; of those kept as stored, a layer that comes from the host. A mesh quantizes on
    its first device, and gets from the host no more than a device's part of a layer.

    Of a model in jmoe's own format: all its experts in floats, if they are quantized or wanted in
    another dtype than they are stored in; over a mesh they lie on its first device meanwhile.
    """
    kind = quantize_as(config.quantize, cfg, says_why=False)
    on_cpu = jax.local_devices()[0].platform == "cpu"
    slot, num_experts = _slot_bytes(config, cfg), cfg.num_experts
    quantizing = quantizing_bytes(cfg, kind, slot)
    if native is not None:
        count = cfg.num_moe_layers * (num_experts + native.num_united)
        plain = count * _slot_bytes(config, cfg, "none")
        size = jnp.dtype(native.dtype).itemsize
        wanted = jnp.dtype(config.dtype).itemsize
        as_stored = plain * size // wanted if native.dtype != config.dtype else 0
        found = as_stored
        if quantizing:
            found = max(plain + quantizing, plain + as_stored - count * slot)
        found = max(found, count * slot * (num_devices > 1))
    elif quantizing:
        found = quantizing
    elif num_devices > 1 and not on_cpu:
        found = (-(-num_experts // num_devices) + _asked(config.balance.spare_slots)) * slot
    else:
        found = num_experts * slot * (2 if on_cpu or kind == "none" else 1)
    return found // (num_devices if on_cpu else 1)


def _rest_bytes(config: EngineConfig, cfg: ModelConfig, loading: int = 0) -> int:
    """Returns the bytes of what a model has beside its experts, with `loading` bytes that are
    needed before there are graphs. Layers of a GPU count twice, for CUDA graphs
    (`jmoe.steps.served`), but where a family's sets come from host memory.
    """
    params = _params(config, cfg)
    has_graphs = jax.local_devices()[0].platform != "cpu" and not config.enforce_eager
    come_from_host = 0 < config.resident_sets < len(config.models)
    twice = _size(params["segments"]) if has_graphs and not come_from_host else 0
    return _size(params) + max(twice, loading)


def _params(config: EngineConfig, cfg: ModelConfig) -> Any:
    """Returns the shapes and dtypes of what a model has beside its experts."""
    make = partial(random_params, cfg, dtype=jnp.dtype(config.dtype))
    return jax.eval_shape(make, jax.random.key(0))


def _asked(count: CountOrAuto) -> int:
    """Returns how many copies the settings insist on."""
    return 0 if count == "auto" else count


def spare_slots_that_fit(
    config: EngineConfig,
    cfg: ModelConfig,
    mesh: Mesh,
    free: int | None,
    num_models: int,
    slots: int,
    native: NativeStored | None = None,
) -> int:
    """Returns how many spare slots of each layer every device of a mesh has room for beside the
    `slots` of its own experts, where `free` bytes were free on this process's before weights
    loaded; 0 where that is not known. They have to fit beside what loading takes (`native` is as
    of `check_model`), and later beside steps and KV pages. Other weights count as many times as
    there are models, though some may have them alike.
    """
    dtype, num_devices = jnp.dtype(config.dtype), mesh.size
    fitting = 0
    if free is not None:
        on_cpu = jax.local_devices()[0].platform == "cpu"
        slot = _slot_bytes(config, cfg)
        free = free // num_devices if on_cpu else free  # CPU devices share the host's memory
        own = int(SHARE * free) - cfg.num_moe_layers * slots * slot
        loading = _loading_bytes(config, cfg, num_devices, native)
        while_loading = own - num_models * _size(_params(config, cfg)) - loading
        # Steps that copy experts gather all rows, whatever others do.
        exchange = "all-gather" if config.balance.replicas else config.exchange
        cfg = replace(cfg, exchange=exchange)
        step = MeshStep(cfg, num_devices, config.max_prefill_tokens, dtype.itemsize)
        rows = step.gathered_buffer_bytes()
        left = own - num_models * _rest_bytes(config, cfg) - STEPS_UNDER_WAY * rows
        if config.balance.replicas and not on_cpu:  # copies of a step, beside those that stay
            pairs = HELD * num_devices * config.balance.replicas_per_pair
            left -= STEPS_UNDER_WAY * pairs * expert_bytes(cfg, dtype.itemsize)
        fitting = spare_slots_in(left, config, cfg, num_devices, slot, num_models)
        fitting = min(fitting, max(0, while_loading) // (cfg.num_moe_layers * slot))
    return smallest(fitting, mesh)


def spare_slots_in(
    left: int,
    config: EngineConfig,
    cfg: ModelConfig,
    num_devices: int,
    slot_bytes: int,
    num_models: int = 1,
) -> int:
    """Returns how many spare slots of each layer, of `slot_bytes` each, a device may have where
    `left` bytes are beside weights and steps: in what KV pages of `max_num_seqs` sequences of
    `max_model_len` do not take, or, where the settings leave pages to memory, in `COPIES_SHARE` of
    all, if one such sequence fits beside them. There are no more than a device lacks experts of
    `num_models` that share none.
    """
    cfg = with_kv_cache_dtype(cfg, config.kv_cache_dtype)
    length = served_len(config, cfg, config.model, num_devices)
    windows = page_windows(cfg)
    limits = limits_of(replace(config, max_model_len=length), cfg.num_layers, num_devices, windows)
    sizes = page_bytes(cfg, limits.page_size, jnp.dtype(config.dtype))
    left -= limits.slots_per_rank * sequence_bytes(cfg, jnp.dtype(config.dtype))
    beside_all = left - kv_bytes_of(limits, sizes, limits.pages_per_rank)
    beside_one = left - kv_bytes_of(limits, sizes, len(limits.blocks(0, 0, length)))
    room = beside_all
    if not config.num_pages:
        room = max(beside_all, min(int(COPIES_SHARE * left), beside_one))
    num_experts = num_models * cfg.num_experts
    lacking = num_experts - -(-num_experts // num_devices)
    return min(max(0, room) // (cfg.num_moe_layers * slot_bytes), lacking)


def pairs_that_fit(cfg: ModelConfig, dtype_bytes: int, mesh: Mesh, most: int) -> int:
    """Returns how many experts, up to `most`, each device may send each other one in a step, so
    that copies take at most `COPIES_SHARE` of the memory that is left.
    """
    if (free := free_bytes()) is not None:
        of_one = STEPS_UNDER_WAY * HELD * mesh.size * expert_bytes(cfg, dtype_bytes)
        most = min(most, int(COPIES_SHARE * free) // of_one)
    return smallest(most, mesh)


def smallest(count: int, mesh: Mesh | None) -> int:
    """Returns the smallest over all processes of a mesh, each of which has to call it."""
    if mesh is None or not mesh.is_multi_process:
        return count
    from jax.experimental.multihost_utils import process_allgather

    counts: Sequence[int] = np.ravel(process_allgather(np.array(count))).tolist()
    return min(counts)


def _size(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@contextlib.contextmanager
def short_of_memory(told: Callable[[str], str]) -> Generator[None]:
    """Raises SettingsError of what `told` makes of XLA's count of a device's memory, and of what
    XLA says, where something is allocated in its block that a device has no memory for.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        known = device_memory(jax.local_devices()[0])
        counted = ""
        if known is not None:
            counted = f" of {known.limit / GIB:.4g} GiB that XLA may take, it counts "
            counted += f"{known.free / GIB:.4g} GiB free, and"
        said = str(error).splitlines()[0]
        raise SettingsError(f"{told(counted)}. XLA says: {said}") from error


def free_bytes() -> int | None:
    """Returns the memory that the default device has left; None where that is not known."""
    device = jax.local_devices()[0]
    return free_host_bytes() if device.platform == "cpu" else free_device_bytes(device)
