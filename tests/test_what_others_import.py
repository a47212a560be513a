"""What scripts and notebooks of others rely on is there under the names that the pages give."""

import ast
import importlib
import os
import re
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
import typer

import jmoe
from serving.cli.main import app
from serving.config import EngineConfig
from serving.proto.inference import inference_pb2
from serving.proto.jmoe.v1 import jmoe_pb2
from serving.request import SamplingParams

PAGES = ("README.md", "docs/notebook.md")


def imports(text):
    """Returns (module, name or None) of each import in the page's Python blocks."""
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node.module, alias.name) for alias in node.names)


def test_what_the_pages_import_is_there(request):
    found = set()
    for page in PAGES:
        found |= set(imports((request.config.rootpath / page).read_text(encoding="utf-8")))
    assert ("serving.engine", "Engine") in found
    for module, name in found:
        loaded = importlib.import_module(module)
        assert name is None or hasattr(loaded, name), f"{module}.{name}"


def test_the_notebook_api():
    assert set(jmoe.__all__) == {
        "Brownout", "CheckpointError", "ConfigError", "Family", "ForwardStats", "Generation",
        "Model", "ModelConfig", "Sharing", "SharingError", "brownout", "forward", "generate",
        "load", "load_family", "make_mesh", "save",
    }  # fmt: skip
    assert all(hasattr(jmoe, name) for name in jmoe.__all__)


def test_attributes_of_a_model(request):
    model = jmoe.load(request.config.rootpath / "tests/golden/qwen2_moe", "float32")
    for name in ("name", "path", "config", "dtype", "params", "pool", "table", "united", "way"):
        assert hasattr(model, name), name
    for name in ("tokenizer", "num_parameters", "use_way", "prepare"):
        assert hasattr(model, name), name


def test_older_names_of_a_model_warn_and_work(request):
    model = jmoe.load(request.config.rootpath / "tests/golden/qwen2_moe", "float32")
    with pytest.warns(DeprecationWarning, match="num_united_slots"):
        assert model.united_places == model.num_united_slots
    other = {**model.params, "final_norm": 2 * model.params["final_norm"]}
    before = jmoe.forward(model, np.array([[3, 4]]))
    with pytest.warns(DeprecationWarning, match="with_weights"):
        model.params = other
    assert not np.array_equal(jmoe.forward(model, np.array([[3, 4]])), before)


def test_commands():
    found = {command.name for command in typer.main.get_command(app).commands.values()}
    assert {"serve", "generate", "bench", "demo", "distill", "evaluate", "info"} <= found


def test_names_on_the_wire():
    methods = {
        f"{service.full_name}/{method.name}"
        for service in jmoe_pb2.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods == {
        "jmoe.v1.Generation/Generate",
        "jmoe.v1.Generation/GetServerInfo",
        "jmoe.v1.Generation/GetModelInfo",
        "jmoe.v1.Admin/GetBrownout",
        "jmoe.v1.Admin/SetBrownout",
        "jmoe.v1.Admin/GetStats",
        "jmoe.v1.Admin/LoadModel",
        "jmoe.v1.Admin/UnloadModel",
    }


def test_names_of_the_open_inference_protocol():
    (service,) = inference_pb2.DESCRIPTOR.services_by_name.values()
    assert service.full_name == "inference.GRPCInferenceService"
    assert {method.name for method in service.methods} == {
        "ServerLive",
        "ServerReady",
        "ModelReady",
        "ServerMetadata",
        "ModelMetadata",
        "ModelInfer",
        "ModelStreamInfer",
        "ModelConfig",
        "RepositoryIndex",
    }


def test_settings_and_requests_keep_their_fields():
    assert {"max_num_seqs", "max_model_len", "page_size", "num_pages", "max_prefill_tokens"} <= {
        field.name for field in fields(EngineConfig)
    }
    assert {"max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop"} <= {
        field.name for field in fields(SamplingParams)
    }


def test_the_folder_that_holds_a_clone_hides_no_installed_package(tmp_path):
    (tmp_path / "jmoe").mkdir()  # as `git clone` makes it, with no __init__.py at its top
    environment = {name: at for name, at in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import jmoe; jmoe.load"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
