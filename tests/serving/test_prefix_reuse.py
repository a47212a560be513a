"""Requests that share beginnings, on a runner whose tokens depend on all that pages hold."""

import asyncio
import random
from collections import Counter
from itertools import cycle

import pytest
from counting import counting_engine, family_of
from reading import VOCAB, ReadingRunner, written

from serving.config import AuditConfig, BrownoutConfig, SalcConfig
from serving.control.controller import Decision
from serving.plan import Limits
from serving.request import BrownoutChange, Priority, SamplingParams
from serving.scheduling.policy import LS
from serving.scheduling.prefixes import NOBODYS
from tests.traces import num_traces

pytestmark = pytest.mark.simulated_time

BE = Priority.BEST_EFFORT
LIMITS = Limits(num_slots=4, num_pages=64, page_size=4, max_prefill_tokens=16, max_prefill_seqs=4)
LAYERS = 4
TIGHT = Limits(
    num_slots=6,
    num_pages=18,
    page_size=4,
    max_prefill_tokens=16,
    max_prefill_seqs=4,
    max_decode_seqs=4,
    num_layers=LAYERS,
    prefill_buckets=(8, 16),
)
TWO_RANKS = Limits(
    num_slots=8,
    num_pages=36,
    page_size=4,
    max_prefill_tokens=16,
    max_prefill_seqs=4,
    max_decode_seqs=8,
    num_ranks=2,
)


def reading_engine(limits=LIMITS, names=("counter",), part_layers=0, **config):
    config = {"prefix_reuse": "on", "audit": AuditConfig(share=0), **config}
    engine = counting_engine(
        step_s=0.01, limits=limits, runner=ReadingRunner, model=family_of(names), **config
    )
    engine.executor.part_layers = part_layers
    return engine


async def ask(engine, prompt, count=3, **how):
    """Sends a request; returns its tokens and the last output."""
    sampling = SamplingParams(max_new_tokens=count, ignore_eos=True)
    outputs = [out async for out in engine.generate(prompt, sampling, **how)]
    return [out.token_ids[0] for out in outputs], outputs[-1]


PROMPT = list(range(1, 11))  # two pages and a half


async def test_what_is_there_is_not_computed_again():
    engine = reading_engine()
    first, before = await ask(engine, PROMPT)
    again, out = await ask(engine, PROMPT)
    longer, more = await ask(engine, [*PROMPT[:8], 7, 7, 7, 7, 7])
    await engine.stop()
    assert first == again == written(0, PROMPT, 3)
    assert longer == written(0, [*PROMPT[:8], 7, 7, 7, 7, 7], 3)
    assert (before.usage.cached_tokens, out.usage.cached_tokens) == (0, 8)
    assert more.usage.cached_tokens == 8
    assert engine.stats().reused_tokens == 16
    # Ten positions of a prompt, then two, then five; and two further tokens each.
    assert engine.stats().expert_visits == (10 + 2 + 5) + 3 * 2


async def test_answers_are_beginnings_too():
    """A chat's next turn has the last answer in it."""
    engine = reading_engine()
    tokens, _ = await ask(engine, PROMPT, 8)
    turn = [*PROMPT, *tokens, 3]
    found, out = await ask(engine, turn)
    await engine.stop()
    assert found == written(0, turn, 3)
    assert out.usage.cached_tokens == 16  # 17 of its 19 positions were written, in whole pages 16


async def test_the_last_position_is_always_computed():
    engine = reading_engine()
    await ask(engine, PROMPT[:8])
    found, out = await ask(engine, PROMPT[:8])
    await engine.stop()
    assert found == written(0, PROMPT[:8], 3)
    assert out.usage.cached_tokens == 4


@pytest.mark.parametrize(
    "how",
    [
        {"salt": "another"},
        {"reuse_prefix": False},
        {"model": "second"},
        {"sampling": "prompt_logprobs"},
    ],
)
async def test_who_shares_nothing(how):
    engine = reading_engine(names=("counter", "second"))
    await ask(engine, PROMPT)
    if how.pop("sampling", ""):
        sampling = SamplingParams(max_new_tokens=3, prompt_logprobs=True)
        out = [out async for out in engine.generate(PROMPT, sampling)][-1]
    else:
        found, out = await ask(engine, PROMPT, **how)
        assert found == written(1 if "model" in how else 0, PROMPT, 3)
        found, out_again = await ask(engine, PROMPT, **how)
        assert out_again.usage.cached_tokens == (8 if how.get("reuse_prefix", True) else 0)
    await engine.stop()
    assert out.usage.cached_tokens == 0


async def test_who_opts_out_leaves_nothing():
    engine = reading_engine()
    await ask(engine, PROMPT, reuse_prefix=False)
    _, out = await ask(engine, PROMPT)
    await engine.stop()
    assert out.usage.cached_tokens == 0


