"""Several models in one queue: a step has rows of one model or, mixed, of several; all get their
turns, and nothing is lost.

The runner counts up by one and the model's number, so that every answer says who computed it.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from restless import Restless
from scheduled import sequence_of

from jmoe.packed_rows import SLOT
from serving.plan import Limits, Phase, StepControl
from serving.request import Priority
from serving.scheduling.policy import Fcfs, LsFirst
from serving.scheduling.scheduler import Scheduler
from tests.serving.fake_runner import FakeRunner

LS, BE = Priority.LATENCY_SENSITIVE, Priority.BEST_EFFORT
LAYERS = 4


def limits_of(num_slots=8, num_pages=40):
    return Limits(num_slots, num_pages, 4, 16, 4, 4, LAYERS, prefill_buckets=(8, 16))


class Play:
    """Ticks as the engine does, a step ahead; each step is (phase, model, names)."""

    def __init__(self, policy=None, limits=None, part_layers=LAYERS, mixed=0, **options):
        limits = limits or limits_of()
        self.runner = FakeRunner(limits, part_layers=part_layers, mixed_models=mixed)
        options.setdefault("mixes", self.runner.mixes)
        at_once = self.runner.layers_at_once
        self.scheduler = Scheduler(limits, policy or Fcfs(), at_once, **options)
        self.steps, self.answers, self._before, self.now = [], {}, None, 0.0

    def add(self, name, model, length, max_new, priority=LS):
        prompt = [10 * model + 1] * length
        one = sequence_of(
            prompt, max_new, name=name, priority=priority, arrived_at=self.now, model=model
        )
        self.answers[name] = []
        self.scheduler.add(one, self.now)

    def tick(self):
        step = self.scheduler.next_step(now=self.now)
        if step is not None:
            models = tuple(sorted({s.request.model for s in step.sequences}))
            assert models == step.models
            assert len(models) == 1 or step.phase is Phase.DECODE
            names = "".join(s.request.request_id for s in step.sequences)
            model = models if len(models) > 1 else step.model
            self.steps.append((step.phase, model, names))
        result = step and self.runner.launch(step, StepControl(100, 0)).result()
        before, self._before = self._before, step and (step, result)
        if before is not None:
            self._accept(*before)
        self.now += 1.0
        return step is not None or before is not None

    def _accept(self, step, result):
        step.started_at = self.now - 1.0
        self.scheduler.observe(step, self.now)
        for at, one in enumerate(step.sequences):
            if step.sampled[at] and not one.done:
                output = one.accept(result.tokens[at], 0.0)
                self.answers[one.request.request_id] += output.token_ids
                if output.finish_reason:
                    self.scheduler.finish(one)

    def finish(self, most=5_000):
        for _ in range(most):
            if not self.tick() and self.scheduler.idle:
                self.scheduler.check_idle()
                return self
        raise AssertionError(f"not done after {most} ticks")

    def decoded(self):
        return [model for phase, model, _ in self.steps if phase is Phase.DECODE]


def counted(model, count):
    return [(10 * model + 1 + (1 + model) * (1 + i)) % 1000 for i in range(count)]


def test_prompts_of_one_model_go_together_in_the_order_of_the_queue():
    play = Play()
    for name, model in zip("abcd", (0, 1, 0, 1), strict=True):
        play.add(name, model, 3, 1)
    play.finish()
    assert play.steps == [(Phase.PREFILL, 0, "ac"), (Phase.PREFILL, 1, "bd")]


def test_models_decode_in_turn():
    play = Play()
    for name, model in zip("abcd", (0, 1, 1, 2), strict=True):
        play.add(name, model, 2, 12)
    play.finish()
    turns = play.decoded()
    whole = turns[turns.index(2) :][:24]  # from where all of them have their prompts behind them
    assert all(sorted(whole[at : at + 3]) == [0, 1, 2] for at in range(0, 24, 3))
    assert play.answers == {n: counted(m, 12) for n, m in zip("abcd", (0, 1, 1, 2), strict=True)}


def test_a_long_prompt_is_overtaken_by_no_other_models_for_good():
    """Its pages are not free: what comes behind it, of any model, waits with it."""
    play = Play(limits=limits_of(num_pages=12))
    play.add("a", 0, 10, 12)  # 6 pages in the end
    play.add("b", 1, 40, 2)  # 11 pages
    for _ in range(4):
        play.tick()
    for at, name in enumerate("cdefgh"):
        play.add(name, at % 2, 2, 2)
    play.finish()
    first = {
        name: at for at, (_, _, names) in reversed(list(enumerate(play.steps))) for name in names
    }
    assert first["b"] < min(first[name] for name in "cdefgh")


def test_a_chunk_of_another_model_waits_for_a_step_of_its_own():
    play = Play()
    play.add("a", 0, 20, 1)  # two chunks: the second leaves room
    play.add("b", 1, 2, 1)
    play.finish()
    assert play.steps == [
        (Phase.PREFILL, 0, "a"),
        (Phase.PREFILL, 0, "a"),
        (Phase.PREFILL, 1, "b"),
    ]


def test_a_parked_step_of_another_model_is_not_joined():
    play = Play(LsFirst(), part_layers=1)
    play.add("b", 1, 4, 1, BE)
    play.tick()
    play.add("a", 0, 4, 1)
    play.add("c", 1, 4, 1)
    play.finish()
    assert play.steps == [
        (Phase.PREFILL, 1, "b"),  # its first layer
        *[(Phase.PREFILL, 0, "a")] * LAYERS,
        (Phase.PREFILL, 1, "c"),  # up to where b waits
        *[(Phase.PREFILL, 1, "cb")] * (LAYERS - 1),
    ]
    assert (play.scheduler.num_parks, play.scheduler.num_joins) == (1, 1)
    assert play.answers == {"a": counted(0, 1), "b": counted(1, 1), "c": counted(1, 1)}


@pytest.mark.parametrize(("claim", "gets"), [(0.0, False), (0.2, True)])
def test_best_effort_of_another_model_gets_its_share(claim, gets):
    """Latency-sensitive rows of one model decode without end; best effort uses the other."""
    play = Play(LsFirst(), share=claim)
    play.add("b", 1, 2, 20, BE)
    for _ in range(3):
        play.tick()
    play.add("a", 0, 2, 150)
    for _ in range(90):
        play.tick()
    share = sum(model == 1 for model in play.decoded()[-60:]) / 60
    assert (0.1 < share < 0.4) if gets else share == 0
    play.finish()
    assert play.answers["b"] == counted(1, 20)


def test_two_models_whose_step_pays_decode_together():
    play = Play(mixed=2)
    for name, model in zip("abc", (0, 1, 0), strict=True):
        play.add(name, model, 2, 12)
    play.finish()
    decoded = play.decoded()
    assert decoded.count((0, 1)) == play.scheduler.num_mixed >= 9
    assert play.answers == {n: counted(m, 12) for n, m in zip("abc", (0, 1, 0), strict=True)}


def test_of_three_models_the_two_who_waited_longest_go_together():
    play = Play(mixed=2)
    for name, model in zip("abc", (0, 1, 2), strict=True):
        play.add(name, model, 2, 24)
    play.finish()
    pairs = [models for models in play.decoded() if isinstance(models, tuple)]
    for at in range(3, 18, 3):  # once all have their prompts behind them, and before any ends
        assert set(pairs[at : at + 3]) == {(0, 1), (0, 2), (1, 2)}
    assert play.answers == {n: counted(m, 24) for n, m in zip("abc", (0, 1, 2), strict=True)}


def test_models_are_mixed_where_it_pays_alone():
    """Asked with the rows of each, in the order of their turns; here, two of each are enough."""
    asked = []

    def mixes(counts):
        asked.append(tuple(counts.ravel().tolist()))
        return len(counts) == 2 and min(counts) >= 2

    play = Play(mixes=mixes)
    for name, model in zip("abc", (0, 1, 0), strict=True):
        play.add(name, model, 2, 6)
    play.finish()
    assert play.scheduler.num_mixed == 0
    assert set(asked) >= {(2, 1), (1, 2)}
    for name, model in zip("defg", (0, 1, 0, 1), strict=True):
        play.add(name, model, 2, 6)
    play.finish()
    assert play.scheduler.num_mixed >= 4


def test_over_a_mesh_it_is_asked_with_the_rows_of_each_rank():
    """As the steps have them, a model and a rank at a time."""
    asked = []

    def mixes(counts):
        asked.append(counts.copy())
        return True

    limits = Limits(8, 40, 4, 16, 4, 4, LAYERS, prefill_buckets=(8, 16), num_ranks=2)
    play = Play(limits=limits, mixes=mixes)
    for at in range(4):
        play.add(f"a{at}", 0, 2, 12 + 2 * at)
        play.add(f"b{at}", 1, 2, 18 - 2 * at)
    launch, seen = play.runner.launch, []

    def launched(plan, control):
        if len(plan.models) > 1:
            ranks = plan.rows[:, SLOT] // limits.slots_per_rank
            rows = list(zip(plan.row_models.tolist(), ranks.tolist(), strict=True))
            seen.append([[rows.count((model, rank)) for rank in (0, 1)] for model in (0, 1)])
        return launch(plan, control)

    play.runner.launch, play.runner.mixed_models = launched, 2
    play.finish()
    assert len(seen) == len(asked) >= 4
    assert {0, 1} <= {abs(a - b) for step in seen for a, b in step}  # even, and not
    for found, wanted in zip(asked, seen, strict=True):
        assert sorted(found.tolist()) == sorted(wanted)


def test_a_step_that_best_effort_may_park_is_of_one_model():
    play = Play(LsFirst(), part_layers=1, mixed=2)
    play.add("b", 1, 2, 8, BE)
    for name, model in zip("ac", (0, 1), strict=True):
        play.add(name, model, 2, 20)
    seen = []
    while not play.scheduler.idle or not seen:
        there = any(s.request.priority is BE for s in play.scheduler.running)
        before = play.scheduler.num_mixed
        play.tick()
        seen.append((there, play.scheduler.num_mixed - before))
    assert not any(mixed for there, mixed in seen if there)
    assert play.scheduler.num_mixed > 0
    assert play.answers == {"b": counted(1, 8), "a": counted(0, 20), "c": counted(1, 20)}


def test_a_policy_that_parks_nothing_mixes_best_effort_too():
    play = Play(mixed=2)
    play.add("a", 0, 2, 8)
    play.add("b", 1, 2, 8, BE)
    play.finish()
    assert play.scheduler.num_mixed > 4
    assert play.answers == {"a": counted(0, 8), "b": counted(1, 8)}


def test_a_model_whose_weights_are_not_there_is_in_no_step():
    play = Play(mixed=3)
    for name, model in zip("abc", (0, 1, 2), strict=True):
        play.add(name, model, 2, 10)
    for _ in range(6):
        play.tick()
    play.scheduler.models = {0, 2}
    before = len(play.steps)
    for _ in range(3):
        play.tick()
    assert set(play.decoded()[-3:]) == {(0, 2)}
    assert len(play.steps) == before + 3
    play.scheduler.models = None
    play.finish()
    assert play.answers == {n: counted(m, 10) for n, m in zip("abc", (0, 1, 2), strict=True)}


def test_what_leaves_between_two_mixed_steps_is_not_missed():
    play = Play(mixed=2)
    for name, model in zip("abc", (0, 1, 1), strict=True):
        play.add(name, model, 2, 12)
    for _ in range(5):
        play.tick()
    gone = next(s for s in play.scheduler.running if s.request.request_id == "b")
    play.scheduler.finish(gone)
    play.finish()
    assert (play.answers["a"], play.answers["c"]) == (counted(0, 12), counted(1, 12))


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # model
        st.integers(1, 30),  # prompt
        st.integers(1, 12),  # new tokens
        st.sampled_from([LS, LS, BE]),
        st.integers(0, 4),  # ticks before the next one
    ),
    max_size=14,
)


@settings(max_examples=60)
@given(
    REQUESTS,
    st.integers(0, 999),
    st.integers(11, 40),
    st.sampled_from([1, 3, LAYERS]),
    st.sampled_from([0, 2, 3, 4]),
)
def test_whatever_comes_everybody_gets_their_own_models_answer(
    requests, seed, pages, part_layers, mixed
):
    policy = (LsFirst(), Fcfs(), Restless(seed))[seed % 3]
    play = Play(policy, limits_of(num_pages=pages), part_layers, mixed)
    wanted = {}
    for number, (model, length, new, priority, wait) in enumerate(requests):
        name = f"{number};"
        play.add(name, model, length, new, priority)
        wanted[name] = counted(model, new)
        for _ in range(wait):
            play.tick()
    play.finish()
    assert play.answers == wanted
