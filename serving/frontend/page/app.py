"""The live page: its static files, and the API for its data and controls.

The files need no key. Everything under `/api` requires an admin key, sent only in the header
`Authorization: Bearer`. If the server has no keys, anybody who reaches the port may use it.
"""

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jiter
import orjson
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException

from serving.errors import InvalidRequest, ServingError, shown
from serving.frontend.openai import body, errors
from serving.frontend.page.live import Live
from serving.frontend.page.shield import Shield
from serving.frontend.web import Listener
from serving.request import BrownoutChange

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from serving.frontend.access import Caller
    from serving.frontend.guard import Guard
    from serving.frontend.server import Server

_MAX_CONNECTIONS = 128
STATIC = Path(__file__).with_name("static")
MAX_BODY_BYTES = 4096
"""Limit for a brownout change; one that sets every field has about 250 bytes."""

_FIELDS = tuple(field.name for field in fields(BrownoutChange))
_CHANGE = TypeAdapter(BrownoutChange)


def front_end(server: "Server") -> "Page | None":
    """Offers the page on `admin_http_port`."""
    return Page(server) if server.config.admin_http_port >= 0 else None


class Page(Listener):
    """The page's port, which takes samples as long as the server runs."""

    def __init__(self, server: "Server") -> None:
        config, self.live = server.config, Live(server)
        app = make_app(server, self.live)
        super().__init__(
            *(server, "page", app, config.admin_host, config.admin_http_port, _MAX_CONNECTIONS),
            prefix="admin-",
        )

    async def start(self) -> str:
        """See Listener."""
        url = await super().start()
        self._serving.keep_running(self.live.run(), "jmoe-live")
        return url


def make_app(server: "Server", live: Live) -> FastAPI:
    """Makes the application for a server's HTTP admin port; `live` provides its data."""
    app = FastAPI(title="jmoe page", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Shield, host=server.config.admin_host)
    app.add_exception_handler(ServingError, _refuse)
    app.add_exception_handler(HTTPException, _refuse)

    def admin(request: Request) -> "Caller":
        caller = server.access.caller(request.headers.get("authorization"))
        caller.require_admin()
        return caller

    @app.get("/api/state")
    async def state(request: Request) -> Response:
        """Returns the server's current state."""
        admin(request)
        return Response(live.state(), media_type="application/json")

    @app.get("/api/stream")
    async def stream(request: Request) -> Response:
        """Streams the history, then a line per second."""
        admin(request)
        return _Stream(live, lambda: admin(request))

    @app.post("/api/brownout")
    async def brownout(request: Request) -> Response:
        """Changes the fields that are set; if the way changes, answers once it is loaded."""
        caller = admin(request)
        change = await _read_change(request, server.guard)
        server.ready_engine()
        try:
            after = await server.set_brownout(change, _peer(caller, request))
        except (InvalidRequest, ValueError) as error:  # ValueError: the model lacks this way
            raise InvalidRequest(str(error), _field_of(change, str(error))) from None
        return Response(orjson.dumps(asdict(after)), media_type="application/json")

    @app.post("/api/whatif")
    async def what_if(request: Request) -> Response:
        """Returns what a change lets expect at the present load, by phase; changes nothing."""
        admin(request)
        change = await _read_change(request, server.guard)
        try:
            found = server.ready_engine().what_if(change)
        except (InvalidRequest, ValueError) as error:
            raise InvalidRequest(str(error), _field_of(change, str(error))) from None
        told = {str(phase): expected._asdict() for phase, expected in found.items()}
        return Response(orjson.dumps(told), media_type="application/json")

    app.mount("/", StaticFiles(directory=STATIC, html=True))
    return app


class _Stream(StreamingResponse):
    """A stream that counts as a viewer while it lasts."""

    def __init__(self, live: Live, check: Any) -> None:
        super().__init__(live.stream(check), media_type="application/x-ndjson")
        self._live = live

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        with self._live.viewer():
            await super().__call__(scope, receive, send)


async def _read_change(request: Request, guard: "Guard") -> BrownoutChange:
    """Reads a JSON object with fields of BrownoutChange.

    Raises InvalidRequest, which names the field, and what `body.read` raises.
    """
    advice = "send the fields that change"
    given = await body.read(request.scope, request.receive, guard, MAX_BODY_BYTES, advice)
    try:
        change = _CHANGE.validate_json(given, strict=True, extra="forbid")
        jiter.from_json(given, catch_duplicate_keys=True)
        return change
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    except ValueError as error:
        raise InvalidRequest(f"the change: {error}; send each field once") from None
    if not first["loc"]:
        raise InvalidRequest(
            f"the change is {shown(given)}; it must be a JSON object with some of: "
            f"{', '.join(_FIELDS)}"
        )
    name = str(first["loc"][0])
    if name not in _FIELDS:
        raise InvalidRequest(f"there is no {shown(name)}; there are {', '.join(_FIELDS)}")
    wanted = first["msg"].removeprefix("Input ")
    raise InvalidRequest(f"{name} is {shown(first['input'])}; it {wanted}", name)


def _field_of(change: BrownoutChange, message: str) -> str | None:
    """Returns the field that was refused: the one named first in `message`, or the only one set.
    Messages say which model they are about, so that it is at fault where nothing else is.
    """
    given = [name for name in _FIELDS if getattr(change, name) is not None]
    named = [name for name in given if name in message]
    named.sort(key=lambda name: (name == "model", message.index(name)))
    return (named or (given if len(given) == 1 else [None]))[0]


def _peer(caller: "Caller", request: Request) -> str:
    """Returns how the log names the caller: key name and address."""
    host, port = request.client or ("unknown", 0)
    address = f"http:{host}:{port}"
    return f"{caller.name} at {address}" if caller.name else address


async def _refuse(request: Request, error: Exception) -> Response:
    """Responds with the error's message as JSON."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    field = error.param if isinstance(error, InvalidRequest) else None
    told = {"error": str(error), "field": field}
    return JSONResponse(told, errors.told(error).status, errors.headers(error))
