"""`jmoe info`: the ways that are there and what others would take, and what a server says."""

import asyncio
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import jmoe
from jmoe.attention import Paged
from jmoe.checkpoint import CheckpointError, weights_digest
from jmoe.config import read_config
from jmoe.display import size
from jmoe.family import load_family
from jmoe.parallel.placement import of_tables
from jmoe.sharing import write_sharing
from serving.cli import info as cli_info
from serving.cli import main as cli
from serving.cli import model_info
from serving.client.connection import Connection
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2_grpc as rpc
from tests.jmoe.conftest import add_united
from tests.jmoe.family_oracles import drawn_map
from tests.variants import variant

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

GOLDEN = Path(__file__).parents[1] / "golden"


def shown(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["jmoe", "info", *arguments])
    monkeypatch.setenv("COLUMNS", "20")  # nothing is cut where the terminal is narrow
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    return capsys.readouterr().out


def test_ways_that_are_there_and_ways_that_are_not(united_dirs, capsys, monkeypatch):
    text = shown(capsys, monkeypatch, str(united_dirs("qwen2_moe")))
    there, further = text.split("United experts that are there\n")[1].split(
        "\n\nWhat each further way would take\n"
    )
    assert re.findall(r"^way (\d+) +(\d+) a layer, .* on disk$", there, re.M) == [
        ("2", "4"),
        ("3", "3"),
    ]
    assert re.findall(r"^way (\d+) +(\d+) a layer, .* in bfloat16$", further, re.M) == [("4", "2")]


@pytest.mark.deep
def test_a_directory_in_jmoes_own_format(united_dirs, tmp_path, capsys, monkeypatch):
    source = united_dirs("qwen2_moe")
    jmoe.save(jmoe.load(source, "float16", quantize="int4"), tmp_path / "saved")
    text, others = (shown(capsys, monkeypatch, str(at)) for at in (tmp_path / "saved", source))
    said = "float16, not quantized, room for 4 united experts a layer"
    own, stored = re.subn(rf"stored in jmoe's own format +{said}\n", "", text)
    assert (stored, own.split()) == (1, others.split())
    shutil.rmtree(tmp_path / "saved" / "state")
    monkeypatch.setattr(sys, "argv", ["jmoe", "info", str(tmp_path / "saved")])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "saved is not readable: " in capsys.readouterr().err


def test_bytes_are_those_of_the_file(united_dirs):
    directory = united_dirs("qwen2_moe")
    size = (directory / "united.safetensors").stat().st_size
    assert 0.8 * size < sum(model_info.united_bytes(directory).values()) <= size


def test_a_model_without_united_experts(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, str(GOLDEN / "qwen2_moe"))
    assert "United experts that are there\nnone\n" in text
    assert "What united experts would take\nway 2 " in text


def test_a_geometry_has_no_ways_at_all(capsys, monkeypatch):
    text = shown(capsys, monkeypatch, "--model-config", "mixtral-8x7b")
    assert "that are there" not in text
    assert "What united experts would take" in text
    assert "131,072 bytes a token" in text


def test_a_models_facts_as_json_are_those_of_the_text(united_dirs, capsys, monkeypatch):
    model = str(united_dirs("qwen2_moe"))
    text = shown(capsys, monkeypatch, model, "--device-gb", "80")
    said = json.loads(shown(capsys, monkeypatch, model, "--device-gb", "80", "--json"))
    assert f"{said['num_experts']}, {said['experts_per_token']} a token" in text
    assert f"{said['kv_bytes_per_token']['bfloat16']:,} bytes a token" in text
    assert f"{said['kv_tokens']['bfloat16']:,} tokens in" in text
    assert said["united_bytes_on_disk"].keys() == {"way2", "way3"}
    assert f"{size(said['united_bytes_on_disk']['way3'])} on disk" in text
    assert re.search(rf"in float32 +{size(said['weight_bytes']['float32'])}\n", text)


@pytest.mark.parametrize("flags", [["bundled", "--mesh", "ep=2"], ["--family", "f.json"]])
def test_json_of_what_it_does_not_tell_is_refused(flags, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jmoe", "info", "--json", *flags])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert f"leave {flags[-2]} out, or --json" in capsys.readouterr().err


@pytest.mark.sized(deep=("DeepSeek-V3-bf16-changes0-a kernel",))
@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("DeepSeek-V3-bf16", {}, "a kernel"),
        ("DeepSeek-V2-Lite", {"kv_lora_rank": 640}, "XLA"),
        ("gpt-oss-120b", {}, "a kernel"),
        ("GLM-4.5-Air", {"head_dim": 96}, "XLA"),
    ],
)
def test_it_says_what_attends_on_a_hopper_gpu(capsys, monkeypatch, tmp_path, name, changes, said):
    published = Path(__file__).parents[1] / "published_configs" / f"{name}.json"
    path = tmp_path / "model.yaml"
    path.write_text(json.dumps(json.loads(published.read_text()) | changes))
    text = shown(capsys, monkeypatch, "--model-config", str(path))
    assert re.search(rf"attention on Hopper +{said}\n", text)


