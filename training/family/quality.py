"""What sharing experts costs the bundled model's family: each model, each rule, each share.

`python -m training.family.quality --family DIR --json FILE` measures; DIR is what
`python -m training.family` wrote. Tables go to stdout.
"""

import argparse
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from tokenizers import Tokenizer

import jmoe
from jmoe.api import Model
from jmoe.layers import Layers
from jmoe.sharing import Sharing
from training.consolidate.budget import slots_of_share
from training.consolidate.measure import Differences, measure
from training.consolidate.run import choose
from training.distill.stream import layers_dtype
from training.evaluation.quality import answer_logprobs
from training.evaluation.tables import by_families, paired_loss
from training.family.report import tables, write_picture
from training.family.shared import Members, Owners
from training.family.skills import SKILLS, held_out, skill_tasks
from training.packing import Encoded, encode_task, pack, training_items
from training.progress import bars, counted


def right_items(model: Model, items: Sequence[Encoded]) -> Bool[np.ndarray, "n"]:
    """Returns which items' whole answers, end of text included, are the model's greedy ones."""
    prompts = [list(item.ids[: item.num_prompt]) for item in items]
    answers = [list(item.ids[item.num_prompt :]) for item in items]
    exact = answer_logprobs(model, prompts, answers)
    return np.array([bool((own[:, 0] >= own[:, 1]).all()) for own in exact])


NAMES = ("base", *SKILLS)
GROUPS = ((0, 1), (0, 2), (0, 3), (0, 1, 2), (0, 1, 2, 3))
"""Families by model number: two, three and four models."""

SHARES = (25, 50, 75, 100)
RULES = ("functional", "paper", "average", "random")
RANKS = (4, 8, 16)
LENGTH = 128


Row = dict[str, Any]
"""As the JSON file has it."""


class Quality:
    """Models, items and measurements of one run."""

    def __init__(self, family: Path, num_items: int, rows: int, seed: int) -> None:
        """Raises ValueError and what `jmoe.load` raises for a directory that holds no family."""
        if num_items < 1 or rows < 1:
            raise ValueError(f"--items is {num_items}, --rows {rows}; both must be at least 1")
        self.paths = [family / name for name in NAMES]
        for path in self.paths:
            if not path.is_dir():
                raise ValueError(
                    f"{path} is missing; `python -m training.family --out {family}` makes it"
                )
        self.seed, self.rows = seed, rows
        self.members = Members(tuple(jmoe.load(p, layers_dtype(), ways=()) for p in self.paths))
        self.tokenizer = Tokenizer.from_file(str(self.paths[0] / "tokenizer.json"))
        self.items = [
            [encode_task(self.tokenizer, task) for task in held_out(name, num_items, seed)]
            for name in NAMES
        ]

    @cached_property
    def measured(self) -> Differences:
        """Distances and costs between all models, on training items of each one's own work."""
        models = [Layers(path, layers_dtype()) for path in self.paths]
        data = [pack(self._training(name), self.rows, LENGTH) for name in NAMES]
        return measure(models, data)

    def _training(self, name: str) -> Iterator[Encoded]:
        """Yields training items: half of a variant's skill, half of the bundled model's; for that
        one all.
        """
        rng = random.Random(f"quality/{name}/{self.seed}")
        old = training_items(self.tokenizer, self.seed + 2000, 0)
        if name not in SKILLS:
            yield from old
        new = skill_tasks(name, "train", self.seed + 2000)
        while True:
            yield next(old) if rng.random() < 0.5 else encode_task(self.tokenizer, next(new))

    @cached_property
    def alone(self) -> list[list[np.ndarray]]:
        """`[model][items]`: which of each model's items a model has right by itself."""
        return [
            [right_items(model, items) for items in self.items] for model in self.members.models
        ]

    def owners(self, group: Sequence[int], rule: str, share: int) -> Owners:
        """Returns whose experts serve a group's models, by number in the group."""
        distances, costs, pick = self.measured.distances, self.measured.costs, np.ix_(group, group)
        assert costs is not None  # there are data
        slots = slots_of_share(share, len(group), distances[0, 0].size)
        return choose(rule, Differences(distances[pick], costs[pick]), slots, self.seed)

    def scores(self) -> Iterator[Row]:
        """Yields the scores of every rule, share and group, in the order of comparison."""
        yield from self._by_rule(RULES[:2])
        for group in GROUPS:
            yield from self._residuals(group)
            yield from self._averaged(group)
        yield from self._by_rule(RULES[2:])

    def _by_rule(self, rules: Sequence[str]) -> Iterator[Row]:
        for rule, group, share in itertools.product(rules, GROUPS, SHARES):
            owners = self.owners(group, rule, share)
            for at in range(len(group)):
                model = self.members.mapped(group, owners, at)
                yield self._score(group, rule, share, at, model, owners)

    def _averaged(self, group: Sequence[int]) -> Iterator[Row]:
        """Yields the scores of one model for all, the mean of every weight: the paper's
        baseline.
        """
        whole = self.members.averaged(group)
        one = np.zeros((1, *self.measured.distances.shape[2:]), np.int32)
        for at in range(len(group)):
            yield self._score(group, "average of all weights", 100, at, whole, one)

    def _residuals(self, group: Sequence[int]) -> Iterator[Row]:
        """Yields the scores with all positions shared by the functional rule and a low-rank
        difference to each.
        """
        owners = self.owners(group, "functional", 100)
        for at in range(len(group)):
            models = self.members.with_residuals(group, owners, at, RANKS)
            for rank, (model, size) in models.items():
                extra = 100 * size / (2 * model.num_parameters)
                rule = f"residual, rank {rank}"
                yield self._score(group, rule, 100, at, model, owners, extra)

    def _score(
        self,
        group: Sequence[int],
        rule: str,
        share: int,
        at: int,
        model: Model,
        owners: Owners,
        extra: float = 0.0,
    ) -> Row:
        number = group[at]
        items, before = self.items[number], self.alone[number][number]
        after = right_items(model, items)
        loss, low, high = paired_loss(by_families(before, after, [item.family for item in items]))
        names = tuple(NAMES[n] for n in group)
        sharing = Sharing(names[: len(owners)], owners)  # of the average, one model for all
        return {
            "group": "+".join(names),
            "rule": rule,
            "share": share,  # percent
            "model": NAMES[number],
            "right_percent": 100 * float(after.mean()),
            "loss_percent": loss,  # of what it had right alone, with a paired 95 % interval
            "low_percent": low,
            "high_percent": high,
            "slots": sharing.num_slots,
            "extra_percent": extra,  # memory beside the shared experts, of a whole model
        }

    def families(self) -> Iterator[Row]:
        """Yields the scores of every model on every task family: alone, and in the family of four
        with 75 % shared.
        """
        for name, right in zip(NAMES, self.alone, strict=True):
            yield self._family_row(name, "alone", right)
        group = GROUPS[-1]
        for rule in ("functional", "paper", "average"):
            owners = self.owners(group, rule, 75)
            for at, number in enumerate(group):
                model = self.members.mapped(group, owners, at)
                right = [right_items(model, items) for items in self.items]
                yield self._family_row(NAMES[number], f"{rule}, 75 %", right)

    def _family_row(self, name: str, setting: str, right: Sequence[np.ndarray]) -> Row:
        shares = {}
        for items, own in zip(self.items, right, strict=True):
            families = np.array([item.family for item in items])
            for family in sorted(set(families.tolist())):
                shares[family] = 100 * float(own[families == family].mean())
        return {"model": name, "setting": setting, "right_percent": shares}


