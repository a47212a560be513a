"""The command line: `jmoe serve, keys, generate, bench, demo, distill, consolidate, evaluate`, ...

Commands import what they need when they run, so that `jmoe --help` is quick.
"""

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from serving import logs
from serving.cli.consolidate import consolidate
from serving.cli.distill import distill
from serving.cli.evaluate import evaluate
from serving.cli.info import info
from serving.cli.keys import keys
from serving.cli.options import AllowUnknownConfig, HubRevision, models_flag, overrides
from serving.cli.tools import bench, demo
from serving.errors import ServingError, Unavailable
from serving.progress import progress_bar

log = logging.getLogger(__name__)

app = typer.Typer(
    name="jmoe",
    help="Serves Mixture-of-Experts models that keep their latency promise under bursts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.add_typer(keys, name="keys")
app.command()(consolidate)
app.command()(demo)
app.command()(distill)
app.command()(evaluate)
app.command()(info)

Strategy = Annotated[
    Literal["zero", "partial", "full"] | None,
    typer.Option(
        help="Degraded visits: zero degrades none, partial sends them to united experts, full drops"
        " them."
    ),
]
Way = Annotated[
    int | None, typer.Option(help="Routed experts that a united expert stands for.", metavar="K")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log each request, too.")]


def main() -> None:
    """Runs a command. Bad input is one line on stderr and exit code 2."""
    if not os.environ.get("JAX_PLATFORMS") and not has_nvidia_gpu():
        os.environ["JAX_PLATFORMS"] = "cpu"
    if not sys.stderr.isatty():  # the Hub's bars are for people, not for logs
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app(prog_name="jmoe")
    except (ServingError, ValueError, OSError) as error:
        log.debug("where it came from", exc_info=True)
        logs.say(f"jmoe: {error}", logging.ERROR)
        sys.exit(2)


def has_nvidia_gpu(root: Path = Path("/")) -> bool:
    """Returns whether this machine has an NVIDIA GPU, whether or not its driver works.

    Without one, jax must not look for CUDA: if CUDA's libraries are not all there, that prints a
    traceback. With one, what jax says of them matters.
    """
    devices = (root / "dev" / name for name in ("nvidia0", "nvidiactl", "dxg"))  # dxg: of WSL
    if any(map(Path.exists, devices)):
        return True
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        try:
            is_display = vendor.with_name("class").read_text().startswith("0x03")
            if is_display and vendor.read_text().strip() == "0x10de":
                return True
        except OSError:  # a device that went away
            continue
    return False


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from serving.version import commit, device, jmoe_version

        of_commit = f" (commit {known})" if (known := commit()) else ""
        print(f"jmoe {jmoe_version()}{of_commit}, jax {version('jax')}, device: {device()}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and end.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Sets up logging, to stderr."""
    logs.configure(verbose=verbose)


_FLAGS = {
    "family": "engine.family",
    "dtype": "engine.dtype",
    "mode": "engine.mode",
    "attention": "engine.asynchronous.attention",
    "experts": "engine.asynchronous.experts",
    "mesh": "engine.mesh",
    "coordinator": "engine.coordinator",
    "num_processes": "engine.num_processes",
    "process_index": "engine.process_index",
    "secret_file": "engine.secret_file",
    "host": "host",
    "port": "port",
    "http_port": "http_port",
    "admin_host": "admin_host",
    "admin_port": "admin_port",
    "admin_http_port": "admin_http_port",
    "metrics_port": "metrics_port",
    "keys_file": "keys_file",
    "tls_cert": "tls_cert",
    "tls_key": "tls_key",
    "tls_client_ca": "tls_client_ca",
    "served_model_name": "served_model_name",
    "log_format": "log_format",
    "timeline": "timeline",
    "status_interval_s": "status_interval_s",
    "max_num_seqs": "engine.max_num_seqs",
    "max_model_len": "engine.max_model_len",
    "max_queue_len": "engine.max_queue_len",
    "max_prefill_tokens": "engine.max_prefill_tokens",
    "page_size": "engine.page_size",
    "allow_unknown_config": "engine.allow_unknown_config",
    "num_pages": "engine.num_pages",
    "memory_fraction": "engine.memory_fraction",
    "hub_revision": "engine.hub_revision",
    "chat_template": "engine.chat_template",
    "policy": "engine.policy",
    "strategy": "engine.brownout.strategy",
    "way": "engine.brownout.way",
    "salc": "engine.brownout.salc",
    "controller": "engine.salc.controller",
    "prefill_threshold": "engine.brownout.prefill_threshold_percent",
    "decode_threshold": "engine.brownout.decode_threshold_percent",
    "ttft_slo_s": "engine.brownout.ttft_slo_s",
    "itl_slo_s": "engine.brownout.itl_slo_s",
}


@app.command()
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[[NAME=]MODEL]...", help="What --model takes, without the flag."),
    ] = None,
    config: Annotated[str, typer.Option(help="YAML file, or a preset's name.")] = "default",
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]DIR",
            help="Hugging Face directory, OWNER/NAME of the Hub, or bundled; NAME=DIR several "
            "times for a family.",
        ),
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="family.json of `jmoe consolidate`: what they share.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model, instead of its directory.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.")] = None,
    mode: Annotated[
        Literal["auto", "steps", "aep"] | None,
        typer.Option(help="aep: asynchronous, with attention and experts on their own devices."),
    ] = None,
    attention: Annotated[int | None, typer.Option(help="Of aep: devices for attention.")] = None,
    experts: Annotated[int | None, typer.Option(help="Of aep: devices for experts.")] = None,
    mesh: Annotated[
        str | None, typer.Option(help="ep=N spreads the experts over N devices.", metavar="ep=N")
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(help="Of a mesh over several processes: process 0's.", metavar="HOST:PORT"),
    ] = None,
    num_processes: Annotated[int | None, typer.Option(help="How many these are.")] = None,
    process_index: Annotated[
        int | None, typer.Option(help="Which of them this is: 0 serves, the others follow it.")
    ] = None,
    secret_file: Annotated[
        str | None, typer.Option(help="What a server's processes on several machines share.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on for callers.")] = None,
    port: Annotated[int | None, typer.Option(help="For callers; 0 takes a free one.")] = None,
    http_port: Annotated[
        int | None,
        typer.Option(help="OpenAI's API over HTTP; 0: 8000 or the next free one, -1: off."),
    ] = None,
    admin_host: Annotated[str | None, typer.Option(help="Address of the admin service.")] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="Of the admin service; 0 takes a free one.")
    ] = None,
    admin_http_port: Annotated[
        int | None, typer.Option(help="The live page; 0 takes a free one, -1 is off.")
    ] = None,
    keys_file: Annotated[
        str | None, typer.Option(help="API keys, as hashes; without it nobody needs one.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="PEM file of the server.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM file with its private key.")] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option(help="PEM file: clients need a certificate of one of these.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="HTTP: /metrics, /healthz, /readyz; 0 is off.")
    ] = None,
    log_format: Annotated[
        Literal["text", "json"] | None, typer.Option(help="json: an object a line.")
    ] = None,
    status_interval_s: Annotated[
        float | None, typer.Option(help="Seconds between status lines of the log; 0: none.")
    ] = None,
    timeline: Annotated[
        str | None,
        typer.Option(help="File for steps and requests over time, for Perfetto.", metavar="FILE"),
    ] = None,
    verbose: Verbose = False,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences decoded together.")] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a sequence, prompt and output, at most; 0: the model's, 2048 at most."
        ),
    ] = None,
    max_queue_len: Annotated[
        int | None, typer.Option(help="Requests that may wait; more are refused.")
    ] = None,
    max_prefill_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens of a prefill step, at most.")
    ] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens of a KV page.")] = None,
    num_pages: Annotated[
        int | None,
        typer.Option(help="KV pages; 0: by memory on a GPU, max-num-seqs full sequences on a CPU."),
    ] = None,
    memory_fraction: Annotated[
        float | None, typer.Option(help="Of a GPU's memory, that the server may take.")
    ] = None,
    hub_revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a model of the Hub.")
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="Jinja template in place of the model's own.", metavar="FILE"),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Who is served next: fcfs, edf, ls_first, qllm.")
    ] = None,
    strategy: Annotated[
        Literal["auto", "zero", "partial", "full"] | None,
        typer.Option(help="Brownout; auto: partial where the model has united experts."),
    ] = None,
    way: Way = None,
    salc: Annotated[
        bool | None, typer.Option(help="Whether a controller moves the thresholds.")
    ] = None,
    controller: Annotated[
        str | None, typer.Option(help="Which: algorithm2, predictive, or module:Class.")
    ] = None,
    prefill_threshold: Annotated[
        int | None, typer.Option(help="Percent of expert visits kept exact in prefill.")
    ] = None,
    decode_threshold: Annotated[
        int | None, typer.Option(help="Percent of expert visits kept exact in decode.")
    ] = None,
    ttft_slo_s: Annotated[
        float | None, typer.Option(help="Objective for the time to first token, P90.")
    ] = None,
    itl_slo_s: Annotated[
        float | None, typer.Option(help="Objective for the time between tokens, P90.")
    ] = None,
    allow_unknown_config: AllowUnknownConfig = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key, as engine.salc.window_s=4."),
    ] = None,
) -> None:
    """Serves a model, or a family of them, over gRPC until SIGTERM or SIGINT, then drains."""
    given = locals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to read again
    import uvloop

    from serving import settings
    from serving.frontend import server
    from serving.frontend.metrics import Metrics
    from serving.frontend.tracing import make_tracer
    from serving.observer import Observer
    from serving.timeline import Timeline

    flags = {key: given[name] for name, key in _FLAGS.items() if given[name] != []}
    flags |= models_flag([*(models or []), *(model or [])])
    loaded = settings.load(config, overrides(flags, set_ or []))
    verbose = verbose or logging.getLogger("serving").level == logging.DEBUG
    logs.configure(loaded.log_format, verbose=verbose)
    if loaded.log_format == "json":
        logs.wrap_stderr()
    if loaded.engine.process_index > 0:
        _follow(loaded)
        return
    from serving.start import check_start

    check_start(loaded.engine)  # before a port is opened
    metrics, path = Metrics(), Path(loaded.timeline)
    tracer = make_tracer(loaded.otlp_endpoint)
    observers: list[Observer] = [metrics, tracer]
    drawn = None
    if loaded.timeline:
        drawn = Timeline()
        drawn.write(path)  # a file that cannot be written is to be known now
        observers.append(drawn)

    async def start_engine() -> Any:
        return await _start_engine(loaded, *observers)

    try:
        try:
            uvloop.run(server.serve(loaded, start_engine, metrics, tracer))
        finally:
            if drawn is not None:
                drawn.write(path)
    except Unavailable as error:
        logs.say(f"jmoe: {error}", logging.ERROR)
        os._exit(1)  # an ordinary exit would wait for a device that may hang


