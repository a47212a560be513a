"""docs/http.md: its table is that of the code, its examples run, its errors are those there are."""

import contextlib
import io
import json
import re
import shlex
import subprocess
from asyncio import to_thread
from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from openai_served import CHAT, serving_http

from serving import errors
from serving.config import EngineConfig
from serving.frontend.access import Access
from serving.frontend.openai.errors import _CODES, HttpError, told
from serving.frontend.openai.schemas import (
    ACCEPTED,
    FIXED,
    REFUSED,
    STATE,
    SUPPORTED,
    VALUE,
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
)
from serving.frontend.reports import SlowBody

PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text(encoding="utf-8")
MODELS = {"completions": CompletionRequest, "chat": ChatRequest, "responses": ResponsesRequest}


def fields(model):
    return {field.alias or name: field for name, field in model.model_fields.items()}


def cell(field):
    return "" if field is None else field.json_schema_extra[STATE]


def table():
    """Returns the table of all parameters, made from their declarations."""
    lines = ["| parameter | completions | chat | responses | |", "|---|---|---|---|---|"]
    columns = [
        {name: field for name, field in fields(model).items() if cell(field) != FIXED}
        for model in MODELS.values()
    ]
    for name in sorted(set().union(*columns)):
        found = [column.get(name) for column in columns]
        texts = list(dict.fromkeys(field.description for field in found if field is not None))
        lines.append(f"| `{name}` | {' | '.join(map(cell, found))} | {'; '.join(texts)} |")
    return "\n".join(lines)


def fixed():
    """Returns the list of parameters that may have one value alone, by that."""
    found = {}
    for model in MODELS.values():
        for name, field in fields(model).items():
            if cell(field) == FIXED:
                value = json.dumps(field.json_schema_extra[VALUE])
                found.setdefault(value, set()).add(f"`{name}`")
    return "; ".join(f"{value}: {', '.join(sorted(found[value]))}" for value in sorted(found))


def test_the_table_is_that_of_the_code():
    assert table() in PAGE
    assert fixed() in PAGE


def test_every_parameter_has_a_state_and_says_why():
    for model in MODELS.values():
        for name, field in fields(model).items():
            assert cell(field) in (SUPPORTED, ACCEPTED, REFUSED, FIXED), name
            assert field.description, name
            is_null = cell(field) == REFUSED or field.json_schema_extra.get(VALUE, ...) is None
            assert is_null == (field.annotation is type(None)), name


@pytest.mark.parametrize(
    ("params", "model"),
    [
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
        (chat_create_params.CompletionCreateParamsBase, ChatRequest),
        (response_create_params.ResponseCreateParamsBase, ResponsesRequest),
    ],
    ids=MODELS,
)
def test_every_parameter_of_openais_client_is_there(params, model):
    assert set(params.__annotations__) | {"stream"} <= set(fields(model))


def test_every_error_is_in_the_table():
    kinds = [kind("x") for kind in (errors.InvalidRequest, errors.Unauthenticated, SlowBody)]
    kinds += [kind("x") for kind in (errors.PermissionDenied, errors.NotFound, errors.Unavailable)]
    kinds += [kind("x") for kind in (errors.DeadlineExceeded, errors.Aborted, errors.RequestFailed)]
    kinds += [errors.Overloaded("x", 1), errors.WorkerLost("x", 1)]
    kinds += [HttpError("x", status=status) for status in _CODES]
    for error in kinds:
        how = told(error)
        row = rf"\| [0-9, ]*{how.status}[0-9, ]* \| `{how.type}`, [^|]*`{how.code}`"
        assert re.search(row, PAGE), how


async def test_the_page_of_swagger_loads_nothing_of_others_and_needs_no_key(file):
    async with serving_http() as s:
        open_to_all = await s.http.get("/docs", headers={"sec-fetch-site": "cross-site"})
        assert (await s.http.get("/docs", headers={"host": "evil.example"})).status_code == 403
        s.server.access = Access(file.path)
        page = await s.http.get("/docs")
        assert page.text == open_to_all.text
        loaded = re.findall(r'(?:src|href|url)(?:=|: )["\']([^"\']+)', page.text)
        assert len(loaded) == 4
        for path in loaded:
            assert re.fullmatch(r"[a-z0-9/.-]+", path), "it is neither absolute nor of another host"
            found = await s.http.get(f"/{path}")
            assert found.status_code == 200
            if path != "openapi.json":
                assert found.headers["x-content-type-options"] == "nosniff"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self' 'sha256-" in policy
        assert "frame-ancestors 'none'" in policy
        assert (await s.http.get("/docs/nothing")).json()["error"]["code"] == "not_found"
        assert (await s.http.get("/docs/../openai/app.py")).status_code in (401, 404)


async def test_the_description_is_the_same_on_every_server_and_says_where_keys_go(file):
    async with serving_http() as s, serving_http(served_model_name="secret") as other:
        other.server.access = Access(file.path)
        told, same = [(await one.http.get("/openapi.json")).json() for one in (s, other)]
        assert told == same
        assert told["security"] == [{"key": []}, {}]
        assert told["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
        for path, methods in told["paths"].items():
            for method in methods.values():
                assert ("401" in method["responses"]) == (method.get("security") != []), path
            if "post" in methods:  # the example is taken as it stands
                body = methods["post"]["requestBody"]["content"]["application/json"]["example"]
                answer = await s.http.post(path, json=body | {"model": "counter"})
                assert answer.status_code == 200


def examples(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M)


def here(text, s):
    return text.replace("127.0.0.1:8000", s.address).replace('"bundled"', '"counter"')


@pytest.mark.parametrize("number", range(len(examples("sh"))))
async def test_curl_gets_an_answer(number):
    async with serving_http(engine=EngineConfig(max_model_len=128)) as s:
        command = shlex.split(here(examples("sh")[number], s).replace("\\\n", ""))
        done = await to_thread(
            subprocess.run, [*command, "-sS"], capture_output=True, text=True, timeout=60
        )
        (call,) = s.engine.calls
    assert done.returncode == 0, done.stderr
    if number == 0:
        assert call["sampling"].max_new_tokens == 16
        assert '"text":";<=>?@ABCDEFGHIJ"' in done.stdout
    else:
        assert done.stdout.startswith("data: ")
        assert done.stdout.endswith("data: [DONE]\n\n")


async def test_the_clients_example_runs():
    (example,) = examples("python")
    printed = io.StringIO()
    async with serving_http(engine=EngineConfig(max_model_len=128)) as s:

        def run():
            with contextlib.redirect_stdout(printed):
                exec(compile(here(example, s), "http.md", "exec"), {})

        await to_thread(run)
        chat, text = s.engine.calls
    assert list(chat["prompt"].messages) != CHAT
    assert chat["allow_brownout"] is False
    assert text["prompt"] == "Question: what is the capital of Ladrodro? Answer:"
    lines = printed.getvalue().splitlines()
    assert lines[0] == "^_`abcdefghijklm"
    assert lines[-1] == ";<=>?@ABCDEFGHIJ"
