"""The live page over a real socket, with an engine that counts up."""

import asyncio
import base64
import contextlib
import json
import logging
import re
import shlex
import socket
import subprocess
import time
from contextvars import Context
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace

import httpx2
import numpy as np
import pytest
from fake_engine import FakeEngine
from openai_served import NO_CERTIFICATES
from served import Setup, serving, until

from serving.bench.simulated_time import SimulatedLoop
from serving.config import BrownoutConfig, EngineConfig, ServerConfig
from serving.errors import PermissionDenied, Unauthenticated, Unavailable
from serving.execution.executor import WorkerSeen
from serving.frontend.access import Caller, current
from serving.frontend.keys import Key
from serving.frontend.metrics import Metrics
from serving.frontend.page import live as live_module
from serving.frontend.page.app import STATIC
from serving.frontend.page.live import (
    HISTORY,
    MAX_VIEWERS,
    Counted,
    ExpertLoad,
    Live,
    Sampler,
    Who,
)
from serving.frontend.page.shield import POLICY
from serving.request import AuditState, ModelBrownout, Output, Priority, Usage

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT


def base(s: Setup) -> str:
    return f"http://{s.page.address}"


def client(s: Setup, **options) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=base(s), timeout=30, verify=NO_CERTIFICATES, **options)


async def set_brownout(s: Setup, body: object, **headers):
    async with client(s) as http:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | headers
        return await http.post("/api/brownout", content=content, headers=headers)


@contextlib.asynccontextmanager
async def watching(s: Setup, **options):
    """Yields the parsed lines of a stream."""
    async with client(s) as http, http.stream("GET", "/api/stream", **options) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = answer.aiter_lines()

        async def read():
            return json.loads(await anext(lines))

        yield read


class Keys:
    """Two keys, one of them an admin's."""

    def __init__(self) -> None:
        self.callers = {"Bearer root": Caller("ops"), "Bearer user": Caller("u", Key(""))}

    def caller(self, authorization):
        if authorization not in self.callers:
            raise Unauthenticated("there is no such key; send one")
        return self.callers[authorization]


# ---- the shell --------------------------------------------------------------------------------


async def test_the_shell_needs_no_key_and_names_nothing_foreign() -> None:
    async with serving() as s, client(s) as http:
        s.server.access = Keys()
        for path in ("/", *(f"/{file.name}" for file in STATIC.iterdir())):
            got = await http.get(path)
            assert got.status_code == 200, path
            assert got.headers["content-security-policy"] == POLICY
            assert got.headers["x-content-type-options"] == "nosniff"
            assert got.headers["cache-control"] == "no-cache"
        assert (await http.get("/")).headers["content-type"].startswith("text/html")


