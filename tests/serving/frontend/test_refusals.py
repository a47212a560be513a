"""What is refused, over every protocol: by which code, in which words, and when to come back.

A row is a refusal; protocols are in `protocols.py`. What only one protocol knows is in its file.
"""

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from keyed import WRONG, KeysFile
from openai_served import TEMPLATE, HttpSetup
from protocols import PROTOCOLS
from served import collect, until

from serving import errors
from serving.config import EngineConfig, ServerConfig
from serving.frontend.access import Access
from serving.frontend.openai import app as openai
from serving.request import Priority

pytestmark = pytest.mark.asyncio(loop_scope="module")

KINDS = {
    "invalid": ("INVALID_ARGUMENT", 400, "invalid_value"),
    "too long": ("INVALID_ARGUMENT", 400, "context_length_exceeded"),
    "unauthenticated": ("UNAUTHENTICATED", 401, "invalid_api_key"),
    "denied": ("PERMISSION_DENIED", 403, "permission_denied"),
    "not found": ("NOT_FOUND", 404, "model_not_found"),
    "overloaded": ("RESOURCE_EXHAUSTED", 429, "rate_limit_exceeded"),
    "failed": ("INTERNAL", 500, "request_failed"),
    "unavailable": ("UNAVAILABLE", 503, "unavailable"),
    "worker lost": ("UNAVAILABLE", 503, "worker_lost"),
    "aborted": ("CANCELLED", 503, "aborted"),
    "late": ("DEADLINE_EXCEEDED", 504, "deadline_exceeded"),
}
UNCHECKED: Any = object()


class Row(NamedTuple):
    """A refusal: its kind, its words (by protocol, where they differ), and the request.

    `before` prepares the server; `param` is the field at fault, over HTTP.
    """

    kind: str
    words: str | dict[str, str]
    asked: dict[str, Any]
    before: Any = None
    retry_ms: int | None = None  # `UNCHECKED`: some
    param: str | None = UNCHECKED
    but: tuple[str, ...] = ()  # protocols without this refusal


def raises(error: Exception):
    return lambda s: setattr(s.engine, "failure", error)


def refuses(error: Exception):
    return lambda s: setattr(s.engine, "refusal", error)


def is_(status: str):
    return lambda s: setattr(s.engine, "status", status)


def loads(s: HttpSetup) -> None:
    s.server.engine = None


def takes_no_calls(s: HttpSetup) -> None:
    s.server.guard.limits = replace(s.server.guard.limits, max_calls=0)


def raised(error: Exception, kind: str, retry_ms: int | None = None) -> Row:
    return Row(kind, "no", {}, raises(error), retry_ms)


RAISED = {
    "InvalidRequest": raised(errors.InvalidRequest("no"), "invalid"),
    "ValueError": raised(ValueError("no"), "invalid"),
    "TooLong": raised(errors.TooLong("no"), "too long"),
    "NotFound": raised(errors.NotFound("no"), "not found"),
    "Overloaded": raised(errors.Overloaded("no", 1.25), "overloaded", 1250),
    "Unavailable": raised(errors.Unavailable("no"), "unavailable"),
    "Unavailable, and started again": raised(errors.Unavailable("no", 12.0), "unavailable", 12_000),
    "WorkerLost": raised(errors.WorkerLost("no", 0.2), "worker lost", 200),
    "DeadlineExceeded": raised(errors.DeadlineExceeded("no"), "late"),
    "QueuedTooLong": raised(errors.QueuedTooLong("no"), "late"),
    "Aborted": raised(errors.Aborted("no"), "aborted"),
    "RequestFailed": raised(errors.RequestFailed("no"), "failed"),
    "RuntimeError": raised(RuntimeError("no"), "failed"),
    "a message of 100000 characters": Row(
        "invalid", "éé", {}, raises(ValueError("é" * 100_000)), None
    ),
}
KSERVE, HTTP = ("kserve", "kserve-stream"), tuple(name for name in PROTOCOLS if name[0] == "c")


def on(protocols: tuple[str, ...], words: str) -> dict[str, str]:
    return dict.fromkeys(protocols, words)


