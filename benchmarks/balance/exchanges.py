"""Ways to bring rows to experts on many devices: bytes, seconds, and where each stops scaling.

G devices in nodes of 8, n rows a device, K experts a row out of E, which are spread and visited
evenly. Three ways, each with the same bytes back as there:

- *all-gather*: every row to every device. A row enters a node once, by the network card of the
  device that has the number of its sender there, and is passed on inside.
- *direct all-to-all*: a row goes once to each device that needs it, by the network where that is in
  another node.
- *forwarded all-to-all*: a row goes once to each node that needs it, and inside from there to
  each device that needs it (as DeepEP does).

Links: NVLink at the rates that Table 2 of Libra shows for its exchanges; between nodes the assumed
`NIC_BYTES_PER_S` of `jmoe.parallel.stage_times`. Both kinds of links are busy at once, so that the
slower one decides. Latencies are left out: a device's rows are megabytes in prefill. Nothing here
was measured.
"""

from itertools import pairwise
from math import comb
from typing import Any, NamedTuple

from benchmarks.balance.paper_layer import (
    ELEMENT_BYTES,
    NUM_DEVICES,
    Exchange,
    Geometry,
    Scheme,
    layer_times,
)
from jmoe.parallel.stage_times import NIC_BYTES_PER_S, NODE

SIZES = (8, 16, 32, 64, 128, 256, 512)
ALPHA, NUM_REPLICAS = 0.5, 8  # of the paper's runs (section 5.2)
WAYS = ("all-gather", "direct", "forwarded")
"""The simplest first."""
WORTH = 1.5  # rows/s that twice the devices must bring to be called scaling
MARGIN = 0.05  # of a layer's time: within it the simpler way is taken


class ExchangedRows(NamedTuple):
    """Rows that a device receives in one direction, over its own: n is 1."""

    nvlink: float
    nic: float

    @property
    def total(self) -> float:
        """Over both kinds of links."""
        return self.nvlink + self.nic


def distinct_parts(num_experts: int, top_k: int, parts: int) -> float:
    """Returns the parts that a row needs on average, where `parts` share E experts in ranges as
    even as can be.

    A row picks K different experts, all equally likely. With more parts than experts each pick is
    in a part of its own.
    """
    short, longer = divmod(num_experts, parts)
    return sum(
        count * (1 - comb(num_experts - held, top_k) / comb(num_experts, top_k))
        for held, count in ((short + 1, longer), (short, parts - longer))
        if count
    )


def independent_parts(top_k: int, parts: int) -> float:
    """Returns the same where each pick falls on any part, whatever the others do."""
    return parts * (1 - (1 - 1 / parts) ** top_k)


def rows_moved(way: str, geometry: Geometry, devices: int) -> ExchangedRows:
    """Returns the rows that a device receives by one of `WAYS`. `devices` is a multiple of a node's
    8.
    """
    nodes = devices // NODE
    inside = (NODE - 1) / NODE
    experts, top_k = geometry.num_experts, geometry.experts_per_token
    needed = distinct_parts(experts, top_k, devices)
    if way == "all-gather":
        return ExchangedRows(inside * devices, nodes - 1)
    if way == "direct":
        return ExchangedRows((NODE - 1) / devices * needed, (devices - NODE) / devices * needed)
    return ExchangedRows(
        inside * needed, (nodes - 1) / nodes * distinct_parts(experts, top_k, nodes)
    )


def exchange(way: str, scheme: Scheme, geometry: Geometry, own: int, devices: int) -> Exchange:
    """Returns seconds there and back of `own` rows a device."""
    moved = rows_moved(way, geometry, devices)
    row_bytes = own * geometry.d_model * ELEMENT_BYTES
    nic = moved.nic * row_bytes / NIC_BYTES_PER_S
    there = moved.nvlink * row_bytes / scheme.dispatch_bytes_per_s
    back = moved.nvlink * row_bytes / scheme.combine_bytes_per_s
    return Exchange(max(there, nic), max(back, nic), waits=way != "all-gather")


def local_share(scheme: Scheme, geometry: Geometry, devices: int) -> float:
    """Returns the visits that need no exchange: the experts of a device and its local replicas, E /
    G and N alpha of E, weighted as Table 2's share is at 8 devices, since they are the busy ones.
    """
    held = geometry.num_experts / devices + ALPHA * NUM_REPLICAS
    held_in_paper = geometry.num_experts / NUM_DEVICES + ALPHA * NUM_REPLICAS
    return scheme.local_share * held / held_in_paper


def scaling(scheme: Scheme, geometry: Geometry, own: int, length: int) -> list[dict[str, Any]]:
    """For each of `SIZES`: what each way moves, how long a layer takes, and which is to be had.

    Loads are balanced at every size, and a device has as many rows at every size.
    """
    found = []
    for devices in SIZES:
        share = local_share(scheme, geometry, devices)
        ways: dict[str, Any] = {}
        for way in WAYS:
            sent = exchange(way, scheme, geometry, own, devices)
            layer = layer_times(
                scheme, geometry, own, length, imbalance=1.0, local_share=share, exchange=sent
            )
            moved = rows_moved(way, geometry, devices)
            ways[way] = {
                "rows": moved.total,
                "nic_rows": moved.nic,
                "mbytes": moved.total * own * geometry.d_model * ELEMENT_BYTES / 1e6,
                "nic_mbytes": moved.nic * own * geometry.d_model * ELEMENT_BYTES / 1e6,
                "dispatch_ms": 1e3 * sent.dispatch,
                "combine_ms": 1e3 * sent.combine,
                "layer_ms": 1e3 * layer.total,
                "rows_per_s": devices * own / layer.total,
            }
        needed = distinct_parts(geometry.num_experts, geometry.experts_per_token, devices)
        found.append(
            {
                "devices": devices,
                "distinct_devices": needed,
                "all_gather_over_direct": devices / needed,
                "the_same_for_independent_picks": devices
                / independent_parts(geometry.experts_per_token, devices),
                "gathered_gbytes": devices * own * geometry.d_model * ELEMENT_BYTES / 1e9,
                "ways": ways,
                "chosen": choose({way: ways[way]["layer_ms"] for way in WAYS}),
            }
        )
    return found


def scales_to(found: list[dict[str, Any]], way: str) -> int:
    """Returns the largest size that has `WORTH` times the rows/s of half of it; else
    the smallest.
    """
    speeds = [(size["devices"], size["ways"][way]["rows_per_s"]) for size in found]
    doubled = pairwise(speeds)
    worth = [devices for (_, half), (devices, all_) in doubled if all_ >= WORTH * half]
    return max(worth, default=speeds[0][0])


def choose(layer_ms: dict[str, float]) -> str:
    """Returns the simplest way that is at most `MARGIN` slower than the fastest; `WAYS` are in
    order.
    """
    fastest = min(layer_ms.values())
    return next(way for way in WAYS if layer_ms[way] <= (1 + MARGIN) * fastest)
