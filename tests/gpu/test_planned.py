"""Planning kernels on the GPU decide what the reference decides there."""

from functools import partial

import jax
import numpy as np
import pytest

from pallas_kernels import planning
from pallas_kernels.backend import references_only
from tests.planned import decide, draw


@pytest.mark.parametrize(("devices", "experts"), [(2, 8), (4, 60), (8, 128), (8, 192), (16, 128)])
def test_planning_equals_its_reference(devices, experts):
    how = {"num_replicas": 8, "per_pair": 2}
    kernels, plain = (jax.jit(partial(decide, **how)) for _ in range(2))
    for seed in range(20):
        counts, hosts = draw(seed, devices, experts)
        args = counts, hosts, planning.home_of(hosts)
        with references_only():
            want = jax.tree.map(np.asarray, plain(*args))
        got = jax.tree.map(np.asarray, kernels(*args))
        jax.tree.map(np.testing.assert_array_equal, got, want)
