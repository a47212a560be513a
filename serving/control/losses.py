"""What thresholds are expected to cost each model of a server, and the lowest within a bound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from jmoe.brownout import strategy_code
from jmoe.expected_loss import Kind
from pallas_kernels.routing import BY_WEIGHT, OWN, STRATEGIES
from serving.errors import InvalidRequest, shown

Curve = Sequence[float]
"""Expected loss under each threshold 0 to 100, in nats a token."""
CurvesOf = Mapping[Kind, Curve]
"""Of a model, by kind of brownout."""
Curves = Sequence[CurvesOf]
"""Of a server's models, in their order."""
EXACT: Curve = (0.0,) * 101


class Losses:
    """Curves of a server's models by kind of brownout. None of a user's own strategy is known."""

    def __init__(self, names: Sequence[str], curves: Curves = (), *, levels: bool) -> None:
        """`curves` are in the order of `names`; none: nothing is known of any."""
        self._names, self._curves = names, list(curves) or [{}] * len(names)
        self._levels = levels
        self.curves = cache(self._find)
        self.highest = cache(self._highest)
        self.least_percent = cache(self._least)

    def put(self, number: int, curves: CurvesOf | None) -> None:
        """Replaces a model's curves; None: it is gone, and the first one's count."""
        self._curves[number] = self._curves[0] if curves is None else curves
        for known in (self.curves, self.highest, self.least_percent):
            known.cache_clear()

    def _find(self, code: int, way: int) -> tuple[Curve | None, ...]:
        """Returns each model's curve under a strategy's code; None where it is not known."""
        strategy, keep = code % BY_WEIGHT, "weight" if code >= BY_WEIGHT else "visits"
        if not code:
            return (EXACT,) * len(self._names)
        if code == OWN:
            return (None,) * len(self._names)
        kind = Kind(0 if strategy == STRATEGIES["full"] else way, keep, self._levels)
        return tuple(curves.get(kind) for curves in self._curves)

    def _highest(self, code: int, way: int) -> Curve | None:
        """Returns the highest expected loss of any model; None where one is not known."""
        found = self.curves(code, way)
        return None if None in found else tuple(map(max, zip(*filter(None, found), strict=True)))

    def _least(self, code: int, way: int, most: float) -> int:
        """Returns the lowest threshold under which every model's expected loss is at most `most`,
        100 where one is not known. `way` -1, while ways change: under every way that is known.
        """
        ways = {kind.way for of_model in self._curves for kind in of_model} if way < 0 else {way}
        found = [curve for each in ways for curve in self.curves(code, each) if way >= 0 or curve]
        if not found or None in found:
            return 100
        return max(next(t for t in range(101) if curve[t] <= most) for curve in found if curve)

    def missing(self, strategy: str, way: int, keep: str) -> str:
        """Returns which model has no curve of this brownout; empty if all have."""
        code = strategy_code(strategy, keep)
        lacking = [n for n, c in zip(self._names, self.curves(code, way), strict=True) if c is None]
        if not lacking:
            return ""
        if code == OWN:
            return f"what the strategy {shown(strategy)} costs is not known"
        kind = Kind(0 if strategy == "full" else way, keep, self._levels)
        of = f"model {shown(lacking[0])}" if lacking[0] else "the model"
        flags = f"--keep {keep}{' --levels' * self._levels}"
        return (
            f"{of} has no expected loss of {kind}; `jmoe evaluate {flags}` measures and writes it"
        )


@dataclass(frozen=True)
class LossBound:
    """A bound on expected loss, 0 for none, and the brownout that has to keep it."""

    most: float
    strategy: str
    keep: str
    way: int

    def check(self, losses: Losses) -> None:
        """Raises InvalidRequest where it bounds what nobody has measured of one of the models."""
        missing = self.most and losses.missing(self.strategy, self.way, self.keep)
        if missing:
            raise InvalidRequest(f"max_expected_loss is {self.most:g}, and {missing}")
