"""From results to figures: accuracy, its loss with an interval, CSV and Markdown."""

import csv
import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jmoe.brownout import Brownout
from jmoe.expected_loss import ExpectedLoss, Kind, Point
from jmoe.ratios import ratio
from training.evaluation.items import ZERO, kind_of
from training.evaluation.store import Result
from training.markdown import table

RESAMPLES = 10_000
INTERVAL = (2.5, 97.5)  # percentiles


@dataclass(frozen=True)
class Score:
    """One row of the table: a setting, what it scored, and its loss against zero brownout."""

    setting: Brownout
    result: Result
    families: dict[str, float]  # share of right answers
    accuracy: float  # mean over families
    loss_percent: float  # 100 * (zero - this) / zero; NaN where zero brownout got nothing right
    low_percent: float
    high_percent: float

    @property
    def excess(self) -> tuple[float, float]:
        """Nats that an answer's token is likelier than under the exact model, and half of the 95 %
        interval; NaN of a result without.
        """
        return ratio(np.array(self.result.excess), np.array(self.result.tokens))

    @property
    def disagreement(self) -> tuple[float, float]:
        """The share of tokens that are not the exact model's first choice, likewise."""
        return ratio(np.array(self.result.others), np.array(self.result.tokens))


def scores(
    settings: Sequence[Brownout], results: Mapping[Brownout, Result], families: Sequence[str]
) -> list[Score]:
    """Returns a score for zero brownout and each setting; at 100 % the result is that of zero
    brownout.

    `families` names each item's family, in the order of `Result.right`.
    """
    zero, found = results[ZERO], []
    for setting in (ZERO, *settings):
        result = zero if setting.threshold_percent == 100 else results[setting]
        by_family = by_families(zero.right, result.right, families)
        means = {name: float(right.mean()) for name, (_, right) in by_family.items()}
        found.append(Score(setting, result, means, _mean(means.values()), *paired_loss(by_family)))
    return found


