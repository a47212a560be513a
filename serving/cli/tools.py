"""`jmoe bench serve, priority, balance, family, controllers`, `jmoe demo`: flags for functions."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from serving.cli.options import ApiKeyEnv, TlsCa, TlsCert, TlsKey, overrides
from serving.telemetry.progress import progress_bar

bench = typer.Typer(help="Runs benchmarks.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    """Runs benchmarks."""


class _SeveralValues(TyperCommand):
    """Lets `--goodput ttft:200 tpot:50` take several values, as vLLM's does; so --model-mix."""

    FLAGS = ("--goodput", "--model-mix")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeats the flag before every value after the first."""
        spread: list[str] = []
        flag, num_values = "", -1  # the flag under way; -1: one that takes a single value
        for arg in args:
            if arg.startswith("-"):
                flag, num_values = arg, 0 if arg in self.FLAGS else -1
            elif num_values >= 0:
                spread += [flag] if num_values else []
                num_values += 1
            spread.append(arg)
        return super().parse_args(ctx, spread)


@contextmanager
def _servers_of_its_own() -> Iterator[None]:
    """Lets a benchmark start servers; ends the command with a message where one does not start."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # or it tells of every server that is started
    from serving.bench.calibrate import CalibrationError
    from serving.bench.launch import LaunchError

    try:
        yield
    except (CalibrationError, LaunchError) as error:
        print(f"jmoe: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


@bench.command(cls=_SeveralValues)
def serve(
    backend: Annotated[
        str,
        typer.Option(
            help="Protocol of the server: jmoe (gRPC), or openai (completions over HTTP, of any "
            "server)."
        ),
    ] = "jmoe",
    base_url: Annotated[
        str | None,
        typer.Option(
            help="Server, instead of --host and --port: http://, https:// or grpc://.",
            metavar="http://HOST:PORT",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address of the server.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="Port of the server. Default: 50051, of openai 8000.")
    ] = None,
    admin_address: Annotated[
        str | None,
        typer.Option(
            help="The server's admin service. Default: what the server says.", metavar="HOST:PORT"
        ),
    ] = None,
    api_key_env: ApiKeyEnv = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    ready_check_timeout_sec: Annotated[
        float, typer.Option(help="Seconds to wait for a server that is starting. 0: do not wait.")
    ] = 600.0,
    model: Annotated[
        str | None, typer.Option(help="Model that requests go to. Default: the server's first.")
    ] = None,
    model_mix: Annotated[
        list[str] | None,
        typer.Option(
            help="Models of a family that requests go to, drawn by weight, such as base=2 "
            "legal=1. The result then has figures for each.",
            metavar="NAME=WEIGHT...",
        ),
    ] = None,
    dataset_name: Annotated[
        str, typer.Option(help="Dataset: sharegpt, alpaca, tasks or random.")
    ] = "random",
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            help="File of the dataset. Default: the bundled tasks, or lengths like the dataset's."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer.json, or its folder, to count a dataset's tokens, and to say to "
            "openai's random prompts how many tokens there are."
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="Number of requests. Default: 1000, or as many as the server takes at once."
        ),
    ] = None,
    request_rate: Annotated[
        float, typer.Option(help="Requests per second. inf: all at once.")
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the gamma distribution of gaps between requests. 1: a Poisson "
            "process; below 1: bursts; above 1: more even."
        ),
    ] = 1.0,
    ramp_up_strategy: Annotated[
        str | None,
        typer.Option(help="Let the rate grow, linear or exponential, instead of --request-rate."),
    ] = None,
    ramp_up_start_rps: Annotated[
        float | None, typer.Option(help="Requests per second at the start of the ramp.")
    ] = None,
    ramp_up_end_rps: Annotated[
        float | None, typer.Option(help="Requests per second at the end of the ramp.")
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Most requests in flight; others wait in the client.")
    ] = None,
    random_input_len: Annotated[
        int | None,
        typer.Option(help="Tokens in a random prompt. Default: 1024, or what fits the server."),
    ] = None,
    random_output_len: Annotated[
        int | None,
        typer.Option(help="Tokens in its answer. Default: 128, or what fits the server."),
    ] = None,
    best_effort_share: Annotated[
        float,
        typer.Option(
            help="Share of requests that are best effort. The result then has figures for "
            "each class."
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts, their order and their times.")] = 0,
    percentile_metrics: Annotated[
        str, typer.Option(help="Latencies to report, separated by commas: ttft, tpot, itl, e2el.")
    ] = "ttft,tpot,itl",
    metric_percentiles: Annotated[
        str, typer.Option(help="Percentiles to report, such as 50,90,99.")
    ] = "99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="Objectives in ms that a good request keeps, such as ttft:200 tpot:50 e2el:900.",
            metavar="METRIC:MS...",
        ),
    ] = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write the result as JSON.")
    ] = False,
    save_detailed: Annotated[
        bool,
        typer.Option("--save-detailed", help="Write the figures and text of every request, too."),
    ] = False,
    result_dir: Annotated[Path, typer.Option(help="Folder for the result.")] = Path(),
    result_filename: Annotated[
        str | None,
        typer.Option(help="Name of the result's file. Default: made of rate, model and date."),
    ] = None,
    time_limit_s: Annotated[
        float, typer.Option(help="Seconds after which requests without an answer have failed.")
    ] = 3600.0,
) -> None:
    """Plays a workload against a running server. Flags are those of `vllm bench serve`."""
    flags: dict[str, Any] = {
        **locals(),
        "goodput": tuple(goodput or ()),
        "model_mix": tuple(model_mix or ()),
    }
    from serving.bench.config import BenchConfig
    from serving.bench.run import run_bench
    from serving.bench.table import result_table

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with progress_bar() as progress:
        result = run_bench(BenchConfig(**flags), say, _seldom(progress))
    print(result_table(result))
    if not result["completed"]:
        print("jmoe: no request was answered", file=sys.stderr)
        raise typer.Exit(1)


