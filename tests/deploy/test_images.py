"""The image: what it copies is there, what it starts is a server, and nothing secret is in it."""

import fnmatch
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from dockerfile import DOCKERFILE, ROOT, command, health, instructions, served_with

from serving.frontend import exposure
from serving.frontend.metrics import Metrics
from serving.frontend.tls import Certificates, Files
from serving.settings import reading as settings
from tests.serving.certificates import Authority
from tests.serving.probed import probed


def ignored(path):
    """Returns whether .dockerignore excludes a path: the last line decides that matches it or a
    folder above.
    """
    found = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.lstrip("!").removeprefix("**/")
        if not line or line.startswith("#"):
            continue
        if any(fnmatch.fnmatch(part, pattern) for part in Path(path).parts):
            found = not line.startswith("!")
    return found


def test_what_is_copied_is_there_and_gets_into_the_context():
    copied = [words.split()[:-1] for words in instructions("COPY") if "--from" not in words]
    sources = [source for each in copied for source in each]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source), source
    # And all that is a package is copied.
    for folder in ("configs", "jmoe", "pallas_kernels", "serving", "training"):
        assert folder in sources
    for other in (".git", "tests", "deploy", ".venv", "jmoe/__pycache__", "out"):
        assert ignored(other), other


def test_stages_that_are_copied_from_exist():
    stages = {words.split(" AS ")[1] for words in instructions("FROM")}
    assert {"cpu", "cuda"} <= stages
    for words in instructions("COPY"):
        for stage in re.findall(r"--from=(\S+)", words):
            assert stage in stages
    for words in instructions("FROM"):
        base = words.split()[0]
        assert base in stages or re.fullmatch(r"python:3\.12-slim-\w+", base)


def test_extras_and_python_are_those_of_the_project():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for words in instructions("RUN"):
        for extras in re.findall(r'"\.\[([\w,]+)\]"', words):
            assert "-c constraints.txt" in words
            for extra in extras.split(","):
                assert re.search(rf"^{extra} = \[", text, re.MULTILINE), extra
    assert 'requires-python = ">=3.12"' in text


def test_it_runs_as_nobody_in_particular_and_holds_no_secret():
    text = DOCKERFILE.read_text(encoding="utf-8")
    final = text.split("FROM runtime AS ")[1:]
    assert len(final) == 2
    assert all(re.search(r"^USER 10001$", stage, re.MULTILINE) for stage in final)
    assert not re.search(r"(?i)^(env|arg)\b.*(token|secret|password|api_?key)", text, re.MULTILINE)


def test_what_it_starts_is_a_server_on_the_ports_that_it_says(monkeypatch):
    entry, words = command()
    assert entry == ["/opt/jmoe/bin/jmoe"]
    config = served_with(monkeypatch, words)
    ports = {config.port, config.http_port, config.metrics_port}
    assert ports == {int(port) for words in instructions("EXPOSE") for port in words.split()}
    (check,) = instructions("HEALTHCHECK")
    assert f"http://127.0.0.1:{config.metrics_port}/readyz" in check
    assert config.host == "0.0.0.0"
    assert any(config.keys_file.startswith(f"{v}/") for v in json.loads(instructions("VOLUME")[0]))
    assert config.admin_host == "127.0.0.1"
    volumes = json.loads(instructions("VOLUME")[0])
    assert config.engine.model in volumes
    assert any(config.engine.compilation_cache.startswith(f"{folder}/") for folder in volumes)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_container_is_healthy_once_it_is_ready(tmp_path, encrypted):
    is_ready, certificates = [False], None
    if encrypted:
        pair = Authority(tmp_path, "ca").signs("server")
        certificates = Certificates(Files(pair.cert, pair.key, None))
    with probed(Metrics(), lambda: (is_ready[0], ""), certificates) as port:
        assert health(port) != 0
        is_ready[:] = [True]
        assert health(port) == 0


def test_the_services_command_is_a_server_with_the_sample_settings(monkeypatch):
    unit = (ROOT / "deploy" / "systemd" / "jmoe.service").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    program, *words = line.split()
    assert program == "/opt/jmoe/bin/jmoe"
    sample = ROOT / "deploy" / "systemd" / "server.yaml"
    words[words.index("/etc/jmoe/server.yaml")] = str(sample)
    config = served_with(monkeypatch, words)
    assert config == settings.load(sample)
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop_s) >= config.drain_timeout_s + 10
    cache = re.findall(r"^CacheDirectory=(\S+)$", unit, re.MULTILINE)[0]
    assert config.engine.compilation_cache.startswith(f"/var/cache/{cache}/")


def test_the_service_has_no_more_rights_than_it_needs():
    unit = (ROOT / "deploy" / "systemd" / "jmoe.service").read_text(encoding="utf-8")
    lines = set(unit.splitlines())
    assert lines >= {
        "User=jmoe",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "ProtectHome=yes",
        "CapabilityBoundingSet=",
        "RestartPreventExitStatus=2",
    }


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_service_and_what_port_443_adds(tmp_path):
    unit = (ROOT / "deploy" / "systemd" / "jmoe.service").read_text(encoding="utf-8")
    path = tmp_path / "jmoe.service"
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    (added,) = re.findall(r"```ini\n(.*?)```", page, re.DOTALL)
    (tmp_path / "jmoe.service.d").mkdir()
    (tmp_path / "jmoe.service.d" / "override.conf").write_text(added)
    path.write_text(unit.replace("/opt/jmoe/bin/jmoe", shutil.which("true")))
    verify = ["systemd-analyze", "verify", "--man=no", str(path)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60)
    own = [line for line in done.stderr.splitlines() if "jmoe.service" in line]
    assert (done.returncode, own) == (0, []), done.stderr


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_has_nothing_to_say():
    lint = ["hadolint", str(DOCKERFILE)]
    done = subprocess.run(lint, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", ["systemd/server.yaml", "kubernetes/server.yaml"])
def test_settings_are_settings_and_let_no_stranger_in(name, caplog):
    path = ROOT / "deploy" / name
    config = settings.load(path)
    exposure.warn(config)
    assert "no key is asked for" not in caplog.text
    said = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert config.engine.model == said["engine"]["model"]
