"""Reads and checks server settings: a YAML preset, then overrides key by key."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from serving.composes import refused_settings
from serving.config import EngineConfig, ServerConfig
from serving.settings_asynchronous import check_asynchronous

CONFIGS = Path(__file__).parents[1] / "configs"
"""Folder of presets, next to the packages both in a checkout and when installed."""

_TYPES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    tuple[int, ...]: "a list of integers",
    tuple[str, ...]: "a list of strings",
}
_POSITIVE = (
    "max_connections",
    "message_timeout_s",
    "engine.join_timeout_s",
    "engine.peer_timeout_s",
    "engine.max_num_seqs",
    "engine.max_queue_len",
    "engine.max_logprobs_per_call",
    "engine.page_size",
    "engine.max_prefill_tokens",
    "engine.max_prefill_seqs",
    "engine.brownout.ttft_slo_s",
    "engine.brownout.itl_slo_s",
    "engine.salc.increment_percent",
    "engine.salc.interval_s",
    "engine.salc.window_s",
    "engine.salc.min_samples",
    "engine.balance.replicas_per_pair",
    "engine.balance.interval_s",
    "engine.balance.half_life_s",
    "engine.asynchronous.copies",
    "engine.asynchronous.min_batch",
    "engine.asynchronous.max_age_s",
)
_NOT_NEGATIVE = (
    "drain_timeout_s",
    "status_interval_s",
    "max_concurrent_calls",
    "request_timeout_s",
    "engine.queue_timeout_s",
    "engine.max_model_len",
    "engine.num_pages",
    "engine.cpu_threads",
    "engine.watchdog_s",
    "engine.plugin_slow_ms",
    "engine.part_layers",
    "engine.max_best_effort_queue_len",
    "engine.mixed_models",
    "engine.best_effort_max_wait_s",
    "engine.brownout.way",
    "engine.brownout.best_effort_ttft_slo_s",
    "engine.brownout.best_effort_itl_slo_s",
    "engine.balance.replicas",
    "engine.balance.replicas_min_tokens",
    "engine.balance.spare_slots",
    "engine.asynchronous.attention",
    "engine.asynchronous.experts",
    "engine.asynchronous.max_wait_s",
)
_PORTS = ("port", "metrics_port", "admin_port")
_OPTIONAL_PORTS = ("http_port", "admin_http_port")
_PERCENT = (
    "engine.brownout.prefill_threshold_percent",
    "engine.brownout.decode_threshold_percent",
    "engine.salc.floor_percent",
    "engine.salc.ceiling_percent",
)
_PARTS = (
    "engine.best_effort_share",
    "engine.balance.replicas_local_share",
    "engine.balance.min_gain",
)
_SHARES = ("engine.memory_fraction", "engine.salc.warning_factor", "engine.salc.shrink_ratio")
_ASCENDING = (
    "engine.decode_buckets",
    "engine.prefill_buckets",
    "engine.threshold_buckets_percent",
    "engine.brownout.ways",
)
_CHOICES = {
    "log_format": ("text", "json"),
    "engine.admission": ("queue", "objective"),
    "engine.mode": ("auto", "steps", "aep"),
    "engine.prefix_reuse": ("auto", "on", "off"),
    "engine.asynchronous.workers": ("threads", "processes", "ray"),
    "engine.dtype": ("bfloat16", "float16", "float32"),
    "engine.balance.predictor": ("auto", "router", "probe"),
    "engine.brownout.strategy": ("auto", "zero", "partial", "full"),
}


_MESH = re.compile(r"ep=([1-9][0-9]{0,5})")


def mesh_devices(mesh: str) -> int:
    """Returns the number of devices of a valid `engine.mesh`; 1 if it is empty."""
    found = _MESH.fullmatch(mesh)
    return int(found[1]) if found else 1


def named_models(models: Sequence[str]) -> dict[str, str]:
    """Returns the directories by model name of a valid `engine.models`."""
    return dict(_name_and_directory(model) for model in models)


def _name_and_directory(model: str) -> tuple[str, str]:
    name, _, directory = model.partition("=")
    return name.strip(), directory.strip()


def _check_models(config: ServerConfig, require: Any) -> None:
    """Checks the settings of a family of models."""
    engine = config.engine
    require(
        not engine.family or bool(engine.models),
        "engine.family",
        "empty unless engine.models names the models (--model NAME=DIR, for each)",
    )
    require(
        engine.resident_sets >= 0
        and (not engine.models or engine.resident_sets <= len(engine.models)),
        "engine.resident_sets",
        f"0 (all), or up to the number of models, {len(engine.models)}",
    )
    require(
        engine.resident_experts >= 0
        and (not engine.resident_experts or (bool(engine.models) and engine.spare_experts > 0)),
        "engine.resident_experts",
        "0 (all) unless engine.models names several models and engine.spare_experts is 1 or more: "
        "a sibling's expert stands in for one that is not there, and what refuses that needs slots "
        "to fetch its own into",
    )
    require(
        engine.spare_experts >= 0
        and (
            not engine.spare_experts
            or engine.resident_experts > 0
            or (bool(engine.models) and bool(engine.family))
        ),
        "engine.spare_experts",
        "0 unless engine.resident_experts leaves experts in host memory, or engine.family knows "
        "some by their difference from others",
    )
    models = [_name_and_directory(model) for model in engine.models]
    names = [name for name, _ in models]
    for model, (name, directory) in zip(engine.models, models, strict=True):
        require(
            bool(name and directory) and name.isprintable(),
            "engine.models",
            f"NAME=DIR of each model with a printable name, and one is {model!r}",
        )
        require(
            names.count(name) == 1,
            "engine.models",
            f"a name of its own for each model, and {name!r} is there twice",
        )
    require(
        config.served_model_name.isprintable(),
        "served_model_name",
        "printable: it stands in logs, metrics and answers",
    )
    require(
        bool(config.served_model_name) or Path(engine.model).name.isprintable(),
        "engine.model",
        "a directory with a printable name, or go with served_model_name (--served-model-name)",
    )
    require(
        not names or not config.served_model_name,
        "served_model_name",
        "empty where engine.models names several: each is called by its own name",
    )


_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]]+):([1-9][0-9]{0,4})")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, except that it refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """See yaml.SafeLoader. Raises ConstructorError for a duplicate key."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value} is there twice, in lines {lines[key.value]} and {line}"
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


