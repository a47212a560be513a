"""What process 0 tells is all that another process needs: the same calls end in the same state."""

import asyncio
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

import jmoe
from jmoe.packed_rows import NUM_SHAPE_COLUMNS, num_words, seat_size
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.errors import Lost, PeerLost, Unavailable
from serving.execution.buckets import Key
from serving.execution.fitting import fit_to_model
from serving.execution.replay import Draw, Led, Run, Seat, replay, to_message
from serving.execution.runner import DeviceRunner
from serving.request import BrownoutChange, Priority, SamplingParams, Structure, StructureKind

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry", "programs_are_compiled")

CONFIG = EngineConfig(
    model="bundled",
    dtype="float32",
    max_num_seqs=4,
    max_model_len=64,
    page_size=8,
    max_prefill_tokens=16,
    decode_buckets=(4,),
    prefill_buckets=(16,),
    threshold_buckets_percent=(100,),
    part_layers=2,
    brownout=BrownoutConfig(ways=(4, 8), decode_threshold_percent=40, salc=False),
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Returns the settings, with programs that are compiled once and kept on disk."""
    return replace(CONFIG, compilation_cache=str(tmp_path_factory.mktemp("programs")))


class Listening:
    """The other processes: they record what they are told."""

    def __init__(self):
        self.lost, self.told, self.stopped, self.stops_within_s = Lost(), [], [], 60.0

    def call(self, call):
        if self.lost.reason:
            raise PeerLost(self.lost.reason)
        self.told.append(call)

    def close(self, *, stop=True):
        self.stopped.append(stop)


def runner(config, followers=None):
    model = jmoe.load("bundled", "float32", ways=(4, 8))
    return model, DeviceRunner(model, fit_to_model(config, model), followers=followers)


async def serve(engine):
    """Serves best effort that is parked, samples, scores, and another way in the middle of it; and
    rows whose logits are changed beside a structured one.
    """

    async def one(number, priority, **sampling):
        params = SamplingParams(max_new_tokens=20, ignore_eos=True, seed=number, **sampling)
        prompt = list(range(1 + number, 20 + number))
        return [out async for out in engine.generate(prompt, params, priority=priority)]

    best_effort = [one(n, Priority.BEST_EFFORT, temperature=0.7 * (n % 2)) for n in range(3)]
    urgent = [one(9, Priority.LATENCY_SENSITIVE, top_k=5, temperature=1.0, prompt_logprobs=True)]
    change = engine.set_brownout(BrownoutChange(way=4))
    await asyncio.gather(*best_effort, *urgent, change)
    shaped = [
        one(1, Priority.BEST_EFFORT, frequency_penalty=1.5, top_logprobs=3, prompt_logprobs=True),
        one(2, Priority.LATENCY_SENSITIVE, logit_bias=((40, 8.0),), min_p=0.1, temperature=1.0),
    ]
    texts = await asyncio.gather(digits(engine), *shaped)
    assert re.fullmatch("[0-9]{20}", texts[0])


async def digits(engine):
    """Returns the text of a structured output."""
    structure = Structure(StructureKind.REGEX, "[0-9]{20}")
    params = SamplingParams(max_new_tokens=40, temperature=2.0, structure=structure)
    return "".join([out.text async for out in engine.generate([7, 8, 9], params)])


def note_draws(device):
    """Returns a list of all that the device will have drawn."""
    found, draw = [], device.draw

    def noted(*asked):
        found.append(draw(*asked))
        return found[-1]

    device.draw = noted
    return found


@pytest.mark.deep
@pytest.mark.parametrize("one_at_a_time", [False, True])
async def test_the_same_calls_end_in_the_same_state(kept, one_at_a_time):
    others = Listening()
    model, led = runner(kept, others)
    led.device.one_at_a_time = one_at_a_time
    drawn = note_draws(led.device)
    led.start(8, (8, 4))
    engine = Engine(kept, led, model)
    engine.run()
    await serve(engine)
    await engine.stop()
    assert others.stopped == [True]

    told = others.told
    kinds = [type(call).__name__ for call in told]
    assert kinds[0] == "Compile"
    assert {"Warm", "UseWay", "Ready", "Run", "LoadWay", "Seat", "Draw"} <= set(kinds)
    runs = [call for call in told if isinstance(call, Run)]
    assert any(run.score for run in runs)
    assert any(not run.sample for run in runs)  # a part that is not the last

    assert any(call.arrays.sizes[2] for call in told if isinstance(call, Draw))

    other, follower = runner(kept)
    drawn_there = note_draws(follower.device)
    replay(follower.device, told)
    follower.close()
    assert follower.programs.num_from_disk == follower.num_programs == led.num_programs
    assert other.way == model.way == 4
    for here, there in (
        (led.device.state, follower.device.state),
        (led.device.shaping, follower.device.shaping),
        (model.weights, other.weights),
        (drawn, drawn_there),
    ):
        for one, same in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
            np.testing.assert_array_equal(one, same)


@pytest.mark.deep
@pytest.mark.parametrize("one_at_a_time", [False, True])
async def test_a_process_lost_before_a_step_is_drawn_is_named(kept, one_at_a_time):
    class Losing(Listening):
        """Loses a process between the layers of a step and what draws its tokens."""

        def call(self, call):
            if served and isinstance(call, Draw):
                self.lost.say("process 1 of 2 is gone; start all of them again")
            super().call(call)

    others, served = Losing(), []
    model, led = runner(kept, others)
    led.device.one_at_a_time = one_at_a_time
    led.start(8, (8, 4))
    engine = Engine(kept, led, model)
    engine.run()
    served.append(True)
    with pytest.raises(Unavailable, match="failed: PeerLost: process 1 of 2 is gone"):
        await digits(engine)
    await engine.stop()
    assert others.stopped == [False]


def numbers(*shape):
    return np.zeros(shape, np.int32)


@pytest.mark.deep
def test_what_does_not_fit_what_is_here_is_drawn_by_nobody(kept):
    device = runner(kept)[1].device
    step, draw = Key("decode", 4, 100), Key("draw", 4, 100)
    device.compile([step, draw, device.buckets.seat])
    words, length = num_words(device.model.config.vocab_size), seat_size(64)
    shapes, allowed = numbers(4, NUM_SHAPE_COLUMNS), numbers(1, words)
    drawn = Draw(to_message(shapes, numbers(1), allowed))
    with pytest.raises(ValueError, match="no step waits to be drawn"):
        replay(device, [drawn])
    wrong = [
        Draw(to_message(*arrays))
        for arrays in (
            (numbers(3, NUM_SHAPE_COLUMNS), numbers(0), allowed),
            (shapes, numbers(2), numbers(3, words)),
            (shapes, numbers(1), numbers(1, words + 1)),
            (shapes, np.array([4], np.int32), allowed),
            (shapes, numbers(1)),
        )
    ]
    for one in wrong:
        device.warm(step)
        with pytest.raises((TypeError, ValueError, IndexError)):
            replay(device, [one])
    for rank, told in ((1, numbers(1, length)), (0, numbers(1, length - 1)), (0, numbers(length))):
        with pytest.raises((TypeError, ValueError, IndexError)):
            replay(device, [Seat(rank, to_message(told))])
    device.warm(step)
    replay(device, [drawn])
    with pytest.raises(ValueError, match="no step waits to be drawn"):
        replay(device, [drawn])  # once


class Noting:
    """A device that records which hosts a layer's experts get."""

    def __init__(self):
        self.asked = []

    def host_layer(self, layer, hosts):
        self.asked.append((layer, hosts))


def test_other_hosts_of_a_layer_are_told():
    here, there, others = Noting(), Noting(), Listening()
    hosts = np.array([[True, False, True], [False, True, False]])
    Led(here, others).host_layer(3, hosts)
    replay(there, others.told)
    for asked in (here.asked, there.asked):
        ((layer, wanted),) = asked
        assert layer == 3
        assert wanted.dtype == bool
        np.testing.assert_array_equal(wanted, hosts)


@pytest.mark.parametrize("when", ["while it is idle", "before it runs"])
async def test_an_engine_hears_that_a_process_is_gone(when):
    others = Listening()
    model, led = runner(replace(CONFIG, compilation_cache=""), others)
    engine = Engine(CONFIG, led, model)
    if when == "while it is idle":
        engine.run()
    await asyncio.to_thread(others.lost.say, "process 1 of 2 is gone; start all of them again")
    if when == "before it runs":
        engine.run()
    assert await asyncio.wait_for(engine.died(), 60) == (
        "PeerLost: process 1 of 2 is gone; start all of them again"
    )
    await engine.stop()
    assert others.stopped == [False]  # nobody is told that all is well
