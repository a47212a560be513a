"""Where and with what a result was measured. No jax."""

import asyncio
import contextlib
import importlib.metadata
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from serving.client import Client
from serving.telemetry.version import commit, jmoe_version


async def facts(client: Client) -> dict[str, Any]:
    """Returns the command that this process runs, machine, versions, commit, server and model."""
    info, model = await asyncio.gather(client.server_info(), client.model_info())
    return {
        "command": shlex.join(["jmoe", *sys.argv[1:]]),
        "machine": {"cpu": _cpu_model(), "cpu_count": os.cpu_count(), "platform": info.platform},
        "versions": {"python": platform.python_version()}
        | {"jmoe": jmoe_version()}
        | {name: importlib.metadata.version(name) for name in ("jax", "grpcio", "numpy")},
        "commit": commit(),
        "server": {"max_num_seqs": info.max_num_seqs, "max_queue_len": info.max_queue_len},
        "model": {
            "name": model.name,
            "num_parameters": model.num_parameters,
            "num_experts": model.num_experts,
            "experts_per_token": model.experts_per_token,
            "united_ways": list(model.united_ways),
            "dtype": model.dtype,
        },
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
