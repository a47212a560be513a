"""Paged KV cache: sizes."""

import jax.numpy as jnp
import pytest

from jmoe.attention import make_cache, page_bytes
from jmoe.config import read_config
from jmoe.kv_cache import CacheSizes


@pytest.fixture(scope="module")
def cfg(request):
    return read_config(request.config.rootpath / "tests/golden/qwen3_moe")


def test_page_bytes_are_those_of_the_arrays(cfg):
    dtype = jnp.dtype(jnp.bfloat16)
    one, two = (make_cache(cfg, CacheSizes(n, 16, 1, 1, dtype)) for n in (1, 2))
    more = sum(a.nbytes for a in two) - sum(a.nbytes for a in one)
    assert page_bytes(cfg, 16, dtype) == (more,)
