"""Exact-answer accuracy by family, under a brownout setting, by greedy generation.

`python -m training.evaluate --model DIR --data FILE [--strategy partial --threshold 40 --way 8]`
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jmoe.api import Model, load
from jmoe.brownout import Brownout
from jmoe.generate import generate
from training.tasks import Task


def read_tasks(path: Path) -> list[Task]:
    """Items of a JSONL file. Raises ValueError naming the first malformed line."""
    items = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            items.append(Task(row["prompt"], row["answer"], row["family"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a task ({error!r})") from None
    return items


def accuracy(
    model: Model,
    items: Sequence[Task],
    brownout: Brownout | None = None,
    batch: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Share of right answers by family, and `all`: their mean over families.

    Args:
        model: as `jmoe.load` returns it.
        items: what is asked; grouped into batches in order.
        brownout: setting for prefill and decode; None is none.
        batch: prompts generated together. Brownout chooses experts over the rows of a step, so
            the batch is part of the setting.
        progress: called with (items done, items in all).

    Raises ValueError for a model without tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer; its answers cannot be read")
    right: dict[str, list[bool]] = {}
    for start in range(0, len(items), batch):
        part = items[start : start + batch]
        longest = max(len(model.tokenizer.encode(item.answer)) for item in part) + 1
        texts = generate(model, [item.prompt for item in part], longest, brownout).texts
        for item, text in zip(part, texts or [], strict=True):
            right.setdefault(item.family, []).append(text.strip() == item.answer.strip())
        if progress is not None:
            progress(start + len(part), len(items))
    scores = {family: sum(hits) / len(hits) for family, hits in sorted(right.items())}
    scores["all"] = sum(scores.values()) / len(scores)
    return scores


def main() -> None:
    """Command line: print one table."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--num", type=int, default=320)
    parser.add_argument("--strategy", choices=["zero", "partial", "full"], default="zero")
    parser.add_argument("--threshold", type=int, default=100, help="percent")
    parser.add_argument("--way", type=int, default=None)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    setting = Brownout(args.strategy, args.threshold, args.way)
    items = read_tasks(args.data)[: args.num]
    scores = accuracy(load(args.model), items, setting, args.batch)
    table = Table("family", "exact answers", title=str(setting))
    for family, score in scores.items():
        table.add_row(family, f"{score:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
