"""The documents name what is in the code: settings, metrics, messages."""

import ast
import re
from pathlib import Path

import pytest

from serving.frontend.metrics import Metrics
from serving.settings import keys

ROOT = Path(__file__).parents[1]
OPERATING = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PACKAGES = ("jmoe", "pallas_kernels", "serving", "training")


def first_columns(text):
    """Cells of the first column of every table, without headings."""
    rows = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines()]
    return [cell for cell in rows if cell.startswith("`")]


def part(node):
    return str(node.value) if isinstance(node, ast.Constant) else "…"


def messages():
    """Every string that the code can write, with `…` for what varies."""
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
    assert any(re.search(pattern, found) for found in CODE), message


def test_messages_are_in_order():
    for section in TROUBLESHOOTING.split("\n## ")[1:]:
        cells = [cell.lstrip("`… ").lower() for cell in first_columns(section)]
        assert cells == sorted(cells)


def test_metrics_are_documented_and_exist():
    documented = set(re.findall(r"`(jmoe_[a-z0-9_]+)`", OPERATING))
    families = {family.name for family in Metrics().collect()}
    assert {name.removesuffix("_total") for name in documented} >= families


CODE = messages()
