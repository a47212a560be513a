"""`jmoe info`: what a model needs in memory, or what a running server says of itself."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving.cli.options import (
    AllowUnknownConfig,
    ApiKeyEnv,
    HubRevision,
    TlsCa,
    TlsCert,
    TlsKey,
    documented,
    family_flag,
    given_flags,
)

if TYPE_CHECKING:
    from jmoe.config import ModelConfig
    from serving.client.connection import Connection

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_WAYS = (2, 4, 8, 16)

Section = tuple[str, Sequence[tuple[str, str]]]
"""A heading ("" for none) and rows of a name and a value."""


@documented
def info(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument()] = None,
    hub_revision: HubRevision = "",
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
    api_key_env: ApiKeyEnv = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    allow_unknown_config: AllowUnknownConfig = None,
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
    given = given_flags(ctx)
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
        if as_json:
            print(_json(address, admin, trouble, messages))
            return
        print(_text(_in_words(address, admin, trouble, messages)))
        return
    from serving.cli.mesh_info import DEVICE_GB, parse_mesh

    device_gb = DEVICE_GB if device_gb is None else device_gb
    if family is not None:
        directories = family_flag(models or (), family)
        sections = _describe_family(
            directories, family, mesh, device_gb, allow_unknown_config or (), hub_revision
        )
    elif model_config is not None:
        cfg = load_model_config(model_config)
        sections = None if as_json else _describe(cfg, None, mesh, device_gb)
        directory = None
    else:
        from jmoe.api import BUNDLED, resolve
        from jmoe.checkpoint import config_of

        directory = resolve(model or "bundled", hub_revision, weights=False)
        cfg = config_of(directory, allow_unknown_config=allow_unknown_config or ())
        there = not model or model == BUNDLED or Path(model).exists()  # else nothing of its weights
        directory = directory if there else None
        sections = None if as_json else _describe(cfg, directory, mesh, device_gb)
    if sections is None:
        print(json.dumps(_facts(cfg, directory, device_gb), indent=2))
        return
    if mesh and in_flight is not None:
        from serving.cli.async_info import CONTEXT, asynchronous_section, parse_imbalance

        sections.append(
            asynchronous_section(
                cfg,
                parse_mesh(mesh),
                in_flight,
                device_gb=device_gb,
                context=CONTEXT if context is None else context,
                imbalance=parse_imbalance(imbalance or "1,1"),
                host_us=host_us,
                stage_times=stage_times,
                late=late or "",
            )
        )
    print(_text(sections))


def load_model_config(name: str | Path) -> "ModelConfig":
    """Reads a geometry from a YAML file with the keys of `config.json`, or a preset in
    `configs/models`.

    Raises SettingsError for a file that cannot be read, ConfigError for what it says.
    """
    from jmoe.config import from_hf
    from serving.settings.reading import find, read_yaml

    return from_hf(read_yaml(find("models", name)))


def num_parameters(cfg: "ModelConfig", experts_a_layer: int | None = None) -> int:
    """Returns the weights of a model with all its experts, or with so many a MoE layer (K: active
    ones).
    """
    from jmoe import layout

    experts = cfg.num_experts if experts_a_layer is None else experts_a_layer
    parts = [layout.top(cfg), *(layout.layer(cfg, *of) for of in enumerate(cfg.moe_layers))]
    others = sum(math.prod(one.shape) for part in parts for one in part.values())
    return others + cfg.num_moe_layers * experts * expert_parameters(cfg)


def expert_parameters(cfg: "ModelConfig") -> int:
    """Returns the weights of one expert, routed or united."""
    from jmoe import layout

    return layout.expert_parameters(cfg)


def kv_bytes_per_token(cfg: "ModelConfig", dtype: str, past: int = 0) -> int:
    """Returns the bytes of what layers keep of one position; of one behind `past` others, those of
    layers without a window that ends before. `fp8`: keys and values in eight bits, 0 where none are
    kept.
    """
    import jax.numpy as jnp

    from jmoe.attention import page_bytes, page_windows, with_kv_cache_dtype

    if dtype == "fp8":
        try:
            cfg, dtype = with_kv_cache_dtype(cfg, dtype), "bfloat16"
        except ValueError:
            return 0
    groups = zip(page_windows(cfg), page_bytes(cfg, 1, jnp.dtype(dtype)), strict=True)
    return sum(size for window, size in groups if not window or window > past)


def has_attention_kernel(cfg: "ModelConfig") -> bool:
    """Returns whether a kernel attends in all layers of decode steps that have keys and values on a
    Hopper GPU, in bfloat16 and pages of 64 tokens.
    """
    import jax
    import jax.numpy as jnp

    from jmoe.attention import Latent, Paged
    from jmoe.recurrent import Recurrent
    from pallas_kernels.paged_attention import mosaic

    def taken(kind: Any) -> bool:
        if not isinstance(kind, Paged):
            return False
        latents = isinstance(kind, Latent)
        heads, width = (1, kind.width) if latents else (cfg.num_kv_heads, cfg.head_dim)
        q = jax.ShapeDtypeStruct((1, cfg.num_heads, width), jnp.bfloat16)
        pages = jax.ShapeDtypeStruct((1, 1, heads, 64, width), jnp.bfloat16)
        return mosaic.supports(q, pages, None if latents else pages, kind.latent)

    return all(taken(kind) for kind in cfg.attention_kinds if not isinstance(kind, Recurrent))


def attention_on_hopper(cfg: "ModelConfig") -> str:
    """Returns what runs attention on a Hopper GPU, in words."""
    from jmoe.attention import is_recurrent

    form = "a kernel" if has_attention_kernel(cfg) else "XLA"
    return form + "; recurrent layers XLA" * is_recurrent(cfg)


def _describe(
    cfg: "ModelConfig", directory: Path | None, mesh: str | None, device_gb: float
) -> list[Section]:
    """Describes what a model needs, in one device or over a mesh, and which united experts its
    directory has.
    """
    from jmoe.checkpoint import is_native, native_stored
    from jmoe.display import count, size
    from serving.cli.mesh_info import device_section, parallel_section, parse_mesh

    total, active = num_parameters(cfg), num_parameters(cfg, cfg.experts_per_token)
    rows = [
        *_geometry(cfg),
        ("parameters", f"{count(total)}, {count(active)} active a token"),
        *_memory(cfg, total),
    ]
    for fmt, whole in quantized_bytes(cfg).items():
        rows.append((f"weights in bfloat16, experts in {fmt}", size(whole)))
    if directory is not None and is_native(directory):
        dtype, slots = native_stored(directory)
        room = f"room for {slots} united experts a layer"
        rows.append(("stored in jmoe's own format", f"{dtype}, not quantized, {room}"))
    there = {} if directory is None else united_bytes(directory)
    others = [way for way in _WAYS if way <= cfg.num_experts and way not in there]
    lacking = [
        (f"way {way}", f"{_a_layer(cfg, way)}, {size(_united_bytes_of(cfg, way))} in bfloat16")
        for way in others
    ]
    sections: list[Section] = [("", rows)]
    if directory is not None:
        sections.append(("United experts that are there", _on_disk(cfg, there)))
    further = "What each further way would take" if there else "What united experts would take"
    if lacking:
        sections.append((further, lacking))
    if mesh:
        sections.append(parallel_section(cfg, parse_mesh(mesh), device_gb, tuple(there)))
    else:
        sections.append(device_section(cfg, device_gb))
    return sections


def _facts(cfg: "ModelConfig", directory: Path | None, device_gb: float) -> dict[str, Any]:
    """Returns what `_describe` says of a model in one device, as numbers; names are those of
    ModelInfo where it has them.
    """
    from serving.cli.mesh_info import kv_tokens

    total, rest = num_parameters(cfg), "bfloat16, experts in "
    weights = {dtype: total * taken for dtype, taken in _BYTES.items()}
    weights |= {rest + fmt: whole for fmt, whole in quantized_bytes(cfg).items()}
    stored = {} if directory is None else united_bytes(directory)
    return {
        "architecture": cfg.architecture,
        "num_layers": cfg.num_layers,
        "num_moe_layers": cfg.num_moe_layers,
        "num_experts": cfg.num_experts,
        "experts_per_token": cfg.experts_per_token,
        "max_position": cfg.max_position,
        "num_parameters": total,
        "num_active_parameters": num_parameters(cfg, cfg.experts_per_token),
        "has_attention_kernel": has_attention_kernel(cfg),
        "weight_bytes": weights,
        "kv_bytes_per_token": {
            dtype: size for dtype in (*_BYTES, "fp8") if (size := kv_bytes_per_token(cfg, dtype))
        },
        "united_bytes_on_disk": {f"way{way}": size for way, size in stored.items()},
        "united_bytes": {
            f"way{way}": _united_bytes_of(cfg, way) for way in _WAYS if way <= cfg.num_experts
        },
        "device_gb": device_gb,
        "kv_tokens": {
            form: kv_tokens(cfg, device_gb, whole)
            for form, whole in weights.items()
            if form.startswith("bfloat16")
        },
    }


def _on_disk(cfg: "ModelConfig", stored: Mapping[int, int]) -> list[tuple[str, str]]:
    """Describes united experts by their way and bytes."""
    from jmoe.display import size

    rows = [
        (f"way {way}", f"{_a_layer(cfg, way)}, {size(taken)} on disk")
        for way, taken in stored.items()
    ]
    return rows or [("none", "")]


def _describe_family(
    directories: Mapping[str, str],
    path: Path,
    mesh: str | None,
    device_gb: float,
    allowed: Sequence[str],
    revision: str,
) -> list[Section]:
    """Describes what a family needs in one device, or in each of a mesh, and whose experts its
    models use.
    """
    from jmoe.display import size
    from jmoe.family import check_family, table_slots
    from jmoe.parallel.placement import of_tables
    from jmoe.sharing import read_sharing
    from serving.cli.mesh_info import family_section, parse_mesh

    found, cfgs, _ = check_family(directories, allowed, revision)
    cfg = next(iter(cfgs.values()))
    sharing = read_sharing(path, found, (cfg.num_moe_layers, cfg.num_experts))
    count, expert, others = len(found), expert_parameters(cfg), num_parameters(cfg, 0)
    lenders = {name: sharing.names[at] for name, at in zip(found, sharing.lenders, strict=True)}
    stored = [united_bytes(found[name]) for name in dict.fromkeys(lenders.values())]
    ways = [way for way in stored[0] if all(way in each for each in stored)]
    if sharing.united_ways:
        ways = [way for way in ways if way in sharing.united_ways]
    united = -(-cfg.num_experts // min(ways)) if ways else 0
    slots = sharing.num_slots + len(stored) * cfg.num_moe_layers * united
    differences = _difference_parameters(cfg, sharing.residual_rank) * int(sharing.differs.sum())
    own = count * cfg.num_moe_layers * cfg.num_experts
    rows = [
        ("models", ", ".join(found)),
        *_geometry(cfg),
        ("routed experts", f"{sharing.num_slots:,} slots for {own:,} of all models"),
        ("shared", f"{sharing.shared_percent:.1f} % of what could be"),
        (
            "slots of united experts",
            f"{slots - sharing.num_slots:,}, {united} a layer of each model that has its own",
        ),
        *((f"united experts of {n}", f"those of {at}") for n, at in lenders.items() if n != at),
        ("pool in bfloat16", size(2 * slots * expert)),
        (
            "other weights of each model",
            f"{size(2 * others)} in bfloat16; what two have alike once",
        ),
        *_memory(cfg, slots * expert + count * others + differences),
    ]
    if differences:
        words = f"{size(2 * differences)} of all models, rank {sharing.residual_rank}"
        rows.append(("differences from shared experts", words))
    taken = {way: sum(each[way] for each in stored) for way in ways}
    pool = sharing.num_slots, slots - sharing.num_slots
    spread = None
    if mesh:
        own = table_slots(sharing.slots()[0], sharing.lenders, united, sharing.num_slots)
        placement, _ = of_tables(own, cfg.num_experts, devices := parse_mesh(mesh))
        spread = devices, cfg.num_moe_layers * placement.room
        rows.append((f"slots on each device, --mesh {mesh}", f"{spread[1]:,}"))
    return [
        ("", rows),
        ("United experts that all models have", _on_disk(cfg, taken)),
        family_section(cfg, count, *pool, differences, device_gb, spread),
    ]


def _difference_parameters(cfg: "ModelConfig", rank: int) -> int:
    """Returns the weights of one expert's difference of a rank from another."""
    from jmoe import layout

    return rank * sum(map(sum, layout.expert_shapes(cfg).values()))


