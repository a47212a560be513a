"""The documents name what is in the code: settings, metrics, messages."""

import ast
import functools
import importlib.util
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command

from serving.cli.main import app
from serving.config import ServerConfig
from serving.frontend.metrics import Metrics
from serving.frontend.openai.app import FIRST_PORT
from serving.settings.reading import keys

ROOT = Path(__file__).parents[1]
OPERATING = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PACKAGES = ("jmoe", "pallas_kernels", "serving", "training")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def first_columns(text):
    """Returns the cells of the first column of every table, without headings."""
    rows = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines()]
    return [cell for cell in rows if cell.startswith("`")]


def part(node):
    return str(node.value) if isinstance(node, ast.Constant) else "…"


@functools.cache
def messages():
    """Returns every string that the code can write, with `…` for what varies."""
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%[.\d]*[sdgf]", "…", node.value))
                elif isinstance(node, ast.JoinedStr):
                    parts = [
                        str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values
                    ]
                    found.append("".join(parts))
    return found


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_settings_that_pages_name_exist(page):
    names = re.findall(r"`(engine\.(?!py)[a-z_.]+)(?:=[^`]*)?`", page.read_text(encoding="utf-8"))
    known = keys()
    for name in names:
        assert name in known or any(key.startswith(f"{name}.") for key in known), name


@pytest.mark.parametrize("message", first_columns(TROUBLESHOOTING))
def test_messages_are_those_of_the_code(message):
    text = message.strip("`").replace("…", "\0")
    pattern = ".+".join(map(re.escape, text.split("\0")))
    assert any(re.search(pattern, found) for found in messages()), message


def test_messages_are_in_order():
    for section in TROUBLESHOOTING.split("\n## ")[1:]:
        cells = [cell.lstrip("`… ").lower() for cell in first_columns(section)]
        assert cells == sorted(cells)


def test_metrics_are_documented_and_exist():
    documented = set(re.findall(r"`(jmoe_[a-z0-9_]+)`", OPERATING))
    families = {family.name for family in Metrics().collect()}
    assert {name.removesuffix("_total") for name in documented} >= families


def test_the_table_of_events_is_that_of_the_code():
    logged = set[str]()
    for path in (ROOT / "serving").rglob("*.py"):
        logged |= set(re.findall(r'"event": "(\w+)"', path.read_text(encoding="utf-8")))
    table = OPERATING.split("| event | level | says |")[1].split("\n\n")[0]
    assert len(logged) > 15
    assert logged <= set(re.findall(r"`(\w+)`", "".join(first_columns(table))))


def test_the_table_of_ports_is_that_of_the_code():
    table = OPERATING.split("## Ports\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    default = ServerConfig()
    any_free = {0: f"{default.admin_host}, any free one"}
    expected = {
        "port": f"{default.host}:{default.port}",
        "http_port": {0: f"{default.host}:{FIRST_PORT}, or the next free one"}[default.http_port],
        "admin_port": any_free[default.admin_port],
        "admin_http_port": any_free[default.admin_http_port],
        "metrics_port": {0: "off"}[default.metrics_port],
    }
    assert {f.name for f in fields(ServerConfig) if f.name.split("_")[-1] == "port"} == {
        *expected,
        "admin_on_main_port",  # no port of its own
    }
    known = flags(get_command(app).commands["serve"])
    assert [row[0].strip("`") for row in rows[2:]] == list(expected)
    for name, _, where, given, _ in rows[2:]:
        name = name.strip("`")
        host = "--admin-host" if name.startswith("admin") else "--host"
        assert (where, given) == (expected[name], f"`{host}`, `--{name.replace('_', '-')}`")
        assert set(given.replace("`", "").split(", ")) <= known


def flags(command):
    return {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)} | {"--help"}


def command_lines(text):
    """Returns the lines of the page's blocks, continued ones joined, without comments."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from (line.split(" #")[0] for line in block.replace("\\\n", " ").splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_modules_and_flags_of_the_pages_exist(page):
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        there = page.parent / target if target else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert importlib.util.find_spec(module), module
    for line in command_lines(text):
        if not (found := re.search(r"(?:^|[\s/])jmoe ([a-z].*?)(?: [&|>] | -- |$)", line)):
            continue
        words, command = shlex.split(found[1].replace("'", "")), get_command(app)
        while words and words[0] in getattr(command, "commands", ()):
            command = command.commands[words.pop(0)]
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= flags(command), line
