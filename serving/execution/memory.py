"""Whether the KV pages fit, told before they are allocated."""

from bisect import bisect_right
from dataclasses import replace
from functools import partial

import jax

from jmoe.api import Model
from jmoe.attention import page_bytes
from jmoe.config import ModelConfig
from jmoe.free_memory import free_device_bytes, free_host_bytes
from jmoe.parallel.cost import check_copies, expert_bytes
from jmoe.parallel.placement import check_room, slots_per_layer
from serving.config import BalanceConfig
from serving.errors import SettingsError
from serving.plan import Limits

GIB = 2**30
SHARE = 0.95
"""Of the free memory that pages may take; step programs need a little, too."""


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
            f"engine.max_num_seqs is {limits.num_slots}: what is kept of each to draw its tokens "
            f"takes {ranks * beside / GIB:.4g} GiB and {free / GIB:.4g} GiB are free; lower it"
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
    cfg: ModelConfig, num_devices: int, balance: BalanceConfig, *, spare: int | None = None
) -> None:
    """Raises SettingsError for more copies than a device can get or use, or than a loaded model has
    spare slots for: `spare` of each layer.
    """
    try:
        check_copies(
            cfg.num_experts,
            num_devices,
            replicas=balance.replicas,
            per_pair=balance.replicas_per_pair,
            spare_slots=balance.spare_slots,
        )
    except ValueError as error:
        raise SettingsError(f"engine.balance.{error}") from None
    if spare is not None and balance.spare_slots > spare:
        raise SettingsError(
            f"engine.balance.spare_slots is {balance.spare_slots}, and the model given was spread "
            f"with {spare}: set it to {spare}, or load the model with a placement that has as many"
        )


def check_mesh(
    cfg: ModelConfig, dtype_bytes: int, num_devices: int, balance: BalanceConfig
) -> None:
    """Raises SettingsError, before weights load, as `check_balance` does, and where a device's part
    of the routed experts and its copies do not fit; other weights are not counted.
    """
    check_balance(cfg, num_devices, balance)
    free = free_bytes()
    if free is None:
        return
    if jax.local_devices()[0].platform == "cpu":  # whose devices share the host's memory
        free //= num_devices
    room = int(SHARE * free) // expert_bytes(cfg, dtype_bytes)
    layers, spare = cfg.num_moe_layers, balance.spare_slots
    try:
        check_room(layers, cfg.num_experts, num_devices, room, spare=spare)
    except ValueError as error:
        raise SettingsError(f"engine.mesh is 'ep={num_devices}': {error}") from None
    if not balance.replicas:
        return
    left = room - layers * slots_per_layer(cfg.num_experts, num_devices, spare)
    # Of the layer that computes, of the next one, and those that are being sent.
    of_one = 3 * num_devices
    if of_one * balance.replicas_per_pair > left:
        fits = left // of_one
        advice = f"{fits} would fit" if fits else "set engine.balance.replicas to 0"
        raise SettingsError(
            f"engine.balance.replicas_per_pair is {balance.replicas_per_pair}: copies of as many "
            f"from each of {num_devices} devices, held three times, are "
            f"{of_one * balance.replicas_per_pair} experts, and beside its own a device has room "
            f"for {left}; {advice}"
        )


def free_bytes() -> int | None:
    """Returns the memory that the default device has left; None where that is not known."""
    device = jax.local_devices()[0]
    return free_host_bytes() if device.platform == "cpu" else free_device_bytes(device)
