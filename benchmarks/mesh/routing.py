"""Which experts rows visit, and which devices have them.

Popularity falls with an expert's rank, by Zipf's law (weight r^-s at rank r) or exponentially, as
the paper fitted it (section 5, without the rate). A row's K experts are K different ones, drawn one
after another by weight (Plackett and Luce), which is what a top-K of logits with Gumbel noise
gives. *same*: the order of experts is the same in every layer; *different*: every layer has an
order of its own. Rows are independent of each other and of their own past.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jmoe.parallel.copies import with_copies

LARGE = 64 * 64  # experts x devices, beyond which copies are placed by a quicker rule
NUM_SETS = 4096  # of K experts that a layer's rows draw from


class Routing(NamedTuple):
    """What rows choose from."""

    popularity: Float[np.ndarray, "layers experts"]  # share of visits
    sets: Int[np.ndarray, "layers sets K"]  # int32, each as likely as the others


class Placement(NamedTuple):
    """Who has which expert; several hosts of an expert take its visits in turns."""

    hosts: Int[np.ndarray, "layers experts most"]  # int32, devices; the first `num_hosts` count
    num_hosts: Int[np.ndarray, "layers experts"]  # int32

    def shares(self, num_devices: int) -> Float[np.ndarray, "layers experts devices"]:
        """Of an expert's visits that fall to each device."""
        layers, experts, most = self.hosts.shape
        found = np.zeros((layers, experts, num_devices))
        for host in range(most):
            there = host < self.num_hosts
            rows, columns = np.nonzero(there)
            found[rows, columns, self.hosts[there, host]] += 1 / self.num_hosts[there]
        return found


def zipf(num_experts: int, exponent: float) -> Float[np.ndarray, "experts"]:
    """Returns weights by rank: r^-s; 0 is uniform."""
    return np.arange(1, num_experts + 1) ** -exponent


def exponential(num_experts: int, rate: float) -> Float[np.ndarray, "experts"]:
    """Returns weights by rank: e^(-rate r)."""
    return np.exp(-rate * np.arange(num_experts))


def draw_routing(
    num_layers: int, weights: Float[np.ndarray, "experts"], top_k: int, same: bool, seed: int
) -> Routing:
    """Sets of experts of each layer, and what they come to; `weights` by rank."""
    rng = np.random.default_rng(seed)
    num_experts = len(weights)
    order = rng.permutation(num_experts)
    sets = np.empty((num_layers, NUM_SETS, top_k), np.int32)
    popularity = np.empty((num_layers, num_experts))
    for layer in range(num_layers):
        log = np.empty(num_experts)
        log[order if same else rng.permutation(num_experts)] = np.log(weights)
        noisy = log + rng.gumbel(size=(NUM_SETS, num_experts))
        picked = np.argpartition(-noisy, top_k - 1, axis=1)[:, :top_k]
        sets[layer] = picked
        popularity[layer] = np.bincount(picked.ravel(), minlength=num_experts) / picked.size
    if same:
        popularity[:] = popularity.mean(axis=0)
    return Routing(popularity, sets)


def place(
    popularity: Float[np.ndarray, "layers experts"], num_devices: int, spare: int
) -> Placement:
    """Returns the experts in ranges of ids, as evenly as can be; beside them copies in `spare`
    slots a device.

    Copies are placed by true popularity, by the server's own rule (`jmoe.parallel.copies`), or on
    large meshes, where that takes minutes, one after another for the busiest expert. With more
    devices than experts every expert has a device and the others are further hosts, dealt out in
    turn.
    """
    num_layers, num_experts = popularity.shape
    homes = np.zeros((num_experts, num_devices), bool)
    for part in range(max(num_experts, num_devices)):
        expert = part % num_experts
        device = part if num_devices >= num_experts else part * num_devices // num_experts
        homes[expert, device] = True
    copies = with_copies if homes.size <= LARGE else _busiest_first
    by_layer = []
    for layer in range(num_layers):
        before = layer and (popularity[layer] == popularity[layer - 1]).all()
        by_layer.append(by_layer[-1] if before else copies(popularity[layer], homes, spare))
    hosted = np.stack(by_layer)
    num_hosts = hosted.sum(axis=2).astype(np.int32)
    hosts = np.argsort(~hosted, axis=2, kind="stable")[:, :, : num_hosts.max()].astype(np.int32)
    return Placement(np.ascontiguousarray(hosts), num_hosts)


def _busiest_first(
    load: Float[np.ndarray, "experts"], homes: Bool[np.ndarray, "experts devices"], spare: int
) -> Bool[np.ndarray, "experts devices"]:
    """Returns a copy for the expert with most load a host, on the emptiest device that may; and
    again.
    """
    hosts, free = homes.copy(), np.full(homes.shape[1], spare)
    share = load / hosts.sum(axis=1)
    loads = share @ hosts
    for _ in range(spare * homes.shape[1]):
        expert = int(share.argmax())
        at = np.where((free > 0) & ~hosts[expert], loads, np.inf)
        device = int(at.argmin())
        if at[device] == np.inf:
            break  # the busiest is everywhere that it may be
        loads[hosts[expert]] -= share[expert]
        hosts[expert, device] = True
        free[device] -= 1
        share[expert] = load[expert] / hosts[expert].sum()
        loads[hosts[expert]] += share[expert]
    return hosts
