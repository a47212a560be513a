"""Whether the KV pages fit, told before they are allocated."""

from pathlib import Path

import jax

from jmoe.api import Model
from jmoe.kv_cache import page_bytes
from serving.scheduler import Limits
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
    if device.platform == "cpu":
        return _free_host_bytes()
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _free_host_bytes() -> int | None:
    """What Linux can give without swapping, and the control group allows."""
    known = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        known += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        pass
    group = Path("/sys/fs/cgroup")
    try:
        most = int((group / "memory.max").read_text(encoding="ascii"))
        known.append(most - int((group / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no control group, or one without a limit: "max"
        pass
    return min(known, default=None)
