"""How errors are told: by the classes of OpenAI's own client, by statuses, and within a stream."""

import asyncio
import json

import openai
import pytest
from openai_served import head, serving_http
from served import until

from serving import errors
from serving.config import EngineConfig
from serving.frontend.access import Access
from serving.frontend.openai import body


@pytest.mark.parametrize(
    ("found", "chat", "fields", "param"),
    [
        ("prompt", False, {}, "prompt"),
        ("prompt", True, {}, "messages"),
        ("max_new_tokens", False, {}, "max_tokens"),
        ("max_new_tokens", True, {}, "max_tokens"),
        ("max_new_tokens", True, {"max_completion_tokens": 2}, "max_completion_tokens"),
        ("top_logprobs", False, {}, "logprobs"),
        ("structure", True, {"response_format": {"type": "json_object"}}, "response_format"),
        ("structure", False, {"guided_regex": "a"}, "guided_regex"),
        ("structure", False, {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("stop_token_ids", False, {}, "stop_token_ids"),
        (None, False, {}, None),
    ],
)
async def test_what_the_engine_refuses_has_the_bodys_own_name(found, chat, fields, param):
    async with serving_http() as s:
        s.engine.failure = errors.InvalidRequest("no", found)
        with pytest.raises(openai.BadRequestError) as caught:
            await (s.chat if chat else s.complete)(extra_body=fields)
    assert caught.value.param == param


async def test_a_model_that_is_not_served_is_not_described():
    async with serving_http() as s:
        with pytest.raises(openai.NotFoundError):
            await s.client.models.retrieve("nobody")


JSON = {"content-type": "application/json"}


async def test_routes_that_are_not_there():
    async with serving_http() as s:
        missing = await s.http.get("/v1/nothing")
        wrong = await s.http.get("/v1/completions")
        slash = await s.http.get("/v1/models/")
        others = [await s.http.put(path) for path in ("/health", "/v1/chat/completions")]
        heads = [await s.http.head(path) for path in ("/health", "/version", "/v1/models/counter")]
        gets = [await s.http.get(path) for path in ("/health", "/version", "/v1/models/counter")]
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert slash.status_code == 404
    assert wrong.headers["allow"] == "POST"
    allowed = [{*one.headers["allow"].split(", ")} for one in others]
    assert allowed == [{"GET", "HEAD"}, {"POST"}]
    for bare, whole in zip(heads, gets, strict=True):
        assert (bare.status_code, bare.content) == (200, b"")
        assert bare.headers["content-length"] == str(len(whole.content))


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://[x"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"host": "evil.example"},
        {"host": "localhost.evil.example:8000"},
    ],
)
async def test_without_keys_foreign_pages_get_nothing(headers, file):
    """What a browser sends for a page of another site, also where its name means this machine."""
    async with serving_http() as s:
        body = {"model": "counter", "prompt": "ab", "max_tokens": 1}
        for path in ("/v1/models", "/openapi.json"):
            answer = await s.http.get(path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                403,
                "permission_denied",
            )
        assert (await s.http.post("/v1/completions", json=body, headers=headers)).status_code == 403
        assert not s.engine.calls
        s.server.access = Access(file.path)  # now who has a key may be whoever it is
        headers |= {"authorization": file.says("alice")}
        assert (await s.http.post("/v1/completions", json=body, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "none"},
        {"host": "localhost:1"},
        {"host": "[::1]:8000"},
        {"host": "127.0.0.1", "origin": "http://127.0.0.1", "sec-fetch-site": "same-origin"},
    ],
)
async def test_own_pages_and_tools_are_served(headers):
    async with serving_http() as s:
        assert (await s.http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize("allowed", ["https://chat.example", "*"])
async def test_a_page_of_an_allowed_origin_asks_and_is_answered(allowed):
    """As browsers do it: a preflight, then the request; errors can be read, too."""
    page = {"origin": "https://chat.example", "sec-fetch-site": "cross-site"}
    asks = page | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    body = {"model": "counter", "prompt": "ab", "max_tokens": 1}
    async with serving_http(allowed_origins=(allowed,)) as s:
        preflight = await s.http.options("/v1/completions", headers=asks)
        answer = await s.http.post("/v1/completions", json=body, headers=page)
        wrong = await s.http.post("/v1/completions", json={}, headers=page)
        other = await s.http.post(
            "/v1/completions", json=body, headers=page | {"origin": "https://evil.example"}
        )
    want = {"*", "https://chat.example"} if allowed == "*" else {allowed}
    exposed = {*answer.headers["access-control-expose-headers"].split(", ")}
    assert exposed == {"x-request-id", "retry-after", "retry-after-ms", "x-should-retry"}
    for one in (preflight, answer, wrong):
        assert one.headers["access-control-allow-origin"] in want
    granted = preflight.headers["access-control-allow-headers"].lower()
    assert preflight.status_code == 200
    assert "x-stainless-os" in granted
    assert (answer.status_code, wrong.status_code) == (200, 400)
    assert other.status_code == (200 if allowed == "*" else 403)
    assert ("access-control-allow-origin" in other.headers) == (allowed == "*")


async def test_where_others_reach_it_a_server_may_have_any_name():
    async with serving_http(host="0.0.0.0") as s:
        assert (await s.http.get("/v1/models", headers={"host": "llm.example"})).status_code == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_bodies_are_sent_as_json(kind):
    """Whatever else a foreign page could make a browser send without asking."""
    async with serving_http() as s:
        headers = {} if kind is None else {"content-type": kind}
        body = b'{"model":"counter","prompt":"ab"}'
        answer = await s.http.post("/v1/completions", content=body, headers=headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (415, "content-type")
        assert "it must be application/json" in error["message"]
        spelled = {"content-type": "Application/JSON; charset=utf-8"}
        body = b'{"model":"counter","prompt":"ab","max_tokens":1}'
        answer = await s.http.post("/v1/completions", content=body, headers=spelled)
        assert answer.status_code == 200


async def test_keys_are_asked_for_before_anything_else(file):
    async with serving_http() as s:
        s.server.access = Access(file.path)
        paths = ("/v1/models", "/v1/models/x", "/version", "/docsx", "/nothing")
        for path in paths:
            answer = await s.http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await s.http.get("/health")).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            await s.complete()
        s.engine.refusal = errors.Overloaded("full", 1)  # which is nothing that strangers learn
        with pytest.raises(openai.AuthenticationError):
            await s.complete()


async def test_what_a_caller_may_and_what_it_used(file):
    """Prompts of two tokens: each answer costs its prompt, too."""
    file.write(alice={"classes": ["latency_sensitive"]})
    async with serving_http() as s:
        s.server.access = access = Access(file.path)
        alice = access.caller(file.says("alice"))
        known = s.client.with_options(api_key=file.text("alice"))
        await known.completions.create(model="counter", prompt="ab", max_tokens=3)
        assert (alice.num_requests, alice.num_tokens) == (1, 2 + 3)
        await known.completions.create(model="counter", prompt="ab", max_tokens=3, n=2)
        assert (alice.num_requests, alice.num_tokens) == (3, 3 * (2 + 3))
        with pytest.raises(openai.PermissionDeniedError):
            await known.completions.create(
                model="counter", prompt="ab", extra_body={"priority": "best_effort"}
            )
        assert (alice.num_requests, alice.num_running) == (3, 0)


async def test_a_call_counts_as_often_as_it_asks_for_answers(file):
    file.write(alice={"concurrency": 3})
    async with serving_http(max_concurrent_calls=4) as s:
        s.server.access = access = Access(file.path)
        alice = access.caller(file.says("alice"))
        known = s.client.with_options(api_key=file.text("alice"))
        s.engine.gate.clear()
        two = asyncio.create_task(
            known.completions.create(model="counter", prompt="ab", max_tokens=3, n=2)
        )
        await until(lambda: s.engine.running == 2)
        assert (alice.num_running, s.server.guard.num_calls) == (2, 2)
        with pytest.raises(openai.RateLimitError, match="2 requests under way and may have 3"):
            await known.completions.create(model="counter", prompt="ab", n=2)
        with pytest.raises(openai.PermissionDeniedError, match="asks for 4 answers"):
            await known.completions.create(model="counter", prompt="ab", n=4)
        file.write(alice={"concurrency": 30})
        assert access.reload()
        charged = alice.num_requests
        with pytest.raises(openai.RateLimitError, match="max_concurrent_calls"):
            await known.completions.create(model="counter", prompt="ab", n=3)
        with pytest.raises(openai.BadRequestError, match="asks for 5 answers, and this server"):
            await known.completions.create(model="counter", prompt="ab", n=5)
        assert alice.num_requests == charged
        s.engine.gate.set()
        await two
        assert (alice.num_running, s.server.guard.num_calls) == (0, 0)


async def test_whose_key_has_no_room_is_told_before_the_body_is_there(file):
    file.write(alice={"requests_per_min": 1})
    async with serving_http() as s:
        s.server.access = Access(file.path)
        key = f"authorization: {file.says('alice')}\r\n".encode()
        body = b'{"model":"counter","prompt":"ab","max_tokens":1}'
        reader, writer = await s.raw()
        writer.write(head(key, len(body)) + body)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        reader, writer = await s.raw()
        writer.write(head(key, 1000))  # and no body
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 429 ")
        writer.close()


async def test_an_error_within_a_stream_is_an_event():
    async with serving_http() as s:
        s.engine.gate.clear()
        stream = await s.complete(stream=True, max_tokens=9)
        events = aiter(stream)
        first = await anext(events)
        s.engine.fail("it broke")
        with pytest.raises(openai.APIError, match="the engine failed: it broke") as caught:
            await anext(events)
    assert first.choices[0].text == "c"
    assert caught.value.code == "unavailable"


async def test_of_several_answers_one_that_fails_ends_them_all():
    async with serving_http() as s:
        s.engine.gate.clear()
        with pytest.raises(openai.BadRequestError, match="not in the vocabulary"):
            await s.complete([[1], [2000], [3]])
        await until(lambda: s.engine.running == 0)
        assert s.server.guard.num_calls == 0


async def test_an_overloaded_server_answers_before_the_body_is_there():
    async with serving_http() as s:
        s.engine.refusal = errors.Overloaded("the queue is full", 2.5)
        reader, writer = await s.raw()
        writer.write(head(length=1000))  # and no body
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 3\r\n" in answer


async def test_a_body_too_large_is_refused_before_it_is_read():
    async with serving_http() as s:
        most = body.max_bytes(s.engine.bounds)
        reader, writer = await s.raw()
        writer.write(head(length=most + 1))
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        # Where no length is given, once it is more than that.
        reader, writer = await s.raw()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        chunk = b"10000\r\n%b\r\n" % bytes(0x10000)
        for _ in range(most // 0x10000 + 1):
            writer.write(chunk)
        chunked = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        fits = await s.http.post("/v1/completions", content=b" " * most, headers=JSON)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert chunked.startswith(b"HTTP/1.1 413 ")
    assert fits.status_code == 400


async def test_any_request_within_bounds_fits_the_largest_body():
    """Every character escaped, as clients may, beside the largest of everything else."""
    async with serving_http() as s:
        bounds = s.engine.bounds
        fields = {
            "model": "counter",
            "prompt": "\U0001f600" * bounds.max_prompt_chars,
            "stop": ["\U0001f600" * 1024] * 64,
            "stop_token_ids": [2**31] * 1024,
            "logit_bias": {str(10**9 + i): -99.99999999999999 for i in range(1024)},
            "guided_regex": "\U0001f600" * (64 << 10),
        }
        assert len(json.dumps(fields)) < body.max_bytes(bounds)


async def test_a_body_that_does_not_come_is_408():
    async with serving_http(message_timeout_s=0.2) as s:
        reader, writer = await s.raw()
        writer.write(head(length=1000) + b"{")
        answer = await asyncio.wait_for(reader.read(), 10)  # to the end: it closes
        writer.close()
        assert s.server.guard.inbox.num_callers == 0
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"body_timeout"' in answer


async def test_ids_of_requests():
    async with serving_http() as s:
        drawn = await s.post()
        given = await s.http.get("/health", headers={"x-request-id": "mine-1"})
        both = await s.http.post(
            "/v1/completions",
            json={"model": "counter", "prompt": "ab", "max_tokens": 1, "request_id": "own"},
            headers={"x-request-id": "mine-1"},
        )
        headed = await s.http.post(
            "/v1/completions",
            json={"model": "counter", "prompt": "ab", "max_tokens": 1},
            headers={"x-request-id": "mine-2"},
        )
        bad = await s.http.get("/health", headers={"x-request-id": "a" * 129})
        calls = [call["request_id"] for call in s.engine.calls]
    assert drawn.json()["id"] == "cmpl-" + drawn.headers["x-request-id"]
    assert len(drawn.headers["x-request-id"]) == 32
    assert given.headers["x-request-id"] == "mine-1"
    assert both.headers["x-request-id"] == "own"
    assert headed.headers["x-request-id"] == "mine-2"
    assert calls == [drawn.headers["x-request-id"], "own", "mine-2"]
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "x-request-id"


async def test_calls_are_counted_in_one_pool_with_grpc():
    async with serving_http(max_concurrent_calls=2) as s:
        s.engine.gate.clear()
        over_grpc = s.counting(5)
        await anext(aiter(over_grpc))
        over_http = await s.complete(stream=True, max_tokens=5)
        assert s.server.guard.num_calls == 2
        with pytest.raises(openai.RateLimitError, match="max_concurrent_calls"):
            await s.complete()
        s.engine.gate.set()
        async for _ in over_http:
            pass
        over_grpc.cancel()
        await until(lambda: s.server.guard.num_calls == 0)


async def test_refusals_are_tallied_in_the_log(caplog):
    async with serving_http() as s:
        s.engine.refusal = errors.Overloaded("the queue is full", 1)
        for _ in range(3):
            await s.post()
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(lines) == 2  # the first at once, then the others together
    assert "POST '/v1/completions'" in lines[0]
    assert lines[1].startswith("2 calls refused")


async def test_errors_are_short_whatever_was_sent():
    async with serving_http(engine=EngineConfig(max_model_len=60_000)) as s:
        for fields in ({"model": "m" * 100_000}, {"x" * 100_000: 1}, {"stop": ["x" * 100_000] * 9}):
            answer = await s.post(**fields)
            assert answer.status_code in (400, 404)
            assert len(answer.content) < 2500
