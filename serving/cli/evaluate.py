"""`jmoe evaluate`: flags for `training.evaluation`."""

from pathlib import Path
from typing import Annotated

import typer

from serving.cli.options import AllowUnknownConfig
from serving.progress import progress_bar


def evaluate(
    model: Annotated[str, typer.Option(help="Model directory, or bundled.")] = "bundled",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    data: Annotated[Path | None, typer.Option(help="JSON lines of prompt, answer, family.")] = None,
    num: Annotated[int | None, typer.Option(help="Items of --data; without it, all.")] = None,
    generate_tasks: Annotated[
        int | None, typer.Option(help="Make so many held-out items instead of --data.")
    ] = None,
    ways: Annotated[str, typer.Option(help="With commas.")] = "2,4,8",
    thresholds: Annotated[
        str, typer.Option(help="Percent, with commas.")
    ] = "100,90,80,70,60,50,40,30,20,10,0",
    strategies: Annotated[str, typer.Option(help="partial, full, or both.")] = "partial,full",
    only: Annotated[
        str | None,
        typer.Option(
            help="Single settings instead of the grid, as 2:0,4:20,full:40 (WAY:PERCENT)."
        ),
    ] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Text files for perplexity.")] = None,
    text_window: Annotated[int, typer.Option(help="Tokens of context at most.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences of a decode step.")] = 64,
    chunk: Annotated[int, typer.Option(help="Tokens of a prefill step.")] = 256,
    error_steps: Annotated[int, typer.Option(help="Steps that measure output error.")] = 32,
    seed: Annotated[int, typer.Option(help="Of fresh items and of their order.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder; run again, it goes on.")] = Path(
        "out/evaluate"
    ),
    allow_unknown_config: AllowUnknownConfig = None,
) -> None:
    """Accuracy, perplexity and output error under brownout, by strategy, way and threshold."""
    from training.evaluation.items import grid, integers, parse_only
    from training.evaluation.run import EvaluateConfig, label
    from training.evaluation.run import evaluate as run
    from training.evaluation.tables import loss

    if only is not None:
        settings = parse_only(only)
    else:
        settings = grid(
            integers("ways", ways), integers("thresholds", thresholds), strategies.split(",")
        )
    config = EvaluateConfig(
        model=model,
        dtype=dtype,
        data=data,
        generate_tasks=generate_tasks,
        num=num,
        text=tuple(text or ()),
        text_window=text_window,
        batch=batch,
        chunk=chunk,
        error_steps=error_steps,
        seed=seed,
        out=out,
        allow_unknown_config=tuple(allow_unknown_config or ()),
    )
    with progress_bar() as progress:
        found = run(config, settings, progress)
    print(f"zero brownout: {100 * found[0].accuracy:.2f} % right")
    for score in found[1:]:
        print(
            f"{label(score.setting)}: {100 * score.accuracy:.2f} % right, loss {loss(score, ' %')}"
        )
    print(f"tables and picture in {out}")
