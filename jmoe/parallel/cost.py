"""What expert parallelism costs a prefill step, and how many replicas of experts can be hidden.

Libra copies the replicas of the next layer while this layer computes the visits that came from
other devices (MoE_remote, its sections 3.1 and 3.2). Copies that take longer than that window delay
every layer. So a server asks, for each of its token buckets, how many replicas fit.

Arithmetic on the host, without arrays. Letters: D devices, T rows a device, E experts a layer, K of
them a row, N replicas a device.
"""

import math
from functools import partial
from typing import NamedTuple

from jmoe.config import ModelConfig
from jmoe.display import seconds


class Machine(NamedTuple):
    """Rates of a device: operations/s of grouped products, bytes/s in one direction, bytes/s."""

    name: str
    flops_per_s: float
    link_bytes_per_s: float
    memory_bytes_per_s: float


H200 = Machine("H200", 600e12, 360e9, 4.3e12)
"""An H200 in a node of eight. Not measured by jmoe: its data sheet says 989 TFLOP/s (dense
bfloat16), 900 GB/s of NVLink in both directions together and 4.8 TB/s of memory; taken are 0.6 of
the first, as grouped products on ragged numbers of rows reach, 0.8 of 450 GB/s, and 0.9 of the
third. A faster product makes the window shorter, a faster link the copies."""


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


