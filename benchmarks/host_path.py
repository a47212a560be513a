"""What the server's host side carries, on a device whose steps only pass time.

`python -m benchmarks.host_path [--out benchmarks/host_path.json]`: the real server with the real
scheduler, tick, tokenizer and gRPC, over a runner whose steps last a given time and sample the same
tokens always. 64 requests at a time, 128 tokens each, from a client process of its own. The device
is idle for as long as the host keeps it waiting; where the client's share nears a core, the client
may be what it waits for. CPU figures, about this CPU.
"""

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import uvloop

from serving.bench.launch import running_server
from serving.bench.loadgen import saturate
from serving.bench.workload import Arrival
from serving.client import Client
from serving.execution.reader import ResultReader
from serving.version import jmoe_version

BATCH, OUT_TOKENS = 64, 128
STEPS_MS = (16.0, 8.0, 4.0, 2.0)
RAMP_S, WINDOW_S = 2.0, 8.0
_SECURITY = ("keys_file", "tls_cert", "tls_key")
PROMPT = "add 47 + 38 and 12 + 9 then say it"


@dataclass(frozen=True)
class HostPath:
    """One step time. `idle_share` is the device's, from a step's end to the next one's start."""

    step_ms: float
    tokens_per_s: float
    device_tokens_per_s: float  # what a device that is never idle would sample
    idle_share: float
    server_cpu_share: float  # of one core, every thread of the server's process
    client_cpu_share: float


class PassingTime:
    """A runner whose steps take `step_s`, one after the other. See serving.execution.runner.Runner.

    `serving.fake.FakeRunner` checks what it is told, token by token, which would be timed
    here.
    """

    compilations_since_ready = num_programs = 0
    part_layers_by_size: Mapping[str, int] = {}

    def __init__(self, limits: Any, step_s: float, tokens: list[int]) -> None:
        self.limits, self.step_s, self.tokens = limits, step_s, tokens
        self._free_at = 0.0
        self._reader = ResultReader()

    def launch(self, plan: Any, control: Any) -> "Future[Any]":
        """Begins when the step before it ends."""
        self._free_at = max(self._free_at, time.monotonic()) + self.step_s
        ends_at, count = self._free_at, len(plan.rows)
        return self._reader.submit(lambda: self._read(ends_at, count))

    def _read(self, ends_at: float, count: int) -> Any:
        from serving.plan import StepResult  # brings jax, which the client does without

        time.sleep(max(0.0, ends_at - time.monotonic()))
        rows = np.zeros((1, 1), np.int32)
        return StepResult(self.tokens[:count], [-0.5] * count, [0] * count, rows, None)

    def draw(self, allowed: np.ndarray) -> None:
        """No output is structured."""
        raise NotImplementedError

    def layers_at_once(self, phase: Any, size: int) -> int:
        """All: there is no best effort."""
        return self.limits.num_layers

    def mixes(self, counts: Sequence[int]) -> bool:
        """There is one model."""
        return False

    copy_s = 0.0

    resident_models = None

    def replace_set(self, victim: int, model: int) -> "Future[None]":
        """There is one model."""
        raise NotImplementedError

    def fetch_experts(self, experts: Mapping[Any, int]) -> None:
        """All experts are there."""
        raise NotImplementedError

    def host_layer(self, layer: int, hosts: np.ndarray) -> None:
        """There is nothing to copy."""

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """Nothing fails."""

    def load_way(self, way: int, layer: int) -> None:
        """There is nothing to load."""

    def close(self) -> None:
        """Ends the reader."""
        self._reader.close()


async def _serve(step_s: float, **fields: str) -> None:
    """With `fields` of a server's settings."""
    from serving.config import BrownoutConfig, EngineConfig, ServerConfig
    from serving.frontend import server

    brownout = BrownoutConfig(strategy="zero", way=0)
    engine_config = EngineConfig(
        model="bundled", dtype="float32", max_num_seqs=BATCH, max_model_len=256, brownout=brownout
    )

    async def start_engine() -> Any:
        import jmoe
        from serving.engine import Engine
        from serving.execution.fitting import limits_of

        model = jmoe.load("bundled", dtype="float32", ways=[])
        assert model.tokenizer is not None
        tokens = model.tokenizer.encode(PROMPT * 8)[:BATCH]
        engine = Engine(engine_config, PassingTime(limits_of(engine_config), step_s, tokens), model)
        engine.run()
        return engine

    await server.serve(ServerConfig(port=0, engine=engine_config, **fields), start_engine)


async def _measure(step_ms: float, folder: Path) -> HostPath:
    command = ["-m", "benchmarks.host_path", "--serve-step-ms", str(step_ms)]
    async with (
        running_server(command, folder / "server.log", 120) as (address, pid),
        Client(address) as client,
    ):
        await client.wait_ready(60)
        arrivals = repeat(Arrival(PROMPT, OUT_TOKENS, ignore_eos=True))
        load = asyncio.create_task(
            saturate(client, arrivals, concurrency=BATCH, duration_s=RAMP_S + WINDOW_S)
        )
        await asyncio.sleep(RAMP_S)
        steps, used_s, start = await _steps(client), cpu_s(pid), time.monotonic()
        await asyncio.sleep(WINDOW_S - 0.5)
        steps, wall_s = await _steps(client) - steps, time.monotonic() - start
        used_s = cpu_s(pid) - used_s
        run = await load
    failed = [record.error for record in run.records if not record.ok]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0]}")
    times_s = [at for record in run.records for at in record.token_s]
    tokens = sum(RAMP_S <= at < RAMP_S + WINDOW_S for at in times_s)
    return HostPath(
        step_ms,
        tokens_per_s=tokens / WINDOW_S,
        device_tokens_per_s=BATCH / step_ms * 1e3,
        idle_share=1 - steps * step_ms / 1e3 / wall_s,
        server_cpu_share=used_s / wall_s,
        client_cpu_share=run.client_cpu_s / run.duration_s,
    )


async def _steps(client: Client) -> int:
    stats = await client.stats()
    return stats.steps_prefill + stats.steps_decode


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


async def _all(steps_ms: list[float]) -> list[HostPath]:
    found = []
    print("step, ms   tokens/s   of a busy device   device idle   CPU, of one core: server, client")
    with TemporaryDirectory() as folder:
        for step_ms in steps_ms:
            one = await _measure(step_ms, Path(folder))
            found.append(one)
            print(
                f"{step_ms:8g} {one.tokens_per_s:10,.0f} {one.device_tokens_per_s:18,.0f}"
                f" {one.idle_share:13.1%} {one.server_cpu_share:24.2f} {one.client_cpu_share:7.2f}",
                flush=True,
            )
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, nargs="+", default=STEPS_MS)
    parser.add_argument("--serve-step-ms", type=float, help="only serve, with such steps")
    for name in _SECURITY:
        parser.add_argument(f"--{name.replace('_', '-')}", default="", help="as of jmoe serve")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if min(args.step_ms) <= 0:
        parser.error(f"--step-ms is {min(args.step_ms):g}; a step takes some time")
    if args.serve_step_ms is not None:
        security = {name: getattr(args, name) for name in _SECURITY}
        uvloop.run(_serve(args.serve_step_ms / 1e3, **security))
        return
    found = uvloop.run(_all(args.step_ms))
    if args.out:
        result = {
            "batch": BATCH,
            "output_tokens": OUT_TOKENS,
            "cpu_count": os.cpu_count(),
            "versions": {"python": platform.python_version(), "jmoe": jmoe_version()},
            "steps": [asdict(one) for one in found],
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
