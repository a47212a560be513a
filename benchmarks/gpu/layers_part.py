"""Layers of published models at full geometry against PyTorch on the same GPU.

Random weights are written as a Hugging Face directory of few layers; transformers and jmoe both
load it. The reference is transformers in float32. What is asked: in bfloat16 jmoe may be off by no
more than `ALLOWED` times what transformers in bfloat16 is off itself: in the logits of whole
sequences (`jmoe.forward`), and in log-probabilities of a prefill step and of decode steps over the
paged cache.
"""

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import hf_dir, models, torch_generate
from benchmarks.gpu.part import Case, Context, alone
from benchmarks.gpu.sizes import Sizes, hf_config, skew_of
from jmoe import api
from jmoe.api import Model
from jmoe.config import from_hf
from jmoe.forward import forward
from jmoe.packed_rows import empty_deltas, pack_row
from jmoe.random_model import random_model
from jmoe.sampling import token_logprobs
from jmoe.steps import decode_step, make_state, prefill_step, score_step

DEPENDS = (
    *("pallas_kernels", "jmoe", "benchmarks/gpu/hf_dir.py", "benchmarks/gpu/torch_generate.py"),
)
START_S = 10.0
ALLOWED = {0.5: 1.5, 0.75: 2.0}
"""Quantile of the rows' errors: how many times PyTorch's own it may be."""
DTYPES = ("bfloat16", "float32")


def cases(sizes: Sizes) -> list[Case]:
    """Returns a case for each model."""
    return [Case(model, 75.0, {"depth": sizes.layer_depth}) for model in sizes.layer_models]


def compare(context: Context, case: Case) -> dict[str, Any]:
    """Compares one model and returns the record."""
    sizes = context.sizes
    models.use_compilation_cache(context.cache)
    config = hf_config(case.name, sizes.layer_depth)
    directory = context.scratch / f"layers-{case.name}"
    skew = skew_of(sizes, case.name)
    hf_dir.write(directory, config, random_model(from_hf(config), sizes.seed, "bfloat16", (), skew))
    rng = np.random.default_rng(sizes.seed)
    batches = [
        rng.integers(config["vocab_size"], size=(batch, length), dtype=np.int32)
        for batch, length, _ in sizes.layer_shapes
    ]
    try:
        model = api.load(directory, "bfloat16")
        theirs = (_stand_in if sizes.dry else _by_torch)(directory, batches)
        checks = [
            _check(model, tokens, decoded, theirs["float32"][i], theirs["bfloat16"][i])
            for i, (tokens, (_, _, decoded)) in enumerate(
                zip(batches, sizes.layer_shapes, strict=True)
            )
        ]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    judged = {
        f"{check['batch']}x{check['length']} {name}": errors
        for check in checks
        for name, errors in check["errors"].items()
    }
    record: dict[str, Any] = {
        "router_skew": skew,
        "allowed": {f"q{100 * q:.0f}": ratio for q, ratio in ALLOWED.items()},
        "checks": checks,
        "figures": {
            "worst_median_ratio": max(errors["ratio"]["q50"] for errors in judged.values()),
            "worst_q75_ratio": max(errors["ratio"]["q75"] for errors in judged.values()),
        },
    }
    wrong = [name for name, errors in judged.items() if not errors["passed"]]
    if wrong:
        record["failed"] = f"further off than allowed: {', '.join(wrong)}; see checks"
    return record


session = alone(compare)


