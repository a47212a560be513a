"""How to split devices between attention and experts, and whether asynchrony pays at all.

In asynchronous expert parallelism (AMoE) a device has the attention of all layers, or experts of
all layers (its section 3.3; its evaluation sets four against four by hand, section 5.1). Here each
split gets a forecast from the times of its stages, and so do the synchronous ways on the same
devices. All of it is arithmetic on the host; how near it comes to the simulator is in
docs/async-expert-parallelism.md.

Letters: A attention and E expert workers on D devices, N tokens in flight, L layers, K experts a
row.

**The forecast** of a split is its cycle C, the seconds in which a token passes a layer: N / (L C)
tokens a second. The *interval* i of a stage is the longest of what its device, its host and its
messages take. A worker that always finds rows runs C / i stages in a cycle, so that a stage has
i / C of the worker's rows: the shorter the cycle, the smaller the batches. A token's way through a
layer is two hosts, two stages and two messages, and at each of its two workers it waits for one
stage before its own. C is the cycle that is as long as this way.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jmoe.config import ModelConfig
from jmoe.display import seconds
from jmoe.parallel.cost import H200, NODE, Machine
from jmoe.parallel.stage_times import (
    Geometry,
    StageTimes,
    measured,
    roofline,
    sequences_that_fit,
)

COLLECTIVE_S, NETWORK_COLLECTIVE_S = 20e-6, 40e-6
"""Of a collective beside its bytes, in a node and beyond one. Assumed."""
HOST_COSTS = 5.0
"""A stage of all that a worker has must take so many times its host's cost. Simulated on 8 devices,
asynchrony made 1.0 to 1.4 times ideal synchronous where it does, and 0.75 at 2.3 times (part `host`
of `benchmarks.mesh aep`, at commit 13fc243c)."""
MARGIN = 1.1
"""A gain must be larger than the forecast's own error, which is 7 % on average at 8,192 tokens in
flight and more, and than the 5 % within which the simplest way is taken anyway."""
LATE_FROM, ENOUGH = 3.0, 20
"""Times its kind's median, from which a stage counts as late; and stages that make a median."""
MOST_DEVICES = 16
"""Beyond, the simulator sees batches fall into fragments that the forecast does not."""


@dataclass(frozen=True)
class Overheads:
    """What is neither a stage's own time nor its share of a link; seconds.

    The defaults are those of what is built, on two cores: a worker's loop has 0.6 to 1.3 ms a
    stage, and rows go through host memory and ZeroMQ at 1.3 GB/s (both measured); 47 us of ZeroMQ
    (measured) and 50 us more from one process to another, and 5 us of the thread that sends or
    takes a batch (both assumed).
    """

    attention_host_s: float = 1.3e-3
    expert_host_s: float = 0.6e-3
    latency_s: float = 100e-6
    message_s: float = 5e-6
    bytes_per_s: float = 1.3e9  # of a worker's rows in one direction; inf: the link's alone


DEFAULT_OVERHEADS, NO_OVERHEADS = Overheads(), Overheads(0.0, 0.0, 0.0, 0.0, inf)


class Late(NamedTuple):
    """A stage of any device, whatever the way, takes `factor` times as long with a probability of
    `share`, independently of all others.
    """

    factor: float = 1.0
    share: float = 0.0

    @classmethod
    def measured(cls, stages: Iterable[Sequence[float]]) -> "Late":
        """Returns how late stages were whose seconds are given, each with those of its kind: late
        is what takes `LATE_FROM` times their median or longer. Raises ValueError where no kind has
        `ENOUGH` stages that take any time; others are left out.
        """
        kinds = [np.array(kind) for kind in stages if len(kind) >= ENOUGH and np.median(kind) > 0]
        if not kinds:
            raise ValueError(f"it has no {ENOUGH} stages of one kind")
        times = np.concatenate([kind / np.median(kind) for kind in kinds])
        late = times[times >= LATE_FROM]
        return cls(float(late.mean()), len(late) / len(times)) if len(late) else cls()

    @property
    def mean(self) -> float:
        """The mean factor of a stage."""
        return 1 + (self.factor - 1) * self.share

    def last_s(self, fullest_s: float, other_s: float, num_devices: int) -> float:
        """Returns the mean of the time that the last of some devices takes for a stage, of which
        one takes `fullest_s` and the others `other_s`, if none is late.
        """
        late_s, on_time = max(fullest_s, self.factor * other_s), 1 - self.share
        none = on_time ** (num_devices - 1)
        return self.share * self.factor * fullest_s + on_time * (
            none * fullest_s + (1 - none) * late_s
        )


