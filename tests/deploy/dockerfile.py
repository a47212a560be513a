"""The image's instructions, and the settings that a command line makes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from serving.cli import main as cli
from serving.frontend import server

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"


def instructions(kind):
    """Returns the arguments of a Dockerfile's instructions of a kind, continued lines joined."""
    text = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.split(None, 1)[1] for line in text.splitlines() if line.startswith(f"{kind} ")]


def command():
    (entry,), (words,) = instructions("ENTRYPOINT"), instructions("CMD")
    return json.loads(entry), json.loads(words)


def health(port):
    """Runs the image's own health check on another port, and returns its exit status."""
    (line,) = instructions("HEALTHCHECK")
    *_, code = json.loads(line[line.index("[") :])
    code = code.replace(":9090/", f":{port}/")
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode


def served_with(monkeypatch, words):
    """Returns the settings that a command line makes, as the server gets them."""
    seen = []

    async def serve(config, *_):
        seen.append(config)
        return True

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(
        "serving.startup.prepare.check_start", lambda engine: None
    )  # no model is there
    monkeypatch.setattr(sys, "argv", ["jmoe", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    return seen[0]
