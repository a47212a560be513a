"""Planning of expert parallelism: which experts to copy, and how to split their visits."""

from pallas_kernels.planning.op import Shares, plan_replicas, shard_visits
from pallas_kernels.planning.reference import home_of

__all__ = ["Shares", "home_of", "plan_replicas", "shard_visits"]
