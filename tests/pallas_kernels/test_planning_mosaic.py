"""Planning kernels: bit for bit what the reference decides; programs for an H200."""

from functools import partial

import jax
import jax.numpy as jnp
import mosaic as interpreter
import numpy as np
import pytest

from pallas_kernels import planning
from pallas_kernels.backend import references_only
from pallas_kernels.planning import mosaic
from tests.compile_for import compile_for, h200_mesh
from tests.compiled import count_launches
from tests.planned import decide, draw

pytestmark = pytest.mark.deep
in_a_hurry = pytest.mark.usefixtures("interpreted_in_a_hurry")

WAYS = {"interpreted": interpreter.interpreted, "sm90": interpreter.emulated}


def check(way, devices, experts, seeds, **how):
    return check_cases(way, [draw(seed, devices, experts) for seed in seeds], **how)


def check_cases(way, cases, **how):
    """Checks cases of one size; returns how many copies were decided on."""
    args = [(counts, hosts, planning.home_of(hosts)) for counts, hosts in cases]
    plain = jax.jit(partial(decide, **how))
    want = [jax.tree.map(np.asarray, plain(*each)) for each in args]
    kernels = jax.jit(partial(decide, **how))
    with pytest.MonkeyPatch.context() as patch, WAYS[way]():
        patch.setattr("pallas_kernels.planning.op.hopper", lambda: True)  # when it is traced
        got = [jax.tree.map(np.asarray, jax.block_until_ready(kernels(*each))) for each in args]
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got[0][0].dtype == want[0][0].dtype == bool
    return sum(replicas.sum() for replicas, _ in want)


@in_a_hurry
@pytest.mark.parametrize(
    ("devices", "experts", "how"),
    [
        (4, 12, {}),
        (8, 128, {"num_replicas": 8, "per_pair": 2}),
        (3, 70, {"per_pair": None, "alpha": 0.0}),
        (8, 192, {"num_replicas": 8, "per_pair": 3, "alpha": 1.0}),
        (2, 7, {"num_replicas": 3, "alpha": 1.0}),
        (16, 128, {"num_replicas": 2}),
        (4, 12, {"num_replicas": 0}),
        (1, 5, {"num_replicas": 1}),
    ],
)
def test_interpreted(devices, experts, how):
    made = check("interpreted", devices, experts, range(12), **how)
    assert (made > 20) == (how.get("num_replicas") != 0 and devices > 1)


@in_a_hurry
@pytest.mark.sized(exhaustive=("3-70-seeds1",))
@pytest.mark.parametrize(
    ("devices", "experts", "seeds"), [(4, 12, [0, 1, 2]), (3, 70, [0, 1, 2]), (8, 128, [3])]
)
def test_emulated(devices, experts, seeds):
    check("sm90", devices, experts, seeds)


@in_a_hurry
def test_no_visits_and_visits_of_one_expert():
    hosts = draw(0, 4, 12)[1]
    counts = (np.zeros((4, 12)), 500 * np.eye(12)[[3, 3, 3, 3]], np.full((4, 12), 7))
    check_cases("interpreted", [(jnp.asarray(c, jnp.int32), hosts) for c in counts])


@pytest.mark.parametrize(("devices", "experts"), [(8, 257), (20, 128)])
def test_what_the_kernels_do_not_take(devices, experts):
    assert not mosaic.supports(experts, devices)


def arguments(devices, experts):
    sds = jax.ShapeDtypeStruct
    return (
        sds((devices, experts), jnp.int32),
        sds((experts, devices), jnp.bool_),
        sds((experts,), jnp.int32),
    )


@pytest.mark.parametrize(("devices", "experts"), [(4, 12), (8, 128), (8, 192), (16, 128)])
def test_compiled_for_an_h200(capfd, monkeypatch, devices, experts):
    how = {"num_replicas": 8, "per_pair": 2}
    _, kernels = interpreter.compile_kernels(
        capfd, monkeypatch, partial(decide, **how), *arguments(devices, experts)
    )
    assert len(kernels) == 2
    assert [kernel.spill_bytes for kernel in kernels] == [0, 0]


def test_launches():
    """A kernel each, and what makes its arguments and reads its result: no loop of the host's."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra: jmoe[aot]")

    def count():
        exe = compile_for(h200_mesh(), decide, *arguments(8, 128))
        return count_launches(exe.as_text())

    assert count().get("while", 0) == 0
    assert sum(count().values()) <= 8
    with references_only():
        assert count()["while"] >= 3
