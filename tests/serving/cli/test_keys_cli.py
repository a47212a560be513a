"""`jmoe keys`: what it prints, what it stores, and that a server takes it."""

import os
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from serving.cli.main import app
from serving.frontend import keys
from serving.frontend.access import Access
from serving.request import Priority


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.yaml"


def run(*args: object):
    return CliRunner().invoke(app, ["keys", *map(str, args)])


def test_a_new_key_is_printed_once_and_stored_as_a_hash(path):
    done = run("new", "alice", "--file", path)
    assert done.exit_code == 0
    (key,) = done.stdout.split()
    assert key.startswith("jmoe_")
    assert len(key) == 48
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert Access(path).caller(f"Bearer {key}").name == "alice"
    other = run("new", "bob", "--file", path).stdout.strip()
    access = Access(path)
    assert [access.caller(f"Bearer {text}").name for text in (key, other)] == ["alice", "bob"]


def test_flags_are_what_the_key_allows(path):
    flags = "--admin --metrics --model m --model n --class best_effort --requests-per-min 5"
    more = "--tokens-per-min 600 --concurrency 2"
    assert run("new", "a", *flags.split(), *more.split(), "--file", path).exit_code == 0
    (key,) = keys.read(path).values()
    wanted = keys.Key(key.sha256, True, True, ("m", "n"), (Priority.BEST_EFFORT,), 5, 600, 2)
    assert key == wanted
    listed = run("list", "--file", path).stdout
    assert listed == (
        "a  admin, metrics, models m n, classes best_effort, requests_per_min 5, "
        "tokens_per_min 600, concurrency 2\n"
    )
    assert key.sha256 not in listed
    run("new", "b", "--metrics", "--file", path)
    assert "b  metrics only\n" in run("list", "--file", path).stdout


def test_revoked_is_gone_and_others_stay(path):
    first = run("new", "a", "--file", path).stdout.strip()
    run("new", "b", "--file", path)
    assert run("revoke", "a", "--file", path).stdout == "a is revoked\n"
    assert list(keys.read(path)) == ["b"]
    assert keys.digest(first).hex() not in path.read_text()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("new", "a"), "has a key named a; revoke it with `jmoe keys revoke a`"),
        (("new", "a b"), "'a b' is no name of a key"),
        (("new", "jmoe_x"), "a name begins with jmoe_, as keys do"),
        (("revoke", "c"), "has no key named c; it has a"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(path, args, said):
    run("new", "a", "--file", path)
    before = path.read_bytes()
    done = run(*args, "--file", path)
    assert isinstance(done.exception, ValueError)
    assert said in str(done.exception)
    assert path.read_bytes() == before


def test_a_link_stays_one(path, tmp_path):
    run("new", "a", "--file", path)
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    assert run("new", "b", "--file", link).exit_code == 0
    assert link.is_symlink()
    assert list(keys.read(path)) == ["a", "b"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_stays(path):
    run("new", "a", "--file", path)
    os.chown(path, 12345, 12346)
    run("new", "b", "--file", path)
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346)


def test_help_needs_neither_yaml_nor_jax():
    """Its commands import what they need when they run."""
    code = "import sys, serving.cli.keys; print({'yaml', 'pydantic', 'jax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_a_file_written_by_hand_is_read(path):
    hashed = keys.digest("k").hex()
    path.write_text(yaml.safe_dump({"keys": {"hand": {"sha256": hashed, "classes": []}}}))
    assert Access(path).caller("Bearer k").name == "hand"
