"""The engine's tick over a fake runner: hand-calculable tokens, real scheduling."""

import asyncio
import math
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from counting import collect, model_with

from jmoe.attention import Paged
from jmoe.brownout import strategy_code
from serving.config import BrownoutConfig, EngineConfig
from serving.control.experts_loader import ExpertsLoader
from serving.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    SettingsError,
    Unavailable,
)
from serving.execution.fitting import fit_to_model
from serving.plan import Limits
from serving.request import BrownoutChange, Priority, SamplingParams
from serving.scheduling.sequence import SequenceStatus
from tests.serving.fake_runner import FakeRunner

pytestmark = pytest.mark.simulated_time


async def settle(engine):
    while engine.scheduler.running or engine.scheduler.waiting:
        await asyncio.sleep(0.001)
    engine.scheduler.check_idle()


async def test_a_stream_counts_up_and_says_why_it_ended(start):
    outputs = await collect(start(), [7, 8, 9], 4, request_id="mine")
    assert [t for out in outputs for t in out.token_ids] == [10, 11, 12, 13]
    assert [out.finish_reason for out in outputs] == [None, None, None, "length"]
    assert {out.request_id for out in outputs} == {"mine"}
    usage = outputs[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 4)
    assert usage.expert_visits == 3 + 3  # the last token is never computed


async def test_a_stop_token_ends_a_stream_and_wastes_no_output(start):
    engine = start()
    sampling = SamplingParams(max_new_tokens=50, stop_token_ids=(12,))
    outputs = await collect(engine, [9], sampling=sampling)
    assert [t for out in outputs for t in out.token_ids] == [10, 11, 12]
    assert outputs[-1].finish_reason == "stop"
    await settle(engine)


async def test_many_streams_share_few_slots(start):
    engine = start()
    results = await asyncio.gather(*[collect(engine, [50 * i], 9) for i in range(20)])
    for i, outputs in enumerate(results):
        assert [t for o in outputs for t in o.token_ids] == [50 * i + n for n in range(1, 10)]
    stats = engine.stats()
    assert (stats.requests_finished, stats.kv_pages_used, stats.num_running) == (20, 0, 0)
    await settle(engine)


async def test_step_n_plus_1_is_launched_before_step_n_is_done(start):
    events = []

    class Watched(FakeRunner):
        def launch(self, plan, control):
            events.append("launch")
            future = super().launch(plan, control)
            future.add_done_callback(lambda _: events.append("done"))
            return future

    await collect(start(runner=Watched, step_s=0.06), [1], 5)
    assert events == ["launch", *["launch", "done"] * 4, "done"]


async def test_a_late_arrival_joins_the_very_next_step(start):
    engine = start(step_s=0.08)
    first = asyncio.create_task(collect(engine, [1], 6))
    await asyncio.sleep(0.08 * 3 + 0.02)  # the pace is known; a step has just begun
    before = len(engine.executor.launches)
    second = asyncio.create_task(collect(engine, [5], 1))
    await asyncio.gather(first, second)
    assert engine.executor.launches[before][0] == "prefill"


async def test_a_closed_iterator_frees_its_pages(start):
    engine = start(step_s=0.002)
    stream = engine.generate([1, 2, 3], SamplingParams(max_new_tokens=100))
    async for _ in stream:
        break
    await stream.aclose()
    assert engine.stats().requests_aborted == 1
    await settle(engine)
    assert [t for o in await collect(engine, [5], 2) for t in o.token_ids] == [6, 7]


async def test_a_deadline_ends_a_request_waiting_or_running(start):
    engine = start(step_s=0.005)
    with pytest.raises(DeadlineExceeded, match=r"0\.03"):
        await collect(engine, [1], 150, timeout_s=0.03)
    busy = [asyncio.create_task(collect(engine, [i], 60)) for i in range(4)]
    await asyncio.sleep(0.02)
    with pytest.raises(DeadlineExceeded):
        await collect(engine, [1], 5, timeout_s=0.01)  # never got a slot
    assert all(len(outputs) == 60 for outputs in await asyncio.gather(*busy))
    await settle(engine)


