"""What a running server logs, with an engine whose counters a test sets."""

import asyncio
import json
import logging
import sys

import numpy as np
import pytest
from fake_engine import FakeEngine
from served import CODE, Setup, collect, failure, request, serving, until

from serving import errors
from serving.config import EngineConfig, ServerConfig
from serving.frontend import guard
from serving.frontend.metrics import Metrics
from serving.frontend.server import Server
from serving.frontend.status import log_status
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.request import BrownoutChange, Priority
from serving.telemetry import logs

LS = Priority.LATENCY_SENSITIVE

INTERVAL_S = 10.0


def events(caplog, *names: str) -> list[logging.LogRecord]:
    return [r for r in caplog.records if getattr(r, "event", None) in names]


# ---- the status line ---------------------------------------------------------------------------


@pytest.fixture
async def status(caplog):
    """Returns an idle engine, its metrics, and a status log that has just begun."""
    caplog.set_level(logging.INFO, "serving")
    engine, metrics = FakeEngine(), Metrics()
    engine.counters = {"num_running": 0, "num_waiting": 0}
    task = asyncio.create_task(log_status(engine, metrics, INTERVAL_S))
    await asyncio.sleep(INTERVAL_S / 2)
    yield engine, metrics
    task.cancel()


@pytest.mark.simulated_time
async def test_an_idle_server_logs_no_status(status, caplog) -> None:
    await asyncio.sleep(100 * INTERVAL_S)
    assert events(caplog, "status") == []


@pytest.mark.simulated_time
async def test_the_status_line_is_about_the_last_interval(status, caplog) -> None:
    engine, metrics = status
    engine.counters = {"num_running": 12, "num_waiting": 3, "kv_pages_used": 43}
    engine.counters |= {"expert_visits": 1800, "degraded_visits": 400}  # 800 and 200 before
    metrics.prefill_tokens = 3102
    metrics.first_tokens(np.full(50, 0.5), 1.0, LS, "")
    metrics.further_tokens(np.linspace(0.001, 0.2, 200), 0.19, LS, "")
    await asyncio.sleep(INTERVAL_S)
    (record,) = events(caplog, "status")
    assert record.getMessage() == (
        "12 running, 3 waiting; prompt 310.2 tokens/s, output 25.0 tokens/s; KV cache 43.0%; "
        "threshold prefill 100%, decode 62%; late prefill 0.0%, decode 5.0%; degraded 20.0%"
    )
    assert (record.output_tokens_per_s, record.decode_late_share) == (25.0, 0.05)
    await asyncio.sleep(INTERVAL_S)  # running still, and nothing came
    assert "output 0.0 tokens/s" in events(caplog, "status")[-1].getMessage()
    assert "late prefill -, decode -; degraded -" in events(caplog, "status")[-1].getMessage()


@pytest.mark.simulated_time
async def test_the_status_line_says_how_fast_the_machine_is(status, caplog) -> None:
    engine, _ = status
    said = []
    for step_s in (0.010, 0.020):
        engine.pace.times.num_observed = 1000
        engine.counters = {"num_running": 1, "full_decode_step_s": step_s}
        await asyncio.sleep(INTERVAL_S)
        said.append(events(caplog, "status")[-1])
    assert [record.machine_speed for record in said] == [1.0, 0.5]
    assert said[-1].getMessage().endswith("; machine speed 0.50")


@pytest.mark.simulated_time
async def test_a_change_is_told_once_without_work(status, caplog) -> None:
    engine, _ = status
    await engine.set_brownout(BrownoutChange(decode_threshold_percent=40))
    await asyncio.sleep(5 * INTERVAL_S)
    assert len(events(caplog, "status")) == 1
    engine.counters |= {"requests_finished": 1}
    await asyncio.sleep(5 * INTERVAL_S)
    assert len(events(caplog, "status")) == 2


@pytest.mark.parametrize(("interval_s", "metrics"), [(0.0, Metrics()), (10.0, None)])
async def test_the_status_line_can_be_off(interval_s: float, metrics: Metrics | None) -> None:
    server = Server(ServerConfig(port=0, status_interval_s=interval_s), metrics)
    await server.start()
    await server.attach(FakeEngine())
    assert "jmoe-status" not in {task.get_name() for task in asyncio.all_tasks()}
    await server.stop()


