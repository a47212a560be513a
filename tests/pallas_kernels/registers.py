"""A fixture for kernels whose weights go to wgmma from registers."""

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks


@pytest.fixture
def weights_in_registers(monkeypatch):
    """Lets wgmma's first operand be an array, since the interpreter takes operands from memory
    only.
    """
    original = gpu_callbacks.wgmma

    def read(key, transforms, thread):
        shared = gpu_callbacks._get_shared_memory()
        key = gpu_callbacks.HostAllocationKey.from_array(key)
        where = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        found = shared.access(key, where)
        return key, found, shared.get_buffer_content(key, found, thread)[0]

    def wgmma(*, token, thread, a_allocation_key_as_array, **rest):
        a = np.asarray(a_allocation_key_as_array)
        if a.ndim == 1:
            a = a_allocation_key_as_array
            return original(token=token, thread=thread, a_allocation_key_as_array=a, **rest)
        _, _, b = read(rest["b_allocation_key_as_array"], rest["b_transforms"], thread)
        key, where, acc = read(rest["acc_allocation_key_as_array"], rest["acc_transforms"], thread)
        product = acc + a.astype(np.float32) @ np.asarray(b, np.float32)
        gpu_callbacks._get_shared_memory().store_buffer_content(key, where, product, thread)
        return token

    monkeypatch.setattr(gpu_callbacks, "wgmma", wgmma)
