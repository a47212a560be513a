"""Which ptxas may compile kernels: CUDA 12.8's and 12.9's miscompile causal masks."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import backend
from pallas_kernels.paged_attention import common

PTXAS = """#!/bin/sh
case "$1" in --version) echo "Cuda compilation tools, release 12.8, V12.8.93"; exit 0;; esac
echo "ptxas x, line 1; fatal   : Unsupported .version 99.99; current version is '8.7'" >&2
exit 1
"""
ASK = """
from pallas_kernels import backend
version = backend.ptxas_version()
print(version)
backend.check_ptxas(version)
"""


@pytest.mark.parametrize(("version", "release"), [(87, "12.8"), (88, "12.9")])
def test_those_that_miscompile_are_refused_with_what_to_do(version, release):
    with pytest.raises(RuntimeError, match=rf"CUDA {release}.*Install CUDA 13") as error:
        backend.check_ptxas(version)
    assert "PATH" in str(error.value)


@pytest.mark.parametrize("version", [86, 90, 92, None])
def test_others_are_taken(version):
    backend.check_ptxas(version)


def test_a_hopper_gpu_is_not_used_with_one_that_miscompiles(monkeypatch):
    class Gpu:
        compute_capability = "9.0"

    monkeypatch.setattr(backend.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(backend.jax, "devices", lambda: [Gpu()])
    monkeypatch.setattr(backend, "ptxas_version", lambda: 87)
    backend._check_ptxas_found.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="miscompiles causal masks"):
            backend.hopper()
        with backend.references_only():
            assert not backend.hopper()
        monkeypatch.setattr(backend, "ptxas_version", lambda: 90)
        assert backend.hopper()
    finally:
        backend._check_ptxas_found.cache_clear()


def test_kernels_have_a_block_for_each_multiprocessor_there_is(monkeypatch):
    assert backend.num_sms() == 132  # where there is no GPU
    pcie = SimpleNamespace(compute_capability="9.0", core_count=114)
    monkeypatch.setattr(backend.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(backend.jax, "devices", lambda: [pcie])
    assert backend.num_sms() == 114
    with backend.traced_for("cuda"):
        assert backend.num_sms() == 132
    q = jax.ShapeDtypeStruct((64, 32, 128), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((2, 64, 4, 64, 128), jnp.bfloat16)
    sizes = common.sizes_of(q, pages, None, None)
    assert sizes is not None
    assert sizes.num_blocks % 114 == 0


def test_the_ptxas_in_path_is_the_one_that_is_asked(tmp_path):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax finds ptxas by its CUDA plugin")
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(PTXAS)
    ptxas.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "87"
    assert "miscompiles causal masks" in done.stderr
