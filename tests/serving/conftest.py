"""Tests marked `simulated_time` run in an event loop with a clock of its own."""

import asyncio

import pytest
from counting import counting_engine

from serving.bench.simulated_time import SimulatedLoop


def pytest_asyncio_loop_factories(config, item):
    simulated = item.get_closest_marker("simulated_time") is not None
    return {"loop": SimulatedLoop if simulated else asyncio.new_event_loop}


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
