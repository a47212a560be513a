"""What brownout costs each model of a family, in decode steps of its own and in mixed ones.

`python -m training.family.degraded --model NAME=DIR --model NAME=DIR --family FILE` measures two
models on held-out tasks of each one's own work, as `python -m training.family` knows them. Answers
are given, token by token, behind exact prompts. In a mixed step both models' rows are under one
plan, and a shared expert's degraded visits go to the first model's united expert.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float
from rich.progress import track

from jmoe.api import Model
from jmoe.brownout import Brownout, Control
from jmoe.family import Family, load_family
from jmoe.mixed import MixedWeights, mixed_decode_step
from jmoe.packed_rows import empty_deltas, empty_rows, pack_row
from jmoe.steps import State, decode_step, make_state, prefill_step
from training import markdown
from training.evaluation.tables import by_families, paired_loss
from training.family.skills import held_out
from training.packing import Encoded, encode_task

ROWS, PROMPT, BLOCKS, PAGE = 32, 128, 12, 16  # rows of a model in a step; a slot's positions


class Found(NamedTuple):
    """What became of one model's items under a setting."""

    right: Bool[np.ndarray, " n"]  # whole answers, but for first tokens, which prompts give
    divergence: Float[np.ndarray, " n"]  # KL from its exact steps, summed over answer tokens


def items_of(model: Model, num: int, seed: int) -> list[Encoded]:
    """Returns held-out tasks of a model's own work, by its name."""
    assert model.tokenizer is not None
    backend: Any = model.tokenizer.backend
    return [encode_task(backend, task) for task in held_out(model.name, num, seed)]


@cache
def _programs() -> tuple[Callable[..., Any], ...]:
    steps = prefill_step, decode_step, mixed_decode_step
    return tuple(jax.jit(step, static_argnums=0, static_argnames="max_active") for step in steps)


def _control(setting: Brownout | None) -> Any:
    control = Control.of(setting)
    return jnp.stack([control.threshold_percent, control.strategy])


def prefilled(family: Family, batches: Sequence[Sequence[Encoded]]) -> State:
    """Returns the state behind exact prompts; the i-th model has slots `[i ROWS, (i + 1) ROWS)`."""
    cfg = family.config
    sizes: dict[str, Any] = {"page_size": PAGE, "max_blocks": BLOCKS, "dtype": family[0].dtype}
    slots = len(family) * ROWS
    state = make_state(cfg, num_slots=slots, num_pages=slots * BLOCKS, **sizes)
    pages = np.arange(slots * BLOCKS, dtype=np.int32).reshape(slots, BLOCKS)
    state = state._replace(block_table=jnp.asarray(pages))
    run = partial(_programs()[0], cfg)
    for number, (model, items) in enumerate(zip(family, batches, strict=True)):
        for at, item in enumerate(items):
            tokens = np.zeros(PROMPT, np.int32)
            tokens[: item.num_prompt] = item.ids[: item.num_prompt]
            size = item.num_prompt
            rows = np.stack([pack_row(number * ROWS + at, kv_len=size, q_len=size)])
            given = tokens, rows, empty_deltas(1), _control(None)
            state, _ = run(model.weights, state, *given, max_active=cfg.num_experts)
    return state


def decoded(
    family: Family,
    numbers: Sequence[int],
    batches: Sequence[Sequence[Encoded]],
    state: State,
    setting: Brownout | None,
) -> list[list[np.ndarray]]:
    """Returns the log probabilities `[tokens, V]` of each model's items, of answer tokens behind
    the first; all of `numbers` in one step.
    """
    cfg, models = family.config, [family[number] for number in numbers]
    step = partial(_programs()[1 if len(models) == 1 else 2], cfg)
    all_weights = [model.weights for model in models]
    weights = all_weights[0] if len(models) == 1 else MixedWeights.of(all_weights)
    found: list[list[list[np.ndarray]]] = [[[] for _ in batches[number]] for number in numbers]
    lengths = [len(item.ids) - item.num_prompt for number in numbers for item in batches[number]]
    last = np.zeros(len(family) * ROWS, np.int32)
    for after in range(max(lengths) - 1):
        rows, live = empty_rows(len(numbers) * ROWS), []
        for at, number in enumerate(numbers):
            for own, item in enumerate(batches[number]):
                position = item.num_prompt + after
                if position + 1 < len(item.ids):
                    slot = number * ROWS + own
                    last[slot] = item.ids[position]
                    rows[at * ROWS + own] = pack_row(slot, kv_len=position + 1)
                    live.append((at, own))
        state = state._replace(last_token=jnp.asarray(last.copy()))
        most = len(numbers) * cfg.num_experts
        state, out = step(weights, state, rows, empty_deltas(1), _control(setting), max_active=most)
        logprobs = np.asarray(jax.nn.log_softmax(out.logits.astype(jnp.float32)))
        for at, own in live:
            found[at][own].append(logprobs[at * ROWS + own])
    return [[np.array(each) for each in of_model] for of_model in found]


