"""A model served by asynchronous workers in threads answers as it does by itself (AMoE)."""

import asyncio
import logging
import random
import re
import threading
from dataclasses import replace

import grpc
import numpy as np
import pytest
from families import GOLDEN, answer

import jmoe
from serving.client import Client
from serving.config import (
    AsynchronousConfig,
    BrownoutConfig,
    EngineConfig,
    SalcConfig,
    ServerConfig,
)
from serving.control.algorithm2 import Algorithm2
from serving.engine import Engine
from serving.frontend.page.sample import about
from serving.frontend.server import Server
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.request import Priority, SamplingParams
from serving.scheduling.layers import compiled
from serving.settings import SettingsError
from serving.start_asynchronous import with_mode

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
SETTINGS = EngineConfig(
    mode="aep",
    model=str(GOLDEN),
    dtype="float32",
    max_num_seqs=6,
    max_model_len=48,
    page_size=4,
    reserved_ls_seqs=2,
    num_pages=36,
    max_prefill_tokens=16,
    max_prefill_seqs=4,
    decode_buckets=(4,),
    prefill_buckets=(16,),
    compilation_cache="",
    brownout=BrownoutConfig(strategy="zero", salc=False),
    asynchronous=AsynchronousConfig(attention=2, experts=3, copies=2),
)


@pytest.fixture(scope="module")
def picks():
    """Sets of arguments' types and shapes with which pickers' code ran: before the engine was
    ready, and afterwards.
    """
    numba = pytest.importorskip("numba")
    found, decide = [set(), set()], compiled.decide

    def note(*args):
        found[ready.is_set()].add((*map(numba.typeof, args), args[2].shape))
        return decide(*args)

    ready = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "decide", note)
        yield found, ready


@pytest.fixture(scope="module")
def engine_and_model(compiled_in_a_hurry, picks):
    """One engine for the module's tests, in a loop of its own."""
    loop = asyncio.new_event_loop()
    engine = loop.run_until_complete(Engine.start(SETTINGS, progress=lambda *_: None))
    picks[1].set()
    yield engine, jmoe.load(GOLDEN, "float32"), loop
    loop.run_until_complete(engine.stop())
    loop.close()


def requests(rng, count):
    for _ in range(count):
        prompt = [rng.randrange(1, 60) for _ in range(rng.randrange(1, 24))]
        yield prompt, rng.randrange(1, 14), rng.choice([LS, BE])


@pytest.mark.deep
def test_many_at_once_get_what_the_model_writes(engine_and_model, picks):
    """More than slots, prompts longer than a chunk; a third of them sample."""
    engine, model, loop = engine_and_model
    given = list(requests(random.Random(3), 24))
    samples = {at: {"temperature": 0.8, "top_k": 5, "seed": at} for at in range(0, 24, 8)}

    async def one(at, prompt, count, priority):
        await asyncio.sleep(0.01 * at)
        sampling = SamplingParams(
            max_new_tokens=count, ignore_eos=True, logprobs=True, **samples.get(at, {})
        )
        return await answer(engine, prompt, sampling, priority=priority)

    async def all_of_them():
        found = await asyncio.gather(*(one(at, *each) for at, each in enumerate(given)))
        assert await engine.drain(60)
        engine.status = "ready"
        engine.scheduler.check_idle()
        return found

    found = loop.run_until_complete(all_of_them())
    assert engine.stats().compilations_since_ready == 0
    warmed, picked = picks[0]
    assert picked
    assert picked <= warmed  # numba compiles nothing either
    want = {}
    greedy = [at for at in range(24) if at not in samples]
    whole = jmoe.generate(model, [given[at][0] for at in greedy], 14, stop_token_ids=())
    for row, at in enumerate(greedy):
        want[at] = whole.tokens[row], whole.logprobs[row]
    for at, drawn in samples.items():
        alone = jmoe.generate(model, [given[at][0]], 14, stop_token_ids=(), **drawn)
        want[at] = alone.tokens[0], alone.logprobs[0]
    for at, (tokens, logprobs, degraded) in enumerate(found):
        count = given[at][1]
        assert tokens == list(want[at][0])[:count], at
        np.testing.assert_allclose(logprobs, want[at][1][:count], atol=1e-4)
        assert degraded == 0


@pytest.mark.deep
def test_prompts_are_scored_beside_others(engine_and_model):
    engine, model, loop = engine_and_model
    prompts = [[5 + n, 9, 4, 30, 22, 7, 8, 41, 3, 17, 5, 6, 2, 9, 40, 11, 23, 4] for n in range(4)]

    async def one(prompt):
        sampling = SamplingParams(max_new_tokens=2, prompt_logprobs=True, ignore_eos=True)
        outputs = [o async for o in engine.generate(prompt, sampling)]
        return outputs[0].prompt_logprobs

    async def all_of_them():
        return await asyncio.gather(*map(one, prompts))

    for prompt, scored in zip(prompts, loop.run_until_complete(all_of_them()), strict=True):
        logits = np.asarray(jmoe.forward(model, [prompt]), np.float64)[0]
        logits -= logits.max(axis=-1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        want = [logprobs[at, token] for at, token in enumerate(prompt[1:])]
        np.testing.assert_allclose(scored, want, atol=1e-4)


@pytest.mark.deep
def test_what_has_no_effect_is_refused_and_not_shown(engine_and_model):
    """Over sockets: changes that only steps know, requests that change logits, and the page."""
    engine, _, loop = engine_and_model

    async def ask():
        server = Server(ServerConfig(engine=SETTINGS, port=0, http_port=-1))
        await server.start()
        await server.attach(engine)
        refused = {}
        try:
            async with Client(server.address, server.admin_address) as client:
                for change in (
                    {"controller": "predictive"},
                    {"prefill_company": True},
                    {"way": 2},
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as error:
                        await client.set_brownout(**change)
                    refused |= {next(iter(change)): error.value}
                await client.set_brownout(controller="algorithm2", prefill_company=False)
                state, info = await client.get_brownout(), await client.server_info()
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    async for _ in client.generate([5], pb.SamplingParams(min_p=0.5)):
                        pass
                refused["shaping"] = error.value
            return refused, state, info, about(server)
        finally:
            server.engine = None  # other tests go on with it
            await server.stop()

    refused, state, info, page = loop.run_until_complete(ask())
    for name, error in refused.items():
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, name
        assert "with asynchronous workers (mode aep): " in error.details()
    assert "rows take no step together" in refused["controller"].details()
    assert not state.prefill_company
    assert not info.threshold_buckets_percent
    assert not info.part_layers
    assert page["controllers"] == ["algorithm2"]


class ByStep(Algorithm2):
    """It sets thresholds step by step."""

    def of_step(self, step):
        return 50.0


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
        (
            {"salc": SalcConfig(controller="test_asynchronous_served:ByStep")},
            r"controller is 'test_asynchronous_served:ByStep', with .*rows take no step together",
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


async def test_a_model_without_united_experts_is_served_without_brownout(caplog):
    settings = replace(SETTINGS, brownout=BrownoutConfig(strategy="partial"))
    with pytest.raises(SettingsError, match="strategy is 'partial'"):
        await Engine.start(settings, progress=lambda *_: None)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
