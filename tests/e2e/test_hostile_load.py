"""Hundreds of requests from 32 clients, many of them misbehaving: all are answered, nothing
leaks.
"""

import asyncio
import collections
import random
import signal

import grpc
import pytest

import jmoe
from serving.client import Client
from serving.proto.jmoe.v1 import jmoe_pb2 as pb

from .conftest import FEW_PROGRAMS, serving
from .exact_answers import check_exact_answers, prompts

NUM_REQUESTS, NUM_CLIENTS = 320, 32
ON_A_MESH_REQUESTS = 200
"""Eight devices are as many threads of one CPU, which takes them most of a minute."""
CODES = grpc.StatusCode


ON_A_MESH = (
    "engine.prefill_buckets=128",
    "engine.balance.spare_slots=1",
    "engine.balance.interval_s=0.2",
    "engine.balance.min_gain=0",
)
"""One program a phase. Experts are copied in every prefill step, and between steps as often as can
be."""


ASYNCHRONOUS = (
    "engine.mode=aep",
    "engine.asynchronous.attention=2",
    "engine.asynchronous.experts=6",
    "engine.asynchronous.copies=2",
    "engine.decode_buckets=16",
    "engine.prefill_buckets=128",
    "engine.salc.controller=algorithm2",
)


def settings_of(mesh):
    if mesh == "one":  # with sizes to choose from
        return "engine.decode_buckets=8,32", "engine.prefill_buckets=32,128", *FEW_PROGRAMS[2:]
    if mesh == "aep=2+6":
        return *FEW_PROGRAMS[2:], *ASYNCHRONOUS
    # 32 sequences are spread over the devices, and one device sends another two copies at most.
    rows, copies = (16, 2) if mesh == "ep=2" else (8, 4)
    sizes = f"engine.decode_buckets={rows}", f"engine.balance.replicas={copies}"
    own = (f"engine.mesh={mesh}", *sizes, *ON_A_MESH)
    names = {setting.partition("=")[0] for setting in own}
    others = [setting for setting in FEW_PROGRAMS if setting.partition("=")[0] not in names]
    return *others, *own


@pytest.fixture(scope="module", params=["one", "ep=8", "aep=2+6"])
def server(request):
    """Yields one server for all of these tests: on one device, on a mesh, or asynchronous."""
    devices = 8 if request.param == "aep=2+6" else 1  # a mesh sees to it itself
    options = {"cpu_devices": devices, "start_timeout_s": 240 * (1 + (devices > 1))}
    options["hurry"] = request.param != "one"
    with serving(*settings_of(request.param), **options) as found:  # each compiles its own
        yield found


@pytest.fixture(scope="module")
def model():
    return jmoe.load("bundled", "float32")


def draw(rng, texts):
    """Draws a request: what is sent, and the outcomes that are right."""
    kind = rng.choices(["fine", "cancel", "malformed", "late"], [0.62, 0.2, 0.1, 0.08])[0]
    length = rng.randrange(1, 120)
    prompt = (
        rng.choice(texts) if rng.random() < 0.5 else [rng.randrange(512) for _ in range(length)]
    )
    sampling = pb.SamplingParams(
        max_new_tokens=rng.randrange(1, 60),
        temperature=rng.choice([0.0, 0.0, 0.8]),
        top_k=rng.choice([0, 5]),
        ignore_eos=rng.random() < 0.5,
    )
    if kind == "malformed":
        return rng.choice(
            [
                ("malformed", [], sampling, None, CODES.INVALID_ARGUMENT),
                ("malformed", [512], sampling, None, CODES.INVALID_ARGUMENT),
                ("malformed", [-1], sampling, None, CODES.INVALID_ARGUMENT),
                ("malformed", [1] * 300, sampling, None, CODES.INVALID_ARGUMENT),
                (
                    "malformed",
                    prompt,
                    pb.SamplingParams(temperature=-1.0),
                    None,
                    CODES.INVALID_ARGUMENT,
                ),
                ("malformed", prompt, pb.SamplingParams(top_p=7.0), None, CODES.INVALID_ARGUMENT),
            ]
        )
    if kind == "late":
        return "late", prompt, sampling, rng.uniform(0.001, 0.02), CODES.DEADLINE_EXCEEDED
    return kind, prompt, sampling, None, CODES.OK


async def send(client, rng, request):
    """Sends a request; returns its status and its number of messages."""
    kind, prompt, sampling, timeout_s, _ = request
    call = client.generate(prompt, sampling, timeout_s=timeout_s, allow_brownout=rng.random() < 0.8)
    messages, stop_after = [], rng.randrange(1, 8)
    try:
        async for message in call:
            messages.append(message)
            if kind == "cancel" and len(messages) >= stop_after:
                call.cancel()
    except asyncio.CancelledError:
        return CODES.CANCELLED, messages
    except grpc.aio.AioRpcError as error:
        return error.code(), messages
    return CODES.OK, messages


