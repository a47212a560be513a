"""Which machines can reach an address that a server listens on."""

import ipaddress


def parse(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns an IP address, without its zone; None for a name."""
    try:
        return ipaddress.ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether `host`, an address or a name, is reachable from its own machine only."""
    address = parse(host)
    return host.lower() == "localhost" if address is None else address.is_loopback
