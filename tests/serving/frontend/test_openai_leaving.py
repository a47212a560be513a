"""Clients that leave, or do not read, and a server that drains."""

import asyncio

import pytest
from openai_served import head, serving_http
from served import until

from serving.config import EngineConfig
from serving.frontend import bounded_http

BODY = b'{"model":"counter","prompt":%b,"max_tokens":9%b}'


async def gone(s):
    await until(lambda: s.engine.running == 0 and s.server.guard.num_calls == 0)


@pytest.mark.parametrize("fields", [b"", b',"stream":true', b',"n":4', b',"n":4,"stream":true'])
async def test_a_client_that_leaves_ends_all_of_its_requests(fields):
    async with serving_http() as s:
        s.engine.gate.clear()
        _reader, writer = await s.raw()
        sent = BODY % (b'"ab"', fields)
        writer.write(head(length=len(sent)) + sent)
        count = 4 if b'"n"' in fields else 1
        await until(lambda: s.engine.running == count)
        assert s.engine.closed == 0
        writer.close()
        await gone(s)
        assert s.engine.closed == count
        assert not s.engine.gate.is_set()  # nothing but its leaving ended them


async def test_a_client_that_leaves_while_the_next_request_waits():
    async with serving_http() as s:
        s.engine.gate.clear()
        _reader, writer = await s.raw()
        sent = BODY % (b'"ab"', b"")
        writer.write(2 * (head(length=len(sent)) + sent))
        await until(lambda: s.engine.running == 1)
        writer.transport.abort()
        await gone(s)
        assert len(s.engine.calls) == 1


@pytest.mark.parametrize("fields", [b"", b',"stream":true'])
async def test_a_client_that_closes_its_side_is_answered(fields, monkeypatch):
    """As `nc -N` does. While it waits, interim responses ask whether it is still there."""
    monkeypatch.setattr(bounded_http, "PROBE_S", 0.01)
    async with serving_http() as s:
        s.engine.gate.clear()
        reader, writer = await s.raw()
        sent = BODY % (b'"ab"', fields)
        writer.write(2 * (head(length=len(sent)) + sent))
        writer.write_eof()
        if not fields:
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await until(lambda: s.engine.running == 1)
        s.engine.gate.set()
        answers = await asyncio.wait_for(reader.read(), 20)  # and then the server closes
        writer.close()
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert answers.count(b"[DONE]" if fields else b'"finish_reason":"length"') == 2
    assert s.engine.closed == len(s.engine.calls) == 2


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", head(length=100) + b"{"])
async def test_a_client_that_closes_its_side_too_soon_is_closed(sent):
    async with serving_http() as s:
        reader, writer = await s.raw()
        writer.write(sent)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


@pytest.mark.parametrize("fields", [b"", b"connection: close\r\n"])
async def test_a_client_that_closes_its_side_and_then_leaves(fields, monkeypatch):
    monkeypatch.setattr(bounded_http, "PROBE_S", 0.01)
    async with serving_http() as s:
        s.engine.gate.clear()
        reader, writer = await s.raw()
        sent = BODY % (b'"ab"', b"")
        writer.write(head(fields, len(sent)) + sent)
        writer.write_eof()
        await reader.readuntil(b"100 Continue\r\n\r\n")
        assert s.engine.running == 1
        writer.close()
        await gone(s)
        assert s.engine.closed == 1


async def test_a_client_that_leaves_before_its_body_is_there():
    async with serving_http() as s:
        _, writer = await s.raw()
        writer.write(head(length=100) + b"{")
        await until(lambda: s.server.guard.inbox.num_callers == 1)
        writer.close()
        await until(lambda: s.server.guard.inbox.num_callers == 0)
        assert not s.engine.calls


async def test_openais_client_leaves_a_stream():
    async with serving_http() as s:
        s.engine.gate.clear()
        stream = await s.complete(stream=True, max_tokens=9)
        await anext(aiter(stream))
        await stream.close()
        await gone(s)


async def test_who_does_not_read_holds_the_engine_up_not_the_memory():
    """Each event waits for the one before it to leave."""
    config = EngineConfig(max_model_len=200_000)
    async with serving_http(engine=config) as s:
        _reader, writer = await s.raw()
        writer.transport.pause_reading()
        sent = BODY.replace(b"9", b"150000") % (b"[1]", b',"stream":true')
        writer.write(head(length=len(sent)) + sent)
        await until(lambda: s.engine.running == 1)
        (connection,) = s.web._server.server_state.connections
        await until(lambda: connection.flow.write_paused)
        assert connection.transport.get_write_buffer_size() < 1 << 20
        assert s.engine.running == 1
        writer.transport.abort()
        await gone(s)


async def test_draining_waits_for_streams_and_takes_no_more():
    async with serving_http() as s:
        s.engine.gate.clear()
        stream = await s.complete(stream=True, max_tokens=3)
        first = await anext(aiter(stream))
        draining = asyncio.create_task(s.server.drain())
        await until(lambda: s.engine.status == "draining")
        refused = await s.post()
        health = await s.http.get("/health")
        s.engine.gate.set()
        rest = [event.choices[0].text async for event in stream]
        assert await draining
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert (health.status_code, health.json()) == (503, {"status": "draining"})
    assert first.choices[0].text == "c"
    assert rest == ["d", "e"]


async def test_a_server_that_stops_tells_streams_so():
    async with serving_http(drain_timeout_s=0.05) as s:
        s.engine.gate.clear()
        reader, writer = await s.raw()
        sent = BODY % (b'"ab"', b',"stream":true')
        writer.write(head(length=len(sent)) + sent)
        await reader.readuntil(b'"c"')
        assert not await s.server.drain()
        told = await reader.read()
        writer.close()
    assert b'"code":"aborted"' in told
    assert b"[DONE]" not in told
