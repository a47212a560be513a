"""The trainer of the bundled model: AdamW on packed task items, resumable from Orbax checkpoints.

`python -m training.train --out DIR` trains; `DIR/tokenizer.json` and `DIR/checkpoints` appear.
On a CPU run it with the environment of `training.remake` (huge pages: a third faster).
"""

import argparse
import dataclasses
import itertools
import random
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from jmoe import layout
from jmoe.config import ModelConfig
from training import world
from training.geometry import BUNDLED
from training.log import LossLog, text_of
from training.network import Params, forward, init_params
from training.packing import Batch, eval_tasks, task_batch, training_batch
from training.tasks import tasks
from training.tokenizer import save_tokenizer, train_tokenizer


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the result of a run."""

    model: ModelConfig = BUNDLED
    seed: int = 1
    steps: int = 2400
    rows: int = 64
    length: int = 128
    peak_lr: float = 2.5e-3
    warmup: int = 100
    final_lr_share: float = 0.03
    weight_decay: float = 0.02
    balance_coef: float = 0.01
    z_coef: float = 1e-4
    capacity_factor: float = 2.0
    eval_every: int = 100
    save_every: int = 200
    eval_items: int = 480

    def capacity(self, rows: int, factor: float) -> int:
        """Returns the buffer rows per expert for a batch of `rows` rows."""
        visits = rows * self.length * self.model.experts_per_token
        return max(8, int(visits * factor / self.model.num_experts) // 8 * 8)


def make_tokenizer(seed: int, num_tasks: int = 20_000, num_prose: int = 6_000) -> Tokenizer:
    """Returns the tokenizer, trained on a sample of the training data."""
    rng = random.Random(f"tokenizer/{seed}")
    sample = itertools.islice(tasks("train", rng.getrandbits(60)), num_tasks)
    texts = [task.prompt + task.answer for task in sample]
    return train_tokenizer(texts + [world.prose(rng) for _ in range(num_prose)])


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Makes AdamW with clipping and a warmup-cosine schedule; norms and biases are not decayed."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        config.peak_lr,
        min(config.warmup, config.steps // 2),
        config.steps,
        config.peak_lr * config.final_lr_share,
    )

    described = layout.top(config.model) | layout.layer(config.model, 0, is_moe=True)
    kept = {key for key, own in described.items() if own.kind in ("norm", "bias", "gate")}

    def decayed(params: Params) -> Params:
        return jax.tree.map_with_path(lambda path, _: path[-1].key not in kept, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=config.weight_decay, mask=decayed),
    )


def loss_fn(
    params: Params, arrays: tuple[Array, ...], config: TrainConfig, capacity: int
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Returns weighted cross entropy plus balance and z losses, and metrics."""
    tokens, targets, positions, items, weights = arrays
    logits, aux = forward(config.model, params, tokens, positions, items, capacity=capacity)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    cross_entropy = jnp.sum(losses * weights) / jnp.sum(weights)
    balance, z = jnp.mean(aux["balance"]), jnp.mean(aux["z"])
    metrics = {
        "loss": cross_entropy,
        "balance": balance,
        "z": z,
        "dropped": jnp.mean(aux["dropped"]) / (items.size * config.model.experts_per_token),
        "peak_load": jnp.max(aux["load"]) * config.model.num_experts,
        "min_load": jnp.min(aux["load"]) * config.model.num_experts,
    }
    return cross_entropy + config.balance_coef * balance + config.z_coef * z, metrics


@partial(jax.jit, static_argnames="config", donate_argnames=("params", "state"))
def train_step(
    params: Params, state: Any, arrays: tuple[Array, ...], config: TrainConfig
) -> tuple[Params, Any, dict[str, Array]]:
    """Takes one optimizer step. `params` and `state` are donated."""
    capacity = config.capacity(arrays[0].shape[0], config.capacity_factor)
    grads, metrics = jax.grad(loss_fn, has_aux=True)(params, arrays, config, capacity)
    updates, state = make_optimizer(config).update(grads, state, params)
    params = cast(Params, optax.apply_updates(params, updates))
    return params, state, metrics