def compared(
    items: Sequence[Encoded], exact: Sequence[np.ndarray], found: Sequence[np.ndarray]
) -> Found:
    """Returns whether answers are the likeliest ones, and what diverges from the exact model."""
    right, divergence = [], []
    for item, wanted, given in zip(items, exact, found, strict=True):
        behind = np.asarray(item.ids[item.num_prompt + 1 :])
        right.append(bool((given.argmax(axis=-1) == behind).all()))
        divergence.append(float((np.exp(wanted) * (wanted - given)).sum()))
    return Found(np.array(right), np.array(divergence))


def measure(
    family: Family, items: Sequence[Sequence[Encoded]], settings: Sequence[Brownout]
) -> dict[tuple[Brownout | None, str, int], Found]:
    """Returns what became of each model's items by (setting, `alone` or `mixed`, model's number);
    of no setting, alone.
    """
    everyone, parts = range(len(family)), {}
    for start in track(range(0, len(items[0]), ROWS)):
        batches = [own[start : start + ROWS] for own in items]
        state = prefilled(family, batches)
        exact = [decoded(family, [n], batches, state, None)[0] for n in everyone]
        answers: dict[tuple[Brownout | None, str], list[list[np.ndarray]]]
        answers = {(None, "alone"): exact}
        for setting in settings:
            alone = [decoded(family, [n], batches, state, setting)[0] for n in everyone]
            answers[setting, "alone"] = alone
            answers[setting, "mixed"] = decoded(family, everyone, batches, state, setting)
        for (setting, steps), given in answers.items():
            for n in everyone:
                told = parts.setdefault((setting, steps, n), [])
                told.append(compared(batches[n], exact[n], given[n]))
    return {key: Found(*map(np.concatenate, zip(*of, strict=True))) for key, of in parts.items()}


def table(
    family: Family,
    items: Sequence[Sequence[Encoded]],
    found: dict[tuple[Brownout | None, str, int], Found],
) -> str:
    """Returns Markdown: accuracy loss in % with 95 % intervals, and divergence of an answer token
    in thousandths.
    """
    heads = [f"{name}, {steps}" for name in family.names for steps in ("alone", "mixed")]
    rows = []
    for setting in dict.fromkeys(key[0] for key in found if key[0] is not None):
        cells = []
        for n, steps in itertools.product(range(len(family)), ("alone", "mixed")):
            own, before = found[setting, steps, n], found[None, "alone", n].right
            by_family = by_families(before, own.right, [item.family for item in items[n]])
            tokens = sum(len(item.ids) - item.num_prompt - 1 for item in items[n])
            loss, low, high = paired_loss(by_family)
            thousandths = 1000 * own.divergence.sum() / tokens
            cells.append(f"{loss:.2f} ({low:.1f} to {high:.1f}), {thousandths:.3f}")
        rows.append([f"{setting.keep}, {setting.threshold_percent}", *cells])
    return markdown.table(["keep, t", *heads], rows, "l")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.family.degraded", description=__doc__)
    parser.add_argument("--model", action="append", required=True, help="NAME=DIR; twice")
    parser.add_argument("--family", type=Path, help="family.json of jmoe consolidate")
    parser.add_argument("--way", type=int, default=8)
    parser.add_argument("--thresholds", default="40,0", help="percent, separated by commas")
    parser.add_argument("--items", type=int, default=512, help="held-out items of each model")
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    directories = dict(pair.split("=", 1) for pair in args.model)
    family = load_family(directories, args.family, "float32", ways=[args.way])
    for model in family:
        model.use_way(args.way)
    settings = [
        Brownout("partial", int(t), args.way, keep)
        for t in args.thresholds.split(",")
        for keep in ("visits", "weight")
    ]
    items = [items_of(model, args.items, args.seed) for model in family]
    print(table(family, items, measure(family, items, settings)))


if __name__ == "__main__":
    main()
