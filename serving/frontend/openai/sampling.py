"""Converts fields of a request to the engine's sampling parameters."""

import json
import re
from collections.abc import Mapping
from typing import Any

from serving.errors import shown
from serving.frontend.access import DEFAULT_CLASS
from serving.frontend.openai.errors import HttpError
from serving.frontend.openai.schemas import (
    DEFAULT_MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    Generating,
    Sampled,
)
from serving.request import (
    MAX_TOP_PROMPT_LOGPROBS,
    Priority,
    SamplingParams,
    Structure,
    StructureKind,
    guided,
)

_ANY_OBJECT = '{"type":"object"}'
_KINDS = {
    "json": StructureKind.JSON_SCHEMA,
    "regex": StructureKind.REGEX,
    "grammar": StructureKind.GRAMMAR,
}
"""By what `guided_...` and `structured_outputs` call them."""
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def sampling(body: Sampled, index: int) -> SamplingParams:
    """Returns the parameters of a prompt's `index`-th choice, whose seed is `seed` + `index`.

    Raises InvalidRequest for a value out of range.
    """
    defaults: dict[str, Any] = {"max_new_tokens": None, "temperature": 1.0}
    given: dict[str, Any] = {
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "seed": None if body.seed is None else (body.seed + index) % 2**64,
        "logit_bias": _biases(body.logit_bias or {}),
        "structure": structure(body),
    }
    max_tokens = body.max_tokens
    if not isinstance(body, ChatRequest):
        defaults["default_new_tokens"] = DEFAULT_MAX_TOKENS
    elif body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
    if max_tokens is not None:
        given["max_new_tokens"] = max_tokens or 1  # one is drawn all the same: `scores_alone`
    for name in (
        *("temperature", "top_p", "min_p", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "ignore_eos", "skip_special_tokens"),
    ):
        if (value := getattr(body, name)) is not None:
            given[name] = value
    given["min_new_tokens"] = body.min_tokens or 0
    given["include_stop"] = bool(body.include_stop_str_in_output)
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)  # -1 means off, like 0
    return SamplingParams.of({**given, **_logprobs(body)}, defaults)


def priority(body: Generating) -> Priority:
    """Returns the service class of a request, which its key has filled in if it named none."""
    return Priority(body.priority or DEFAULT_CLASS)


def _logprobs(body: Sampled) -> dict[str, Any]:
    if isinstance(body, CompletionRequest):
        if body.logprobs is None:
            return {}
        if body.echo and body.logprobs > MAX_TOP_PROMPT_LOGPROBS:
            raise HttpError(
                f"logprobs is {body.logprobs} with echo; the prompt's positions have "
                f"{MAX_TOP_PROMPT_LOGPROBS} at most: send {MAX_TOP_PROMPT_LOGPROBS}, or leave echo "
                "out",
                "logprobs",
            )
        return {
            "logprobs": True,
            "top_logprobs": body.logprobs,
            "prompt_logprobs": bool(body.echo),
            "top_prompt_logprobs": body.logprobs if body.echo else 0,
        }
    assert isinstance(body, ChatRequest)
    if body.top_logprobs and not body.logprobs:
        raise HttpError("top_logprobs without logprobs; set logprobs to true, too", "top_logprobs")
    return {"logprobs": bool(body.logprobs), "top_logprobs": body.top_logprobs or 0}


def _biases(given: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    for token, bias in given.items():
        if not _TOKEN_ID.fullmatch(token):
            raise HttpError(
                f"logit_bias has the key {shown(token)}; keys must be token ids, such as '15'",
                "logit_bias",
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise HttpError(
                f"logit_bias of {token} is {shown(bias)}; it must be a number between -100 and 100",
                "logit_bias",
            )
    return tuple((int(token), bias) for token, bias in given.items())


def structure(body: Sampled) -> Structure | None:
    """Returns the structure that the whole answer must match, or None.

    Raises InvalidRequest if the body asks for several structures.
    """
    found = _structures(body)
    if len(found) > 1:
        raise HttpError(f"{' and '.join(found)} each say what the answer must match; send one")
    for name, one in found.items():
        if not one.text:
            raise HttpError(
                f"{name} is empty; leave it out, or say what the answer must match",
                name.partition(".")[0],
            )
        return one
    return None


def _structures(body: Sampled) -> dict[str, Structure]:
    """Returns all structures that a body asks for, by the name of the parameter."""
    found: dict[str, Structure] = {}
    if (wanted := body.response_format) is not None:
        if (wanted.type == "json_schema") != (wanted.json_schema is not None):
            raise HttpError(
                f"response_format has type {wanted.type} and "
                f"{'a' if wanted.json_schema else 'no'} json_schema; that belongs to, and is "
                "required by, type json_schema",
                "response_format",
            )
        if wanted.type == "json_object":
            found["response_format"] = Structure(_KINDS["json"], _ANY_OBJECT)
        elif wanted.json_schema is not None:
            schema = wanted.json_schema.schema_
            if wanted.json_schema.strict:
                schema = guided(schema, strict=True)
            schema = _json(schema, "response_format")
            found["response_format"] = Structure(_KINDS["json"], schema)
    plain = {kind: getattr(body, f"guided_{kind}") for kind in (*_KINDS, "choice")}
    outputs = body.structured_outputs
    nested = {} if outputs is None else {name.rstrip("_"): value for name, value in outputs}
    if outputs is not None and all(value is None for value in nested.values()):
        raise HttpError(
            "structured_outputs is empty; it must have one of json, regex, choice, grammar",
            "structured_outputs",
        )
    for prefix, given in (("guided_", plain), ("structured_outputs.", nested)):
        for kind, value in given.items():
            name = f"{prefix}{kind}"
            if kind == "choice" and value is not None:
                found[name] = Structure.one_of(value)
            elif value is not None:
                text = value if isinstance(value, str) else _json(value, name.partition(".")[0])
                found[name] = Structure(_KINDS[kind], text)
    return found


def _json(schema: Mapping[str, Any], name: str) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise HttpError(f"{name} has a number beyond 1.8e308; send a finite one", name) from None
