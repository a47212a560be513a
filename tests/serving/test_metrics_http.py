"""The metrics port under clients that are slow, silent, or many."""

import socket
import threading
import time
from contextlib import ExitStack
from http.client import HTTPConnection
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, Gauge

from serving import metrics_http


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setattr(metrics_http, "TIMEOUT_S", 1.0)
    registry = CollectorRegistry()
    Gauge("answer", "to everything", registry=registry).set(42)
    server, thread = metrics_http.serve("127.0.0.1", 0, registry)
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def scrape(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return answer.read().decode()


def half_sent(port: int, stack: ExitStack) -> socket.socket:
    client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
    client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a")
    return client


def test_half_sent_requests_take_few_threads_and_no_scrape_waits_for_them(port: int) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(300):
            half_sent(port, stack)
        assert "answer 42.0" in scrape(port)
        until(lambda: threading.active_count() - before <= metrics_http.MAX_CONNECTIONS)
    until(lambda: threading.active_count() == before)


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


def test_only_metrics_are_there(port: int) -> None:
    for path in ("/", "/admin", "/metrics/../../etc/passwd"):
        with pytest.raises(HTTPError) as refused:
            urlopen(f"http://127.0.0.1:{port}{path}", timeout=5)
        assert refused.value.code == 404
        assert b"/metrics" in refused.value.read()
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("POST", "/metrics")
    assert connection.getresponse().status == 405
    connection.close()


def until(holds, timeout_s: float = 5.0) -> None:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < timeout_s
        time.sleep(0.01)
