"""A metrics port in the event loop of another thread, for clients that block."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace

from serving.config import ServerConfig
from serving.frontend.access import Access
from serving.frontend.metrics import Metrics
from serving.frontend.metrics_http import MetricsPort


@contextlib.contextmanager
def probed(
    metrics: Metrics, readiness=lambda: (True, "ready"), certificates=None, **fields
) -> Iterator[int]:
    """Yields the port; `fields` are those of ServerConfig."""
    server = SimpleNamespace(
        metrics=metrics,
        access=Access(),
        readiness=readiness,
        certificates=certificates,
        scheme="http" if certificates is None else "https",
        config=ServerConfig(**fields),
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(60)

    port = MetricsPort(server, "127.0.0.1", 0)
    try:
        run(port.start())
        yield port.port
        run(port.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