def _seldom(progress: Callable[..., None]) -> Callable[[int, int, str], None]:
    """Returns a callback that reports requests to `progress` at a limited rate; in a log, every 5
    s.
    """
    every_s = 0.1 if sys.stderr.isatty() else 5.0
    next_at = time.monotonic() + every_s

    def count(done: int, total: int, text: str) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at or done == total:
            progress("requests", done, total, text)
            next_at = time.monotonic() + every_s

    return count


@bench.command()
def priority(
    server_args: Annotated[
        list[str] | None, typer.Argument(help="Flags of `jmoe serve`, after --.")
    ] = None,
    num_requests: Annotated[
        int, typer.Option(help="Number of requests at each load, of both classes.")
    ] = 2500,
    loads: Annotated[
        str,
        typer.Option(
            help="Loads as shares of what first come, first served can do, separated by commas."
        ),
    ] = "0.4,0.8,1.2",
    ls_share: Annotated[
        float, typer.Option(help="Share of requests that are latency-sensitive.")
    ] = 0.2,
    part_layers: Annotated[
        int, typer.Option(help="Number of layers in a part of a step. 0: as measured.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and classes.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("out"),
) -> None:
    """Plays two classes of requests under each policy.

    At several loads, for QLLM's figures (docs/priorities.md).
    """
    flags: dict[str, Any] = {**locals(), "server_args": tuple(server_args or ())}
    flags["loads"] = _loads(loads)
    with _servers_of_its_own():
        from serving.bench.priority import PriorityConfig, run_priority

        run_priority(PriorityConfig(**flags))


@bench.command()
def balance(
    server_args: Annotated[
        list[str] | None, typer.Argument(help="Flags of `jmoe serve`, after --.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model directory, or bundled.")] = "bundled",
    mesh: Annotated[
        str, typer.Option(help="ep=N: a mesh of N devices, 2 or more; a CPU can act as that many.")
    ] = "ep=8",
    variants: Annotated[
        str,
        typer.Option(help="Variants to compare, separated by commas: none, replicas, spare, both."),
    ] = "none,replicas,spare,both",
    families: Annotated[
        str,
        typer.Option(
            help="Task families of the prompts, separated by commas. Fewer families load "
            "experts more unevenly."
        ),
    ] = "fact",
    requests: Annotated[int, typer.Option(help="Number of requests, sent all at once.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    replicas: Annotated[
        int,
        typer.Option(
            help="Number of experts that each device copies for a layer while a step runs."
        ),
    ] = 4,
    spare_slots: Annotated[
        int, typer.Option(help="Slots per layer and device for copies that stay.")
    ] = 2,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("out"),
) -> None:
    """Compares a mesh without and with copies of experts.

    One load, and how evenly devices share it (docs/expert-parallelism.md).
    """
    flags: dict[str, Any] = {**locals(), "server_args": tuple(server_args or ())}
    for name in ("variants", "families"):
        flags[name] = tuple(filter(None, flags[name].split(",")))
    with _servers_of_its_own():
        from serving.bench.balance import BalanceBenchConfig, run_balance

        run_balance(BalanceBenchConfig(**flags))


@bench.command()
def family(
    model: Annotated[
        list[str], typer.Option(help="NAME=DIR, repeated, for each model of the family.")
    ],
    server_args: Annotated[
        list[str] | None, typer.Argument(help="Flags of `jmoe serve`, after --.")
    ] = None,
    family: Annotated[
        Path | None,
        typer.Option(help="Map of shared experts, of jmoe consolidate. [default: none is shared]"),
    ] = None,
    loads: Annotated[
        str, typer.Option(help="Loads as shares of one model's capacity, separated by commas.")
    ] = "0.3,0.6,0.9,1.2",
    duration_s: Annotated[
        float, typer.Option(help="Seconds of arrivals for each alternative, load and round.")
    ] = 5.0,
    rounds: Annotated[
        int, typer.Option(help="Number of rounds, each with arrivals of its own.")
    ] = 2,
    singles: Annotated[int, typer.Option(help="Number of requests sent one at a time.")] = 80,
    slots: Annotated[
        int, typer.Option(help="Sequences decoded together on the whole machine.")
    ] = 32,
    seed: Annotated[int, typer.Option(help="Seed of prompts, arrivals and models.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Play the smallest load, on the bundled weights.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("out"),
) -> None:
    """Compares a family in one server with its alternatives.

    They are its models in turn and side by side, at several loads, for Multi-MoE's figures
    (docs/families.md).
    """
    flags: dict[str, Any] = {**locals(), "server_args": tuple(server_args or ())}
    flags |= {"model": tuple(model), "loads": _loads(loads)}
    with _servers_of_its_own():
        from serving.bench.family import FamilyConfig, run_family

        run_family(FamilyConfig(**flags))


@bench.command()
def controllers(
    conditions: Annotated[
        str, typer.Option(help="Names of conditions, separated by commas. Default: all.")
    ] = "",
    controllers: Annotated[
        str, typer.Option(help="Controllers, by name or module:Class, separated by commas.")
    ] = "algorithm2,predictive",
    seeds: Annotated[int, typer.Option(help="Number of seeds of each condition.")] = 20,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 1000,
    duration_s: Annotated[float, typer.Option(help="Seconds of arrivals.")] = 30.0,
    load: Annotated[
        float | None,
        typer.Option(help="Share of the capacity with all brownout. Default: the condition's."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Model whose steps are measured on this machine, in 30 s.")
    ] = "bundled",
    times: Annotated[
        Path | None,
        typer.Option(help="Step times instead: a file of `jmoe serve --timeline`, or a CSV table."),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Trace of Azure, BurstGPT or Mooncake to play, too; repeated."),
    ] = None,
    mix: Annotated[
        str,
        typer.Option(
            help="Mean tokens of prompts and answers and the spread of their logarithm, such as "
            "161,338,1. Default: the condition's."
        ),
    ] = "",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE of a setting; repeated.")
    ] = None,
    processes: Annotated[int, typer.Option(help="Processes. 0: one a processor.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("out"),
) -> None:
    """Compares controllers over load traces, in a simulator.

    On this machine's step times or a file's, with figures for each condition (docs/controllers.md).
    """
    from serving.bench.controllers import CONDITIONS, ControllersConfig, run_controllers

    overrides({}, set_ or [])  # raises for what is no KEY=VALUE
    config = ControllersConfig(
        conditions=tuple(conditions.split(",")) if conditions else tuple(CONDITIONS),
        controllers=tuple(controllers.split(",")),
        seeds=seeds,
        first_seed=first_seed,
        duration_s=duration_s,
        load=load,
        model=model,
        mix=_mix(mix) if mix else None,
        times=times,
        traces=tuple(trace or ()),
        settings=tuple(set_ or ()),
        processes=processes,
        out=out,
    )
    with _servers_of_its_own():
        run_controllers(config)


def _mix(text: str) -> tuple[float, float, float]:
    try:
        prompt, answer, spread = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"--mix is {text!r}; it must be three numbers with commas") from None
    return prompt, answer, spread


def _loads(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ValueError(f"--loads is {text!r}; it must be numbers with commas") from None


def demo(
    server_args: Annotated[
        list[str] | None, typer.Argument(help="Flags of `jmoe serve`, after --.")
    ] = None,
    segment_s: Annotated[
        float, typer.Option(help="Seconds of arrivals in each half of a pair.")
    ] = 15.0,
    pairs: Annotated[int, typer.Option(help="Number of pairs that have to count.")] = 4,
    strategy: Annotated[str, typer.Option(help="Brownout strategy: partial or full.")] = "partial",
    controllers: Annotated[
        bool, typer.Option("--controllers", help="Play each controller, not only the server's own.")
    ] = False,
    simulated: Annotated[
        bool,
        typer.Option("--simulated", help="Simulate it on this machine's step times, in 30 s."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of arrival times and of the order of tasks.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("out"),
) -> None:
    """Plays bursts without and with brownout, and draws both.

    Against the bundled model, in a server of its own.
    """
    flags: dict[str, Any] = {**locals(), "server_args": tuple(server_args or ())}
    from asyncio import CancelledError

    from serving.bench.demo import DemoConfig, run_demo

    try:
        with _servers_of_its_own():
            run_demo(DemoConfig(**flags))
    except (KeyboardInterrupt, CancelledError):
        raise typer.Exit(130) from None
