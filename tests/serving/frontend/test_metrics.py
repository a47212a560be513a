"""Metrics as Prometheus reads them."""

import contextlib
import importlib.metadata
import re
import socket
from dataclasses import replace
from math import nan
from types import SimpleNamespace
from urllib.request import Request, urlopen

import numpy as np
import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from serving.config import BrownoutConfig, SalcConfig, ServerConfig
from serving.control.slo import SloAnalyser
from serving.errors import Aborted, DeadlineExceeded, QueuedTooLong
from serving.frontend import metrics_http
from serving.frontend.metrics import MAX_MODELS, OTHER_MODELS, PHASES, Histogram, Metrics
from serving.frontend.server import Server
from serving.request import ModelBrownout, Output, Priority, Refused, Usage
from tests.serving.probed import probed

LS = Priority.LATENCY_SENSITIVE

ACCEPT = (
    # Prometheus 2.30, 2.40, 2.50
    "application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    # Prometheus 3, with UTF-8 names and with legacy ones; and where only text is asked for
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
    "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;escaping=underscores;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.5",
    "text/plain;version=0.0.4",
)


def samples(text: str) -> dict[tuple, float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_port_that_is_taken_is_named_with_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"127.0.0.1:{port}.*choose another --metrics-port"):
            await metrics_http.MetricsPort(Server(ServerConfig(port=0)), "127.0.0.1", port).start()


def busy() -> Metrics:
    """Returns metrics that have observed events of every kind."""
    metrics = Metrics()
    metrics.first_tokens(np.array([0.5, 3.0]), 1.0, LS, "counter")
    metrics.further_tokens(np.array([0.01, 0.2, 0.1]), 0.1, LS, "counter")
    metrics.step_read(step("prefill"), read([[1, 2]]), 0.0, 1.0)
    last = Output("a", "", (1,), (), Usage(7, 3, 0, 0), "length")
    asked = SimpleNamespace(
        arrived_at=10.0,
        began_at=10.5,
        first_at=12.0,
        request=SimpleNamespace(priority=LS, model_name="counter", key=""),
    )
    metrics.request_finished(asked, last, now=14.0)
    for error in (QueuedTooLong(""), DeadlineExceeded(""), Aborted(""), None):
        metrics.request_ended(asked, error)
    metrics.engine = FakeEngine()
    metrics.engine.counters["refused"] = (Refused("alice", "any", 2),)
    metrics.engine.counters |= {"priced_tokens": 4, "expected_loss_nats": 0.5}
    metrics.engine.counters |= {"prefix_queries": 40, "reused_tokens": 30}
    metrics.engine.brownout = replace(metrics.engine.brownout, max_expected_loss=0.25)
    metrics.calls.door("http", ["/v1/completions"], "500")("/v1/completions", 200)
    return metrics


@contextlib.contextmanager
def served(metrics: Metrics):
    with probed(metrics) as port:
        yield f"http://127.0.0.1:{port}/metrics"


def scrape(url: str, accept: str) -> tuple[str, str]:
    with urlopen(Request(url, headers={"Accept": accept})) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


@pytest.mark.parametrize("accept", ACCEPT, ids=lambda text: text[-60:])
def test_names_are_the_same_in_every_format(accept: str) -> None:
    with served(busy()) as url:
        plain = scrape(url, "text/plain;version=0.0.4")[1]
        kind, text = scrape(url, accept)
    assert ("openmetrics" in kind) == ("openmetrics-text;version=1.0.0" in accept)
    parse = openmetrics_families if "openmetrics" in kind else text_string_to_metric_families
    families = list(parse(text))
    got = {
        (sample.name, *sample.labels.values()): sample.value
        for f in families
        for sample in f.samples
    }
    # The scrape before is one of these, and is counted once its answer has gone.
    got.pop(("jmoe_calls_total", "200", "", "", "metrics", "/metrics"), None)
    known = samples(plain)
    assert {at for at in got if "process" in at[0]} == {at for at in known if "process" in at[0]}
    assert {at: value for at, value in got.items() if "process" not in at[0]} == {
        at: value for at, value in known.items() if "process" not in at[0]
    }
    assert all(re.fullmatch("(jmoe|process)_[a-z0-9_]+", name) for name, *_ in got)
    for family in families:
        assert {sample.name.startswith(family.name) for sample in family.samples} == {True}
        if family.type == "counter":
            assert {sample.name for sample in family.samples} == {f"{family.name}_total"}
    described = set(re.findall(r"^# (?:HELP|TYPE) (\S+)", text, re.MULTILINE))
    total = "" if "openmetrics" in kind else "_total"
    assert described == {f.name + total * (f.type == "counter") for f in families}