async def test_a_full_queue_refuses_and_says_when_to_come_back(start):
    """By the engine's capacity, not its recent load: it was idle for an hour."""
    engine = start(step_s=0.01, max_queue_len=2)
    await collect(engine, [1], 50)
    await asyncio.sleep(3600)
    await collect(engine, [1], 50)
    tasks = [asyncio.create_task(collect(engine, [i], 50)) for i in range(4)]
    await asyncio.sleep(0.03)
    tasks += [asyncio.create_task(collect(engine, [i], 2)) for i in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 requests wait") as refused:
        engine.check_admission(Priority.LATENCY_SENSITIVE)
    # Two requests wait for four slots, each of which is held for 50 steps of 10 ms.
    assert refused.value.retry_after_s == pytest.approx(2 * 0.5 / 4, rel=0.05)
    assert engine.stats().requests_rejected == 1
    assert len(await asyncio.gather(*tasks)) == 6


async def test_drain_finishes_what_is_there_and_admits_nothing(start):
    engine = start(step_s=0.002)
    task = asyncio.create_task(collect(engine, [1], 20))
    await asyncio.sleep(0.01)
    drained = asyncio.create_task(engine.drain(5))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="draining"):
        await collect(engine, [1], 1)
    assert await drained
    assert len(await task) == 20


async def test_a_drain_that_takes_too_long_says_so(start):
    engine = start(step_s=0.01)
    task = asyncio.create_task(collect(engine, [1], 150))
    await asyncio.sleep(0.02)
    assert not await engine.drain(0.05)
    await engine.stop()
    with pytest.raises(Aborted):
        await task


async def test_a_failing_step_fails_its_requests_with_a_reason(start):
    class Broken(FakeRunner):
        def launch(self, plan, control):
            future = Future()
            future.set_exception(RuntimeError("device lost"))
            return future

    engine = start(runner=Broken)
    with pytest.raises(Unavailable, match="device lost"):
        await collect(engine, [1])
    assert engine.status == "failed"
    with pytest.raises(Unavailable, match="failed"):
        await collect(engine, [1])


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {}, "empty"),
        ("text", {}, "no tokenizer"),
        ([1] * 190, {"max_new_tokens": 20}, "210 in all"),
        ([1], {"stop": ("x",)}, "tokenizer"),
        ([[1, 2], [3, 4]], {}, r"the prompt is \[\[1, 2\], \[3, 4\]\]; send text or one list"),
        ([[1], [2, 3]], {}, "one list of token ids"),
        (["a", "b"], {}, "one list of token ids"),
        ([1.5], {}, "one list of token ids"),
        ([True], {}, "one list of token ids"),
        ([1, 2**70], {}, "one list of token ids"),
        (b"text", {}, "of type bytes"),
        (7, {}, "of type int"),
        (iter([1]), {}, "of type list_iterator"),
        (range(10**9), {}, "1000000000 tokens"),  # not copied to be counted
        ([-1], {}, "prompt has -1"),
        ([1], {"stop_token_ids": (-2,)}, "stop_token_ids has -2"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_reason(start, prompt, sampling, words):
    with pytest.raises(InvalidRequest, match=words):
        await collect(start(), prompt, sampling=SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"request_id": "x" * 129}, "characters of request_id is 129; it must be 128"),
        ({"timeout_s": math.nan}, "timeout_s is nan"),
        ({"timeout_s": "soon"}, "timeout_s is 'soon'"),
    ],
)
async def test_options_that_cannot_be_used_are_named(start, options, words):
    with pytest.raises(InvalidRequest, match=words):
        await collect(start(), [1], **options)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(start):
    tokenizer = SimpleNamespace(longest_token=3)  # it could not tokenize
    with pytest.raises(InvalidRequest, match=r"700 characters; .* have 597 at"):
        await collect(start(model=model_with(tokenizer)), "x" * 700)


async def test_a_request_larger_than_all_pages_is_refused(start):
    engine = start(limits=Limits(2, 3, 4, 16, 2))
    with pytest.raises(InvalidRequest, match="4 KV pages"):
        await collect(engine, [1] * 10, 5)
    assert len(await collect(engine, [1] * 7, 5)) == 5


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"stop": tuple(map(str, range(65)))}, "65; it must be 64 at most"),
        ({"stop": ("x" * 1025,)}, "characters of a stop string is 1025; it must be 1024"),
        ({"stop_token_ids": range(10**9)}, "stop_token_ids is 1000000000; it must be 1024"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": None}, "top_k is None"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
    ],
)
def test_sampling_values_out_of_range_are_named(values, words):
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**values)