async def test_off_is_off():
    engine = reading_engine(prefix_reuse="off")
    for _ in range(2):
        found, out = await ask(engine, PROMPT)
        assert (found, out.usage.cached_tokens) == (written(0, PROMPT, 3), 0)
    await engine.stop()
    assert engine.stats().kv_pages_kept == 0


async def at(engine, percent, strategy="full"):
    await engine.set_brownout(
        BrownoutChange(
            strategy=strategy,
            prefill_threshold_percent=percent,
            decode_threshold_percent=percent,
        )
    )


async def test_degraded_pages_are_for_who_accepts_as_much():
    engine = reading_engine()
    await at(engine, 40)
    _, out = await ask(engine, PROMPT)
    assert out.usage.degraded_visits
    exact, out = await ask(engine, PROMPT, allow_brownout=False)
    assert (exact, out.usage.cached_tokens) == (written(0, PROMPT, 3), 0)
    # The exact ones took the place of the others, so that now they are for everybody.
    _, out = await ask(engine, PROMPT)
    assert out.usage.cached_tokens == 8
    await engine.stop()


@pytest.mark.parametrize(("now", "cached"), [(20, 8), (40, 8), (41, 0), (100, 0)])
async def test_a_threshold_that_has_risen_finds_nothing_of_before(now, cached):
    engine = reading_engine()
    await at(engine, 40)
    await ask(engine, PROMPT)
    await at(engine, now)
    _, out = await ask(engine, PROMPT)
    await engine.stop()
    assert out.usage.cached_tokens == cached
    assert out.prefill_threshold.min_percent == min(now, 40 if cached else now)


class Hunting:
    """Begins steps under 30, 90, 30 ... percent, and from a time on under 90 percent alone."""

    until_s = 0.0

    def __init__(self, config):
        self.percents = cycle([30, 90])

    def decide(self, seen):
        return Decision(90, 90)

    def of_step(self, step):
        return next(self.percents) if step.now < self.until_s else 90


@pytest.mark.deep
async def test_a_burst_keeps_its_cache_though_thresholds_go_up_and_down():
    """Pages of 30 percent are for requests of 90 while other steps have 30, too, and no longer."""
    salc = SalcConfig(controller=f"{__name__}:Hunting", interval_s=0.25)
    engine = reading_engine(salc=salc, brownout=BrownoutConfig("full"))
    clock = asyncio.get_running_loop().time
    Hunting.until_s = clock() + 10.0
    _, first = await ask(engine, PROMPT, 1)
    assert first.prefill_threshold.min_percent == 30
    for number in range(6):
        _, out = await ask(engine, PROMPT, 1 + number % 2)
        assert out.usage.cached_tokens == 8
    other = [9, *PROMPT]
    while (await ask(engine, other, 1))[1].usage.degraded_visits == 0:
        pass
    exact, out = await ask(engine, other, allow_brownout=False)
    assert (exact, out.usage.cached_tokens) == (written(0, other, 3), 0)
    while clock() < Hunting.until_s + 2.5:
        await ask(engine, [7])
    _, out = await ask(engine, PROMPT, 1)
    assert (out.usage.cached_tokens, out.prefill_threshold.min_percent) == (0, 90)
    await engine.stop()


async def test_a_later_page_is_no_better_than_those_before_it():
    """The first page goes, and is computed again under brownout; the second one stays exact."""
    engine = reading_engine()
    await ask(engine, PROMPT)
    (named,) = engine.scheduler.places.pages(0)
    first = min(named._names)
    named._drop(named._names[first])
    await at(engine, 40)
    await ask(engine, PROMPT[:5])
    _, out = await ask(engine, [*PROMPT, *range(20, 26)])
    assert out.usage.cached_tokens == 8
    assert out.prefill_threshold.min_percent == 40
    await at(engine, 100)
    longer = [*PROMPT, *range(20, 30)]
    found, out = await ask(engine, longer, allow_brownout=False)
    assert (found, out.usage.cached_tokens) == (written(0, longer, 3), 0)
    found, out = await ask(engine, longer, allow_brownout=False)
    assert (found, out.usage.cached_tokens) == (written(0, longer, 3), 16)
    await engine.stop()


async def test_while_ways_change_degraded_pages_are_nobodys():
    engine = reading_engine()
    await at(engine, 40)
    engine.slo.way_changes = True
    await ask(engine, PROMPT)
    engine.slo.way_changes = False
    _, out = await ask(engine, PROMPT)
    assert out.usage.cached_tokens == 0
    engine.slo.way_changes = True
    _, out = await ask(engine, PROMPT)
    assert out.usage.cached_tokens == 0
    await engine.stop()


