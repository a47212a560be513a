"""`jmoe info`: what a model needs in memory, or what a running server says of itself."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving.cli_options import AllowUnknownConfig

if TYPE_CHECKING:
    from jmoe.config import ModelConfig

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_WAYS = (2, 4, 8, 16)


def info(
    model: Annotated[str | None, typer.Argument(help="Model directory, or bundled.")] = None,
    model_config: Annotated[
        str | None, typer.Option(help="YAML geometry, or a preset's name; no weights needed.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of a running server.", metavar="HOST:PORT")
    ] = None,
    admin_address: Annotated[
        str | None,
        typer.Option(help="Of its admin service; else what it says.", metavar="HOST:PORT"),
    ] = None,
    allow_unknown_config: AllowUnknownConfig = None,
) -> None:
    """Parameters and memory of a model, or the state of a running server."""
    if (model, model_config, address).count(None) < 2:
        raise ValueError("give one of MODEL, --model-config and --address")
    if address is not None:
        rows = _ask(address, admin_address)
    elif model_config is not None:
        rows = _describe(load_model_config(model_config))
    else:
        from jmoe.api import resolve
        from jmoe.config import read_config

        directory = resolve(model or "bundled")
        rows = _describe(read_config(directory, allow_unknown_config=allow_unknown_config or ()))
    _print(rows)


def load_model_config(name: str | Path) -> "ModelConfig":
    """Geometry from a YAML file with the keys of `config.json`, or a preset in `configs/models`.

    Raises SettingsError for a file that cannot be read, ConfigError for what it says.
    """
    from jmoe.config import from_hf
    from serving.settings import find, read_yaml

    return from_hf(read_yaml(find("models", name)))


def num_parameters(cfg: "ModelConfig", experts_a_layer: int | None = None) -> int:
    """Weights of a model with all its experts, or with so many a MoE layer (K: active ones)."""
    experts = cfg.num_experts if experts_a_layer is None else experts_a_layer
    d, heads = cfg.d_model, (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim
    attention = d * heads + cfg.num_heads * cfg.head_dim * d + 2 * d
    attention += heads * cfg.qkv_bias + d * cfg.o_bias + 2 * cfg.head_dim * cfg.qk_norm
    shared = 3 * d * cfg.d_ff_shared + d if cfg.d_ff_shared else 0
    moe = d * cfg.num_experts + experts * expert_parameters(cfg) + shared
    dense = 3 * d * cfg.d_ff_dense
    embeddings = cfg.vocab_size * d * (1 if cfg.tie_embeddings else 2)
    layers = cfg.num_layers * attention + cfg.num_moe_layers * moe
    return embeddings + layers + (cfg.num_layers - cfg.num_moe_layers) * dense + d


def expert_parameters(cfg: "ModelConfig") -> int:
    """Weights of one routed expert."""
    return 3 * cfg.d_model * cfg.d_ff_expert


def kv_bytes_per_token(cfg: "ModelConfig", dtype: str) -> int:
    """Bytes of keys and values of one position, over all layers."""
    return 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * _BYTES[dtype]


def _describe(cfg: "ModelConfig") -> Iterable[tuple[str, str]]:
    total, active = num_parameters(cfg), num_parameters(cfg, cfg.experts_per_token)
    yield "architecture", cfg.architecture
    yield "layers", f"{cfg.num_layers}, {cfg.num_moe_layers} of them MoE"
    yield "experts a layer", f"{cfg.num_experts}, {cfg.experts_per_token} a token"
    yield "positions", f"{cfg.max_position:,}"
    yield "parameters", f"{_count(total)}, {_count(active)} active a token"
    for dtype in ("bfloat16", "float32"):
        yield f"weights in {dtype}", _size(total * _BYTES[dtype])
        yield f"KV cache in {dtype}", f"{kv_bytes_per_token(cfg, dtype):,} bytes a token"
    for way in _WAYS:
        if way <= cfg.num_experts:
            united = -(-cfg.num_experts // way)
            size = cfg.num_moe_layers * united * expert_parameters(cfg) * _BYTES["bfloat16"]
            yield f"united experts, way {way}", f"{united} a layer, {_size(size)} in bfloat16"


def _count(number: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number:,}"


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:,} bytes"


def _ask(address: str, admin_address: str | None) -> list[tuple[str, str]]:
    import asyncio

    import grpc

    from serving.client import Client

    async def ask() -> tuple[list[Any], str]:
        async with Client(address, admin_address) as client:
            found: list[Any] = [await client.server_info()]
            if found[0].status != "ready":
                return found, ""
            found.append(await client.model_info())
            try:
                found += [await client.get_brownout(), await client.stats()]
            except grpc.aio.AioRpcError as error:  # it may listen for the server's own host only
                return found, f"{client.admin_address} does not answer: {error.details()}"
            return found, ""

    try:
        messages, admin_failure = asyncio.run(ask())
    except grpc.aio.AioRpcError as error:
        raise ConnectionError(f"{address} does not answer: {error.details()}") from None
    rows = [
        (f"{message.DESCRIPTOR.name}.{field.name}", _value(getattr(message, field.name)))
        for message in messages
        for field in message.DESCRIPTOR.fields
    ]
    return [*rows, ("Admin", admin_failure)] if admin_failure else rows


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if isinstance(value, str | int | bool) else ", ".join(map(str, value))


def _print(rows: Iterable[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)
