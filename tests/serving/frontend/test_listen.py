"""Ports that are taken, and addresses of IPv6."""

import socket
import urllib.request
from asyncio import to_thread

import pytest
from served import Setup

from serving.client import Client, admin_address_of
from serving.config import ServerConfig
from serving.frontend.listen import bind_socket
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

HOST = "127.0.0.1"


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.fixture
def taken():
    with socket.create_server((HOST, 0)) as other:
        yield other.getsockname()[1]


def test_the_next_free_port_is_taken_and_nobody_else_gets_it(taken):
    with bind_socket(HOST, 0, first=taken) as first, bind_socket(HOST, 0, first=taken) as second:
        ports = [each.getsockname()[1] for each in (first, second)]
        assert taken < ports[0] < ports[1] <= taken + 100


def test_a_port_that_was_asked_for_is_an_error_where_it_is_taken(taken):
    with pytest.raises(OSError, match=f"cannot listen on {HOST}:{taken}.*--http-port"):
        bind_socket(HOST, taken, first=taken)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
@pytest.mark.parametrize(
    ("host", "admin_host"),
    [(HOST, "::1"), ("[::1]", "0.0.0.0"), ("::", "[::]")],
)
async def test_every_port_is_found_on_either_family(host, admin_host):
    with bind_socket("::1", 0) as free:
        metrics_port = free.getsockname()[1]
    config = ServerConfig(
        port=0, host=host, admin_host=admin_host, http_port=0, metrics_port=metrics_port
    )
    async with Setup(config) as setup:
        server = (await setup.ready()).server
        asked = HOST if host == HOST else "[::1]"
        async with Client(f"{asked}:{server.port}") as client:
            assert (await client.get_brownout()).strategy
        async with Client(f"{asked}:{server.port}", server.admin_address) as client:
            assert (await client.stats()).uptime_s >= 0
        urls = [f"http://{one.address}/" for one in (server.page, server.web)]
        urls = [urls[0], f"{urls[1]}health", f"http://{asked}:{metrics_port}/readyz"]
        for url in urls:
            answer = await to_thread(urllib.request.urlopen, url, timeout=10)
            assert answer.status == 200, url


@pytest.mark.parametrize(
    ("address", "admin_host", "found"),
    [
        ("https://127.0.0.1:1", "::1", "https://[::1]:2"),
        ("[::1]:1", "::", "[::1]:2"),
        ("localhost:1", "::1", "localhost:2"),  # of both families; a certificate may be for it
        ("llm.example:1", "127.0.0.1", "llm.example:2"),  # never another server, this machine's
        ("10.0.0.5:1", "::1", "10.0.0.5:2"),
        ("127.0.0.1:1", "10.0.0.5", "10.0.0.5:2"),
        ("127.0.0.1:1", "", "127.0.0.1:2"),  # an older server does not say
    ],
)
def test_where_the_admin_service_is(address, admin_host, found):
    info = pb.ServerInfo(admin_port=2, admin_host=admin_host)
    assert admin_address_of(address, info) == found
