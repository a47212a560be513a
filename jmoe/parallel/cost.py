"""What expert parallelism costs a prefill step, and how many replicas of experts can be hidden.

Libra copies the replicas of the next layer while this layer computes the visits that came from
other devices (MoE_remote, its sections 3.1 and 3.2). Copies that take longer than that window delay
every layer. So a server asks, for each of its token buckets, how many replicas fit.

Arithmetic on the host, without arrays. Letters: D devices, T rows a device, E experts a layer, K of
them a row, N replicas a device.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from jmoe.config import ModelConfig
from jmoe.display import seconds

NODE = 8  # devices that share NVLink
NIC_BYTES_PER_S = 45e9
"""Of a device between nodes, in one direction. An assumption: DeepEP reports 43 to 47 GB/s over
cards of 400 Gb/s, whose line rate is 50."""


class Machine(NamedTuple):
    """Rates of a device; links in one direction."""

    name: str
    flops_per_s: float  # of grouped products
    memory_bytes_per_s: float
    link_bytes_per_s: float  # inside a node of eight
    nic_bytes_per_s: float  # between nodes
    memory_bytes: float
    fixed_s: float  # of a stage on the device: kernels' starts and ends

    def bandwidth(self, num_devices: int) -> float:
        """Returns the bytes a second of a device's traffic, spread evenly over all others."""
        outside = max(num_devices - NODE, 0) / max(num_devices - 1, 1)
        return 1 / ((1 - outside) / self.link_bytes_per_s + outside / self.nic_bytes_per_s)


H200 = Machine("H200", 600e12, 4.3e12, 360e9, NIC_BYTES_PER_S, 0.9 * 141e9, 20e-6)
"""An H200 in a node of eight. Not measured by jmoe: its data sheet says 989 TFLOP/s (dense
bfloat16), 4.8 TB/s of memory and 900 GB/s of NVLink in both directions together; taken are 0.6 of
the first, as grouped products on ragged numbers of rows reach, 0.9 of the second, and 0.8 of 450
GB/s. A faster product makes the window shorter, a faster link the copies. A stage's fixed time:
some 20 launches at 1 us (docs/kernels.md counts 19 to 26 a layer); reckoned, not measured."""


OVER = 2
"""Times a device's mean visits that its sorted rows have room for. With 1.25 instead an eighth more
of their time would be saved, and lost where a second pass reads the experts' weights again: most
steps without copies are above it (a median of 1.7), and few above 2."""

LOOP_S = 30e-6
"""Of a loop that the host is asked about: a copy of four bytes, a wait and a launch between a GPU's
last kernel before and its first one after, and five small kernels that number the passes. Not
measured by jmoe."""


COPYING_S = 130e-6
"""Of what a layer that copies experts launches beside one that does not: 52 small kernels (eight
H200s, `tests/jmoe/parallel/test_compile_eight_h200.py`) at 2.5 us. Not measured by jmoe."""


LEFT_BY_ONE = 0.026
"""Of imbalance, what copies of one expert a pair of devices leave more than of two: 8 devices, 128
experts, 85 % of predictions right (means of `python -m benchmarks.mesh balance`)."""


HALVES_S = 58e-6
"""Of what a layer launches more whose rows travel in two halves: 23 small kernels (eight H200s,
`tests/jmoe/parallel/test_compile_eight_h200.py`) at 2.5 us. Not measured by jmoe."""


ROOM = 1.5
"""Times the rows that one device has for another on average that an all-to-all has room for. What
does not fit goes in blocks, which takes what an all-gather does, and more passes."""

DELIVERY_S = 100e-6
"""Of what a layer launches more whose rows are delivered: 34 small kernels, or 45 where they are
forwarded (eight H200s, `tests/jmoe/parallel/test_compile_eight_h200.py`), at 2.5 us. Not measured
by jmoe."""


AllGather = Literal["all-gather", "halves"]
"""All rows to all devices, at once or in two halves (`MeshStep.saved_by_halves`)."""