@pytest.mark.simulated_time
async def test_prompt_logprobs_survive_giving_way_in_the_middle_of_a_prompt(start):
    """Two that decode take the pages of a prompt of eight chunks, one of them under way."""
    limits = Limits(
        num_slots=3, num_pages=20, page_size=2, max_prefill_tokens=3, max_prefill_seqs=1
    )
    turns = BrownoutConfig(itl_slo_s=0.001)  # which leaves no time for two chunks in a row
    engine = start(step_s=0.002, limits=limits, brownout=turns)
    stages, preempt = [], engine.scheduler._preempt

    def watched(victim):
        stages.append(victim.status)
        preempt(victim)

    engine.scheduler._preempt = watched
    busy = [asyncio.create_task(collect(engine, [i], 18)) for i in range(2)]
    await asyncio.sleep(0.012)
    sampling = SamplingParams(max_new_tokens=2, prompt_logprobs=True, top_prompt_logprobs=2)
    outputs = await collect(engine, list(range(24)), sampling=sampling)
    assert SequenceStatus.PREFILL in stages
    assert outputs[0].prompt_logprobs == tuple(-float(p) for p in range(1, 24))
    best = {p: -p + 0.5 * (p % 4 == 0) for p in range(1, 24)}
    tops = tuple(((p, value), (p + 1, value - 1)) for p, value in best.items())
    assert outputs[0].prompt_top_logprobs == tops
    assert not outputs[1].prompt_top_logprobs
    await asyncio.gather(*busy)
    await settle(engine)


async def test_a_long_text_is_tokenized_beside_the_steps(start):
    held = threading.Event()

    class Held:
        longest_token = 150

        def encode(self, text, special_tokens=True):
            assert held.wait(10)
            return [5]

        def stream(self, skip_special_tokens=True):
            return SimpleNamespace(push=lambda token: "", finish=lambda: "")

    engine = start(model=model_with(Held()), max_queue_len=1)
    long = asyncio.create_task(collect(engine, "x" * 20_000, 1))
    assert len(await collect(engine, [1], 50)) == 50
    assert not long.done()
    queued = [asyncio.create_task(collect(engine, "x" * 20_000, 1)) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="5 requests wait"):  # for four slots and a queue of one
        engine.check_admission(Priority.LATENCY_SENSITIVE)
    held.set()
    await asyncio.gather(*queued)
    assert [t for out in await long for t in out.token_ids] == [6]


async def test_a_key_that_has_more_than_its_share_fills_half_of_the_queue(start):
    engine = start(step_s=0.01, max_queue_len=8)  # four slots
    by_b = asyncio.create_task(collect(engine, [1], 50, key="b"))
    await asyncio.sleep(0.03)
    by_a = [asyncio.create_task(collect(engine, [i], 50, key="a")) for i in range(9)]
    results = await asyncio.gather(*by_a, return_exceptions=True)
    refused = [r for r in results if isinstance(r, Overloaded)]
    assert len(refused) == 9 - 3 - 4  # three slots are free, and half of the queue
    assert all("keys with fewer under way come first" in str(error) for error in refused)
    await by_b
    again = [collect(engine, [i], 5, key="ab"[i % 2]) for i in range(12)]
    await asyncio.gather(*again)  # what has ended counts for nobody


