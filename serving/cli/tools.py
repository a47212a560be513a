"""`jmoe bench serve, priority, balance, family, controllers`, `jmoe demo`: flags for functions."""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.cli import options
from serving.cli.options import Command, of_fields
from serving.telemetry import logs
from serving.telemetry.progress import progress_bar

bench = options.Commands(help="Runs benchmarks.", no_args_is_help=True)


class _SeveralValues(Command):
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
    backend: str = "jmoe",
    base_url: Annotated[str | None, typer.Option(metavar="http://HOST:PORT")] = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    admin_address: Annotated[str | None, typer.Option(metavar="HOST:PORT")] = None,
    api_key_env: options.ApiKeyEnv = None,
    tls_ca: options.TlsCa = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    ready_check_timeout_sec: float = 600.0,
    model: str | None = None,
    model_mix: Annotated[list[str] | None, typer.Option(metavar="NAME=WEIGHT...")] = None,
    dataset_name: str = "random",
    dataset_path: Path | None = None,
    tokenizer: Path | None = None,
    num_prompts: int | None = None,
    request_rate: float = math.inf,
    burstiness: float = 1.0,
    ramp_up_strategy: str | None = None,
    ramp_up_start_rps: float | None = None,
    ramp_up_end_rps: float | None = None,
    max_concurrency: int | None = None,
    random_input_len: int | None = None,
    random_output_len: int | None = None,
    random_range_ratio: float = 0.0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False,
    temperature: float = 0.0,
    num_warmups: int = 0,
    best_effort_share: float = 0.0,
    seed: int = 0,
    percentile_metrics: str = "ttft,tpot,itl",
    metric_percentiles: str = "99",
    goodput: Annotated[list[str] | None, typer.Option(metavar="METRIC:MS...")] = None,
    save_result: Annotated[bool, typer.Option("--save-result")] = False,
    save_detailed: Annotated[bool, typer.Option("--save-detailed")] = False,
    result_dir: Path = Path(),
    result_filename: str | None = None,
    disable_tqdm: Annotated[bool, typer.Option("--disable-tqdm")] = False,
    time_limit_s: float = 3600.0,
) -> None:
    """Plays a workload against a running server.

    Flags that `vllm bench serve` has are named as there, and mean the same; not all are here.

    Args:
        backend: Protocol of the server: jmoe (gRPC), or openai, also called vllm (completions
            over HTTP, of any server).
        base_url: Server, instead of --host and --port: http://, https:// or grpc://.
        host: Address of the server.
        port: Port of the server. Default: 50051, of openai 8000.
        admin_address: The server's admin service. Default: what the server says.
        ready_check_timeout_sec: Seconds to wait for a server that is starting. 0: do not wait.
        model: Model that requests go to. Default: the server's first.
        model_mix: Models of a family that requests go to, drawn by weight, such as base=2 legal=1.
            The result then has figures for each.
        dataset_name: Dataset: sharegpt, alpaca, tasks or random.
        dataset_path: File of the dataset. Default: the bundled tasks, or lengths like the
            dataset's.
        tokenizer: tokenizer.json, or its folder, to count a dataset's tokens, and to say to
            openai's random prompts how many tokens there are.
        num_prompts: Number of requests. Default: 1000, or as many as the server takes at once.
        request_rate: Requests per second. inf: all at once.
        burstiness: Shape of the gamma distribution of gaps between requests. 1: a Poisson process;
            below 1: bursts; above 1: more even.
        ramp_up_strategy: Let the rate grow, linear or exponential, instead of --request-rate.
        ramp_up_start_rps: Requests per second at the start of the ramp.
        ramp_up_end_rps: Requests per second at the end of the ramp.
        max_concurrency: Most requests in flight; others wait in the client.
        random_input_len: Tokens in a random prompt. Default: 1024, or what fits the server.
        random_output_len: Tokens in its answer. Default: 128, or what fits the server.
        random_range_ratio: Draw a random prompt's and answer's tokens evenly, from 1 - this to
            1 + this times their number.
        ignore_eos: Answers go on behind the end of the text. Those to random prompts always do.
        temperature: Sampling temperature of all requests. 0: greedy.
        num_warmups: Requests, as the first one, that are played before and do not count.
        best_effort_share: Share of requests that are best effort. The result then has figures for
            each class.
        seed: Seed of prompts, their order and their times.
        percentile_metrics: Latencies to report, separated by commas: ttft, tpot, itl, e2el.
        metric_percentiles: Percentiles to report, such as 50,90,99.
        goodput: Objectives in ms that a good request keeps, such as ttft:200 tpot:50 e2el:900.
        save_result: Write the result as JSON.
        save_detailed: Write the figures and text of every request, too.
        result_dir: Folder for the result.
        result_filename: Name of the result's file. Default: made of rate, model and date.
        disable_tqdm: Show no progress.
        time_limit_s: Seconds after which requests without an answer have failed.
    """
    flags = locals()
    from serving.bench.config import BenchConfig
    from serving.bench.run import run_bench
    from serving.bench.table import result_table

    with progress_bar() as progress:
        result = run_bench(of_fields(BenchConfig, flags), logs.say, partial(progress, "requests"))
    print(result_table(result))
    if not result["completed"]:
        print("jmoe: no request was answered", file=sys.stderr)
        raise typer.Exit(1)