class Delivery(NamedTuple):
    """How rows travel to the devices that need them, and to no other."""

    room: int  # rows from a device to another; to another node, where they are forwarded
    node: int = 0  # devices of a node inside which rows are forwarded; 0: an all-to-all in one hop
    inside: int = 0
    """Forwarded rows from a device of a node to another; as many as there are nodes, or more: so
    many may come at a time.
    """

    def block(self, num_devices: int) -> int:
        """Returns the rows of a device that have room whatever they need."""
        if not self.node:
            return self.room
        return min(self.room, self.inside * self.node // num_devices)


def distinct_parts(num_experts: int, top_k: int, parts: int) -> float:
    """Returns the parts that a row needs on average, where `parts` share E experts in ranges as
    even as can be.

    A row picks K different experts, all equally likely. With more parts than experts each pick is
    in a part of its own.
    """
    short, longer = divmod(num_experts, parts)
    return sum(
        count * (1 - math.comb(num_experts - held, top_k) / math.comb(num_experts, top_k))
        for held, count in ((short + 1, longer), (short, parts - longer))
        if count
    )


def node_of(num_devices: int) -> int:
    """Returns the devices of each of the nodes that so many are in: equally many."""
    return max(count for count in range(1, NODE + 1) if num_devices % count == 0)


def rows_moved(way: str, num_experts: int, top_k: int, num_devices: int) -> tuple[float, float]:
    """Returns the rows that a device receives in one direction, over its own, by NVLink and by
    network card, where nodes are as `node_of` says.

    Args:
        way: "all-gather", every row to every device: it enters a node once, by the network card of
            the device that has the number of its sender there, and is passed on inside; "direct",
            an all-to-all in one hop; or "forwarded", once to each node that needs it, and from
            there to each device.
        num_experts: E, in ranges as even as can be.
        top_k: K.
        num_devices: D.
    """
    node = node_of(num_devices)
    nodes, inside = num_devices // node, (node - 1) / node
    needed = distinct_parts(num_experts, top_k, num_devices)
    if way == "all-gather":
        return inside * num_devices, float(nodes - 1)
    if way == "direct":
        outside = (num_devices - node) / num_devices
        return (node - 1) / num_devices * needed, outside * needed
    return inside * needed, (nodes - 1) / nodes * distinct_parts(num_experts, top_k, nodes)


class Fit(NamedTuple):
    """How many replicas a device may get in a layer of one token bucket, and why."""

    num_replicas: int  # N; 0: none
    per_pair: int  # experts that each device sends to each other one; 0: none
    window_s: float  # in which the copies can be hidden
    copy_s: float  # of these replicas; of the fewest that could be sent, where none fit
    reason: str


def expert_bytes(cfg: ModelConfig, dtype_bytes: int) -> int:
    """Returns the bytes of one expert: one or two matrices up and one down."""
    return (cfg.up_matrices + 1) * cfg.d_model * cfg.d_ff_expert * dtype_bytes


def check_copies(
    num_experts: int,
    num_devices: int,
    *,
    replicas: int,
    per_pair: int,
    spare_slots: int,
    num_models: int = 1,
) -> None:
    """Raises ValueError for more copies than a device of a mesh can get, or has a use for.

    Args:
        num_experts: of a layer of one model, routed ones.
        num_devices: D; experts are spread evenly.
        replicas: of a layer and step that a device asks for.
        per_pair: the most of them from one other device.
        spare_slots: of a layer and device, for experts of all models; a step may have rows of one.
        num_models: that may have experts of their own.
    """
    lacking, sent = num_experts - -(-num_experts // num_devices), per_pair * (num_devices - 1)
    lacks = f"a device lacks {lacking} of {num_experts} experts"
    if replicas > min(lacking, sent):
        others = f"the other {num_devices - 1} devices send {per_pair} each at most"
        why = lacks if lacking <= sent else others
        raise ValueError(f"replicas is {replicas}; {why}: set it to {min(lacking, sent)} or less")
    num_experts *= num_models
    lacking = num_experts - -(-num_experts // num_devices)
    lacks = f"a device lacks {lacking} of {num_experts} experts"
    if spare_slots > lacking:
        raise ValueError(f"spare_slots is {spare_slots}; {lacks}: set it to {lacking} or less")


class ExchangeBytes(NamedTuple):
    """Bytes that a device sends in a step, over all MoE layers; it receives as many."""

    there: int  # rows with ids, gate weights and flags
    home: int  # parts of the results


class MeshStep(NamedTuple):
    """The MoE layers of a step over a mesh, and what they cost."""

    cfg: ModelConfig
    num_devices: int  # D; experts are spread evenly
    tokens_per_device: int
    """T, computed rows; brownout computes fewer visits, so that fewer copies fit."""
    dtype_bytes: int  # of a weight
    machine: Machine = H200
    loop_s: float = LOOP_S
    """Of a loop over passes; infinite where sorted rows have room for all visits."""
    alpha: float = 0.5  # 0 to 1, share of N for experts that a device's own rows visit

    @property
    def lacking(self) -> int:
        """Experts of a layer that a device has not."""
        return self.cfg.num_experts - -(-self.cfg.num_experts // self.num_devices)

    @property
    def held(self) -> float:
        """Experts of a layer that a device has, on average."""
        return self.cfg.num_experts / self.num_devices

    @property
    def visits(self) -> int:
        """Visits of a device's rows."""
        return self.tokens_per_device * self.cfg.experts_per_token

    def replicas_that_fit(self, per_pair: int) -> Fit:
        """Returns the most replicas whose copies are hidden in a prefill step.

        Replicas travel in a dense all-to-all: every device sends the same number of experts, at
        most `per_pair`, to every other, wanted or not, and a device can use at most as many as it
        lacks. The window is the time of a device's remote visits, balanced: their products, or the
        reading of its experts' weights where that takes longer. Local ones are as many as a device
        has of the experts, its own and `alpha` N, as if all were visited alike; where own rows
        prefer what is held (0.38 in Libra's Table 2), the window is shorter.

        Raises ValueError for a number below 1, or an `alpha` that is no share.
        """
        self._check(per_pair)
        if self.num_devices == 1 or not self.lacking:
            return Fit(0, 0, 0.0, 0.0, "every device has all experts")

        def window_s(num_replicas: int) -> float:
            remote = 1 - self._local_share(num_replicas)
            return self._experts_s(remote * self.visits, self.held + num_replicas)

        one_s = expert_bytes(self.cfg, self.dtype_bytes) / self.machine.link_bytes_per_s
        others = self.num_devices - 1
        for pairs in range(min(per_pair, -(-self.lacking // others)), 0, -1):
            num_replicas = min(pairs * others, self.lacking)
            window, copy = window_s(num_replicas), pairs * others * one_s
            if copy <= window:
                reason = f"sending {pairs} to each other device takes {seconds(copy)}, hidden "
                reason += f"behind the {seconds(window)} of computing other devices' tokens"
                return Fit(num_replicas, pairs, window, copy, reason)
        window, copy = window_s(min(others, self.lacking)), others * one_s
        reason = f"sending 1 to each other device takes {seconds(copy)}, longer than the "
        reason += f"{seconds(window)} of computing other devices' tokens, "
        reason += f"which would hide {int(window / one_s)} of {others}"
        return Fit(0, 0, window, copy, reason)

    def layer_s(self, fit: Fit | None = None, *, imbalance: float = 1.0) -> float:
        """Returns the seconds of an MoE layer's exchange and experts on the fullest device of a
        prefill step, without what is the same with copies of experts and without.

        Without copies (`fit` None) rows travel, and then its visits are computed, `imbalance` times
        the mean, or both in halves where that saves some (`saved_by_halves`). With those of `fit`
        the load is level; rows travel while visits of own rows are computed, copies while the
        others are, after they were put together; and rows are sorted for own experts and for
        copies, each for own rows and for others'.
        """
        machine, own, elements = self.machine, self.visits, self.cfg.d_model * self.dtype_bytes
        others = self.visits_of_pass()
        gather_s = self._travel_s("all-gather", elements + self._numbers())
        total = 0.0 if others is None else self.loop_s
        sorted_rows = others or self.num_devices * own
        if fit is None:
            total += gather_s + self._experts_s(imbalance * own, self.held)
            total -= self.saved()
        else:
            sent = fit.per_pair * self.num_devices * expert_bytes(self.cfg, self.dtype_bytes)
            local = self._local_share(fit.num_replicas)
            experts = self.held + fit.num_replicas
            total += max(gather_s, self._experts_s(local * own, experts)) + COPYING_S
            total += max(fit.copy_s, self._experts_s((1 - local) * own, experts))
            total += 2 * sent / machine.memory_bytes_per_s
            sorted_rows = 2 * (own + sorted_rows)
        return total + sorted_rows * elements / machine.memory_bytes_per_s

    def break_even(self, fit: Fit) -> float:
        """Returns the imbalance without copies above which a prefill step takes less time with
        those of `fit`; at most `num_devices` is possible.
        """
        longest_s, copying_s = self.layer_s(imbalance=float(self.num_devices)), self.layer_s(fit)
        product_s = self._products_s(float(self.visits))  # all that grows
        return max(1.0, self.num_devices - (longest_s - copying_s) / product_s)

    def replicas_that_gain(self, per_pair: int) -> tuple[Fit, float]:
        """Returns the most replicas that can be hidden, or else the fewest that can be sent, and
        the imbalance above which they gain (`break_even`), infinite where no device lacks an
        expert. `per_pair` is as of `replicas_that_fit`.
        """
        fit = self.replicas_that_fit(per_pair)
        if not self.lacking:
            return fit, math.inf
        if not fit.num_replicas:
            fit = fit._replace(num_replicas=min(self.num_devices - 1, self.lacking), per_pair=1)
        return fit, self.break_even(fit)

    def best_replicas(self, most_per_pair: int) -> tuple[Fit, float]:
        """Returns, of 1 to `most_per_pair` experts a pair, those that gain from the lowest
        imbalance on, and that imbalance; fewer send less and leave more (`LEFT_BY_ONE`).
        """
        each = [self.replicas_that_gain(n) for n in range(1, most_per_pair + 1)]
        return min(each, key=lambda one: one[1] + LEFT_BY_ONE * (one[0].per_pair == 1))

    def saved_by_halves(self) -> float:
        """Returns the seconds a layer that a step saves whose rows travel in two halves, the second
        half's there and the first half's home while visits of the other half are computed; below 0:
        it takes longer, by the launches and, where few rows visit an expert, by reading weights
        twice.

        Reckoned for an even load: experts of an uneven one take longer, which hides no less.
        """
        elements = self.cfg.d_model * self.dtype_bytes
        there_s, home_s = (
            self._travel_s("all-gather", part) / 2
            for part in (elements + self._numbers(), elements)
        )
        half = self._replace(tokens_per_device=self.tokens_per_device // 2)
        whole_s, half_s = (one._experts_s(float(one.visits), one.held) for one in (self, half))
        under_s = max(there_s, half_s) + max(home_s, half_s)
        saved_s = there_s + whole_s + home_s + self._sorted_s() - under_s
        return saved_s - 2 * half._sorted_s() - HALVES_S

    def exchange(self) -> Delivery | AllGather:
        """Returns how rows and experts meet: as `cfg.exchange` says, or what is reckoned to save
        most. Inside one node nothing is forwarded.
        """
        return self._exchange()[1]

    def saved(self) -> float:
        """Returns the seconds a layer that `exchange` saves over all rows to all at once."""
        return self._exchange()[0]

    def _exchange(self) -> tuple[float, Delivery | AllGather]:
        found: dict[str, tuple[float, Delivery | AllGather]] = {"all-gather": (0.0, "all-gather")}
        if self.num_devices > 1:
            found["halves"] = self.saved_by_halves(), "halves"
            found |= {name: (self.saved_by_delivery(way), way) for name, way in self._deliveries()}
        wanted = self.cfg.exchange
        if wanted == "auto":
            wanted = max(found, key=lambda name: found[name][0])
        return found.get(wanted, found["all-gather"])

    def saved_by_delivery(self, delivery: Delivery) -> float:
        """Returns the seconds a layer that a step saves whose rows are delivered, over one whose
        rows travel to all devices at once; for an even load, whose rows have room.
        """
        elements = self.cfg.d_model * self.dtype_bytes
        numbers = self._numbers()
        all_s = self._travel_s("all-gather", numbers) + 2 * self._travel_s("all-gather", elements)
        way = "forwarded" if delivery.node else "direct"
        some_s = self._travel_s("all-gather", numbers) + self.loop_s + DELIVERY_S
        padded = delivery.room / self._for_each_of(self.num_devices // (delivery.node or 1))
        some_s += padded * (self._travel_s(way, elements + numbers) + self._travel_s(way, elements))
        received = self.received(delivery)
        return all_s + self._sorted_s() - some_s - self._sorted_s(received)

    def received(self, delivery: Delivery) -> int:
        """Returns the rows that a device has room for."""
        if delivery.node:
            return delivery.node * delivery.inside
        return self.num_devices * delivery.room

    def _deliveries(self) -> Iterator[tuple[str, Delivery]]:
        """Yields each way to deliver rows, by its name."""
        devices, rows = self.num_devices, self.tokens_per_device

        def room(parts: int, of: int = 1) -> int:
            return min(of * rows, math.ceil(ROOM * of * self._for_each_of(parts)))

        yield "direct", Delivery(room(devices))
        if 1 < (node := node_of(devices)) < devices:
            nodes = devices // node
            yield "forwarded", Delivery(room(nodes), node, max(nodes, room(devices, nodes)))

    def _for_each_of(self, parts: int) -> float:
        """Returns the rows of a device that each of so many even parts of the experts needs."""
        sizes = self.cfg.num_experts, self.cfg.experts_per_token
        return distinct_parts(*sizes, parts) / parts * self.tokens_per_device

    def _numbers(self) -> int:
        """Returns the bytes that travel of a row beside its elements."""
        return 4 * (2 * self.cfg.experts_per_token + 1)

    def _travel_s(self, way: str, row_bytes: int) -> float:
        """Returns the seconds of a device's rows in one direction."""
        sizes = self.cfg.num_experts, self.cfg.experts_per_token, self.num_devices
        nvlink, nic = rows_moved(way, *sizes)
        machine, bytes_ = self.machine, row_bytes * self.tokens_per_device
        return bytes_ * max(nvlink / machine.link_bytes_per_s, nic / machine.nic_bytes_per_s)

    def exchange_bytes(self) -> ExchangeBytes:
        """Returns what T rows a device send to D - 1 others, delivered or not.

        Beside its elements a row has K gate weights, K ids and its flags, four bytes each; of one
        that is delivered, those go to all.
        """
        layers, others = self.cfg.num_moe_layers, self.num_devices - 1
        elements, all_rows = self.cfg.d_model * self.dtype_bytes, others * self.tokens_per_device
        way = self.exchange()
        if not isinstance(way, Delivery):
            rows = layers * all_rows
            return ExchangeBytes(rows * (elements + self._numbers()), rows * elements)
        rows = others * way.room
        if node := way.node:
            rows = (self.num_devices // node - 1) * way.room + (node - 1) * way.inside
        there = rows * (elements + self._numbers() - 4) + all_rows * self._numbers()
        return ExchangeBytes(layers * there, layers * rows * elements)

    def visits_of_pass(self, received: int | None = None) -> int | None:
        """Returns the visits after which a device leaves further rows to another pass: `OVER` times
        the mean; None: sorted rows with room for all visits of `received` rows (None: those of all
        devices) take less time.

        Such a row is written, in the order of experts, whether it is a visit or not; less room
        saves the rest, and costs a loop. In one pass neither depends on how uneven the visits are.
        """
        over = max(0, self._most(received) - OVER * self.visits)
        saved_s = over * self.cfg.d_model * self.dtype_bytes / self.machine.memory_bytes_per_s
        return OVER * self.visits if saved_s > self.loop_s else None

    def gathered_buffer_bytes(self) -> int:
        """Returns the bytes that an MoE layer's rows take on each device, reckoned from shapes.

        The rows that arrive, those that leave where rows are delivered, and sums in float32; and
        the visits' rows, hidden rows and results, of one pass (`visits_of_pass`) or of all rows.
        """
        cfg, way = self.cfg, self.exchange()
        rows, copies = self.num_devices * self.tokens_per_device, 1
        if isinstance(way, Delivery):
            rows, copies = self.received(way), 2
        visits = self.visits_of_pass(rows) or rows * cfg.experts_per_token
        per_visit = 2 * cfg.d_model + cfg.d_ff_expert
        per_row = self.dtype_bytes * copies + 4
        return rows * cfg.d_model * per_row + visits * per_visit * self.dtype_bytes

    def _local_share(self, num_replicas: int) -> float:
        """Returns the share of a device's visits that need no other device's rows, if all experts
        are visited alike.
        """
        return min(1.0, (self.held + int(self.alpha * num_replicas)) / self.cfg.num_experts)

    def _products_s(self, visits: float) -> float:
        return 2 * expert_bytes(self.cfg, 1) * visits / self.machine.flops_per_s

    def _experts_s(self, visits: float, experts: float) -> float:
        """Returns the seconds of visits to so many experts: their products, or reading weights."""
        read = min(visits, experts) * expert_bytes(self.cfg, self.dtype_bytes)
        return max(self._products_s(visits), read / self.machine.memory_bytes_per_s)

    def _most(self, received: int | None) -> int:
        rows = self.num_devices * self.tokens_per_device if received is None else received
        return rows * self.cfg.experts_per_token

    def _sorted_s(self, received: int | None = None) -> float:
        """Returns the seconds of writing the rows sorted for experts, and of the loop if any."""
        per_pass = self.visits_of_pass(received)
        rows = per_pass or self._most(received)
        written_s = rows * self.cfg.d_model * self.dtype_bytes / self.machine.memory_bytes_per_s
        return written_s + (self.loop_s if per_pass else 0.0)

    def _check(self, per_pair: int) -> None:
        names = "num_devices", "tokens_per_device", "dtype_bytes"
        counts = {name: getattr(self, name) for name in names} | {"per_pair": per_pair}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} is {count}; it must be 1 or more")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; it must be between 0 and 1")
