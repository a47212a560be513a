"""The dashboard and the alerts ask for metrics that a server has, with labels that they have."""

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from fake_engine import FakeEngine

from serving.frontend.metrics import Metrics
from serving.request import AuditState, ModelBrownout, Priority

DEPLOY = Path(__file__).parents[3] / "deploy"
DOCS = DEPLOY.parent / "docs"
RULES = DEPLOY / "prometheus" / "jmoe.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "jmoe.json"
OF_A_SCRAPE = {"job", "instance"}
"""Labels that Prometheus itself gives."""
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


def audited():
    """Returns metrics of a server that has given some answers, and audited them."""
    metrics = Metrics()
    metrics.engine = FakeEngine()
    audit = AuditState("counter", 3, 0, 0.1, 0.0, 0.2, 0.1, 0.0, 0.2, False, "", 0.1)
    metrics.engine.counters["audits"] = (audit,)
    for priority in Priority:
        metrics.first_tokens(np.array([0.5]), 1.0, priority, "counter")
        metrics.further_tokens(np.array([0.05]), 1.0, priority, "counter")
        metrics.e2e.observe(np.array([1.0]), priority, "counter")
    return metrics


def labels_by_name():
    """Returns the labels of every sample that a server with some traffic has."""
    metrics = audited()
    metrics.expert_rows = np.ones((1, 2), np.int64)
    metrics.calls.door("http", ["other"], "500")
    found = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def everything():
    """Returns metrics of a server with several models on a mesh of workers, keys and audits, which
    has answered.
    """
    metrics = audited()
    engine = metrics.engine
    engine.names.append("law")
    engine.slo.models = [ModelBrownout("counter")]
    engine.scheduler.num_mixed, engine.registry = 0, SimpleNamespace(num_swaps=0)
    engine.fetcher = SimpleNamespace(fetches=Counter(), fetched_bytes=0, num_reruns=0)
    mover = SimpleNamespace(experts_copied=0, imbalances=lambda: [1.0], failure=None)
    engine.loader, engine.model.pool = SimpleNamespace(mover=mover), SimpleNamespace(slot_bytes=8)
    engine.executor = SimpleNamespace(record=list, seen=list, unreachable="", retry_after_s=0.0)
    metrics.access = SimpleNamespace(paths=["keys.yaml"], callers={})
    metrics.expert_rows = np.ones((1, 2), np.int64)
    rows = SimpleNamespace(device_rows=np.ones((1, 2), np.int32), copies=None, padded_share=0.0)
    metrics.mesh.step_read("decode", 1, rows)
    metrics.queue.observe(np.array([0.0]), Priority.BEST_EFFORT)
    metrics.wait.observe(np.array([0.0]), Priority.BEST_EFFORT)
    request = SimpleNamespace(model_name="counter")
    sequence = SimpleNamespace(request=request, began_at=0.0, first_at=1.0)
    output = SimpleNamespace(
        usage=SimpleNamespace(prompt_tokens=1, completion_tokens=1, degraded_visits=0)
    )
    metrics.by_model.request_finished(sequence, output, 2.0)
    return metrics


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_metrics_that_pages_name_exist(page):
    known = {
        name
        for family in everything().registry.collect()
        for name in (
            f"{family.name}_total" if family.type == "counter" else family.name,
            *(sample.name for sample in family.samples),
        )
    }
    assert set(re.findall(r"\bjmoe_[a-z0-9_]+", page.read_text(encoding="utf-8"))) <= known


def test_pages_name_every_metric():
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    named = {name.removesuffix("_total") for name in re.findall(r"\bjmoe_[a-z0-9_]+", pages)}
    families = {family.name for family in everything().registry.collect()}
    assert {name for name in families if name.startswith("jmoe_")} <= named


def rules():
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def targets():
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def expressions():
    return [rule["expr"] for rule in rules()] + targets()


def unknown(expression, known):
    """Returns the metrics, and labels of metrics, in an expression that no server has."""
    names = set(re.findall(r"\bjmoe_[a-z0-9_]+", expression))
    wrong = {name for name in names if name not in known}
    for name, selectors in re.findall(r"\b(jmoe_[a-z0-9_]+)\{([^}]*)\}", expression):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selectors))
        wrong |= {f"{name}{{{label}}}" for label in labels - known.get(name, set()) - OF_A_SCRAPE}
    return wrong


def test_every_query_names_metrics_and_labels_that_there_are():
    known = labels_by_name()
    assert len(expressions()) > 30
    assert {expr: unknown(expr, known) for expr in expressions() if unknown(expr, known)} == {}


def test_a_query_of_something_else_is_noticed():
    known = labels_by_name()
    assert unknown("rate(jmoe_parks[5m])", known) == {"jmoe_parks"}
    found = unknown('jmoe_parks_total{phase="x",job="y"} + jmoe_late_total', known)
    assert found == {"jmoe_parks_total{phase}", "jmoe_late_total"}


def test_values_of_labels_are_those_of_a_server():
    known = {}
    metrics = audited()
    for family in metrics.registry.collect():
        for sample in family.samples:
            for label, value in sample.labels.items():
                known.setdefault((sample.name, label), set()).add(value)
    for expression in expressions():
        for name, selectors in re.findall(r"\b(jmoe_[a-z0-9_]+)\{([^}]*)\}", expression):
            for label, value in re.findall(r'(\w+)="([^"]*)"', selectors):
                assert value in known[name, label], (name, label, value)


def test_recorded_names_are_recorded():
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = {name for expr in expressions() for name in re.findall(r"\bjmoe:[\w:]+", expr)}
    assert used == recorded


def test_alerts_say_what_to_do_and_are_in_the_documents():
    alerts = [rule for rule in rules() if "alert" in rule]
    text = (DEPLOY.parent / "docs" / "deploying.md").read_text(encoding="utf-8")
    for alert in alerts:
        assert {"summary", "description"} == set(alert["annotations"])
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert f"`{alert['alert']}`" in text


def test_panels_lie_beside_each_other():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    taken, ids = set(), set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(0 <= x < 24 for x, _ in cells)
        taken |= cells
        ids.add(panel["id"])
    assert len(ids) == len(dashboard["panels"])
    variables = {one["name"] for one in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"])))
    assert used - {"__rate_interval"} == variables


def run_promtool(*words):
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_promtool_takes_rules_and_configuration():
    run_promtool("check", "rules", str(RULES))
    run_promtool("check", "config", str(RULES.with_name("prometheus.yml")))


@promtool
def test_alerts_fire_when_they_should():
    run_promtool("test", "rules", str(RULES.with_name("jmoe.rules.test.yml")))


def test_every_alert_is_tested():
    tests = yaml.safe_load(RULES.with_name("jmoe.rules.test.yml").read_text(encoding="utf-8"))
    fired = {
        test["alertname"]
        for group in tests["tests"]
        for test in group["alert_rule_test"]
        if test.get("exp_alerts")
    }
    assert {rule["alert"] for rule in rules() if "alert" in rule} == fired


@promtool
def test_queries_of_the_dashboard_are_promql(tmp_path):
    each = [
        {"record": f"panel:number:{at}", "expr": expr.replace("$__rate_interval", "1m")}
        for at, expr in enumerate(targets())
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": each}]}))
    run_promtool("check", "rules", str(path))
