"""Reads sampling parameters with vLLM's names and defaults.

Values come from JSON, or from clients that send every number as text. None stands for the default.
Unknown names are refused, never ignored.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import jiter

from serving.errors import InvalidRequest, shown
from serving.request import (
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    Structure,
    StructureKind,
    check_count,
)

DEFAULTS: dict[str, Any] = {"max_new_tokens": 16, "temperature": 1.0}
"""vLLM's defaults that differ from those of `SamplingParams`, whose names these are."""

_WHOLE = re.compile(r"[+-]?[0-9]+")
_REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def sampling(given: Mapping[str, Any]) -> SamplingParams:
    """Converts `given`. Raises InvalidRequest for a name or value that is not supported."""
    fields: dict[str, Any] = {}
    present = _present(given)
    if {"structured_outputs", "guided_decoding"} <= present.keys():
        raise InvalidRequest("structured_outputs and guided_decoding are one; send either")
    for name, value in present.items():
        if name in _FIXED:
            _check_fixed(name, value)
        elif name in _READERS:
            field, read = _READERS[name]
            fields[field] = read(name, value)
        else:
            raise _unknown(name)
    return SamplingParams.of({**fields, "logprobs": "top_logprobs" in fields}, DEFAULTS)


def read_json(text: str, what: str) -> dict[str, Any]:
    """Parses a JSON object. Raises InvalidRequest for anything else, for a key that is given twice,
    and for what is nested more than 200 deep.
    """
    try:
        found = jiter.from_json(text.encode(), allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        raise InvalidRequest(
            f"{what} is no JSON ({error}); send an object as text, with each key once"
        ) from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{what} is {shown(found)}; it must be a JSON object")
    return found


def _present(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _unknown(name: str) -> InvalidRequest:
    close = get_close_matches(name[:64], NAMES, 1)
    hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(_READERS))}"
    return InvalidRequest(f"the sampling parameter {shown(name)} is not served{hint}")


def _wrong(name: str, value: object, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {shown(value)}; it must be {wanted}")


# ---- values -----------------------------------------------------------------------------------


def _real(name: str, value: Any) -> float:
    """Reads a finite number, or its text."""
    if isinstance(value, str) and len(value) <= 64 and _REAL.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _wrong(name, value, "a finite number")
    return number


def _whole(name: str, value: Any) -> int:
    """Reads a whole number, or its text."""
    if isinstance(value, str) and len(value) <= 64 and _WHOLE.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, value, "a whole number")
    return value


def _truth(name: str, value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(name, value, "a string, not empty")
    return value


def _list(name: str, value: Any, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(name, value, "a list")
    check_count(f"values of {name}", len(value), most)
    return value


# ---- parameters --------------------------------------------------------------------------------


def _max_tokens(name: str, value: Any) -> int:
    number = _whole(name, value)
    if not 1 <= number < 2**31:
        raise _wrong(name, value, "at least 1, and below 2**31")
    return number


def _min_tokens(name: str, value: Any) -> int:
    number = _whole(name, value)
    if number < 0:
        raise _wrong(name, value, "at least 0")
    return number


def _top_k(name: str, value: Any) -> int:
    number = _whole(name, value)
    return 0 if number == -1 else number  # both are off


def _stop(name: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else _list(name, value, MAX_STOP_STRINGS)
    return tuple(_text(name, one) for one in values)


def _stop_token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(_whole(name, one) for one in _list(name, value, MAX_STOP_TOKEN_IDS))


def _logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object of token ids and numbers")
    check_count(f"tokens in {name}", len(value), MAX_LOGIT_BIASES)
    return tuple(
        (_whole(f"a token of {name}", t), _real(f"{name} of {shown(t)}", b))
        for t, b in value.items()
    )


def _structure(name: str, value: Any) -> Structure:
    """Reads vLLM's StructuredOutputsParams, an object or its JSON text, with exactly one kind."""
    given = read_json(value, name) if isinstance(value, str) else value
    if not isinstance(given, dict):
        raise _wrong(name, value, "an object such as {'regex': '[0-9]+'}")
    kinds = {
        kind: one for kind, one in _present(given).items() if kind != "json_object" or one is True
    }
    if name == "guided_decoding" and kinds.get("backend") == "auto":
        del kinds["backend"]
    if len(kinds) != 1 or not kinds.keys() <= _STRUCTURES.keys():
        raise _wrong(name, sorted(given), f"one of {', '.join(_STRUCTURES)}")
    ((kind, one),) = kinds.items()
    return _STRUCTURES[kind](f"{name}.{kind}", one)


def _json_schema(name: str, value: Any) -> Structure:
    if isinstance(value, dict):
        value = json.dumps(value)
    return Structure(StructureKind.JSON_SCHEMA, _text(name, value))


def _choice(name: str, value: Any) -> Structure:
    if not isinstance(value, list) or not value:
        raise _wrong(name, value, "a list of strings, not empty")
    return Structure.one_of([_text(name, one) for one in value])


_STRUCTURES: dict[str, Callable[[str, Any], Structure]] = {
    "json": _json_schema,
    "regex": lambda name, value: Structure(StructureKind.REGEX, _text(name, value)),
    "choice": _choice,
    "grammar": lambda name, value: Structure(StructureKind.GRAMMAR, _text(name, value)),
    "json_object": lambda name, value: Structure(StructureKind.JSON_SCHEMA, '{"type": "object"}'),
}

_READERS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "max_tokens": ("max_new_tokens", _max_tokens),
    "min_tokens": ("min_new_tokens", _min_tokens),
    "skip_special_tokens": ("skip_special_tokens", _truth),
    "include_stop_str_in_output": ("include_stop", _truth),
    "temperature": ("temperature", _real),
    "top_k": ("top_k", _top_k),
    "top_p": ("top_p", _real),
    "min_p": ("min_p", _real),
    "seed": ("seed", _whole),
    "stop": ("stop", _stop),
    "stop_token_ids": ("stop_token_ids", _stop_token_ids),
    "ignore_eos": ("ignore_eos", _truth),
    "logprobs": ("top_logprobs", _whole),  # so many likeliest tokens, and the sampled one
    "presence_penalty": ("presence_penalty", _real),
    "frequency_penalty": ("frequency_penalty", _real),
    "repetition_penalty": ("repetition_penalty", _real),
    "logit_bias": ("logit_bias", _logit_bias),
    "structured_outputs": ("structure", _structure),
    "guided_decoding": ("structure", _structure),
}
"""By vLLM's name: the field of SamplingParams, and what reads its value."""

_FIXED = {
    "n": 1,
    "best_of": 1,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
}
"""vLLM's parameters with only one supported value, accepted for clients that send defaults."""

NAMES = (*_READERS, *_FIXED)
"""Of every parameter that is not refused."""


def _check_fixed(name: str, value: Any) -> None:
    only = _FIXED[name]
    found = (_truth if isinstance(only, bool) else _whole)(name, value)
    if found != only:
        raise _wrong(name, value, f"{json.dumps(only)}, all that is served")
