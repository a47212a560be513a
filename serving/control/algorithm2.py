"""SLO-aware latency control: the paper's Algorithm 2, on each phase for itself."""

from serving.config import SalcConfig
from serving.control.controller import Decision, PhaseSeen, Seen


class Algorithm2:
    """Moves each threshold so that its phase's P90 stays between warning line and SLO.

    See BrownoutServe, Algorithm 2. Thresholds are never rounded.
    """

    def __init__(self, config: SalcConfig) -> None:
        self._config = config

    def decide(self, seen: Seen) -> Decision:
        """See Controller. It expects nothing."""
        return Decision(self.move(seen.prefill), self.move(seen.decode))

    def move(self, phase: PhaseSeen) -> float:
        """Takes one step of the algorithm. Without data nothing changes."""
        config, percent = self._config, phase.threshold_percent
        if phase.p90_s is None:
            return percent
        if phase.p90_s < phase.slo_s * config.warning_factor:
            percent += config.increment_percent
        elif phase.p90_s > phase.slo_s:
            percent *= config.shrink_ratio
        return min(max(percent, config.floor_percent), config.ceiling_percent)
