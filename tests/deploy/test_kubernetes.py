"""Kubernetes' manifests fit the server's settings, its probes and its time to drain."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from dockerfile import served_with

from serving.frontend.metrics import Metrics
from serving.frontend.metrics_http import serve
from serving.settings import reading as settings

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
CONFIG = settings.load(FOLDER / "server.yaml")


def manifest(name):
    (one,) = yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))
    return one


POD = manifest("deployment.yaml")["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def test_ports_are_those_of_the_settings():
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert ports == {
        "grpc": CONFIG.port,
        "http": CONFIG.http_port,
        "metrics": CONFIG.metrics_port,
    }
    for port in manifest("service.yaml")["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"]
    (scraped,) = manifest("podmonitor.yaml")["spec"]["podMetricsEndpoints"]
    assert scraped["port"] in ports
    assert CONFIG.host == "0.0.0.0"


def test_arguments_are_those_of_the_command_line(monkeypatch):
    words = list(CONTAINER["args"])
    at = words.index("--config") + 1
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert words[at] == f"{mounts['settings']}/server.yaml"
    words[at] = str(FOLDER / "server.yaml")
    assert served_with(monkeypatch, words) == CONFIG
    assert CONFIG.engine.compilation_cache.startswith(f"{mounts['cache']}/")


def test_probes_ask_for_what_the_server_answers():
    """Each path, of the real server of probes."""
    server, thread = serve("127.0.0.1", 0, Metrics().registry, lambda: (True, "ready"))
    try:
        from urllib.request import urlopen

        probes = {name: CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness")}
        probes["liveness"] = CONTAINER["livenessProbe"]["httpGet"]
        paths = {name: probe["path"] for name, probe in probes.items()}
        (scraped,) = manifest("podmonitor.yaml")["spec"]["podMetricsEndpoints"]
        for path in (*paths.values(), scraped["path"]):
            with urlopen(f"http://127.0.0.1:{server.server_port}{path}") as answer:
                assert answer.status == 200
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert {probe["port"] for probe in probes.values()} == {"metrics"}
    # A server that drains or loads is alive: only who hangs is started again.
    assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/healthz"}


def test_a_pod_has_the_time_to_drain():
    before_s = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed_s = before_s + CONFIG.drain_timeout_s + 10  # ports close, traces leave
    assert POD["terminationGracePeriodSeconds"] >= needed_s
    startup = CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


def test_volumes_that_are_mounted_are_there():
    volumes = {volume["name"] for volume in POD["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == volumes
    keys = next(v for v in POD["volumes"] if v["name"] == "keys")["secret"]
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert CONFIG.keys_file == f"{mounts['keys']}/keys.yaml"
    assert not keys.get("optional")
    assert keys["defaultMode"] & 0o007 == 0  # or the server warns of it
    claims = [
        v["persistentVolumeClaim"]["claimName"] for v in POD["volumes"] if "cache" in v["name"]
    ]
    assert claims == [manifest("cache.yaml")["metadata"]["name"]]
    (generated,) = manifest("kustomization.yaml")["configMapGenerator"]
    settings_of = next(v for v in POD["volumes"] if v["name"] == "settings")
    assert settings_of["configMap"]["name"] == generated["name"]
    for name in generated["files"] + manifest("kustomization.yaml")["resources"]:
        assert (FOLDER / name).is_file()


def test_a_pod_has_no_rights():
    own = CONTAINER["securityContext"]
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"]["drop"] == ["ALL"]
    assert POD["automountServiceAccountToken"] is False


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_makes_every_object(tmp_path):
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    assert {one["kind"] for one in made} == {
        *("ConfigMap", "Deployment", "PersistentVolumeClaim", "PodDisruptionBudget", "Service")
    }
    selectors = [one["spec"]["selector"] for one in made if "selector" in one.get("spec", {})]
    labels = next(o for o in made if o["kind"] == "Deployment")["spec"]["template"]["metadata"]
    assert len(selectors) == 3
    for selector in selectors:
        assert selector.get("matchLabels", selector) == labels["labels"]
    check = shutil.which("kubernetes-validate")
    if check is None:
        pytest.skip("what was made is not checked against schemas: no kubernetes-validate")
    path = tmp_path / "made.yaml"
    path.write_text(done.stdout)
    strict = subprocess.run([check, "--strict", str(path)], capture_output=True, text=True)
    assert strict.returncode == 0, strict.stdout + strict.stderr
