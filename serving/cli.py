"""The command line: `jmoe serve, generate, bench, demo, distill, evaluate, info`.

Commands import what they need when they run, so that `jmoe --help` is quick.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from serving.cli_distill import distill
from serving.cli_evaluate import evaluate
from serving.cli_info import info
from serving.cli_options import AllowUnknownConfig, overrides, progress_bar
from serving.cli_tools import bench, demo
from serving.errors import ServingError, Unavailable

log = logging.getLogger(__name__)

app = typer.Typer(
    name="jmoe",
    help="Serves Mixture-of-Experts models that keep their latency promise under bursts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(bench, name="bench")
app.command()(demo)
app.command()(distill)
app.command()(evaluate)
app.command()(info)

Strategy = Annotated[
    Literal["zero", "partial", "full"] | None, typer.Option(help="What happens to degraded visits.")
]
Way = Annotated[int | None, typer.Option(help="Experts a united expert stands for.")]


def main() -> None:
    """Runs a command. Bad input is one line on stderr and exit code 2."""
    try:
        app(prog_name="jmoe")
    except (ServingError, ValueError, OSError) as error:
        log.debug("where it came from", exc_info=True)
        print(f"jmoe: {error}", file=sys.stderr)
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        from serving.version import jmoe_version

        print(f"jmoe {jmoe_version()}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and end.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Sets up logging, to stderr."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("serving").setLevel(logging.DEBUG if verbose else logging.INFO)


_FLAGS = {
    "model": "engine.model",
    "dtype": "engine.dtype",
    "host": "host",
    "port": "port",
    "admin_host": "admin_host",
    "admin_port": "admin_port",
    "metrics_port": "metrics_port",
    "max_num_seqs": "engine.max_num_seqs",
    "max_model_len": "engine.max_model_len",
    "max_queue_len": "engine.max_queue_len",
    "max_prefill_tokens": "engine.max_prefill_tokens",
    "page_size": "engine.page_size",
    "allow_unknown_config": "engine.allow_unknown_config",
    "num_pages": "engine.num_pages",
    "policy": "engine.policy",
    "strategy": "engine.brownout.strategy",
    "way": "engine.brownout.way",
    "salc": "engine.brownout.salc",
    "prefill_threshold": "engine.brownout.prefill_threshold_percent",
    "decode_threshold": "engine.brownout.decode_threshold_percent",
    "ttft_slo_s": "engine.brownout.ttft_slo_s",
    "itl_slo_s": "engine.brownout.itl_slo_s",
}


@app.command()
def serve(
    config: Annotated[str, typer.Option(help="YAML file, or a preset's name.")] = "default",
    model: Annotated[str | None, typer.Option(help="Hugging Face directory, or bundled.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.")] = None,
    host: str | None = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one.")] = None,
    admin_host: Annotated[str | None, typer.Option(help="Of the admin service.")] = None,
    admin_port: Annotated[int | None, typer.Option(help="0 takes a free one.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Prometheus; 0 is off.")] = None,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
    max_queue_len: int | None = None,
    max_prefill_tokens: int | None = None,
    page_size: int | None = None,
    num_pages: int | None = None,
    policy: str | None = None,
    strategy: Strategy = None,
    way: Way = None,
    salc: bool | None = None,
    prefill_threshold: Annotated[int | None, typer.Option(help="Percent.")] = None,
    decode_threshold: Annotated[int | None, typer.Option(help="Percent.")] = None,
    ttft_slo_s: float | None = None,
    itl_slo_s: float | None = None,
    allow_unknown_config: AllowUnknownConfig = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any key, as engine.salc.window_s=4.")
    ] = None,
) -> None:
    """Serves a model over gRPC until SIGTERM or SIGINT, then drains."""
    given = locals()
    import asyncio

    import uvloop

    from serving import server, settings

    flags = {key: given[name] for name, key in _FLAGS.items() if given[name] != []}
    loaded = settings.load(config, overrides(flags, set_ or []))

    async def start_engine() -> Any:
        # In a thread, so that health is answered while jax is imported.
        engine_type, metrics = await asyncio.to_thread(_import_engine)
        if loaded.metrics_port:
            metrics.serve(loaded.host, loaded.metrics_port)
        with progress_bar() as progress:
            engine = await engine_type.start(loaded.engine, observer=metrics, progress=progress)
        metrics.engine = engine
        return engine

    try:
        delivered = uvloop.run(server.serve(loaded, start_engine))
    except Unavailable as error:
        print(f"jmoe: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # an ordinary exit would wait for a device that may hang
    if not delivered:
        log.warning("streams were cut off after %g s", loaded.drain_timeout_s)


def _import_engine() -> tuple[Any, Any]:
    from serving.engine import Engine
    from serving.metrics import Metrics

    return Engine, Metrics()


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...")],
    model: Annotated[str, typer.Option(help="Model directory, or bundled.")] = "bundled",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    tokens: Annotated[bool, typer.Option(help="Prompts are ids with commas.")] = False,
    max_new_tokens: int = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: int = 0,
    brownout_threshold: Annotated[
        int, typer.Option(help="Percent of expert visits kept exact; 100 degrades nothing.")
    ] = 100,
    strategy: Strategy = None,
    way: Way = None,
    allow_unknown_config: AllowUnknownConfig = None,
) -> None:
    """Continues prompts in this process, without a server."""
    import jmoe

    given: list[Any] = [_token_ids(prompt) for prompt in prompts] if tokens else prompts
    brownout = None
    if brownout_threshold != 100 or strategy is not None or way is not None:
        kind: Any = strategy or "partial"
        brownout = jmoe.Brownout(kind, brownout_threshold, way)
    with progress_bar() as progress:
        loaded = jmoe.load(
            Path(model) if model != "bundled" else model,
            dtype,
            progress=lambda done, total: progress("loading layers", done, total),
            allow_unknown_config=allow_unknown_config or (),
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


def _token_ids(prompt: str) -> list[int]:
    try:
        return [int(token) for token in prompt.split(",")]
    except ValueError:
        raise ValueError(f"{prompt!r} is not a list of token ids such as 1,2,3") from None


if __name__ == "__main__":
    main()