ON_TIME = Late()


@dataclass(frozen=True)
class Deployment:
    """A model on D devices that decodes N sequences. Raises ValueError for a number that is none.

    An imbalance is the fullest device's visits over the mean. Where rows are spread evenly it is 1.
    """

    geometry: Geometry
    num_devices: int
    in_flight: int
    times: StageTimes = field(repr=False)  # of up to `in_flight` rows
    device: Machine = H200
    context: float = 256.0  # tokens of KV a sequence
    overheads: Overheads = DEFAULT_OVERHEADS
    imbalance: float = 1.0  # of a layer, mean over layers
    imbalance_with_copies: float = 1.0  # with `spare_slots` copies on each device
    imbalance_over_layers: float = 1.0  # of expert workers, with copies, over all layers together
    spare_slots: int = 2  # for copies of busy experts, of a layer and device
    late: Late = ON_TIME

    def __post_init__(self) -> None:
        for name, least in (("num_devices", 2), ("in_flight", 1), ("spare_slots", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {least} or more")
        if not (isfinite(self.context) and self.context > 0):
            raise ValueError(f"context is {self.context}; it must be above 0")
        for name in ("imbalance", "imbalance_with_copies", "imbalance_over_layers"):
            if not 1 <= (value := getattr(self, name)) <= self.num_devices:
                wanted = f"it must be between 1 and the number of devices ({self.num_devices})"
                raise ValueError(f"{name} is {value}; {wanted}")
        for name, value in vars(self.overheads).items():
            if name == "bytes_per_s":
                if not value > 0:
                    raise ValueError(f"{name} is {value}; it must be above 0")
            elif not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be 0 or more")
        if not (1 <= self.late.factor < inf and 0 <= self.late.share <= 1):
            wanted = "a factor of 1 or more and a share between 0 and 1"
            raise ValueError(f"late is {tuple(self.late)}; it must be {wanted}")

    @classmethod
    def of(
        cls,
        cfg: ModelConfig,
        num_devices: int,
        in_flight: int,
        dtype_bytes: int = 2,
        *,
        device: Machine = H200,
        context: float = 256.0,
        stage_times: Path | None = None,
        overheads: Overheads = DEFAULT_OVERHEADS,
        imbalance: float = 1.0,
        imbalance_with_copies: float = 1.0,
        late: Late = ON_TIME,
    ) -> "Deployment":
        """Describes a model whose stages take what a roofline says, or a file
        (`stage_times.measured`).

        Over all layers together, expert workers are taken to be as uneven as a layer is with
        copies; where layers have different busy experts they are less so.

        Raises ValueError for a number that is none, or a file that holds no stage times.
        """
        geometry = Geometry.of(cfg.architecture, cfg, dtype_bytes)
        if stage_times is None:
            times = roofline(device, geometry, max(in_flight, 1), context)
        else:
            times = measured(stage_times, geometry, max(in_flight, 1))
        uneven = imbalance, imbalance_with_copies, imbalance_with_copies
        given = geometry, num_devices, in_flight, times, device, context, overheads
        return cls(*given, *uneven, late=late)

    @property
    def row_s(self) -> float:
        """Seconds of a row's bytes on a link."""
        return self.geometry.row_bytes / self.device.bandwidth(self.num_devices)

    @property
    def sent_row_s(self) -> float:
        """Seconds of a row's bytes between asynchronous workers."""
        return max(self.row_s, self.geometry.row_bytes / self.overheads.bytes_per_s)


class Forecast(NamedTuple):
    """Forecast of one split."""

    attention_devices: int
    expert_devices: int
    whole_attention_s: float  # a stage of all rows of an attention worker
    whole_experts_s: float  # a stage of all visits of the fullest expert worker
    attention_rows: int  # of a stage, as batches come to be
    expert_visits: int
    attention_s: float  # a stage of so many
    experts_s: float
    batches: float  # of attention stages that are under way at once, all workers together
    tokens_per_s: float
    itl_s: float
    sequences_that_fit: int  # KV beside the weights


class Advice(NamedTuple):
    """Which way to use, and why. Seconds and tokens a second are forecasts."""

    forecast: Forecast  # of the split that is taken
    synchronous_tokens_per_s: float
    copies_tokens_per_s: float  # synchronous with copies of busy experts (Libra)
    ratio: float  # asynchronous over the better one of the two
    pays: bool
    reason: str


class _Kind(NamedTuple):
    """Workers of one kind: tables by a stage's number of rows, from 1 up to all."""

    stage_s: Float[np.ndarray, "rows"]
    interval_s: Float[np.ndarray, "rows"]
    rows: float  # that a worker has in all

    def at(self, cycle_s: float) -> int:
        """Returns the index of the stage size with which a cycle has enough stages for all rows."""
        rate = np.arange(1, len(self.stage_s) + 1) / self.interval_s
        found = np.searchsorted(np.maximum.accumulate(rate), self.rows / cycle_s)
        return min(int(found), len(rate) - 1)


def distinct(picks: np.ndarray, parts: int) -> np.ndarray:
    """Returns how many of `parts` get any of so many picks, on average; all are equally likely."""
    return parts * (1 - (1 - 1 / parts) ** picks) if parts > 1 else np.minimum(picks, 1.0)


def forecast(deployment: Deployment, attention_devices: int) -> Forecast:
    """Forecasts `attention_devices` for attention and the others for experts.

    Raises ValueError for a split that leaves either without a device.
    """
    d, g, over = deployment, deployment.geometry, deployment.overheads
    ours, theirs = attention_devices, d.num_devices - attention_devices
    if not 1 <= ours < d.num_devices:
        wanted = f"it must be between 1 and {d.num_devices - 1}, so that experts have a device"
        raise ValueError(f"attention_devices is {ours}; {wanted}")
    attention, experts = _attention(d, ours, theirs), _experts(d, ours, theirs)
    fixed_s = over.attention_host_s + over.expert_host_s + 2 * (over.latency_s + over.message_s)

    def way_s(cycle_s: float) -> float:
        at = attention.at(cycle_s), experts.at(cycle_s)
        waits_s = attention.interval_s[at[0]] + experts.interval_s[at[1]]
        return fixed_s + float(attention.stage_s[at[0]] + experts.stage_s[at[1]] + waits_s)

    # Nobody passes a layer in less than whole batches take the busier kind of workers.
    cycle_s = _balance(way_s, float(max(attention.interval_s[-1], experts.interval_s[-1])))
    rows, visits = attention.at(cycle_s), experts.at(cycle_s)
    return Forecast(
        ours,
        theirs,
        float(attention.stage_s[-1]),
        float(experts.stage_s[-1]),
        rows + 1,
        visits + 1,
        float(attention.stage_s[rows]),
        float(experts.stage_s[visits]),
        d.in_flight / (rows + 1),
        d.in_flight / (g.num_layers * cycle_s),
        g.num_layers * cycle_s,
        sequences_that_fit(d.device, g, d.context, ours, theirs),
    )


def forecasts(deployment: Deployment) -> list[Forecast]:
    """Forecasts every split, the one with least attention first."""
    return [forecast(deployment, ours) for ours in range(1, deployment.num_devices)]


def _attention(d: Deployment, ours: int, theirs: int) -> _Kind:
    """Returns the stages of attention: rows go to experts on all their devices; the head is a part
    of every layer's stage.
    """
    rows = np.arange(1, ceil(d.in_flight / ours) + 1)
    head_s = (d.times.first_s[rows] - d.times.attention_s[rows]) / d.geometry.num_layers
    stage_s = (d.times.attention_s[rows] + head_s) * d.late.mean
    sent = rows * d.geometry.top_k
    interval_s = _interval_s(d, d.overheads.attention_host_s, stage_s, sent, ours, theirs)
    return _Kind(stage_s, interval_s, d.in_flight / ours)


def _experts(d: Deployment, ours: int, theirs: int) -> _Kind:
    """Returns the stages of the fullest expert worker, which has to keep up. Visits go back to all
    attention workers.
    """
    all_visits = d.in_flight * d.geometry.top_k
    own = min(all_visits / theirs * d.imbalance_over_layers, all_visits)
    visits = np.arange(1, ceil(own) + 1)
    held = _held(d, theirs, d.spare_slots)
    stage_s = d.times.experts_s(visits, distinct(visits, held)) * d.late.mean
    interval_s = _interval_s(d, d.overheads.expert_host_s, stage_s, visits, theirs, ours)
    return _Kind(stage_s, interval_s, own)


def _held(d: Deployment, workers: int, copies: int) -> int:
    """Returns the experts that a device has of a layer."""
    return min(d.geometry.num_experts, ceil(d.geometry.num_experts / workers) + copies)


def _interval_s(
    d: Deployment, host_s: float, stage_s: np.ndarray, sent: np.ndarray, here: int, there: int
) -> np.ndarray:
    """Returns the time of what a stage keeps busy longest: device, host, or a link.

    A link takes `message_s` for each worker that any of the `sent` rows goes to, or the time of
    their bytes; at the other kind of workers, which may be fewer, all these messages arrive.
    """
    link_s = np.maximum(distinct(sent, there) * d.overheads.message_s, sent * d.sent_row_s)
    return np.maximum(np.maximum(stage_s, host_s), link_s * max(1.0, here / there))


def _balance(way_s: Callable[[float], float], least_s: float) -> float:
    """Finds the cycle that is as long as its own way by bisection: a longer cycle has a shorter
    way.
    """
    low, high = least_s, max(way_s(least_s), least_s)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if way_s(middle) > middle else (low, middle)
    return high


def synchronous_tokens_per_s(deployment: Deployment, *, copies: bool = False) -> float:
    """Returns the rate of ideal synchronous expert parallelism: whole steps on all devices, no cost
    of a host.

    Each layer ends with its fullest device, by `imbalance`, or with copies (Libra) by
    `imbalance_with_copies`; where that is no better there are none.
    """
    d, g, devices = deployment, deployment.geometry, deployment.num_devices
    copies = copies and d.imbalance_with_copies < d.imbalance
    rows = ceil(d.in_flight / devices)
    even = d.in_flight * g.top_k / devices
    fullest = even * (d.imbalance_with_copies if copies else d.imbalance)
    visits = np.array([fullest, even])
    held = _held(d, devices, d.spare_slots if copies else 0)
    full_s, mean_s = d.times.experts_s(visits, distinct(visits, held)).tolist()
    one_way_s = float(exchange_s(even, visits[:1], devices, d.row_s, collective_s(devices))[0])

    def all_s(attention_s: float) -> float:
        return d.late.last_s(attention_s, attention_s, devices)

    attention_s, first_s = float(d.times.attention_s[rows]), float(d.times.first_s[rows])
    layer_s = d.late.last_s(full_s, mean_s, devices) + 2 * one_way_s + all_s(attention_s)
    return d.in_flight / (g.num_layers * layer_s + all_s(first_s) - all_s(attention_s))


def collective_s(num_devices: int) -> float:
    """Returns the seconds of a collective beside its bytes."""
    return COLLECTIVE_S if num_devices <= NODE else NETWORK_COLLECTIVE_S


def exchange_s(
    sent: float, fullest: np.ndarray, num_devices: int, row_s: float, collective_s: float
) -> np.ndarray:
    """Returns the seconds of a layer's rows one way: what a device sends, or what the fullest one
    receives, decides.
    """
    busiest = np.maximum(sent, fullest) * (1 - 1 / num_devices)
    return collective_s * (num_devices > 1) + busiest * row_s


def advise(deployment: Deployment) -> Advice:
    """Advises whether to use asynchronous expert parallelism, by which split, and why.

    Against it are, in this order: no split on which weights and KV fit; stages that take less than
    `HOST_COSTS` times their host; less than `MARGIN` times the better synchronous way; and more
    devices than the forecast holds for. Of the splits that remain the fastest is taken.
    """
    d, over = deployment, deployment.overheads
    every = forecasts(d)
    fit = [f for f in every if f.sequences_that_fit >= d.in_flight]
    large = [f for f in fit if min(_worth(f, over)) >= 1]
    best = max(large or fit or every, key=lambda f: f.tokens_per_s)
    plain = synchronous_tokens_per_s(d)
    copied = synchronous_tokens_per_s(d, copies=True)
    other, name = (copied, "synchronous with copies") if copied > plain else (plain, "synchronous")
    ratio = best.tokens_per_s / other
    split = f"{best.attention_devices} + {best.expert_devices}"
    of = "" if len(fit) == len(every) else ", of the splits that have room for the KV,"
    rates = f"{best.tokens_per_s:,.0f} tokens/s, {ratio:.2f} times the {other:,.0f} of {name}"
    if not fit:
        room = max(every, key=lambda f: f.sequences_that_fit)
        reason = f"KV of {d.in_flight:,} sequences fits on no split; most fit on "
        reason += f"{room.attention_devices} + {room.expert_devices}: {room.sequences_that_fit:,}"
    elif not large:
        reason = _too_short(best, over)
    elif ratio < MARGIN:
        reason = f"{split}{of} would make {rates}; {MARGIN:g} times are asked for"
    elif d.num_devices > MOST_DEVICES:
        reason = f"{split}{of} is forecast to make {rates}, but beyond {MOST_DEVICES} devices "
        reason += "batches fall into fragments, which the forecast does not see"
    else:
        reason = f"{split}{of} would make {rates}"
    return Advice(
        best,
        plain,
        copied,
        ratio,
        bool(large) and ratio >= MARGIN and d.num_devices <= MOST_DEVICES,
        reason,
    )


def _worth(found: Forecast, over: Overheads) -> tuple[float, float]:
    """Returns the time of stages over the least that they should take; infinite for a host at no
    cost.
    """
    attention_s = HOST_COSTS * over.attention_host_s
    experts_s = HOST_COSTS * over.expert_host_s
    return (
        found.whole_attention_s / attention_s if attention_s else inf,
        found.whole_experts_s / experts_s if experts_s else inf,
    )


def _too_short(found: Forecast, over: Overheads) -> str:
    attention, experts = _worth(found, over)
    kind, stage_s, host_s = "attention", found.whole_attention_s, over.attention_host_s
    if experts < attention:
        kind, stage_s, host_s = "expert", found.whole_experts_s, over.expert_host_s
    return (
        "stages are too short for their hosts on every split that has room: on "
        f"{found.attention_devices} + {found.expert_devices} an {kind} stage of all rows of a "
        f"worker takes {seconds(stage_s)}, less than {HOST_COSTS:g} times the {seconds(host_s)} "
        "that its host takes to launch it"
    )