def test_nothing_of_the_shell_is_inline_or_foreign() -> None:
    files = {file.name: file.read_text() for file in STATIC.iterdir()}
    html = files["index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
    for used in re.findall(r'(?:src|href)="([^"#]+)"', html):
        assert used in files, used
    for name, text in files.items():
        for url in re.findall(r"https?://[^\s\"'`)]+", text):
            assert url == "http://www.w3.org/2000/svg", f"{name}: {url}"  # a name, not an address


async def test_what_is_not_there_is_said() -> None:
    async with serving() as s, client(s) as http:
        for path in ("/nothing.js", "/api/nothing", "/../app.py", "/%2e%2e/app.py"):
            got = await http.get(path)
            assert (got.status_code, "error" in got.json()) == (404, True), path


# ---- who asks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200),
        ("LOCALHOST.", 200),
        ("127.0.0.1", 200),
        ("127.8.9.10:80", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("evil.example:80", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("192.0.2.7", 403),
        ("", 403),
        ("[", 403),
    ],
)
async def test_only_own_hosts_are_answered(host: str, status: int) -> None:
    async with serving() as s, client(s) as http:
        for path in ("/", "/api/state"):
            got = await http.get(path, headers={"host": host})
            assert got.status_code == status, path
            assert "content-security-policy" in got.headers
        if status == 403:
            assert "not this server" in got.json()["error"]


async def test_on_all_addresses_any_of_them_and_the_machines_name_will_do() -> None:
    async with serving(admin_host="0.0.0.0") as s:
        url = f"http://127.0.0.1:{s.page.port}/api/state"
        async with httpx2.AsyncClient() as http:
            found = [
                (await http.get(url, headers={"host": host})).status_code
                for host in ("192.0.2.7:8080", socket.gethostname(), "evil.example")
            ]
    assert found == [200, 200, 403]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_a_foreign_page_neither_reads_nor_changes(headers: dict) -> None:
    async with serving() as s, client(s) as http:
        for path in ("/api/state", "/api/stream"):
            assert (await http.get(path, headers=headers)).status_code == 403
        got = await set_brownout(s, {"strategy": "full"}, **headers)
        assert got.status_code == 403
        assert "may not ask" in got.json()["error"]
        assert s.engine.brownout.strategy == "partial"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_what_a_form_can_send_changes_nothing(kind: str) -> None:
    async with serving() as s:
        got = await set_brownout(s, {"strategy": "full"}, **{"content-type": kind})
        assert (got.status_code, s.engine.brownout.strategy) == (403, "partial")
        own = {"origin": base(s), "sec-fetch-site": "same-origin"}
        assert (await set_brownout(s, {"strategy": "full"}, **own)).status_code == 200
        assert s.engine.brownout.strategy == "full"


async def test_data_and_controls_are_for_admin_keys() -> None:
    async with serving() as s, client(s) as http:
        s.server.access = Keys()
        for path in ("/api/state", "/api/stream"):
            for key, status in ((None, 401), ("Bearer no", 401), ("Bearer user", 403)):
                got = await http.get(path, headers={"authorization": key} if key else {})
                assert got.status_code == status
                assert ("www-authenticate" in got.headers) == (status == 401)
        assert (await set_brownout(s, {"way": 2})).status_code == 401
        assert (await set_brownout(s, {"way": 2}, authorization="Bearer user")).status_code == 403
        assert s.engine.brownout.way == 8
        assert (await set_brownout(s, {"way": 2}, authorization="Bearer root")).status_code == 200
        assert s.engine.brownout.way == 2
        async with watching(s, headers={"authorization": "Bearer root"}) as read:
            assert (await read())["now"]["brownout"]["way"] == 2


async def test_a_key_that_is_withdrawn_ends_its_stream(monkeypatch) -> None:
    monkeypatch.setattr(live_module, "RECHECK_EVERY", 1)
    async with serving() as s:
        s.server.access = keys = Keys()
        async with watching(s, headers={"authorization": "Bearer root"}) as read:
            await read()
            del keys.callers["Bearer root"]
            s.page.live.tick()
            with pytest.raises(StopAsyncIteration):
                await read()
        await until(lambda: s.page.live.num_viewers == 0)


# ---- what it shows ----------------------------------------------------------------------------


async def test_while_it_loads_it_says_so_and_then_shows_what_is_served() -> None:
    async with Setup(ServerConfig(port=0, served_model_name="mine")) as s:
        async with watching(s) as read:
            first = await read()
            assert first["now"] == {
                "status": "starting",
                "failure": "",
                "brownout": None,
                "models": [],
                "workers": [],
                "audits": [],
                "uptime_s": None,
                "events": [],
                "oldest": [],
                "who": [],
            }
            assert first["about"]["models"] == ["mine"]
            await s.ready()
            s.page.live.tick()
            while (line := await read())["now"]["status"] == "starting":
                pass
            assert line["about"]["ways"] == [2, 8]  # told once there is something to choose from
            assert {"algorithm2", "predictive"} <= set(line["about"]["controllers"])
            assert line["now"]["brownout"]["decode_threshold_percent"] == 62.5
            assert line["samples"][-1]["ttft_slo_s"] == 1.0
        refused = await set_brownout(s, {"way": 2})
        assert refused.status_code == 200


@pytest.mark.parametrize(("strategy", "own"), [("partial", ""), ("own.py:Mine", "own.py:Mine")])
async def test_a_strategy_of_a_users_own_is_one_to_choose(strategy, own) -> None:
    config = EngineConfig(brownout=BrownoutConfig(strategy=strategy))
    async with serving(engine=config) as s, watching(s) as read:
        assert (await read())["about"]["own_strategy"] == own


async def test_a_change_before_the_model_is_loaded_is_refused() -> None:
    async with Setup(ServerConfig(port=0)) as s:
        got = await set_brownout(s, {"way": 2})
    assert (got.status_code, "still loading" in got.json()["error"]) == (503, True)


async def test_a_failed_engine_says_why() -> None:
    async with serving(exit_on_failure=False) as s:
        s.engine.fail("a step took too long")
        await s.server.failed()
        s.page.live.tick()
        async with client(s) as http:
            now = (await http.get("/api/state")).json()["now"]
    assert (now["status"], now["failure"]) == ("failed", "a step took too long")


async def test_a_server_that_refuses_is_overloaded() -> None:
    async with serving() as s:
        said = "overloaded: brownout is exhausted, refusing 3/s"
        s.engine.brownout = replace(s.engine.brownout, objective_state=said)
        async with client(s) as http:
            now = (await http.get("/api/state")).json()["now"]
    assert (now["status"], now["brownout"]["objective_state"]) == ("overloaded", said)


async def test_a_sample_is_what_was_counted_since_the_last_one() -> None:
    async with serving() as s:
        engine, metrics = s.engine, s.server.metrics
        clock, wall = iter([10.0, 12.0]), iter([1000.0, 1002.0])
        sampler = Sampler(s.server, lambda: next(clock), lambda: next(wall))
        engine.counters = {"expert_visits": 800, "degraded_visits": 200, "requests_finished": 7}
        before = sampler.take()
        assert before.time_s == 1000.0
        assert np.isnan([before.requests_per_s, before.degraded_share]).all()
        metrics.first_tokens(np.array([0.1, 0.2, 0.3]), 1.0, LS, "")
        metrics.prefill_tokens += 500
        ends = np.linspace(0.01, 0.10, 10)
        engine.slo.ls.decode.window.add(11.0, 11.5, ends)
        engine.counters = {
            "expert_visits": 1000,
            "degraded_visits": 250,
            "requests_finished": 9,
            "requests_rejected": 9,  # 2 before
            "num_running": 4,  # 0 before; one is an audit
            "kv_pages_used": 40,
            "priced_tokens": 4,
            "expected_loss_nats": 0.5,
        }
        engine.brownout = replace(engine.brownout, max_expected_loss=0.25)
        engine.scheduler.running = [
            SimpleNamespace(request=SimpleNamespace(priority=p, model=0, is_audit=is_audit))
            for p, is_audit in ((LS, False), (BE, False), (BE, False), (BE, True))
        ]
        got = sampler.take()
    assert (got.requests_per_s, got.refused_per_s) == ((2 + 7 + 3) / 2, 7 / 2)
    assert (got.prompt_tokens_per_s, got.output_tokens_per_s) == (250.0, 1.5)
    assert got.degraded_share == 0.25
    assert (got.expected_loss, got.max_expected_loss) == (0.125, 0.25)
    assert (got.running_ls, got.running_be, got.waiting_ls, got.waiting_be) == (1, 3, 3, 0)
    assert got.itl_p90_s == pytest.approx(0.091)  # between the 9th and 10th of ten
    assert got.itl_late_share == 0.0  # 100 ms are not above 100 ms
    assert np.isnan(got.ttft_p90_s)
    assert (got.kv_pages_used, got.kv_pages_total) == (40, 100)


def test_without_visits_no_share_is_degraded() -> None:
    zero = Counted(0.0, 0, 0, 0, 0, 0, 0)
    assert zero._replace(at_s=1.0, visits=4, degraded=3).rates_since(zero)["degraded_share"] == 0.75
    assert np.isnan(zero._replace(at_s=1.0).rates_since(zero)["degraded_share"])
    assert zero.rates_since(zero) == {}


def running_request(model: str, number: int = 0, **fields) -> SimpleNamespace:
    """Returns what the page reads of a request that has been running for `number` seconds."""
    request = SimpleNamespace(
        priority=LS,
        model=0,
        model_name=model,
        key="alice",
        request_id=f"r{number}",
        is_audit=False,
    )
    return SimpleNamespace(
        request=request,
        arrived_at=time.monotonic() - number,
        prompt=[1] * 5,
        tokens=[1] * number,
        **{"degraded_visits": 3, "visited_tokens": 2, "visits_per_token": 6, **fields},
    )


async def test_the_ten_oldest_requests_are_shown() -> None:
    async with serving() as s:
        s.engine.scheduler.running = [running_request("counter", n) for n in range(1, 13)]
        s.engine.scheduler.running[11].request.is_audit = True  # the engine's own
        async with client(s) as http:
            oldest = (await http.get("/api/state")).json()["now"]["oldest"]
    assert [one["id"] for one in oldest] == [f"r{n}" for n in range(11, 1, -1)]
    assert oldest[0]["age_s"] == pytest.approx(11, abs=1)
    del oldest[0]["age_s"]
    assert oldest[0] == {
        "id": "r11",
        "key": "alice",
        "model": "counter",
        "class": "latency_sensitive",
        "prompt_tokens": 5,
        "output_tokens": 11,
        "degraded_share": 0.25,
    }


async def test_who_was_late_degraded_or_refused_lately() -> None:
    """By key and model, of the last five minutes; a call that was refused unread names no model."""
    async with serving() as s:
        metrics, at = s.server.metrics, [1000.0]
        who = Who(s.server, lambda: at[0])
        s.engine.brownout = replace(s.engine.brownout, ttft_slo_s=1.0, itl_slo_s=0.1)

        def finish(key, first_s, last_s, degraded):
            one = running_request("counter", 0)
            one.request.key, one.arrived_at, one.began_at = key, 0.0, 0.0
            one.first_at = first_s
            output = Output("r", "", (1,), (), Usage(7, 3, 40, degraded), "stop")
            metrics.request_finished(one, output, last_s)

        finish("old", 5.0, 5.1, 40)
        who.look()
        at[0] += 400
        finish("alice", 0.5, 0.7, 0)  # in time: two further tokens in 0.2 s
        finish("alice", 0.5, 0.71, 10)  # 105 ms a token
        finish("bob", 1.1, 1.2, 40)
        who.look()
        at[0] += 100
        ended = metrics.calls.door("http", ["/v1/completions"], "500")
        caller = Caller("bob")
        for _ in range(3):
            Context().run(lambda: (current.set(caller), ended("/v1/completions", 429)))
        found = who.look()
    alice, refused, bob = (
        {"key": "alice", "model": "counter", "requests": 2, "refused": 0},
        {"key": "bob", "model": "", "requests": 0, "refused": 3},
        {"key": "bob", "model": "counter", "requests": 1, "refused": 0},
    )
    assert found[0] | {"late_share": None, "degraded_share": None} == refused | dict.fromkeys(
        ("late_share", "degraded_share")
    )
    assert found[1:] == [
        alice | {"late_share": 0.5, "degraded_share": 10 / 80},
        bob | {"late_share": 1.0, "degraded_share": 1.0},
    ]


async def test_what_happened_is_told_with_who_did_it() -> None:
    async with serving() as s:
        live, engine = s.page.live, s.engine
        s.server.access = Keys()
        await set_brownout(s, {"strategy": "full"}, authorization="Bearer root")
        workers = [WorkerSeen("expert 0", True, 3, 0, 0.0)]
        engine.executor.seen = lambda: workers
        engine.executor.record, engine.executor.unreachable = lambda: None, ""
        engine.executor.retry_after_s = 1.0
        live.tick()
        for refused, evicted in ((4, 5), (7, 5)):  # one event that goes on
            engine.counters["requests_rejected"] = refused
            engine.scheduler.num_evictions[BE] = evicted
            live.tick()
        workers[0] = workers[0]._replace(is_up=False)
        live.tick()
        workers[0] = workers[0]._replace(is_up=True)
        live.tick()
        async with client(s) as http:
            answer = await http.get("/api/state", headers={"authorization": "Bearer root"})
            events = answer.json()["now"]["events"]
    texts = [(one["kind"], one["text"]) for one in events]
    kind, text = texts.pop(0)
    assert kind == "settings"
    assert re.fullmatch(r"ops at http:127\.0\.0\.1:\d+: strategy from 'partial' to 'full'", text)
    assert texts == [
        ("refused", "5 refused for load"),  # 2 before
        ("evicted", "1 evicted, to be run again"),  # 4 before
        ("workers", "expert 0 is lost"),
        ("workers", "expert 0 is there again"),
    ]
    assert all(one["until_s"] >= one["time_s"] for one in events)


async def test_what_if_answers_and_changes_nothing() -> None:
    async with serving() as s:
        before = s.engine.brownout
        async with client(s) as http:
            change = {"decode_threshold_percent": 40}
            found = (await http.post("/api/whatif", json=change)).json()
            refused = await http.post("/api/whatif", json={"decode_threshold_percent": 101})
            unknown = await http.post("/api/whatif", json={"zzz": 1})
            s.server.access = Keys()
            denied = await http.post("/api/whatif", json=change)
    assert list(found) == ["prefill", "decode"]
    assert found["decode"]["threshold_percent"] == 40
    assert found["decode"]["is_kept"] is True
    assert (refused.status_code, refused.json()["field"]) == (400, "decode_threshold_percent")
    assert (unknown.status_code, denied.status_code) == (400, 401)
    assert s.engine.brownout == before


async def test_models_of_a_family_and_workers_are_shown() -> None:
    async with serving() as s:
        engine, metrics = s.engine, s.server.metrics
        engine.names, engine.scheduler.models = ("a", "b"), {1}
        own = ModelBrownout("b", itl_slo_s=0.5, floor_percent=40)
        engine.brownout = replace(engine.brownout, models=(own,))
        of_b = running_request("b")
        engine.scheduler.running, engine.scheduler.waiting = [of_b], [of_b, of_b]
        metrics.by_model.finished["a"] += 4
        worker = {"name": "expert 0", "is_up": False, "stages": 3, "rows": 2, "oldest_s": 0.5}
        engine.executor.seen = lambda: [WorkerSeen(**worker)]
        engine.executor.record, engine.executor.unreachable = lambda: None, ""
        engine.executor.retry_after_s = 1.0
        s.page.live.tick()
        async with client(s) as http:
            now = (await http.get("/api/state")).json()["now"]
    assert now["models"] == [
        {"resident": False, "running": 0, "waiting": 0, "finished": 4, **vars(ModelBrownout("a"))},
        {"resident": True, "running": 1, "waiting": 2, "finished": 0, **vars(own)},
    ]
    assert now["workers"] == [worker]


async def test_what_brownout_costs_is_shown_once_an_answer_was_scored() -> None:
    one = AuditState("counter", 1, 0, 0.25, -inf, inf, nan, nan, nan, True)
    none = AuditState("other", 0, 3, nan, nan, nan, nan, nan, nan, False)
    async with serving() as s:
        s.engine.counters["audits"] = (one, none)
        s.page.live.tick()
        async with client(s) as http:
            [shown] = (await http.get("/api/state")).json()["now"]["audits"]
    assert (shown["model"], shown["excess_nats"], shown["is_exempt"]) == ("counter", 0.25, True)
    assert (shown["excess_low_nats"], shown["disagreement"]) == (None, None)


def test_expert_load_is_a_byte_for_each_expert() -> None:
    clock = iter([0.0, 4.0, 8.0])
    load, rows = ExpertLoad(lambda: next(clock)), np.zeros((2, 3), np.int64)
    assert load.look(None, 2) is None
    assert load.look(rows, 2) is None
    rows = np.array([[0, 1, 100], [400, 25, 4]])
    got = load.look(rows, 2)
    assert got is not None
    assert (got["layers"], got["experts"], got["routed"], got["most_rows_per_s"]) == (2, 3, 2, 100)
    levels = np.frombuffer(base64.b64decode(got["load"]), np.uint8).reshape(2, 3)
    assert levels.tolist() == [[0, 13, 128], [255, 64, 26]]  # 255 * sqrt(n / 400), up
    idle = load.look(rows, 2)
    assert idle is not None
    assert set(base64.b64decode(idle["load"])) == {0}


async def test_expert_load_comes_when_it_is_new() -> None:
    async with serving() as s:
        metrics, live = s.server.metrics, s.page.live
        rows = np.ones((2, 17), np.int64)
        for count in (1, 2):  # each is looked at once, four samples long
            metrics.expert_rows = count * rows
            for _ in range(4):
                live.tick()
        async with watching(s) as read:
            first = await read()
            assert first["experts"]["routed"] == 16
            metrics.expert_rows = 3 * rows
            lines = []
            for _ in range(8):
                live.tick()
                lines.append(await read())
    assert [line["samples"] != [] for line in lines] == [True] * 8
    assert sum("experts" in line for line in lines) == 2


async def test_history_is_there_for_who_comes_later_and_bounded() -> None:
    async with serving() as s:
        live = s.page.live
        for _ in range(HISTORY + 50):
            live.tick()
        async with watching(s) as read:
            first = await read()
            assert len(first["samples"]) == HISTORY
            times = [sample["time_s"] for sample in first["samples"]]
            assert times == sorted(times)
            live.tick()
            second = await read()
            assert len(second["samples"]) <= 2  # one of the clock may have come between
            assert second["samples"][0]["time_s"] > times[-1]
            assert "about" not in second


async def test_models_that_come_and_go_are_told_to_open_pages() -> None:
    async with serving() as s, watching(s) as read:
        assert (await read())["about"]["models"] == ["counter"]
        for names in (["counter", "b"], ["counter", ""]):  # "": where one was
            s.engine.names = names
            s.page.live.tick()
            async with asyncio.timeout(10):
                while "about" not in (line := await read()):
                    pass
            assert line["about"]["models"] == [name for name in names if name]


async def test_a_sample_comes_each_second_by_itself() -> None:
    async with serving() as s, watching(s) as read:
        await read()
        times = [(await read())["samples"][-1]["time_s"] for _ in range(2)]
    assert np.diff(times) == pytest.approx([1.0], abs=0.5)


def test_after_a_late_sample_the_next_one_is_no_sooner_than_half_an_interval(monkeypatch) -> None:
    """Rates over a millisecond would be a thousand times what they are."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        loop, times = runner.get_loop(), []
        live = Live(SimpleNamespace(), loop.time)
        monkeypatch.setattr(live, "tick", lambda: times.append(loop.now))

        def hold(loop, until_s) -> None:
            loop.now = until_s

        async def run() -> None:
            loop.call_at(2.5, hold, loop, 3.999)
            loop.call_at(5.5, hold, loop, 6.25)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(9.5):
                    await live.run()

        runner.run(run())
    assert times == pytest.approx([0, 1, 2, 3.999, 5, 6.25, 7, 8, 9])


async def test_a_sample_that_fails_is_logged_and_the_next_one_comes(caplog, monkeypatch) -> None:
    monkeypatch.setattr(live_module, "INTERVAL_S", 0.01)
    async with serving() as s:
        live = s.page.live
        fine, s.engine.slo = s.engine.slo, None
        await until(lambda: live._num_faults >= 3)
        s.engine.slo = fine
        count = live.count
        await until(lambda: live.count > count)
    messages = [r.getMessage() for r in caplog.records if "sample failed" in r.getMessage()]
    assert [re.findall(r"\d+", m)[0] for m in messages][:2] == ["1", "2"]


# ---- viewers ----------------------------------------------------------------------------------


async def test_a_viewer_who_leaves_gives_the_place_back(monkeypatch) -> None:
    monkeypatch.setattr(live_module, "INTERVAL_S", 0.1)
    async with serving() as s:
        for _ in range(3):
            async with watching(s) as read:
                await read()
                assert s.page.live.num_viewers == 1
            await until(lambda: s.page.live.num_viewers == 0)


async def test_one_page_too_many_is_told() -> None:
    async with serving() as s, contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_VIEWERS):
            read = await stack.enter_async_context(watching(s))
            await read()
        async with client(s) as http:
            got = await http.get("/api/stream")
            assert (got.status_code, got.headers["retry-after"]) == (503, "5")
            assert "close one" in got.json()["error"]
            assert (await http.get("/api/state")).status_code == 200


async def test_a_slow_reader_holds_up_nobody_and_misses_what_is_too_old() -> None:
    ticks = 1500
    async with serving() as s:
        live = s.page.live
        s.server.failure = "x" * 20_000  # 30 MB in all: more than sockets hold
        asked = b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", s.page.port, limit=65536)
        writer.write(asked)
        await reader.readline()  # and nothing after that
        async with watching(s) as read:
            got = len((await read())["samples"])
            before = live.count
            for _ in range(ticks):
                live.tick()
                got += len((await read())["samples"])
            assert got >= ticks  # nothing is missed by who reads
            assert live.num_viewers == 2
        newest = json.loads(live.state())["samples"][-1]["time_s"]
        rest, count = b"", 0
        async with asyncio.timeout(60):
            while f'"time_s":{newest!r}'.encode() not in rest:
                rest = rest[-100:] + await reader.read(1 << 20)
                count += rest.count(b'"time_s"', 100)
        assert count < live.count - before
        writer.close()
        await until(lambda: live.num_viewers == 0)


async def test_streams_end_with_the_server() -> None:
    s = Setup(ServerConfig(port=0))
    async with s:
        await s.ready()
        async with watching(s) as read:
            await read()
            stopping = asyncio.create_task(s.server.stop())
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    await read()
            await stopping
        assert s.page.live.num_viewers == 0


async def test_without_the_page_nothing_is_sampled() -> None:
    async with serving(admin_http_port=-1) as s:
        assert "page" not in s.server.front_ends
        assert not [t for t in s.server._tasks if t.get_name() == "jmoe-live"]


# ---- controls ---------------------------------------------------------------------------------


async def test_a_change_is_made_and_logged_as_over_grpc(caplog) -> None:
    caplog.set_level(logging.INFO)
    async with serving() as s:
        s.server.access = Keys()
        change = {"strategy": "full", "decode_threshold_percent": 40, "ttft_slo_s": 0.5}
        got = await set_brownout(s, change, authorization="Bearer root")
        assert got.status_code == 200
        state = got.json()
        assert (state["strategy"], state["decode_threshold_percent"]) == ("full", 40)
        assert (state["salc_enabled"], state["ttft_p90_s"]) == (False, None)
        record = next(r for r in caplog.records if getattr(r, "event", "") == "brownout_set")
    assert record.after == {
        "strategy": "full",
        "decode_threshold_percent": 40,
        "salc_enabled": False,
        "ttft_slo_s": 0.5,
    }
    assert re.fullmatch(r"ops at http:127\.0\.0\.1:\d+", record.peer)


async def test_the_commands_of_the_documents_get_answers() -> None:
    page = (Path(__file__).parents[3] / "docs" / "page.md").read_text(encoding="utf-8")
    commands = [line for line in page.splitlines() if line.startswith("curl ")]
    async with serving() as s:
        answers = []
        for command in commands:
            words = shlex.split(command.replace("http://127.0.0.1:PORT", base(s)))
            done = await asyncio.to_thread(
                subprocess.run, words, check=True, capture_output=True, timeout=60
            )
            answers.append(json.loads(done.stdout))
    assert answers[0]["now"]["status"] == "ready"
    assert answers[1]["strategy"] == "full"


async def test_another_way_is_loaded_before_the_answer(caplog) -> None:
    caplog.set_level(logging.INFO)
    async with serving() as s:
        s.engine.way_gate.clear()
        setting = asyncio.create_task(set_brownout(s, {"way": 2}))
        await until(lambda: "loading way 2 in place of way 8" in caplog.text)
        assert not setting.done()
        s.engine.way_gate.set()
        assert (await setting).json()["way"] == 2
    assert "way 2 in place of way 8 after" in caplog.text


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"strategy": "half"}, "strategy", "'half'"),
        ({"strategy": 3}, "strategy", "strategy is 3; it should be a valid string"),
        ({"way": 3}, "way", "way is 3; counter has united experts for: 2, 8"),
        ({"decode_threshold_percent": 101}, "decode_threshold_percent", "101"),
        ({"decode_threshold_percent": 62.5}, "decode_threshold_percent", "62.5"),
        ({"decode_threshold_percent": "40"}, "decode_threshold_percent", "valid integer"),
        ({"itl_slo_s": -1}, "itl_slo_s", "-1"),
        ({"strategy": "full", "way": 3}, "way", "way is 3"),
        ({"speed": 3}, None, "there is no 'speed'; there are strategy, way,"),
        ([1], None, "it must be a JSON object"),
        (b"{", None, "it must be a JSON object"),
        (b"", None, "it must be a JSON object"),
        (b'{"itl_slo_s":NaN}', "itl_slo_s", "nan"),
    ],
)
async def test_refusals_say_what_and_of_which_control(change, field, says: str) -> None:
    async with serving() as s:
        before = s.engine.brownout
        got = await set_brownout(s, change)
        assert (got.status_code, got.json()["field"]) == (400, field), got.text
        assert says in got.json()["error"]
        assert s.engine.brownout == before


async def test_unavailable_is_told() -> None:
    async with serving() as s:

        async def gone(change):
            raise Unavailable("the engine is failed; no other way can be loaded")

        s.engine.set_brownout = gone
        got = await set_brownout(s, {"way": 2})
    assert (got.status_code, "no other way" in got.json()["error"]) == (503, True)


def test_who_may_not_administer_is_told_so() -> None:
    with pytest.raises(PermissionDenied, match="no admin key"):
        Caller("u", Key("")).require_admin()


async def test_a_live_page_of_a_fake_engine_alone() -> None:
    """`Live` needs only a server's interface, which a notebook or a test can provide."""
    engine = FakeEngine()
    face = SimpleNamespace(
        engine=engine,
        status="ready",
        failure=None,
        model_names=["counter"],
        config=ServerConfig(),
        metrics=Metrics(),
        events=[],
        happened=lambda *event: None,
    )
    live = Live(face)
    live.tick()
    assert json.loads(live.state())["samples"][0]["strategy"] == "partial"


async def test_a_change_that_is_too_large_is_not_read() -> None:
    async with serving() as s:
        answer = await set_brownout(s, b"{" + b" " * 5000)
        assert answer.status_code == 413
        assert "5001 bytes or more" in answer.json()["error"]


async def test_a_key_given_twice_changes_nothing() -> None:
    async with serving() as s:
        answer = await set_brownout(s, b'{"strategy":"zero","strategy":"full"}')
        assert answer.status_code == 400
        assert 'duplicate key "strategy"' in answer.json()["error"]
        assert s.engine.brownout.strategy == "partial"


async def test_a_change_that_does_not_come_is_not_waited_for(caplog) -> None:
    head = (
        b"POST /api/brownout HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 99\r\n\r\n{"
    )
    async with serving(message_timeout_s=0.2) as s:
        port = s.page.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408 ")
        writer.close()
        _, gone = await asyncio.open_connection("127.0.0.1", port)
        gone.write(head)
        await gone.drain()
        gone.close()
        await set_brownout(s, {"enabled": True})  # and the page goes on
    assert not [record for record in caplog.records if record.exc_info]
