"""A server's metrics over HTTP, as samples by name and labels. No jax."""

import asyncio
import contextlib
import socket
import urllib.request
from collections.abc import Mapping
from random import SystemRandom

from prometheus_client.parser import text_string_to_metric_families

from serving.client.connection import Connection

Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
"""Values by name and labels, the labels in alphabetical order."""

TIMEOUT_S = 30.0


def free_port() -> int:
    """Returns a port that was free a moment ago, below those that Linux gives to whoever asks for
    any: a server does not print which one it chose for its metrics.
    """
    while True:
        port = SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as taken, contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port


async def scrape(port: int) -> Samples:
    """Scrapes `/metrics` of a server's unencrypted `metrics_port` on this machine, with the key of
    the environment. Raises OSError.
    """
    headers = dict(Connection.of_environment().metadata)
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)

    def read() -> bytes:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as got:
            return got.read()

    return parse((await asyncio.to_thread(read)).decode())


def parse(text: str) -> Samples:
    """Parses Prometheus' text format. Raises ValueError for anything else."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """Returns one sample, 0 where there is none yet; `name` is without the prefix."""
    return samples.get((f"jmoe_{name}", tuple(sorted(labels.items()))), 0.0)
