"""Writes docs/reference/ (every message, route and setting) and the preset `default`.

`python docs/make_reference.py [DIRECTORY]`, with a directory the pages only. Comments of the
protos, docstrings of the routes and fields of `serving.config` are the text. Needs grpcio-tools
(the `dev` extra).
"""

import asyncio
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import descriptor_pb2 as d

from serving.config import ServerConfig, Setting
from serving.frontend.openai.app import make_app
from serving.frontend.server import Server

ROOT = Path(__file__).parents[1]
PAGES = {
    "jmoe.v1.md": "serving/proto/jmoe/v1/jmoe.proto",
    "inference.md": "serving/proto/inference/inference.proto",
}
"""Of the protos that callers use; workers of one server talk by another one."""
HTTP_PAGE = "http.md"
SETTINGS_PAGE = "settings.md"
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
        queue = [(m.name, m, (_MESSAGES, at)) for at, m in enumerate(self._file.message_type)]
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
                str(field.number),
                self._type(field),
                self._said.get((*path, _FIELDS, at), ""),
            )
            for at, field in enumerate(message.field)
        ]
        heading = self._heading("###", name, path)
        if not rows:
            return [*heading, "No fields.\n"]
        return [*heading, table(("field", "number", "type", "what it is"), *rows)]

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


# ---- HTTP -------------------------------------------------------------------------------------


def http_page(document: dict[str, Any]) -> str:
    """An OpenAPI document as Markdown."""
    parts = ["# HTTP\n", f"Of the application in `serving/frontend/openai`. {_MADE}"]
    for path, methods in document.get("paths", {}).items():
        for method, route in methods.items():
            parts += _route(f"{method.upper()} {path}", route)
    schemas = document.get("components", {}).get("schemas", {})
    if schemas:
        parts.append("## Objects\n")
    for name, schema in schemas.items():
        parts += _schema(name, schema)
    return "\n".join(parts)


def _route(name: str, route: dict[str, Any]) -> list[str]:
    parts = [f"## `{name}`\n"]
    if said := route.get("description") or route.get("summary"):
        parts.append(f"{said.strip()}\n")
    rows = [
        (f"`{one['name']}`", one["in"], _kind(one.get("schema", {})), one.get("description", ""))
        for one in route.get("parameters", ())
    ]
    if rows:
        parts.append(table(("parameter", "where", "type", "what it is"), *rows))
    if body := route.get("requestBody"):
        parts.append(f"Takes {_contents(body)}.\n")
    rows = [
        (code, _contents(answer), answer.get("description", ""))
        for code, answer in route.get("responses", {}).items()
    ]
    return [*parts, table(("status", "answer", "what it means"), *rows)] if rows else parts


def _contents(body: dict[str, Any]) -> str:
    found = [
        f"`{media}`" + (f": {kind}" if (kind := _kind(one.get("schema", {}))) else "")
        for media, one in body.get("content", {}).items()
    ]
    return ", ".join(found)


def _schema(name: str, schema: dict[str, Any]) -> list[str]:
    parts = [f"### `{name}`\n"]
    if said := schema.get("description"):
        parts.append(f"{said.strip()}\n")
    properties = schema.get("properties")
    if not properties:
        return [*parts, f"{_kind(schema) or 'Any value'}.\n"]
    required = set(schema.get("required", ()))
    rows = [
        (
            f"`{field}`",
            _kind(one),
            "required"
            if field in required
            else f"`{json.dumps(one['default'])}`"
            if "default" in one
            else "",
            one.get("description", ""),
        )
        for field, one in properties.items()
    ]
    return [*parts, table(("field", "type", "default", "what it is"), *rows)]


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in schema:
            return " or ".join(filter(None, map(_kind, schema[choice])))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {})) or 'any'}"
    if isinstance(inner := schema.get("additionalProperties"), dict) and inner:
        return f"object of {_kind(inner)}"
    return schema.get("type", "")


async def openapi() -> dict[str, Any]:
    """What the application of a server says of itself."""
    return make_app(Server(ServerConfig())).openapi()


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
            within = setting.range.wanted if setting.range else ""
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


_ENVIRONMENT = """\
What `engine.page_size` is comes from the first of these that names it: the flag `--page-size` or
`--set engine.page_size=32`; the variable `JMOE_ENGINE__PAGE_SIZE` of the environment (for settings
without a section, such as `port`, `JMOE_SERVER__PORT`); the YAML file or preset of `--config`; the
default. A list is its values with commas.
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


def make(out: Path) -> None:
    """Writes every page below `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for page, proto in PAGES.items():
        (out / page).write_text(ProtoPage(proto).text(), encoding="utf-8")
    (out / HTTP_PAGE).write_text(http_page(asyncio.run(openapi())), encoding="utf-8")
    (out / SETTINGS_PAGE).write_text(settings_page(), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        make(Path(sys.argv[1]))
    else:
        make(ROOT / "docs" / "reference")
        PRESET.write_text(preset(), encoding="utf-8")
