"""Matrices that compressed-tensors packed are what it reads itself, bit for bit.

`tests/golden/make_compressed_tensors.py` makes the file with that package.
"""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jmoe.checkpoint import TensorFiles
from jmoe.config_fields import Fields
from jmoe.config_keys import fp8_block
from jmoe.int4 import int4
from tests.jmoe.conftest import GOLDEN

KINDS = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


@pytest.mark.parametrize("case", ["group", "zeros", "channel", "tensor", "fp8_channel", "block"])
def test_a_matrix_is_what_the_package_reads(tmp_path, case):
    with np.load(GOLDEN / "compressed_tensors.npz") as golden:
        said = json.loads(str(golden[f"{case}.json"]))
        want = golden[f"{case}.read"]
        tensors = {
            f"proj.{key}": golden[f"{case}.{key}"].view(KINDS.get(kind, kind))
            for key, kind in said["kinds"].items()
        }
    save_file(tensors, tmp_path / "model.safetensors")
    files, fields = TensorFiles(tmp_path), Fields(said, "config.json")
    name, shape, block = "proj.weight", tuple(said["shape"]), fp8_block(fields)
    if block:
        got = files.dequantized(name, block)
    else:
        packed = int4(fields)
        assert packed is not None
        needed = {one.name: one.shape for one in packed.tensors(name, shape)}
        assert {key: tensor.shape for key, tensor in tensors.items()}.items() <= needed.items()
        got = packed.dequantized(files.get, name, shape)
    assert np.abs(want).max() > 1
    np.testing.assert_array_equal(got.astype(KINDS.get(said["read_as"], said["read_as"])), want)