async def test_a_step_is_of_the_kind_that_it_was_launched_with():
    engine = reading_engine()
    await at(engine, 40, "full")
    engine.executor.step_s = 1.0
    asking = asyncio.create_task(ask(engine, PROMPT, 1))
    await asyncio.sleep(0.5)
    engine.slo.way = 2  # the step is under way
    await asking
    _, out = await ask(engine, PROMPT, 1)
    assert out.usage.cached_tokens == 0
    engine.slo.way = 0
    await engine.stop()


async def test_another_strategy_finds_nothing_of_before():
    engine = reading_engine()
    await at(engine, 40)
    await ask(engine, PROMPT)
    engine.slo.way = 2
    _, out = await ask(engine, PROMPT)
    await engine.stop()
    assert out.usage.cached_tokens == 0


async def test_the_least_recently_used_page_makes_room():
    """Eight pages: a prompt of two and its tokens leave two, which others take one by one."""
    engine = reading_engine(Limits(1, 8, 4, 16, 1))
    one, other = [1] * 9, [2] * 9
    for prompt in (one, other, one, [3] * 17):  # the last one takes five, of which four are kept
        await ask(engine, prompt, 1)
    _, kept = await ask(engine, one, 1)
    _, gone = await ask(engine, other, 1)
    await engine.stop()
    assert kept.usage.cached_tokens == 8
    assert gone.usage.cached_tokens < 8
    assert engine.stats().kept_pages_evicted > 0


async def test_on_a_mesh_a_request_goes_where_its_beginning_is():
    engine = reading_engine(TWO_RANKS)
    await ask(engine, PROMPT)
    for _ in range(3):
        _, out = await ask(engine, PROMPT)
        assert out.usage.cached_tokens == 8
    # That rank is full, so that the next one goes elsewhere, and computes all.
    engine.executor.step_s = 1.0
    held = [asyncio.create_task(ask(engine, [n] * 20, 8, reuse_prefix=False)) for n in range(4)]
    await asyncio.sleep(3)
    _, out = await ask(engine, PROMPT)
    await asyncio.gather(*held)
    await engine.stop()
    assert out.usage.cached_tokens in (0, 8)


async def test_predictions_count_what_is_computed():
    engine = reading_engine()
    await ask(engine, PROMPT)
    engine.executor.step_s = 5.0
    tasks = [asyncio.create_task(ask(engine, PROMPT, 1)) for _ in range(3)]
    await asyncio.sleep(1)  # the first step is under way; nothing is decided of the others
    waiting = engine.scheduler.waiting
    assert sum(engine.scheduler._left(s) for s in waiting) == 2 * len(waiting)
    await asyncio.gather(*tasks)
    assert engine.slo.load.load(0.0).prompt_tokens < 10
    await engine.stop()


@pytest.mark.parametrize("length", [10, 29])  # within a step, and in chunks
@pytest.mark.parametrize("limits", [LIMITS, TIGHT])
async def test_who_comes_at_once_with_the_same_prompt_has_it_computed_once(length, limits):
    engine = reading_engine(limits)
    prompt = list(range(1, length + 1))
    found = await asyncio.gather(*(ask(engine, prompt, 1) for _ in range(4)))
    assert all(tokens == written(0, prompt, 1) for tokens, _ in found)
    shared = (length - 1) // 4 * 4
    assert engine.stats().expert_visits == length + 3 * (length - shared)
    assert sorted(out.usage.cached_tokens for _, out in found) == [0, shared, shared, shared]
    engine.scheduler.check_idle()
    await engine.stop()


async def test_nobody_else_waits_for_pages_that_are_being_computed():
    """Another prompt goes along with the first of its like, and one without reuse goes before."""
    engine = reading_engine()
    clock = asyncio.get_running_loop().time
    began = clock()

    async def first_token(prompt, **how):
        await ask(engine, prompt, 1, **how)
        return clock() - began

    like = [asyncio.create_task(first_token([5] * 7)) for _ in range(3)]
    other = asyncio.create_task(first_token([6] * 5))
    alone = await first_token([5] * 2 + [7], reuse_prefix=False)
    assert (alone, await other) == pytest.approx((0.01, 0.02))
    assert sorted(await asyncio.gather(*like)) == pytest.approx([0.02, 0.03, 0.03])
    await engine.stop()


