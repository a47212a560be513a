"""Which page made a browser call.

Keys say who calls. A server that asks for none and is reached by a browser has to look at this: a
foreign page must not use it, read its data, or change its settings.
"""

import ipaddress
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from serving.errors import shown


class Origins:
    """What is a server's own, seen from a browser."""

    def __init__(self, host: str) -> None:
        """`host` is the address or name that the server was told to listen on."""
        self._host = host.strip("[]").lower()
        self._names = {"localhost", self._host}
        if _is_wildcard(self._host):
            self._names.add(socket.gethostname().lower())

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        address = _address(self._host)
        return self._host == "localhost" if address is None else address.is_loopback

    def has(self, host: str, local: str = "") -> bool:
        """Whether `host`, a request's header of that name, is this server: an address that it
        listens on, its name, or loopback. A foreign name that means its address (DNS rebinding) is
        not.

        The port is not looked at, so that a tunnel may have another. `local` is the address at
        which the connection arrived.
        """
        name = _name_of(host)
        if name in self._names:
            return True
        address = _address(name)
        if address is None:
            return False
        # An address cannot be made to mean another one; listening on all, any may be ours.
        return address.is_loopback or address == _address(local) or _is_wildcard(self._host)


def foreign(headers: Mapping[str, str]) -> str:
    """The page of another site that made a browser send a request; empty where none did. Names of
    `headers` are in lower case.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if origin is not None and _authority(origin) != host.lower():
        return f"a page of {shown(origin)}"
    if headers.get("sec-fetch-site") not in (None, "same-origin", "none"):
        return "another site's page"
    return ""


def is_json(content_type: str) -> bool:
    """Of a header `content-type`. No form can send it, and a script of another origin only after
    asking the server, which never allows it.
    """
    return content_type.partition(";")[0].strip().lower() == "application/json"


def _authority(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # brackets without an address
        return None


def _name_of(host: str) -> str:
    """`Host` without its port and brackets."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.strip("[]").rstrip(".").lower()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None


def _is_wildcard(name: str) -> bool:
    address = _address(name)
    return address is not None and address.is_unspecified
