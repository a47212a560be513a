"""The real server on the GPU, end to end: whole steps as CUDA graphs, and kernel by kernel."""

import asyncio
import json
from pathlib import Path

import pytest

from serving.bench.launch import running_server
from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

ROOT = Path(__file__).parents[2]
SETTINGS = (
    "engine.decode_buckets=8,32",
    "engine.prefill_buckets=128",
    "engine.max_prefill_tokens=128",
    "engine.max_num_seqs=32",
    "engine.max_model_len=256",
    "engine.threshold_buckets_percent=40,100",
)


@pytest.mark.parametrize("eager", ["false", "true"])
def test_a_server_answers_degrades_and_compiles_nothing(tmp_path, eager):
    asyncio.run(_talk(tmp_path, f"engine.enforce_eager={eager}"))


async def _talk(tmp_path, *more):
    command = ["-m", "serving.cli", "serve", "--port", "0"]
    command += [part for value in (*SETTINGS, *more) for part in ("--set", value)]
    lines = (ROOT / "jmoe" / "bundled" / "tasks.jsonl").read_text().splitlines()
    asked = [json.loads(line) for line in lines[:24]]
    async with (
        running_server(command, tmp_path / "server.log", 240) as (address, _),
        Client(address) as client,
    ):
        assert "gpu" in (await client.server_info()).platform

        async def answers():
            calls = [
                client.generate(task["prompt"], pb.SamplingParams(max_new_tokens=64), timeout_s=60)
                for task in asked
            ]
            replies = [[reply async for reply in call] for call in calls]
            texts = ["".join(reply.text for reply in parts).strip() for parts in replies]
            right = sum(t == task["answer"].strip() for t, task in zip(texts, asked, strict=True))
            return right / len(asked), sum(parts[-1].usage.degraded_visits for parts in replies)

        await client.set_brownout(strategy="zero")
        right, degraded = await answers()
        assert right >= 0.9
        assert degraded == 0
        await client.set_brownout(strategy="partial", way=8, decode_threshold_percent=40)
        right, degraded = await answers()
        assert right >= 0.8
        assert degraded > 0
        stats = await client.stats()
        assert stats.compilations_since_ready == 0
        assert stats.num_running == stats.kv_pages_used == 0
