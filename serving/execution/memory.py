"""Whether the KV pages fit, told before they are allocated."""

import jax

from jmoe.api import Model
from jmoe.free_memory import free_device_bytes, free_host_bytes
from jmoe.kv_cache import page_bytes
from serving.plan import Limits
from serving.settings import SettingsError

GIB = 2**30
SHARE = 0.95
"""Of the free memory that pages may take; step programs need a little, too."""


def check_memory(model: Model, limits: Limits) -> None:
    """Raises SettingsError, with the number of pages that would fit, where these do not."""
    free = free_bytes()
    size = page_bytes(model.config, limits.page_size, model.dtype)
    wanted = size * (limits.num_pages + 1)  # and the one that takes padding rows
    if free is None or wanted <= SHARE * free:
        return
    fitting = max(0, int(SHARE * free) // size - 1)
    if fitting:
        advice = f"set engine.num_pages to {fitting} or less, or lower max_num_seqs, max_model_len"
    else:
        advice = "lower engine.page_size"
    raise SettingsError(
        f"engine.num_pages is {limits.num_pages}: with engine.page_size {limits.page_size} the KV "
        f"pages take {wanted / GIB:.4g} GiB and {free / GIB:.4g} GiB are free; {advice}"
    )


def free_bytes() -> int | None:
    """Memory that the default device has left; None where that is not known."""
    device = jax.local_devices()[0]
    return free_host_bytes() if device.platform == "cpu" else free_device_bytes(device)
