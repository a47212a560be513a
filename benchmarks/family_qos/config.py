"""What is played, and against what."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

NAMES = ("base", "cipher", "nines", "backwards")
"""Models that `python -m training.family --restore DIR` writes, in the order they are taken."""


class Alternative(NamedTuple):
    """One way to serve several models on one machine."""

    name: str
    words: str
    color: str


ALTERNATIVES = (
    Alternative("alone", "one model alone", "#666666"),
    Alternative("family", "one pool, all sets resident", "#1b7f5c"),
    Alternative("half", "one pool, half of the sets resident", "#7fbf7b"),
    Alternative("time", "time sharing: one model at a time", "#d95f02"),
    Alternative("space", "space sharing: a part of the machine each", "#7570b3"),
)


@dataclass(frozen=True)
class QosConfig:
    """Settings of a run. Loads are shares of the rate at which one model alone is saturated.

    Raises ValueError for settings that leave nothing to play.
    """

    family: Path  # what `python -m training.family --restore` wrote
    out: Path = Path("out")  # server logs and maps
    sizes: tuple[int, ...] = (2, 4)  # models that are served
    loads: tuple[float, ...] = (0.3, 0.6, 0.9, 1.2)
    duration_s: float = 5.0  # of arrivals, for each alternative, load and round
    rounds: int = 2  # a trace each; figures are over all of them
    singles: int = 80  # requests one at a time
    capacity_s: float = 5.0  # of full batches of one model alone
    quantum_s: float = 0.5  # of a model's term, where time is shared
    share: float = 75.0  # percent of what sharing experts can save
    rows: int = 16_384  # tokens a model that choose the shared experts
    slots: int = 32  # sequences decoded together by a server that has the machine to itself
    threads: int = 0  # of XLA in such a server; 0: all cores but one, which is the host's
    prompt_tokens: int = 20  # the paper's, and so are the output's
    output_tokens: int = 25
    seed: int = 0
    server_args: tuple[str, ...] = ()  # more flags of every server
    startup_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Checks ranges, and that the models are there."""
        for size in self.sizes:
            if not 2 <= size <= len(NAMES) or size % 2:
                raise ValueError(f"sizes has {size}; it must be an even number up to {len(NAMES)}")
        least = {"rounds": 1, "singles": 1, "rows": 1, "prompt_tokens": 1, "output_tokens": 2}
        least |= {"slots": 2 * max(self.sizes, default=1), "threads": 0, "seed": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {bound} or more")
        for name in ("duration_s", "capacity_s", "quantum_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not self.sizes or not self.loads or not all(load > 0 for load in self.loads):
            raise ValueError(f"sizes {self.sizes} and loads {self.loads} must be numbers above 0")
        for name in NAMES[: max(self.sizes)]:
            if not (self.family / name / "config.json").exists():
                raise ValueError(
                    f"{self.family} has no {name}; `python -m training.family --restore "
                    f"{self.family}` writes the models"
                )
