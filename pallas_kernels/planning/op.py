"""Public planning ops of expert parallelism: which experts to copy, and how to split their visits.

Libra plans in two places. Before a layer, `plan_replicas` (its Algorithm 1) takes the visits that a
predictor expects and chooses experts that devices should hold beside their own. In the layer,
`shard_visits` (its Algorithm 2) takes the visits that the router really made and divides each
expert's among the devices that hold it.

Letters: G devices of the mesh, E logical experts of a layer (routed, then united). `counts[g, e]`
are visits that rows of device g make to expert e; `hosts[e, g]` says that g holds e. An expert's
*home* is its lowest-numbered host before replicas: visits of rows whose own device does not hold
the expert start there.

Everything is int32 arithmetic on replicated inputs, and the lowest index wins ties, so all devices
reach the same decision. All visits of one layer's step together must stay below 2^31.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.backend import KERNEL, hopper, note
from pallas_kernels.planning import reference
from pallas_kernels.planning.reference import home_of


class Shares(NamedTuple):
    """How many visits of each expert each device computes."""

    kept: Int[Array, "G E"]  # of its own rows' visits
    remote: Int[Array, "G E"]  # of other devices' rows' visits


def plan_replicas(
    counts: Int[Array, "G E"],
    hosts: Bool[Array, "E G"],
    *,
    num_replicas: int,
    per_pair: int | None = None,
    alpha: float = 0.5,
) -> Bool[Array, "E G"]:
    """Chooses the replicas that devices should hold beside `hosts` (Libra, Algorithm 1).

    First every device takes the `floor(alpha * num_replicas)` experts that its own rows visit most
    and that it lacks, so that more visits stay local; an expert without visits is not taken. The
    second phase balances. As the paper prints it, it copies the expert with most remote visits from
    the most loaded device to the least loaded one that can take it, and credits the copy with the
    taker's own visits; once a copy cannot be placed nothing changes any more
    (`benchmarks.mesh.balance` has it). This one moves visits between hosts as `shard_visits` will,
    copying an expert where that is what a move lacks, and then spends what is left against errors
    of the prediction: each time on the expert with most visits a host.

    On Hopper it takes one kernel.

    Args:
        counts: int32, the visits that are expected.
        hosts: every expert has one or more hosts.
        num_replicas: N, the most that one device takes (static).
        per_pair: the most that one device sends to another, an expert's home being its sender
            (static); None is no bound.
        alpha: 0 to 1, the share of N for the first phase (static).

    Raises ValueError for a negative number of replicas, a bound below 1, or alpha out of range.
    """
    if num_replicas < 0:
        raise ValueError(f"num_replicas is {num_replicas}; it must be 0 or more")
    if per_pair is not None and per_pair < 1:
        raise ValueError(f"per_pair is {per_pair}; it must be 1 or more, or None for no bound")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it must be between 0 and 1")
    sizes = {
        "num_replicas": num_replicas,
        "per_pair": num_replicas if per_pair is None else per_pair,
        "num_local": int(alpha * num_replicas),
    }
    if hopper():
        from pallas_kernels.planning import mosaic  # Pallas is not imported where it is unused

        if mosaic.supports(*hosts.shape):
            note("copies of experts", KERNEL)
            return mosaic.plan_replicas(counts, hosts, home_of(hosts), **sizes)
    note("copies of experts", has_batched=False)
    return reference.plan_replicas(counts, hosts, **sizes)


def shard_visits(
    counts: Int[Array, "G E"],
    hosts: Bool[Array, "E G"],
    *,
    home: Int[Array, "E"],
) -> Shares:
    """Divides every expert's visits among its hosts (Libra, Algorithm 2, with whole visits).

    Visits start on their own device where it holds the expert, else at the expert's home. While a
    device is above `(1 + tolerance)` times the mean (rounded up, as is the mean itself), the most
    loaded device that can gives visits of its hottest movable expert to that expert's least loaded
    host, as many as this one has room for below the mean. After each move all devices are looked at
    again: the paper's text says so, its listing would first finish a round.

    As the paper prints it, only visits of other devices' rows move, and a move may take more than
    the excess. Here a device may give away its own rows' visits as well, the others' first, and
    never more than the excess. And where no host has room below the mean it may pass visits on to a
    less loaded one, half of the difference, which then is the one to give; differences that this
    moves by less than 1/GRAIN of the mean are left.

    On Hopper it takes one kernel.

    Args:
        counts: int32, the visits that were made.
        hosts: homes and replicas.
        home: int32, `home_of` the hosts before there were replicas.

    Returns int32 shares: for each expert they add up to its visits, only hosts have any, and no
    device keeps more than its own rows made.
    """
    computed = _computed(counts, hosts, home)
    kept = jnp.minimum(jnp.where(hosts.T, counts, 0), computed)
    return Shares(kept, computed - kept)


def _computed(
    counts: Int[Array, "G E"], hosts: Bool[Array, "E G"], home: Int[Array, "E"]
) -> Int[Array, "G E"]:
    if hopper():
        from pallas_kernels.planning import mosaic

        if mosaic.supports(*hosts.shape):
            note("shares of copies", KERNEL)
            return mosaic.shard_visits(counts, hosts, home)
    note("shares of copies", has_batched=False)
    return reference.shard_visits(counts, hosts, home)
