"""How many KV pages a GPU has room for, beside weights and what steps need.

XLA takes `engine.memory_fraction` of a GPU when the process first touches it (`claim_memory`), and
everything lies in that: weights, what programs work in, pages. With `engine.num_pages` 0 there are
as many pages as every slot can fill, or fewer where memory is short. More would never be used: a
page belongs to a sequence that has a slot. Pages are counted of the group of layers that keeps most
(`Limits.windows`); those of others follow.
"""

import logging
import os
from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from operator import attrgetter

import jax

from jmoe.api import Model
from jmoe.attention import page_bytes
from jmoe.free_memory import DeviceMemory, device_memory
from serving.config import EngineConfig
from serving.errors import SettingsError
from serving.execution.memory import (
    GIB,
    SHARE,
    STEPS_UNDER_WAY,
    kv_bytes_of,
    short_of_memory,
    smallest,
)
from serving.plan import Limits

log = logging.getLogger(__name__)

FRACTION, OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Two names of one variable; XLA refuses to have both."""
SIGNIFICANT_BITS = 6
"""Of a number of pages by memory; at most 3 % of them are left. What is in use when pages are
counted differs a little between two starts, and programs are compiled for a number of pages: one
that is found again by the next start is worth more than the last pages.
"""


def claim_memory(fraction: float) -> None:
    """Lets XLA take this fraction of each GPU's memory, unless the environment sets one. Works
    until jax makes its first array.
    """
    if not (os.environ.get(FRACTION) or os.environ.get(OLD_FRACTION)):
        os.environ[FRACTION] = f"{fraction:g}"


def goes_by_memory(config: EngineConfig) -> bool:
    """Returns whether the number of pages is left to the memory of a GPU."""
    return not config.num_pages and jax.local_devices()[0].platform != "cpu"


def by_memory(
    config: EngineConfig,
    limits: Limits,
    model: Model,
    step_bytes: Callable[[Limits], int],
    *,
    beside: int = 0,
) -> Limits:
    """Returns `limits` with as many pages as fit beside weights and steps, the same number on each
    device.

    Call it when the weights are on the devices. `step_bytes` says what a step needs on one of
    them, with these limits; `beside` bytes are still to be taken on each for other things. Over
    several processes the smallest device of any counts.

    Raises SettingsError where one sequence of `max_model_len` does not fit.
    """
    blocks = len(limits.blocks(0, 0, config.max_model_len))
    most = limits.most_pages(config.max_model_len, limits.slots_per_rank)
    limits = replace(limits, num_pages=most * limits.num_ranks)
    mesh = None if model.home is None else model.home.mesh
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.local_devices)
    found = [device_memory(device) for device in devices]
    known = [memory for memory in found if memory is not None]
    if len(known) < len(found):
        log.warning(
            "a device does not say what memory it has: KV pages are %d, what every slot can fill",
            most,
        )
        return replace(limits, num_pages=smallest(most, mesh) * limits.num_ranks)
    steps = STEPS_UNDER_WAY * step_bytes(limits) + beside
    sizes = page_bytes(model.config, limits.page_size, model.dtype)
    kv_bytes = partial(kv_bytes_of, limits, sizes)
    memory = min(known, key=attrgetter("free"))
    if memory.wanted:
        log.warning(
            "XLA has %.4g of the %.4g GiB of a GPU that it was to take (engine.memory_fraction): "
            "another process holds memory of it. KV pages are fewer for it; end that process and "
            "start again, or give each of them a part (lower engine.memory_fraction)",
            memory.limit / GIB,
            memory.wanted / GIB,
        )
    fitting = pages_that_fit(memory, steps, kv_bytes, most)
    fitting = smallest(fitting, mesh)  # before one of them may refuse: all have to ask
    _check(config, memory, steps, sum(sizes), fitting, blocks)
    _log(memory, steps, kv_bytes(fitting) - sum(sizes), fitting, limits.page_size, most)
    return replace(limits, num_pages=fitting * limits.num_ranks)


def allocating(config: EngineConfig, limits: Limits, model: Model) -> AbstractContextManager[None]:
    """Returns a context that raises SettingsError, with what to lower, where KV pages are allocated
    in it and a device does not have the memory that was counted for them: another process took some
    of it, and XLA takes it only as it needs it (`XLA_PYTHON_CLIENT_PREALLOCATE` false).
    """

    def told(counted: str) -> str:
        sizes = page_bytes(model.config, limits.page_size, model.dtype)
        asked = kv_bytes_of(limits, sizes, limits.pages_per_rank)
        lower = f"engine.num_pages (it is {config.num_pages}) or engine.max_num_seqs"
        if goes_by_memory(config):
            lower = f"engine.memory_fraction (it is {config.memory_fraction:g})"
        return (
            f"{limits.num_pages} KV pages, {asked / GIB:.4g} GiB on a device, could not be "
            f"allocated:{counted} another process seems to hold memory of the device; end that "
            f"process, or lower {lower}"
        )

    return short_of_memory(told)


def pages_that_fit(
    memory: DeviceMemory, steps: int, kv_bytes: Callable[[int], int], most: int
) -> int:
    """Returns how many pages a device has room for beside what is there and `steps` bytes, if
    `kv_bytes` says what so many take. Not more than `most`; fewer are rounded down to a round
    number.
    """
    left = memory.free - steps
    fitting = bisect_right(range(1, most + 1), int(SHARE * left), key=kv_bytes)
    if fitting >= most:
        return most
    return fitting & -(1 << max(0, fitting.bit_length() - SIGNIFICANT_BITS))


def _check(
    config: EngineConfig, memory: DeviceMemory, steps: int, page: int, fitting: int, blocks: int
) -> None:
    if fitting >= blocks:
        return
    raise SettingsError(
        f"engine.max_model_len is {config.max_model_len}: one such sequence needs {blocks} KV pages"
        f" of {page / GIB:.3g} GiB, and {fitting} fit: of {memory.limit / GIB:.4g} GiB that XLA may"
        f" take (engine.memory_fraction {config.memory_fraction:g}), weights take "
        f"{memory.in_use / GIB:.4g}, and steps and models to come (engine.spare_models) "
        f"{steps / GIB:.4g}; lower engine.max_model_len, engine.max_prefill_tokens or "
        "spare_models, raise engine.memory_fraction, or spread the model (engine.mesh)"
    )


def _log(
    memory: DeviceMemory, steps: int, kv_bytes: int, pages: int, page_size: int, most: int
) -> None:
    left = memory.free - steps - kv_bytes
    facts = {
        "memory_bytes": memory.limit,
        "in_use_bytes": memory.in_use,
        "step_bytes": steps,
        "kv_bytes": kv_bytes,
        "kv_pages": pages,
        "kv_pages_of_all_slots": most,
    }
    log.info(
        "memory of a device: %.4g GiB for XLA; weights %.4g, steps %.4g, %d KV pages of %d tokens "
        "%.4g (all slots could fill %d), left %.4g",
        memory.limit / GIB,
        memory.in_use / GIB,
        steps / GIB,
        pages,
        page_size,
        kv_bytes / GIB,
        most,
        left / GIB,
        extra={"event": "memory", **facts},
    )
