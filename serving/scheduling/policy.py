"""Scheduling policies: which step runs next, which requests go first, and which are evicted.

A policy only chooses. The scheduler holds queues, slots and pages, checks the choice and builds the
step, so that no policy can lose a request. Whenever a policy raises or makes an invalid choice,
`Fcfs` decides instead (`GuardedPolicy`). To use your own, write a class with the methods of
`Policy` and name it in the settings: `engine.policy: my_module:MyPolicy`.
"""

import math
import operator
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

from serving.errors import shown
from serving.plan import Phase
from serving.request import Priority
from serving.settings import plugins

if TYPE_CHECKING:
    from serving.scheduling.sequence import SequenceState


LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
Order = Sequence[Sequence[Priority]]
"""Groups of classes. The classes of a group are queued together, by rank; groups go in order."""
TOGETHER: Order = ((LS, BE),)
LS_FIRST: Order = ((LS,), (BE,))
ONLY_LS: Order = ((LS,),)


class RequestView:
    """A read-only view of a request for policies."""

    __slots__ = ("_sequence",)

    def __init__(self, sequence: "SequenceState") -> None:
        self._sequence = sequence

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._sequence.request.request_id

    @property
    def priority(self) -> Priority:
        """Its class; best effort that has waited too long counts as latency-sensitive."""
        return self._sequence.priority

    @property
    def arrived_at(self) -> float:
        """When it arrived, in seconds of the engine's clock."""
        return self._sequence.arrived_at

    @property
    def deadline_at(self) -> float:
        """Its deadline by its timeout; infinity without one."""
        timeout_s = self._sequence.request.timeout_s
        return math.inf if timeout_s is None else self._sequence.arrived_at + timeout_s

    @property
    def num_prompt_tokens(self) -> int:
        """The number of prompt tokens."""
        return len(self._sequence.prompt)

    @property
    def num_tokens(self) -> int:
        """The number of tokens generated so far."""
        return len(self._sequence.tokens)

    @property
    def max_new_tokens(self) -> int:
        """The limit of generated tokens."""
        return self._sequence.max_new_tokens

    def same_as(self, other: object) -> bool:
        """Returns whether `other` is a view of the same request."""
        return isinstance(other, RequestView) and other._sequence is self._sequence

    def __repr__(self) -> str:
        """Returns class and id."""
        return f"RequestView({self.priority.value}, {self.request_id!r})"


class RequestViews(Sequence[RequestView]):
    """A read-only view of a queue for policies; request views are made on access."""

    __slots__ = ("_sequences",)

    def __init__(self, sequences: "Sequence[SequenceState]") -> None:
        self._sequences = sequences

    def __len__(self) -> int:
        """Returns the number of requests in the queue."""
        return len(self._sequences)

    @overload
    def __getitem__(self, index: int) -> RequestView: ...
    @overload
    def __getitem__(self, index: slice) -> "RequestViews": ...
    def __getitem__(self, index: int | slice) -> "RequestView | RequestViews":
        """Returns the request, or the slice of requests, at a place in the queue."""
        if isinstance(index, slice):
            return RequestViews(self._sequences[index])
        return RequestView(self._sequences[index])


class BatchView(NamedTuple):
    """A view of a step whose first layers were launched, but not its last ones."""

    phase: Phase
    next_layer: int
    has_ls: bool
    num_rows: int
    num_parks: int  # how often another step was launched before its next layers
    parked: bool  # False: its layers are the newest on the device
    index: int


class Company(NamedTuple):
    """When a prefill step is worth its fixed cost while rows decode: any limit suffices."""

    tokens: float  # waiting prompt tokens that justify a step
    wait_s: float  # how long the first waiting prompt may wait
    total_s: float = math.inf  # how long all waiting prompts may wait together


