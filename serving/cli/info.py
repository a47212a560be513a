"""`jmoe info`: what a model needs in memory, or what a running server says of itself."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving.cli import options

if TYPE_CHECKING:
    from serving.client.connection import Connection

Section = tuple[str, Sequence[tuple[str, str]]]
"""A heading ("" for none) and rows of a name and a value."""


def info(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument()] = None,
    hub_revision: options.HubRevision = "",
    model_config: str | None = None,
    family: Path | None = None,
    models: Annotated[list[str] | None, typer.Option("--model", metavar="NAME=DIR")] = None,
    address: Annotated[str | None, typer.Option(metavar="HOST:PORT")] = None,
    admin_address: Annotated[str | None, typer.Option(metavar="HOST:PORT")] = None,
    mesh: Annotated[str | None, typer.Option(metavar="ep=N")] = None,
    device_gb: Annotated[float | None, typer.Option(metavar="GB")] = None,
    in_flight: Annotated[int | None, typer.Option(metavar="T")] = None,
    context: Annotated[float | None, typer.Option(metavar="TOKENS")] = None,
    imbalance: Annotated[str | None, typer.Option(metavar="BEFORE,AFTER")] = None,
    host_us: Annotated[float | None, typer.Option(metavar="US")] = None,
    stage_times: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    late: Annotated[str | None, typer.Option(metavar="FILE|FACTOR,SHARE")] = None,
    api_key_env: options.ApiKeyEnv = None,
    tls_ca: options.TlsCa = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    allow_unknown_config: options.AllowUnknownConfig = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Shows the memory of a model or family, or a server's state.

    Args:
        model: Model directory, OWNER/NAME of the Hub, or bundled.
        model_config: YAML file with a model's geometry, or a preset's name. Needs no weights.
        family: family.json of `jmoe consolidate`, with --model NAME=DIR for each model.
        models: With --family: one of its models.
        address: Running server: HOST:PORT or https://HOST:PORT.
        admin_address: Its admin service. Default: what the server says.
        mesh: Show, too, what experts spread over N devices would take.
        device_gb: Memory of each device, in 1e9 bytes. Default: an H200's 141.
        in_flight: With --mesh: say whether asynchronous workers would pay off with T sequences.
        context: For --in-flight: tokens of KV cache per sequence. Default: 256.
        imbalance: For --in-flight: the busiest device's visits over the mean, without and with
            copies of busy experts. Default: 1,1.
        host_us: For --in-flight: microseconds that a worker's host takes for a stage. Default: as
            built, 1300 for attention and 600 for experts.
        stage_times: For --in-flight: file with measured stage times. Default: a roofline.
        late: For --in-flight: a timeline of workers (`jmoe serve --mode aep --timeline FILE`),
            whose late stages are measured; or as 10,0.02: ten times as long, 2 %. Default: none is
            late.
        as_json: Print all that the server says, or the model's sizes in bytes, as JSON.
    """
    if (model, model_config, address, family).count(None) < 3:
        raise ValueError("give one of MODEL, --model-config, --family and --address")
    if models and family is None:
        raise ValueError(f"--model {models[0]} needs --family; of a single model, give MODEL")
    if as_json and (mesh or family):
        flag = "--mesh" if mesh else "--family"
        raise ValueError(
            f"--json is of a server or of one model in one device; leave {flag} out, or --json"
        )
    given = options.given_flags(ctx)
    for name in ("--mesh", "--device-gb"):
        if address is not None and name in given:
            raise ValueError(f"{name} needs a model: give MODEL or --model-config, not --address")
    if in_flight is not None and not mesh:
        raise ValueError("--in-flight needs --mesh ep=N")
    if in_flight is not None and family is not None:
        raise ValueError("--in-flight is of a single model: give MODEL, one of the family")
    for name in ("--context", "--imbalance", "--host-us", "--stage-times", "--late"):
        if in_flight is None and name in given:
            raise ValueError(f"{name} needs --mesh ep=N and --in-flight T")
    if address is not None:
        from serving.client.connection import Connection

        connection = Connection.of_environment(
            api_key_env, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key
        )
        admin, trouble, messages = _ask(address, admin_address, connection)
        said = address, admin, trouble, messages
        print(_json(*said) if as_json else _text(_in_words(*said)))
        return
    directories = {} if family is None else options.family_flag(models or (), family)
    from jmoe.api import BUNDLED, resolve
    from jmoe.checkpoint import config_of
    from serving.cli import model_info

    allowed = allow_unknown_config or ()
    device_gb = model_info.DEVICE_GB if device_gb is None else device_gb
    if family is not None:
        described = model_info.describe_family(
            directories, family, mesh, device_gb, allowed, hub_revision
        )
        print(_text(described))
        return
    directory = None
    if model_config is not None:
        cfg = model_info.load_model_config(model_config)
    else:
        there = resolve(model or BUNDLED, hub_revision, weights=False)
        cfg = config_of(there, allow_unknown_config=allowed)
        if not model or model == BUNDLED or Path(model).exists():  # else nothing of its weights
            directory = there
    if as_json:
        print(json.dumps(model_info.facts(cfg, directory, device_gb), indent=2))
        return
    sections = model_info.describe(cfg, directory, mesh, device_gb)
    if mesh and in_flight is not None:
        from serving.cli import async_info

        sections.append(
            async_info.asynchronous_section(
                cfg,
                model_info.parse_mesh(mesh),
                in_flight,
                device_gb=device_gb,
                context=async_info.CONTEXT if context is None else context,
                imbalance=async_info.parse_imbalance(imbalance or "1,1"),
                host_us=host_us,
                stage_times=stage_times,
                late=late or "",
            )
        )
    print(_text(sections))


