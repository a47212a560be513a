"""How fields of a request are declared: a description, and how the server treats the field.

docs/http.md has a table of all fields, made from these declarations.
"""

from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

SUPPORTED, ACCEPTED, REFUSED = "supported", "accepted", "refused"
STATE, WANTED = "x-conformance", "x-wanted"

MAX_ENTRIES = 4096
"""Limit for a list of messages, or of a message's parts: far more than any conversation has."""

UNKNOWN_FIELD = "unknown_field"


class Strict(BaseModel):
    """An object without conversions, whose unknown fields are refused by name.

    They are let in and looked at afterwards: one error however many they are.
    """

    model_config = ConfigDict(
        strict=True, extra="allow", json_schema_extra={"additionalProperties": False}
    )

    @model_validator(mode="after")
    def _has_no_others(self) -> "Strict":
        for name in self.model_extra or ():
            near = get_close_matches(name[:100], type(self).model_fields, n=1)
            advice = f"did you mean {near[0]}?" if near else "docs/http.md lists what there is"
            raise PydanticCustomError(
                UNKNOWN_FIELD, "is not known; {advice}", {"advice": advice, "name": name[:100]}
            )
        return self


def supported(text: str, default: Any = None, wanted: str = "", **bounds: Any) -> Any:
    """Declares a field that does what OpenAI's API or `text` says.

    `wanted` completes the error message "it must be ..." if the field takes several types.
    """
    extra: dict[str, Any] = {STATE: SUPPORTED} | ({WANTED: wanted} if wanted else {})
    return Field(default, description=text, json_schema_extra=extra, **bounds)


def accepted(why: str, wanted: str = "") -> Any:
    """Declares a field that is accepted but has no effect; `why` says that this does no harm."""
    extra: dict[str, Any] = {STATE: ACCEPTED} | ({WANTED: wanted} if wanted else {})
    return Field(None, description=why, json_schema_extra=extra)


def refused(why: str) -> Any:
    """Declares a field that must be null, because ignoring it would be wrong."""
    return Field(None, description=why, json_schema_extra={STATE: REFUSED})
