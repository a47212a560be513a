"""`jmoe info MODEL`, also with `--mesh ep=N`: memory by hand, and what is printed."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jmoe.api import load
from jmoe.attention import FULL, Paged
from jmoe.config import from_hf
from jmoe.parallel.home import make_mesh
from serving.cli import main as cli
from serving.cli.model_info import (
    device_section,
    load_model_config,
    num_parameters,
    parallel_section,
    parse_mesh,
)
from serving.errors import SettingsError

HEADING = "Expert parallelism, ep="
GIB = 2**30
PUBLISHED = Path(__file__).parents[2] / "published_configs"


def shown(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["jmoe", "info", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    return capsys.readouterr().out


def gib(text):
    """Returns the first number of GiB in a row of the table."""
    return float(re.search(r"([\d.]+) GiB", text)[1])


@pytest.fixture(scope="module")
def qwen():
    return dict(parallel_section(load_model_config("qwen3-235b-a22b"), 8)[1])


def test_memory_of_qwen3_235b_on_eight_h200_by_hand(qwen):
    assert qwen["experts a device and layer"] == "16 of 128"
    experts = 94 * 16 * 3 * 4096 * 1536 * 2
    assert gib(qwen["experts a device"]) == pytest.approx(experts / GIB, abs=0.05)
    attention = 4096 * (64 + 4 + 4) * 128 + 64 * 128 * 4096 + 2 * 128 + 2 * 4096
    layers = 94 * (attention + 4096 * 128) * 2 + 4096 * 2
    embeddings = 2 * 151936 * 4096 * 2
    assert gib(qwen["other weights a device"]) == pytest.approx(
        (layers + embeddings) / GIB, abs=0.05
    )
    assert gib(qwen["layers without experts, again"]) == pytest.approx(layers / GIB, abs=0.05)
    rows, visits = 8 * 2048, 2 * 2048 * 8  # of a pass: twice a device's mean
    step = rows * 4096 * (2 + 4) + visits * (4096 + 1536 + 4096) * 2
    assert qwen["a step of 2,048 tokens a device"] == f"{step / 2**20:.1f} MiB"
    left = 141 * 10**9 - experts - 2 * layers - embeddings - step
    tokens = left // (2 * 94 * 4 * 128 * 2)
    assert gib(qwen["left for KV of 141 GB"]) == pytest.approx(left / GIB, abs=0.05)
    slot, kv = 94 * 3 * 4096 * 1536 * 2, (8 * 2048 + 64) * 2 * 94 * 4 * 128 * 2
    served = int(141e9 * 0.95 * 0.9) - experts - 2 * layers - embeddings - 2 * step
    spare = f"{(served - kv) // slot}, 3.3 GiB each, "
    assert qwen["spare slots of auto, at most"].startswith(spare)
    on_all = f"{8 * tokens:,} on all devices"
    in_fp8 = left // (2 * 94 * 4 * (128 + 4))
    said = f" {tokens:,} tokens in {tokens // 64:,} pages of 64 ({in_fp8:,} with fp8 KV); {on_all}"
    assert said in qwen["left for KV of 141 GB"]


def test_replicas_of_qwen3_235b_on_eight_h200(qwen):
    found = {name: text for name, text in qwen.items() if name.startswith("replicas at ")}
    counts = [re.match(r"\d+", text)[0] for text in found.values()]
    assert counts == ["0", "0", "7", "14"]
    assert [re.findall(r"[\d,]+", name)[0] for name in found] == ["512", "1,024", "2,048", "4,096"]
    assert "hidden behind the" in found["replicas at 2,048 tokens a device"]
    assert "longer than the" in found["replicas at 512 tokens a device"]
    least = {
        name: re.search(r"device has ([\d.]+) times the mean load", text)[1]
        for name, text in found.items()
    }
    assert found["replicas at 4,096 tokens a device"].endswith(
        "1.42 times the mean load; auto makes 7, which pay from 1.38 times"
    )
    assert found["replicas at 2,048 tokens a device"].endswith("mean load")
    assert qwen["sent at 2,048 tokens a device"].endswith(
        "; in halves, which takes 0.24 ms a layer less"
    )
    assert qwen["sent at 512 tokens a device"].endswith("by reduce-scatter")
    assert least["replicas at 2,048 tokens a device"] == "1.47"
    assert float(least["replicas at 512 tokens a device"]) > 4


def test_a_model_that_does_not_fit_is_told_what_is_missing():
    cfg = load_model_config("qwen3-235b-a22b")
    text = dict(parallel_section(cfg, 2, 80.0)[1])["left for KV of 80 GB"]
    assert re.fullmatch(r"nothing: [\d.]+ GiB are missing; take more devices, or larger ones", text)
    text = dict(parallel_section(cfg, 8, 86.5)[1])["left for KV of 86.5 GB"]
    assert text.endswith("take a smaller step")


def test_rows_that_are_delivered():
    found = dict(parallel_section(load_model_config("mixtral-8x7b"), 8)[1])
    assert found["sent at 64 tokens a device"].endswith("by reduce-scatter")
    text = found["sent at 2,048 tokens a device"]
    assert text.endswith(
        "to the devices alone that need a row: takes 0.30 ms a layer less than to all"
    )


def test_what_fits_in_one_device_and_over_how_few_others_do():
    """By hand: 199 GiB of weights are more than 131 GiB, half of the experts and the rest are not.
    Layers are there again, and 2,048 rows of 8 visits each."""
    path = PUBLISHED / "GLM-4.5-Air.json"
    cfg = from_hf(json.loads(path.read_text()))
    rows = dict(device_section(cfg)[1])
    assert rows["left for KV, all in bfloat16"].startswith("nothing: ")
    assert "left for KV, --mesh ep=4" not in rows
    experts = 45 * 128 * 3 * 4096 * 1408
    others = num_parameters(cfg) - experts
    again = others - 2 * 151552 * 4096
    of_step = 4096 * (4096 * 6 + 8 * (2 * 4096 + 1408) * 2)
    left = 141_000_000_000 - 2 * (experts // 2 + others + again) - of_step
    tokens, pages = left // 188_416, left // (64 * 188_416)
    said = f"{left / 2**30:.1f} GiB, {tokens:,} tokens in {pages:,} pages of 64 "
    said += f"({left // (46 * 2 * 8 * (128 + 4)):,} with fp8 KV); "
    assert rows["left for KV, --mesh ep=2"] == f"{said}{2 * tokens:,} on all devices"
    small = dict(device_section(load_model_config("qwen3-30b-a3b"), 80.0)[1])
    assert not [name for name in small if "--mesh" in name]
    assert "pages of 64" in small["left for KV, all in bfloat16"]
    with pytest.raises(ValueError, match="--device-gb is 0"):
        device_section(cfg, 0)


def test_windows_let_more_long_sequences_fit():
    cfg = load_model_config("qwen3-235b-a22b")
    windowed = replace(cfg, layer_attention=(Paged(128), FULL) * 47)
    whole, text = (
        dict(parallel_section(one, 8)[1])["left for KV of 141 GB"] for one in (cfg, windowed)
    )
    assert text.startswith(f"{whole}; ")
    left = 2 * 94 * 4 * 128 * 2 * int(whole.split()[2].replace(",", ""))
    each = 2 * 47 * 4 * 128 * 2 * (128 + cfg.max_position)
    assert text.endswith(f"; {left // each:,} sequences of {cfg.max_position:,} on each")


@pytest.mark.deep
def test_the_section_follows_what_is_shown_without_a_mesh(monkeypatch, capsys):
    for model in (["bundled"], ["--model-config", "mixtral-8x7b"]):
        alone = shown(monkeypatch, capsys, *model)
        assert HEADING not in alone
        assert shown(monkeypatch, capsys, *model, "--mesh", "") == alone
        text = shown(monkeypatch, capsys, *model, "--mesh", "ep=4", "--device-gb", "80")
        assert "left for KV of 80 GB" in text
        alone, _, fits = alone.partition("\n\nWhat fits in a GPU of 141 GB, ")
        assert "left for KV, experts in fp8 " in fits
        ours, theirs = (re.sub(" +", " ", part) for part in (text, alone))  # columns are wider
        assert ours.startswith(theirs.rstrip("\n") + f"\n\n{HEADING}4, ")


def test_slots_are_those_of_the_loaded_model():
    devices = min(4, jax.device_count())
    model = load("bundled", mesh=make_mesh(devices))
    cfg = model.config
    per_layer = model.weights.pool.down.shape[0] // devices // cfg.num_moe_layers
    rows = dict(parallel_section(cfg, devices, ways=tuple(model.united))[1])
    united = model.num_united_slots
    expected = f"{per_layer} of {cfg.num_experts} and {united} united ones"
    assert united > 0
    assert rows["experts a device and layer"] == expected


def test_other_weights_are_all_but_experts():
    cfg = load_model_config("mixtral-8x7b")
    active = num_parameters(cfg, 1) - num_parameters(cfg, 0)
    assert active == cfg.num_moe_layers * 3 * cfg.d_model * cfg.d_ff_expert


def test_a_mesh_is_read_as_the_setting():
    assert [parse_mesh(mesh) for mesh in ("ep=1", "ep=64", "")] == [1, 64, 1]
    for mesh in ("ep=0", "tp=2", "ep=x", "8"):
        with pytest.raises(SettingsError, match=f"engine.mesh is '{mesh}'.*or ep=N"):
            parse_mesh(mesh)
