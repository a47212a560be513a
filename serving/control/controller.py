"""What a controller of thresholds sees and says, and who there is.

Write your own as a class with a method `decide`, made with the settings (`SalcConfig`), and name it
in them: `engine.salc.controller: my_module:MyController`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from serving.config import SalcConfig
from serving.plan import Phase
from serving.scheduling.policy import Company
from serving.scheduling.step_time import StepTimeModel

Loss = Callable[[Phase], Sequence[float]]
"""Returns the expected loss of a phase's token under each threshold 0 to 100, in nats."""


class PhaseSeen(NamedTuple):
    """One phase: first tokens of the latency-sensitive class, or the others."""

    threshold_percent: float  # in force
    slo_s: float
    p90_s: float | None
    """Of samples that lie wholly under that threshold; None: too few. It counts requests that still
    wait; infinite for decode where they wait for a slot, longer than the TTFT objective allows."""
    late_share: float | None = None  # of the window's samples, under whatever threshold; None: few


class Load(NamedTuple):
    """The load of the engine and the make-up of its steps; means are recent ones."""

    num_running: int = 0  # latency-sensitive requests that have a slot
    num_waiting: int = 0  # and that have none
    num_prefilling: int = 0  # that have a slot and no first token yet
    max_running: int = 1
    arrivals_per_s: float = 0.0
    prompt_tokens: float = 0.0  # of a request; mean
    new_tokens: float = 0.0  # of a request that finished; mean
    prefill_tokens: float = 0.0  # of a prefill step; mean
    exempt_share: float = 0.0  # of the rows that steps computed
    company: Company | None = None  # what prompts wait for just now


class Seen(NamedTuple):
    """Everything that a controller decides by."""

    now: float  # seconds of the engine's clock
    prefill: PhaseSeen
    decode: PhaseSeen
    load: Load
    times: StepTimeModel
    loss: Loss | None = None  # None: not known
    bounds: tuple[float, float] = (0.0, 100.0)  # floor and ceiling, to which thresholds are clipped


class StepSeen(NamedTuple):
    """A step that is about to be launched."""

    now: float
    phase: Phase
    size: int  # tokens of a prefill step, rows of a decode step
    num_decoding: int  # rows that wait for a token, in this step or for its end
    since_s: float  # that they will have waited as it begins
    exempt_share: float  # of its rows
    percent: float  # the threshold decided for its phase
    itl_slo_s: float
    times: StepTimeModel
    load: Load = Load()  # counts are now's, the rest is that of the last decision


class Decision(NamedTuple):
    """Thresholds until the next decision, and the P90 latencies that are expected under them."""

    prefill_percent: float
    decode_percent: float
    ttft_p90_s: float = math.nan  # NaN: nothing is expected
    itl_p90_s: float = math.nan


class Controller(Protocol):
    """Asked every `engine.salc.interval_s` while it is on."""

    def decide(self, seen: Seen) -> Decision:
        """Returns thresholds in percent; they are clipped to `seen.bounds`."""
        ...


@runtime_checkable
class StepController(Controller, Protocol):
    """One that is asked again before each step that holds a latency-sensitive request."""

    def of_step(self, step: StepSeen) -> float:
        """Returns the threshold of this step, in percent, in place of the one decided for its
        phase.
        """
        ...


Make = Callable[[SalcConfig], Controller]