def _geometry(cfg: "ModelConfig") -> list[tuple[str, str]]:
    """Describes what models of a family have in common, but for their number of weights."""
    from jmoe.router import fused

    unfused = ": without the fused kernel" if fused(cfg, {}) is None else ""
    return [
        ("architecture", cfg.architecture),
        ("layers", f"{cfg.num_layers}, {cfg.num_moe_layers} of them MoE"),
        ("experts a layer", f"{cfg.num_experts}, {cfg.experts_per_token} a token"),
        ("router", "softmax" if cfg.router is None else f"{cfg.router}{unfused}"),
        ("attention on Hopper", attention_on_hopper(cfg)),
        ("positions", f"{cfg.max_position:,}"),
    ]


def _memory(cfg: "ModelConfig", parameters: int) -> list[tuple[str, str]]:
    """Describes the bytes of so many weights, and of a token's keys and values, by dtype."""
    import jax.numpy as jnp

    from jmoe.attention import page_windows, sequence_bytes
    from jmoe.display import size

    rows = []
    for dtype in ("bfloat16", "float32", "fp8"):
        if dtype in _BYTES:
            rows.append((f"weights in {dtype}", size(parameters * _BYTES[dtype])))
        elif not kv_bytes_per_token(cfg, dtype):
            continue
        kv = f"{kv_bytes_per_token(cfg, dtype):,} bytes a token"
        for window in filter(None, reversed(page_windows(cfg))):
            kv += f", {kv_bytes_per_token(cfg, dtype, window):,} past {window:,}"
        if kept := sequence_bytes(cfg, jnp.dtype("bfloat16" if dtype == "fp8" else dtype)):
            kv += f", {size(kept)} a sequence"
        rows.append((f"KV cache in {dtype}", kv))
    return rows


