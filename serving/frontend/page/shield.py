"""Middleware of the live page that refuses requests which other sites make a browser send.

It checks, also on a server without keys (`serving.frontend.origin`), that:

- `Host` is this server.
- Under `/api`, `Origin` and `Sec-Fetch-Site`, if a browser sends them, are the page's own.
- A change is sent as JSON.
"""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

from serving.errors import shown
from serving.frontend.origin import Origins, foreign, is_json

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Shield:
    """ASGI middleware that refuses foreign requests with 403 and a one-line reason."""

    def __init__(self, app: "ASGIApp", host: str) -> None:
        """`host` is the address or name that the server was told to listen on."""
        self._app, self._origins = app, Origins(host)

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Refuses a request, or passes it on and adds security headers to the response."""
        headers, is_data = Headers(scope=scope), scope["path"].startswith("/api")
        refused = self._refusal(headers, scope, is_data)

        async def send_shielded(message: "Message") -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                found.update(HEADERS)
                found["cache-control"] = "no-store" if is_data else "no-cache"
            await send(message)

        if refused is None:
            await self._app(scope, receive, send_shielded)
        else:
            answer = JSONResponse({"error": refused}, status_code=403)
            await answer(scope, receive, send_shielded)

    def _refusal(
        self, headers: Headers, scope: MutableMapping[str, Any], is_data: bool
    ) -> str | None:
        host, (local, port) = headers.get("host", ""), scope["server"]
        if not self._origins.has(host, local):
            return (
                f"the page was asked for as {shown(host)}, which is not this server; open it by an "
                f"address that it listens on, or as http://localhost:{port} on its machine"
            )
        if not is_data:
            return None
        if who := foreign(headers):
            return f"{who} may not ask this server; open the page of {host}"
        if scope["method"] == "POST" and not is_json(headers.get("content-type", "")):
            return "a change needs the header Content-Type: application/json"
        return None
