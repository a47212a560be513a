"""Capture: the normed rows that enter each MoE layer's router and experts, over training data."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jmoe.api import Model
from jmoe.brownout import Control
from jmoe.config import ModelConfig
from jmoe.experts import ExpertPool, ExpertTable
from jmoe.model import Params, Rows, attend, causal_mix, embed, moe, rms_norm, swiglu

Progress = Callable[[str, int, int], None]
"""`(what is being done, units done, units in all)`."""


def read_texts(data: Path) -> list[str]:
    """Texts of a data file: `prompt` + `answer` of JSON lines (`*.jsonl`), else its paragraphs.

    Raises ValueError for a file that is missing, empty, not UTF-8, or malformed, naming the line.
    """
    try:
        lines = data.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read data file {data}: {error}") from None
    texts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if data.suffix != ".jsonl":
            texts.append(line)
            continue
        try:
            row = json.loads(line)
            texts.append(row["prompt"] + row.get("answer", ""))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{data}, line {number}: expected a JSON object with string `prompt` and optional "
                f"`answer` ({error!r})"
            ) from None
    if not texts:
        raise ValueError(f"data file {data} holds no text")
    return texts


def token_batches(
    model: Model, texts: list[str], batch: int, length: int
) -> Iterator[tuple[Int[np.ndarray, "B S"], Int[np.ndarray, " B"]]]:
    """Right-padded token rows and their lengths; texts longer than `length` are cut into pieces."""
    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer; its inputs cannot be captured from text")
    pieces = []
    for text in texts:
        ids = [*model.tokenizer.encode(text), *model.config.eos_token_ids[:1]]
        pieces += [ids[i : i + length] for i in range(0, len(ids), length)]
    for start in range(0, len(pieces), batch):
        tokens = np.zeros((batch, length), np.int32)
        lengths = np.zeros(batch, np.int32)
        for i, ids in enumerate(pieces[start : start + batch]):
            tokens[i, : len(ids)], lengths[i] = ids, len(ids)
        yield tokens, lengths


def moe_inputs(
    cfg: ModelConfig,
    params: Params,
    pool: ExpertPool,
    table: ExpertTable,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
) -> list[Float[Array, "T d"]]:
    """Rows that enter each MoE layer after its norm, `T = B * S`, padding included."""
    batch, length = tokens.shape
    position = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    valid = position < jnp.repeat(lengths, length)
    rows = Rows(position, valid, jnp.zeros(batch * length, bool))
    mix = causal_mix(batch, length, cfg.head_dim**-0.5)
    x, captured = embed(params, tokens.reshape(-1)), []
    for (is_moe, _, count), segment in zip(cfg.segments(), params["segments"], strict=True):
        for i in range(count):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], segment)
            x, _ = attend(cfg, layer, x, position, lambda q, k, v: mix(q, k, v, jnp.int32(0), None))
            h = rms_norm(x, layer["mlp_norm"], cfg.rms_norm_eps)
            if is_moe:
                at = len(captured)
                captured.append(h)
                x, _ = moe(
                    cfg,
                    layer,
                    pool,
                    table.slots[at],
                    table.groups[at],
                    x,
                    rows,
                    Control.of(None),
                    max_active=cfg.num_experts,
                )
            else:
                x = x + swiglu(h, layer["gate_up"], layer["down"])
    return captured


_moe_inputs: Any = partial(jax.jit, static_argnums=0)(moe_inputs)


def capture(
    model: Model,
    data: Path,
    num_rows: int,
    *,
    batch: int = 32,
    length: int = 128,
    progress: Progress | None = None,
) -> list[Float[np.ndarray, "N d"]]:
    """Inputs of every MoE layer's experts, float32, at most `num_rows` rows each.

    Args:
        model: as `jmoe.load` returns it.
        data: JSON lines of tasks, or plain text.
        num_rows: rows (token positions) wanted; fewer come back where the data are fewer.
        batch: sequences a forward pass.
        length: longest sequence; longer texts are cut.
        progress: called with ("capture", rows so far, rows wanted).

    Raises ValueError for unreadable data or a model without tokenizer.
    """
    if num_rows < 1:
        raise ValueError(f"num_rows is {num_rows}; it must be at least 1")
    length = min(length, model.config.max_position)
    parts: list[list[np.ndarray]] = [[] for _ in range(model.config.num_moe_layers)]
    done = 0
    for tokens, lengths in token_batches(model, read_texts(data), batch, length):
        rows = _moe_inputs(
            model.config,
            model.params,
            model.pool,
            model.table,
            jnp.asarray(tokens),
            jnp.asarray(lengths),
        )
        keep = (np.arange(length) < lengths[:, None]).reshape(-1)
        for part, h in zip(parts, rows, strict=True):
            part.append(np.asarray(h.astype(jnp.float32))[keep])
        done += int(keep.sum())
        if progress is not None:
            progress("capture", min(done, num_rows), num_rows)
        if done >= num_rows:
            break
    return [np.concatenate(part)[:num_rows] for part in parts]
