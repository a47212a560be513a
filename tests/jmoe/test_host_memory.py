"""Arrays in the host's memory, with and without a CPU among jax's devices."""

import jax
import jax.numpy as jnp

from jmoe.host_memory import on_the_host


def test_without_a_cpu_arrays_are_made_where_others_are(monkeypatch):
    wanted = jax.devices()[0]

    def none_of(backend=None):
        raise RuntimeError(f"Unknown backend {backend}")  # with JAX_PLATFORMS=cuda

    with on_the_host():
        assert jnp.zeros(1).devices() == {jax.local_devices(backend="cpu")[0]}
    monkeypatch.setattr(jax, "local_devices", none_of)
    with on_the_host():
        assert jnp.zeros(1).devices() == {wanted}