def check(request, code, messages):
    kind, prompt, sampling, _, expected = request
    finished = bool(messages) and messages[-1].finish_reason in ("stop", "length")
    if code is CODES.OK:
        assert finished, (kind, messages[-1:])
        assert kind != "malformed"
        count = sum(len(m.token_ids) for m in messages)
        assert count == messages[-1].usage.completion_tokens <= sampling.max_new_tokens
        if sampling.ignore_eos:
            assert count == sampling.max_new_tokens
        if not isinstance(prompt, str):
            assert messages[-1].usage.prompt_tokens == len(prompt)
    elif kind == "cancel":
        assert code is CODES.CANCELLED
    else:
        assert code is expected, (kind, code)


async def idle(client):
    for _ in range(200):
        stats = await client.stats()
        if stats.num_running == stats.num_waiting == 0:
            return stats
        await asyncio.sleep(0.05)
    raise AssertionError(f"still busy: {stats}")


@pytest.mark.sized(
    exhaustive=(
        "ep=8",
        "aep=2+6",
    ),
    deep=("one",),
)
async def test_everyone_is_answered_and_nothing_leaks(server, model, request):
    _, address = server
    rng, texts = random.Random(7), prompts(model)
    on_a_mesh = request.node.callspec.params["server"] != "one"
    count = ON_A_MESH_REQUESTS if on_a_mesh else NUM_REQUESTS
    todo = collections.deque(draw(rng, texts) for _ in range(count))
    seen = collections.Counter()
    async with Client(address) as control:
        await control.set_brownout(strategy="partial", decode_threshold_percent=40)

        async def one_client(seed):
            own = random.Random(seed)
            async with Client(address) as client:
                while todo:
                    sent = todo.popleft()
                    code, messages = await asyncio.wait_for(send(client, own, sent), 60)
                    check(sent, code, messages)
                    seen[sent[0], code.name] += 1

        await asyncio.gather(*map(one_client, range(NUM_CLIENTS)))
        stats = await idle(control)
        assert sum(seen.values()) == count
        assert seen["cancel", "CANCELLED"] > count / 10
        assert seen["late", "DEADLINE_EXCEEDED"] > count / 50
        assert seen["malformed", "INVALID_ARGUMENT"] > count / 25
        assert stats.kv_pages_used == 0
        assert stats.compilations_since_ready == 0
        assert stats.degraded_visits > 0
        code, messages = await send(control, rng, ("fine", texts[0], None, None, CODES.OK))
        assert code is CODES.OK
        assert messages


@pytest.mark.exhaustive
@pytest.mark.parametrize("server", ["one", "ep=2", "ep=8", "aep=2+6"], indirect=True)
async def test_served_tokens_are_those_of_the_notebook(server, model):
    _, address = server
    await check_exact_answers(address, model)


@pytest.mark.sized(deep=("one",), exhaustive=("ep=8", "aep=2+6"))
async def test_a_way_can_be_switched_under_load(server, model):
    _, address = server
    texts = prompts(model)[:16]
    async with Client(address) as client:
        await client.set_brownout(strategy="partial", decode_threshold_percent=0)

        async def stream(text):
            sampling = pb.SamplingParams(max_new_tokens=60, ignore_eos=True)
            return [message async for message in client.generate(text, sampling)]

        running = [asyncio.create_task(stream(text)) for text in texts]
        for way in (2, 4, 8):
            assert (await client.set_brownout(way=way)).way == way
        for messages in await asyncio.gather(*running):
            assert sum(len(m.token_ids) for m in messages) == 60
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.set_brownout(way=5)
        assert refused.value.code() is CODES.INVALID_ARGUMENT
        assert (await idle(client)).compilations_since_ready == 0


@pytest.mark.deep
async def test_overload_is_refused_with_a_time_to_come_back():
    settings = [*FEW_PROGRAMS[:2], FEW_PROGRAMS[-1]]
    settings += ["engine.max_num_seqs=8", "engine.max_queue_len=2"]
    with serving(*settings, hurry=True) as (process, address):
        async with Client(address) as client:

            async def one(i):
                sampling = pb.SamplingParams(max_new_tokens=100, ignore_eos=True)
                call = client.generate([i], sampling)
                try:
                    return [message async for message in call], None
                except grpc.aio.AioRpcError as error:
                    return None, error

            results = await asyncio.gather(*map(one, range(60)))
            refused = [error for _, error in results if error is not None]
            assert refused
            for error in refused:
                assert error.code() is CODES.RESOURCE_EXHAUSTED
                pushback = dict(error.trailing_metadata())["grpc-retry-pushback-ms"]
                assert int(pushback) > 0
            assert all(len(messages) == 100 for messages, _ in results if messages is not None)

            # Drain: what runs is finished, what comes is turned away, and the exit code is 0.
            sampling = pb.SamplingParams(max_new_tokens=100, ignore_eos=True)
            stream = aiter(client.generate([1], sampling))
            first = await anext(stream)
            process.send_signal(signal.SIGTERM)
            messages = [first, *[message async for message in stream]]
            assert len(messages) == 100
        assert await asyncio.to_thread(process.wait, 30) == 0