@partial(jax.jit, static_argnames="config")
def predict(params: Params, arrays: tuple[Array, ...], config: TrainConfig) -> Array:
    """Returns the likeliest next token at every position, `[B, S]`; capacity is ample: no visit is
    dropped.
    """
    tokens, _, positions, items, _ = arrays
    capacity = config.capacity(tokens.shape[0], 5.0)
    logits, _ = forward(config.model, params, tokens, positions, items, capacity=capacity)
    return jnp.argmax(logits, axis=-1)


def family_accuracy(params: Params, batch: Batch, config: TrainConfig) -> dict[str, float]:
    """Returns the share of items whose whole answer is right.

    All of an answer's tokens being the argmax under teacher forcing is the same as greedy decoding
    producing the answer, at the price of one forward pass.
    """
    wrong = (np.asarray(predict(params, batch.arrays(), config)) != batch.targets) & (
        batch.answer > 0
    )
    results: dict[str, list[bool]] = {}
    for row, families in enumerate(batch.families):
        for number, family in enumerate(families, start=1):
            right = not bool(np.any(wrong[row] & (batch.items[row] == number)))
            results.setdefault(family, []).append(right)
    return {family: float(np.mean(right)) for family, right in sorted(results.items())}


def train(
    config: TrainConfig,
    out: Path,
    stop_after_s: float | None = None,
    log_dir: Path | None = None,
) -> Params:
    """Trains, or goes on from the newest checkpoint under `out`; returns the parameters.

    Args:
        config: the run.
        out: directory for `tokenizer.json` and `checkpoints/`.
        stop_after_s: stop early (checkpoint written) after this many seconds.
        log_dir: folder for the losses (see `LossLog`); None for none.
    """
    import orbax.checkpoint as ocp

    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(config.seed)
    save_tokenizer(tokenizer, out, config.model.max_position)
    params = init_params(config.model, config.seed)
    state = make_optimizer(config).init(params)
    options = ocp.CheckpointManagerOptions(max_to_keep=3, create=True)
    held_out = task_batch(tokenizer, eval_tasks(config.eval_items, config.seed), config.length)
    began = time.monotonic()
    with ocp.CheckpointManager((out / "checkpoints").absolute(), options=options) as manager:
        first = manager.latest_step() or 0
        if first:
            saved = manager.restore(
                first, args=ocp.args.StandardRestore({"params": params, "state": state})
            )
            params, state = saved["params"], saved["state"]
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        say = partial(bar.console.print, highlight=False, soft_wrap=True)  # above the bar
        with bar, LossLog(log_dir) as log:
            job = bar.add_task("train", total=config.steps, completed=first, note="")
            for step in range(first, config.steps):
                batch = training_batch(tokenizer, config.seed, step, config.rows, config.length)
                params, state, metrics = train_step(params, state, batch.arrays(), config)
                done = step + 1
                late = stop_after_s is not None and time.monotonic() - began > stop_after_s
                if done % 10 == 0:
                    losses = {name: float(value) for name, value in metrics.items()}
                    note = text_of(losses)
                    log.write("train", done, losses)
                    bar.update(job, completed=done, note=note)
                    say(f"{done} {time.monotonic() - began:.0f}s {note}")
                if done % config.eval_every == 0 or done == config.steps:
                    scores = family_accuracy(params, held_out, config)
                    say(f"{done} " + " ".join(f"{k} {v:.2f}" for k, v in scores.items()))
                    log.write("right", done, scores)
                if done % config.save_every == 0 or done == config.steps or late:
                    manager.save(
                        done, args=ocp.args.StandardSave({"params": params, "state": state})
                    )
                    # The next step donates the arrays; the save must have read them by then.
                    manager.wait_until_finished()
                if late:
                    break
    return params


def main() -> None:
    """Trains or resumes from the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=TrainConfig.steps)
    parser.add_argument("--peak-lr", type=float, default=TrainConfig.peak_lr)
    parser.add_argument("--seed", type=int, default=TrainConfig.seed)
    parser.add_argument("--stop-after-s", type=float, default=None)
    parser.add_argument("--log-dir", type=Path, help="folder for losses: JSON lines, TensorBoard")
    args = parser.parse_args()
    config = TrainConfig(seed=args.seed, steps=args.steps, peak_lr=args.peak_lr)
    train(config, args.out, args.stop_after_s, args.log_dir)


if __name__ == "__main__":
    main()