def distances(measured: Differences, members: Members) -> list[Row]:
    """Returns, by pair of models, distances by layer, costs, and the rank correlation (Spearman) of
    both.
    """
    found = []
    flat = np.concatenate(
        [leaf.reshape(*leaf.shape[:3], -1) for leaf in members.experts.values()], axis=-1
    )
    elsewhere = [
        float(np.linalg.norm(flat[0, layer] - np.roll(flat[0, layer], 1, axis=0), axis=-1).mean())
        for layer in range(flat.shape[1])
    ]
    for i, j in itertools.combinations(range(len(NAMES)), 2):
        own = measured.distances[i, j]
        row: Row = {"models": [NAMES[i], NAMES[j]]}
        for name in ("min", "mean", "max"):
            row[name] = getattr(own, name)(axis=1).astype(np.float64).round(4).tolist()
        row["of other positions, base"] = np.round(elsewhere, 4).tolist()
        if measured.costs is not None:
            row["rank correlation with cost"] = [
                round(rank_correlation(own.ravel(), measured.costs[a, b].ravel()), 3)
                for a, b in ((i, j), (j, i))
            ]
        found.append(row)
    return found


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Returns Spearman's rank correlation, ties in order of appearance."""
    ranks = [np.argsort(np.argsort(values, kind="stable")) for values in (one, other)]
    one, other = (own - own.mean() for own in ranks)
    return float(one @ other / np.sqrt((one @ one) * (other @ other)))


def run(
    quality: Quality,
    picture: Path | None,
    progress: Callable[[int, int], None],
    save: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Measures everything that the JSON file has. `save` is called with what there is so far,
    repeatedly.
    """
    models = sum(map(len, GROUPS))
    total = models * (len(RULES) * len(SHARES) + len(RANKS) + 1) + 4 * len(NAMES)
    advance = counted(progress, total)
    found: dict[str, Any] = {
        "command": "python -m training.family.quality",
        "items": len(quality.items[0]),
        "rows": quality.rows * LENGTH,
        "seed": quality.seed,
        "distances": distances(quality.measured, quality.members),
        "alone": {n: 100 * float(quality.alone[i][i].mean()) for i, n in enumerate(NAMES)},
        "scores": [],
    }
    if picture is not None:
        write_picture(quality.measured.distances, NAMES, picture)
    for score in quality.scores():
        found["scores"].append(score)
        save(found)
        advance(1)
    found["families"] = []
    for row in quality.families():
        found["families"].append(row)
        advance(1)
    save(found)
    return found


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m training.family.quality", description=__doc__)
    parser.add_argument("--family", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--picture", type=Path, help="PNG of expert distances")
    parser.add_argument("--items", type=int, default=512, help="held-out items of each model")
    parser.add_argument("--rows", type=int, default=128, help="packed rows that costs are over")
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()

    def save(found: dict[str, Any]) -> None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    with bars() as progress:
        quality = Quality(args.family, args.items, args.rows, args.seed)

        def told(done: int, total: int) -> None:
            progress("quality", done, total, "")

        found = run(quality, args.picture, told, save)
    print(tables(found))


if __name__ == "__main__":
    main()
