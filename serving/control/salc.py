"""SLO-aware latency control: the paper's Algorithm 2, one controller a phase."""

from serving.config import SalcConfig


class Salc:
    """Moves one threshold so that a phase's P90 latency stays between warning line and SLO.

    `threshold_percent` is a float and never rounded here; `percent` is what a step may use.
    """

    def __init__(self, config: SalcConfig, threshold_percent: float) -> None:
        self.config = config
        self.threshold_percent = float(threshold_percent)

    @property
    def percent(self) -> int:
        """The threshold in whole percent, rounded up: a step never degrades more than it allows."""
        return -int(-self.threshold_percent // 1)

    def update(self, p90_s: float | None, slo_s: float) -> bool:
        """One step of Algorithm 2. Without data (None) nothing changes. True if it changed."""
        if p90_s is None:
            return False
        before, config = self.threshold_percent, self.config
        if p90_s < slo_s * config.warning_factor:
            self.threshold_percent += config.increment_percent
        elif p90_s > slo_s:
            self.threshold_percent *= config.shrink_ratio
        self.threshold_percent = min(
            max(self.threshold_percent, config.floor_percent), config.ceiling_percent
        )
        return self.threshold_percent != before
