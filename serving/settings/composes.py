"""What does not compose with what: everything else does.

Settings, SetBrownout, the live page and docs/operating.md read one table, so that nothing is
accepted that would have no effect.
"""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from serving.config import EngineConfig, ServerConfig

AEP = "asynchronous workers (mode aep)"
MESH = "experts over a mesh"
ALL_THERE = "every model on the device"
ONE_THERE = "one model on the device at a time"
IN_TURN = "sets that come and go (engine.resident_sets)"
MAPPED = "a map of shared experts (engine.family)"
HOSTED = "experts in host memory (engine.resident_experts)"

MODES: dict[str, Callable[[EngineConfig, int], bool]] = {
    AEP: lambda engine, count: engine.mode == "aep" or engine.asynchronous.attention > 0,
    MESH: lambda engine, count: bool(engine.mesh),
    ALL_THERE: lambda engine, count: count > 0 and not 0 < engine.resident_sets < count,
    ONE_THERE: lambda engine, count: 1 in (count, engine.resident_sets),
    IN_TURN: lambda engine, count: engine.resident_sets > 0,
    MAPPED: lambda engine, count: bool(engine.family),
    HOSTED: lambda engine, count: engine.resident_experts > 0,
}
"""Whether settings ask for a mode; `count` is the number of models, 0 where that is not known."""

COMPANY = "SetBrownout prefill_company"
COMING = "engine.spare_models"
"""And with it LoadModel and UnloadModel."""

RECURRENT = "recurrent layers"
OWN_STRATEGY = "engine.brownout.strategy"
HYBRID = "engine.hybrid_steps=on"

_ONE = "workers serve one model; several need engine.mode steps"
_ALL_THERE = "what is spread over devices is all there"

COMPOSES: dict[tuple[str, str], str] = {
    (AEP, "engine.mesh"): "each device is a worker",
    (AEP, "engine.coordinator"): "workers are processes already (engine.asynchronous.workers)",
    (AEP, "engine.models"): _ONE,
    (AEP, "engine.family"): _ONE,
    (AEP, "engine.resident_sets"): _ONE,
    (AEP, "engine.resident_experts"): _ONE,
    (AEP, "engine.spare_experts"): _ONE,
    (AEP, "engine.policy=qllm"): (
        "qllm parks steps between two layers, and there is none to park; ls_first serves "
        "latency-sensitive rows first in every layer"
    ),
    (AEP, "engine.part_layers"): "there are no steps to launch in parts",
    (AEP, COMPANY): "no prompt waits for another's step",
    (AEP, "engine.threshold_buckets_percent"): "stages have capacity for every threshold",
    (AEP, "engine.enforce_eager"): "stages are always compiled",
    (AEP, HYBRID): "there is no step for rows of both phases",
    (AEP, OWN_STRATEGY): "workers answer with visits, and cannot say that a plan is out of range",
    (AEP, "engine.brownout.levels"): "a row's threshold is the same in every layer",
    (AEP, COMING): _ONE,
    (MESH, COMING): _ALL_THERE,
    (MESH, "engine.resident_sets"): _ALL_THERE,
    (MESH, "engine.resident_experts"): _ALL_THERE,
    (MESH, HYBRID): "each phase has exchanges of its own between devices",
    (MESH, OWN_STRATEGY): "devices agree on integers alone, and floats may differ in the last bit",
    (MESH, "engine.brownout.levels"): "devices make plans with one threshold a step",
    (ALL_THERE, "engine.model_stay_s"): "no model takes another's place (engine.resident_sets)",
    (ONE_THERE, "engine.mixed_models"): "models of one step have to be on the device together",
    (IN_TURN, COMING): "a model's set comes and goes already",
    (MAPPED, COMING): "the map is of certain models, and says whose experts serve whom",
    (HOSTED, HYBRID): "a row that runs again for want of its experts is a prompt's",
    (HOSTED, RECURRENT): "rows would run again from their first position",
    (HOSTED, COMING): "experts stand in for a sibling's, which would be gone",
}
"""Why a mode does not go with a feature: a setting (`key=value`: only that value), a field of
SetBrownout, or what a model has.
"""

_DEFAULTS = ServerConfig()
_ASKS: dict[str, Callable[[Any], bool]] = {
    "engine.mixed_models": lambda count: count > _DEFAULTS.engine.mixed_models,
    OWN_STRATEGY: lambda name: ":" in name,
}
"""Whether a value asks for the feature, where more values than the default do not."""


def why_not(engine: EngineConfig, feature: str, num_models: int = 0) -> str:
    """Returns with which mode in force a feature does not go, and why; empty if it goes with all.

    `num_models` is 0 where it is not known.
    """
    for (mode, refused), reason in COMPOSES.items():
        if refused == feature and MODES[mode](engine, num_models):
            return f"with {mode}: {reason}"
    return ""


def refused_settings(engine: EngineConfig, num_models: int = 0) -> Iterator[tuple[str, Any, str]]:
    """Yields the key and value of settings that do not go with others, and why, as `why_not`."""
    config = ServerConfig(engine=engine)
    for feature in dict.fromkeys(feature for _, feature in COMPOSES):
        key, _, value = feature.partition("=")
        if not key.startswith("engine."):
            continue
        have, default = attrgetter(key)(config), attrgetter(key)(_DEFAULTS)
        asks = _ASKS.get(key, lambda have, default=default: have != default)
        asked = have == value if value else asks(have)
        if asked and (why := why_not(engine, feature, num_models)):
            yield key, have, why
