"""What each choice of the distillation brings: accuracy lost at one way, in paired runs by seed.

Run: `python -m benchmarks.accuracy.ablation --out DIR`. A seed draws the texts to distil on, the
rows, the S2 sets and the batches; all variants of a seed share them, and all runs answer the same
held-out tasks. Every variant is measured after its layers alone and, with `--refine-steps`, after
the end-to-end stage on top of the same layers. Run again, it goes on with what is missing.
"""

import argparse
import csv
import dataclasses
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.progress import Progress, TaskID

from jmoe.api import resolve
from jmoe.brownout import Brownout
from jmoe.checkpoint import UNITED_FILE
from training.distill import DistillConfig, distill
from training.evaluation.run import EvaluateConfig, evaluate
from training.tasks import write_jsonl

BASELINE = {"objective": "combined", "start": "mean", "grouping": "index"}
VARIANTS: dict[str, dict[str, str]] = {
    "baseline": {},
    "equation 4": {"objective": "equation4"},
    "each visit's own output": {"objective": "routed"},
    "start: most used": {"start": "most_used"},
    "start: aligned mean": {"start": "aligned"},
    "groups: similarity": {"grouping": "similarity"},
    "groups: co-activation": {"grouping": "coactivation"},
}
"""What differs from the baseline; the default is the best of them, `start: most used`."""

STAGES = ("layers", "end to end")
THRESHOLDS = (40, 0)
TEXTS = 20_000


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured setting: accuracy loss in percent of zero brownout's, with its 95 % interval."""

    variant: str
    stage: str
    seed: int
    threshold_percent: int
    loss_percent: float
    low_percent: float
    high_percent: float
    output_error: float


def run(
    out: Path,
    seeds: Sequence[int],
    *,
    model: str,
    way: int,
    items: int,
    refine_steps: int,
    variants: Sequence[str],
    refined: Sequence[str],
    config: DistillConfig,
    progress: Progress,
) -> Iterator[Row]:
    """Distils and evaluates what `out` has not, seed by seed; yields every row."""
    directory = resolve(model)
    for seed in seeds:
        data = out / f"texts-{seed}.jsonl"
        if not data.exists():
            part = data.with_suffix(".part")
            write_jsonl(part, "train", TEXTS, 1000 + seed)
            part.rename(data)
        for variant in variants:
            own = dataclasses.replace(
                config, seed=seed, refine_steps=0, **{**BASELINE, **VARIANTS[variant]}
            )
            work = out / f"{seed}-{variant.replace(' ', '_').replace(':', '')}"
            for stage in STAGES if refine_steps and variant in refined else STAGES[:1]:
                if stage == STAGES[1]:
                    own = dataclasses.replace(own, refine_steps=refine_steps)
                served = work / stage.replace(" ", "_")
                title = f"seed {seed}, {variant}, {stage}"
                if not (served / UNITED_FILE).exists():
                    _distilled(directory, way, data, work, served, own, title, progress)
                yield from _evaluated(served, way, items, variant, stage, seed, title, progress)


def _distilled(
    directory: Path,
    way: int,
    data: Path,
    work: Path,
    served: Path,
    config: DistillConfig,
    title: str,
    progress: Progress,
) -> None:
    """Writes `served`, a model directory with the united experts of `config`; layers stay in
    `work`.
    """
    job = progress.add_task(title)
    distill(directory, [way], [data], work, config, _teller(progress, job, title))
    progress.remove_task(job)
    served.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if path.name != UNITED_FILE and not (served / path.name).exists():
            (served / path.name).symlink_to(path.resolve())
    shutil.move(work / UNITED_FILE, served / UNITED_FILE)


def _evaluated(
    served: Path,
    way: int,
    items: int,
    variant: str,
    stage: str,
    seed: int,
    title: str,
    progress: Progress,
) -> Iterator[Row]:
    job = progress.add_task(f"{title}: evaluate")
    settings = [Brownout("partial", threshold, way) for threshold in THRESHOLDS]
    config = EvaluateConfig(
        model=str(served), dtype="float32", generate_tasks=items, out=served / "evaluate"
    )
    tell = _teller(progress, job, title)
    found = evaluate(config, settings, lambda what, done, total: tell(what, done, total, ""))
    progress.remove_task(job)
    for score in found[1:]:
        yield Row(
            variant,
            stage,
            seed,
            score.setting.threshold_percent,
            score.loss_percent,
            score.low_percent,
            score.high_percent,
            statistics.fmean(score.result.output_error),
        )


def _teller(progress: Progress, job: TaskID, title: str) -> Callable[[str, int, int, str], None]:
    def tell(what: str, done: int, total: int, text: str) -> None:
        progress.update(job, completed=done, total=total, description=f"{title}: {what} {text}")

    return tell


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes `rows` as CSV, one line a row."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in dataclasses.fields(Row))
        for row in rows:
            values = dataclasses.astuple(row)
            writer.writerow(f"{v:.4f}" if isinstance(v, float) else v for v in values)


def table(rows: Sequence[Row]) -> str:
    """Returns a Markdown table with a line for each variant and stage: the mean over seeds and the
    range.
    """
    lines = ["| | " + " | ".join(f"{s}, t {t}" for s in STAGES for t in THRESHOLDS) + " | seeds |"]
    lines.append("|---|" + "---:|" * (len(STAGES) * len(THRESHOLDS) + 1))
    for variant in dict.fromkeys(row.variant for row in rows):
        own = [row for row in rows if row.variant == variant]
        cells = [
            _cell([r.loss_percent for r in own if (r.stage, r.threshold_percent) == (stage, t)])
            for stage in STAGES
            for t in THRESHOLDS
        ]
        lines.append(f"| {variant} | {' | '.join(cells)} | {len({r.seed for r in own})} |")
    return "\n".join(lines) + "\n"


def _cell(losses: Sequence[float]) -> str:
    if not losses:
        return ""
    mean = statistics.fmean(losses)
    return (
        f"{mean:.1f} ({min(losses):.1f} to {max(losses):.1f})" if len(losses) > 1 else f"{mean:.1f}"
    )


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.ablation")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--way", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--items", type=int, default=2000, help="held-out tasks")
    parser.add_argument("--refine-steps", type=int, default=600, help="0: layers alone")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument(
        "--refined",
        nargs="+",
        default=list(VARIANTS),
        choices=list(VARIANTS),
        help="variants that also get the end-to-end stage",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with Progress() as progress:
        for row in run(
            args.out,
            args.seeds,
            model=args.model,
            way=args.way,
            items=args.items,
            refine_steps=args.refine_steps,
            variants=args.variants,
            refined=args.refined,
            config=DistillConfig(),
            progress=progress,
        ):
            rows.append(row)
            write_csv(args.out / "ablation.csv", rows)
    print(
        f"Accuracy loss at way {args.way}, percent of zero brownout's, mean over seeds "
        f"(least to most); {args.items} tasks\n\n{table(rows)}"
    )


if __name__ == "__main__":
    main()