def _follow(config: Any) -> None:
    from serving.follow import follow

    try:
        with progress_bar() as progress:
            follow(config.engine, progress)
    except Unavailable as error:
        logs.say(f"jmoe: {error}", logging.ERROR)
        os._exit(1)  # as above


async def _start_engine(config: Any, *observers: Any) -> Any:
    import asyncio

    def import_engine() -> Any:
        from serving.engine import Engine

        return Engine

    began_at = time.monotonic()
    engine_type = await asyncio.to_thread(import_engine)  # so that health is answered meanwhile
    with progress_bar() as progress:
        engine = await engine_type.start(config.engine, observer=observers, progress=progress)

    from serving.frontend.status import log_start

    names = [config.served_model_name] if config.served_model_name else engine.names
    log_start(engine, ", ".join(names), time.monotonic() - began_at)
    return engine


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Texts to continue.")],
    model: Annotated[
        str, typer.Option(help="Model directory, OWNER/NAME of the Hub, or bundled.")
    ] = "bundled",
    hub_revision: HubRevision = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    tokens: Annotated[bool, typer.Option(help="Prompts are ids with commas.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens a prompt gets, at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws, where temperature is above 0.")] = 0,
    brownout_threshold: Annotated[
        int, typer.Option(help="Percent of expert visits kept exact; 100 degrades nothing.")
    ] = 100,
    strategy: Strategy = None,
    way: Way = None,
    allow_unknown_config: AllowUnknownConfig = None,
) -> None:
    """Continues prompts in this process, without a server."""
    import jmoe

    _keep_programs("~/.cache/jmoe/generate")
    given: list[Any] = [_token_ids(prompt) for prompt in prompts] if tokens else prompts
    brownout = None
    if brownout_threshold != 100 or strategy is not None or way is not None:
        kind: Any = strategy or "partial"
        brownout = jmoe.Brownout(kind, brownout_threshold, way)
    with progress_bar() as progress:
        loaded = jmoe.load(
            model,
            dtype,
            progress=lambda done, total: progress("loading layers", done, total),
            allow_unknown_config=allow_unknown_config or (),
            revision=hub_revision,
        )
        result = jmoe.generate(
            loaded,
            given,
            max_new_tokens,
            brownout,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            progress=lambda done, total: progress("decoding", done, total),
        )
    for i, prompt in enumerate(prompts):
        share = result.degraded_visits[i] / max(result.expert_visits[i], 1)
        new = result.tokens[i]
        if tokens or result.texts is None:
            print(",".join([prompt, *map(str, new)]))
        else:
            print(prompt + result.texts[i])
        print(f"  {len(new)} new tokens, {share:.1%} of expert visits degraded")


def _keep_programs(folder: str) -> None:
    """Keeps compiled programs in XLA's own cache; a server has another, `execution.executables`."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _token_ids(prompt: str) -> list[int]:
    try:
        return [int(token) for token in prompt.split(",")]
    except ValueError:
        raise ValueError(f"{prompt!r} is not a list of token ids such as 1,2,3") from None
