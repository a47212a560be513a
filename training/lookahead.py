"""Fits the probes that guess each layer's routing one layer ahead (`jmoe.parallel.probe`).

`python -m training.lookahead --model DIR --data FILE` runs texts through a model and writes
`lookahead.safetensors` beside it, or to `--out`. A server on a mesh that copies experts while a
step runs guesses with it. One run over 20,000 rows is enough for the bundled model.
"""

import argparse
from itertools import chain
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jmoe
from jmoe.api import resolve
from jmoe.model import layers_of
from jmoe.moe import router
from jmoe.parallel.probe import PROBE_FILE, Probe, Sums, save_probes
from training.distill.data import read_texts
from training.evaluation.quality import moe_inputs

LENGTH, AT_ONCE = 128, 16
"""Tokens a text, longer ones are cut; and texts of one program."""


_router = jax.jit(router, static_argnums=0)
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
    layers = [layer for layer, is_moe in layers_of(cfg, model.params) if is_moe]
    whole = jnp.full(AT_ONCE, LENGTH, jnp.int32)
    sums: list[Sums] = []
    for first in range(0, len(texts), AT_ONCE):
        tokens, real = np.zeros((AT_ONCE, LENGTH), np.int32), np.zeros((AT_ONCE, LENGTH))
        for row, text in enumerate(texts[first : first + AT_ONCE]):
            count = min(len(text), LENGTH, max(0, num_rows))
            tokens[row, :count], real[row, :count] = text[:count], 1
            num_rows -= count
        entering = moe_inputs(cfg, model.weights, jnp.asarray(tokens), whole)
        logits = [_router(cfg, layer, x)[1] for layer, x in zip(layers, entering, strict=True)]
        counts = jnp.asarray(real.reshape(-1), jnp.float32)
        pairs = zip(entering, logits[1:], strict=False)
        now = [_sums(x, of_next, counts) for x, of_next in pairs]
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