@dataclass(frozen=True)
class View:
    """The state that a policy decides by. Queues exclude requests in a step that is under way."""

    now: float
    max_batch: int  # rows a decode step
    ls_prefill: Sequence[RequestView]
    be_prefill: Sequence[RequestView]
    ls_decode: Sequence[RequestView]
    be_decode: Sequence[RequestView]
    can_prefill: Mapping[Priority, bool]  # whether the first in line can get a slot and pages
    under_way: Sequence[BatchView]  # in the order in which they were begun
    last_phase: Phase  # of the layers launched last
    itl_slack_s: float
    """What would be left (s) of running requests' ITL objective if a prefill step went first; if
    negative, their next token would be late.
    """
    may_park: bool  # False: best effort has had less than its share of the device
    company: Company | None = None
    """What a prompt should wait for; None: nothing, since few rows decode, there is best effort, a
    prompt has been begun, a step could hold no more, or the settings say so.
    """
    waiting_tokens: int = 0  # of prompts in line that one step could hold
    oldest_s: float = 0.0  # how long the first of them has waited
    waited_s: float = 0.0  # how long those that have a slot have waited for company, together

    @property
    def in_company(self) -> bool:
        """Whether a prefill step should run now; False: it should wait for more prompts."""
        if self.company is None:
            return True
        tokens, wait_s, total_s = self.company
        enough = self.waiting_tokens >= tokens or self.waited_s >= total_s
        return enough or self.oldest_s >= wait_s

    @property
    def prefills_turn(self) -> bool:
        """Whether a prefill step may go next.

        Prefill and decode alternate if there is work for both, unless the ITL objective has slack.
        """
        running = self.ls_decode or self.be_decode
        running = running or any(b.phase is Phase.DECODE for b in self.under_way)
        return not running or self.last_phase is Phase.DECODE or self.itl_slack_s >= 0


class Choice(NamedTuple):
    """The next layers to launch: of a new step, or of one under way."""

    phase: Phase | None = None  # of a new step
    order: Order = TOGETHER  # which classes are in it, and which go first
    resume: int | None = None  # `BatchView.index` of the step that goes on

    @classmethod
    def go_on(cls, batch: BatchView) -> "Choice":
        """Chooses to continue a step that is under way."""
        return cls(resume=batch.index)


class Policy(Protocol):
    """The interface of policies. Views are immutable, and methods must not change their arguments.

    A policy that never parks a step (launches another before its next layers) should have the
    attribute `parks = False`; then steps are launched whole.
    """

    def rank(self, request: RequestView) -> Any:
        """Returns the sort key in the queue of its class; the smallest is served first."""
        ...

    def choose(self, view: View) -> Choice | None:
        """Returns what runs next. Called before each launch; None leaves the choice to `Fcfs`."""
        ...

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        """Returns which request to evict (and recompute later) when pages run out.

        `running` is not empty.
        """
        ...


class Fcfs:
    """First come, first served, whatever the class (the paper's scheduler).

    Prefill goes first, since new requests wait for their first token. But between two prefill steps
    the running sequences get a decode step, so that a burst cannot stall them, unless their ITL
    objective leaves time for another prefill step.
    """

    order: Order = TOGETHER
    parks = False

    def rank(self, request: RequestView) -> Any:
        """Orders by arrival; an evicted request keeps its place."""
        return request.arrived_at

    def choose(self, view: View) -> Choice:
        """Continues a step under way; otherwise chooses prefill or decode."""
        if view.under_way:
            return Choice.go_on(view.under_way[0])
        if any(view.can_prefill.values()) and view.prefills_turn and view.in_company:
            return Choice(Phase.PREFILL, self.order)
        return Choice(Phase.DECODE, self.order)

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        """Returns the request that arrived last."""
        return max(running, key=lambda request: request.arrived_at)


class Edf(Fcfs):
    """Earliest deadline first, whatever the class; requests without a deadline last, by arrival."""

    def rank(self, request: RequestView) -> Any:
        """Orders by deadline, then by arrival."""
        return request.deadline_at, request.arrived_at


class LsFirst(Fcfs):
    """Latency-sensitive requests first; their prompts park any step without them (QLLM).

    Parked steps go before new best-effort work. With only one class this equals `Fcfs`.
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
        # A running best-effort prefill took the turn that the latency-sensitive prompt waits for.
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
    """QLLM's Algorithm 1 as published: a waiting latency-sensitive request parks all other
    steps.
    """

    order: Order = LS_FIRST
    parks = True

    def choose(self, view: View) -> Choice:
        """Chooses, in this order (B: the largest batch): LS decode of B rows, LS prefill, LS
        decode, BE decode, BE prefill; each filled up with best effort of the same phase.
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
    """Makes a policy by its name or `module:Class`. Raises ValueError for an unknown one."""
    return plugins.make("policy", name, POLICIES, ["rank", "choose", "victim"])


