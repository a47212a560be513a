"""Logits of a checkpoint by Hugging Face transformers: the other side of the comparison. No jax."""

import os
from pathlib import Path

import numpy as np

DTYPES = ("bfloat16", "float32")


def logits(directory: Path, batches: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Returns float32 [batch, length, vocab] of int [batch, length], by the dtype that was computed
    in.

    The weights are loaded once, as bfloat16, and widened for float32. Attention and experts are the
    eager implementations: products of PyTorch, without tf32.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # there is nothing to be had from it
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        experts_implementation="eager",
    ).to(device)
    model.eval()
    found: dict[str, list[np.ndarray]] = {}
    for name in DTYPES:
        model = model.to(getattr(torch, name))
        found[name] = []
        for tokens in batches:
            with torch.no_grad():
                ids = torch.from_numpy(np.asarray(tokens, np.int64)).to(device)
                out = model(input_ids=ids, use_cache=False).logits
            found[name].append(out.float().cpu().numpy())
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return found
