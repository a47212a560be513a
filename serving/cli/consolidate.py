"""`jmoe consolidate`: flags for `training.consolidate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from serving.cli.options import AllowUnknownConfig, of_fields
from serving.telemetry import logs
from serving.telemetry.progress import progress_bar


def consolidate(
    model: Annotated[list[str], typer.Option(metavar="NAME=DIR")],
    out: Annotated[Path, typer.Option()],
    rule: str = "functional",
    share: Annotated[float | None, typer.Option(metavar="PERCENT")] = None,
    budget: str | None = None,
    max_loss: float | None = None,
    lossless: Annotated[bool, typer.Option("--lossless")] = False,
    data: Annotated[list[str] | None, typer.Option(metavar="[NAME=]FILE")] = None,
    rows: int = 16_384,
    length: int = 128,
    residual_rank: int = 0,
    seed: int = 0,
    allow_unknown_config: AllowUnknownConfig = None,
) -> None:
    """Chooses which experts fine-tuned models share.

    They then fit one pool of experts (docs/consolidation.md).

    Args:
        model: A fine-tuned model. Repeat it, for two or more.
        out: File to write, such as family.json.
        rule: How experts are matched: functional, paper (closest weights), random or average.
        share: Percentage of what sharing can save. 100: one expert per position.
        budget: Instead of --share: number of slots, or bytes such as 12GiB.
        max_loss: Instead: share as much as costs no model more than this squared error a row,
            relative to the residual stream's length, over all layers; the last lines say it.
        lossless: Instead: share experts that are equal.
        data: Texts, as for `jmoe distill`, of one model or of all. May be repeated.
        rows: Number of captured rows (tokens) per model.
        length: Number of tokens in a packed row.
        residual_rank: Keep models' differences from shared experts, at this rank. 0: do not.
        seed: Seed of rows and of the rule random.
    """
    flags = locals()
    from jmoe.display import size
    from training.consolidate.run import ConsolidateConfig
    from training.consolidate.run import consolidate as run

    directories = _directories(model)
    flags["data"] = _texts(data or (), directories)
    config = of_fields(ConsolidateConfig, flags)
    with progress_bar() as progress:
        done = run(directories, out, config, progress, logs.say)
    sharing = done.sharing
    positions = sharing.owners[0].size
    print(
        f"{', '.join(sharing.names)}: {sharing.num_slots:,} slots for "
        f"{len(sharing.names) * positions:,} experts, {sharing.shared_percent:.1f} % shared"
    )
    for name, loss in (done.losses or {}).items():
        print(f"{name}: relative squared error {loss:.6f} a row, all layers")
    if done.residual_bytes:
        print(f"differences of rank {residual_rank}: {size(done.residual_bytes)}, all models")
    print(f"map: {out}")


def _directories(models: Sequence[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for text in models:
        name, equals, directory = text.partition("=")
        if not (name and equals and directory):
            raise ValueError(f"--model is {text!r}; write --model NAME=DIR")
        if name in found:
            raise ValueError(f"--model {name} is given twice; every model has a name of its own")
        found[name] = Path(directory)
    return found


def _texts(data: Sequence[str], models: dict[str, Path]) -> dict[str, list[Path]]:
    """Returns the texts by model; a `=` that does not follow a model's name belongs to the path."""
    from training.consolidate.run import ALL

    found: dict[str, list[Path]] = {}
    for text in data:
        name, equals, path = text.partition("=")
        own = bool(equals) and name in models
        found.setdefault(name if own else ALL, []).append(Path(path if own else text))
    return found
