"""Placements as no server makes them, for what must work with any."""

import numpy as np

from jmoe.parallel.placement import from_hosts


def from_devices(device, num_devices, *, spare=0):
    return from_hosts(device[..., None] == np.arange(num_devices), spare=spare)


def at_random(num_layers, num_experts, num_devices, *, seed, spare=0):
    """Draws as many experts a device as `contiguous` gives it, anew for each layer."""
    rng = np.random.default_rng(seed)
    device = np.arange(num_experts) % num_devices
    layers = [rng.permutation(device) for _ in range(num_layers)]
    return from_devices(np.stack(layers), num_devices, spare=spare)


def by_load(load, num_devices, *, spare=0):
    """Places experts by load: the largest first, each on the device with least load."""
    capacity, device = -(-load.shape[1] // num_devices), np.zeros(load.shape, int)
    for layer, loads in enumerate(load):
        total, count = np.zeros(num_devices), np.zeros(num_devices, int)
        for expert in np.argsort(-loads, kind="stable"):
            to = int(np.argmin(np.where(count < capacity, total, np.inf)))
            device[layer, expert] = to
            total[to] += loads[expert]
            count[to] += 1
    return from_devices(device, num_devices, spare=spare)
