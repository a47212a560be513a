"""docs/http.md: its table is that of the code, its examples run, its errors are those there are."""

import contextlib
import io
import re
import shlex
import subprocess
from asyncio import to_thread
from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai_served import CHAT, serving_http

from serving import errors
from serving.config import EngineConfig
from serving.frontend.openai.errors import _CODES, HttpError, SlowBody, told
from serving.frontend.openai.fields import ACCEPTED, REFUSED, STATE, SUPPORTED
from serving.frontend.openai.schemas import ChatRequest, CompletionRequest

PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text(encoding="utf-8")
MODELS = {"completions": CompletionRequest, "chat": ChatRequest}


def fields(model):
    return {field.alias or name: field for name, field in model.model_fields.items()}


def cell(field):
    return "" if field is None else field.json_schema_extra[STATE]


def table():
    """The table of all parameters, by their declarations."""
    lines = ["| parameter | completions | chat | |", "|---|---|---|---|"]
    columns = [fields(model) for model in MODELS.values()]
    for name in sorted(columns[0] | columns[1]):
        found = [column.get(name) for column in columns]
        texts = list(dict.fromkeys(field.description for field in found if field is not None))
        lines.append(f"| `{name}` | {cell(found[0])} | {cell(found[1])} | {'; '.join(texts)} |")
    return "\n".join(lines)


def test_the_table_is_that_of_the_code():
    assert table() in PAGE


def test_every_parameter_has_a_state_and_says_why():
    for model in MODELS.values():
        for name, field in fields(model).items():
            assert cell(field) in (SUPPORTED, ACCEPTED, REFUSED), name
            assert field.description, name
            assert (cell(field) == REFUSED) == (field.annotation is type(None)), name


@pytest.mark.parametrize(
    ("params", "model"),
    [
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
        (chat_create_params.CompletionCreateParamsBase, ChatRequest),
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


def examples(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M)


def here(text, s):
    return text.replace("127.0.0.1:8000", s.address).replace('"bundled"', '"counter"')


@pytest.mark.parametrize("number", range(len(examples("sh"))))
async def test_curl_gets_an_answer(number):
    async with serving_http(engine=EngineConfig(max_model_len=40)) as s:
        command = shlex.split(here(examples("sh")[number], s).replace("\\\n", ""))
        done = await to_thread(
            subprocess.run, [*command, "-sS"], capture_output=True, text=True, timeout=60
        )
        (call,) = s.engine.calls
    assert done.returncode == 0, done.stderr
    if number == 0:
        assert call["sampling"].max_new_tokens == 8
        assert '"text":"9:;<=>?@"' in done.stdout
    else:
        assert done.stdout.startswith("data: ")
        assert done.stdout.endswith("data: [DONE]\n\n")


async def test_the_clients_example_runs():
    (example,) = examples("python")
    printed = io.StringIO()
    async with serving_http() as s:

        def run():
            with contextlib.redirect_stdout(printed):
                exec(compile(here(example, s), "http.md", "exec"), {})

        await to_thread(run)
        chat, text = s.engine.calls
    assert list(chat["prompt"].messages) != CHAT
    assert chat["allow_brownout"] is False
    assert text["prompt"] == "add 47 + 38"
    lines = printed.getvalue().splitlines()
    assert lines[0] == "^_`abcde"
    assert lines[-1] == "9:;<=>?@"