def _stand_in(directory: Path, batches: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Returns jmoe's own logits in two dtypes, for a machine without PyTorch: tests only the
    comparison.
    """
    return {
        dtype: [np.asarray(forward(api.load(directory, dtype), tokens)) for tokens in batches]
        for dtype in DTYPES
    }


def _by_torch(directory: Path, batches: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Returns logits by Hugging Face transformers: float32 [batch, length, vocab] of int [batch,
    length], by the dtype that was computed in.

    The weights are loaded once, as bfloat16, and widened for float32. Attention and experts are the
    eager implementations: products of PyTorch, without tf32.
    """
    import torch  # pyright: ignore[reportMissingImports]

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model, _ = torch_generate.load(directory, **eager)
    found: dict[str, list[np.ndarray]] = {}
    for name in DTYPES:
        model = model.to(getattr(torch, name))
        found[name] = []
        for tokens in batches:
            with torch.no_grad():
                ids = torch.from_numpy(np.asarray(tokens, np.int64)).to(model.device)
                out = model(input_ids=ids, use_cache=False).logits
            found[name].append(out.float().cpu().numpy())
    del model
    torch.cuda.empty_cache()  # which does nothing where there is no GPU
    return found


def _check(
    model: Model, tokens: np.ndarray, decoded: int, exact: Any, theirs: Any
) -> dict[str, Any]:
    """Returns the errors of whole sequences, of a prefill step and of `decoded` decode steps."""
    whole = forward(model, tokens)
    theirs, exact = jnp.asarray(theirs), jnp.asarray(exact)
    errors = {"logits": judge(*map(np.asarray, _row_errors(whole, theirs, exact)))}
    prefill, steps = paged_logprobs(model, tokens, decoded)
    for name, (where, token, ours) in (("prefill", prefill), ("decode", steps)):
        want = _logprobs(exact, where, token)
        rows = abs(ours - want), abs(_logprobs(theirs, where, token) - want)
        errors[f"{name}_logprobs"] = judge(*rows)
    best = jnp.argmax(exact, axis=-1)
    agree = {
        name: float(jnp.mean(jnp.argmax(found, axis=-1) == best))
        for name, found in (("jmoe", whole), ("torch_bfloat16", theirs))
    }
    shape = {"batch": tokens.shape[0], "length": tokens.shape[1], "decode_steps": decoded}
    return {**shape, "errors": errors, "same_best_token": agree}


def judge(ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Returns the errors of rows against float32, by jmoe and by PyTorch in bfloat16.

    Where two experts of a row are nearly as good, rounding decides between them, and the row is off
    by far more than others. So the middle of both distributions is compared, and rows far outside
    (ten times PyTorch's median) are counted apart: chance gives either side a few, and what follows
    them in their sequences.
    """
    quantiles = {
        f"q{100 * q:.0f}": (float(np.quantile(ours, q)), float(np.quantile(theirs, q)))
        for q in ALLOWED
    }
    far = 10 * np.median(theirs)
    outliers = int(np.sum(~(ours <= far))), int(np.sum(theirs > far))  # NaN is far off
    ratios = {
        name: a / b if b else (0.0 if a == 0 else math.inf) for name, (a, b) in quantiles.items()
    }
    kept = all(r <= a for r, a in zip(ratios.values(), ALLOWED.values(), strict=True))
    few = outliers[0] <= 2 * outliers[1] + 0.05 * ours.size
    return {
        "rows": ours.size,
        "jmoe": {name: a for name, (a, _) in quantiles.items()},
        "torch_bfloat16": {name: b for name, (_, b) in quantiles.items()},
        "ratio": ratios,
        "far_off": {"jmoe": outliers[0], "torch_bfloat16": outliers[1]},
        "passed": bool(kept and few),
    }


@jax.jit
def _row_errors(ours: Any, theirs: Any, exact: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the relative error of each row's logits, ours and theirs."""
    size = jnp.sum(exact**2, axis=-1)
    gaps = (jnp.sum((found - exact) ** 2, axis=-1) for found in (ours, theirs))
    return tuple(jnp.sqrt(gap / size) for gap in gaps)  # type: ignore[return-value]


def _logprobs(logits: jax.Array, where: tuple[Any, Any], token: np.ndarray) -> np.ndarray:
    """Returns the log-probability of one token in each of the rows `where`."""
    rows = logits[tuple(map(jnp.asarray, where))]
    return np.asarray(token_logprobs(rows, jnp.asarray(token, jnp.int32)), np.float64)


Seen = tuple[tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]
"""((sequence, position) of rows, a token of each, its log-probability as jmoe has it)."""


def paged_logprobs(model: Model, tokens: np.ndarray, decoded: int) -> tuple[Seen, Seen]:
    """Runs a prefill step over all but the last `decoded` tokens, then decodes those one by one.

    Decode steps are fed the tokens that are given, whatever was sampled; what is looked at is the
    log-probability of the token they would have chosen.
    """
    cfg, (batch, length) = model.config, tokens.shape
    first = length - decoded
    page_size = 64 if length > 64 else 8
    blocks = -(-length // page_size)
    sizes = {"num_slots": batch, "num_pages": batch * blocks, "page_size": page_size}
    state = make_state(cfg, max_blocks=blocks, dtype=model.dtype, **sizes)
    pages = np.random.default_rng(0).permutation(batch * blocks).astype(np.int32)
    state = state._replace(block_table=jnp.asarray(pages.reshape(batch, blocks)))
    control = jnp.asarray([100, 0], jnp.int32)
    options = {"max_active": cfg.num_experts}

    def launch(step: Any, state: Any, *arrays: np.ndarray) -> Any:
        args = (model.weights, state, *map(jnp.asarray, arrays), control)
        return step(*args)

    rows = np.stack(
        [
            pack_row(b, kv_len=first, q_len=first, next_token=int(tokens[b, first]))
            for b in range(batch)
        ]
    )
    prompts = tokens[:, :first].reshape(-1)
    step = jax.jit(partial(prefill_step, cfg, keep_hidden=True, **options), donate_argnums=1)
    state, out = launch(step, state, prompts, rows, empty_deltas(1))
    score = jax.jit(partial(score_step, cfg))
    scores = score(model.params, out.hidden, jnp.asarray(prompts), jnp.asarray(rows))
    sequence, position = np.divmod(np.arange(batch * first), first)
    following = tokens[sequence, position + 1]
    seen = (sequence, position), following, np.asarray(scores.logprobs, np.float64)[:, 0]
    step = jax.jit(partial(decode_step, cfg, **options), donate_argnums=1)
    chosen, logprobs = [], []
    for at in range(first, length):
        state = state._replace(last_token=jnp.asarray(tokens[:, at]))
        rows = np.stack([pack_row(b, kv_len=at + 1) for b in range(batch)])
        state, out = launch(step, state, rows, empty_deltas(1))
        chosen.append(np.asarray(out.tokens))
        logprobs.append(np.asarray(out.logprobs, np.float64))
    sequence, position = np.divmod(np.arange(batch * decoded), decoded)
    order = [np.stack(a, axis=1).reshape(-1) for a in (chosen, logprobs)]
    return seen, ((sequence, position + first), order[0], order[1])
