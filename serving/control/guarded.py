"""A controller whose faults cost nobody anything: what it cannot decide, Algorithm 2 decides."""

import logging

from serving import plugins
from serving.config import SalcConfig
from serving.control.algorithm2 import Algorithm2
from serving.control.controller import Controller, Decision, Make, Seen, StepController, StepSeen
from serving.control.predictive import Predictive

log = logging.getLogger(__name__)

CONTROLLERS: dict[str, Make] = {"algorithm2": Algorithm2, "predictive": Predictive}


def make_controller(config: SalcConfig, name: str = "") -> "GuardedController":
    """A controller by its name, or by `module:Class`; "": that of the settings.

    Raises ValueError for one that is not there.
    """
    name = name or config.controller
    made = plugins.make("controller", name, CONTROLLERS, ["decide"], config)
    return GuardedController(name, made, config)


class GuardedController:
    """Asks a controller, and says in the log when that fails: the 1st, 2nd, 4th, 8th, ... time."""

    def __init__(self, name: str, controller: Controller, config: SalcConfig) -> None:
        self.name = name
        self.by_step = isinstance(controller, StepController)
        """Whether steps have thresholds of their own."""
        self._controller, self._config = controller, config
        self._fallback = Algorithm2(config)
        self._num_faults = 0

    def decide(self, seen: Seen) -> Decision:
        """Thresholds between floor and ceiling, where they move."""
        try:
            decision = _checked(self._controller.decide(seen))
        except Exception as error:
            self._fault("decide", error)
            decision = self._fallback.decide(seen)
        return decision._replace(
            prefill_percent=self._cut(decision.prefill_percent, seen.prefill.threshold_percent),
            decode_percent=self._cut(decision.decode_percent, seen.decode.threshold_percent),
        )

    def of_step(self, step: StepSeen) -> int:
        """Threshold of a step in whole percent, rounded up: it never degrades more than allowed."""
        percent = step.percent
        assert isinstance(self._controller, StepController)  # `by_step` says so
        try:
            percent = self._cut(_percent("of_step", self._controller.of_step(step)), step.percent)
        except Exception as error:
            self._fault("of_step", error)
        return -int(-percent // 1)

    def _cut(self, percent: float, before: float) -> float:
        if percent == before:
            return percent
        return min(max(percent, self._config.floor_percent), self._config.ceiling_percent)

    def _fault(self, method: str, error: Exception) -> None:
        self._num_faults += 1
        if self._num_faults.bit_count() == 1:
            log.error(
                "controller %s: %s failed, for the %dth time; algorithm2 goes on: %s",
                self.name,
                method,
                self._num_faults,
                f"{type(error).__name__}: {error}",
            )


def _checked(decision: Decision) -> Decision:
    if not isinstance(decision, Decision):
        raise TypeError(f"it returned {decision!r}; it must return a Decision")
    return Decision(
        _percent("prefill_percent", decision.prefill_percent),
        _percent("decode_percent", decision.decode_percent),
        float(decision.ttft_p90_s),
        float(decision.itl_p90_s),
    )


def _percent(name: str, percent: float) -> float:
    if not 0 <= percent <= 100:  # written so that NaN fails
        raise ValueError(f"{name} is {percent!r}; it must be between 0 and 100")
    return float(percent)
