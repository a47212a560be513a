"""The secret that a server's processes share: where it comes from, and what is made of it."""

import os

import pytest

from serving.cluster.secret import VARIABLE, ClusterSecret
from serving.config import EngineConfig
from serving.errors import SettingsError

SECRET = "0123456789abcdef" * 4


@pytest.fixture
def write(tmp_path):
    """Writes a file with a mode, and returns the settings that name it."""

    def write(text, mode=0o600):
        path = tmp_path / "secret"
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)
        return EngineConfig(secret_file=str(path))

    return write


def test_the_file_goes_before_the_environment_and_there_may_be_neither(write):
    of_file = ClusterSecret.of(write(f"{SECRET}\n"), {VARIABLE: SECRET[::-1]})
    assert of_file == ClusterSecret.of(write(SECRET, 0o440), {})
    assert of_file == ClusterSecret.of(EngineConfig(), {VARIABLE: f" {SECRET}\n"})
    assert of_file != ClusterSecret.of(EngineConfig(), {VARIABLE: SECRET[::-1]})
    assert ClusterSecret.of(EngineConfig(), {VARIABLE: " "}) is None


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620])
def test_a_file_that_others_may_read_or_write_is_refused(write, mode):
    config = write(SECRET, mode)
    with pytest.raises(SettingsError, match=rf"its mode is {mode:04o}.*chmod 600") as refused:
        ClusterSecret.of(config, {})
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("text", ["", "a" * 31, "a" * 31 + " \n", "a" * 4097, "a" * 10_000])
def test_a_short_or_endless_secret_is_refused_and_not_shown(write, text):
    for config, environment in ((write(text), {}), (EngineConfig(), {VARIABLE: text})):
        if text or config.secret_file:
            with pytest.raises(SettingsError, match=r"fewer than 32 bytes.*openssl") as refused:
                ClusterSecret.of(config, environment)
            assert "aaa" not in str(refused.value)


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, words in (
        ("missing", "No such file.*openssl rand"),
        ("", "regular|Is a directory"),
        ("fifo", "regular"),
    ):
        with pytest.raises(SettingsError, match=words):
            ClusterSecret.of(EngineConfig(secret_file=str(tmp_path / name)), {})


def test_keys_differ_by_purpose_and_secret_and_are_the_same_everywhere():
    one, other = ClusterSecret(SECRET.encode()), ClusterSecret.random()
    keys = [s.derive(*args) for s in (one, other) for args in (("a",), ("b",), ("a", 64))]
    assert len({key[:32] for key in keys}) == 6
    assert [len(key) for key in keys] == [32, 32, 64] * 2
    assert one.derive("a") == ClusterSecret(SECRET.encode()).derive("a")
    assert one.derive("a").hex().startswith("b5b4c0a8")
    assert SECRET not in repr(one)