NO_PROMPT = {
    "grpc": "empty",
    **on(("completion", "completion-stream"), "each prompt must have"),
    **on(("chat", "chat-stream"), "messages is []"),
    **on(KSERVE, "the input 'text_input' is empty"),
}
LONG = {
    "grpc": "number of prompt tokens is 5000; it must be 2047",
    **on(HTTP, "5000"),
}
CHARACTERS = {
    "grpc": "characters of text is 9000",
    **on(KSERVE, "number of characters of text_input is 9000; it must be 8192"),
}
PRIORITY = {
    "grpc": "priority 7",
    **on(HTTP, "'latency_sensitive' or 'best_effort'"),
    **on(KSERVE, "'latency_sensitive' or 'best_effort', or 1 for"),
}
FULL = errors.Overloaded("512 requests wait", 0.25)
ASKED = {
    "no prompt": Row("invalid", NO_PROMPT, {"prompt": ""}),
    "5000 tokens": Row("too long", LONG, {"prompt": [1] * 5000}, param="prompt"),
    "9000 characters": Row("invalid", CHARACTERS, {"prompt": "é" * 9000}, but=HTTP),
    "max_tokens 0": Row(
        "invalid",
        {"grpc": "max_new_tokens is 0", **on(HTTP, "max_tokens is 0; it must be ")}
        | on(KSERVE, "max_tokens is 0"),
        {"max_tokens": 0}, param="max_tokens",
    ),
    "temperature -1": Row(
        "invalid", "temperature is -1.0; it must be between 0 and 100",
        {"temperature": -1}, param="temperature",
    ),
    "top_p 2": Row("invalid", "top_p is 2", {"top_p": 2}, param="top_p"),
    "top_k -2": Row("invalid", "top_k is -2", {"top_k": -2}, param="top_k"),
    "an empty stop": Row("invalid", "stop", {"stop": [""]}, param="stop"),
    "65 stops": Row(
        "invalid", {**on(("grpc", *HTTP), "stop strings is 65"), **on(KSERVE, "of stop is 65")},
        {"stop": ["x"] * 65}, param="stop",
    ),
    "a long stop": Row("invalid", "stop string is 1025", {"stop": ["x" * 1025]}, param="stop"),
    "1025 stop tokens": Row(
        "invalid", on(("grpc", *KSERVE), "stop_token_ids is 1025") | on(HTTP, "ids has 1025"),
        {"stop_token_ids": [1] * 1025}, param="stop_token_ids",
    ),
    "a long id": Row(
        "invalid",
        {"grpc": "request_id is 129", **on(HTTP, "request_id is"), **on(KSERVE, "id is 129")},
        {"request_id": "x" * 129}, param="request_id",
    ),
    "another priority": Row("invalid", PRIORITY, {"priority": "urgent"}, param="priority"),
    "an unknown parameter": Row(
        "invalid",
        on(HTTP, "'zzz' is not known; docs/http.md lists") | on(KSERVE, "'zzz' is not served"),
        {"zzz": 1}, param="zzz", but=("grpc",),
    ),
    "another model": Row("not found", "'other' is not served; 'counter' is", {"model": "other"}),
    "a long model": Row("not found", "éé'... (100000 in all)", {"model": "é" * 100_000}),
}  # fmt: skip
STATES = {
    # Nothing is looked at before: the prompt is wrong as well.
    "a full queue": Row("overloaded", "512 requests wait", {"prompt": ""}, refuses(FULL), 250),
    "too many calls": Row("overloaded", "max_concurrent_calls", {}, takes_no_calls, 1000),
    "loading": Row("unavailable", "still loading", {}, loads, 5000),
    "draining": Row("unavailable", "the engine is draining", {}, is_("draining")),
    "a failed engine": Row("unavailable", "the engine is failed", {}, is_("failed")),
}
ALICE = "jmoe_alice".ljust(48, "x")


def keys_of(**alice):
    """Makes the server ask for keys, of which one is Alice's."""

    def before(s: HttpSetup, file: KeysFile) -> None:
        file.write(alice=alice)
        s.server.access = Access(file.path)

    return before


UNDER_WAY = []  # a request ends when it is collected


