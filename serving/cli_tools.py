"""`jmoe bench serve` and `jmoe demo`: flags for functions that live elsewhere."""

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

bench = typer.Typer(help="Benchmarks.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    """Keeps `serve` a subcommand of its own."""


@bench.command()
def serve(
    host: str = "127.0.0.1",
    port: int = 50051,
    admin_address: Annotated[
        str | None,
        typer.Option(help="Of the server's admin service; else what it says.", metavar="HOST:PORT"),
    ] = None,
    dataset_name: Annotated[
        str, typer.Option(help="sharegpt, alpaca, tasks or random.")
    ] = "random",
    dataset_path: Annotated[Path | None, typer.Option(help="JSON file of the dataset.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Counts a dataset's tokens.")] = None,
    num_prompts: int = 1000,
    request_rate: Annotated[float, typer.Option(help="Per second; inf: all at once.")] = math.inf,
    burstiness: float = 1.0,
    max_concurrency: int | None = None,
    random_input_len: int = 1024,
    random_output_len: int = 128,
    seed: int = 0,
    percentile_metrics: str = "ttft,tpot,itl",
    metric_percentiles: str = "99",
    goodput: Annotated[list[str] | None, typer.Option(help="METRIC:MILLISECONDS")] = None,
    save_result: Annotated[bool, typer.Option("--save-result")] = False,
    save_detailed: Annotated[bool, typer.Option("--save-detailed")] = False,
    result_dir: Path = Path(),
    result_filename: str | None = None,
    time_limit_s: float = 3600.0,
) -> None:
    """Plays a workload against a running server. Flags are those of `vllm bench serve`."""
    flags: dict[str, Any] = {**locals(), "goodput": tuple(goodput or ())}
    from serving.loadgen import BenchConfig, run_bench

    result = run_bench(BenchConfig(**flags))
    for name, value in result.items():
        if name == "failures":
            value = ", ".join(f"{count} {code}" for code, count in value.items()) or "none"
        if not isinstance(value, list | dict):
            print(f"{name}: {value}")
    if not result["completed"]:
        print("jmoe: no request was answered", file=sys.stderr)
        raise typer.Exit(1)


def demo(
    server_args: Annotated[
        list[str] | None, typer.Argument(help="After --: flags of `jmoe serve`.")
    ] = None,
    duration_s: Annotated[float, typer.Option(help="Of arrivals, for each of two runs.")] = 75.0,
    repeat: Annotated[int, typer.Option(help="Pairs of runs; more: medians are stored.")] = 1,
    strategy: Annotated[str, typer.Option(help="Brownout: partial or full.")] = "partial",
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("out"),
) -> None:
    """Plays a burst against the bundled model, without and with brownout, and draws both."""
    flags: dict[str, Any] = {**locals(), "server_args": tuple(server_args or ())}
    from asyncio import CancelledError

    from serving.demo import DemoConfig, run_demo
    from serving.launch import LaunchError

    try:
        run_demo(DemoConfig(**flags))
    except LaunchError as error:
        print(f"jmoe: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except (KeyboardInterrupt, CancelledError):
        raise typer.Exit(130) from None
