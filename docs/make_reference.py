"""Writes docs/reference/ (every message, setting, model and name of Python's API) and the preset
`default`.

`python docs/make_reference.py [DIRECTORY]`, with a directory the pages only. Comments of the
proto, fields of `serving.config` and entries of `jmoe.architectures` are the text; a server's own
`/docs` tells its routes. Needs grpcio-tools (the `dev` extra).
"""

import ast
import inspect
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from google.protobuf import descriptor_pb2 as d

import jmoe
import jmoe.plots
import training.distill
from jmoe.architectures import ARCHITECTURES, LACKING
from jmoe.attention import page_windows
from jmoe.config import ModelConfig, from_hf
from jmoe.display import count
from jmoe.router import fused
from pallas_kernels.routing import mosaic
from pallas_kernels.routing.values import Gating
from serving.cli.model_info import attention_on_hopper, kv_bytes_per_token, num_parameters
from serving.config import ServerConfig, Setting

ROOT = Path(__file__).parents[1]
PAGES = {"jmoe.v1.md": "serving/proto/jmoe/v1/jmoe.proto"}
"""Of jmoe's own proto that callers use; workers of one server talk by another one."""
SETTINGS_PAGE, MODELS_PAGE, API_PAGE = "settings.md", "models.md", "python.md"
PUBLISHED = ROOT / "tests" / "published_configs"
PRESET = ROOT / "configs" / "serving" / "default.yaml"

_MADE = "Made by `python docs/make_reference.py`; change the sources, not this page.\n"
_Path = tuple[int, ...]
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6  # fields of FileDescriptorProto
_FIELDS, _NESTED, _NESTED_ENUMS = 2, 3, 4  # of DescriptorProto
_VALUES = _METHODS = 2  # of EnumDescriptorProto and ServiceDescriptorProto


def table(*rows: Sequence[str]) -> str:
    """Markdown; the first row is the heading."""
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |".replace("  ", " ") for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:], ""])


# ---- protos -----------------------------------------------------------------------------------