def _a_layer(cfg: "ModelConfig", way: int) -> str:
    return f"{-(-cfg.num_experts // way)} a layer"


def quantized_bytes(cfg: "ModelConfig") -> dict[str, int]:
    """Returns the bytes of a model with experts in each format that `--quantize` knows and that the
    model can have, and the rest in bfloat16.
    """
    import jax

    from jmoe.checkpoint import empty_pool

    count, found = cfg.num_moe_layers * cfg.num_experts, {}
    rest = (num_parameters(cfg) - count * expert_parameters(cfg)) * _BYTES["bfloat16"]
    for fmt in ("fp8", "int4", "mxfp4"):
        make = partial(empty_pool, cfg, 1, jax.numpy.dtype("bfloat16"), fmt)
        try:
            pool = jax.eval_shape(make)
        except ValueError:
            continue
        expert = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
        found[fmt] = count * expert + rest
    return found


def _united_bytes_of(cfg: "ModelConfig", way: int) -> int:
    """Returns the bytes of a way's united experts in bfloat16."""
    experts = cfg.num_moe_layers * -(-cfg.num_experts // way)
    return experts * expert_parameters(cfg) * _BYTES["bfloat16"]


def united_bytes(directory: Path) -> Mapping[int, int]:
    """Returns the bytes of the united experts in a directory by way, as its file's header says.

    Raises CheckpointError for a file that is not one of united experts.
    """
    from safetensors import SafetensorError, safe_open

    from jmoe.checkpoint import UNITED_FILE, CheckpointError
    from jmoe.model_files import regular

    path, ways = directory / UNITED_FILE, dict[int, int]()
    if not path.exists():
        return ways
    try:
        with safe_open(regular(path), framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                way = int(name.partition(".")[0].removeprefix("way"))
                tensor = file.get_slice(name)
                bits = int(tensor.get_dtype().lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
                ways[way] = ways.get(way, 0) + math.prod(tensor.get_shape()) * bits // 8
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable: {error}") from None
    return dict(sorted(ways.items()))


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
