"""`jmoe evaluate --leave-one-out`: what united experts are worth on a source they never saw.

A source is a family of items. United experts are distilled on all sources, and once without each;
both answer that source's items, beside brownout without united experts that has at least as many
active experts.
"""

import dataclasses
import itertools
import math
import shutil
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jmoe.api import resolve
from jmoe.brownout import Brownout, LowestGate
from training.distill import DistillConfig, beside, distill
from training.distill.room import room_here
from training.distill.sampled import as_begun, sampled_texts, with_num_texts
from training.evaluation import items as sources_of
from training.evaluation.run import EvaluateConfig, Work, evaluate
from training.evaluation.tables import Score, csv_of
from training.markdown import table
from training.progress import Progress
from training.tasks import Task, tasks, write_items

DISTILL_ITEMS = 20_000  # fresh ones, where items are made
ALL = "all"  # folder of the distillation that leaves no source out
LOWEST = LowestGate()


class Compared(NamedTuple):
    """A source's items under a setting: its united experts distilled with it and without it, and
    brownout that has none.
    """

    source: str
    setting: Brownout
    seen: Score
    unseen: Score
    full: Score
    lowest_gate: Score
    active: float  # experts that a layer of a decode step computes under `setting`, mean
    full_active: float = math.nan  # likewise
    lowest_gate_active: float = math.nan


def leave_one_out(
    config: EvaluateConfig,
    settings: Sequence[Brownout],
    distillation: DistillConfig,
    sources: Sequence[str] = (),
    progress: Progress = lambda *args: None,
) -> list[Compared]:
    """Distils with all sources and without each of `sources` (none: all there are), and scores
    settings of partial brownout on that source's items.

    Distilled on are fresh items of the training split, or those of `config.data` behind the first
    `config.num`, which are scored. A run without a source reads a file that has no item of it, nor
    one with a prompt of it. Texts that the model writes are the same in every run, and may be like
    a source's: it knows them. `config.out` gets a folder for each distillation and each
    source's scores, `leave_one_out.csv` and `leave_one_out.md`. Called again, what is finished is
    taken.

    Raises ValueError for settings that are not of partial brownout, for an unknown source or less
    than two, for items of which none are left to distil on, and as `evaluate` and `distill`.
    """
    if any(setting.strategy != "partial" or setting.levels for setting in settings):
        raise ValueError("--leave-one-out compares partial brownout, by threshold, with the others")
    settings = [setting for setting in settings if setting.threshold_percent < 100]
    ways = sorted({setting.way for setting in settings if setting.way is not None})
    if not ways:
        raise ValueError("thresholds are 100; give one at which anything is degraded")
    items, texts = _items(config)
    known = sorted({item.family for item in items})
    chosen = list(sources or known)
    if missing := [name for name in chosen if name not in known]:
        raise ValueError(f"source is {missing[0]!r}; the items are of: {', '.join(known)}")
    if odd := [name for name in chosen if Path(name).name != name]:
        raise ValueError(f"source is {odd[0]!r}, and a folder is named after it; rename the family")
    if len({text.family for text in texts}) < 2:
        raise ValueError(f"texts to distil on are all of {known[0]}; give items of two families")
    directory, allowed = resolve(config.model), config.allow_unknown_config
    distillation = as_begun(distillation, config.out / ALL)
    is_given = distillation.sampled is not None
    distillation = with_num_texts(distillation, directory, room_here(config.out), allowed)
    written = sampled_texts(directory, config.out, distillation, allowed, progress, need=is_given)
    if not written:
        distillation = dataclasses.replace(distillation, sampled=0)
    known = {"distillation": distillation, "written": written}
    of_source = partial(united_without, config, ways, texts, **known)
    everything, found = of_source(source=None, progress=progress), []
    for source in chosen:
        unseen = of_source(source=source, progress=progress)
        own = [item for item in items if item.family == source]
        of = dataclasses.replace(
            config,
            data=_write(config.out / f"{source}.jsonl", own),
            num=None,
            generate_tasks=None,
            text=(),
        )
        found += _compared(of, source, settings, everything, unseen, progress)
        (config.out / "leave_one_out.csv").write_text(write_csv(found), encoding="utf-8")
        (config.out / "leave_one_out.md").write_text(write_markdown(found), encoding="utf-8")
    return found


