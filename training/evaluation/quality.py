"""Perplexity of text, and the output error of MoE layers, under a brownout setting."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jmoe.api import Model
from jmoe.attention import causal_attention
from jmoe.brownout import Brownout, Control
from jmoe.config import ModelConfig
from jmoe.experts import ExpertTable, Pool
from jmoe.forward import forward
from jmoe.model import StepData, embed, layers_of, run_layers
from jmoe.moe import Asked, RoutedRows, alone, router
from jmoe.sampling import scored
from jmoe.weights import Params, Weights

CAPTURE_BATCH = 32  # sequences of a forward pass that captures inputs
_LENGTHS = 32  # lengths of those that score answers are multiples of it: few programs


def windows(
    tokens: Sequence[int], length: int, per_step: int
) -> list[tuple[Int[np.ndarray, "B S"], Int[np.ndarray, " B"]]]:
    """Returns a text cut for `perplexity`: (token rows, how many of a row's last targets count) a
    step.

    Every step has `per_step` rows of `length` tokens (or of the whole text, where it is shorter).
    The last window overlaps the one before it, and the last step is filled up with the text's first
    windows; what is seen twice counts once.
    """
    length = min(length, len(tokens))
    starts = list(range(0, len(tokens) - length, length))
    counts = [length - 1] * len(starts)
    left = len(tokens) - length * len(starts)  # tokens of the last window that are new
    starts.append(len(tokens) - length)
    # Its first token is new to the text but has no context only where the window starts there.
    counts.append(left - (left == length))
    for i in range(-len(starts) % per_step):
        starts.append(starts[i])
        counts.append(0)
    rows = np.stack([np.asarray(tokens[start : start + length], np.int32) for start in starts])
    steps = range(0, len(starts), per_step)
    return [(rows[i : i + per_step], np.array(counts[i : i + per_step], np.int32)) for i in steps]


def perplexity(
    model: Model,
    steps: Sequence[tuple[Int[np.ndarray, "B S"], Int[np.ndarray, " B"]]],
    brownout: Brownout | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> float:
    """Returns `exp` of the mean negative log-likelihood of the tokens that `windows` counts.

    Each step is one `jmoe.forward`: brownout plans over all its rows, as in a prefill step.
    """
    total, count = 0.0, 0
    for rows, counts in steps:
        logits = forward(model, rows, brownout)
        logprobs = np.asarray(_next_logprobs(logits, jnp.asarray(rows)))[..., 0]
        taken = np.arange(rows.shape[1] - 1) >= rows.shape[1] - 1 - counts[:, None]
        total += float(logprobs[taken].sum(dtype=np.float64))
        count += int(taken.sum())
        progress(len(rows))
    return math.exp(-total / count)


def losses(
    model: Model,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
) -> tuple[list[float], list[int]]:
    """Returns what brownout cost each greedy answer: by how much the log-probabilities of its
    tokens, as they were drawn, are above those under the exact model, summed, in nats; and how many
    of its tokens are not the exact model's first choice.
    """
    exact = answer_logprobs(model, prompts, answers)
    pairs = zip(logprobs, exact, strict=True)
    excess = [float(np.sum(drawn) - own[:, 0].sum()) for drawn, own in pairs]
    return excess, [int(np.sum(own[:, 0] < own[:, 1])) for own in exact]


def answer_logprobs(
    model: Model, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[Float[np.ndarray, "n 2"]]:
    """Returns the log-probabilities of each answer's tokens under the exact model, and those of the
    likeliest ones there.
    """
    whole = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
    by_length = sorted(range(len(whole)), key=lambda at: len(whole[at]))
    found = [np.zeros((0, 2))] * len(whole)
    for start in range(0, len(whole), CAPTURE_BATCH):
        part = by_length[start : start + CAPTURE_BATCH]
        length = -(-len(whole[part[-1]]) // _LENGTHS) * _LENGTHS
        rows = np.zeros((CAPTURE_BATCH, min(length, model.config.max_position)), np.int32)
        for row, at in zip(rows, part, strict=False):
            row[: len(whole[at])] = whole[at]
        exact = np.asarray(_next_logprobs(forward(model, rows), jnp.asarray(rows)), np.float64)
        for row, at in zip(exact, part, strict=False):
            found[at] = row[len(prompts[at]) - 1 : len(whole[at]) - 1]
    return found


@jax.jit
def _next_logprobs(
    logits: Float[Array, "B S V"], tokens: Int[Array, "B S"]
) -> Float[Array, "B S1 2"]:
    """Returns the log-probabilities of each next token, and of the likeliest one there."""
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    return scored(flat, tokens[:, 1:].reshape(-1)).reshape(tokens.shape[0], -1, 2)


def sample_inputs(
    model: Model, sequences: Sequence[Sequence[int]], num_steps: int, batch: int, seed: int
) -> list[Float[Array, "N B d"]]:
    """Returns the rows that enter each MoE layer (before its norm) in an exact run, grouped as
    decode steps.

    A step's `batch` rows are positions drawn at random from all sequences; every layer has the
    same ones. Fewer steps come back where there are fewer positions, but at least one.
    """
    total = sum(map(len, sequences))
    num_steps = max(1, min(num_steps, total // batch))
    wanted = np.random.default_rng(seed).permutation(total)[: num_steps * batch]
    wanted = np.resize(wanted, num_steps * batch)  # fewer positions than one step: repeated
    length = max(map(len, sequences))
    parts: list[list[np.ndarray]] = [[] for _ in range(model.config.num_moe_layers)]
    for start in range(0, len(sequences), CAPTURE_BATCH):
        tokens = np.zeros((CAPTURE_BATCH, length), np.int32)
        lengths = np.zeros(CAPTURE_BATCH, np.int32)
        for i, ids in enumerate(sequences[start : start + CAPTURE_BATCH]):
            tokens[i, : len(ids)], lengths[i] = ids, len(ids)
        inputs = moe_inputs(model.config, model.weights, jnp.asarray(tokens), jnp.asarray(lengths))
        real = (np.arange(length) < lengths[:, None]).reshape(-1)
        for part, x in zip(parts, inputs, strict=True):
            part.append(np.asarray(x)[real])
    shape = num_steps, batch, model.config.d_model
    return [jnp.asarray(np.concatenate(part)[wanted].reshape(shape)) for part in parts]


@partial(jax.jit, static_argnums=0)
def moe_inputs(
    cfg: ModelConfig,
    weights: Weights,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
) -> list[Float[Array, "T d"]]:
    """Returns the rows that enter each MoE layer's second half, before its norm; `T = B * S`,
    padding too.
    """
    batch, length = tokens.shape
    position = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    valid = position < jnp.repeat(lengths, length)
    rows = RoutedRows(position, valid, jnp.zeros(batch * length, bool))
    step = StepData(rows, causal_attention(cfg, batch, length), Control.of(None))
    x, at, found = embed(cfg, weights.params, tokens.reshape(-1)), 0, []
    for layer, is_moe in enumerate(cfg.moe_layers):
        if is_moe:
            halves = range(at, 2 * layer + 1)
            x, _, _ = run_layers(
                cfg, weights, x, None, step, halves=halves, max_active=cfg.num_experts
            )
            found.append(x)
            at = halves.stop
    return found


class OutputError:
    """Output error of each MoE layer on fixed inputs; exact outputs are computed once."""

    def __init__(self, model: Model, inputs: Sequence[Float[Array, "N B d"]]) -> None:
        self.model, self.inputs = model, inputs
        layers = layers_of(model.config, model.params)
        self.layers = [layer for layer, is_moe in layers if is_moe]
        self.exact = self._outputs(None)

    def _outputs(self, brownout: Brownout | None) -> list[Float[Array, "N B d"]]:
        model, control = self.model, self.model.prepare(brownout)
        cfg = model.config_under(brownout)
        table = model.table.at_level(control.strategy, control.threshold_percent)
        return [
            _routed(cfg, layer, model.pool, jax.tree.map(itemgetter(i), table), x, control)
            for i, (layer, x) in enumerate(zip(self.layers, self.inputs, strict=True))
        ]

    def of(self, brownout: Brownout | None) -> list[float]:
        """Returns `||browned - exact|| / ||exact||` (Frobenius) of the routed experts' output, by
        layer.
        """
        return [
            float(_relative(out, exact))
            for out, exact in zip(self._outputs(brownout), self.exact, strict=True)
        ]


@jax.jit
def _relative(out: Float[Array, "N B d"], exact: Float[Array, "N B d"]) -> Float[Array, ""]:
    out, exact = out.astype(jnp.float32), exact.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((out - exact) ** 2) / jnp.sum(exact**2))


@partial(jax.jit, static_argnums=0)
def _routed(
    cfg: ModelConfig,
    layer: Params,
    pool: Pool,
    table: ExpertTable,
    x: Float[Array, "N B d"],
    control: Control,
) -> Float[Array, "N B d"]:
    """Returns what a layer's routed experts add to each row; each of the N steps has a plan of its
    own. `table` is this layer's row.
    """

    def step(x: Float[Array, "B d"]) -> Float[Array, "B d"]:
        all_rows = jnp.ones(x.shape[0], bool)
        rows = RoutedRows(jnp.zeros(x.shape[0], jnp.int32), all_rows, ~all_rows)
        asked = Asked(layer, x, *router(cfg, layer, x), rows, control)
        return alone(cfg, pool, table, asked, cfg.num_experts).out

    return jax.lax.map(step, x)
