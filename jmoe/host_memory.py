"""Arrays in the memory of the host, where jax has another device by default."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def on_the_host() -> Iterator[None]:
    """Makes arrays in the host's memory, unless JAX_PLATFORMS leaves the CPU out."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = None
    with jax.default_device(device):
        yield
