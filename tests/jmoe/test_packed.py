"""Packed weights are unpacked once, as they were."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jmoe.packed import pack, unpacked


@pytest.fixture
def model(tmp_path):
    """Returns a packed directory, and what its files held."""
    folder = tmp_path / "here" / "model"
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0).bytes
    held = {"a.safetensors": draw(1001), "b.safetensors": draw(2000), "config.json": b"{}"}
    for name, body in held.items():
        (folder / name).write_bytes(body)
    pack(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a.npz", "b.npz", "config.json"]
    return folder, held


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_byte_comes_back_under_the_same_name(model, tmp_path):
    folder, held = model
    found = unpacked(folder, tmp_path / "cache")
    assert found.name == "model"
    assert contents(found) == held


def test_processes_that_come_together_share_one_copy(model, tmp_path):
    folder, held = model
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: unpacked.__wrapped__(folder, tmp_path / "cache"), range(8)))
    assert len(found) == 1
    assert contents(found.pop()) == held
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_other_contents_are_another_copy(model, tmp_path):
    folder, _ = model
    before = unpacked.__wrapped__(folder, tmp_path / "cache")
    (folder / "config.json").write_text("{ }")
    after = unpacked.__wrapped__(folder, tmp_path / "cache")
    assert after != before
    assert contents(after)["config.json"] == b"{ }"


def test_a_cache_that_cannot_be_written_is_done_without(model, tmp_path):
    folder, held = model
    (tmp_path / "cache").write_text("a file")
    found = unpacked(folder, tmp_path / "cache")
    assert contents(found) == held
    assert os.path.commonpath([found, tmp_path / "cache"]) != str(tmp_path / "cache")


def test_the_tree_travels_with_the_wheels_that_a_gpu_image_lacks():
    """15.5 MB of wheels (`make gpu-pack`) go along where 64 MiB, 67.1 MB, may be copied; no test on
    a GPU reads what is left behind.
    """
    root = Path(__file__).parents[2]
    listed = subprocess.run(
        ["git", "ls-files", "-z", ":!jmoe/bundled_family", ":!tests/golden/*/config_changes.npz"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    names = listed.stdout.decode().split("\0")[:-1]
    assert len(names) > 500
    assert sum((root / name).stat().st_size for name in names if (root / name).exists()) < 51.4e6
