"""Guards against faulty controllers: where one fails, Algorithm 2 decides."""

import math
from numbers import Real
from typing import cast

from serving.config import SalcConfig
from serving.control.algorithm2 import Algorithm2
from serving.control.controller import Controller, Decision, Make, Seen, StepController, StepSeen
from serving.control.predictive import Predictive
from serving.errors import shown
from serving.settings import plugins

CONTROLLERS: dict[str, Make] = {"algorithm2": Algorithm2, "predictive": Predictive}


def make_controller(
    config: SalcConfig, name: str = "", slow_s: float = math.inf
) -> "GuardedController":
    """Makes a controller by its name or `module:Class`; "": that of the settings. Calls that take
    longer than `slow_s` are logged, of one that is not jmoe's.

    Raises ValueError for one that is not there.
    """
    name = name or config.controller
    made = plugins.make("controller", name, CONTROLLERS, ["decide"], config)
    return GuardedController(name, made, config, math.inf if name in CONTROLLERS else slow_s)


class GuardedController:
    """Wraps a controller; where it fails, Algorithm 2 decides."""

    def __init__(
        self, name: str, controller: Controller, config: SalcConfig, slow_s: float = math.inf
    ) -> None:
        self.name = name
        self.by_step = isinstance(controller, StepController)
        """Whether steps have thresholds of their own."""
        self._controller, self._config = controller, config
        self._fallback = Algorithm2(config)
        self._guard = plugins.Guard(f"controller {name}", "algorithm2", slow_s)

    def decide(self, seen: Seen) -> Decision:
        """Returns thresholds, those that move clipped to floor and ceiling."""
        decision = self._guard.call(
            "decide",
            lambda: _checked(self._controller.decide(seen)),
            lambda: self._fallback.decide(seen),
        )
        return decision._replace(
            prefill_percent=self._cut(decision.prefill_percent, seen.prefill.threshold_percent),
            decode_percent=self._cut(decision.decode_percent, seen.decode.threshold_percent),
        )

    def of_step(self, step: StepSeen) -> int:
        """Returns the threshold of a step in whole percent, rounded up: it never degrades more than
        allowed.
        """
        controller = cast(StepController, self._controller)  # `by_step` says so
        percent = self._guard.call(
            "of_step",
            lambda: self._cut(_percent("of_step", controller.of_step(step)), step.percent),
            lambda: step.percent,
        )
        return math.ceil(percent)

    def _cut(self, percent: float, before: float) -> float:
        if percent == before:
            return percent
        return min(max(percent, self._config.floor_percent), self._config.ceiling_percent)


def _checked(decision: Decision) -> Decision:
    if not isinstance(decision, Decision):
        raise TypeError(f"it returned {shown(decision)}; it must return a Decision")
    return Decision(
        _percent("prefill_percent", decision.prefill_percent),
        _percent("decode_percent", decision.decode_percent),
        _expected_s("ttft_p90_s", decision.ttft_p90_s),
        _expected_s("itl_p90_s", decision.itl_p90_s),
    )


def _percent(name: str, percent: float) -> float:
    if not 0 <= _number(name, percent) <= 100:  # written so that NaN fails
        raise ValueError(f"{name} is {shown(percent)}; it must be between 0 and 100")
    return float(percent)


def _expected_s(name: str, expected_s: float) -> float:
    if _number(name, expected_s) < 0:
        raise ValueError(f"{name} is {shown(expected_s)}; it must be 0 or more, or NaN: unknown")
    return float(expected_s)


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {shown(value)}; it must be a number")
    return value
