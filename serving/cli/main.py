"""The command line: `jmoe serve, keys, generate, bench, demo, distill, consolidate, evaluate`, ...

Commands import what they need when they run, so that `jmoe --help` is quick.
"""

import serving.settings.extras  # noqa: F401  (names the extra of a package that is missing)

# isort: split
import importlib
import logging
import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from serving.cli import options
from serving.cli.consolidate import consolidate
from serving.cli.distill import distill
from serving.cli.evaluate import evaluate
from serving.cli.info import info
from serving.cli.keys import keys
from serving.cli.tools import bench, demo
from serving.errors import ServingError, Unavailable
from serving.settings.plugins import own_strategy
from serving.telemetry import logs
from serving.telemetry.progress import progress_bar

log = logging.getLogger(__name__)

app = options.Commands(
    name="jmoe",
    help="Serves Mixture-of-Experts models that keep their latency promise under bursts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its columns cut names at 80 columns
)
app.add_typer(bench, name="bench")
app.add_typer(keys, name="keys")
for command in (consolidate, demo, distill, evaluate, info):
    app.command()(command)


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

        from serving.telemetry.version import commit, device, jmoe_version

        of_commit = f" (commit {known})" if (known := commit()) else ""
        print(f"jmoe {jmoe_version()}{of_commit}, jax {version('jax')}, device: {device()}")
        raise typer.Exit


@app.callback()
@options.documented
def common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every request.")] = False,
) -> None:
    """Sets up logging, to stderr.

    Args:
        version: Show the version and exit.
    """
    logs.configure(verbose=verbose)


_SETTINGS = (
    "docs/reference/settings.md has every setting. A setting is looked for in this order: flag or "
    "--set, environment (JMOE_ENGINE__MAX_NUM_SEQS is engine.max_num_seqs, JMOE_SERVER__PORT is "
    "port), --config, default."
)