def replicas_that_fit(
    cfg: ModelConfig,
    num_devices: int,
    tokens_per_device: int,
    dtype_bytes: int,
    per_pair: int,
    machine: Machine = H200,
    *,
    alpha: float = 0.5,
    local_share: float | None = None,
) -> Fit:
    """Returns the most replicas whose copies are hidden in a prefill step of `tokens_per_device`
    rows.

    Replicas travel in a dense all-to-all: every device sends the same number of experts, at most
    `per_pair`, to every other, wanted or not, and a device can use at most as many as it lacks. The
    window is the time of a device's remote visits, balanced: their products, or the reading of its
    experts' weights where that takes longer.

    Args:
        cfg: the model.
        num_devices: D; experts are spread evenly.
        tokens_per_device: T, computed rows; brownout computes fewer visits, so that less fits.
        dtype_bytes: of a weight.
        per_pair: the most experts from one device to another.
        machine: rates.
        alpha: 0 to 1, the share of N for experts that a device's own rows visit.
        local_share: 0 to 1, visits that need no other device's rows; None: as many as a device has
            of the experts, its own and `alpha` N, as if all were visited alike. Where own rows
            prefer what is held it is more, and the window shorter: 0.38 in Libra's Table 2.

    Raises ValueError for a number below 1, or a share that is none.
    """
    _check(num_devices, tokens_per_device, dtype_bytes, per_pair, alpha, local_share)
    lacking = cfg.num_experts - -(-cfg.num_experts // num_devices)
    if num_devices == 1 or not lacking:
        return Fit(0, 0, 0.0, 0.0, 0, "every device has all experts")

    def window_s(num_replicas: int) -> float:
        held = cfg.num_experts / num_devices
        share = (held + int(alpha * num_replicas)) / cfg.num_experts
        remote = 1 - min(1.0, share if local_share is None else local_share)
        visits = remote * tokens_per_device * cfg.experts_per_token
        products = 6 * cfg.d_model * cfg.d_ff_expert * visits / machine.flops_per_s
        read = min(visits, held + num_replicas) * expert_bytes(cfg, dtype_bytes)
        return max(products, read / machine.memory_bytes_per_s)

    one_s = expert_bytes(cfg, dtype_bytes) / machine.link_bytes_per_s
    others = num_devices - 1
    for pairs in range(min(per_pair, -(-lacking // others)), 0, -1):
        num_replicas = min(pairs * others, lacking)
        window, copy = window_s(num_replicas), pairs * others * one_s
        if copy <= window:
            reason = f"{pairs} a pair of devices takes {seconds(copy)}, less than remote visits' "
            reason += seconds(window)
            return Fit(num_replicas, pairs, window, copy, int(window / one_s), reason)
    window, copy = window_s(min(others, lacking)), others * one_s
    carried = int(window / one_s)
    reason = f"1 a pair of devices takes {seconds(copy)}, and remote visits {seconds(window)}, "
    reason += f"in which a link carries {carried} of {others}"
    return Fit(0, 0, window, copy, carried, reason)


def layer_s(
    cfg: ModelConfig,
    num_devices: int,
    tokens_per_device: int,
    dtype_bytes: int,
    fit: Fit | None = None,
    machine: Machine = H200,
    *,
    imbalance: float = 1.0,
    alpha: float = 0.5,
    loop_s: float = LOOP_S,
) -> float:
    """Returns the seconds of an MoE layer's exchange and experts on the fullest device of a prefill
    step, without what is the same with copies of experts and without.

    Without copies (`fit` None) rows travel, and then its visits are computed, `imbalance` times the
    mean, or both in halves where that saves some (`saved_by_halves`). With those of `fit` the load
    is level; rows travel while visits of own rows are computed, copies while the others are, after
    they were put together; and rows are sorted for own experts and for copies, each for own rows
    and for others'.

    Args: as of `replicas_that_fit`; `loop_s` is as of `visits_of_pass`, infinite where sorted rows
    have room for all visits.
    """
    own, elements = tokens_per_device * cfg.experts_per_token, cfg.d_model * dtype_bytes
    given = cfg, num_devices, tokens_per_device, dtype_bytes
    others = visits_of_pass(*given, machine, loop_s=loop_s)
    held, one = cfg.num_experts / num_devices, expert_bytes(cfg, dtype_bytes)

    def computed_s(visits: float, experts: float) -> float:
        return _experts_s(cfg, experts, dtype_bytes, machine, visits)

    gather_s = exchange_bytes(*given).gathered / cfg.num_moe_layers / machine.link_bytes_per_s
    total, sorted_rows = 0.0 if others is None else loop_s, others or num_devices * own
    if fit is None:
        total += gather_s + computed_s(imbalance * own, held)
        total -= max(0.0, saved_by_halves(*given, machine, loop_s=loop_s))
    else:
        num_copies, sent = fit.num_replicas, fit.per_pair * num_devices * one
        local = min(1.0, (held + int(alpha * num_copies)) / cfg.num_experts)
        experts = held + num_copies
        total += max(gather_s, computed_s(local * own, experts)) + COPYING_S
        total += max(fit.copy_s, computed_s((1 - local) * own, experts))
        total += 2 * sent / machine.memory_bytes_per_s
        sorted_rows = 2 * (own + sorted_rows)
    return total + sorted_rows * elements / machine.memory_bytes_per_s


def break_even(
    cfg: ModelConfig,
    num_devices: int,
    tokens_per_device: int,
    dtype_bytes: int,
    fit: Fit,
    machine: Machine = H200,
    *,
    loop_s: float = LOOP_S,
) -> float:
    """Returns the imbalance without copies above which a prefill step takes less time with those of
    `fit`; at most `num_devices` is possible. Args: as of `layer_s`.
    """
    run = partial(layer_s, cfg, num_devices, tokens_per_device, dtype_bytes, loop_s=loop_s)
    longest_s, copying_s = run(imbalance=float(num_devices), machine=machine), run(fit, machine)
    own = tokens_per_device * cfg.experts_per_token
    product_s = 6 * cfg.d_model * cfg.d_ff_expert * own / machine.flops_per_s  # all that grows
    return max(1.0, num_devices - (longest_s - copying_s) / product_s)


def replicas_that_gain(
    cfg: ModelConfig,
    num_devices: int,
    tokens_per_device: int,
    dtype_bytes: int,
    per_pair: int,
    machine: Machine = H200,
    *,
    alpha: float = 0.5,
) -> tuple[Fit, float]:
    """Returns the most replicas that can be hidden, or else the fewest that can be sent, and the
    imbalance above which they gain (`break_even`), infinite where no device lacks an expert. Args:
    as of `replicas_that_fit`.
    """
    given = cfg, num_devices, tokens_per_device, dtype_bytes
    fit = replicas_that_fit(*given, per_pair, machine, alpha=alpha)
    lacking = cfg.num_experts - -(-cfg.num_experts // num_devices)
    if not lacking:
        return fit, math.inf
    if not fit.num_replicas:
        fit = fit._replace(num_replicas=min(num_devices - 1, lacking), per_pair=1)
    return fit, break_even(*given, fit, machine)


def saved_by_halves(
    cfg: ModelConfig,
    num_devices: int,
    tokens_per_device: int,
    dtype_bytes: int,
    machine: Machine = H200,
    *,
    loop_s: float = LOOP_S,
) -> float:
    """Returns the seconds a layer that a step saves whose rows travel in two halves, the second
    half's there and the first half's home while visits of the other half are computed; below 0: it
    takes longer, by the launches and, where few rows visit an expert, by reading weights twice.

    Reckoned for an even load: experts of an uneven one take longer, which hides no less. `loop_s`
    is as of `layer_s`.
    """
    given = cfg, num_devices, tokens_per_device
    sent = exchange_bytes(*given, dtype_bytes)
    there_s, home_s = (
        part / cfg.num_moe_layers / machine.link_bytes_per_s / 2
        for part in (sent.gathered, sent.scattered)
    )
    held = cfg.num_experts / num_devices

    def computed_s(tokens: int) -> float:
        visits = float(tokens * cfg.experts_per_token)
        return _experts_s(cfg, held, dtype_bytes, machine, visits)

    def sorted_s(tokens: int) -> float:
        per_pass = visits_of_pass(cfg, num_devices, tokens, dtype_bytes, machine, loop_s=loop_s)
        rows = per_pass or num_devices * tokens * cfg.experts_per_token
        written_s = rows * cfg.d_model * dtype_bytes / machine.memory_bytes_per_s
        return written_s + (loop_s if per_pass else 0.0)

    half = tokens_per_device // 2
    whole_s = there_s + computed_s(tokens_per_device) + home_s + sorted_s(tokens_per_device)
    under_s = max(there_s, computed_s(half)) + max(home_s, computed_s(half))
    return whole_s - under_s - 2 * sorted_s(half) - HALVES_S


def _experts_s(
    cfg: ModelConfig, experts: float, dtype_bytes: int, machine: Machine, visits: float
) -> float:
    """Returns the seconds of visits to so many experts: their products, or reading weights."""
    products = 6 * cfg.d_model * cfg.d_ff_expert * visits / machine.flops_per_s
    read = min(visits, experts) * expert_bytes(cfg, dtype_bytes)
    return max(products, read / machine.memory_bytes_per_s)


def best_replicas(
    cfg: ModelConfig,
    num_devices: int,
    tokens_per_device: int,
    dtype_bytes: int,
    most_per_pair: int,
    machine: Machine = H200,
    *,
    alpha: float = 0.5,
) -> tuple[Fit, float]:
    """Returns, of 1 to `most_per_pair` experts a pair, those that gain from the lowest imbalance
    on, and that imbalance; fewer send less and leave more (`LEFT_BY_ONE`). Args: as of
    `replicas_that_fit`.
    """
    given = partial(replicas_that_gain, cfg, num_devices, tokens_per_device, dtype_bytes)
    each = [given(pairs, machine, alpha=alpha) for pairs in range(1, most_per_pair + 1)]
    return min(each, key=lambda one: one[1] + LEFT_BY_ONE * (one[0].per_pair == 1))


def _check(
    num_devices: int,
    tokens_per_device: int,
    dtype_bytes: int,
    per_pair: int,
    alpha: float,
    local_share: float | None,
) -> None:
    counts = {
        "num_devices": num_devices,
        "tokens_per_device": tokens_per_device,
        "dtype_bytes": dtype_bytes,
        "per_pair": per_pair,
    }
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be 1 or more")
    for name, share in (("alpha", alpha), ("local_share", local_share)):
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"{name} is {share}; it must be between 0 and 1")


class ExchangeBytes(NamedTuple):
    """Bytes that a device sends in a step, over all MoE layers; it receives as many."""

    gathered: int  # all-gather: rows with ids, gate weights and flags
    scattered: int  # reduce-scatter: parts of the results


def exchange_bytes(
    cfg: ModelConfig, num_devices: int, tokens_per_device: int, dtype_bytes: int
) -> ExchangeBytes:
    """Returns what `jmoe.parallel.experts.routed_experts` sends from T rows a device to D - 1
    others.

    Beside its elements a row has K gate weights, K ids and its flags, four bytes each.
    """
    hops = cfg.num_moe_layers * (num_devices - 1) * tokens_per_device
    elements = cfg.d_model * dtype_bytes
    return ExchangeBytes(hops * (elements + 4 * (2 * cfg.experts_per_token + 1)), hops * elements)


def visits_of_pass(
    cfg: ModelConfig,
    num_devices: int,
    tokens_per_device: int,
    dtype_bytes: int,
    machine: Machine = H200,
    *,
    loop_s: float = LOOP_S,
) -> int | None:
    """Returns the visits after which a device leaves further rows to another pass: `OVER` times the
    mean; None: sorted rows with room for the visits of all devices take less time.

    Such a row is written, in the order of experts, whether it is a visit or not; less room saves
    the rest, and costs a loop. In one pass neither depends on how uneven the visits are.
    """
    own = tokens_per_device * cfg.experts_per_token
    saved = max(0, num_devices - OVER) * own * cfg.d_model * dtype_bytes
    return OVER * own if saved / machine.memory_bytes_per_s > loop_s else None


def gathered_buffer_bytes(
    cfg: ModelConfig, num_devices: int, tokens_per_device: int, dtype_bytes: int
) -> int:
    """Returns the bytes that an MoE layer's rows take on each device, reckoned from shapes.

    The gathered rows and their sums in float32; and the visits' rows, hidden rows and results, of
    one pass (`visits_of_pass`) or of all devices.
    """
    rows = num_devices * tokens_per_device
    visits = visits_of_pass(cfg, num_devices, tokens_per_device, dtype_bytes)
    visits = visits or rows * cfg.experts_per_token
    per_visit = 2 * cfg.d_model + cfg.d_ff_expert
    return rows * cfg.d_model * (dtype_bytes + 4) + visits * per_visit * dtype_bytes
