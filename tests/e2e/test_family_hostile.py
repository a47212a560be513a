"""A thousand requests of all kinds over four models; sets, slots and experts are too few."""

import asyncio
import random
from collections import Counter, defaultdict
from pathlib import Path

import grpc
import numpy as np
import pytest

from jmoe.checkpoint import weights_digest
from jmoe.config import read_config
from jmoe.sharing import Sharing, write_sharing
from serving.client import Client
from serving.config import BrownoutConfig, EngineConfig, ServerConfig
from serving.engine import Engine
from serving.frontend.server import Server
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from tests.variants import variant

pytestmark = [pytest.mark.usefixtures("compiled_in_a_hurry"), pytest.mark.exhaustive]

GOLDEN = Path(__file__).parents[1] / "golden" / "qwen2_moe"
NAMES = ("base", "law", "code", "tax")
REQUESTS, AT_ONCE, SETS, STAY_S = 1000, 32, 2, 0.3
CODE = grpc.StatusCode
REFUSED = {CODE.NOT_FOUND, CODE.INVALID_ARGUMENT, CODE.RESOURCE_EXHAUSTED, CODE.DEADLINE_EXCEEDED}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    where = tmp_path_factory.mktemp("hostile")
    own = {name: variant(GOLDEN, where / name, seed) for seed, name in enumerate(NAMES)}
    cfg = read_config(GOLDEN)
    owners = Sharing.none(NAMES, cfg.num_moe_layers, cfg.num_experts).owners
    shared = np.random.default_rng(0).random(owners.shape[1:]) < 0.75
    owners[:, shared] = np.arange(shared.sum()) % len(NAMES)
    prints = tuple(map(weights_digest, own.values()))
    write_sharing(where / "family.json", Sharing(NAMES, owners, prints))
    return EngineConfig(
        models=tuple(f"{name}={path}" for name, path in own.items()),
        family=str(where / "family.json"),
        resident_sets=SETS,
        resident_experts=cfg.num_moe_layers * cfg.num_experts + 2,
        spare_experts=cfg.num_moe_layers * cfg.experts_per_token,
        model_stay_s=STAY_S,
        dtype="float32",
        max_num_seqs=4,
        max_model_len=48,
        page_size=8,
        num_pages=14,  # four sequences at full length need 24
        max_queue_len=24,
        max_prefill_tokens=16,
        max_prefill_seqs=4,
        decode_buckets=(4,),
        prefill_buckets=(16,),
        threshold_buckets_percent=(100,),
        compilation_cache="",
        part_layers=1,
        brownout=BrownoutConfig(strategy="zero", salc=False),
    )


class Caller:
    """A client that sends requests of every kind, and counts the outcomes."""

    def __init__(self, client):
        self.client, self.ended, self.longest_s = client, Counter(), defaultdict(float)
        self.answers, self.faults = defaultdict(set), []

    async def ask(self, number):
        rng = random.Random(number)
        model = rng.choice((*NAMES, *NAMES, *NAMES, "nobody"))
        length, new = rng.choice((1, 3, 9, 20, 60)), rng.randrange(1, 20)
        prompt = [1 + number % 7] * length
        patience_s = rng.choice((None, None, None, 0.05, 0.3))
        refuses = rng.random() < 0.2
        call = self.client.generate(
            prompt,
            pb.SamplingParams(max_new_tokens=new, ignore_eos=True),
            allow_brownout=not refuses,
            priority=rng.choice((pb.LATENCY_SENSITIVE, pb.BEST_EFFORT)),
            model=model,
            timeout_s=patience_s,
        )
        leaves = rng.random() < 0.15
        began, tokens = asyncio.get_running_loop().time(), []
        try:
            async for out in call:
                tokens += out.token_ids
                if leaves:
                    call.cancel()
            self.ended["answered"] += 1
            assert len(tokens) == new
            assert model in NAMES
            if refuses and new > 2:
                self.answers[model, length, prompt[0]].add(tuple(tokens[:3]))
        except asyncio.CancelledError:
            self.ended["left"] += 1
            return
        except grpc.aio.AioRpcError as error:
            if error.code() is CODE.CANCELLED and leaves:
                self.ended["left"] += 1
                return
            self.ended[error.code().name] += 1
            if error.code() not in REFUSED or (error.code() is CODE.NOT_FOUND) > (
                model not in NAMES
            ):
                self.faults.append(error)
            return
        took_s = asyncio.get_running_loop().time() - began
        self.longest_s[model] = max(self.longest_s[model], took_s)


async def test_everybody_gets_an_answer_or_a_status_and_nothing_leaks(settings):
    server = Server(ServerConfig(port=0, engine=settings))
    await server.start()
    engine = await Engine.start(settings)
    await server.attach(engine)
    try:
        async with Client(server.address) as client:
            caller, room = Caller(client), asyncio.Semaphore(AT_ONCE)

            async def one(number):
                async with room:
                    await caller.ask(number)

            await asyncio.gather(*map(one, range(REQUESTS)))
            while not engine.scheduler.idle or engine.registry.swapping:
                await asyncio.sleep(0.01)
            engine.scheduler.check_idle()
            assert len(engine.executor.resident_models) == SETS
            assert engine.registry.num_resident == SETS
            assert engine.executor.compilations_since_ready == 0
            assert engine.status == "ready"
    finally:
        await server.stop()
    assert not caller.faults
    assert sum(caller.ended.values()) == REQUESTS
    assert caller.ended["answered"] > REQUESTS / 5
    assert {"NOT_FOUND", "INVALID_ARGUMENT", "left"} <= set(caller.ended)
    assert engine.registry.num_swaps > 10
    assert engine.fetcher.num_reruns > 10
    # One model, one prompt that refuses substitutes: the same first tokens whatever went between.
    assert all(len(found) == 1 for found in caller.answers.values())
    assert len(caller.answers) > 20
    assert set(caller.longest_s) == set(NAMES)