def test_scrape_over_http() -> None:
    with served(busy()) as url, urlopen(url) as answer:
        got = samples(answer.read().decode())
    expected = {
        ("jmoe_time_to_first_token_seconds_count", "counter", "latency_sensitive"): 2,
        ("jmoe_time_to_first_token_seconds_sum", "counter", "latency_sensitive"): 3.5,
        ("jmoe_time_to_first_token_seconds_bucket", "0.25", "counter", "latency_sensitive"): 0,
        ("jmoe_time_to_first_token_seconds_bucket", "0.5", "counter", "latency_sensitive"): 1,
        ("jmoe_time_to_first_token_seconds_bucket", "+Inf", "counter", "latency_sensitive"): 2,
        ("jmoe_inter_token_latency_seconds_count", "counter", "latency_sensitive"): 3,
        ("jmoe_e2e_request_latency_seconds_sum", "counter", "latency_sensitive"): 4,
        ("jmoe_prompt_tokens_total",): 7,
        ("jmoe_generation_tokens_total",): 5,
        ("jmoe_prefill_tokens_total",): 12,
        ("jmoe_request_success_total", "length"): 1,
        ("jmoe_request_success_total", "stop"): 0,
        ("jmoe_request_success_total", "abort"): 1,
        ("jmoe_request_success_total", "error"): 4,
        ("jmoe_slo_violations_total", "prefill"): 1,
        ("jmoe_slo_violations_total", "decode"): 1,
        ("jmoe_num_requests_running",): 0,
        ("jmoe_num_requests_waiting",): 3,
        ("jmoe_kv_cache_usage_perc",): 0.25,
        ("jmoe_brownout_threshold_percent", "decode"): 62.5,
        ("jmoe_controller_p90_seconds", "decode", "seen"): 0.05,
        ("jmoe_controller_p90_seconds", "decode", "expected"): 0.06,
        ("jmoe_step_time_error",): 0.125,
        ("jmoe_step_time_speed",): 1.0,
        ("jmoe_expert_visits_total",): 800,
        ("jmoe_degraded_visits_total",): 200,
        ("jmoe_priced_tokens_total",): 4,
        ("jmoe_expected_loss_nats_total",): 0.5,
        ("jmoe_max_expected_loss_nats",): 0.25,
        ("jmoe_recompilations_total",): 0,
        ("jmoe_requests_rejected_total",): 2,
        ("jmoe_requests_rejected_by_key_total", "alice", "any"): 2,
        ("jmoe_requests_expired_total", "queue"): 1,
        ("jmoe_requests_expired_total", "deadline"): 1,
        ("jmoe_request_prompt_tokens_bucket", "5.0", "counter"): 0,
        ("jmoe_request_prompt_tokens_bucket", "10.0", "counter"): 1,
        ("jmoe_request_prompt_tokens_sum", "counter"): 7,
        ("jmoe_request_generation_tokens_sum", "counter"): 3,
        ("jmoe_request_prefill_time_seconds_sum", "counter"): 1.5,
        ("jmoe_request_decode_time_seconds_sum", "counter"): 2,
        ("jmoe_request_decode_time_seconds_count", "counter"): 1,
        ("jmoe_prefix_cache_queries_total",): 40,
        ("jmoe_prefix_cache_hits_total",): 30,
    }
    (build,) = (at for at in got if at[0] == "jmoe_build_info")
    assert got[build] == 1
    assert importlib.metadata.version("jax") in build
    assert got["process_resident_memory_bytes",] > 2**20
    assert {key: got[key] for key in expected} == expected
    assert ("jmoe_controller_p90_seconds", "prefill", "expected") not in got  # NaN: nothing is


