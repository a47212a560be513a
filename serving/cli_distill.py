"""`jmoe distill`: flags for `training.distill`."""

from pathlib import Path
from typing import Annotated

import typer

from serving.cli_options import AllowUnknownConfig, progress_bar


def distill(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    data: Annotated[
        list[Path], typer.Option(help="JSON lines of prompts and answers, or texts; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="Directory for united.safetensors and the report.")],
    ways: Annotated[str, typer.Option(help="With commas.")] = "2,4,8",
    objective: Annotated[
        str, typer.Option(help="combined, routed, or equation4 (the paper's).")
    ] = "combined",
    start: Annotated[str, typer.Option(help="most_used, mean or aligned.")] = "most_used",
    grouping: Annotated[str, typer.Option(help="index, similarity or coactivation.")] = "index",
    rows: Annotated[int, typer.Option(help="Captured rows (tokens) a layer.")] = 65_536,
    steps: Annotated[int, typer.Option(help="Steps a layer and way, at most.")] = 600,
    batch: Annotated[int, typer.Option(help="Rows a step.")] = 4096,
    decode_batch: Annotated[
        int, typer.Option(help="Rows among which brownout chooses, as a decode step would.")
    ] = 64,
    learning_rate: Annotated[float, typer.Option(help="0: 0.034 / sqrt(d_model).")] = 0.0,
    held_out: Annotated[float, typer.Option(help="Share of rows that only measure.")] = 0.05,
    patience: Annotated[
        int, typer.Option(help="Evaluations without gain that end a layer; 0: none do.")
    ] = 4,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations.")] = 100,
    refine_steps: Annotated[int, typer.Option(help="End-to-end steps a way; 0: none.")] = 600,
    refine_rows: Annotated[int, typer.Option(help="Packed rows an end-to-end step.")] = 32,
    refine_learning_rate: Annotated[
        float, typer.Option(help="0: two thirds of the layers'.")
    ] = 0.0,
    length: Annotated[int, typer.Option(help="Tokens a packed row.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of the products: bfloat16, float32.")] = "bfloat16",
    seed: int = 0,
    allow_unknown_config: AllowUnknownConfig = None,
) -> None:
    """Distils united experts, which stand in for groups of routed ones under brownout.

    Killed at any moment, the same command goes on where it was.
    """
    from jmoe.api import resolve
    from training.distill import DistillConfig, DistillError
    from training.distill import distill as run

    try:
        numbers = [int(way) for way in ways.split(",")]
    except ValueError:
        raise ValueError(f"--ways is {ways!r}; it must be integers with commas") from None
    config = DistillConfig(
        objective=objective,
        start=start,
        grouping=grouping,
        rows=rows,
        steps=steps,
        batch=batch,
        decode_batch=decode_batch,
        learning_rate=learning_rate,
        held_out=held_out,
        patience=patience,
        eval_every=eval_every,
        refine_steps=refine_steps,
        refine_rows=refine_rows,
        refine_learning_rate=refine_learning_rate,
        length=length,
        dtype=dtype,
        seed=seed,
    )
    try:
        with progress_bar() as progress:
            layers, refined = run(
                resolve(model), numbers, data, out, config, progress, allow_unknown_config or ()
            )
    except DistillError as error:
        raise ValueError(str(error)) from error
    for way in numbers:
        own = [result for result in layers if result.way == way]
        before = sum(result.error_before for result in own) / len(own)
        after = sum(result.error_after for result in own) / len(own)
        print(f"way {way}: relative error {before:.3f}, after training {after:.3f}")
    for result in refined:
        print(f"way {result.way}: divergence {result.before:.4f}, refined {result.after:.4f}")
    print(f"report: {out / 'distill.md'}")
