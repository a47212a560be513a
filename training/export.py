"""Export: the trained parameters as a Hugging Face Qwen2-MoE directory.

`python -m training.export --run DIR --out DIR` exports the newest checkpoint of a training run.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jmoe import layout
from jmoe.checkpoint import save_tensors
from jmoe.config import ModelConfig, from_hf
from training.geometry import BUNDLED, EOS_ID, HF_CONFIG
from training.network import Params, init_params

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def to_tensors(cfg: ModelConfig, params: Params) -> dict[str, Array]:
    """Returns arrays (`[out, in]`) by Hugging Face tensor name, in the parameters' dtype."""
    (segment,) = params["segments"]
    tensors = layout.split(layout.top(cfg), params)
    for i in range(cfg.num_layers):
        own = {key: leaf[i] for key, leaf in segment.items()}
        tensors |= layout.split(layout.layer(cfg, i, is_moe=True), own)
        for e in range(cfg.num_experts):
            experts = {key: leaf[i, e] for key, leaf in params["experts"].items()}
            tensors |= layout.split(layout.expert(cfg, i, e), experts)
    return tensors


def export_hf(config: dict[str, Any], params: Params, tokenizer_dir: Path, out: Path) -> None:
    """Writes config files, bfloat16 `model.safetensors` and the tokenizer of `tokenizer_dir`.

    Args:
        config: contents of `config.json`.
        params: trained parameters; every layer MoE, embeddings tied.
        tokenizer_dir: holds `tokenizer.json` and `tokenizer_config.json`.
        out: directory, made if absent.
    """
    out.mkdir(parents=True, exist_ok=True)
    tensors = to_tensors(from_hf(config), params)
    low = {name: np.asarray(tensor.astype(jnp.bfloat16)) for name, tensor in tensors.items()}
    save_tensors(out / "model.safetensors", low, {"format": "pt"})
    generation = {
        "bos_token_id": EOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        "do_sample": False,
    }
    for name, content in (("config", config), ("generation_config", generation)):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_dir / name, out / name)


def newest_params(run: Path, cfg: ModelConfig) -> tuple[int, Params]:
    """Returns the step and parameters of a run's newest checkpoint. Raises ValueError where there
    is none.
    """
    import orbax.checkpoint as ocp

    shapes = {"params": jax.eval_shape(lambda: init_params(cfg, 0))}
    with ocp.CheckpointManager((run / "checkpoints").absolute()) as manager:
        step = manager.latest_step()
        if step is None:
            raise ValueError(f"{run} holds no checkpoint")
        restored = manager.restore(
            step, args=ocp.args.PyTreeRestore(item=shapes, partial_restore=True)
        )
    return step, restored["params"]


def main() -> None:
    """Exports the newest checkpoint from the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.export", description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    step, params = newest_params(args.run, BUNDLED)
    export_hf(HF_CONFIG, params, args.run, args.out)
    print(f"step {step} exported to {args.out}")


if __name__ == "__main__":
    main()