def _ask(
    address: str, admin_address: str | None, connection: "Connection"
) -> tuple[str, str, list[Any]]:
    """Asks a running server for its messages of `jmoe.v1`.

    Returns the address of its admin service, empty if it has none; why that does not answer, empty
    if it does; and the messages. Raises ConnectionError if the server does not answer.
    """
    import asyncio

    import grpc

    from serving.client import Client, admin_address_of

    async def ask() -> tuple[str, str, list[Any]]:
        async with Client(address, admin_address, connection) as client:
            found: list[Any] = [await client.server_info()]
            port = found[0].admin_port
            admin = admin_address or (admin_address_of(address, found[0]) if port else "")
            if found[0].status != "ready":
                return admin, "", found
            names = found[0].models or [""]  # an older server names none
            found += [await client.model_info(name) for name in names]
            try:
                found += [await client.get_brownout(), await client.stats()]
            except grpc.aio.AioRpcError as error:  # it may listen for the server's own host only
                return client.admin_address or admin, error.details() or "no reason given", found
            return client.admin_address or admin, "", found

    try:
        return asyncio.run(ask())
    except grpc.aio.AioRpcError as error:
        said = f"{address} does not answer: {error.details()}"
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            said += "; --address takes HOST:PORT as in the server's line `jmoe ready on`"
        raise ConnectionError(said) from None


_KEYS = {"ServerInfo": "server", "BrownoutState": "brownout", "Stats": "stats"}


def _json(address: str, admin: str, trouble: str, messages: Sequence[Any]) -> str:
    """Writes all fields under the proto's names; null stands for NaN, infinity and no address."""
    said: dict[str, Any] = {"address": address, "admin_address": admin or None}
    said |= {"admin_error": trouble or None, "models": []}
    for message in messages:
        fields = _fields(message)
        if message.DESCRIPTOR.name == "ModelInfo":
            said["models"].append(fields)
        else:
            said[_KEYS[message.DESCRIPTOR.name]] = fields
    return json.dumps(said, indent=2)