@bench.command()
def priority(
    server_args: Annotated[list[str] | None, typer.Argument()] = None,
    num_requests: int = 2500,
    loads: str = "0.4,0.8,1.2",
    ls_share: float = 0.2,
    part_layers: int = 0,
    seed: int = 0,
    out: Path = Path("out"),
) -> None:
    """Plays two classes of requests under each policy.

    At several loads, for QLLM's figures (docs/priorities.md).

    Args:
        server_args: Flags of `jmoe serve`, after --.
        num_requests: Number of requests at each load, of both classes.
        loads: Loads as shares of what first come, first served can do, separated by commas.
        ls_share: Share of requests that are latency-sensitive.
        part_layers: Number of layers in a part of a step. 0: as measured.
        seed: Seed of arrivals and classes.
        out: Folder for the results.
    """
    flags = locals() | {"loads": _numbers("--loads", loads)}
    with _servers_of_its_own():
        from serving.bench.priority import PriorityConfig, run_priority

        run_priority(of_fields(PriorityConfig, flags))


@bench.command()
def balance(
    server_args: Annotated[list[str] | None, typer.Argument()] = None,
    model: str = "bundled",
    mesh: str = "ep=8",
    variants: str = "none,replicas,spare,both",
    families: str = "fact",
    requests: int = 256,
    seed: int = 0,
    replicas: int = 4,
    spare_slots: int = 2,
    out: Path = Path("out"),
) -> None:
    """Compares a mesh without and with copies of experts.

    One load, and how evenly devices share it (docs/expert-parallelism.md).

    Args:
        server_args: Flags of `jmoe serve`, after --.
        model: Model directory, or bundled.
        mesh: ep=N: a mesh of N devices, 2 or more; a CPU can act as that many.
        variants: Variants to compare, separated by commas: none, replicas, spare, both.
        families: Task families of the prompts, separated by commas. Fewer families load experts
            more unevenly.
        requests: Number of requests, sent all at once.
        seed: Seed of the prompts.
        replicas: Number of experts that each device copies for a layer while a step runs.
        spare_slots: Slots per layer and device for copies that stay.
        out: Folder for the results.
    """
    flags = locals()
    for name in ("variants", "families"):
        flags[name] = [*filter(None, flags[name].split(","))]
    with _servers_of_its_own():
        from serving.bench.balance import BalanceBenchConfig, run_balance

        run_balance(of_fields(BalanceBenchConfig, flags))


@bench.command()
def family(
    model: Annotated[list[str], typer.Option()],
    server_args: Annotated[list[str] | None, typer.Argument()] = None,
    family: Path | None = None,
    loads: str = "0.3,0.6,0.9,1.2",
    duration_s: float = 5.0,
    rounds: int = 2,
    singles: int = 80,
    slots: int = 32,
    seed: int = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
    out: Path = Path("out"),
) -> None:
    """Compares a family in one server with its alternatives.

    They are its models in turn and side by side, at several loads, for Multi-MoE's figures
    (docs/families.md).

    Args:
        model: NAME=DIR, repeated, for each model of the family.
        server_args: Flags of `jmoe serve`, after --.
        family: Map of shared experts, of jmoe consolidate. [default: none is shared]
        loads: Loads as shares of one model's capacity, separated by commas.
        duration_s: Seconds of arrivals for each alternative, load and round.
        rounds: Number of rounds, each with arrivals of its own.
        singles: Number of requests sent one at a time.
        slots: Sequences decoded together on the whole machine.
        seed: Seed of prompts, arrivals and models.
        dry_run: Play the smallest load, on the bundled weights.
        out: Folder for the results.
    """
    flags = locals() | {"loads": _numbers("--loads", loads)}
    with _servers_of_its_own():
        from serving.bench.family import FamilyConfig, run_family

        run_family(of_fields(FamilyConfig, flags))