def test_the_least_objective_is_told_while_the_one_that_is_set_cannot_be_kept() -> None:
    metrics = busy()
    assert least_objectives(metrics) == {"prefill": 0.0, "decode": 0.0}
    metrics.engine.brownout = replace(metrics.engine.brownout, least_itl_s=0.008)
    assert least_objectives(metrics) == {"prefill": 0.0, "decode": 0.008}


def least_objectives(metrics: Metrics) -> dict[str, float]:
    name = "jmoe_objective_least_seconds"
    samples = next(family.samples for family in metrics.collect() if family.name == name)
    return {sample.labels["phase"]: sample.value for sample in samples}


def test_speed_is_that_of_the_first_scrape_over_that_of_now() -> None:
    metrics = busy()
    speeds = []
    for step_s in (nan, 0.01, 0.0125):  # nan: a thousand steps of prompts, and none decoded yet
        metrics.engine.counters["full_decode_step_s"] = step_s
        speeds += [
            family.samples[0].value
            for family in metrics.collect()
            if family.name == "jmoe_step_time_speed"
        ]
    assert speeds == pytest.approx([1.0, 0.8])


def step(phase: str, *previous_at: float, num_decodes: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        phase=phase,
        size=12,
        num_prompt_tokens=12 - num_decodes,
        num_decodes=num_decodes,
        decodes=phase == "decode" or num_decodes > 0,
        is_last=True,
        sequences=[SimpleNamespace(previous_at=at, done=np.isnan(at)) for at in previous_at],
    )


def read(expert_rows: list[list[int]]) -> SimpleNamespace:
    return SimpleNamespace(expert_rows=np.array(expert_rows, np.int32), device_rows=None)


def test_prefill_inside_an_inter_token_latency_is_metered_apart() -> None:
    """A sequence waits for the prefill steps since its own token, not for those before it."""
    metrics, rows = Metrics(), read([[0]])
    metrics.step_read(step("decode", 0.5), rows, 0.5, 1.0)
    assert metrics.prefill_in_itl.counts.sum() == 0
    metrics.step_read(step("prefill", np.nan), rows, 1.0, 1.25)  # its token comes at 1.25
    metrics.step_read(step("prefill", np.nan), rows, 1.25, 1.75)
    # The last one was cancelled before its first token.
    metrics.step_read(step("decode", 1.0, 1.25, 1.75, np.nan), rows, 1.75, 2.0)
    assert metrics.prefill_in_itl.counts.sum() == 3
    assert metrics.prefill_in_itl.sum == 0.75 + 0.5 + 0.0
    metrics.step_read(step("decode", 2.0), rows, 2.0, 2.5)
    assert metrics.prefill_in_itl.counts.sum() == 3
    metrics.step_read(step("prefill", np.nan), rows, 2.5, 3.0)
    metrics.step_read(step("decode", np.nan), rows, 3.0, 3.5)  # nobody is left
    assert metrics.prefill_in_itl.counts.sum() == 3


def test_a_hybrid_step_is_prefill_inside_what_its_rows_wait_for() -> None:
    metrics, rows = Metrics(), read([[0]])
    metrics.step_read(step("prefill", np.nan), rows, 1.0, 1.25)
    # Two rows decode, one of them since half of the step before; a prompt's first token comes, too.
    beside = step("prefill", 1.0, 1.125, np.nan, num_decodes=2)
    metrics.step_read(beside, rows, 1.25, 2.0)
    assert metrics.prefill_in_itl.counts.sum() == 2
    assert metrics.prefill_in_itl.sum == (0.25 + 0.75) + (0.125 + 0.75)
    assert metrics.prefill_tokens == 12 + 10
    metrics.step_read(step("decode", 2.0, 2.0, 2.0), rows, 2.0, 2.5)
    assert metrics.prefill_in_itl.counts.sum() == 2


def test_prefill_steps_without_a_decode_step_are_not_kept_for_ever() -> None:
    """Where every request wants one token there is no decode step."""
    metrics, rows = Metrics(), read([[0]])
    for i in range(1000):
        metrics.step_read(step("prefill", np.nan), rows, i, i + 1.0)
    assert len(metrics._prefills) <= 256
    metrics.step_read(step("decode", 998.0, 1000.0), rows, 1000.0, 1001.0)
    assert metrics.prefill_in_itl.sum == 2.0 + 0.0


