"""Ports that are taken, addresses of IPv6, and port 443 as docs/operating.md has it."""

import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from asyncio import to_thread
from pathlib import Path

import httpx2
import pytest
from certificates import Authority, client_context
from keyed import KeysFile
from openai_served import serving_http
from served import Setup, until

from serving.client import Client, admin_address_of
from serving.client.connection import Connection
from serving.config import EngineConfig, ServerConfig
from serving.frontend.listen import bind_socket
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
NGINX, SETPRIV = shutil.which("nginx"), shutil.which("setpriv")
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
        async with Client(f"{asked}:{server.main.port}") as client:
            assert (await client.get_brownout()).strategy
        async with Client(f"{asked}:{server.main.port}", server.addresses["admin"]) as client:
            assert (await client.stats()).uptime_s >= 0
        urls = [f"http://{one.address}/" for one in (setup.page, setup.web)]
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


def may_drop_capabilities() -> bool:
    start = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    is_privileged = start.exists() and int(start.read_text()) > 443
    return SETPRIV is not None and os.geteuid() == 0 and is_privileged


@pytest.mark.skipif(
    not may_drop_capabilities(), reason="for root, where port 443 needs a capability"
)
@pytest.mark.parametrize("kept", ["", ",+net_bind_service"])
def test_the_capability_of_the_page_is_enough_for_port_443(kept):
    (bounding,) = re.findall(r"^CapabilityBoundingSet=CAP_(\w+)$", PAGE, re.MULTILINE)
    assert kept in ("", f",+{bounding.lower()}")
    code = "from serving.frontend.listen import bind_socket; bind_socket('127.44.3.1', 443)"
    done = subprocess.run(
        [SETPRIV, f"--bounding-set=-all{kept}", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert (done.returncode == 0) == bool(kept), done.stderr
    if not kept:
        refusal = (
            "cannot listen on 127.44.3.1:443: Permission denied; choose another --http-port, or"
        )
        assert refusal in done.stderr


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
async def test_nginx_of_the_page_passes_http_streams_and_grpc(tmp_path):
    pair = Authority(tmp_path, "ca").signs("server")
    keys = KeysFile(tmp_path / "keys.yaml", alice={})
    with bind_socket(HOST, 0) as free:
        port = free.getsockname()[1]
    (block,) = re.findall(r"```nginx\n(.*?)```", PAGE, re.DOTALL)
    async with serving_http(keys_file=str(keys.path), engine=EngineConfig(max_model_len=64)) as s:
        for old, new in (
            ("443", f"{HOST}:{port}"),
            ("/etc/jmoe/cert.pem", str(pair.cert)),
            ("/etc/jmoe/key.pem", str(pair.key)),
            ("127.0.0.1:8000", s.address),
            ("127.0.0.1:50051", s.server.address),
        ):
            assert old in block
            block = block.replace(old, new)
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        folders = "".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
        (tmp_path / "nginx.conf").write_text(
            f"daemon off; master_process off; pid {tmp_path}/pid; error_log stderr; events {{}}\n"
            f"http {{ access_log off; {folders}\n{block} }}"
        )
        nginx = subprocess.Popen([NGINX, "-e", "stderr", "-c", tmp_path / "nginx.conf"])
        try:
            await until(lambda: is_open(port))
            await ask_through(f"{HOST}:{port}", tmp_path / "ca.pem", keys.text("alice"), s.engine)
        finally:
            nginx.terminate()
            nginx.wait()


def is_open(port: int) -> bool:
    with socket.socket() as trying:
        return trying.connect_ex((HOST, port)) == 0


async def ask_through(address: str, ca: Path, key: str, engine) -> None:
    """Sends a request through a proxy; the first event must arrive before the engine makes the next
    one.
    """
    asked = {"model": "counter", "prompt": "ab", "max_tokens": 2, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(verify=client_context(ca), timeout=30) as http:
        page = await http.get(f"https://{address}/docs")
        assert page.status_code == 200
        engine.gate.clear()
        url = f"https://{address}/v1/completions"
        async with http.stream("POST", url, json=asked, headers=headers) as answer:
            lines = answer.aiter_lines()
            assert '"text":"c"' in await anext(lines)
            engine.gate.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
    async with Client(address, connection=Connection(key, tls_ca=str(ca))) as client:
        assert (await client.server_info()).status == "ready"