def with_alices(use, **alice):
    """Makes the server ask for keys, and uses Alice's up."""

    def before(s: HttpSetup, file: KeysFile) -> None:
        keys_of(**alice)(s, file)
        caller = s.server.access.caller(file.says("alice"))
        use(caller.request("counter", Priority.LATENCY_SENSITIVE))

    return before


def made(request) -> None:
    with request:
        pass


def under_way(request) -> None:
    request.__enter__()
    UNDER_WAY.append(request)


KEYS = {
    "no key": Row("unauthenticated", "Bearer KEY", {}, keys_of()),
    "a wrong key": Row("unauthenticated", "Bearer KEY", {"key": WRONG}, keys_of()),
    "a key of another model": Row(
        "denied", "may not use model 'counter'; it may use another", {"key": ALICE},
        keys_of(models=("another",)),
    ),
    "a key of another class": Row(
        "denied",
        "it may use best_effort",
        {"key": ALICE, "priority": "latency_sensitive"},
        keys_of(classes=("best_effort",)),
    ),
    "a key past its rate": Row(
        "overloaded", "1 requests a minute", {"key": ALICE},
        with_alices(made, requests_per_min=1), UNCHECKED,
    ),
    "a key past its concurrency": Row(
        "overloaded", "1 requests under way", {"key": ALICE},
        with_alices(under_way, concurrency=1), 1000,
    ),
    "a key of metrics": Row(
        "denied", "reads metrics and does nothing else", {"key": ALICE}, keys_of(metrics=True)
    ),
}  # fmt: skip
ROWS = RAISED | ASKED | STATES | KEYS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup():
    config = ServerConfig(port=0, engine=EngineConfig(max_model_len=2048))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai, "FIRST_PORT", 0)
        async with HttpSetup(config, TEMPLATE) as setup:
            yield await setup.ready()


@pytest_asyncio.fixture(loop_scope="module")
async def s(setup):
    """Gives each row the server as it was at first, and checks that it serves afterwards."""
    engine, server = setup.engine, setup.server
    kept = server.access, server.guard.limits
    setup.engine.calls.clear()
    yield setup
    engine.refusal = engine.failure = None
    engine.status, server.engine = "ready", engine
    server.access, server.guard.limits = kept
    assert len(await collect(setup.counting(2))) == 2
    assert (engine.running, server.guard.num_calls) == (0, 0)


def counted(s: HttpSetup, protocol: str) -> dict[tuple[str, str], float]:
    found = Counter[tuple[str, str]]()
    for sample in s.server.metrics.calls.collect().samples:
        if sample.labels["protocol"] == protocol:
            found[sample.labels["route"], sample.labels["code"]] += sample.value
    return found


def cases():
    for (name, row), protocol in ((item, p) for item in ROWS.items() for p in PROTOCOLS):
        tokens = isinstance(row.asked.get("prompt"), list)
        if protocol not in row.but and (PROTOCOLS[protocol].has_tokens or not tokens):
            yield pytest.param(row, protocol, id=f"{name}-{protocol}")


@pytest.mark.parametrize(("row", "protocol"), cases())
async def test_a_refusal_is_told(row, protocol, s, file):
    way = PROTOCOLS[protocol]
    if row.before is not None:
        row.before(*((s, file) if row in KEYS.values() else (s,)))
    before = counted(s, way.counts)
    told = await way.refused(s, **row.asked)
    status, *over_http = KINDS[row.kind]
    assert told.code == (tuple(over_http) if way.counts == "http" else status)
    assert (row.words if isinstance(row.words, str) else row.words[protocol]) in told.words
    assert told.retry_ms == row.retry_ms or row.retry_ms is UNCHECKED
    if way.counts == "http" and row.param is not UNCHECKED:
        assert told.param == row.param
    assert len(told.words.encode()) <= 1000  # whatever was sent
    assert s.engine.calls == []
    code = str(over_http[0]) if way.counts == "http" else status

    def newly():
        """Returns what was refused since; the requests of a stream count one by one."""
        now = counted(s, way.counts)
        return {
            (route.removesuffix("/request"), code): now[route, code] - before.get((route, code), 0)
            for route, code in now
            if code not in ("OK", "200") and now[route, code] != before.get((route, code), 0)
        }

    await until(newly)
    assert newly() == {(way.route, code): 1}
