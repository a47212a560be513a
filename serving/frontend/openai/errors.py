"""Converts errors to OpenAI's format: a status, an `error` object and headers."""

import math
from dataclasses import dataclass

import orjson

from serving.errors import (
    Aborted,
    ClientLeft,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    ServingError,
    TooLong,
    Unauthenticated,
    Unavailable,
    WorkerLost,
)
from serving.frontend.guard import said

Headers = list[tuple[bytes, bytes]]

INVALID = "invalid_request_error"


class HttpError(InvalidRequest):
    """A request that HTTP or OpenAI's API does not allow, with its status and the parameter at
    fault.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message, param)
        self.status = status


class SlowBody(DeadlineExceeded):
    """A body that did not arrive in time: status 408 (a request that takes too long has 504)."""


@dataclass(frozen=True)
class Told:
    """How an error is reported."""

    status: int
    type: str
    code: str | None = None


_TOLD: dict[type[Exception], Told] = {
    SlowBody: Told(408, "timeout_error", "body_timeout"),
    TooLong: Told(400, INVALID, "context_length_exceeded"),
    InvalidRequest: Told(400, INVALID, "invalid_value"),
    ValueError: Told(400, INVALID, "invalid_value"),
    Unauthenticated: Told(401, "authentication_error", "invalid_api_key"),
    PermissionDenied: Told(403, "permission_error", "permission_denied"),
    NotFound: Told(404, INVALID, "model_not_found"),
    Overloaded: Told(429, "rate_limit_error", "rate_limit_exceeded"),
    WorkerLost: Told(503, "server_error", "worker_lost"),
    Unavailable: Told(503, "server_error", "unavailable"),
    DeadlineExceeded: Told(504, "timeout_error", "deadline_exceeded"),
    ClientLeft: Told(499, INVALID, "client_left"),  # for the metrics: nobody is there to be told
    Aborted: Told(503, "server_error", "aborted"),
}
_FAILED = Told(500, "server_error", "request_failed")
_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
}


def told(error: Exception) -> Told:
    """Returns the status, type and code of an error."""
    if isinstance(error, HttpError):
        return Told(error.status, INVALID, _CODES.get(error.status, "invalid_value"))
    return next((how for kind, how in _TOLD.items() if isinstance(error, kind)), _FAILED)


def body(error: Exception, param: str | None) -> bytes:
    """Returns the response body with the `error` object, as JSON; `param` is the field at fault."""
    how = told(error)
    # A library's message may contain an unpaired surrogate, which JSON cannot represent.
    text = said(error).encode("utf-8", "replace").decode()
    fields = {"message": text, "type": how.type, "param": param, "code": how.code}
    return orjson.dumps({"error": fields})


def headers(error: Exception) -> Headers:
    """Returns the headers that tell clients of OpenAI's API whether and when to retry."""
    if isinstance(error, ServingError) and error.retry_after_s is not None:
        ms = max(1, math.ceil(error.retry_after_s * 1000))
        seconds = max(1, math.ceil(error.retry_after_s))
        return [(b"retry-after", b"%d" % seconds), (b"retry-after-ms", b"%d" % ms)]
    status = told(error).status
    if status == 401:
        return [(b"www-authenticate", b"Bearer")]
    if status == 504:  # a retry would take just as long
        return [(b"x-should-retry", b"false")]
    return [(b"connection", b"close")] if status == 408 else []
