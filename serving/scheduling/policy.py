"""Scheduling policies: which step runs next, who is in it first, who gives way.

A policy only chooses. The scheduler holds queues, slots and pages, checks the choice and builds the
step, so that no policy can lose a request; one that raises or chooses what is not there is passed
over, step by step, for `Fcfs`. Write your own as a class with the methods of `Policy` and name it
in the settings: `engine.policy: my_module:MyPolicy`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

from serving import plugins
from serving.plan import Phase
from serving.request import Priority

if TYPE_CHECKING:
    from serving.scheduling.sequence import SequenceState

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
Order = Sequence[Sequence[Priority]]
"""Groups of classes: those of one group stand in one queue, by rank; the first group goes first."""
TOGETHER: Order = ((LS, BE),)
LS_FIRST: Order = ((LS,), (BE,))
ONLY_LS: Order = ((LS,),)


class RequestView:
    """What a policy sees of a request; it cannot change it."""

    __slots__ = ("_sequence",)

    def __init__(self, sequence: "SequenceState") -> None:
        self._sequence = sequence

    @property
    def request_id(self) -> str:
        """As its caller named it."""
        return self._sequence.request.request_id

    @property
    def priority(self) -> Priority:
        """Its class; a best-effort request that has waited too long counts as the other."""
        return self._sequence.priority

    @property
    def arrived_at(self) -> float:
        """Seconds of the engine's clock."""
        return self._sequence.arrived_at

    @property
    def deadline_at(self) -> float:
        """Its caller's deadline, infinity without one."""
        timeout_s = self._sequence.request.timeout_s
        return math.inf if timeout_s is None else self._sequence.arrived_at + timeout_s

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompt."""
        return len(self._sequence.prompt)

    @property
    def num_tokens(self) -> int:
        """New tokens that it has got."""
        return len(self._sequence.tokens)

    @property
    def max_new_tokens(self) -> int:
        """New tokens that it may get."""
        return self._sequence.max_new_tokens

    def same_as(self, other: object) -> bool:
        """Whether another view is of the same request."""
        return isinstance(other, RequestView) and other._sequence is self._sequence

    def __repr__(self) -> str:
        """Class and id."""
        return f"RequestView({self.priority.value}, {self.request_id!r})"


class RequestViews(Sequence[RequestView]):
    """A queue as a policy sees it; views are made as they are looked at."""

    __slots__ = ("_sequences",)

    def __init__(self, sequences: "Sequence[SequenceState]") -> None:
        self._sequences = sequences

    def __len__(self) -> int:
        """Requests in it."""
        return len(self._sequences)

    @overload
    def __getitem__(self, index: int) -> RequestView: ...
    @overload
    def __getitem__(self, index: slice) -> "RequestViews": ...
    def __getitem__(self, index: int | slice) -> "RequestView | RequestViews":
        """By place in the queue."""
        if isinstance(index, slice):
            return RequestViews(self._sequences[index])
        return RequestView(self._sequences[index])


class BatchView(NamedTuple):
    """A step that was begun and whose last layers are not launched yet."""

    phase: Phase
    next_layer: int
    has_ls: bool
    num_rows: int
    num_parks: int  # times that another step went before its next layers
    parked: bool  # False: its layers are the newest on the device
    index: int


class Company(NamedTuple):
    """What makes a prefill step worth its fixed cost beside rows that decode."""

    tokens: float  # of prompts that wait: enough for a step of their own
    wait_s: float  # that the first of them may have waited


@dataclass(frozen=True)
class View:
    """What a policy decides by. Requests that are in a step under way are in no queue."""

    now: float
    max_batch: int  # rows a decode step
    ls_prefill: Sequence[RequestView]
    be_prefill: Sequence[RequestView]
    ls_decode: Sequence[RequestView]
    be_decode: Sequence[RequestView]
    can_prefill: Mapping[Priority, bool]  # whether the first in line has slot and pages
    under_way: Sequence[BatchView]  # in the order in which they were begun
    last_phase: Phase  # of the layers launched last
    itl_slack_s: float
    """What would be left of running requests' ITL objective if a prefill step went first; negative:
    their next token would come late."""
    may_park: bool  # False: best effort has had less than its share of the device
    company: Company | None = None
    """What a prompt had better wait for; None: for nothing, since few rows decode, best effort is
    there, a prompt is begun, or the settings say so."""
    waiting_tokens: int = 0  # of prompts in line that one step could hold
    oldest_s: float = 0.0  # how long the first of them has waited

    @property
    def in_company(self) -> bool:
        """Whether a prefill step would run now, or had better wait for more prompts."""
        if self.company is None:
            return True
        return self.waiting_tokens >= self.company.tokens or self.oldest_s >= self.company.wait_s

    @property
    def prefills_turn(self) -> bool:
        """Prefill and decode take turns where there is both and no time to spare."""
        running = self.ls_decode or self.be_decode
        running = running or any(b.phase is Phase.DECODE for b in self.under_way)
        return not running or self.last_phase is Phase.DECODE or self.itl_slack_s >= 0


class Choice(NamedTuple):
    """The next layers to launch: of a new step, or of one under way."""

    phase: Phase | None = None  # of a new step
    order: Order = TOGETHER  # who is in it, and who first
    resume: int | None = None  # `BatchView.index` of the step that goes on

    @classmethod
    def go_on(cls, batch: BatchView) -> "Choice":
        """With a step under way."""
        return cls(resume=batch.index)


class Policy(Protocol):
    """What a scheduler asks. Views are immutable, and methods change nothing they are given.

    A policy that never puts one step before the next layers of another says so by an attribute
    `parks = False`: steps are launched whole then.
    """

    def rank(self, request: RequestView) -> Any:
        """Sort key in the queue of its class; the smallest is served first."""
        ...

    def choose(self, view: View) -> Choice | None:
        """What runs next. Asked between any two launches; None leaves it to the scheduler."""
        ...

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        """Who is recomputed later when pages run out; `running` is not empty."""
        ...


class Fcfs:
    """First come, first served, whatever the class (the paper's scheduler).

    Prefill goes first, since a first token is what a new caller waits for; but between two prefill
    steps the running sequences get a decode step, so that a burst cannot stall them, unless their
    ITL objective has room for one prefill step more.
    """

    order: Order = TOGETHER
    parks = False

    def rank(self, request: RequestView) -> Any:
        """By arrival; one that was evicted keeps its place."""
        return request.arrived_at

    def choose(self, view: View) -> Choice:
        """Finishes what was begun."""
        if view.under_way:
            return Choice.go_on(view.under_way[0])
        if any(view.can_prefill.values()) and view.prefills_turn and view.in_company:
            return Choice(Phase.PREFILL, self.order)
        return Choice(Phase.DECODE, self.order)

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        """The one that came last."""
        return max(running, key=lambda request: request.arrived_at)


class Edf(Fcfs):
    """Earliest deadline first, whatever the class; those without one last, by arrival."""

    def rank(self, request: RequestView) -> Any:
        """By deadline."""
        return request.deadline_at, request.arrived_at


class LsFirst(Fcfs):
    """Latency-sensitive requests first; their prompts park any step that holds none (QLLM).

    What was parked goes before new best-effort work. With one class alone it is `Fcfs`.
    """

    order: Order = LS_FIRST
    parks = True
    max_parks = 2  # of one step

    def choose(self, view: View) -> Choice:
        """See Policy."""
        begun = next((b for b in view.under_way if b.phase is Phase.PREFILL and b.has_ls), None)
        if begun is not None:
            return Choice.go_on(begun)
        if not view.under_way:
            return super().choose(view)
        oldest = view.under_way[0]
        active = next((b for b in view.under_way if not b.parked), None)
        # A best-effort prefill that runs has taken the turn that the prompt waits for.
        turn = view.prefills_turn or (active is not None and active.phase is Phase.PREFILL)
        parkable = view.may_park and all(b.num_parks < self.max_parks for b in view.under_way)
        if view.can_prefill[LS] and turn and parkable:
            return Choice(Phase.PREFILL, self.order)
        if active is not None:
            return Choice.go_on(active)
        if view.ls_decode and view.last_phase is Phase.PREFILL:
            # Running requests get their turn; rows that meet a parked step's layer join it.
            together = any(b.phase is Phase.DECODE for b in view.under_way)
            return Choice(Phase.DECODE, ONLY_LS if together else self.order)
        return Choice.go_on(oldest)


class Qllm(Fcfs):
    """QLLM's Algorithm 1 as it stands: whoever waits of the latency-sensitive parks all others."""

    order: Order = LS_FIRST
    parks = True

    def choose(self, view: View) -> Choice:
        """With B the largest batch: LS decode of B rows, LS prefill, LS decode, BE decode, BE
        prefill; each filled up with best effort of the same phase.
        """
        with_ls = [b for b in view.under_way if b.has_ls]
        if with_ls:
            return Choice.go_on(with_ls[-1])
        if len(view.ls_decode) >= view.max_batch:
            return Choice(Phase.DECODE, ONLY_LS)
        if view.can_prefill[LS]:
            return Choice(Phase.PREFILL, self.order)
        if view.ls_decode:
            return Choice(Phase.DECODE, self.order)
        if view.under_way:
            return Choice.go_on(view.under_way[-1])
        return Choice(Phase.DECODE if view.be_decode else Phase.PREFILL, self.order)


POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "edf": Edf, "ls_first": LsFirst, "qllm": Qllm}


def make_policy(name: str) -> Policy:
    """A policy by its name, or by `module:Class`. Raises ValueError for one that is not there."""
    return plugins.make("policy", name, POLICIES, ["rank", "choose", "victim"])
