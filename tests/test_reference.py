"""docs/reference/ says what the protos and the HTTP application say."""

import importlib.util
from pathlib import Path

import pytest
from fastapi import FastAPI
from pydantic import BaseModel, Field

from serving.proto.inference import inference_pb2
from serving.proto.jmoe.v1 import jmoe_pb2

ROOT = Path(__file__).parents[1]
COMMITTED = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def reference():
    """docs/make_reference.py, which is a script and in no package."""
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


@pytest.mark.parametrize(
    ("page", "proto"), [("jmoe.v1.md", jmoe_pb2), ("inference.md", inference_pb2)]
)
def test_every_method_and_field_of_the_stubs_is_on_a_page(page: str, proto) -> None:
    text = (COMMITTED / page).read_text(encoding="utf-8")
    for service in proto.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            assert f"| `{method.name}` | " in text
    for message in proto.DESCRIPTOR.message_types_by_name.values():
        _, _, section = text.partition(f"### `{message.name}`\n")
        section = section.partition("\n### ")[0]
        assert section
        for field in message.fields:
            assert f"| `{field.name}` | {field.number} | " in section


def test_comments_types_and_labels_are_told(reference, tmp_path) -> None:
    reference.make(tmp_path)
    text = (tmp_path / "inference.md").read_text(encoding="utf-8")
    assert "| `shape` | 3 | repeated int64 | |" in text
    assert "| `parameters` | 4 | map of string to `InferParameter` | none is known" in text
    assert "stream of `ModelInferRequest` | stream of `ModelStreamInferResponse` |" in text
    assert "\nOne parameter of a request, a response or a tensor.\n" in text
    assert "| `TYPE_BOOL` | 1 | |" in text
    own = (tmp_path / "jmoe.v1.md").read_text(encoding="utf-8")
    assert "| `top_k` | 3 | optional int32 | default 0: off |" in own
    assert "| `LATENCY_SENSITIVE` | 1 | |" in own


class Ask(BaseModel):
    """What is asked."""

    text: str = Field(description="a | b")
    count: int | None = 3
    names: list[str] = []


def test_routes_and_objects_of_an_application(reference) -> None:
    app = FastAPI()

    @app.post("/v1/ask/{kind}")
    def ask(kind: str, body: Ask) -> dict[str, int]:
        """Answers."""
        return {kind: len(body.text)}

    text = reference.http_page(app.openapi())
    assert "## `POST /v1/ask/{kind}`\n\nAnswers.\n" in text
    assert "| `kind` | path | string | |" in text
    assert "Takes `application/json`: `Ask`." in text
    assert "| 200 | `application/json`: object of integer | Successful Response |" in text
    assert "### `Ask`\n\nWhat is asked.\n" in text
    assert "| `text` | string | required | a \\| b |" in text
    assert "| `count` | integer or null | `3` | |" in text
    assert "| `names` | list of string | `[]` | |" in text
