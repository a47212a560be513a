"""Tests run with array shapes checked and without silent dtype or rank promotion."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

install_import_hook(["jmoe", "pallas_kernels"], "beartype.beartype")