def described(proto: str) -> d.FileDescriptorProto:
    """A proto with its comments. Raises RuntimeError where protoc refuses it."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        flags = ["--include_source_info", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", f"-I{ROOT}", *flags, proto]):
            raise RuntimeError("protoc failed; its message is above")
        (file,) = d.FileDescriptorSet.FromString(out.read_bytes()).file
    return file


class ProtoPage:
    """One proto as Markdown."""

    def __init__(self, proto: str) -> None:
        self._proto, self._file = proto, described(proto)
        self._said: dict[_Path, str] = {}
        for location in self._file.source_code_info.location:
            words = f"{location.leading_comments} {location.trailing_comments}".split()
            if words:
                self._said[tuple(location.path)] = " ".join(words)
        self._maps = {
            f"{name}.{entry.name}": entry
            for name, message, _ in self._messages()
            for entry in message.nested_type
            if entry.options.map_entry
        }

    def text(self) -> str:
        """The whole page."""
        parts = [f"# `{self._file.package}`\n", f"Of `{self._proto}`. {_MADE}"]
        for at, service in enumerate(self._file.service):
            parts += self._service(service, (_SERVICES, at))
        parts.append("## Messages\n")
        for name, message, path in self._messages():
            parts += self._message(name, message, path)
            for at, enum in enumerate(message.enum_type):
                parts += self._enum(f"{name}.{enum.name}", enum, (*path, _NESTED_ENUMS, at))
        for at, enum in enumerate(self._file.enum_type):
            parts += self._enum(enum.name, enum, (_ENUMS, at))
        return "\n".join(parts)

    def _messages(self) -> Iterator[tuple[str, d.DescriptorProto, _Path]]:
        """Those of the file and those inside them, but for entries of maps."""
        queue: list[tuple[str, d.DescriptorProto, _Path]] = [
            (m.name, m, (_MESSAGES, at)) for at, m in enumerate(self._file.message_type)
        ]
        while queue:
            name, message, path = queue.pop(0)
            yield name, message, path
            queue[:0] = [
                (f"{name}.{inner.name}", inner, (*path, _NESTED, at))
                for at, inner in enumerate(message.nested_type)
                if not inner.options.map_entry
            ]

    def _heading(self, level: str, name: str, path: _Path) -> list[str]:
        said = self._said.get(path)
        return [f"{level} `{name}`\n", *([f"{said}\n"] if said else [])]

    def _service(self, service: d.ServiceDescriptorProto, path: _Path) -> list[str]:
        def kind(name: str, streams: bool) -> str:
            return f"{'stream of ' if streams else ''}`{self._short(name)}`"

        rows = [
            (
                f"`{method.name}`",
                kind(method.input_type, method.client_streaming),
                kind(method.output_type, method.server_streaming),
                self._said.get((*path, _METHODS, at), ""),
            )
            for at, method in enumerate(service.method)
        ]
        name = f"{self._file.package}.{service.name}"
        heading = self._heading("##", name, path)
        return [*heading, table(("method", "takes", "answers", "what it does"), *rows)]

    def _message(self, name: str, message: d.DescriptorProto, path: _Path) -> list[str]:
        rows = [
            (
                f"`{field.name}`",
                self._type(field),
                self._said.get((*path, _FIELDS, at), ""),
            )
            for at, field in enumerate(message.field)
        ]
        heading = self._heading("###", name, path)
        if not rows:
            return [*heading, "No fields.\n"]
        return [*heading, table(("field", "type", "what it is"), *rows)]

    def _enum(self, name: str, enum: d.EnumDescriptorProto, path: _Path) -> list[str]:
        rows = [
            (f"`{value.name}`", str(value.number), self._said.get((*path, _VALUES, at), ""))
            for at, value in enumerate(enum.value)
        ]
        return [*self._heading("###", name, path), table(("value", "number", "what it is"), *rows)]

    def _type(self, field: d.FieldDescriptorProto) -> str:
        entry = self._maps.get(self._short(field.type_name))
        if entry is not None:
            key, value = (self._plain(inner) for inner in entry.field)
            return f"map of {key} to {value}"
        repeated = field.label == d.FieldDescriptorProto.LABEL_REPEATED
        words = ["repeated"] if repeated else ["optional"] if field.proto3_optional else []
        return " ".join([*words, self._plain(field)])

    def _plain(self, field: d.FieldDescriptorProto) -> str:
        if field.type_name:
            return f"`{self._short(field.type_name)}`"
        return d.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()

    def _short(self, name: str) -> str:
        return name.removeprefix(f".{self._file.package}.")


# ---- settings ---------------------------------------------------------------------------------


def settings_page() -> str:
    """Every setting as Markdown, a table for each section."""
    parts = ["# Settings\n", f"Of `serving/config.py`. {_MADE}", _ENVIRONMENT]
    for section, config in _sections("", ServerConfig()):
        parts.append(f"## {f'`{section}`' if section else 'Server'}\n\n{_doc(config)}\n")
        rows = []
        for name, value, setting in _settings(config):
            flag = setting.flag or name.replace("_", "-")
            named = f"`{section}.{name}`".replace("`.", "`")
            text = re.sub(r"([a-z-]+\.md)", r"[\1](../\1)", setting.help)
            wanted = setting.range.wanted if setting.range else ""
            within = _SYMBOLS.get(wanted, wanted.removeprefix("one of "))
            rows.append(
                (
                    named + (f", `--{flag}`" if setting.group else ""),
                    f"`{_yaml(value)}`",
                    within,
                    text,
                )
            )
        parts.append(table(("setting, flag", "default", "must be", "what it does"), *rows))
    return "\n".join(parts)


_SYMBOLS = {
    "above 0": "> 0",
    "0 or more": "≥ 0",
    "between 0 and 1": "0..1",
    "between 0 and 100": "0..100",
    "between 0 and 65535": "0..65535",
    "between 0 and 65535, or -1: off": "-1..65535",
    "above 0 and at most 1": "(0, 1]",
    "positive and ascending": "> 0, ascending",
}
"""Ranges of `serving.config`, as the page writes them."""

_ENVIRONMENT = """\
[operating.md](../operating.md#settings) says where a setting is looked for. Those without a flag
take `--set KEY=VALUE`. A list is its values with commas; an empty text is none, if nothing else is
said.
"""


def preset() -> str:
    """The preset `default` as YAML: every setting at its default, explained."""
    lines = [
        "# Every setting at its default. Made by `python docs/make_reference.py`: edit the sources."
    ]
    for section, config in _sections("", ServerConfig()):
        indent = "  " * len(section.split(".")) if section else ""
        if section:
            lines += ["", f"{indent[2:]}{section.split('.')[-1]}:"]
        lines += [f"{indent}# {line}" for line in textwrap.wrap(_doc(config), 96 - len(indent))]
        for name, value, setting in _settings(config):
            lines += [f"{indent}# {line}" for line in textwrap.wrap(setting.help, 96 - len(indent))]
            lines.append(f"{indent}{name}: {_yaml(value)}")
    return "\n".join([*lines, ""])


def _sections(name: str, config: Any) -> Iterator[tuple[str, Any]]:
    """A settings dataclass and those in it, by dotted key."""
    yield name, config
    for field in fields(config):
        below = getattr(config, field.name)
        if is_dataclass(below):
            yield from _sections(f"{name}.{field.name}".lstrip("."), below)


def _settings(config: Any) -> Iterator[tuple[str, Any, Setting]]:
    """Name, default and description of a section's own settings."""
    for field in fields(config):
        if "setting" in field.metadata:
            yield field.name, getattr(config, field.name), field.metadata["setting"]


def _doc(config: Any) -> str:
    return " ".join((type(config).__doc__ or "").split())


def _yaml(value: Any) -> str:
    dumped = yaml.safe_dump(list(value) if isinstance(value, tuple) else value)
    return '""' if value == "" else dumped.splitlines()[0]


# ---- models -----------------------------------------------------------------------------------


def models_page() -> str:
    """Returns the page of every architecture, of published models, and of what is refused."""
    kinds = [
        (f"`{name}`", f"`{of.class_name}`", of.apart, ", ".join(of.rope_kinds), _formats(of))
        for name, of in ARCHITECTURES.items()
    ]
    released = (
        (path.stem, from_hf(json.loads(path.read_text(encoding="utf-8"))))
        for path in sorted(PUBLISHED.glob("*.json"))
    )
    kind = "`model_type`"
    heading = (kind, "class in transformers", "sets it apart", "rotary positions", "read from")
    sizes = ("model", kind, "parameters", "active", "positions", "KV bytes a token")
    forms = ("attention on Hopper", "routing on Hopper")
    return "\n".join(
        [
            "# Models\n",
            f"Of `jmoe/architectures.py` and `tests/published_configs`. {_MADE}",
            table(heading, *kinds),
            _RELEASED,
            table((*sizes, *forms), *(_released(name, cfg) for name, cfg in released)),
            _REFUSED,
            table((kind, "why not"), *((f"`{name}`", why) for name, why in LACKING.items())),
        ]
    )


def _formats(of: Any) -> str:
    return ", ".join(("floats", *of.quantized))


def _released(name: str, cfg: ModelConfig) -> tuple[str, ...]:
    total, active = num_parameters(cfg), num_parameters(cfg, cfg.experts_per_token)
    kv = f"{kv_bytes_per_token(cfg, 'bfloat16'):,}"
    for window in filter(None, reversed(page_windows(cfg))):
        kv += f", {kv_bytes_per_token(cfg, 'bfloat16', window):,} past {window:,}"
    forms = ("XLA", "a kernel")
    sizes = count(total), count(active), f"{cfg.max_position:,}", kv
    form = attention_on_hopper(cfg)
    return name, f"`{cfg.architecture}`", *sizes, form, forms[_has_routing_kernel(cfg)]


def _has_routing_kernel(cfg: ModelConfig) -> bool:
    """Returns whether a kernel routes a small step of a model without united experts."""
    m, taken = cfg.num_experts, []

    def ask() -> None:
        bias = {"router_bias": jnp.zeros(m)} if cfg.router is not None and cfg.router.bias else {}
        options, row = fused(cfg, bias), jnp.zeros(m, jnp.int32)
        if options is not None:
            own = options.pop("bias", None)
            arrays = jnp.zeros((64, m)), row, row
            taken.append(mosaic.supports(*arrays, Gating(**options), 16, own))

    jax.eval_shape(ask)
    return taken == [True]


_RELEASED = """\
## Published models

Parameters that one token visits are active; keys and values are in bfloat16. What has no kernel is
XLA's work. `jmoe info OWNER/NAME` says more of one.
"""
_REFUSED = """\
## Refused

By name, as every other `model_type` is; [new-architecture.md](../new-architecture.md) says how to
add one.
"""


# ---- Python ------------------------------------------------------------------------------------


def api_page() -> str:
    """The page of what a notebook imports: definitions without their bodies."""
    parts = ["# Python API\n", _MADE, _VERSIONS]
    for module in API:
        names = getattr(module, "__all__", None) or [
            name for name, found in vars(module).items() if _is_public(name, found, module)
        ]
        parts.append(f"## `{module.__name__}`\n")
        stubs = [_stub(getattr(module, name)) for name in names]
        parts += [f"```text\n{stub}\n```\n" for stub in stubs if stub]
    return "\n".join(parts)


API = (jmoe, jmoe.brownout, jmoe.plots, training.distill)
_VERSIONS = """\
What stands here stays as it is within a minor version (0.1.x), apart from arguments and fields that
are added with a default; what changes from 0.1 to 0.2 is said for one minor version before, by a
DeprecationWarning that names what to use. Other modules, and names that begin with an underscore,
may change at any time. Checkpoints, `united.safetensors` and `family.json` of older versions are
read.
"""


def _is_public(name: str, found: Any, module: ModuleType) -> bool:
    return not name.startswith("_") and getattr(found, "__module__", "") == module.__name__


def _stub(found: Any) -> str:
    """A function or class as its source defines it, without bodies and what is private."""
    if not (inspect.isclass(found) or inspect.isfunction(inspect.unwrap(found))):
        return ""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(found)))
    (node,) = ast.parse(source).body
    return ast.unparse(_without_bodies(node))


