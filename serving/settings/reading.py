"""Reads and checks server settings: a YAML preset, the environment, then overrides key by key."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from serving.config import (
    BrownoutConfig,
    CountOrAuto,
    EngineConfig,
    ServerConfig,
    described,
    keys,
)
from serving.errors import InvalidRequest, SettingsError
from serving.request import ModelBrownout
from serving.settings.composes import refused_settings

CONFIGS = Path(__file__).parents[2] / "configs"
"""Folder of presets, next to the packages both in a checkout and when installed."""

_TYPES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    CountOrAuto: "an integer, or auto",
    tuple[int, ...]: "a list of integers",
    tuple[str, ...]: "a list of strings",
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


def brownout_of_models(entries: Sequence[str]) -> dict[str, ModelBrownout]:
    """Returns what models have of their own, by name, of `engine.brownout.models`.

    Raises SettingsError.
    """
    kinds = {field.name: type(field.default) for field in fields(ModelBrownout)[1:]}
    given = defaultdict[str, dict[str, Any]](dict)
    for entry in entries:
        rest, _, value = entry.rpartition("=")
        name, _, key = (part.strip() for part in rest.rpartition(":"))
        try:
            number = kinds[key](value)
        except (KeyError, ValueError):
            raise SettingsError(
                f"engine.brownout.models has {entry!r}; it must be NAME:KEY=VALUE, a KEY of "
                f"{', '.join(kinds)} and a number"
            ) from None
        if key in given[name]:
            raise SettingsError(f"engine.brownout.models has {name}:{key} twice; leave one out")
        given[name][key] = number
    try:
        return {name: ModelBrownout(name, **own) for name, own in given.items()}
    except InvalidRequest as error:
        raise SettingsError(f"engine.brownout.models: {error}") from None


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
    for name in brownout_of_models(engine.brownout.models):
        require(
            name in names,
            "engine.brownout.models",
            f"of models that engine.models names, and {name!r} is none",
        )
    for origin in config.allowed_origins:
        require(
            origin == "*" or _ORIGIN.fullmatch(origin) is not None,
            "allowed_origins",
            f"* or scheme://host[:port] of each, in lower case, and one is {origin!r}",
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


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]-]+")
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


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, except that it quotes what the loader here reads as a number."""


# PyYAML reads YAML 1.1, which wants a point in a number with an exponent. YAML 1.2 does not.
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
for _of in (_Loader, _Dumper):
    _of.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def to_yaml(value: Any) -> str:
    """Returns YAML that `read_yaml` reads as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def load(
    source: str | Path | None = None,
    overrides: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerConfig:
    """Reads settings. Each of these three overrides the ones before it.

    Args:
        source: a YAML file, or the name of a preset in `configs/serving`; None takes the defaults.
        environment: variables, of which those named as `variable` says are settings.
        overrides: values by dotted key, such as `engine.brownout.way`. Text is read as the key's
            type; a list is text with commas.

    Raises SettingsError for unknown keys, a value of the wrong type, or one out of range.
    """
    config = ServerConfig() if source is None else _read(find("serving", source))
    for key, value in _of_environment(environment or {}).items():
        config = _put(config, key.split("."), _parse(key, value, variable(key)))
    for key, value in (overrides or {}).items():
        config = _put(config, key.split("."), _parse(key, value, "override"))
    check(config)
    return config


def settled(config: ServerConfig) -> ServerConfig:
    """Returns settings to serve by: with `engine.admission: auto`, whoever set a TTFT objective
    other than the default wants what cannot keep it refused.
    """
    engine = config.engine
    if engine.admission == "auto" and engine.brownout.ttft_slo_s != BrownoutConfig().ttft_slo_s:
        return _put(config, ["engine", "admission"], "objective")
    return config


def variable(key: str) -> str:
    """Returns the environment variable of a setting: JMOE_ENGINE__MODEL of `engine.model`.

    Those of no section are in section SERVER, so that none is JMOE_PORT, which Kubernetes sets in
    every pod beside a service named jmoe, or JMOE_TLS_CERT, which is a client's certificate.
    """
    return "JMOE_" + (key if "." in key else f"server.{key}").replace(".", "__").upper()


NO_SETTINGS = frozenset(
    f"JMOE_{name}"
    for name in (
        *("API_KEY", "CLUSTER_SECRET", "GPU_PLANT", "KILLS", "NATIVE", "PICTURES"),
        *("TLS_CA", "TLS_CERT", "TLS_KEY", "TRACES"),
    )
)
"""Variables that others read: clients, `pallas_kernels.native`, tests and benchmarks."""
_KUBERNETES = re.compile(r"JMOE_([A-Z0-9_]*_)?(SERVICE_(HOST|PORT)|PORT_\d+)(_.*)?")
"""Variables that Kubernetes sets in every pod beside a service whose name begins with jmoe; and
there is PORT, with a URL."""


def _of_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns values by key. Raises SettingsError for a variable that only looks like a setting."""
    known = {variable(key): key for key in keys()}
    # Without the section, or with one underscore behind it.
    flat = {f"JMOE_{key.rpartition('.')[2].upper()}": variable(key) for key in reversed(keys())}
    flat |= {name.replace("__", "_"): name for name in known}
    found, wrong = {}, []
    for name, value in environment.items():
        of_kubernetes = _KUBERNETES.fullmatch(name) or (name.endswith("_PORT") and "://" in value)
        if name in known:
            found[known[name]] = value
        elif name.upper().startswith("JMOE_") and name not in NO_SETTINGS and not of_kubernetes:
            near = flat.get(name) or next(iter(get_close_matches(name.upper(), known, 1, 0.85)), "")
            advice = f"did you mean {near}?" if near else "JMOE_SERVER__PORT is that of port"
            wrong.append(f"{name} is no setting; {advice}")
    if wrong:
        raise SettingsError(f"environment: {'; '.join(wrong)}")
    return found


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


