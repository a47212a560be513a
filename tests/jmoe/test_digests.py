"""Hashes of files: every byte counts, and a file that has not changed is not read again."""

import os
import time

import pytest

from jmoe import digests

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Returns the list of parts that are read, of files that all last changed long ago."""
    parts, part, now = [], digests._part, time.time_ns()
    monkeypatch.setattr(digests, "PART_BYTES", 1000)
    monkeypatch.setattr(digests, "REMEMBERED", str(tmp_path / "own" / "digests.json"))
    monkeypatch.setattr(digests.time, "time_ns", lambda: now + 3600 * 10**9)
    monkeypatch.setattr(digests, "_part", lambda which: parts.append(which) or part(which))
    return parts


def one(path):
    return digests.file_digests([path])[0]


def test_any_bit_counts_and_what_did_not_change_is_not_read(read, tmp_path):
    content = bytearray(os.urandom(2500))
    path = tmp_path / "weights"
    path.write_bytes(content)
    first, times = one(path), os.stat(path)
    assert len(read) == 3
    assert one(path) == first
    link = tmp_path / "link"
    link.symlink_to(path)
    assert one(link) == first
    assert len(read) == 3
    for at in (0, 999, 1000, 2499):
        content[at] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as `cp --preserve` leaves it
        assert one(path) != first
        content[at] ^= 1
    path.write_bytes(content)
    assert one(path) == first
    assert len(read) == 3 + 4 * 3 + 3


def test_a_file_that_changed_just_now_is_read_again(read, tmp_path, monkeypatch):
    path = tmp_path / "weights"
    path.write_bytes(bytes(2500))
    monkeypatch.setattr(digests.time, "time_ns", lambda: os.stat(path).st_mtime_ns + 10**9)
    assert one(path) == one(path)
    assert len(read) == 6


def test_a_file_that_changes_meanwhile_is_refused(read, tmp_path, monkeypatch):
    path = tmp_path / "weights"
    path.write_bytes(bytes(2500))
    part = digests._part

    def meanwhile(which):
        path.write_bytes(bytes(2501))
        return part(which)

    monkeypatch.setattr(digests, "_part", meanwhile)
    with pytest.raises(OSError, match="weights changed while it was read"):
        one(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 1}', b"\xff", b"[" * 10**5])
def test_a_broken_memory_is_none(read, tmp_path, content):
    path, memory = tmp_path / "weights", tmp_path / "own" / "digests.json"
    path.write_bytes(bytes(2500))
    memory.parent.mkdir()
    memory.write_bytes(content)
    assert one(path) == one(path)
    assert len(read) == 3


def test_without_a_place_for_it_nothing_is_remembered(read, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(2500))
    (tmp_path / "own").write_text("no folder")
    assert one(path) == one(path)
    assert len(read) == 6