class SettingsError(ValueError):
    """A setting that cannot be used. The message names the key, the value and valid ones."""


def load(
    source: str | Path | None = None, overrides: Mapping[str, object] | None = None
) -> ServerConfig:
    """Reads settings.

    Args:
        source: a YAML file, or the name of a preset in `configs/serving`; None takes the defaults.
        overrides: values by dotted key, such as `engine.brownout.way`. Text is read as the key's
            type; a list is text with commas.

    Raises SettingsError for an unknown key, a value of the wrong type, or one out of range.
    """
    config = ServerConfig() if source is None else _read(find("serving", source))
    for key, value in (overrides or {}).items():
        config = _put(config, key.split("."), _parse(key, value))
    check(config)
    return config


def find(kind: str, name: str | Path) -> Path:
    """Returns the path of a YAML file, or of the preset `name` in `configs/<kind>`.

    Raises SettingsError.
    """
    preset = CONFIGS / kind / f"{name}.yaml"
    for path in (Path(name), preset):
        if path.is_file():
            return path
    have = ", ".join(sorted(path.stem for path in preset.parent.glob("*.yaml")))
    raise SettingsError(f"{name} is neither a file nor one of the presets {have}")


def read_yaml(path: Path, *, quotes: bool = True) -> dict[Any, Any]:
    """Reads the mapping in a YAML file, which may be empty.

    Raises SettingsError, which quotes the wrong line unless `quotes` is False.
    """
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        if isinstance(error, yaml.MarkedYAMLError) and not quotes:
            for mark in filter(None, (error.problem_mark, error.context_mark)):
                mark.buffer = None
        reason = " ".join(str(error).split())  # PyYAML's message has several lines
        raise SettingsError(f"{path} cannot be read as YAML: {reason}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise SettingsError(f"{path} holds a {type(loaded).__name__}; it must hold a mapping")
    return loaded


@cache
def keys(kind: type = ServerConfig) -> dict[str, Any]:
    """Returns all dotted keys of a settings dataclass, with their types."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        below = keys(hint) if is_dataclass(hint) else None
        found |= {name: hint} if below is None else {f"{name}.{k}": t for k, t in below.items()}
    return found


def _read(path: Path) -> ServerConfig:
    # As JSON, since only there does strict validation take lists for tuples.
    text = json.dumps(read_yaml(path), default=str)
    try:
        return TypeAdapter(ServerConfig).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors()[0]
        raise _explain(".".join(map(str, first["loc"])), first["input"], str(path)) from None


def _parse(key: str, value: object) -> object:
    hint = keys().get(key)
    if hint is None:
        raise _explain(key, value, "override")
    text = isinstance(value, str)
    parts = [p for p in value.strip("[] ").split(",") if p] if isinstance(value, str) else value
    try:
        # Text is read leniently: "8" is an integer, "off" is false.
        return TypeAdapter(hint).validate_python(
            parts if hint in (tuple[int, ...], tuple[str, ...]) else value, strict=not text
        )
    except ValidationError:
        raise _explain(key, value, "override") from None


def _explain(key: str, value: object, where: str) -> SettingsError:
    known = keys()
    name = key.rpartition(".")[0] if key[-1:].isdigit() else key  # inside a list: an index
    if name in known:
        return SettingsError(f"{where}: {name} is {value!r}; it must be {_TYPES[known[name]]}")
    if any(name.startswith(f"{key}.") for name in known):
        return SettingsError(f"{where}: {key} is {value!r}; it must be a mapping of settings")
    leaves = {name.split(".")[-1]: name for name in known}
    near = get_close_matches(key, known, n=1)
    near = near or [leaves[m] for m in get_close_matches(key.split(".")[-1], leaves, n=1)]
    advice = f"did you mean {near[0]}?" if near else f"keys are {', '.join(known)}"
    return SettingsError(f"{where}: unknown key {key}; {advice}")


def _put(node: Any, path: list[str], value: object) -> Any:
    name, *rest = path
    return replace(node, **{name: _put(getattr(node, name), rest, value) if rest else value})


def check(config: ServerConfig) -> None:
    """Raises SettingsError for a value out of range, or values that contradict each other."""

    def require(holds: bool, key: str, wanted: str) -> None:
        if not holds:
            raise SettingsError(f"{key} is {attrgetter(key)(config)!r}; it must be {wanted}")

    # Conditions are written so that NaN and infinity fail.
    for names, holds, wanted in (
        (_POSITIVE, lambda v: 0 < v < inf, "above 0"),
        (_NOT_NEGATIVE, lambda v: 0 <= v < inf, "0 or more"),
        (_PORTS, lambda v: 0 <= v <= 65535, "between 0 and 65535"),
        (_OPTIONAL_PORTS, lambda v: -1 <= v <= 65535, "between 0 and 65535, or -1: off"),
        (_PERCENT, lambda v: 0 <= v <= 100, "between 0 and 100"),
        (_SHARES, lambda v: 0 < v <= 1, "above 0 and at most 1"),
        (_PARTS, lambda v: 0 <= v <= 1, "between 0 and 1"),
    ):
        for name in names:
            require(holds(attrgetter(name)(config)), name, wanted)
    for name, choices in _CHOICES.items():
        require(attrgetter(name)(config) in choices, name, f"one of {', '.join(choices)}")
    for name in _ASCENDING:
        values = attrgetter(name)(config)
        require(
            list(values) == sorted({v for v in values if v > 0}), name, "positive and ascending"
        )
    check_asynchronous(config, require)
    check_composes(config.engine, len(config.engine.models))
    _check_together(config, require)
    _check_hosts(config, require)


def check_composes(engine: EngineConfig, num_models: int = 0) -> None:
    """Raises SettingsError for a setting that does not go with others (`serving.composes`).

    `num_models` is 0 where it is not known.
    """
    for key, have, why in refused_settings(engine, num_models):
        raise SettingsError(f"{key} is {have!r}; it must be left out {why}")


def _check_hosts(config: ServerConfig, require: Any) -> None:
    """Checks that the settings of a mesh over several processes are complete and consistent."""
    engine = config.engine
    require(
        not engine.secret_file
        or bool(engine.coordinator)
        or engine.asynchronous.workers != "threads",
        "engine.secret_file",
        "empty for a server of one process: those of a mesh (engine.coordinator), and asynchronous "
        "workers that are processes, share a secret",
    )
    given = {
        "engine.coordinator": bool(engine.coordinator),
        "engine.num_processes": engine.num_processes != 0,
        "engine.process_index": engine.process_index != -1,
    }
    if not any(given.values()):
        return
    missing = [name for name, there in given.items() if not there]
    if missing:
        flags = ", ".join("--" + name.removeprefix("engine.").replace("_", "-") for name in missing)
        raise SettingsError(
            f"{' and '.join(n for n in given if n not in missing)} without {' and '.join(missing)}:"
            f" a mesh over several processes needs all three; give {flags}, too"
        )
    address = _ADDRESS.fullmatch(engine.coordinator)
    require(
        address is not None and int(address[2]) <= 65535,
        "engine.coordinator",
        "HOST:PORT of process 0, the same in every process, with a port that is free there",
    )
    count = engine.num_processes
    require(count >= 2, "engine.num_processes", "2 or more; one process needs none of this")
    require(0 <= engine.process_index < count, "engine.process_index", f"between 0 and {count - 1}")
    require(
        bool(engine.mesh) and mesh_devices(engine.mesh) % count == 0,
        "engine.mesh",
        f"ep=N with N a multiple of engine.num_processes, {count}: each has as many devices",
    )


def _check_together(config: ServerConfig, require: Any) -> None:
    engine, brownout, salc = config.engine, config.engine.brownout, config.engine.salc
    require(
        not config.port or config.port != config.metrics_port, "metrics_port", "other than port"
    )
    for other, name in (("port", "admin_port"), ("metrics_port", "admin_port")):
        taken = attrgetter(other)(config)
        require(not taken or taken != config.admin_port, name, f"other than {other}")
    endpoint = config.otlp_endpoint
    require(
        not endpoint or bool(re.fullmatch(r"https?://[^/\s]+\S*", endpoint)),
        "otlp_endpoint",
        "empty, or a URL that takes traces, such as http://127.0.0.1:4318/v1/traces",
    )
    for given, name in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        wanted = f"a file where {given} is one: encryption takes a certificate and its key"
        require(not getattr(config, given) or bool(getattr(config, name)), name, wanted)
    require(
        not config.tls_client_ca or bool(config.tls_cert),
        "tls_client_ca",
        "empty without tls_cert and tls_key: only an encrypted port asks for certificates",
    )
    for name in ("host", "admin_host"):
        require(bool(attrgetter(name)(config)), name, "an address or a name")
    require(
        config.max_bytes_in_flight >= 4 << 20, "max_bytes_in_flight", "4194304 or more: one message"
    )
    require(
        engine.reserved_ls_seqs >= -1,
        "engine.reserved_ls_seqs",
        "0 or more, or -1: by max_num_seqs",
    )
    require(bool(engine.model), "engine.model", "a directory, OWNER/NAME of the Hub, or bundled")
    _check_models(config, require)
    require(
        not engine.mesh or bool(_MESH.fullmatch(engine.mesh)),
        "engine.mesh",
        "empty, or ep=N for experts spread over N devices",
    )
    for name in ("replicas", "spare_slots"):
        require(
            not getattr(engine.balance, name) or mesh_devices(engine.mesh) > 1,
            f"engine.balance.{name}",
            f"0 unless engine.mesh is ep=2 or more, and it is {engine.mesh!r}",
        )
    require(
        not engine.balance.load_file or bool(engine.balance.spare_slots),
        "engine.balance.load_file",
        "empty unless engine.balance.spare_slots is 1 or more",
    )
    require(
        not engine.num_pages or engine.num_pages * engine.page_size >= engine.max_model_len,
        "engine.num_pages",
        f"0, or enough for one sequence of max_model_len {engine.max_model_len}",
    )
    devices = engine.asynchronous.attention or mesh_devices(engine.mesh)
    seqs_per_device = -(-engine.max_num_seqs // devices)
    for name, buckets, most in (
        ("engine.decode_buckets", engine.decode_buckets, seqs_per_device),
        ("engine.prefill_buckets", engine.prefill_buckets, engine.max_prefill_tokens),
    ):
        require(not buckets or buckets[-1] >= most, name, f"empty, or reach {most}")
    require(
        engine.threshold_buckets_percent[-1:] in ((), (100,)),
        "engine.threshold_buckets_percent",
        "empty, or a list that ends with 100, which serves requests that refuse brownout",
    )
    require(
        not brownout.ways or not brownout.way or brownout.way in brownout.ways,
        "engine.brownout.way",
        f"0 or one of ways {list(brownout.ways)}",
    )
    require(
        salc.floor_percent <= salc.ceiling_percent,
        "engine.salc.floor_percent",
        f"at most ceiling_percent {salc.ceiling_percent}",
    )
