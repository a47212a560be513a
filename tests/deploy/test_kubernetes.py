"""Kubernetes' manifests fit the server's settings, its probes and its time to drain."""

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from dockerfile import ROOT, served_with

from serving.cli import main as cli
from serving.cluster.hosts import OWN
from serving.frontend.metrics import Metrics
from serving.settings import reading as settings
from tests.serving.probed import probed

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
    from urllib.request import urlopen

    with probed(Metrics()) as port:
        probes = {name: CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness")}
        probes["liveness"] = CONTAINER["livenessProbe"]["httpGet"]
        paths = {name: probe["path"] for name, probe in probes.items()}
        (scraped,) = manifest("podmonitor.yaml")["spec"]["podMetricsEndpoints"]
        for path in (*paths.values(), scraped["path"]):
            with urlopen(f"http://127.0.0.1:{port}{path}") as answer:
                assert answer.status == 200
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


SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
GROUP = manifest("mesh/leaderworkerset.yaml")["spec"]
TEMPLATE = GROUP["leaderWorkerTemplate"]
CLUSTER = manifest("ray/raycluster.yaml")["spec"]
PODS = {
    "mesh": [TEMPLATE["leaderTemplate"]["spec"], TEMPLATE["workerTemplate"]["spec"]],
    "ray": [
        CLUSTER["headGroupSpec"]["template"]["spec"],
        CLUSTER["workerGroupSpecs"][0]["template"]["spec"],
    ],
}
"""Of each folder: the pod that callers reach, and the others."""
FOLDERS = pytest.mark.parametrize("folder", PODS)


def config_of(folder):
    of_a_mesh = {"engine.coordinator": "0.0.0.0:7000", "engine.num_processes": "2"}
    of_a_mesh |= {"engine.process_index": "0"}
    path = FOLDER / folder / "server.yaml"
    return settings.load(path, of_a_mesh if folder == "mesh" else {})


@pytest.mark.parametrize("name", SCHEMAS)
def test_custom_resources_are_as_their_published_schemas_want_them(name):
    """`trim_schemas.py` keeps what we use of them."""
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(SCHEMAS[name])
    given = manifest(name)
    check.validate(given)
    for path, value in (
        ("spec.leaderWorkerTemplate.restartPolicy", "RecreateAll"),
        ("spec.leaderWorkerTemplate.sizes", 2),
        ("spec.leaderWorkerTemplate.workerTemplate.spec.containers.0.ports.0.port", 1),
        ("spec.authOptions.mode", "tokens"),
        ("spec.workerGroupSpecs.0.replicas", "three"),
        ("spec.headGroupSpec.template.spec.containers.0.livenessProbe.httpGet.ports", "http"),
    ):
        wrong = at = copy.deepcopy(given)
        *folders, last = (int(key) if key.isdigit() else key for key in path.split("."))
        if folders[1] not in at["spec"]:
            continue  # of the other kind
        for key in folders:
            at = at.setdefault(key, [{}] if key == "ports" else {}) if key != 0 else at[0]
        at[last] = value
        assert not check.is_valid(wrong), path


def test_processes_of_a_mesh_differ_by_their_number_alone(monkeypatch):
    """As LeaderWorkerSet fills in what it gives to containers."""
    address, followers = "jmoe-mesh-0.jmoe-mesh.default", []
    monkeypatch.setattr(cli, "_follow", followers.append)

    def words(pod, index):
        given = {
            "$(LWS_GROUP_SIZE)": str(TEMPLATE["size"]),
            "$(LWS_WORKER_INDEX)": str(index),
            "$(LWS_LEADER_ADDRESS)": address,
            "/etc/jmoe/server.yaml": str(FOLDER / "mesh" / "server.yaml"),
        }
        return [
            re.sub(r"\$\(\w+\)|/etc/jmoe/.*", lambda found: given[found[0]], word)
            for word in pod["containers"][0]["args"]
        ]

    leader_pod, follower_pod = PODS["mesh"]
    leader = served_with(monkeypatch, words(leader_pod, 0))
    with pytest.raises(IndexError):  # a follower serves nobody
        served_with(monkeypatch, words(follower_pod, 1))
    (follower,) = followers
    assert (leader.engine.process_index, follower.engine.process_index) == (0, 1)
    assert leader.engine.num_processes == follower.engine.num_processes == TEMPLATE["size"]
    assert leader.engine.coordinator == "0.0.0.0:7000"
    assert follower.engine.coordinator == f"{address}:7000"
    for name, value in vars(leader.engine).items():
        assert name in OWN or getattr(follower.engine, name) == value
    gpus = follower_pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert leader.engine.mesh == f"ep={TEMPLATE['size'] * int(gpus)}"
    # The group as a whole starts anew, and process 0 is not ready before the others have joined.
    assert TEMPLATE["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert GROUP["startupPolicy"] == "LeaderCreated"
    for pod in (leader_pod, follower_pod):
        assert pod["containers"][0]["resources"] == leader_pod["containers"][0]["resources"]


def test_ray_has_a_gpu_for_each_worker_before_the_server_starts():
    config = config_of("ray")
    own, (workers,) = config.engine.asynchronous, CLUSTER["workerGroupSpecs"]
    count = own.attention + own.experts
    assert {workers[of] for of in ("replicas", "minReplicas", "maxReplicas")} == {count}
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "1"
    (run,) = PODS["ray"][0]["containers"][0]["args"]
    assert f'grep -q "/{count}.0 GPU"' in run
    assert run.endswith("exec jmoe serve --config /etc/jmoe/server.yaml")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert f"\nray=={CLUSTER['rayVersion']}\n" in constraints
    image = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert ",cuda,aep,ray]" in image
    assert CLUSTER["authOptions"]["mode"] == "token"


@FOLDERS
def test_a_group_is_probed_over_tls_and_has_the_time_to_drain(folder):
    config = config_of(folder)
    reached = PODS[folder][0]["containers"][0]
    assert {port["containerPort"] for port in reached["ports"]} == {
        *(config.port, config.http_port, config.metrics_port)
    }
    assert config.tls_cert
    assert config.keys_file
    for kind, path in (("startup", "readyz"), ("readiness", "readyz"), ("liveness", "healthz")):
        probe = {"path": f"/{path}", "port": "metrics", "scheme": "HTTPS"}
        assert reached[f"{kind}Probe"]["httpGet"] == probe
    needed_s = reached["lifecycle"]["preStop"]["sleep"]["seconds"] + config.drain_timeout_s + 10
    assert PODS[folder][0]["terminationGracePeriodSeconds"] >= needed_s
    if folder == "mesh":  # a follower lives for as long as process 0 drains
        assert PODS[folder][1]["terminationGracePeriodSeconds"] >= needed_s


@FOLDERS
def test_pods_of_a_group_have_what_they_mount_and_no_rights(folder):
    config = config_of(folder)
    for pod in PODS[folder]:
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
        for volume in pod["volumes"]:
            assert volume.get("secret", {}).get("defaultMode", 0) & 0o026 == 0
        own = container["securityContext"]
        assert own == CONTAINER["securityContext"]
        assert pod["securityContext"] == POD["securityContext"]
        assert pod["automountServiceAccountToken"] is False
        assert config.engine.compilation_cache.startswith(f"{mounts['cache']}/")
    needed = config.keys_file, config.tls_cert, config.tls_key, config.engine.secret_file
    where = [mount["mountPath"] for mount in PODS[folder][0]["containers"][0]["volumeMounts"]]
    for path in needed:
        assert str(Path(path).parent) in where
    claim, policy = manifest(f"{folder}/cache.yaml"), manifest(f"{folder}/network.yaml")["spec"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    name = f"jmoe-{folder}"
    assert policy["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": name}
    # Strangers reach the ports for callers, and no other.
    (open_to_all,) = (rule for rule in policy["ingress"] if "from" not in rule)
    assert [port["port"] for port in open_to_all["ports"]] == ["grpc", "http", "metrics"]
    (generated,) = manifest(f"{folder}/kustomization.yaml")["configMapGenerator"]
    assert generated == {"name": f"{name}-settings", "files": ["server.yaml"]}


@FOLDERS
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_makes_every_object_of_a_group(folder):
    made = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / folder)], capture_output=True, text=True, timeout=60
    )
    assert made.returncode == 0, made.stderr
    objects = {one["kind"]: one for one in yaml.safe_load_all(made.stdout)}
    kind = {"mesh": "LeaderWorkerSet", "ray": "RayCluster"}[folder]
    assert objects.keys() == {
        *(kind, "ConfigMap", "PersistentVolumeClaim", "NetworkPolicy", "Service")
    }
    # Settings have a name of their contents, so that changed ones make new pods.
    name = objects["ConfigMap"]["metadata"]["name"]
    assert made.stdout.count(name) == 1 + sum("settings" in str(pod) for pod in PODS[folder])
