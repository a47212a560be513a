"""Tokens a second of Hugging Face transformers' continuous batching. No jax."""

import importlib.metadata
import os
import time
import traceback
from pathlib import Path
from typing import Any


def generate(model: Any, requests: list[list[Any]], max_batch: int) -> dict[str, Any]:
    """Serves all requests, at most `max_batch` at a time, each to its full length, greedily.

    Raises RuntimeError where one fails or the generating thread ends.
    """
    from transformers import GenerationConfig  # pyright: ignore[reportMissingImports]
    from transformers.generation.configuration_utils import (  # pyright: ignore[reportMissingImports]
        ContinuousBatchingConfig,
    )

    longest = max(count for _, count in requests)
    # No token ends a sequence: lengths are given.
    generation = GenerationConfig(
        max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # Without a GPU there is no free memory to size the cache by.
    cache = {} if model.device.type == "cuda" else {"num_blocks": 64, "max_batch_tokens": 256}
    batching = ContinuousBatchingConfig(max_requests_per_batch=max_batch, **cache)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching
    ) as manager:  # captures its CUDA graphs before it is timed
        start = time.perf_counter()
        for prompt, count in requests:
            manager.add_request(prompt, max_new_tokens=count)
        done, tokens = 0, 0
        while done < len(requests):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError(f"generation ended after {done} of {len(requests)} requests")
            elif result.is_finished():
                if result.error:
                    raise RuntimeError(f"a request failed: {result.error}")
                done += 1
                tokens += len(result.generated_tokens)
        spent_s = time.perf_counter() - start
    wanted = sum(count for _, count in requests)
    if tokens != wanted:
        raise RuntimeError(f"{tokens} tokens were generated and {wanted} asked for")
    return {
        "requests": len(requests),
        "output_tokens": tokens,
        "duration_s": spent_s,
        "output_tokens_s": tokens / spent_s,
        "attention": str(getattr(model.config, "_attn_implementation", "?")),
    }


def load(directory: Path, **implementations: str) -> tuple[Any, float]:
    """Returns a model of transformers in bfloat16, on the GPU if there is one, and the seconds that
    loading it took.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # it would look there for attention kernels
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **implementations)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return model, time.perf_counter() - begin


def run(directory: Path, asked: dict[str, list[list[Any]]], max_batch: int) -> dict[str, Any]:
    """Serves requests, [prompt ids, new tokens], by name: returns requests, tokens and seconds of
    each, or the error that came instead; and versions.
    """
    model, load_s = load(directory, attn_implementation="sdpa")
    found: dict[str, Any] = {
        "load_s": load_s,
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "experts": str(getattr(model.config, "_experts_implementation", "?")),
    }
    for name, requests in asked.items():
        try:
            generate(model, requests[:8], max_batch)  # compiles kernels
            found[name] = generate(model, requests, max_batch)
        except Exception as error:
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
    return found