def _items(config: EvaluateConfig) -> tuple[list[Task], list[Task]]:
    """Returns the items to score, and those to distil on."""
    items = config.items()
    if config.data is None:
        return items, list(itertools.islice(tasks("train", config.seed), DISTILL_ITEMS))
    texts = sources_of.read_tasks(config.data)[config.num or 0 :]
    if config.num is None or not texts:
        raise ValueError(
            f"num is {config.num}; with --leave-one-out the items of {config.data} behind the "
            "first --num are distilled on, and some must be left"
        )
    return items, texts


def united_without(
    config: EvaluateConfig,
    ways: Sequence[int],
    texts: Sequence[Task],
    source: str | None,
    distillation: DistillConfig,
    progress: Progress = lambda *args: None,
    written: Sequence[Path] = (),
) -> Path:
    """Distils on the texts that are not of a source (None: on all), in a folder of `config.out`;
    returns the directory of the model with those united experts. Where the model writes texts for
    it, it has `written` them already.
    """
    name = ALL if source is None else f"without-{source}"
    model, out = resolve(config.model), config.out / name
    data = _write(out / "texts.jsonl", texts if source is None else without(texts, source))

    def told(what: str, *done: int | str) -> None:
        progress(f"{name}: {what}", *done)

    for path in written:
        shutil.copy(path, out)
    distill(model, ways, [data], out, distillation, told, config.allow_unknown_config)
    return beside(model, out, out / "model")


def without(texts: Sequence[Task], source: str) -> list[Task]:
    """Returns the texts that are not of a source and have no prompt of it."""
    prompts = {text.prompt for text in texts if text.family == source}
    return [text for text in texts if text.family != source and text.prompt not in prompts]