async def test_a_server_with_metrics_logs_its_status(caplog) -> None:
    caplog.set_level(logging.INFO, "serving")
    server = Server(ServerConfig(port=0, status_interval_s=0.01), Metrics())
    await server.start()
    await server.attach(FakeEngine())  # three requests wait
    await until(lambda: events(caplog, "status"))
    await server.stop()


# ---- operators ---------------------------------------------------------------------------------


async def test_a_change_of_brownout_says_what_and_by_whom(caplog) -> None:
    caplog.set_level(logging.INFO, "serving")
    async with serving() as s:
        await s.admin.SetBrownout(
            pb.SetBrownoutRequest(strategy="full", decode_threshold_percent=40)
        )
        await s.admin.SetBrownout(pb.SetBrownoutRequest(strategy="full"))
        await failure(s.admin.SetBrownout(pb.SetBrownoutRequest(way=3)))
    first, second = events(caplog, "brownout_set")
    assert first.peer.startswith("ipv4:127.0.0.1:")
    assert first.getMessage() == (
        f"brownout set by {first.peer}: strategy from 'partial' to 'full', "
        "decode_threshold_percent from 62.5 to 40, salc_enabled from on to off"
    )
    assert first.before == {
        "strategy": "partial",
        "decode_threshold_percent": 62.5,
        "salc_enabled": True,
    }
    assert second.getMessage().endswith(": nothing changed")
    assert events(caplog, "way_begun", "way_loaded", "way_left") == []


async def test_a_change_of_way_is_told_when_it_begins_and_when_it_is_done(caplog) -> None:
    caplog.set_level(logging.INFO, "serving")
    async with serving() as s:
        s.engine.way_gate.clear()
        call = s.admin.SetBrownout(pb.SetBrownoutRequest(way=2))
        await until(lambda: events(caplog, "way_begun"))
        assert events(caplog, "way_loaded") == []
        s.engine.way_gate.set()
        await call
    (begun,), (loaded,) = events(caplog, "way_begun"), events(caplog, "way_loaded")
    assert begun.getMessage() == f"loading way 2 in place of way 8, for {begun.peer}"
    assert (loaded.way, loaded.way_before, loaded.peer) == (2, 8, begun.peer)
    assert len(events(caplog, "brownout_set")) == 1


async def test_a_caller_that_leaves_a_change_of_way_is_told_of(caplog) -> None:
    caplog.set_level(logging.INFO, "serving")
    async with serving() as s:
        s.engine.way_gate.clear()
        call = s.admin.SetBrownout(pb.SetBrownoutRequest(way=2))
        await until(lambda: events(caplog, "way_begun"))
        call.cancel()
        await until(lambda: events(caplog, "way_left"))


# ---- requests ----------------------------------------------------------------------------------


async def test_each_request_is_a_line_at_debug(caplog) -> None:
    caplog.set_level(logging.DEBUG, "serving")
    async with serving() as s:
        await collect(s.counting(4, request_id="mine"))
        s.engine.gate.clear()
        call = s.counting(9, request_id="gone")
        await anext(aiter(call))
        call.cancel()
        await until(lambda: len(events(caplog, "request")) == 2)
        s.engine.failure = errors.RequestFailed("no luck")
        await failure(s.counting(2, request_id="failed"))
    done, gone, failed = events(caplog, "request")
    assert (done.request_id, done.prompt_tokens, done.output_tokens) == ("mine", 3, 4)
    assert (done.finish_reason, done.degraded_share) == ("length", 6 / 48)
    assert 0 < done.ttft_s <= done.e2e_s
    assert (gone.request_id, gone.output_tokens, gone.finish_reason) == ("gone", 1, "abort")
    assert (failed.request_id, failed.prompt_tokens) == ("failed", None)
    assert failed.finish_reason == "RequestFailed"


async def test_requests_are_no_lines_otherwise(caplog) -> None:
    caplog.set_level(logging.INFO, "serving")
    async with serving() as s:
        await collect(s.counting(4))
    assert events(caplog, "request") == []


# ---- refusals and callers' errors --------------------------------------------------------------


async def test_refusals_are_one_line_and_then_a_count(caplog) -> None:
    async with serving() as s:
        s.engine.refusal = errors.Overloaded("512 requests\nwait already", 1.0)
        for _ in range(72):
            assert (await failure(s.counting(1))).code() == CODE.RESOURCE_EXHAUSTED
    first, rest = events(caplog, "calls_refused")
    assert first.getMessage().startswith("1 call refused; the last one, /jmoe.v1.Generation/")
    assert first.getMessage().endswith(": 512 requests wait already")
    assert (rest.count, " in " in rest.getMessage()) == (71, True)
    assert {r.levelname for r in (first, rest)} == {"WARNING"}