class GuardedPolicy:
    """Wraps a policy; whatever it returns, does or raises, a valid choice results."""

    def __init__(self, policy: Policy, slow_s: float = math.inf) -> None:
        """Calls that take longer than `slow_s` are logged, of a policy that is not jmoe's."""
        self.policy = policy
        self.parks = bool(getattr(policy, "parks", True))
        name = f"policy {type(policy).__qualname__}"
        slow_s = math.inf if type(policy) in POLICIES.values() else slow_s
        self._guard = plugins.Guard(name, "first come first served", slow_s)

    def insert(self, queue: "list[SequenceState]", sequence: "SequenceState") -> None:
        """Inserts a sequence into a queue by the policy's rank; by arrival if that fails."""
        self._by_rank(lambda rank: insort(queue, sequence, key=rank))

    def sorted(self, sequences: "list[SequenceState]") -> "list[SequenceState]":
        """Returns the sequences by the policy's rank; by arrival if that fails."""
        if len(sequences) < 2:
            return sequences
        return self._by_rank(lambda rank: sorted(sequences, key=rank))

    def _by_rank[T](self, ordered: Callable[[Callable[["SequenceState"], Any]], T]) -> T:
        return self._guard.call("rank", lambda: ordered(self._rank), lambda: ordered(_arrived_at))

    def choose(self, view: View) -> Choice:
        """Returns what runs next; chosen by `Fcfs` if the policy fails or makes an invalid
        choice.
        """
        return self._guard.call(
            "choose",
            lambda: _checked(self.policy.choose(view) or Fcfs().choose(view), view),
            lambda: Fcfs().choose(view),
        )

    def victim(self, running: "list[SequenceState]") -> "SequenceState":
        """Returns the sequence to evict; the one that arrived last if the policy fails."""
        return self._guard.call(
            "victim", lambda: self._victim(running), lambda: max(running, key=_arrived_at)
        )

    def _rank(self, sequence: "SequenceState") -> Any:
        rank = self.policy.rank(RequestView(sequence))
        if _has_nan(rank):
            raise ValueError(f"rank is {shown(rank)}; NaN has no place in an order")
        return rank

    def _victim(self, running: "list[SequenceState]") -> "SequenceState":
        chosen = self.policy.victim(RequestViews(running))
        for sequence in running:
            if RequestView(sequence).same_as(chosen):
                return sequence
        raise ValueError(f"victim is {shown(chosen)}, which is not one of those it may be")


def _arrived_at(sequence: "SequenceState") -> float:
    return sequence.arrived_at


def _has_nan(rank: Any) -> bool:
    if isinstance(rank, tuple | list):
        return any(map(_has_nan, rank))
    return bool(rank != rank)


def _checked(choice: Choice, view: View) -> Choice:
    """Returns the choice in its own types. Raises ValueError or TypeError for an invalid one."""
    if choice.resume is not None:
        index, count = operator.index(choice.resume), len(view.under_way)
        if isinstance(choice.resume, bool) or not 0 <= index < count:
            raise ValueError(f"resume is {shown(choice.resume)}; {count} steps are under way")
        return Choice(resume=index)
    if not isinstance(choice.phase, Phase):
        raise ValueError(f"phase is {shown(choice.phase)}; it must be a Phase")
    if not isinstance(choice.order, Sequence):
        raise ValueError(f"order is {shown(choice.order)}; it must be a sequence of groups")
    order = tuple(map(tuple, choice.order))
    classes = [one for group in order for one in group]
    if unknown := [one for one in classes if not isinstance(one, Priority)]:
        raise ValueError(f"order has {shown(unknown[0])}; it must hold groups of Priority")
    if len(set(classes)) < len(classes):
        raise ValueError(f"order is {shown(order)}; a class may be in one group only")
    return Choice(choice.phase, order)