def _write(path: Path, items: Sequence[Task]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_items(path, items)
    return path


def _compared(
    config: EvaluateConfig,
    source: str,
    settings: Sequence[Brownout],
    everything: Path,
    unseen_model: Path,
    progress: Progress,
) -> list[Compared]:
    def scored(model: Path, name: str, settings: Sequence[Brownout]) -> list[Score]:
        own = dataclasses.replace(config, model=str(model), out=config.out / source / name)

        def told(what: str, *done: int) -> None:
            progress(f"{source}, {name}: {what}", *done)

        return evaluate(own, settings, told)[1:]

    equal = _equal(dataclasses.replace(config, model=str(everything)), settings)
    others = list(dict.fromkeys(other for each in equal for other in each[:2]))
    by_setting = dict(zip(others, scored(everything, "others", others), strict=True))
    seen, unseen = scored(everything, "seen", settings), scored(unseen_model, "unseen", settings)
    return [
        Compared(source, setting, *own, by_setting[full], by_setting[lowest], *active)
        for setting, own, (full, lowest, *active) in zip(
            settings, zip(seen, unseen, strict=True), equal, strict=True
        )
    ]


def _equal(
    config: EvaluateConfig, settings: Sequence[Brownout]
) -> list[tuple[Brownout, Brownout, float, float, float]]:
    """Returns, for each setting, full brownout and the lowest gates' at the least thresholds of at
    least as many active experts in decode steps of the first items; and how many are active under
    each of the three.
    """
    model = config.load()
    work = Work(model, sources_of.choose(config.data, None, None, config.seed), config)
    measure = work.divergence(slice(2 * config.batch))  # the last steps are not full

    @cache
    def active(setting: Brownout) -> float:
        return float(measure.decode(setting).active.mean())

    def least(other: Brownout, wanted: float) -> Brownout:
        settings = [dataclasses.replace(other, threshold_percent=t) for t in range(101)]
        return settings[bisect_left(settings, wanted, hi=100, key=active)]

    found = []
    for setting in settings:
        full = least(Brownout("full", 0, None, setting.keep), active(setting))
        lowest = least(Brownout(LOWEST, 0, setting.way), active(setting))
        found.append((full, lowest, active(setting), active(full), active(lowest)))
    return found


_KINDS = ("seen", "unseen", "full", "lowest_gate")


def write_csv(found: Sequence[Compared]) -> str:
    """Returns CSV with a row for each source and setting: accuracy and its loss, in percent, by
    what was distilled on, and the thresholds of brownout without united experts.
    """
    rows = []
    for one in found:
        setting = one.setting
        row = {
            "source": one.source,
            "way": setting.way,
            "keep": setting.keep,
            "threshold_percent": setting.threshold_percent,
            "active_experts": f"{one.active:.2f}",
            "full_active_experts": f"{one.full_active:.2f}",
            "lowest_gate_active_experts": f"{one.lowest_gate_active:.2f}",
            "items": len(one.seen.result.right),
        }
        for kind in _KINDS:
            score: Score = getattr(one, kind)
            row |= {
                f"{kind}_threshold_percent": score.setting.threshold_percent,
                f"{kind}_accuracy_percent": f"{100 * score.accuracy:.4f}",
                f"{kind}_loss_percent": f"{score.loss_percent:.4f}",
                f"{kind}_loss_low": f"{score.low_percent:.4f}",
                f"{kind}_loss_high": f"{score.high_percent:.4f}",
            }
        rows.append(row)
    return csv_of(rows)


def write_markdown(found: Sequence[Compared]) -> str:
    """Returns a table for each setting, with a line a source, and the mean over sources."""
    parts = [
        "# United experts on sources that they did not see\n",
        "Loss of accuracy in percent of zero brownout's, with a 95 % interval. **Seen**: distilled "
        "with the source; **unseen**: without it. Full brownout and the lowest gates' have no "
        "united experts, and at their thresholds at least as many active experts.\n",
    ]
    head = ["source", "items", "active experts", "seen", "unseen", "full", "lowest gate"]
    for setting in dict.fromkeys(one.setting for one in found):
        own = [one for one in found if one.setting == setting]
        mean = ["**mean**", "", "", *(_told(*mean_loss(own, kind)) for kind in _KINDS)]
        parts += [
            f"## Way {setting.way}, t {setting.threshold_percent} %, kept by {setting.keep}\n",
            table(head, [*map(_row, own), mean], "lr"),
            "",
        ]
    return "\n".join(parts)


def _row(one: Compared) -> list[str]:
    cells = [one.source, str(len(one.seen.result.right)), f"{one.active:.1f}"]
    for kind in _KINDS:
        score: Score = getattr(one, kind)
        told = _told(score.loss_percent, score.low_percent, score.high_percent)
        active = getattr(one, f"{kind}_active", None)
        at = f"t {score.setting.threshold_percent}, {active:.1f} experts: " if active else ""
        cells.append(at + told)
    return cells


def _told(loss: float, low: float, high: float) -> str:
    return "-" if math.isnan(loss) else f"{loss:.1f} ({low:.1f} to {high:.1f})"


def mean_loss(found: Sequence[Compared], kind: str) -> tuple[float, float, float]:
    """Returns the mean loss over sources that zero brownout gets something of right, in percent,
    and its 95 % interval, from each source's.
    """
    scores: list[Score] = [getattr(one, kind) for one in found]
    scores = [score for score in scores if not math.isnan(score.loss_percent)]
    if not scores:
        return math.nan, math.nan, math.nan
    mean = float(np.mean([score.loss_percent for score in scores]))
    below = [score.loss_percent - score.low_percent for score in scores]
    above = [score.high_percent - score.loss_percent for score in scores]
    low, high = (float(np.linalg.norm(half)) / len(scores) for half in (below, above))
    return mean, mean - low, mean + high
