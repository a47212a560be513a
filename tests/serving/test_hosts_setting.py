"""What can be wrong with a mesh over several processes, told before anything is loaded."""

import re
from dataclasses import replace

import pytest

from serving.cluster import hosts
from serving.cluster.secret import VARIABLE, ClusterSecret
from serving.config import EngineConfig
from serving.errors import SettingsError
from serving.settings import reading as settings
from serving.startup.prepare import prepare

GIVEN = {
    "engine.mesh": "ep=4",
    "engine.coordinator": "10.0.0.1:7000",
    "engine.num_processes": "2",
    "engine.process_index": "0",
}


def load(**changes):
    return settings.load("demo", {**GIVEN, **{f"engine.{k}": v for k, v in changes.items()}}).engine


@pytest.mark.parametrize("address", ["10.0.0.1:7000", "host-0.pods:65535", "[::1]:7000"])
def test_all_three_are_taken(address):
    assert load(coordinator=address).coordinator == address


@pytest.mark.parametrize("missing", ["coordinator", "num_processes", "process_index"])
def test_all_or_none(missing):
    given = {k: v for k, v in GIVEN.items() if not k.endswith(missing)}
    flag = "--" + missing.replace("_", "-")
    with pytest.raises(SettingsError, match=rf"without engine\.{missing}: .* give {flag}, too"):
        settings.load("demo", given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"coordinator": "10.0.0.1"}, "engine.coordinator is '10.0.0.1'; it must be HOST:PORT"),
        ({"coordinator": ":7000"}, "HOST:PORT"),
        ({"coordinator": "host:0"}, "HOST:PORT"),
        ({"coordinator": "host:65536"}, "HOST:PORT"),
        ({"coordinator": "http://host:7000"}, "HOST:PORT"),
        ({"num_processes": "1"}, "engine.num_processes is 1; it must be 2 or more"),
        ({"num_processes": "-3"}, "2 or more"),
        ({"process_index": "2"}, "engine.process_index is 2; it must be between 0 and 1"),
        ({"process_index": "-2"}, "between 0 and 1"),
        ({"mesh": ""}, "engine.mesh is ''; it must be ep=N with N a multiple of"),
        ({"mesh": "ep=3"}, "a multiple of engine.num_processes, 2"),
        (
            {"coordinator": "", "num_processes": "0", "process_index": "-1", "secret_file": "s"},
            "engine.secret_file is 's'; it must be empty for a server of one process",
        ),
        ({"peer_timeout_s": "0"}, "engine.peer_timeout_s is 0.0; it must be above 0"),
        ({"join_timeout_s": "nan"}, "engine.join_timeout_s"),
    ],
)
def test_what_is_wrong_is_refused_by_name(changes, words):
    with pytest.raises(SettingsError) as refused:
        load(**changes)
    assert words in str(refused.value)


def test_an_engine_is_process_0_and_loads_its_own_model():
    with pytest.raises(SettingsError, match="follows process 0 and serves nothing"):
        prepare(load(process_index="1"), None, lambda *_: None)
    with pytest.raises(SettingsError, match="leave the model out"):
        prepare(load(), object(), lambda *_: None)


@pytest.mark.parametrize("address", ["10.0.0.1:7000", "0.0.0.0:7000", "host-0:7000", "[::]:7000"])
@pytest.mark.parametrize("begin", [hosts.lead, hosts.join])
def test_other_machines_are_let_in_by_a_secret_only(begin, address, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(SettingsError, match=f"{re.escape(address)}.*openssl rand.*--secret-file"):
        begin(load(coordinator=address))
    for local in ("127.0.0.1:7000", "[::1]:7000", "localhost:7000"):
        assert hosts.secret_of(load(coordinator=local)) is None
    monkeypatch.setenv(VARIABLE, "s" * 32)
    assert hosts.secret_of(load(coordinator=address)) == ClusterSecret(b"s" * 32)


def test_jax_is_reached_where_process_0_is(monkeypatch):
    """Which may listen on all addresses, and says so."""
    met = []
    monkeypatch.setattr(hosts, "connect", lambda _, address: met.append(address))
    monkeypatch.setattr(hosts.Leader, "join", lambda *_: "0.0.0.0:7001")
    config = load(coordinator="127.0.0.1:7000", process_index="1")
    hosts.join(replace(config, model="bundled")).close()
    assert met == ["127.0.0.1:7001"]


def test_jmoes_own_format_is_refused(tmp_path):
    (tmp_path / "jmoe.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SettingsError, match="load Hugging Face directories"):
        hosts.check(EngineConfig(model=str(tmp_path), num_processes=2))


def test_facts_are_those_that_programs_and_weights_follow_from(tmp_path):
    config = load()
    assert hosts.facts(config) == hosts.facts(replace(config, process_index=1, watchdog_s=1.0))
    other = replace(config, page_size=32, balance=replace(config.balance, spare_slots=1))
    one, other = hosts.facts(config), hosts.facts(other)
    differ = {name for name in one if one[name] != other[name]}
    assert differ == {"engine.page_size", "engine.balance.spare_slots"}
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    one = hosts.facts(replace(config, model=str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"123456789")
    other = hosts.facts(replace(config, model=str(tmp_path)))
    assert {name for name in one if one[name] != other[name]} == {"the model in engine.model"}


def test_a_setting_is_the_same_however_its_value_is_written():
    """A notebook's numbers are as they are given, and a worker's come from JSON."""
    given = replace(load(), memory_fraction=1, decode_buckets=[8, 16])
    read = replace(load(), memory_fraction=1.0, decode_buckets=(8, 16))
    assert hosts.facts(given) == hosts.facts(read)


def test_all_settings_are_compared_but_those_that_are_a_processes_own():
    named = {name.removeprefix("engine.") for name in hosts.facts(load())}
    assert settings.keys(EngineConfig).keys() > hosts.OWN
    assert settings.keys(EngineConfig).keys() - named == hosts.OWN


@pytest.mark.parametrize("name", ["model.safetensors", "united.safetensors", "config.json"])
def test_a_bit_in_a_file_makes_it_another_model(tmp_path, name):
    for file in ("model.safetensors", "united.safetensors", "config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes(bytes(100))

    def told():
        return hosts.facts(load(model=str(tmp_path)))["the model in engine.model"]

    before = told()
    (tmp_path / "tokenizer.json").write_bytes(b"{}")  # process 0 alone reads it
    assert told() == before
    (tmp_path / name).write_bytes(bytes(99) + b"\1")  # as large
    assert told() != before
