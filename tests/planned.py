"""Problems of planning, and both of its decisions, for tests of the kernels here and on a GPU."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import planning


def draw(seed, devices, experts):
    """Draws counts and hosts: some experts with several hosts, idle devices, ties, few visits or
    many.
    """
    rng = np.random.default_rng(seed)
    counts = rng.poisson(
        rng.choice([0.3, 3, 300])
        * rng.gamma(rng.choice([0.3, 5.0]), size=(1, experts))
        * rng.gamma(rng.choice([0.5, 50.0]), size=(devices, experts))
    )
    counts[rng.random(devices) < 0.1] = 0
    hosts = rng.permutation(np.arange(experts) % devices)[:, None] == np.arange(devices)
    hosts |= rng.random(hosts.shape) < rng.choice([0.0, 0.2])
    return jnp.asarray(counts, jnp.int32), jnp.asarray(hosts)


def decide(counts, hosts, home, *, num_replicas=4, per_pair: int | None = 1, alpha=0.5):
    """Decides copies for the expected visits, and shares of the visits among all hosts including
    these.
    """
    how = {"num_replicas": num_replicas, "per_pair": per_pair, "alpha": alpha}
    replicas = planning.plan_replicas(counts, hosts, **how)
    return replicas, planning.shard_visits(counts, hosts | replicas, home=home)