def _fields(message: Any) -> dict[str, Any]:
    return {one.name: _plain(getattr(message, one.name)) for one in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    return [_fields(one) if hasattr(one, "DESCRIPTOR") else _plain(one) for one in value]


def _in_words(address: str, admin: str, trouble: str, messages: Sequence[Any]) -> list[Section]:
    if trouble:
        admin = f"{admin} does not answer: {trouble}"
    said = (_WORDS[message.DESCRIPTOR.name](message) for message in messages)
    return [("", [("address", address), ("admin service", admin or "none")]), *said]


def _server_in_words(info: Any) -> Section:
    backend, _, device = info.platform.partition(" ")
    rows = [
        ("status", info.status),
        ("version", f"{info.version} on {device or backend}" if backend else info.version),
        ("models", ", ".join(info.models or [info.model])),
        ("concurrent requests", f"{info.max_num_seqs:,}, and {info.max_queue_len:,} may wait"),
        ("context length", f"{info.max_model_len:,} tokens, prompt and output together"),
        ("KV cache", f"{info.num_kv_pages:,} pages of {info.kv_page_size:,} tokens"),
        ("policy", info.policy),
        ("compiled programs", f"{info.num_programs:,}"),
    ]
    if info.part_layers:
        sizes = sorted(info.part_layers, key=lambda size: (size.partition(" ")[0], len(size), size))
        layers = ", ".join(f"{size}: {info.part_layers[size]}" for size in sizes)
        rows.append(("layers per launch", f"{layers} (while best effort is there)"))
    for form in sorted(set(info.implementations.values())):
        ops = (op for op, taken in sorted(info.implementations.items()) if taken == form)
        rows.append((f"by {form}", ", ".join(ops)))
    if math.isfinite(info.best_effort_wait_s):
        rows.append(("best-effort token", f"within {info.best_effort_wait_s:.3g} s"))
    return "Server", rows


def _model_in_words(info: Any) -> Section:
    ways = ", ".join(map(str, info.united_ways))
    return f"Model {info.name}", [
        ("architecture", f"{info.architecture}, {info.num_layers} layers, width {info.d_model:,}"),
        ("experts", f"{info.num_experts} per layer, {info.experts_per_token} per token"),
        ("united experts", f"ways {ways}" if ways else "none"),
        ("parameters", f"{info.num_parameters:,} in {info.dtype}"),
        ("positions", f"{info.max_position:,}"),
        ("vocabulary", f"{info.vocab_size:,} tokens"),
    ]


def _brownout_in_words(state: Any) -> Section:
    def latency(p90_s: float, slo_s: float) -> str:
        seen = "no samples" if math.isnan(p90_s) else f"P90 {1e3 * p90_s:,.4g} ms"
        return f"{seen}, SLO {1e3 * slo_s:,.4g} ms"

    strategy = [state.strategy, *([f"way {state.way}"] if state.way else [])]
    strategy += [f"experts kept by {state.keep}"] if state.keep else []
    who = f"set by controller {state.controller}" if state.salc_enabled else "fixed"
    about = "about" if state.keep == "weight" else "at least"
    prefill, decode = state.prefill_threshold_percent, state.decode_threshold_percent
    rows = [
        ("strategy", ", ".join(strategy)),
        (f"visits kept exact, {about}", f"prefill {prefill:.1f} %, decode {decode:.1f} %, {who}"),
        ("time to first token", latency(state.ttft_p90_s, state.ttft_slo_s)),
        ("inter-token latency", latency(state.itl_p90_s, state.itl_slo_s)),
    ]
    if state.max_expected_loss:
        most = f"{state.max_expected_loss:.3g} nats a token"
        rows.append(
            ("most expected loss", f"{most}: {state.least_threshold_percent} % kept at least")
        )
    for own in state.models:
        slos = ("TTFT", own.ttft_slo_s), ("ITL", own.itl_slo_s)
        has = [f"SLO {name} {1e3 * slo_s:,.4g} ms" for name, slo_s in slos if slo_s]
        if (bounds := (own.floor_percent, own.ceiling_percent)) != (0, 100):
            has.append("{} to {} % of visits kept exact".format(*bounds))
        if has:
            rows.append((f"of {own.name}", ", ".join(has)))
    if state.objective_state:
        refuses = state.objective_state.startswith("overloaded")
        rows.append(("state" if refuses else "brownout in vain", state.objective_state))
    return "Brownout", rows


def _audits_in_words(audits: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yields what brownout cost each model of which answers were scored."""
    for audit in audits:
        if audit.num_scored:
            excess = f"{audit.excess_nats:.3g} nats a token"
            excess += f" ({audit.excess_low_nats:.3g} to {audit.excess_high_nats:.3g})"
            if not math.isnan(audit.disagreement):
                excess += f", {100 * audit.disagreement:.2g} % of greedy tokens are others"
            if not math.isnan(audit.expected_nats):
                excess += f", {audit.expected_nats:.3g} expected"
            exempt = "; exempt: more than the bound" if audit.is_exempt else ""
            what = f"{excess}, of {audit.num_scored:,} answers audited{exempt}"
            of = f"brownout of {audit.model}" if audit.model else "brownout cost"
            yield f"{of} for {audit.key}" if audit.key else of, what


def _stats_in_words(stats: Any) -> Section:
    degraded = 100 * stats.degraded_visits / max(stats.expert_visits, 1)
    ended = (
        f"{stats.requests_finished:,} finished, {stats.requests_aborted:,} aborted, "
        f"{stats.requests_rejected:,} refused, {stats.requests_failed:,} failed"
    )
    reused = f"{stats.reused_tokens:,} tokens reused, {stats.kv_pages_kept:,} pages kept"
    preempted = f"{stats.parks:,} steps parked, {stats.evictions:,} requests evicted"
    refused: dict[str, list[str]] = {}
    for one in stats.refused:
        said = f"{one.count:,} {one.priority.replace('_', '-')}"
        refused.setdefault(f"refused, {f'key {one.key}' if one.key else 'no key'}", []).append(said)
    expected = []
    if count := stats.priced_tokens:
        mean = f"{stats.expected_loss_nats / count:.3g} nats a token"
        expected = [("expected loss", f"{mean}, of {count:,} tokens")]
    rows = [
        ("uptime", _duration(stats.uptime_s)),
        ("requests now", f"{stats.num_running:,} running, {stats.num_waiting:,} waiting"),
        ("requests so far", ended),
        *((name, ", ".join(said)) for name, said in refused.items()),
        ("KV pages", f"{stats.kv_pages_used:,} of {stats.kv_pages_total:,} in use"),
        ("prefixes", reused),
        ("steps", f"{stats.steps_prefill:,} prefill, {stats.steps_decode:,} decode"),
        ("preemption", preempted),
        ("expert visits", f"{stats.expert_visits:,}, {degraded:.1f} % degraded"),
        *expected,
        *_audits_in_words(stats.audits),
        ("compiled since ready", f"{stats.compilations_since_ready:,} programs"),
    ]
    return "Load", rows


_WORDS: Mapping[str, Callable[[Any], Section]] = {
    "ServerInfo": _server_in_words,
    "ModelInfo": _model_in_words,
    "BrownoutState": _brownout_in_words,
    "Stats": _stats_in_words,
}


def _duration(duration_s: float) -> str:
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    return " ".join(f"{number} {unit}" for number, unit in parts if number) or "0 s"


def _text(sections: Sequence[Section]) -> str:
    """Returns one aligned table; lines are as long as they have to be, wherever they are
    printed.
    """
    width = max(len(name) for _, rows in sections for name, _ in rows)
    blocks = []
    for heading, rows in sections:
        lines = [f"{name:<{width}}  {value}".rstrip() for name, value in rows]
        blocks.append("\n".join([heading, *lines] if heading else lines))
    return "\n\n".join(blocks)
