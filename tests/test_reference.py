"""docs/reference/ says what the proto, the settings and the architectures say."""

import importlib.util
from pathlib import Path

import pytest

from serving.proto.jmoe.v1 import jmoe_pb2

ROOT = Path(__file__).parents[1]
COMMITTED = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def reference():
    """Loads docs/make_reference.py, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_those_of_the_sources(reference, tmp_path) -> None:
    reference.make(tmp_path)
    made = {page.name: page.read_text(encoding="utf-8") for page in tmp_path.iterdir()}
    committed = {page.name: page.read_text(encoding="utf-8") for page in COMMITTED.iterdir()}
    assert made == committed, "run python docs/make_reference.py"
    assert reference.PRESET.read_text(encoding="utf-8") == reference.preset()


def test_every_method_and_field_of_the_stubs_is_on_the_page() -> None:
    text, proto = (COMMITTED / "jmoe.v1.md").read_text(encoding="utf-8"), jmoe_pb2
    for service in proto.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            assert f"| `{method.name}` | " in text
    for message in proto.DESCRIPTOR.message_types_by_name.values():
        _, _, section = text.partition(f"### `{message.name}`\n")
        section = section.partition("\n### ")[0]
        assert section
        for field in message.fields:
            assert f"| `{field.name}` | " in section


@pytest.mark.deep
def test_comments_types_and_labels_are_told(reference, tmp_path) -> None:
    reference.make(tmp_path)
    own = (tmp_path / "jmoe.v1.md").read_text(encoding="utf-8")
    assert "| `top_k` | optional int32 | default 0: off |" in own
    assert "| `LATENCY_SENSITIVE` | 1 | |" in own


def test_models_are_told_by_what_their_cards_say() -> None:
    """By the cards of the models, and by hand: 46 layers x 2 x 8 heads x 128 elements x 2 bytes."""
    lines = (COMMITTED / "models.md").read_text(encoding="utf-8").splitlines()
    rows = {line.split(" | ")[0].strip("| `"): line.strip("| ").split(" | ") for line in lines}
    assert rows["GLM-4.5-Air"][1:6] == ["`glm4_moe`", "106.9 B", "13.4 B", "131,072", "188,416"]
    assert rows["gpt-oss-20b"][5] == "49,152, 24,576 past 128"
    assert {"glm4_moe", "olmoe", "granitemoe", "phimoe"} <= rows.keys()
    assert "recurrent layers" in rows["jamba"][1]
    published = {path.stem for path in (ROOT / "tests" / "published_configs").glob("*.json")}
    assert published <= rows.keys()