@bench.command()
def controllers(
    conditions: str = "",
    controllers: str = "algorithm2,predictive",
    seeds: int = 20,
    first_seed: int = 1000,
    duration_s: float = 30.0,
    load: float | None = None,
    model: str = "bundled",
    times: Path | None = None,
    trace: list[Path] | None = None,
    mix: str = "",
    set_: Annotated[list[str] | None, typer.Option("--set")] = None,
    processes: int = 0,
    out: Path = Path("out"),
) -> None:
    """Compares controllers over load traces, in a simulator.

    On this machine's step times or a file's, with figures for each condition (docs/controllers.md).

    Args:
        conditions: Names of conditions, separated by commas. Default: all.
        controllers: Controllers, by name or module:Class, separated by commas.
        seeds: Number of seeds of each condition.
        first_seed: The first of them.
        duration_s: Seconds of arrivals.
        load: Share of the capacity with all brownout. Default: the condition's.
        model: Model whose steps are measured on this machine, in 30 s.
        times: Step times instead: a file of `jmoe serve --timeline`, or a CSV table.
        trace: Trace of Azure, BurstGPT or Mooncake to play, too; repeated.
        mix: Mean tokens of prompts and answers and the spread of their logarithm, such as
            161,338,1. Default: the condition's.
        set_: KEY=VALUE of a setting; repeated.
        processes: Processes. 0: one a processor.
        out: Folder for the results.
    """
    flags = locals() | {"traces": trace, "settings": set_, "controllers": controllers.split(",")}
    from serving.bench.controllers import ControllersConfig, run_controllers

    options.overrides({}, set_ or [])  # raises for what is no KEY=VALUE
    flags["conditions"] = conditions.split(",") if conditions else None
    flags["mix"] = _numbers("--mix", mix, "three numbers", 3) if mix else None
    config = of_fields(ControllersConfig, flags)
    with _servers_of_its_own():
        run_controllers(config)


def _numbers(flag: str, text: str, wanted: str = "numbers", count: int = 0) -> list[float]:
    """Parses numbers with commas, `count` of them (0: any). Raises ValueError."""
    try:
        found = [float(number) for number in text.split(",")]
    except ValueError:
        found = []
    if not found or count not in (0, len(found)):
        raise ValueError(f"{flag} is {text!r}; it must be {wanted} with commas")
    return found


def demo(
    server_args: Annotated[list[str] | None, typer.Argument()] = None,
    segment_s: float = 15.0,
    pairs: int = 4,
    strategy: str = "partial",
    controllers: Annotated[bool, typer.Option("--controllers")] = False,
    simulated: Annotated[bool, typer.Option("--simulated")] = False,
    seed: int = 0,
    out: Path = Path("out"),
) -> None:
    """Plays bursts without and with brownout, and draws both.

    Against the bundled model, in a server of its own.

    Args:
        server_args: Flags of `jmoe serve`, after --.
        segment_s: Seconds of arrivals in each half of a pair.
        pairs: Number of pairs that have to count.
        strategy: Brownout strategy: partial or full.
        controllers: Play each controller, not only the server's own.
        simulated: Simulate it on this machine's step times, in 30 s.
        seed: Seed of arrival times and of the order of tasks.
        out: Folder for the results.
    """
    flags = locals()
    from asyncio import CancelledError

    from serving.bench.demo import DemoConfig, run_demo

    try:
        with _servers_of_its_own():
            run_demo(of_fields(DemoConfig, flags))
    except (KeyboardInterrupt, CancelledError):
        raise typer.Exit(130) from None