async def test_whoever_waits_for_pages_in_vain_computes_them():
    """Their owner leaves, they belong to best effort, or no request may use them."""
    engine = reading_engine()
    owner = asyncio.create_task(ask(engine, PROMPT, 1))
    waiting = asyncio.create_task(ask(engine, PROMPT, 1))
    await asyncio.sleep(0.001)
    owner.cancel()
    assert (await waiting)[1].usage.cached_tokens == 0
    engine.scheduler.places.pages(0)[0].drop_all()
    engine.executor.step_s = 1.0
    slow = asyncio.create_task(ask(engine, PROMPT, 1, priority=BE))
    await asyncio.sleep(0.001)
    assert (await ask(engine, PROMPT, 1))[1].usage.cached_tokens == 0
    await slow
    engine.scheduler.places.pages(0)[0].drop_all()
    await at(engine, 40)
    engine.slo.suffered = lambda step: NOBODYS
    asked = [asyncio.create_task(ask(engine, PROMPT, 1)) for _ in range(4)]
    began = asyncio.get_running_loop().time()
    assert {(await one)[1].usage.cached_tokens for one in asked} == {0}
    assert asyncio.get_running_loop().time() - began == pytest.approx(3.0)
    engine.scheduler.check_idle()
    await engine.stop()


# ---- anything at all ----


def tree(rng, count):
    """Draws prompts that share beginnings of all lengths."""
    found = [[rng.randrange(VOCAB)]]
    for _ in range(count):
        start = rng.choice(found)[: rng.randrange(1, 24)]
        found.append(start + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 14))])
    return [prompt[:32] for prompt in found]


async def trace(seed):
    """Plays requests, cancellations, changes of brownout, evictions; returns what happened how
    often.
    """
    rng = random.Random(seed)
    limits = rng.choice((LIMITS, TIGHT, TIGHT, TWO_RANKS))
    names = rng.choice((("one",), ("one", "two")))
    parts = rng.choice((0, 1, 2)) if limits.num_layers > 1 else 0
    policy = rng.choice(("ls_first", "qllm", "fcfs"))
    engine = reading_engine(limits, names, parts, policy=policy)
    prompts, counts = tree(rng, 6), Counter()

    async def one():
        await asyncio.sleep(rng.random() * 0.4)
        prompt, count = rng.choice(prompts), rng.randrange(1, 12)
        how = {
            "allow_brownout": rng.random() < 0.5,
            "priority": rng.choice((LS, LS, BE)),
            "model": rng.choice(names),
            "salt": rng.choice(("", "", "other")),
            "reuse_prefix": rng.random() < 0.9,
        }
        leaves = rng.randrange(count) if rng.random() < 0.2 else count
        sampling = SamplingParams(max_new_tokens=count, ignore_eos=True)
        outputs, tokens = engine.generate(prompt, sampling, **how), []
        out = None
        async for out in outputs:
            tokens.append(out.token_ids[0])
            if len(tokens) > leaves:
                counts["left"] += 1
                break
        await outputs.aclose()
        usage = out.usage
        # One that was evicted may have begun anew with what others computed under brownout.
        untouched = not usage.degraded_visits and out.prefill_threshold.min_percent == 100
        if not how["allow_brownout"] or untouched:
            want = written(names.index(how["model"]), prompt, count)[: len(tokens)]
            assert tokens == want, (seed, prompt, how)
            counts["exact"] += 1
        counts["cached"] += usage.cached_tokens
        counts["degraded"] += usage.degraded_visits > 0

    async def change():
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(rng.random() * 0.2)
            with_strategy = rng.choice(("full", "full", "zero"))
            await at(engine, rng.choice((0, 30, 60, 100)), with_strategy)

    def begins(launch):
        """Checks, before a step is launched, that nothing has changed since it was planned."""

        def launched(plan, control):
            before = len(engine.executor.begun)
            future = launch(plan, control)
            percent = 100 if engine.slo.strategy == "zero" else engine.slo.ls.prefill.percent
            for refuses, lowest in engine.executor.begun[before:]:
                counts["begun"] += 1
                counts["begun degraded"] += lowest < 100
                assert lowest == 100 or (not refuses and lowest >= percent), seed
            return future

        return launched

    engine.executor.launch = begins(engine.executor.launch)
    await asyncio.gather(*(one() for _ in range(10)), change())
    for _ in range(100):
        if engine.scheduler.idle:
            break
        await asyncio.sleep(0.01)
    engine.scheduler.check_idle()
    counts["evicted"] = sum(engine.scheduler.num_evictions.values())
    counts["parked"] = engine.scheduler.num_parks
    counts["made room"] = engine.stats().kept_pages_evicted
    await engine.stop()
    return counts


async def traces(seeds):
    counts = Counter()
    for seed in seeds:
        counts += await trace(seed)
    wanted = ("exact", "cached", "degraded", "begun degraded", "evicted", "parked", "made room")
    assert all(counts[what] for what in (*wanted, "left")), counts
    return counts


async def test_whoever_shares_with_whom_answers_are_the_models():
    await traces(range(30))


@pytest.mark.exhaustive
async def test_many_more():
    await traces(range(1000, 1000 + num_traces(400)))
