"""Converts errors to OpenAI's format: a status, an `error` object and headers."""

import math
from dataclasses import replace

import orjson

from serving.errors import InvalidRequest, ServingError
from serving.frontend.guard import said
from serving.frontend.reports import Report, report


class HttpError(InvalidRequest):
    """A request that HTTP or OpenAI's API does not allow, with its status and the parameter at
    fault.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message, param)
        self.status = status


_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
}


def told(error: Exception) -> Report:
    """Returns the status, type and code of an error."""
    if isinstance(error, HttpError):
        code = _CODES.get(error.status, "invalid_value")
        return replace(report(error), status=error.status, code=code)
    return report(error)


def body(error: Exception, param: str | None) -> bytes:
    """Returns the response body with the `error` object, as JSON; `param` is the field at fault."""
    how = told(error)
    # A library's message may contain an unpaired surrogate, which JSON cannot represent.
    text = said(error).encode("utf-8", "replace").decode()
    fields = {"message": text, "type": how.type, "param": param, "code": how.code}
    return orjson.dumps({"error": fields})


def headers(error: Exception) -> dict[str, str]:
    """Returns the headers that tell clients of OpenAI's API whether and when to retry."""
    if isinstance(error, ServingError) and error.retry_after_s is not None:
        ms = max(1, math.ceil(error.retry_after_s * 1000))
        seconds = max(1, math.ceil(error.retry_after_s))
        return {"retry-after": str(seconds), "retry-after-ms": str(ms)}
    status = told(error).status
    if status == 401:
        return {"www-authenticate": "Bearer"}
    if status == 504:  # a retry would take just as long
        return {"x-should-retry": "false"}
    return {"connection": "close"} if status == 408 else {}
