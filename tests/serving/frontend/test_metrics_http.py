"""The metrics port under clients that are slow, silent, or many."""

import socket
import time
from contextlib import ExitStack
from http.client import HTTPConnection
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client import Gauge

from serving.frontend.metrics import Metrics
from tests.serving.probed import probed

STATE = {"now": (False, "starting")}  # what the server says of itself


@pytest.fixture
def port():
    metrics = Metrics()
    Gauge("answer", "to everything", registry=metrics.registry).set(42)
    with probed(metrics, lambda: STATE["now"], message_timeout_s=1.0) as port:
        yield port


def scrape(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode()


def half_sent(port: int, stack: ExitStack) -> socket.socket:
    client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
    client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a")
    return client


def test_no_scrape_waits_for_half_sent_requests(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            half_sent(port, stack)
        assert "answer 42.0" in scrape(port)


def test_a_request_that_trickles_in_ends_after_its_time(port: int) -> None:
    with ExitStack() as stack:
        client = half_sent(port, stack)
        client.settimeout(0.05)
        began, gone = time.monotonic(), False
        while not gone:
            assert time.monotonic() - began < 5
            try:
                client.sendall(b"a")
                gone = client.recv(1) == b""
            except TimeoutError:
                pass
            except OSError:
                gone = True
        assert time.monotonic() - began > 0.5


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path)
    answer = connection.getresponse()
    try:
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_probes_say_whether_it_lives_and_whether_it_serves(port: int, monkeypatch) -> None:
    assert get(port, "/healthz") == (200, "ok\n")
    for ready, word in ((False, "starting"), (True, "ready"), (False, "draining")):
        monkeypatch.setitem(STATE, "now", (ready, word))
        assert get(port, "/readyz") == (200 if ready else 503, f"{word}\n")
        assert get(port, "/readyz?verbose=1", "HEAD") == (200 if ready else 503, "")
    assert get(port, "/healthz") == (200, "ok\n")


def test_other_paths_and_methods_are_refused(port: int) -> None:
    for path in ("/", "/admin", "/metrics/../../etc/passwd"):
        status, line = get(port, path)
        assert (status, line.count("\n")) == (404, 1)
        assert all(name in line for name in ("/metrics", "/healthz", "/readyz"))
    for path in ("/metrics", "/healthz", "/readyz"):
        assert get(port, path, "POST")[0] == 405


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:9", 200), ("[::1]", 200), ("evil.example", 403)]
)
def test_on_loopback_a_foreign_name_gets_no_metrics(port: int, host: str, status: int) -> None:
    for path, want in (("/metrics", status), ("/healthz", 200)):
        asked = Request(f"http://127.0.0.1:{port}{path}", headers={"host": host})
        try:
            with urlopen(asked, timeout=60) as answer:
                found = answer.status
        except HTTPError as error:
            found, said = error.code, error.read()
        assert found == want, path
        assert found == 200 or b"ask for localhost" in said
