"""Tests marked `simulated_time` run in an event loop with a clock of its own."""

import asyncio
import functools
import socketserver
import sys
from types import SimpleNamespace

import pytest
from counting import counting_engine

from serving.bench.simulated_time import SimulatedLoop


def pytest_asyncio_loop_factories(config, item):
    simulated = item.get_closest_marker("simulated_time") is not None
    return {"loop": SimulatedLoop if simulated else asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def servers_stop_at_once(monkeypatch):
    """Lets HTTP servers look a hundred times a second whether they shall stop: uvicorn looks ten
    times, and the standard library's server, which metrics have, two times.
    """

    async def nap(_):
        await asyncio.sleep(0.01)

    if uvicorn := sys.modules.get("uvicorn.server"):
        monkeypatch.setattr(uvicorn, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": nap}))
    monkeypatch.setattr(socketserver.BaseServer.serve_forever, "__defaults__", (0.01,))


@pytest.fixture(scope="session", autouse=True)
def answers_are_described_once():
    """Lets FastAPI describe the model of each endpoint's answers once, not for every server: it is
    most of what a start takes.
    """
    with pytest.MonkeyPatch.context() as patch:
        if routing := sys.modules.get("fastapi.routing"):
            described = functools.cache(routing.create_model_field)
            patch.setattr(routing, "create_model_field", described)
        yield


@pytest.fixture
async def start():
    """Yields a function that starts engines over fake runners; they are stopped at the end."""
    engines = []

    def make(*args, **options):
        engines.append(counting_engine(*args, **options))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.stop()