@pytest.mark.simulated_time
async def test_a_count_comes_every_ten_seconds(caplog) -> None:
    tally = guard.Tally("refused")
    for _ in range(100):
        tally.note("why")
        await asyncio.sleep(1.0)
    tally.close()
    counts = [r.getMessage() for r in caplog.records]
    assert counts[:2] == ["1 call refused; why", "9 calls refused in 10 s; why"]
    assert set(counts[2:-1]) == {"10 calls refused in 10 s; why"}
    assert sum(r.count for r in caplog.records) == 100


@pytest.mark.parametrize(
    ("raised", "event"),
    [
        (errors.InvalidRequest("no"), "calls_invalid"),
        (errors.NotFound("no"), "calls_invalid"),
        (errors.Unavailable("no"), "calls_refused"),
        (errors.DeadlineExceeded("no"), "calls_expired"),
        (errors.RequestFailed("no"), "calls_failed"),
        (RuntimeError("no"), "calls_failed"),
        (errors.Aborted("no"), None),
    ],
)
async def test_each_error_counts_under_its_kind(raised, event, caplog) -> None:
    async with serving() as s:
        s.engine.failure = raised
        await failure(s.stub.Generate(request([1])))
    assert [r.event for r in caplog.records if r.levelno >= logging.WARNING] == [event] * bool(
        event
    )


# ---- how lines look ----------------------------------------------------------------------------


def test_json_is_one_object_a_line_with_fields_and_traceback() -> None:
    try:
        raise ValueError("no\nluck")
    except ValueError:
        error = sys.exc_info()
    fields = {"event": "e", "share": float("nan"), "ways": (2, 8), "kind": CODE.OK}
    record = logging.LogRecord("serving.x", logging.WARNING, "f.py", 1, "é %s\n", ("a",), error)
    vars(record).update(fields)
    line = logs.JsonFormatter().format(record)
    assert "\n" not in line

    def refuse(name: str):
        raise AssertionError(f"{name} is no JSON")

    got = json.loads(line, parse_constant=refuse)
    assert (got["level"], got["logger"], got["message"]) == ("WARNING", "serving.x", "é a\n")
    assert (got["event"], got["share"], got["ways"]) == ("e", None, [2, 8])
    assert got["exception"].endswith("ValueError: no\nluck")
    assert got["time"].endswith("+00:00")
    assert "args" not in got


def test_the_format_can_change_and_foreign_handlers_are_left_alone(monkeypatch, capsys) -> None:
    root = logging.getLogger()
    foreign = logging.NullHandler()
    monkeypatch.setattr(root, "handlers", [foreign])
    logs.configure("json")
    assert (root.handlers, logs.is_json()) == ([foreign], False)
    monkeypatch.setattr(root, "handlers", [])
    logs.configure("text")
    logs.say("loading: 1 of 2")
    logs.configure("json", verbose=True)
    logs.say("loading: 2 of 2")
    first, second = capsys.readouterr().err.splitlines()
    assert first == "loading: 1 of 2"
    assert json.loads(second)["message"] == "loading: 2 of 2"
    assert len(root.handlers) == 1
    assert logging.getLogger("serving").level == logging.DEBUG
    logs.configure("text")


# ---- names -------------------------------------------------------------------------------------


async def test_a_model_keeps_its_name_while_it_is_loaded(tmp_path) -> None:
    for path, name in ((f"{tmp_path}/", tmp_path.name), ("bundled", "bundled")):
        server = Server(ServerConfig(port=0, engine=EngineConfig(model=path)))
        assert list(server.model_names) == [name]
    async with Setup(ServerConfig(port=0, served_model_name="mine")) as s:
        names = [(await s.stub.GetServerInfo(pb.GetServerInfoRequest())).model]
        await s.ready()
        names.append((await s.stub.GetServerInfo(pb.GetServerInfoRequest())).model)
        names.append((await s.stub.GetModelInfo(pb.GetModelInfoRequest())).name)
        assert names == ["mine"] * 3
        assert len(await collect(s.counting(1, model="mine"))) == 1
        error = await failure(s.counting(1, model="counter"))
    assert (error.code(), error.details()) == (
        CODE.NOT_FOUND,
        "model 'counter' is not served; 'mine' is",
    )
