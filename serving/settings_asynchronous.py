"""Checks the settings of mode aep."""

from math import inf
from operator import attrgetter
from typing import Any

from serving.config import ServerConfig

NOT_ASYNCHRONOUS = {
    "mesh": "",
    "coordinator": "",
    "models": (),
    "family": "",
    "resident_sets": 0,
    "resident_experts": 0,
    "spare_experts": 0,
    "part_layers": 0,
    "threshold_buckets_percent": (),
    "enforce_eager": False,
    "brownout.best_effort_ttft_slo_s": 0.0,
    "brownout.best_effort_itl_slo_s": 0.0,
}
"""Settings that apply to steps only, with the values they must have in mode aep."""


def check_asynchronous(config: ServerConfig, require: Any) -> None:
    """Checks the settings of workers, and that others are compatible with mode aep."""
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
    require(
        engine.prefix_reuse != "on" or not (own.attention or engine.mode == "aep"),
        "engine.prefix_reuse",
        "auto or off in engine.mode aep: asynchronous workers share no pages",
    )
    if not own.attention:
        return
    for name, wanted in NOT_ASYNCHRONOUS.items():
        require(
            attrgetter(name)(engine) == wanted,
            f"engine.{name}",
            f"{wanted!r} with engine.asynchronous.attention {own.attention}: asynchronous workers "
            "do not go with it",
        )
    require(
        len(engine.brownout.ways) <= 1,
        "engine.brownout.ways",
        f"one at most with engine.asynchronous.attention {own.attention}: workers keep the way that"
        " they start with",
    )
    require(
        engine.policy != "qllm",
        "engine.policy",
        "another one with engine.asynchronous.attention "
        f"{own.attention}: qllm parks steps between two layers, and there is none to park; "
        "ls_first serves latency-sensitive rows first in every layer",
    )
    require(
        engine.salc.controller != "predictive",
        "engine.salc.controller",
        "algorithm2, or your own, with engine.asynchronous.attention "
        f"{own.attention}: predictive knows steps, and rows here take no step together",
    )
