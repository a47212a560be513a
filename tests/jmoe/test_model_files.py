"""Hostile files in a model's directory: nothing but regular files in it is read."""

import json
import os
import shutil

import pytest

import jmoe
from jmoe.checkpoint import CheckpointError, TensorFiles
from tests.jmoe.conftest import GOLDEN


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
        "model.safetensors.index.json",
        "united.safetensors",
    ],
)
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_fifo_or_device_is_refused_and_not_opened(tmp_path, name, kind):
    path = shutil.copytree(GOLDEN / "mixtral", tmp_path / "model")
    if name in ("tokenizer_config.json", "chat_template.jinja"):  # read beside a tokenizer
        shutil.copy(jmoe.api.resolve("bundled") / "tokenizer.json", path)
    (path / name).unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path / name)
    else:
        (path / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=rf"{name}.* not a regular file"):
        jmoe.load(path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x", "a/../../x", "", "a\nb"])
def test_an_index_names_files_of_its_folder_alone(tmp_path, name):
    index = {"weight_map": {"a": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="which is no file in its folder"):
        TensorFiles(tmp_path)


def test_links_as_the_hubs_cache_has_them_are_followed(tmp_path):
    snapshot = tmp_path / "snapshots" / "x"
    snapshot.mkdir(parents=True)
    shutil.copytree(GOLDEN / "mixtral", tmp_path / "blobs")
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert jmoe.load(snapshot).config.num_experts