async def test_a_burst_fills_free_slots_before_it_is_refused(start):
    engine = start(step_s=0.002, max_queue_len=1)  # four slots
    tasks = [asyncio.create_task(collect(engine, [i], 30)) for i in range(7)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [r for r in results if isinstance(r, Overloaded)]
    assert (len(refused), len(results) - len(refused)) == (2, 5)


EIGHT = {"num_pages": 8, "page_size": 64, "max_prefill_tokens": 256}


@pytest.mark.parametrize(
    ("settings", "positions", "served"),
    [
        ({}, 128, 128),
        ({}, 32_768, 2048),
        ({"num_pages": 2, "page_size": 16}, 128, 32),
        ({"max_model_len": 100}, 128, 100),
        ({"max_model_len": 2048}, 128, "is 2048; small has 128 positions; pass --max-model-len"),
        ({"max_model_len": 32_768}, 32_768, 32_768),
        (EIGHT | {"max_model_len": 2048}, 2048, "enough for one sequence of max_model_len 2048"),
        (EIGHT | {"max_model_len": 2048, "window": 100}, 4096, 2048),
        (EIGHT | {"window": 100}, 4096, 2048),
        (EIGHT | {"window": 400}, 4096, 512),  # eight pages hold no window and a chunk
    ],
)
def test_no_more_positions_are_served_than_the_model_and_its_pages_have(
    settings, positions, served, caplog
):
    window = settings.get("window", 0)
    settings = {key: value for key, value in settings.items() if key != "window"}
    sizes = SimpleNamespace(max_position=positions, attention_kinds=(Paged(window),))
    model = SimpleNamespace(name="small", home=None, config=sizes)
    if isinstance(served, str):
        with pytest.raises(SettingsError, match=served):
            fit_to_model(EngineConfig(**settings), model)
    else:
        assert fit_to_model(EngineConfig(**settings), model).max_model_len == served
    cut = [f"up to {served} tokens, of small's {positions}: --max-model-len"]
    said = [f"{line.split('served ')[1].split(' serves')[0]}" for line in caplog.messages]
    assert said == (cut if not settings and served != positions else [])


@pytest.fixture
async def ways(start):
    """Returns an engine that may serve ways 2, 4 and 8 of a model of three layers, and what it
    loaded.
    """
    loaded = []

    class Watched(FakeRunner):
        def load_way(self, way, layer):
            loaded.append((way, layer))

    engine = start(runner=Watched)
    engine.slo.way = 2
    engine.loader = ExpertsLoader(engine.executor, None, (2, 4, 8), engine.slo)
    engine.loader._num_layers = 3
    return engine, loaded


async def test_a_change_of_way_is_made_though_its_caller_gave_up(ways):
    engine, loaded = ways
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await engine.set_brownout(BrownoutChange(way=4))
    while engine.loader.busy:
        await asyncio.sleep(0.001)
    assert loaded == [(4, 0), (4, 1), (4, 2)]
    assert engine.get_brownout().way == 4
    assert (await engine.set_brownout(BrownoutChange(way=2))).way == 2
    assert loaded[3:] == [(2, 0), (2, 1), (2, 2)]


async def test_changes_of_way_are_made_in_turn(ways):
    """The second asks for the way that is in force now, which must be in force again at the end."""
    engine, loaded = ways
    first, second = (engine.set_brownout(BrownoutChange(way=way)) for way in (4, 2))
    _, state = await asyncio.gather(first, second)
    assert state.way == 2
    assert engine.get_brownout().way == 2
    assert [way for way, _ in loaded] == [4, 4, 4, 2, 2, 2]
    assert (await engine.set_brownout(BrownoutChange(way=2))).way == 2
    assert len(loaded) == 6


async def test_equal_changes_of_way_are_made_once_and_others_run_meanwhile(ways):
    engine, loaded = ways
    turns = 0

    async def count_turns():
        nonlocal turns
        while len(loaded) < 3:
            turns += 1
            await asyncio.sleep(0)

    states, _ = await asyncio.gather(
        asyncio.gather(*(engine.set_brownout(BrownoutChange(way=4)) for _ in range(300))),
        count_turns(),
    )
    assert {state.way for state in states} == {4}
    assert loaded == [(4, 0), (4, 1), (4, 2)]
    assert turns >= 3  # an idle engine lets others run between two layers


async def test_too_many_different_changes_of_way_are_refused(ways):
    engine, loaded = ways
    changes = [engine.set_brownout(BrownoutChange(way=4 if i % 2 else 8)) for i in range(20)]
    results = await asyncio.gather(*changes, return_exceptions=True)
    refused = [r for r in results if isinstance(r, Overloaded)]
    # Eight are made; of the other twelve, half ask for what the last of these loads.
    assert (len(refused), len(loaded)) == (6, 3 * 8)
    assert "8 changes of way wait" in str(refused[0])


async def test_an_engine_that_stops_tells_who_waits_for_a_way(ways):
    engine, loaded = ways
    change = asyncio.create_task(engine.set_brownout(BrownoutChange(way=4)))
    while not loaded:
        await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(Aborted, match="stopped"):
        await asyncio.wait_for(change, 60)
    assert await engine.drain(5)  # there is nothing left, and it stays stopped
    with pytest.raises(Unavailable, match="the engine is stopped"):
        await asyncio.wait_for(engine.set_brownout(BrownoutChange(way=8)), 60)


async def test_brownout_can_be_changed_while_serving(start):
    engine = start(step_s=0.002)
    task = asyncio.create_task(collect(engine, [1], 40))
    await asyncio.sleep(0.01)
    state = await engine.set_brownout(BrownoutChange(strategy="full", decode_threshold_percent=30))
    assert (state.strategy, state.decode_threshold_percent) == ("full", 30)
    outputs = await task
    span = outputs[-1].decode_threshold
    assert (span.min_percent, span.max_percent) == (30, 100)
    assert (100, 0) in {c[:2] for _, _, c in engine.executor.launches}
    assert (30, strategy_code("full", "weight")) in {c[:2] for _, _, c in engine.executor.launches}
    with pytest.raises(InvalidRequest, match="united experts"):
        await engine.set_brownout(BrownoutChange(strategy="partial"))
    with pytest.raises(InvalidRequest, match="way is 3"):
        await engine.set_brownout(BrownoutChange(way=3))