def test_a_token_takes_less_past_a_window(capsys, monkeypatch, tmp_path):
    name = Path(__file__).parents[2] / "configs/models/mixtral-8x7b.yaml"
    path = tmp_path / "windowed.yaml"
    path.write_text(re.sub("sliding_window: .*", "sliding_window: 4096", name.read_text()))
    text = shown(capsys, monkeypatch, "--model-config", str(path))
    assert "131,072 bytes a token, 0 past 4,096\n" in text
    in_fp8 = 32 * 2 * 8 * (128 + 4)
    assert re.search(rf"KV cache in fp8 +{in_fp8:,} bytes a token, 0 past 4,096\n", text)
    cfg = model_info.load_model_config(path)
    for layers, want in (((0, 8, 64) * 2, (6, 6, 4, 2, 2)), ((8, 8, 2), (3, 2, 0, 0, 0))):
        cfg = replace(
            cfg,
            num_layers=len(layers),
            moe_layers=(True,) * len(layers),
            layer_attention=tuple(map(Paged, layers)),
        )
        of_a_layer = 2 * 8 * 128 * 2
        found = [model_info.kv_bytes_per_token(cfg, "bfloat16", past) for past in (0, 7, 8, 64, 99)]
        assert found == [count * of_a_layer for count in want]


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Returns the directories of a base and two variants, of which the last borrows the base's
    united experts, and their map.
    """
    where = tmp_path_factory.mktemp("family")
    paths = {"base": variant(GOLDEN / "qwen2_moe", where / "base", 0)}
    paths |= {name: variant(paths["base"], where / name, at) for at, name in enumerate("ab", 1)}
    for name in ("base", "a"):
        add_united(paths[name], ways=(3, 2) if name == "a" else (2, 3, 4))
    sharing = drawn_map(paths, read_config(paths["base"]))
    prints = tuple(map(weights_digest, paths.values()))
    sharing = replace(sharing, fingerprints=prints, united=(0, 1, 0), united_ways=(2, 3))
    write_sharing(where / "family.json", sharing)
    return paths, where / "family.json"


def test_a_family_takes_what_it_takes_once_it_is_loaded(family, capsys, monkeypatch):
    paths, path = family
    flags = [f"--model={name}={directory}" for name, directory in paths.items()]
    text = shown(capsys, monkeypatch, "--family", str(path), *flags)
    said = dict(re.split("  +", line, maxsplit=1) for line in text.splitlines() if "  " in line)
    loaded = load_family(paths, path, "bfloat16")
    cfg, pool = loaded.config, loaded[0].pool
    assert said["models"] == "base, a, b"
    own = 3 * cfg.num_moe_layers * cfg.num_experts
    routed = loaded.sharing.num_slots
    assert said["routed experts"] == f"{routed} slots for {own} of all models"
    assert said["shared"] == f"{loaded.sharing.shared_percent:.1f} % of what could be"
    united = pool.num_slots - routed
    a_layer = loaded[0].num_united_slots
    assert united == 2 * cfg.num_moe_layers * a_layer  # the base's and a's
    assert said["slots of united experts"].startswith(f"{united}, {a_layer} a layer of each model")
    assert said["united experts of b"] == "those of base"
    assert said["pool in bfloat16"] == size(pool.num_slots * pool.slot_bytes)
    others = [sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)) for model in loaded]
    assert said["other weights of each model"].startswith(size(others[0]))
    whole = sum(others) + pool.num_slots * pool.slot_bytes
    assert said["weights in bfloat16"] == size(whole)
    assert sorted(loaded[2].united) == [2, 3]
    section = text.split("United experts that all models have\n")[1].split("\n\n")[0]
    assert re.findall(r"^way (\d) ", section, re.M) == ["2", "3"]
    left = re.findall(r"left for KV.*? ([\d,]+) tokens", text)
    each = model_info.kv_bytes_per_token(cfg, "bfloat16")
    fewest = cfg.num_moe_layers * cfg.num_experts
    away = [0, 2 * others[0], 2 * others[0] + (routed - fewest) * pool.slot_bytes]
    counts = [int(count.replace(",", "")) for count in left]
    assert np.diff(counts).tolist() == pytest.approx(np.diff(away) / each, abs=1)


def test_a_family_over_a_mesh_takes_what_its_placement_says(family, capsys, monkeypatch):
    paths, path = family
    flags = [f"--model={name}={directory}" for name, directory in paths.items()]
    text = shown(capsys, monkeypatch, "--family", str(path), *flags, "--mesh", "ep=2")
    (slots,) = re.findall(r"slots on each device, --mesh ep=2 +([\d,]+)", text)
    loaded = load_family(paths, path, "bfloat16")
    tables = np.stack([np.asarray(model.table.slots) for model in loaded])
    placement, _ = of_tables(tables, loaded.config.num_experts, 2)
    held = np.asarray(placement.local).max(axis=(1, 2)) + 1  # slots, of both devices
    assert int(slots) == loaded.config.num_moe_layers * placement.room >= held.max()
    assert int(slots) <= loaded[0].pool.num_slots / 2 + 3 * loaded.config.num_moe_layers
    assert re.search(r"left for KV on each device, --mesh ep=2 .* tokens", text)
    lacking = loaded.config.num_experts - -(-loaded.config.num_experts // 2)
    assert re.search(rf"spare slots of auto, at most +{lacking}, .* each, beside KV", text)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--family", "F", "bundled"], "give one of MODEL, --model-config, --family and --addr"),
        (["--model", "a=b"], "--model a=b needs --family; of a single model, give MODEL"),
        (["--family", "F", "--mesh", "ep=2", "--in-flight", "9"], "give MODEL, one of the family"),
        (["--family", "F"], "--family needs --model NAME=DIR for each model"),
        (["--family", "nowhere.json", "--model", "a=b"], "--family is nowhere.json; there is no"),
    ],
)
def test_a_family_that_cannot_be_described(flags, words, family, capsys, monkeypatch):
    flags = [str(family[1]) if flag == "F" else flag for flag in flags]
    monkeypatch.setattr(sys, "argv", ["jmoe", "info", *flags])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_a_family_of_other_weights(family, capsys, monkeypatch):
    paths, path = family
    flags = [f"--model={name}={paths['base']}" for name in paths]
    monkeypatch.setattr(sys, "argv", ["jmoe", "info", "--family", str(path), *flags])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert "was made with them and is not named" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"no safetensors", None])
def test_a_file_that_is_not_one_of_united_experts(content, copy):
    path = copy("qwen2_moe") / "united.safetensors"
    if content is None:
        save_file({"model.norm": np.zeros(2, np.float32)}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(f"{path} is not readable")):
        model_info.united_bytes(path.parent)


class Server(rpc.GenerationServicer, rpc.AdminServicer):
    status, admin_port = "ready", 0

    async def GetServerInfo(self, request, context):
        return pb.ServerInfo(
            version="0.1.0",
            status=self.status,
            admin_port=self.admin_port,
            num_kv_pages=10**12,
            platform="gpu NVIDIA H200",
            part_layers={"decode 16": 3, "decode 4": 5},
            implementations={
                "decode attention": "Mosaic kernel",
                "prefill attention": "batched XLA",
                "decode routing": "Mosaic kernel",
            },
            best_effort_wait_s=float("inf"),
        )

    async def GetModelInfo(self, request, context):
        return pb.ModelInfo(name="m", united_ways=[2, 4])

    async def GetBrownout(self, request, context):
        return pb.BrownoutState(
            strategy="partial",
            way=8,
            decode_threshold_percent=33.75,
            itl_slo_s=0.0123,
            itl_p90_s=float("nan"),
            objective_state="overloaded: brownout is exhausted, refusing 3/s",
            max_expected_loss=0.05,
            least_threshold_percent=30,
            models=[
                pb.ModelBrownout(name="m", ceiling_percent=100),
                pb.ModelBrownout(name="n", itl_slo_s=0.0123, floor_percent=60, ceiling_percent=90),
            ],
        )

    async def GetStats(self, request, context):
        return pb.Stats(
            uptime_s=1234567.5,
            expert_visits=10**15,
            priced_tokens=2000,
            expected_loss_nats=25.0,
            audits=[
                pb.Audit(model="m", num_scored=60, excess_nats=0.1, expected_nats=0.0125),
                pb.Audit(model="n", num_scored=60, excess_nats=0.1, expected_nats=float("nan")),
            ],
            refused=[
                pb.Refused(key=key, priority=priority, count=count)
                for key, priority, count in (
                    ("alice", "latency_sensitive", 4000),
                    ("", "any", 2),
                    ("alice", "best_effort", 1),
                )
            ],
        )


def asked(admin=True, **settings):
    """Returns what `info --address` prints of a server whose admin service is on a port of its
    own.
    """

    async def run():
        servicer, servers, ports = Server(), [], []
        for key, value in settings.items():
            setattr(servicer, key, value)
        for add in (
            rpc.add_GenerationServicer_to_server,
            rpc.add_AdminServicer_to_server,
        ):
            server = grpc.aio.server()
            add(servicer, server)
            ports.append(server.add_insecure_port("127.0.0.1:0"))
            servers.append(server)
            await server.start()
        if admin:
            servicer.admin_port = ports[1]
        address = f"127.0.0.1:{ports[0]}"
        said = await asyncio.to_thread(cli_info._ask, address, None, Connection())
        for server in servers:
            await server.stop(0)
        text = cli_info._text(cli_info._in_words(address, *said))
        return text, json.loads(cli_info._json(address, *said)), ports[1]

    text, said, port = asyncio.run(run())
    values = dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines() if "  " in line)
    return values, said, port


def test_a_server_says_in_words_where_its_admin_service_is_and_how_it_does():
    values, said, port = asked()
    assert values["admin service"] == said["admin_address"] == f"127.0.0.1:{port}"
    assert values["KV cache"] == "1,000,000,000,000 pages of 0 tokens"
    assert values["united experts"] == "ways 2, 4"
    assert values["strategy"] == "partial, way 8"
    assert values["visits kept exact, at least"] == "prefill 0.0 %, decode 33.8 %, fixed"
    assert values["inter-token latency"] == "no samples, SLO 12.3 ms"
    assert values["layers per launch"].startswith("decode 4: 5, decode 16: 3 ")
    assert values["by Mosaic kernel"] == "decode attention, decode routing"
    assert values["by batched XLA"] == "prefill attention"
    assert values["state"] == "overloaded: brownout is exhausted, refusing 3/s"
    assert values["refused, key alice"] == "4,000 latency-sensitive, 1 best-effort"
    assert values["refused, no key"] == "2 any"
    assert values["version"] == "0.1.0 on NVIDIA H200"
    assert "best-effort token" not in values
    assert values["uptime"] == "14 d 6 h 56 min 8 s"
    assert values["most expected loss"] == "0.05 nats a token: 30 % kept at least"
    assert values["of n"] == "SLO ITL 12.3 ms, 60 to 90 % of visits kept exact"
    assert "of m" not in values
    assert values["expected loss"] == "0.0125 nats a token, of 2,000 tokens"
    assert ", 0.0125 expected, of 60 answers audited" in values["brownout of m"]
    assert "expected" not in values["brownout of n"]
    assert values["expert visits"] == "1,000,000,000,000,000, 0.0 % degraded"
    assert not [name for name in values if "_" in name or "." in name]


def test_json_has_every_field():
    _, said, port = asked()
    messages = {"server": pb.ServerInfo, "brownout": pb.BrownoutState, "stats": pb.Stats}
    found = {name: said[name] for name in messages} | {"models": said["models"][0]}
    for name, kind in (messages | {"models": pb.ModelInfo}).items():
        assert set(found[name]) == {field.name for field in kind.DESCRIPTOR.fields}
    assert said["server"]["admin_port"] == port
    assert said["models"][0]["united_ways"] == [2, 4]
    assert said["brownout"]["itl_p90_s"] is said["admin_error"] is None
    assert said["stats"]["expert_visits"] == 10**15
    audit = said["stats"]["audits"][1]
    assert set(audit) == {field.name for field in pb.Audit.DESCRIPTOR.fields}
    assert (audit["expected_nats"], audit["is_exempt"]) == (None, False)


def test_a_server_without_an_admin_service():
    values, said, _ = asked(admin=False)
    assert re.fullmatch(r"127\.0\.0\.1:\d+ does not answer: .+", values["admin service"])
    assert said["admin_address"] in values["admin service"]
    assert said["admin_error"]
    assert "strategy" not in values
    assert "brownout" not in said
    assert said["models"][0]["name"] == "m"


def test_a_server_that_starts_is_asked_for_no_more():
    values, said, port = asked(status="starting")
    assert values["status"] == "starting"
    assert values["admin service"] == f"127.0.0.1:{port}"
    assert said["models"] == []