def test_expert_load_adds_up_over_steps() -> None:
    metrics = Metrics()
    metrics.step_read(step("prefill"), read([[1, 2, 0], [0, 0, 4]]), 0.0, 1.0)
    metrics.step_read(step("decode"), read([[5, 0, 0], [1, 0, 0]]), 1.0, 2.0)
    (family,) = (f for f in metrics.collect() if f.name == "jmoe_expert_rows")
    got = {(s.labels["layer"], s.labels["expert"]): s.value for s in family.samples}
    rows = {("0", "0"): 6, ("0", "1"): 2, ("0", "2"): 0}
    assert got == rows | {("1", "0"): 1, ("1", "1"): 0, ("1", "2"): 4}


def test_latencies_are_by_model_and_those_of_ever_new_ones_are_one() -> None:
    metrics, priorities = Metrics(), tuple(Priority)
    for at in range(MAX_MODELS + 3):
        for priority in priorities:
            metrics.first_tokens(np.array([0.5] * (1 + at)), 1.0, priority, f"m{at}")
    metrics.first_tokens(np.array([2.0]), 1.0, LS, "m7")
    (family,) = metrics.ttft.collect("x", "about")
    counts = {
        (s.labels["priority"], s.labels["model_name"]): s.value
        for s in family.samples
        if s.name.endswith("_count")
    }
    assert len(counts) == len(priorities) * (MAX_MODELS + 1)
    for priority in priorities:
        new = sum(range(MAX_MODELS + 1, MAX_MODELS + 4))
        assert counts[priority, OTHER_MODELS] == new
        assert counts[priority, "m7"] == 8 + (priority is LS)
        assert metrics.ttft.count(priority) == sum(range(MAX_MODELS + 4)) + (priority is LS)


def test_objectives_bounds_and_late_tokens_of_models() -> None:
    metrics = Metrics()
    metrics.engine = SimpleNamespace(
        names=["base", "law", ""],
        scheduler=SimpleNamespace(running=[], waiting=[], num_mixed=0, models=None),
        registry=SimpleNamespace(num_swaps=0),
        fetcher=SimpleNamespace(fetches={"miss": 0, "ahead": 0}, fetched_bytes=0, num_reruns=0),
        slo=SloAnalyser(
            BrownoutConfig(ttft_slo_s=1.0, itl_slo_s=0.1),
            SalcConfig(),
            way=0,
            models=[ModelBrownout("base"), ModelBrownout("law", 0.0, 0.05, 60), ModelBrownout("")],
        ),
    )
    metrics.further_tokens(np.array([0.06, 0.04]), 0.05, LS, "law")
    metrics.further_tokens(np.array([0.9]), 0.5, Priority.BEST_EFFORT, "law")  # its own objective
    found = {
        (s.name, *s.labels.values()): s.value
        for family in metrics.by_model.collect(metrics.engine)
        for s in family.samples
    }

    assert metrics.violations == {"prefill": 0, "decode": 1}

    def of(name):
        return {tuple(at): value for (known, *at), value in found.items() if known == name}

    late = of("jmoe_slo_violations_by_model_total")
    assert late == {("base", p): 0 for p in PHASES} | {("law", "prefill"): 0, ("law", "decode"): 1}
    slos = of("jmoe_objective_seconds")
    assert (slos["law", "prefill"], slos["law", "decode"], slos["base", "decode"]) == (1, 0.05, 0.1)
    bounds = of("jmoe_model_threshold_bound_percent")
    assert (bounds["law", "floor"], bounds["law", "ceiling"], bounds["base", "floor"]) == (
        60,
        100,
        0,
    )


def test_two_servers_do_not_share_metrics() -> None:
    one, other = Metrics(), Metrics()
    one.first_tokens(np.array([1.0]), 1.0, LS, "")
    assert (one.generation_tokens, other.generation_tokens) == (1, 0)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 9.0]), max_size=20))
def test_buckets_count_what_does_not_exceed_them(values: list[float]) -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(np.array(values))
    family = HistogramMetricFamily("x", "about")
    histogram.add_to(family, [])
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("bucket")}
    assert buckets == {
        "1.0": sum(v <= 1 for v in values),
        "2.0": sum(v <= 2 for v in values),
        "+Inf": len(values),
    }