def _read(path: Path) -> ServerConfig:
    # As JSON, since only there does strict validation take lists for tuples.
    given = read_yaml(path)
    try:
        text = json.dumps(given, default=str)
    except (TypeError, ValueError) as error:  # a date as a key, or an alias of what it is in
        raise SettingsError(f"{path} cannot be read as settings: {error}") from None
    try:
        return TypeAdapter(ServerConfig).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        wrong = dict.fromkeys(
            _explain(_setting(found["loc"]), found["input"]) for found in error.errors()
        )
        raise SettingsError(f"{path}: {'; '.join(wrong)}") from None


def _setting(place: Sequence[int | str]) -> str:
    """Returns the setting that a place in a file belongs to, or the place itself where there is
    none: a value of several types has a place for each.
    """
    steps = list(map(str, place))
    known = (".".join(steps[:count]) for count in range(len(steps), 0, -1))
    return next((key for key in known if key in keys()), ".".join(steps))


def _parse(key: str, value: object, where: str) -> object:
    hint = keys().get(key)
    if hint is None:
        raise SettingsError(f"{where}: {_explain(key, value)}")
    text, own = isinstance(value, str), value
    if isinstance(value, str) and hint in (tuple[int, ...], tuple[str, ...]):
        # In brackets or not; an address has some of its own, as in https://[::1].
        around = re.fullmatch(r"\[((?:[^][]|\[[^][]*\])*)\]", value.strip())
        parts = map(str.strip, (around[1] if around else value).split(","))
        own = [part for part in parts if part]
    try:
        # Text is read leniently: "8" is an integer, "off" is false.
        return TypeAdapter(hint).validate_python(own, strict=not text)
    except ValidationError:
        raise SettingsError(f"{where}: {_explain(key, value)}") from None


def _explain(key: str, value: object) -> str:
    """Says what is wrong with a key or its value, and what would be right."""
    known = keys()
    name = key.rpartition(".")[0] if key[-1:].isdigit() else key  # inside a list: an index
    if name in known:
        return f"{name} is {value!r}; it must be {_TYPES[known[name]]}"
    if any(name.startswith(f"{key}.") for name in known):
        return f"{key} is {value!r}; it must be a mapping of settings"
    section, _, leaf = key.rpartition(".")
    close = get_close_matches(leaf, {name.split(".")[-1] for name in known}, 1, 0.75)
    near = [name for name in known if name.split(".")[-1] in close]
    near = [name for name in near if name.rpartition(".")[0] == section] or near
    advice = f"did you mean {' or '.join(near)}?" if near else "docs/reference/settings.md has all"
    return f"unknown key {key}; {advice}"


def _put(node: Any, path: list[str], value: object) -> Any:
    name, *rest = path
    return replace(node, **{name: _put(getattr(node, name), rest, value) if rest else value})


def check(config: ServerConfig) -> None:
    """Raises SettingsError for a value out of range, or values that contradict each other."""

    def require(holds: bool, key: str, wanted: str) -> None:
        if not holds:
            raise SettingsError(f"{key} is {attrgetter(key)(config)!r}; it must be {wanted}")

    for key, setting in described().items():
        if setting.range is not None:
            require(setting.range.holds(attrgetter(key)(config)), key, setting.range.wanted)
    _check_asynchronous(config, require)
    check_composes(config.engine, len(config.engine.models))
    _check_together(config, require)
    _check_hosts(config, require)


