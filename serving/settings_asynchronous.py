"""Checks the settings of mode aep."""

from math import inf
from typing import Any

from serving.config import ServerConfig


def check_asynchronous(config: ServerConfig, require: Any) -> None:
    """Checks the settings of workers."""
    engine, own = config.engine, config.engine.asynchronous
    for name, other in (("attention", "experts"), ("experts", "attention")):
        require(
            getattr(own, name) > 0 or (not getattr(own, other) and engine.mode != "aep"),
            f"engine.asynchronous.{name}",
            "1 or more in engine.mode aep: workers with attention and workers with experts, each on"
            " a device of its own (--attention N --experts N)",
        )
    require(
        not own.experts or own.copies <= own.experts,
        "engine.asynchronous.copies",
        f"at most engine.asynchronous.experts, {own.experts}",
    )
    require(
        own.workers == "threads" or engine.mode == "aep",
        "engine.asynchronous.workers",
        f"threads unless engine.mode is aep, and that is {engine.mode!r}",
    )
    limit_s = engine.watchdog_s or inf
    require(
        own.workers == "threads" or 3 <= own.worker_timeout_s < limit_s,
        "engine.asynchronous.worker_timeout_s",
        f"3 or more, and less than engine.watchdog_s, {limit_s:g}",
    )
    require(
        not own.ray_address or own.workers == "ray",
        "engine.asynchronous.ray_address",
        f"empty unless engine.asynchronous.workers is ray, and that is {own.workers!r}",
    )
    if engine.mode == "steps":
        require(not own.attention, "engine.asynchronous.attention", "0 in engine.mode steps")
