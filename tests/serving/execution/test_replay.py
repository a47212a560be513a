"""What process 0 tells is all that another process needs: the same calls end in the same state."""

import asyncio
from dataclasses import replace

import jax
import numpy as np
import pytest

import jmoe
from serving.config import BrownoutConfig, EngineConfig
from serving.engine import Engine
from serving.errors import Lost
from serving.execution.fitting import fit_to_model
from serving.execution.replay import Led, replay
from serving.execution.runner import DeviceRunner
from serving.proto.jmoe.v1 import hosts_pb2 as pb
from serving.request import BrownoutChange, Priority, SamplingParams

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")

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


class Listening:
    """The other processes: they record what they are told."""

    def __init__(self):
        self.lost, self.told, self.stopped = Lost(), [], []

    def call(self, call):
        self.told.append(call.SerializeToString())

    def close(self, *, stop=True):
        self.stopped.append(stop)


def runner(config, followers=None):
    model = jmoe.load("bundled", "float32", ways=(4, 8))
    return model, DeviceRunner(model, fit_to_model(config, model), followers=followers)


async def serve(engine):
    """Serves best effort that is parked, samples, scores, and another way in the middle of it."""

    async def one(number, priority, **sampling):
        params = SamplingParams(max_new_tokens=20, ignore_eos=True, seed=number, **sampling)
        prompt = list(range(1 + number, 20 + number))
        return [out async for out in engine.generate(prompt, params, priority=priority)]

    best_effort = [one(n, Priority.BEST_EFFORT, temperature=0.7 * (n % 2)) for n in range(3)]
    urgent = [one(9, Priority.LATENCY_SENSITIVE, top_k=5, temperature=1.0, prompt_logprobs=True)]
    change = engine.set_brownout(BrownoutChange(way=4))
    await asyncio.gather(*best_effort, *urgent, change)


@pytest.mark.deep
async def test_the_same_calls_end_in_the_same_state(tmp_path):
    config = replace(CONFIG, compilation_cache=str(tmp_path))
    others = Listening()
    model, led = runner(config, others)
    led.start(8, (8, 4))
    engine = Engine(config, led, model)
    engine.run()
    await serve(engine)
    await engine.stop()
    assert others.stopped == [True]

    told = [pb.Call.FromString(call) for call in others.told]
    kinds = [call.WhichOneof("kind") for call in told]
    assert kinds[0] == "compile"
    assert {"warm", "use_way", "ready", "run", "load_way"} <= set(kinds)
    runs = [call.run for call in told if call.HasField("run")]
    assert any(run.score for run in runs)
    assert any(not run.sample for run in runs)  # a part that is not the last

    other, follower = runner(config)
    replay(follower.device, told)
    follower.close()
    assert follower.programs.num_from_disk == follower.num_programs == led.num_programs
    assert other.way == model.way == 4
    for here, there in ((led.device.state, follower.device.state), (model.weights, other.weights)):
        for one, same in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
            np.testing.assert_array_equal(one, same)


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
    replay(there, map(pb.Call.FromString, others.told))
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
