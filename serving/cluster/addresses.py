"""Addresses that a server listens on: how they are written, and which machines reach them."""

import ipaddress


def parse(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns an IP address, without its zone; None for a name."""
    try:
        return ipaddress.ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Returns whether `host`, an address or a name, is reachable from its own machine only."""
    address = parse(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def join(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"
