"""Detects requests that a foreign web page made a browser send.

API keys identify callers. A server without keys that a browser can reach has to check the origin: a
foreign page must not use it, read its data, or change its settings.
"""

import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from serving.cluster.addresses import is_loopback, parse
from serving.errors import shown


class Origins:
    """The host names and addresses under which browsers may reach a server."""

    def __init__(self, host: str) -> None:
        """`host` is the address or name that the server was told to listen on."""
        self._host = host.strip("[]").lower()
        self._names = {"localhost", self._host}
        if _is_wildcard(self._host):
            self._names.add(socket.gethostname().lower())

    @property
    def is_loopback(self) -> bool:
        """Whether the server is reachable from its own machine only."""
        return is_loopback(self._host)

    def has(self, host: str, local: str = "") -> bool:
        """Returns whether `host`, a request's Host header, names this server.

        That is an address it listens on, its name, or loopback; but not a foreign name that
        resolves to its address (DNS rebinding). The port is ignored, since a tunnel may use another
        one. `local` is the address at which the connection arrived.
        """
        name = _name_of(host)
        if name in self._names:
            return True
        address = parse(name)
        if address is None:
            return False
        # Unlike names, addresses cannot be rebound. If the server listens on all, any may be its
        # own.
        return address.is_loopback or address == parse(local) or _is_wildcard(self._host)


def foreign(headers: Mapping[str, str]) -> str:
    """Describes the other site whose page made a browser send a request; empty if there is none.

    Names of `headers` are in lower case.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if origin is not None and _authority(origin) != host.lower():
        return f"a page of {shown(origin)}"
    if headers.get("sec-fetch-site") not in (None, "same-origin", "none"):
        return "another site's page"
    return ""


def is_json(content_type: str) -> bool:
    """Returns whether a `content-type` header says JSON.

    HTML forms cannot send JSON, and scripts of another origin need a CORS preflight, which is
    allowed to those of `allowed_origins` alone.
    """
    return content_type.partition(";")[0].strip().lower() == "application/json"


def _authority(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # brackets without an address
        return None


def _name_of(host: str) -> str:
    """Returns a Host header's value without port and brackets."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.strip("[]").rstrip(".").lower()


def _is_wildcard(name: str) -> bool:
    address = parse(name)
    return address is not None and address.is_unspecified