def check_composes(engine: EngineConfig, num_models: int = 0) -> None:
    """Raises SettingsError for a setting that does not go with others (`composes.py`).

    `num_models` is 0 where it is not known.
    """
    for key, have, why in refused_settings(engine, num_models):
        raise SettingsError(f"{key} is {have!r}; it must be left out {why}")


def _check_asynchronous(config: ServerConfig, require: Any) -> None:
    """Checks the settings of mode aep's workers."""
    engine, own = config.engine, config.engine.asynchronous
    for name, other in (("attention", "experts"), ("experts", "attention")):
        require(
            getattr(own, name) > 0 or (not getattr(own, other) and engine.mode != "aep"),
            f"engine.asynchronous.{name}",
            "1 or more in engine.mode aep: workers with attention and workers with experts, each on"
            " a device of its own (--attention N --experts N)",
        )
    require(
        not own.experts or own.copies <= own.experts,
        "engine.asynchronous.copies",
        f"at most engine.asynchronous.experts, {own.experts}",
    )
    require(
        own.workers == "threads" or engine.mode == "aep",
        "engine.asynchronous.workers",
        f"threads unless engine.mode is aep, and that is {engine.mode!r}",
    )
    limit_s = engine.watchdog_s or inf
    require(
        own.workers == "threads" or 3 <= own.worker_timeout_s < limit_s,
        "engine.asynchronous.worker_timeout_s",
        f"3 or more, and less than engine.watchdog_s, {limit_s:g}",
    )
    require(
        not own.ray_address or own.workers == "ray",
        "engine.asynchronous.ray_address",
        f"empty unless engine.asynchronous.workers is ray, and that is {own.workers!r}",
    )
    if engine.mode == "steps":
        require(not own.attention, "engine.asynchronous.attention", "0 in engine.mode steps")


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
    ports = ("port", "metrics_port"), ("port", "admin_port"), ("metrics_port", "admin_port")
    for other, name in ports:
        taken = getattr(config, other)
        require(not taken or taken != getattr(config, name), name, f"other than {other}")
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
        require(bool(getattr(config, name)), name, "an address or a name")
    require(bool(engine.model), "engine.model", "a directory, OWNER/NAME of the Hub, or bundled")
    _check_models(config, require)
    require(
        not engine.mesh or bool(_MESH.fullmatch(engine.mesh)),
        "engine.mesh",
        "empty, or ep=N for experts spread over N devices",
    )
    is_spread = mesh_devices(engine.mesh) > 1
    for key, value, off in (
        ("engine.balance.replicas", engine.balance.replicas, (0, "auto")),
        ("engine.balance.spare_slots", engine.balance.spare_slots, (0, "auto")),
        ("engine.exchange", engine.exchange, ("auto",)),
    ):
        wanted = f"{' or '.join(map(str, off))} unless engine.mesh is ep=2 or more"
        require(is_spread or value in off, key, f"{wanted}, and it is {engine.mesh!r}")
    require(
        not engine.balance.load_file or bool(engine.balance.spare_slots and is_spread),
        "engine.balance.load_file",
        "empty unless engine.mesh is ep=2 or more, and engine.balance.spare_slots not 0",
    )
    devices = engine.asynchronous.attention or mesh_devices(engine.mesh)
    seqs_per_device = -(-engine.max_num_seqs // devices)
    for of, buckets, late, most in (
        ("decode", engine.decode_buckets, engine.late_decode_buckets, seqs_per_device),
        (
            "prefill",
            engine.prefill_buckets,
            engine.late_prefill_buckets,
            engine.max_prefill_tokens,
        ),
    ):
        name, late_name = f"engine.{of}_buckets", f"engine.late_{of}_buckets"
        require(not buckets or buckets[-1] >= most, name, f"empty, or reach {most}")
        require(
            not late or (devices == 1 and engine.mode != "aep"),
            late_name,
            "empty unless the model is on one device, without asynchronous workers",
        )
        largest = max(buckets, default=most)
        require(
            all(n < largest for n in late),
            late_name,
            f"sizes below {largest}, the largest, which every step can run",
        )
    require(
        engine.threshold_buckets_percent[-1:] in ((), (100,)),
        "engine.threshold_buckets_percent",
        "empty, or a list that ends with 100, which serves requests that refuse brownout",
    )
    require(
        not brownout.levels or brownout.strategy in ("auto", "partial"),
        "engine.brownout.levels",
        f"false unless engine.brownout.strategy is partial or auto, and that is "
        f"{brownout.strategy!r}",
    )
    require(
        not brownout.max_expected_loss or not engine.resident_experts,
        "engine.brownout.max_expected_loss",
        "0 with engine.resident_experts: what absent experts cost is not known",
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
