"""The commands of docs/security.md are run as they stand."""

import os
import re
import shlex
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from serving.cluster.secret import ClusterSecret
from serving.config import EngineConfig
from serving.frontend import keys
from serving.frontend.tls import Certificates, Files

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"```\n(.*?)```", PAGE, re.S) for line in block.splitlines()]


def run(folder: Path, *starts: str) -> list[subprocess.CompletedProcess]:
    """Runs the page's lines that begin so, in their order."""
    jmoe = f'jmoe() {{ {shlex.quote(sys.executable)} -m serving.cli "$@"; }}\n'
    lines = [line for line in LINES if line.startswith(starts)]
    assert lines
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return [
        subprocess.run(
            ["bash", "-ec", jmoe + line],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        for line in lines
    ]


def test_certificates_are_made_and_load(tmp_path):
    for done in run(tmp_path, "openssl", "printf", "chmod"):
        assert done.returncode == 0, done
    made = Certificates(Files(*(tmp_path / f"{name}.pem" for name in ("cert", "key", "ca"))))
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    client.load_cert_chain(tmp_path / "alice.pem", tmp_path / "alice-key.pem")
    for name in ("llm.example", "10.0.0.5"):
        assert meet(made.context, client, name)
    with pytest.raises(ssl.SSLCertVerificationError):
        meet(made.context, client, "another.example")


def meet(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> bool:
    """Returns whether a handshake in memory succeeds at both ends."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(back, there, server_hostname=name),
        server.wrap_bio(there, back, server_side=True),
    ]
    waiting = list(ends)
    while waiting:
        end = waiting.pop(0)
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(end)
    return ends[1].getpeercert()["subject"] == ((("commonName", "alice"),),)


def test_a_secret_is_made_and_loads(tmp_path):
    assert run(tmp_path, "umask")[0].returncode == 0
    assert ClusterSecret.of(EngineConfig(secret_file=str(tmp_path / "secret")), {})


def test_keys_are_made_listed_and_revoked(tmp_path):
    said = [done.stdout for done in run(tmp_path, "jmoe keys")]
    assert [text.startswith("jmoe_") for text in said] == [True, True, True, False, False]
    assert "ops" in said[3]
    assert set(keys.read(tmp_path / "keys.yaml")) == {"ops", "prometheus"}
