"""What expert parallelism costs a prefill step, and how many replicas of experts can be hidden.

Libra copies the replicas of the next layer while this layer computes the visits that came from
other devices (MoE_remote, its sections 3.1 and 3.2). Copies that take longer than that window delay
every layer. So a server asks, for each of its token buckets, how many replicas fit.

Arithmetic on the host, without arrays. Letters: D devices, T rows a device, E experts a layer, K of
them a row, N replicas a device.
"""

import math
from typing import NamedTuple

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


class Fit(NamedTuple):
    """How many replicas a device may get in a layer of one token bucket, and why."""

    num_replicas: int  # N; 0: none
    per_pair: int  # experts that each device sends to each other one; 0: none
    window_s: float  # in which the copies can be hidden
    copy_s: float  # of these replicas; of the fewest that could be sent, where none fit
    experts_in_window: int  # that a device's link carries in it, if it carries nothing unwanted
    reason: str


def expert_bytes(cfg: ModelConfig, dtype_bytes: int) -> int:
    """Returns the bytes of one expert: two matrices up and one down."""
    return 3 * cfg.d_model * cfg.d_ff_expert * dtype_bytes


def check_copies(
    num_experts: int, num_devices: int, *, replicas: int, per_pair: int, spare_slots: int
) -> None:
    """Raises ValueError for more copies than a device of a mesh can get, or has a use for.

    Args:
        num_experts: of a layer, routed ones.
        num_devices: D; experts are spread evenly.
        replicas: of a layer and step that a device asks for.
        per_pair: the most of them from one other device.
        spare_slots: of a layer and device.
    """
    lacking, sent = num_experts - -(-num_experts // num_devices), per_pair * (num_devices - 1)
    lacks = f"a device lacks {lacking} of {num_experts} experts"
    if replicas > min(lacking, sent):
        others = f"the other {num_devices - 1} devices send {per_pair} each at most"
        why = lacks if lacking <= sent else others
        raise ValueError(f"replicas is {replicas}; {why}: set it to {min(lacking, sent)} or less")
    if spare_slots > lacking:
        raise ValueError(f"spare_slots is {spare_slots}; {lacks}: set it to {lacking} or less")


class ExchangeBytes(NamedTuple):
    """Bytes that a device sends in a step, over all MoE layers; it receives as many."""

    gathered: int  # all-gather: rows with ids, gate weights and flags
    scattered: int  # reduce-scatter: parts of the results


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

    def replicas_that_fit(self, per_pair: int, *, local_share: float | None = None) -> Fit:
        """Returns the most replicas whose copies are hidden in a prefill step.

        Replicas travel in a dense all-to-all: every device sends the same number of experts, at
        most `per_pair`, to every other, wanted or not, and a device can use at most as many as it
        lacks. The window is the time of a device's remote visits, balanced: their products, or the
        reading of its experts' weights where that takes longer.

        Args:
            per_pair: the most experts from one device to another.
            local_share: 0 to 1, visits that need no other device's rows; None: as many as a device
                has of the experts, its own and `alpha` N, as if all were visited alike. Where own
                rows prefer what is held it is more, and the window shorter: 0.38 in Libra's
                Table 2.

        Raises ValueError for a number below 1, or a share that is none.
        """
        self._check(per_pair, local_share)
        if self.num_devices == 1 or not self.lacking:
            return Fit(0, 0, 0.0, 0.0, 0, "every device has all experts")

        def window_s(num_replicas: int) -> float:
            share = self._local_share(num_replicas) if local_share is None else local_share
            remote = 1 - share
            return self._experts_s(remote * self.visits, self.held + num_replicas)

        one_s = expert_bytes(self.cfg, self.dtype_bytes) / self.machine.link_bytes_per_s
        others = self.num_devices - 1
        for pairs in range(min(per_pair, -(-self.lacking // others)), 0, -1):
            num_replicas = min(pairs * others, self.lacking)
            window, copy = window_s(num_replicas), pairs * others * one_s
            if copy <= window:
                reason = f"{pairs} a pair of devices takes {seconds(copy)}, less than remote "
                reason += f"visits' {seconds(window)}"
                return Fit(num_replicas, pairs, window, copy, int(window / one_s), reason)
        window, copy = window_s(min(others, self.lacking)), others * one_s
        carried = int(window / one_s)
        reason = f"1 a pair of devices takes {seconds(copy)}, and remote visits {seconds(window)}, "
        reason += f"in which a link carries {carried} of {others}"
        return Fit(0, 0, window, copy, carried, reason)

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
        gathered = self.exchange_bytes().gathered / self.cfg.num_moe_layers
        gather_s = gathered / machine.link_bytes_per_s
        total = 0.0 if others is None else self.loop_s
        sorted_rows = others or self.num_devices * own
        if fit is None:
            total += gather_s + self._experts_s(imbalance * own, self.held)
            total -= max(0.0, self.saved_by_halves())
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
        there_s, home_s = (
            part / self.cfg.num_moe_layers / self.machine.link_bytes_per_s / 2
            for part in self.exchange_bytes()
        )
        half = self._replace(tokens_per_device=self.tokens_per_device // 2)
        whole_s, half_s = (one._experts_s(float(one.visits), one.held) for one in (self, half))
        under_s = max(there_s, half_s) + max(home_s, half_s)
        saved_s = there_s + whole_s + home_s + self._sorted_s() - under_s
        return saved_s - 2 * half._sorted_s() - HALVES_S

    def exchange_bytes(self) -> ExchangeBytes:
        """Returns what `jmoe.parallel.experts.gathered` sends from T rows a device to D - 1 others.

        Beside its elements a row has K gate weights, K ids and its flags, four bytes each.
        """
        hops = self.cfg.num_moe_layers * (self.num_devices - 1) * self.tokens_per_device
        elements = self.cfg.d_model * self.dtype_bytes
        numbers = 4 * (2 * self.cfg.experts_per_token + 1)
        return ExchangeBytes(hops * (elements + numbers), hops * elements)

    def visits_of_pass(self) -> int | None:
        """Returns the visits after which a device leaves further rows to another pass: `OVER` times
        the mean; None: sorted rows with room for the visits of all devices take less time.

        Such a row is written, in the order of experts, whether it is a visit or not; less room
        saves the rest, and costs a loop. In one pass neither depends on how uneven the visits are.
        """
        over = max(0, self.num_devices - OVER) * self.visits
        saved_s = over * self.cfg.d_model * self.dtype_bytes / self.machine.memory_bytes_per_s
        return OVER * self.visits if saved_s > self.loop_s else None

    def gathered_buffer_bytes(self) -> int:
        """Returns the bytes that an MoE layer's rows take on each device, reckoned from shapes.

        The gathered rows and their sums in float32; and the visits' rows, hidden rows and results,
        of one pass (`visits_of_pass`) or of all devices.
        """
        cfg, rows = self.cfg, self.num_devices * self.tokens_per_device
        visits = self.visits_of_pass() or rows * cfg.experts_per_token
        per_visit = 2 * cfg.d_model + cfg.d_ff_expert
        of_rows = rows * cfg.d_model * (self.dtype_bytes + 4)
        return of_rows + visits * per_visit * self.dtype_bytes

    def _local_share(self, num_replicas: int) -> float:
        """Returns the share of a device's visits that need no other device's rows, if all experts
        are visited alike.
        """
        return min(1.0, (self.held + int(self.alpha * num_replicas)) / self.cfg.num_experts)

    def _products_s(self, visits: float) -> float:
        return 6 * self.cfg.d_model * self.cfg.d_ff_expert * visits / self.machine.flops_per_s

    def _experts_s(self, visits: float, experts: float) -> float:
        """Returns the seconds of visits to so many experts: their products, or reading weights."""
        read = min(visits, experts) * expert_bytes(self.cfg, self.dtype_bytes)
        return max(self._products_s(visits), read / self.machine.memory_bytes_per_s)

    def _sorted_s(self) -> float:
        """Returns the seconds of writing the rows sorted for experts, and of the loop if any."""
        per_pass = self.visits_of_pass()
        rows = per_pass or self.num_devices * self.visits
        written_s = rows * self.cfg.d_model * self.dtype_bytes / self.machine.memory_bytes_per_s
        return written_s + (self.loop_s if per_pass else 0.0)

    def _check(self, per_pair: int, local_share: float | None) -> None:
        names = "num_devices", "tokens_per_device", "dtype_bytes"
        counts = {name: getattr(self, name) for name in names} | {"per_pair": per_pair}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} is {count}; it must be 1 or more")
        for name, share in (("alpha", self.alpha), ("local_share", local_share)):
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}; it must be between 0 and 1")
