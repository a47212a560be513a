"""How errors are told to callers, over gRPC and over HTTP, and how the log counts them."""

from dataclasses import dataclass

from grpc import StatusCode

from serving.errors import (
    Aborted,
    ClientLeft,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    TooLong,
    Unauthenticated,
    Unavailable,
    WorkerLost,
)

INVALID = "invalid_request_error"


class SlowBody(DeadlineExceeded):
    """A body that did not arrive in time: status 408 (a request that takes too long has 504)."""


@dataclass(frozen=True)
class Report:
    """How an error is told."""

    grpc: StatusCode
    counted: str | None  # under which the log counts it; None: it does not
    status: int  # of HTTP
    type: str  # these two as OpenAI's API has them
    code: str


_Code = StatusCode
REPORTS: dict[type[Exception], Report] = {
    SlowBody: Report(_Code.DEADLINE_EXCEEDED, "expired", 408, "timeout_error", "body_timeout"),
    TooLong: Report(_Code.INVALID_ARGUMENT, "invalid", 400, INVALID, "context_length_exceeded"),
    InvalidRequest: Report(_Code.INVALID_ARGUMENT, "invalid", 400, INVALID, "invalid_value"),
    ValueError: Report(_Code.INVALID_ARGUMENT, "invalid", 400, INVALID, "invalid_value"),
    Unauthenticated: Report(
        _Code.UNAUTHENTICATED, "denied", 401, "authentication_error", "invalid_api_key"
    ),
    PermissionDenied: Report(
        _Code.PERMISSION_DENIED, "denied", 403, "permission_error", "permission_denied"
    ),
    NotFound: Report(_Code.NOT_FOUND, "invalid", 404, INVALID, "model_not_found"),
    Overloaded: Report(
        _Code.RESOURCE_EXHAUSTED, "refused", 429, "rate_limit_error", "rate_limit_exceeded"
    ),
    WorkerLost: Report(_Code.UNAVAILABLE, "refused", 503, "server_error", "worker_lost"),
    Unavailable: Report(_Code.UNAVAILABLE, "refused", 503, "server_error", "unavailable"),
    DeadlineExceeded: Report(
        _Code.DEADLINE_EXCEEDED, "expired", 504, "timeout_error", "deadline_exceeded"
    ),
    # By its caller, or because the server stops; 499 is for the metrics, as nobody is there.
    ClientLeft: Report(_Code.CANCELLED, None, 499, INVALID, "client_left"),
    Aborted: Report(_Code.CANCELLED, None, 503, "server_error", "aborted"),
}
"""Of each error; the first that it is counts."""
FAULT = Report(_Code.INTERNAL, "failed", 500, "server_error", "request_failed")
"""Of all others."""


def report(error: Exception) -> Report:
    """Returns how an error is told."""
    return next((how for kind, how in REPORTS.items() if isinstance(error, kind)), FAULT)
