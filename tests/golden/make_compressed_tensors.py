"""Make `compressed_tensors.npz`: matrices as compressed-tensors packs them, and as it reads them.

The format's own package is the oracle; the project never depends on it. In an environment of its
own (Python 3.11):

    pip install torch==2.13.0 compressed-tensors==0.20.1 numpy
    python tests/golden/make_compressed_tensors.py

Sizes are no multiples of groups, blocks or words where the format has room for that.
"""

import json
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

INT4 = {"num_bits": 4, "type": "int"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
CASES = {  # weights of the scheme, matrix [out, in], dtype of scales
    "group": (
        INT4 | {"strategy": "group", "group_size": 8, "symmetric": True},
        (19, 40),
        "bfloat16",
    ),
    "zeros": (
        INT4 | {"strategy": "group", "group_size": 32, "symmetric": False},
        (13, 96),
        "float16",
    ),
    "channel": (INT4 | {"strategy": "channel", "symmetric": True}, (9, 21), "float32"),
    "tensor": (FP8 | {"strategy": "tensor"}, (11, 23), "float32"),
    "fp8_channel": (FP8 | {"strategy": "channel"}, (11, 23), "bfloat16"),
    "block": (FP8 | {"strategy": "block", "block_structure": [16, 8]}, (41, 27), "float32"),
}


def scales_of(weight, args):
    """Returns scales, and zero points, that take a matrix's whole range."""
    rows, columns = weight.shape
    high, wide = {
        "group": (1, args.group_size),
        "channel": (1, columns),
        "tensor": (rows, columns),
        "block": tuple(args.block_structure or (1, 1)),
    }[args.strategy]
    counts = -(-rows // high), -(-columns // wide)
    low, most = np.zeros(counts), np.zeros(counts)
    for i, j in np.ndindex(counts):
        part = weight[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
        low[i, j], most[i, j] = part.min(), part.max()
    if args.symmetric:
        most = np.maximum(np.abs(low), np.abs(most))
        return most / (448 if args.type == "float" else 7.5), None
    scales = (most - low) / 15
    return scales, np.clip(np.round(-8 - low / scales), -8, 7)


def main():
    """Write the file."""
    arrays, rng = {}, np.random.default_rng(0)
    for name, (weights, shape, dtype) in CASES.items():
        args = QuantizationArgs(**weights)
        kind = "pack-quantized" if weights["type"] == "int" else "float-quantized"
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=kind)
        weight = rng.normal(size=shape).astype(np.float32)
        scales, zeros = scales_of(weight, args)
        state = {
            "weight": torch.tensor(weight),
            "weight_scale": torch.tensor(scales).to(getattr(torch, dtype)),
        }
        if args.strategy == "tensor":
            state["weight_scale"] = state["weight_scale"].reshape(1)
        if zeros is not None:
            state["weight_zero_point"] = torch.tensor(zeros).to(torch.int8)
        compressor = BaseCompressor.get_value_from_registry(kind)
        packed = compressor.compress(state, scheme)
        read = compressor.decompress(packed, scheme)["weight"]
        group = {
            "targets": ["Linear"],
            "weights": args.model_dump(mode="json"),
            "input_activations": None,
        }
        config = {"quant_method": "compressed-tensors", "format": kind}
        kinds = {}
        for key, tensor in packed.items():
            kinds[key] = str(tensor.dtype).removeprefix("torch.")
            plain = tensor.is_floating_point() and tensor.dtype not in (
                torch.float32,
                torch.float16,
            )
            if plain:  # NumPy has no such dtype: its bits
                tensor = tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.uint16)
            arrays[f"{name}.{key}"] = tensor.numpy()
        said = {
            "quantization_config": config | {"config_groups": {"group_0": group}},
            "kinds": kinds,
        }
        said |= {"shape": shape, "read_as": str(read.dtype).removeprefix("torch.")}
        arrays[f"{name}.json"] = np.array(json.dumps(said))
        arrays[f"{name}.read"] = read.float().numpy()
        print(name, {k: tuple(v.shape) for k, v in packed.items()}, read.dtype)
    np.savez_compressed(Path(__file__).with_name("compressed_tensors.npz"), **arrays)


if __name__ == "__main__":
    main()