def _without_bodies(node: ast.stmt) -> ast.stmt:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        has_docstring = ast.get_docstring(node) is not None
        node.body = node.body[:1] if has_docstring else [ast.Expr(ast.Constant(...))]
        node.decorator_list = [one for one in node.decorator_list if _names_property(one)]
    elif isinstance(node, ast.ClassDef):
        node.decorator_list = []
        docstring = node.body[:1] if ast.get_docstring(node) is not None else []
        node.body = docstring + [_without_bodies(one) for one in node.body if _is_told(one)]
    return node


def _names_property(decorator: ast.expr) -> bool:
    return ast.unparse(decorator) in ("property", "cached_property", "classmethod", "staticmethod")


def _is_told(node: ast.stmt) -> bool:
    match node:
        case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return not name.startswith("_") or name == "__call__"
    return False


def make(out: Path) -> None:
    """Writes every page below `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for page, proto in PAGES.items():
        (out / page).write_text(ProtoPage(proto).text(), encoding="utf-8")
    (out / SETTINGS_PAGE).write_text(settings_page(), encoding="utf-8")
    (out / MODELS_PAGE).write_text(models_page(), encoding="utf-8")
    (out / API_PAGE).write_text(api_page(), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        make(Path(sys.argv[1]))
    else:
        make(ROOT / "docs" / "reference")
        PRESET.write_text(preset(), encoding="utf-8")
