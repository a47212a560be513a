"""Asynchronous workers (mode aep): settings, and what such an engine refuses."""

import logging
import queue
import random
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_crew import asynchronous_engine
from families import AEP, settings_of
from served import CODE, failure

import jmoe
from serving.client import Client
from serving.config import (
    AsynchronousConfig,
    BrownoutConfig,
    EngineConfig,
    ServerConfig,
)
from serving.engine import Engine
from serving.errors import SettingsError
from serving.frontend.page.live import about
from serving.frontend.server import Server
from serving.pipeline.starters import ProcessStarter
from serving.startup import asynchronous
from serving.startup.asynchronous import with_mode
from serving.startup.prepare import check_start

SETTINGS = settings_of({}, "", **AEP)


async def test_what_has_no_effect_is_refused_and_not_shown():
    """Over sockets: changes that only steps know, and the page."""
    engine = asynchronous_engine(random.Random(0), mode="aep", brownout=SETTINGS.brownout)
    server = Server(ServerConfig(engine=SETTINGS, port=0, http_port=-1))
    await server.start()
    await server.attach(engine)
    refused = {}
    try:
        async with Client(server.address, server.addresses["admin"]) as client:
            refused["prefill_company"] = await failure(client.set_brownout(prefill_company=True))
            await client.set_brownout(controller="algorithm2", prefill_company=False)
            state, info = await client.get_brownout(), await client.server_info()
        page = about(server)
    finally:
        await server.stop()
    for name, error in refused.items():
        assert error.code() is CODE.INVALID_ARGUMENT, name
        assert "with asynchronous workers (mode aep): " in error.details()
    assert not state.prefill_company
    assert not info.threshold_buckets_percent
    assert not info.part_layers
    assert page["controllers"] == ["algorithm2", "predictive"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"asynchronous": AsynchronousConfig(1, 0)}, r"asynchronous\.experts is 0.*--experts"),
        ({"asynchronous": AsynchronousConfig(2, 2, copies=3)}, r"copies is 3.*at most .*, 2"),
        ({"mode": "steps"}, r"attention is 2; it must be 0 in engine\.mode steps"),
        ({"mode": "both"}, "mode is 'both'.*auto, steps, aep"),
        ({"prefix_reuse": "yes"}, "prefix_reuse is 'yes'.*auto, on, off"),
        (
            {"mode": "auto", "asynchronous": AsynchronousConfig(2, 1, workers="ray")},
            "workers is 'ray'; it must be threads unless",
        ),
        (
            {"asynchronous": AsynchronousConfig(2, 1, layer_rule="lifo")},
            r"layer_rule: .*'lifo'",
        ),
    ],
)
async def test_what_does_not_go_together_is_named(changes, words):
    with pytest.raises(SettingsError, match=words):
        await Engine.start(replace(SETTINGS, **changes), progress=lambda *_: None)


def test_an_open_mode_takes_what_the_forecast_says_and_tells_why(caplog):
    found = with_mode(replace(SETTINGS, mode="auto"))
    assert (found.mode, found.mesh, found.asynchronous.attention) == ("steps", "ep=5", 0)
    assert re.search("5 devices take steps together .*since .*host", caplog.text)


def test_who_asks_for_it_gets_it_with_one_warning(caplog):
    assert with_mode(SETTINGS) == SETTINGS
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "the forecast for H200s is against it" in caplog.text
    caplog.clear()
    assert with_mode(EngineConfig()).mode == "steps"
    assert not caplog.records


def test_the_forecast_reads_a_model_in_jmoes_own_format(tmp_path):
    jmoe.save(jmoe.load(SETTINGS.model, "float32"), tmp_path / "own")
    own = replace(SETTINGS, model=str(tmp_path / "own"))
    check_start(own)
    assert with_mode(own) == own


@pytest.mark.parametrize(
    ("visible", "platforms", "wanted"),
    [
        (None, "", "1"),
        ("4,7", "cuda", "7"),
        ("4", "", "each worker needs a device of its own"),
        ("", "", ""),
        ("-1", "", "-1"),
        ("4", "cpu", "4"),
        (None, "cpu", "unset"),
    ],
)
def test_each_process_sees_a_gpu_of_its_own_or_what_the_server_sees(
    visible, platforms, wanted, monkeypatch, tmp_path
):
    python, seen, reasons = tmp_path / "python", tmp_path / "seen", queue.Queue()
    python.write_text(f'#!/bin/sh\nprintf %s "${{CUDA_VISIBLE_DEVICES-unset}}" >{seen}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assignment = SimpleNamespace(index=1, name="experts-0", to_json=lambda: "{}")
    ProcessStarter().start(assignment, reasons.put)
    reason = reasons.get(timeout=60)
    assert (seen.read_text() if seen.exists() else reason.partition(", and ")[2]) == wanted


async def test_a_model_without_united_experts_is_served_without_brownout(caplog):
    settings = replace(SETTINGS, brownout=BrownoutConfig(strategy="partial"))
    with pytest.raises(SettingsError, match="strategy is 'partial'"):
        await Engine.start(settings, progress=lambda *_: None)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_a_cluster_is_left_where_the_model_cannot_be_served(monkeypatch):
    """Or the next start in this process would find itself in it."""
    left = []
    starter = SimpleNamespace(host="127.0.0.1", close=lambda: left.append(True))
    monkeypatch.setattr(asynchronous, "starter_of", lambda _: starter)
    own = replace(SETTINGS.asynchronous, workers="processes")
    settings = replace(SETTINGS, asynchronous=own, brownout=BrownoutConfig(strategy="partial"))
    with pytest.raises(SettingsError, match="strategy is 'partial'"):
        asynchronous.prepare_crew(settings, None, lambda *_: None)
    assert left == [True]
