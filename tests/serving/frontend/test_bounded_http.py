"""Bounds of HTTP connections, seen from a bare socket."""

import asyncio
import contextlib
import json

import pytest
from openai_served import head, serving_http

from serving.frontend.bounded_http import MAX_HEADER_BYTES, MAX_WAITING

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n%b\r\n"


async def closed(reader, timeout_s=20):
    """Reads until the server closes the connection; returns what came."""
    return await asyncio.wait_for(reader.read(), timeout_s)


async def one_answer(reader):
    answer = await reader.readuntil(b"\r\n\r\n")
    length = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return answer + await reader.readexactly(length)


@pytest.mark.parametrize("cut", ["one header", "many headers", "a long line", "never ends"])
async def test_headers_too_large_are_refused(cut):
    long = b"a" * MAX_HEADER_BYTES
    sent = {
        "one header": GET % (b"x: " + long + b"\r\n"),
        "many headers": GET % (b"x: 0123456789\r\n" * (MAX_HEADER_BYTES // 10)),
        "a long line": b"GET /" + long + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        "never ends": GET[:-4] + b"x: " + long + long,
    }[cut]
    async with serving_http() as s:
        reader, writer = await s.raw()
        writer.write(sent)
        answer = await closed(reader)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"


async def test_headers_that_fit_are_served():
    async with serving_http() as s:
        reader, writer = await s.raw()
        for _ in range(3):  # each request has its own
            writer.write(GET % (b"x: " + b"a" * (MAX_HEADER_BYTES - 100) + b"\r\n"))
            assert (await one_answer(reader)).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_large_body_is_no_large_header():
    async with serving_http() as s:
        reader, writer = await s.raw()
        body = b" " * 200_000
        for _ in range(2):
            writer.write(head(length=len(body)) + body)
            assert (await one_answer(reader)).startswith(b"HTTP/1.1 400 ")
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", GET[:-4], b"\r\n"])
async def test_who_sends_no_whole_request_is_closed(sent):
    async with serving_http(message_timeout_s=0.2) as s:
        reader, writer = await s.raw()
        writer.write(sent)
        assert await closed(reader) == b""
        writer.close()


async def test_an_answer_under_way_is_not_cut_by_slow_further_bytes():
    async with serving_http(message_timeout_s=0.1) as s:
        s.engine.gate.clear()
        body = b'{"model":"counter","prompt":"ab","max_tokens":2}'
        reader, writer = await s.raw()
        writer.write(head(length=len(body)) + body + b"POST /v1")
        loop, fired = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(0.5, fired.set)  # the listener's own clock, five times over
        await fired.wait()
        s.engine.gate.set()
        assert (await one_answer(reader)).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_connections_are_bounded():
    async with serving_http(max_connections=2) as s:
        pairs = [await s.raw() for _ in range(2)]
        for reader, writer in pairs:
            writer.write(GET % b"")
            assert (await one_answer(reader)).startswith(b"HTTP/1.1 200 ")
        reader, writer = await s.raw()
        with contextlib.suppress(ConnectionError):
            writer.write(GET % b"")
            assert await closed(reader) == b""
        writer.close()
        pairs[0][1].close()
        await pairs[0][1].wait_closed()
        for _ in range(100):  # the server hears of it in its own time
            reader, writer = await s.raw()
            writer.write(GET % b"")
            try:
                answer = await reader.readuntil(b"\r\n\r\n")
                break
            except (ConnectionError, asyncio.IncompleteReadError):
                continue
        assert answer.startswith(b"HTTP/1.1 200 ")
        writer.close()
        pairs[1][1].close()


async def test_what_is_no_http_is_told_so_in_one_line(caplog):
    async with serving_http() as s:
        reader, writer = await s.raw()
        writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n")
        answer = await closed(reader)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "not_http"
    assert not [record for record in caplog.records if record.levelname != "INFO"]


async def test_expect_continue_is_answered_only_where_the_body_is_wanted():
    async with serving_http() as s:
        body = b'{"model":"counter","prompt":"ab","max_tokens":1}'
        reader, writer = await s.raw()
        writer.write(head(b"expect: 100-continue\r\n", len(body)))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(body)
        assert (await one_answer(reader)).startswith(b"HTTP/1.1 200 ")
        writer.close()
        reader, writer = await s.raw()
        writer.write(head(b"expect: 100-continue\r\n", 10**8))
        assert (await one_answer(reader)).startswith(b"HTTP/1.1 413 ")
        writer.close()


async def test_pipelined_requests_are_answered_in_order():
    async with serving_http() as s:
        reader, writer = await s.raw()
        bodies = [b'{"model":"counter","prompt":[%d],"max_tokens":1}' % i for i in (66 - 1, 40, 50)]
        writer.write(b"".join(head(length=len(body)) + body for body in bodies))
        texts = []
        for _ in bodies:
            answer = await one_answer(reader)
            texts.append(json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"])
        writer.close()
    assert texts == [chr(66), chr(41), chr(51)]


async def test_of_requests_that_wait_only_a_few_are_kept():
    async with serving_http() as s:
        s.engine.gate.clear()
        body = b'{"model":"counter","prompt":"ab","max_tokens":2}'
        one = head(length=len(body)) + body
        reader, writer = await s.raw()
        writer.write(one * (1 + MAX_WAITING))
        s.engine.gate.set()
        for _ in range(1 + MAX_WAITING):
            assert (await one_answer(reader)).startswith(b"HTTP/1.1 200 ")
        s.engine.gate.clear()
        writer.write(one * 1000)
        assert b"200 OK" not in await closed(reader)
        writer.close()
        s.engine.gate.set()


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n%b\r\n"
)


@pytest.mark.parametrize("trailer", [b"x: 0123456789\r\n" * 10_000, b"x: " + b"a" * 200_000])
async def test_what_comes_behind_a_body_is_bounded_too(trailer):
    async with serving_http() as s:
        reader, writer = await s.raw()
        writer.write(CHUNKED % b"" + b"1\r\n{\r\n0\r\n")
        for i in range(0, len(trailer), 1000):
            writer.write(trailer[i : i + 1000])
        assert (await closed(reader)).startswith(b"HTTP/1.1 431 ")  # its call waited for the body
        writer.close()


async def test_what_comes_behind_a_body_is_no_header():
    body = b'{"model":"counter","prompt":"ab","max_tokens":1}'
    async with serving_http() as s:
        reader, writer = await s.raw()
        sent = CHUNKED % b"" + b"%x\r\n%b\r\n0\r\nx-request-id: late\r\n\r\n" % (len(body), body)
        writer.write(sent)
        answer = await one_answer(reader)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"late" not in answer


async def test_headers_that_come_in_pieces_count_once():
    sent = GET % (b"x: " + b"a" * (MAX_HEADER_BYTES * 3 // 4) + b"\r\n")
    async with serving_http() as s:
        for step in (len(sent) // 2, 999):
            reader, writer = await s.raw()
            for i in range(0, len(sent), step):
                writer.write(sent[i : i + step])
                await writer.drain()
                await asyncio.sleep(0)
            assert (await one_answer(reader)).startswith(b"HTTP/1.1 200 ")
            writer.close()


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"


@pytest.mark.parametrize("pieces", ["one", "two", "chunked"])
async def test_a_wish_for_http_2_does_not_cost_the_body(pieces):
    """Java's own client asks for it in each first request, and sends the body at once."""
    body = b'{"model":"counter","prompt":"ab","max_tokens":1}'
    async with serving_http() as s:
        reader, writer = await s.raw()
        if pieces == "chunked":
            writer.write(CHUNKED % UPGRADE + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        else:
            writer.write(head(UPGRADE, len(body)) + (body if pieces == "one" else b""))
            if pieces == "two":
                await asyncio.sleep(0)
                await writer.drain()
                writer.write(body)
        assert (await one_answer(reader)).startswith(b"HTTP/1.1 200 ")
        writer.write(GET % UPGRADE + head(length=len(body)) + body)
        for _ in range(2):
            assert (await one_answer(reader)).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_wish_for_http_2_with_a_body_of_no_known_length_is_refused(caplog):
    sent = head(UPGRADE + b"transfer-encoding: gzip\r\n").replace(b"content-length: 0\r\n", b"")
    async with serving_http() as s:
        reader, writer = await s.raw()
        writer.write(sent + b"x")
        assert (await closed(reader)).startswith(b"HTTP/1.1 400 ")
        writer.close()
    assert not caplog.records