def by_families(
    zero: Sequence[bool] | np.ndarray, other: Sequence[bool] | np.ndarray, families: Sequence[str]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns what of each family's items was right before and after, as `paired_loss` takes it."""
    before, after, family = np.array(zero), np.array(other), np.array(families)
    return {
        str(name): (before[family == name], after[family == name]) for name in np.unique(family)
    }


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


def paired_loss(
    by_family: Mapping[str, tuple[np.ndarray, np.ndarray]],
) -> tuple[float, float, float]:
    """Returns accuracy loss in percent of zero brownout's accuracy, and its 95 % interval.

    The interval is a percentile bootstrap over items, paired (an item keeps its two answers
    together) and stratified by family. A resample of a family's items is a draw of how many fall
    into each of the four cases right/wrong before/after, so none is enumerated.

    Args:
        by_family: bool arrays (right without brownout, right with) of the same items.
    """
    rng = np.random.default_rng(0)
    points, draws = [], []
    for before, after in by_family.values():
        count = np.array([(before & after).sum(), (before & ~after).sum(), (~before & after).sum()])
        share = np.append(count, len(before) - count.sum()) / len(before)
        drawn = rng.multinomial(len(before), share, size=RESAMPLES) / len(before)
        points.append((share[0] + share[1], share[0] + share[2]))
        draws.append((drawn[:, 0] + drawn[:, 1], drawn[:, 0] + drawn[:, 2]))
    zero, other = np.mean(points, axis=0)
    if zero == 0:
        return math.nan, math.nan, math.nan
    zeros, others = np.mean(draws, axis=0)
    losses = 100 * (zeros - others) / np.maximum(zeros, 1e-12)
    low, high = np.percentile(losses, INTERVAL)
    return 100 * (zero - other) / zero, float(low), float(high)


def expected_losses(found: Sequence[Score]) -> list[ExpectedLoss]:
    """Returns what a server may expect thresholds to cost, of each kind that threshold 0 was run
    of; users' own strategies are left out.
    """
    kinds = defaultdict[Kind, list[Point]](list)
    for score in sorted(found, key=lambda score: -score.setting.threshold_percent):
        setting, (mean, margin) = score.setting, score.excess
        if setting.own or setting.name == "zero" or setting.threshold_percent == 100:
            continue
        nats = (round(value, 6) for value in (mean, mean - margin, mean + margin))
        point = Point(setting.threshold_percent, *nats)
        kinds[Kind.of(setting)].append(point)
    return [
        ExpectedLoss(kind, tuple(points))
        for kind, points in kinds.items()
        if points[-1].threshold_percent == 0 and not any(math.isnan(p.excess) for p in points)
    ]


def write_csv(found: Sequence[Score]) -> str:
    """Returns CSV with a row for each setting; docs/evaluation.md says what the columns mean."""
    return csv_of([_csv_row(score) for score in found])


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns CSV of rows that have the same columns."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _csv_row(score: Score) -> dict[str, Any]:
    result, setting = score.result, score.setting
    row: dict[str, Any] = {
        "strategy": setting.name,
        "way": setting.way or "",
        "keep": setting.keep,
        "levels": setting.levels,
        "threshold_percent": setting.threshold_percent,
        "items": len(result.right),
        "accuracy_percent": _digits(100 * score.accuracy),
        "accuracy_loss_percent": _digits(score.loss_percent),
        "loss_low_percent": _digits(score.low_percent),
        "loss_high_percent": _digits(score.high_percent),
        "degraded_visits_percent": _digits(100 * result.degraded_share),
    }
    for name, factor, (value, margin) in (
        ("excess_nats", 1, score.excess),
        ("disagreement_percent", 100, score.disagreement),
    ):
        row |= {name: _digits(factor * value), f"{name}_margin": _digits(factor * margin)}
    row |= {f"accuracy_percent_{n}": _digits(100 * share) for n, share in score.families.items()}
    row |= {f"perplexity_{name}": _digits(value) for name, value in result.perplexity.items()}
    row["output_error"] = _digits(_mean(result.output_error))
    row |= {f"output_error_layer_{i}": _digits(e) for i, e in enumerate(result.output_error)}
    return row


def _digits(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4f}"


def write_markdown(found: Sequence[Score], inputs: Mapping[str, Any]) -> str:
    """Returns Markdown: accuracy loss laid out as the paper's Table I, then accuracy, perplexity,
    output error.
    """
    zero = found[0]
    parts = [
        f"# Brownout: {inputs['model']}, {inputs['items']}\n",
        f"{len(zero.result.right)} items, {inputs['dtype']}, batch {inputs['batch']}, prefill "
        f"steps of {inputs['chunk']} tokens. Zero brownout: {100 * zero.accuracy:.2f} % right "
        f"(mean over {len(zero.families)} families).\n",
        "## Accuracy loss\n\nIn percent of zero brownout's accuracy, with a 95 % interval "
        f"(percentile bootstrap over items, paired, by family, {RESAMPLES:,} resamples).\n",
        _grid(found, loss),
        "## Accuracy\n\nRight answers, percent, mean over families.\n",
        _grid(found, lambda s: f"{100 * s.accuracy:.2f}"),
    ]
    if zero.result.tokens:
        parts.append(
            "## What a token costs\n\nExcess in nats: the log-probability of an answer's token as "
            "it was drawn, above that under the exact model; its 95 % interval; and the share of "
            "tokens that are not the exact model's first choice.\n"
        )
        parts.append(_grid(found, _cost))
    for name in zero.result.perplexity:
        value = zero.result.perplexity[name]
        parts.append(f"## Perplexity of {name}\n\nZero brownout: {value:.3f}.\n")
        parts.append(_grid(found, lambda s, name=name: f"{s.result.perplexity[name]:.3f}"))
    parts.append("## Output error\n\nOf the routed experts, relative, mean over MoE layers.\n")
    parts.append(_grid(found, lambda s: f"{_mean(s.result.output_error):.3f}"))
    parts.append("## Degraded visits\n\nPercent of expert visits.\n")
    parts.append(_grid(found, lambda s: f"{100 * s.result.degraded_share:.1f}"))
    return "\n".join(parts)


def _cost(score: Score) -> str:
    excess, margin = score.excess
    others, _ = score.disagreement
    return f"{excess:.3f} ± {margin:.3f}, {100 * others:.2f} %"


def loss(score: Score, unit: str = "") -> str:
    """Returns a score's loss and its interval for people; `-` where zero brownout got nothing
    right.
    """
    if math.isnan(score.loss_percent):
        return "-"
    if score.setting.threshold_percent == 100:
        return f"0.00{unit}"
    return f"{score.loss_percent:.2f}{unit} ({score.low_percent:.2f} to {score.high_percent:.2f})"


def _grid(found: Sequence[Score], cell: Any) -> str:
    """Returns a table with thresholds down and ways across, as in Table I; settings not run are
    empty.
    """
    settings = [score.setting for score in found[1:]]
    kinds = {kind_of(setting): setting.way or math.inf for setting in settings}
    columns = sorted(kinds, key=lambda kind: kinds[kind])  # full brownout last
    cells = {(kind_of(s.setting), s.setting.threshold_percent): cell(s) for s in found[1:]}
    rows = [
        [f"{t} %", *(cells.get((column, t), "") for column in columns)]
        for t in sorted({setting.threshold_percent for setting in settings}, reverse=True)
    ]
    named = ["full brownout" if column == "full" else column for column in columns]
    return table(["threshold", *named], rows, "r") + "\n"