@app.command(cls=options.ServeCommand, epilog=_SETTINGS)
@options.setting_flags
@options.documented
def serve(
    models: Annotated[list[str] | None, typer.Argument(metavar="[[NAME=]MODEL]...")] = None,
    config: Annotated[str, typer.Option(metavar="FILE")] = "default",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]MODEL", rich_help_panel="Model")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", rich_help_panel="Log")] = False,
    restart: Annotated[bool, typer.Option("--restart")] = False,
    **flags: Any,
) -> None:
    """Serves a model, or a family of them, over gRPC and HTTP.

    SIGTERM and SIGINT end it, once streams have ended (drain_timeout_s).

    Args:
        models: What --model takes, without the flag.
        config: YAML file with settings, or a preset: default or demo.
        set_: Set any key, such as engine.salc.window_s=4. May be repeated.
        model: Hugging Face directory, OWNER/NAME of the Hub, or bundled, the small model that comes
            with jmoe. NAME=MODEL, repeated, for each model of a family. [default: bundled]
        verbose: Log every request.
        restart: Start again when this process ended by a fault, such as the loss of another one of
            its mesh; not after SIGTERM, nor where a setting cannot be used.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to read again
    from serving.settings import reading as settings

    given = {key: flags[name] for name, key in options.flag_keys().items() if flags[name] != []}
    served = [*(models or []), *(model or [])]
    if flags["served_model_name"] and len(served) > 1 and not all("=" in one for one in served):
        raise ValueError(
            f"--served-model-name takes one name, and {len(served)} models are given: "
            f"{' '.join(served)}; leave out what is a further name, and keep one model"
        )
    given |= options.models_flag(served)
    own = options.overrides(given, set_ or [])
    loaded = settings.settled(settings.load(config, own, os.environ))
    verbose = verbose or logging.getLogger("serving").level == logging.DEBUG
    logs.configure(loaded.log_format, verbose=verbose)
    if restart:
        from serving.cli.restart import keep_running

        again = [word for word in sys.orig_argv[1:] if word != "--restart"]
        raise typer.Exit(keep_running([sys.executable, *again]))
    if loaded.log_format == "json":
        logs.wrap_stderr()
    follows = loaded.engine.process_index > 0
    if not follows:
        from serving.startup.prepare import check_start

        check_start(loaded.engine)  # before a port is opened
    try:
        (_follow if follows else _lead)(loaded)
    except Unavailable as error:
        logs.say(f"jmoe: {error}", logging.ERROR)
        os._exit(1)  # an ordinary exit would wait for a device that may hang


def _lead(config: Any) -> None:
    """Serves; in a mesh over several processes as the first of them."""
    import uvloop

    from serving.frontend import server
    from serving.frontend.metrics import Metrics
    from serving.frontend.tracing import make_tracer
    from serving.telemetry.capture import Capture
    from serving.telemetry.observer import Observer
    from serving.telemetry.timeline import Timeline

    metrics, tracer = Metrics(), make_tracer(config.otlp_endpoint)
    observers: list[Observer] = [metrics, tracer]
    with ExitStack() as at_end:
        if config.timeline:
            drawn, path = Timeline(), Path(config.timeline)
            drawn.write(path)  # a file that cannot be written is to be known now
            at_end.callback(drawn.write, path)
            observers.append(drawn)
        if config.capture:
            captured = Capture(Path(config.capture), config.capture_share, config.capture_max_mib)
            at_end.callback(captured.close)
            observers.append(captured)
        start_engine = partial(_start_engine, config, *observers)
        uvloop.run(server.serve(config, start_engine, metrics, tracer))


def _follow(config: Any) -> None:
    from serving.startup.follower import follow

    with progress_bar() as progress:
        follow(config.engine, progress)


async def _start_engine(config: Any, *observers: Any) -> Any:
    import asyncio

    began_at = time.monotonic()
    # In a thread, so that health is answered meanwhile.
    module = await asyncio.to_thread(importlib.import_module, "serving.engine")
    with progress_bar() as progress:
        engine = await module.Engine.start(config.engine, observer=observers, progress=progress)

    from serving.frontend.status import log_start

    names = [config.served_model_name] if config.served_model_name else engine.names
    log_start(engine, ", ".join(names), time.monotonic() - began_at)
    return engine


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...")],
    model: list[str] | None = None,
    family: Path | None = None,
    hub_revision: options.HubRevision = "",
    dtype: str = "bfloat16",
    quantize: options.Quantize = "auto",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    tokens: bool = False,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    brownout_threshold: int = 100,
    strategy: Annotated[str | None, typer.Option(metavar="zero|partial|full|module:Class")] = None,
    keep: Literal["visits", "weight"] = "visits",
    levels: bool = False,
    way: Annotated[int | None, typer.Option(metavar="K")] = None,
    allow_unknown_config: options.AllowUnknownConfig = None,
) -> None:
    """Continues prompts in this process, without a server.

    Args:
        prompts: Texts to continue. -: that of standard input.
        model: Model directory, OWNER/NAME of the Hub, or bundled. NAME=DIR, repeated, for each
            model of a family. [default: bundled]
        family: family.json of `jmoe consolidate`: each --model NAME=DIR answers.
        dtype: Data type: bfloat16, float16 or float32.
        tokens: Prompts are token ids, separated by commas.
        max_new_tokens: Most tokens to generate for each prompt.
        temperature: Sampling temperature. 0: greedy.
        top_k: Sample among this many most likely tokens. 0: all.
        top_p: Sample among the most likely tokens of this total probability. 1: all.
        seed: Seed of sampling.
        brownout_threshold: Percentage of expert visits kept exact, at least (with keep weight
            about), since whole experts stay. 100: no brownout.
        strategy: What happens to degraded expert visits: partial sends them to united experts, full
            drops them, zero degrades none; or your own module:Class (notebook.md). Default:
            partial.
        keep: Which experts stay exact, of as many: by visits or by gate weight.
        levels: The threshold is a level of the model's levels.json, by layer.
        way: Number of routed experts that a united expert stands in for. Default: the largest that
            the model has.
    """
    import jmoe

    _keep_programs("~/.cache/jmoe/generate")
    prompts = [sys.stdin.read().removesuffix("\n") if one == "-" else one for one in prompts]
    given: list[Any] = [_token_ids(prompt) for prompt in prompts] if tokens else prompts
    brownout = None
    if brownout_threshold != 100 or strategy is not None or way is not None:
        kind: Any = own_strategy(strategy or "") or strategy or "partial"
        brownout = jmoe.Brownout(kind, brownout_threshold, way, keep, levels)
    directories = options.family_flag(model or ["bundled"], family)
    with progress_bar() as progress:
        shared: dict[str, Any] = {
            "progress": partial(progress, "loading layers"),
            "allow_unknown_config": allow_unknown_config or (),
            "revision": hub_revision,
            "quantize": quantize,
        }
        if family is None:
            models = [jmoe.load(directories[""], dtype, **shared)]
        else:
            models = [*jmoe.load_family(directories, family, dtype, **shared)]
        models = [one.with_kv_cache_dtype(kv_cache_dtype) for one in models]
        results = [
            jmoe.generate(
                one,
                given,
                max_new_tokens,
                brownout,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                progress=partial(progress, "decoding"),
            )
            for one in models
        ]
    for one, result in zip(models, results, strict=True):
        if family is not None:
            print(f"{one.name}:")
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

    with suppress(RuntimeError):  # there is no home
        jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _token_ids(prompt: str) -> list[int]:
    try:
        return [int(token) for token in prompt.split(",")]
    except ValueError:
        raise ValueError(f"{prompt!r} is not a list of token ids such as 1,2,3") from None
