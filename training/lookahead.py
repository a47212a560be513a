"""Fits the probes that guess each layer's routing one layer ahead (`jmoe.parallel.probe`).

`python -m training.lookahead --model DIR --data FILE` runs texts through a model and writes
`lookahead.safetensors` beside it, or to `--out`. A server on a mesh that copies experts while a
step runs guesses with it. One run over 20,000 rows is enough for the bundled model.

Letters: T rows, L MoE layers, d model width, K picks a row, m experts.
"""

import argparse
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import jmoe
from jmoe.api import resolve
from jmoe.brownout import Control
from jmoe.config import ModelConfig
from jmoe.experts import ExpertTable
from jmoe.model import attend, embed, layers_of
from jmoe.moe import RoutedRows, dense_mlp, moe, route, router
from jmoe.parallel.probe import PROBE_FILE, Probe, Sums, save_probes
from jmoe.rope import rotation
from jmoe.weights import Weights
from training.distill.data import read_texts

LENGTH, AT_ONCE = 128, 16
"""Tokens a text, longer ones are cut; and texts of one program."""


class Routed(NamedTuple):
    """Rows that enter one MoE layer, and what its router says of them."""

    x: Float[Array, "T d"]  # rows that enter the MoE block
    ids: Int[Array, "T K"]  # chosen
    logits: Float[Array, "T m"]


def routing_of(cfg: ModelConfig, weights: Weights, tokens: Int[Array, "B T"]) -> list[Routed]:
    """Returns the routers' inputs and logits for texts, padding included, by layer, without
    brownout.
    """
    batch, length = tokens.shape
    positions, out = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch), []
    x = embed(cfg, weights.params, tokens.reshape(-1))
    for (layer, is_moe), kind in zip(
        layers_of(cfg, weights.params), cfg.layer_attention, strict=True
    ):
        table = (weights.table.slots[len(out)], weights.table.groups[len(out)]) if is_moe else None
        attention = kind.causal(batch, length)
        x, found = _layer(cfg, layer, weights.pool, table, x, positions, attention)
        out += [found] if is_moe else []
    return out


@partial(jax.jit, static_argnums=0)
def _layer(cfg, layer, pool, table, x, positions, attention):
    yes = jnp.ones(x.shape[0], bool)
    cos_sin = rotation(positions, cfg.rope, cfg.head_dim)
    x, _ = attend(cfg, layer, x, cos_sin, attention, jnp.int32(0), None)
    if table is None:
        return dense_mlp(cfg, layer, x), None
    found = Routed(x, route(cfg, layer, x)[2], router(cfg, layer, x)[1])
    rows = RoutedRows(positions, yes, ~yes)
    none, most = Control.of(None), cfg.num_experts
    return moe(cfg, layer, pool, ExpertTable(*table), x, rows, none, max_active=most)[0], found


_sums, _fit = jax.jit(Sums.of), jax.jit(Sums.fit, static_argnames="ridge")


def fit_probes(
    model: jmoe.Model, texts: list[list[int]], *, num_rows: int, ridge: float = 1e-3
) -> Probe:
    """Returns the probes of all MoE layers but the last, stacked, from the first `num_rows` tokens
    of texts.

    Raises ValueError for a model with one MoE layer, or fewer rows than a probe has inputs.
    """
    cfg = model.config
    if cfg.num_moe_layers < 2:
        raise ValueError(f"{model.name} has {cfg.num_moe_layers} MoE layers; there is no next one")
    given = sum(min(len(text), LENGTH) for text in texts)
    if min(num_rows, given) < cfg.d_model:
        raise ValueError(
            f"{min(num_rows, given)} rows are too few: a probe of {model.name} has {cfg.d_model} "
            "inputs; give more text, or a larger --rows"
        )
    sums: list[Sums] = []
    for first in range(0, len(texts), AT_ONCE):
        tokens, real = np.zeros((AT_ONCE, LENGTH), np.int32), np.zeros((AT_ONCE, LENGTH))
        for row, text in enumerate(texts[first : first + AT_ONCE]):
            count = min(len(text), LENGTH, max(0, num_rows))
            tokens[row, :count], real[row, :count] = text[:count], 1
            num_rows -= count
        found = routing_of(cfg, model.weights, jnp.asarray(tokens))
        counts = jnp.asarray(real.reshape(-1), jnp.float32)
        now = [_sums(a.x, b.logits, counts) for a, b in pairwise(found)]
        sums = jax.tree.map(jnp.add, sums, now) if sums else now
        if num_rows <= 0:
            break
    probes = [_fit(one, ridge=ridge) for one in sums]
    return Probe(*(jnp.stack(parts) for parts in zip(*probes, strict=True)))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Fits the probes of a model.")
    parser.add_argument("--model", default="bundled", help="directory, or bundled")
    parser.add_argument("--data", type=Path, help="texts: *.jsonl, or one a line; as for distill")
    parser.add_argument("--rows", type=int, default=20_000, help="tokens to fit on")
    parser.add_argument("--ridge", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, help=f"folder for {PROBE_FILE}; default: the model's")
    args = parser.parse_args()
    try:
        directory = resolve(args.model)
        out = args.out or directory
        if not out.is_dir():
            raise ValueError(f"--out is {out}; there is no such folder")
        model = jmoe.load(args.model, "float32", ways=[])
        if model.tokenizer is None:
            raise ValueError(f"{model.name} has no tokenizer, which the texts need")
        data = args.data or directory / "tasks.jsonl"
        texts = [
            [*chain(*text.token_ids)]
            if text.token_ids
            else model.tokenizer.encode(text.prompt + text.answer)
            for text in read_texts(data, model.tokenizer)
        ]
        probes = fit_probes(model, texts, num_rows=args.rows, ridge=args.ridge)
    except ValueError as error:
        parser.error(str(error))
    save_probes(out, probes)
    print(f"{out / PROBE_FILE}: {len(probes.bias)} probes")


if __name__ == "__main__":
    main()
