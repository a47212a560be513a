"""The port of HTTP where its own is taken."""

import socket

import pytest

from serving.frontend.listen import bind_socket

HOST = "127.0.0.1"


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
