"""Middleware before every route: authentication, request ids, and error responses."""

import re
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

from serving.errors import InvalidRequest, PermissionDenied, shown
from serving.frontend.access import Caller
from serving.frontend.openai import errors
from serving.frontend.openai.errors import HttpError
from serving.frontend.openai.schemas import REQUEST_ID
from serving.frontend.origin import Origins, foreign

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from serving.frontend.server import Server

OPEN_PATHS = ("/health",)
"""Paths that need no API key: load balancers have none."""
OPENAPI_PATH, DOCS_PATH = "/openapi.json", "/docs"
"""The API's description, and the page that shows it: the same on every server, so that they need no
key, which is typed into the page.
"""

_REQUEST_ID = re.compile(REQUEST_ID)


def caller_of(scope: "Scope") -> Caller:
    """Returns the request's caller."""
    return scope["state"]["caller"]


def request_id_of(scope: "Scope") -> str:
    """Returns the request's id, which the client sent or the server generated."""
    return scope["state"]["request_id"]


def set_request_id(scope: "Scope", request_id: str | None) -> None:
    """Makes the id in the request's body, if there is one, the request's id."""
    if request_id is not None:
        scope["state"]["request_id"] = request_id


class Door:
    """ASGI middleware that checks the API key, adds the request id, and formats errors.

    Errors have OpenAI's format. An error raised before the response has started sets its status;
    one raised within a stream is sent as an event, which ends the stream.
    """

    def __init__(self, app: "ASGIApp", server: "Server") -> None:
        self._app, self._server = app, server
        self._origins = Origins(server.config.host)

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """See ASGI."""
        scope.setdefault("state", {})["request_id"] = uuid.uuid4().hex
        started = ended = False

        def sending(message: "Message") -> Any:  # not a coroutine: it is called for every token
            nonlocal started, ended
            if not started:
                started = True
                told = (b"x-request-id", request_id_of(scope).encode())
                headers = message["headers"]
                # Beside them, `bounded_http` may write comments.
                scope["state"]["streams_events"] = any(
                    value.startswith(b"text/event-stream") for _, value in headers
                )
                message = {**message, "headers": [*headers, told]}
            elif not message.get("more_body"):
                ended = True
            return send(message)

        try:
            if (given := Headers(scope=scope).get("x-request-id")) is not None:
                set_request_id(scope, _checked(given))
            self._check_caller(scope)
            await self._app(scope, receive, sending)
        except Exception as error:
            if not ended:  # else the client disconnected after the last byte
                await self._tell(scope, receive, sending, error, started)

    def _check_caller(self, scope: "Scope") -> None:
        """Identifies the caller, where the path needs a key.

        Raises Unauthenticated, and PermissionDenied as `_check_origin` does.
        """
        path, access = scope["path"], self._server.access
        if path in OPEN_PATHS:
            return
        is_page = path == DOCS_PATH or path.startswith(f"{DOCS_PATH}/")
        if not (is_page or path == OPENAPI_PATH):
            given = Headers(scope=scope).get("authorization")
            scope["state"]["caller"] = access.caller(given)
        if not access.paths:  # without keys
            self._check_origin(scope, is_page)

    def _check_origin(self, scope: "Scope", is_page: bool) -> None:
        """Raises PermissionDenied for a request that another site's page made a browser send.

        Other sites may link to what `is_page`.
        """
        headers = Headers(scope=scope)
        allowed = self._server.config.allowed_origins
        is_allowed = "*" in allowed or headers.get("origin") in allowed
        if not (is_page or is_allowed) and (who := foreign(headers)):
            raise PermissionDenied(
                f"{who} may not use a server that asks for no keys; set allowed_origins, or "
                "keys_file and send a key"
            )
        host = headers.get("host")
        # A server that is reachable from other machines may have any name, and anybody who reaches
        # it may use it.
        if host is not None and self._origins.is_loopback and not self._origins.has(host):
            raise PermissionDenied(
                f"the request is for {shown(host)}, and this server is for its own machine: ask for"
                " localhost; a proxy in front of it must send that as Host, or set keys_file"
            )

    async def _tell(
        self, scope: "Scope", receive: "Receive", send: "Send", error: Exception, started: bool
    ) -> None:
        headers: Mapping[str, str] = errors.headers(error)
        if isinstance(error, HTTPException):
            headers = error.headers or {}  # which methods a route takes
            error = _of_routing(scope, error)
        client = scope.get("client") or ("", 0)
        path = scope["path"][:200]
        self._server.guard.note(f"{scope['method']} {path!r}", f"{client[0]}:{client[1]}", error)
        status = scope["state"]["code"] = errors.told(error).status
        body = errors.body(error, _param(scope, error))
        if started:
            event = b"data: " + body + b"\n\n"
            await send({"type": "http.response.body", "body": event})
            return
        answer = Response(body, status, headers, "application/json")
        await answer(scope, receive, send)


def _param(scope: "Scope", error: Exception) -> str | None:
    """Returns the request's name of the field at fault."""
    param = error.param if isinstance(error, InvalidRequest) else None
    if param is None or isinstance(error, HttpError) or "body" not in scope["state"]:
        return param
    return scope["state"]["body"].name_of(param)


def _checked(given: str) -> str:
    if not _REQUEST_ID.fullmatch(given):
        raise HttpError(
            f"the header x-request-id has {len(given)} characters, or some that are not visible "
            "ASCII; send 128 visible ones at most",
            "x-request-id",
        )
    return given


def _of_routing(scope: "Scope", error: HTTPException) -> HttpError:
    """Converts the router's error (no such path or method) to an HttpError."""
    if error.status_code == 405:
        return HttpError(
            f"{scope['path'][:200]} does not take {scope['method']}; docs/http.md has the routes",
            status=405,
        )
    return HttpError(
        f"there is no {scope['path'][:200]}; docs/http.md has the routes", status=error.status_code
    )
