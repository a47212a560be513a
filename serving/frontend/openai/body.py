"""Reads request bodies, with a size limit and a timeout, and validates them field by field."""

import asyncio
from typing import TYPE_CHECKING, Any

import jiter
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers

from serving.errors import ClientLeft, DeadlineExceeded, shown
from serving.frontend import convert
from serving.frontend.inbox import MAX_MESSAGE_BYTES
from serving.frontend.openai.errors import HttpError
from serving.frontend.openai.schemas import (
    MAX_ENTRIES,
    MAX_SEQUENCES,
    MAX_TOOLS,
    REFUSED,
    STATE,
    UNKNOWN_FIELD,
    WANTED,
)
from serving.frontend.origin import is_json
from serving.frontend.reports import SlowBody
from serving.request import (
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_STRUCTURE_CHARS,
    Bounds,
)

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

    from serving.frontend.guard import Guard

_BYTES_PER_CHAR = 12  # upper bound in JSON: a pair of escaped surrogates
_GRPC_BYTES_PER_CHAR = 4
_LARGE_BYTES = 64 << 10
_KINDS = {list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
_NAMES_BYTES = 256 << 10  # for field names, message roles and logit biases


def max_bytes(bounds: Bounds) -> int:
    """Returns an upper bound on the size of a body whose prompts together fit the longest
    prompt.
    """
    of_text = _BYTES_PER_CHAR // _GRPC_BYTES_PER_CHAR * convert.max_request_bytes(bounds)
    most = of_text + _BYTES_PER_CHAR * MAX_STRUCTURE_CHARS + _NAMES_BYTES
    return min(MAX_MESSAGE_BYTES, most)


async def read(
    scope: "Scope",
    receive: "Receive",
    guard: "Guard",
    most: int,
    advice: str = "send fewer or shorter prompts",
) -> bytes:
    """Reads the whole body. `advice` says how to have a smaller one.

    Raises HttpError if the body is not sent as JSON (415) or has more than `most` bytes (413;
    before reading it, if the client sent a content-length), SlowBody if it does not arrive in time,
    and Overloaded if too many bodies are being received.
    """
    headers = Headers(scope=scope)
    kind, length = headers.get("content-type", ""), headers.get("content-length", "")
    if not is_json(kind):
        raise HttpError(
            f"the header content-type is {shown(kind)}; it must be application/json",
            "content-type",
            415,
        )
    _check_length(int(length) if length.isdecimal() else 0, most, advice)
    client = scope.get("client") or ("", 0)
    parts: list[bytes] = []
    count = 0
    try:
        async with guard.inbox.receiving(f"{client[0]}:{client[1]}"):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft("the client left before its request was there")
                parts.append(message.get("body", b""))
                count += len(parts[-1])
                _check_length(count, most, advice)
                if not message.get("more_body"):
                    return b"".join(parts)
    except DeadlineExceeded:
        raise SlowBody(
            f"the body did not come within message_timeout_s, {guard.limits.message_timeout_s:g} s,"
            " or half a second of a busy server; send it with its headers"
        ) from None


def _check_length(count: int, most: int, advice: str) -> None:
    if count > most:
        raise HttpError(
            f"the body has {count} bytes or more; what this server can serve has {most} at most; "
            f"{advice}",
            status=413,
        )


async def parse[Parsed: BaseModel](model: type[Parsed], body: bytes, bounds: Bounds) -> Parsed:
    """Parses and validates a body; a large one in a thread, so that the event loop is not blocked.

    Raises HttpError, which names the field and what it must be.
    """
    if len(body) < _LARGE_BYTES:
        return _parsed(model, body, bounds)
    return await asyncio.to_thread(_parsed, model, body, bounds)


def _parsed[Parsed: BaseModel](model: type[Parsed], body: bytes, bounds: Bounds) -> Parsed:
    try:  # also refuses a key that is given twice, and anything nested 200 deep
        found = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        raise HttpError(
            f"the body cannot be read: {error}; send one JSON object, with each key once"
        ) from None
    if not isinstance(found, dict):
        kind = "null" if found is None else f"a JSON {_KINDS[type(found)]}"
        raise HttpError(f"the body is {kind}; send one JSON object")
    _check_counts(found, bounds)
    try:
        return model.model_validate(found)
    except ValidationError as error:
        raise explained(model, error) from None


_MOST = {
    "logit_bias": MAX_LOGIT_BIASES,
    "prompt": MAX_SEQUENCES,
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "tools": MAX_TOOLS,
}
"""Limits of fields that take less than any list."""


def _check_counts(found: dict[str, Any], bounds: Bounds) -> None:
    """Limits the number of fields and entries before validation, which takes time for each
    of them.
    """
    most = max(bounds.max_prompt_tokens, MAX_ENTRIES)
    if len(found) > MAX_ENTRIES:
        raise HttpError(
            f"the body has {len(found)} fields; {MAX_ENTRIES} at most are looked at, and "
            "docs/http.md lists what there is"
        )
    for name, value in found.items():
        if isinstance(value, list | dict) and len(value) > most:
            if name == "prompt" and isinstance(value, list) and isinstance(value[0], int):
                bounds.check_tokens(len(value))
            raise HttpError(
                f"{shown(name)} has {len(value)} entries; this server takes "
                f"{_MOST.get(name, most)} at most",
                name,
            )


def explained(model: type[BaseModel], error: ValidationError) -> HttpError:
    """Makes an HttpError of the first validation error, in one sentence."""
    first = _told(error)
    where = [part for part in map(str, first["loc"]) if part != "str" and "[" not in part]
    if first["type"] == UNKNOWN_FIELD:
        name = first.get("ctx", {})["name"]
        where.append(shown(name))
        return HttpError(f"{'.'.join(where)} {first['msg']}", where[0] if len(where) > 1 else name)
    param = where[0]
    field = next(f for name, f in model.model_fields.items() if param in (name, f.alias))
    told: Any = field.json_schema_extra
    if first["type"] == "missing":
        return HttpError(f"{'.'.join(where)} is missing; it is required", param)
    if told[STATE] == REFUSED:
        return HttpError(f"{param} is not supported: {field.description}", param)
    if WANTED in told:
        value = _innermost(error, param)
        if param == "prompt" and (count := _num_prompts(error)):
            return HttpError(
                f"prompt has {count} entries; one call takes {MAX_SEQUENCES} at most; send several "
                "calls",
                param,
            )
        return HttpError(f"{param} is {shown(value)}; it must be {told[WANTED]}", param)
    value = shown(first["input"])
    if first["type"] == "too_long":
        ctx = first.get("ctx", {})
        return HttpError(
            f"{'.'.join(where)} has {ctx['actual_length']} entries; it must have "
            f"{ctx['max_length']} at most",
            param,
        )
    return HttpError(f"{'.'.join(where)} is {value}; {_wanted(first)}", param)


def _told(error: ValidationError) -> Any:
    """Returns the first of the errors; of a field that is text or a list, the one of the list's
    entries, if there is one, since text it is not.
    """
    errors: list[Any] = error.errors(include_url=False)
    loc = errors[0]["loc"]
    field = loc[:-1]
    if loc[-1:] != ("str",):
        return errors[0]
    own = [one for one in errors if one["loc"][: len(field)] == field]
    return max(own, key=lambda one: len(one["loc"]) > len(field) + 1)


_IN_OUR_WORDS = {
    "too_short": "it must not be empty",
    "string_too_short": "it must not be empty",
    "model_type": "it must be an object",
    "dict_type": "it must be an object",
    "none_required": "it must be null: leave it out",
}
"""What an error of a type asks for, where pydantic says that in words of its own."""


def _wanted(error: Any) -> str:
    """Returns what an error asks for."""
    if error["type"] == "string_pattern_mismatch":
        return f"it must match {error['ctx']['pattern']}"
    if error["type"] == "string_type" and error["loc"][-1] == "str":
        return "it must be text, or a list of parts"
    wanted: str = error["msg"].replace("Input should be", "it must be")
    return _IN_OUR_WORDS.get(error["type"], wanted)


def _num_prompts(error: ValidationError) -> int:
    """Returns how many prompts there are, if that is what is wrong; else 0."""
    own = [one for one in error.errors(include_url=False) if one["type"] == "too_long"]
    found = own[0]["input"] if own and len(own[0]["loc"]) == 2 else ()
    return len(found) if found and isinstance(found[0], str | list) else 0


def _innermost(error: ValidationError, name: str) -> object:
    """Returns the invalid value of a field with several types: the innermost one of its errors."""
    own = [one for one in error.errors(include_url=False) if one["loc"][0] == name]
    return max(own, key=lambda one: len(one["loc"]))["input"]
