"""Models that are loaded and unloaded while others of their family are served."""

import asyncio
import shutil
import threading
import time
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import grpc
import jax
import numpy as np
import pytest
from counting import collect, counting_engine, family_of, model_with
from openai_served import HttpSetup
from served import collect as messages_of
from served import failure

import jmoe
from jmoe import beside, expected_loss, levels
from jmoe.arrival import read_arrival
from jmoe.brownout import LowestGate, Own
from jmoe.expected_loss import ExpectedLoss, Kind, Point
from jmoe.levels import Levels
from serving.config import BrownoutConfig, EngineConfig, ServerConfig
from serving.engine import Engine
from serving.errors import (
    InvalidRequest,
    ModelUnloaded,
    NotFound,
    RequestFailed,
    Unavailable,
)
from serving.execution.executor import TakesModels
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.request import BrownoutChange, SamplingParams, number_of
from serving.startup.arrivals import arriving
from tests.jmoe.conftest import add_united
from tests.serving.fake_runner import FakeRunner
from tests.serving.families import GOLDEN, answer, settings_of
from tests.variants import variant


class Placing(FakeRunner):
    """A runner that models come to and leave."""

    def place_params(self, params):
        return params

    def write_experts(self, arrival):
        arrival.pieces.popleft()

    def load_united(self, model, way, layer):
        raise AssertionError("no united experts are there")

    def install(self, number, model):
        self.family.put(number, model)

    def vacate(self, number):
        self.family.put(number, None)


def read(config, family, executor, name, directory, check=lambda curves: None, curves=None):
    """Plays `arriving`: a model of two pieces."""
    check(curves or {})
    if directory == "nowhere":
        raise ValueError("there is no directory nowhere")
    model = model_with(None)
    model.name, model.way = name, None
    arrival = SimpleNamespace(
        number=min(family.vacant), pieces=deque([1, 2]), model=lambda family, params: model
    )
    return arrival, {}, curves or {}


def placing(names=("counter", "second"), spare=1, step_s=0.0, ways=(), **config):
    """Returns an engine of a family with `spare` vacant places."""
    family = family_of(names)
    for model in family:
        model.way, model.united = None, dict.fromkeys(ways)
    family.models += (family[0],) * spare
    family.vacant = frozenset(range(len(names), len(names) + spare))
    family.routed_slots = 8
    config = {"models": tuple(f"{name}={name}" for name in names), **config}
    engine = counting_engine(step_s, runner=Placing, model=family, **config)
    engine.executor.family = family
    engine.models._read = read
    return engine


def tokens(outputs):
    return [token for out in outputs for token in out.token_ids]


def test_the_step_runner_takes_models():
    from serving.execution.runner import DeviceRunner

    assert issubclass(DeviceRunner, TakesModels)


async def test_fifty_models_come_and_go_while_others_are_served():
    """Slots, pages and places are all back, and requests of others are what they are alone."""
    engine, stopping = placing(), asyncio.Event()
    served = []

    async def ask(model, step):
        while not stopping.is_set():
            prompt = [len(served) % 400, 5]
            found = tokens(await collect(engine, prompt, 6, model=model))
            assert found == [5 + step * (1 + at) for at in range(6)]
            served.append(model)

    asking = [asyncio.create_task(ask(model, step)) for model, step in (("", 1), ("second", 2))]
    for _ in range(50):
        with pytest.raises(NotFound, match="'third' is not served; 'counter', 'second' are"):
            await collect(engine, [1], model="third")
        await engine.load_model("third", "there")
        assert engine.names == ["counter", "second", "third"]
        running = asyncio.create_task(collect(engine, [7], 40, model="third"))
        assert tokens(await collect(engine, [7], 3, model="third")) == [10, 13, 16]
        ended = await engine.unload_model("third")
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
        assert ended == isinstance(outcome, ModelUnloaded)
        assert engine.names == ["counter", "second", ""]
    stopping.set()
    await asyncio.gather(*asking)
    assert {"", "second"} == set(served)
    assert engine.scheduler.idle
    engine.scheduler.check_idle()
    assert engine.family.vacant == {2}
    assert engine.family[2] is engine.family[0]  # nothing of what was there is kept
    assert engine.stats().requests_failed == 0
    await engine.stop()


@pytest.mark.parametrize("drain_s", [60.0, 0.0])
async def test_requests_of_an_unloaded_model_are_drained_or_end_with_an_error(drain_s):
    engine = placing()
    await engine.load_model("third", "there")
    own = asyncio.create_task(collect(engine, [1], 40, model="third"))
    other = asyncio.create_task(collect(engine, [1], 40))
    while len(engine.scheduler.running) < 2:
        await asyncio.sleep(0)
    unloading = asyncio.create_task(engine.unload_model("third", drain_s))
    while engine.names[2]:
        await asyncio.sleep(0)
    with pytest.raises(NotFound, match="'third' is not served"):
        await collect(engine, [1], model="third")
    assert await unloading == (not drain_s)
    if drain_s:
        assert tokens(await own) == [4 + 3 * at for at in range(40)]
    else:
        with pytest.raises(ModelUnloaded, match="'third' was unloaded; ask another"):
            await own
    assert tokens(await other) == list(range(2, 42))
    await engine.stop()


async def test_an_audit_is_none_of_the_requests_that_an_unloaded_model_ended():
    engine = placing()
    await engine.load_model("third", "there")
    answer = SimpleNamespace(request=SimpleNamespace(model=2), prompt=[1] * 59, context=[1] * 60)
    audit = asyncio.create_task(engine._score(answer))
    own = asyncio.create_task(collect(engine, [1], 40, model="third"))
    while len(engine.scheduler.running) < 2:
        await asyncio.sleep(0)
    assert await engine.unload_model("third") == 1
    for ended in await asyncio.gather(audit, own, return_exceptions=True):
        assert isinstance(ended, ModelUnloaded)
    await engine.stop()


async def test_a_model_that_takes_anothers_place_shares_no_prefix_with_it():
    engine = placing(prefix_reuse="on")
    prompt = list(range(1, 14))
    for name, cached in (("third", [0, 12]), ("fourth", [0, 12])):
        await engine.load_model(name, "there")
        for count in cached:
            (*_, last) = await collect(engine, prompt, 2, model=name)
            assert last.usage.cached_tokens == count, name
        await engine.unload_model(name)
    await engine.stop()


@pytest.mark.parametrize(
    ("name", "directory", "message"),
    [
        ("second", "there", "'second' is served already; choose another"),
        ("", "there", "name is ''; it must be 1 to 256 printable characters"),
        ("a ", "there", "name is 'a '; it must be"),
        ("\x00a", "there", "is not printable"),
        ("third", "nowhere", "'third' was not loaded: there is no directory nowhere"),
    ],
)
async def test_what_cannot_be_loaded_is_named(name, directory, message):
    engine = placing()
    with pytest.raises(InvalidRequest, match=message):
        await engine.load_model(name, directory)
    assert tokens(await collect(engine, [1], 2)) == [2, 3]
    await engine.stop()


async def test_the_first_model_and_those_of_a_fixed_family_stay():
    engine = placing()
    with pytest.raises(InvalidRequest, match="'counter' is the first model"):
        await engine.unload_model("counter")
    with pytest.raises(NotFound, match="'nobody' is not served"):
        await engine.unload_model("nobody")
    with pytest.raises(InvalidRequest, match=r"drain_s is -1\.0"):
        await engine.unload_model("second", drain_s=-1.0)
    await engine.unload_model("second")
    await engine.load_model("other", "there")
    assert engine.names == ["counter", "other", ""]
    await engine.stop()
    engine = counting_engine(model=family_of(("counter", "second")))
    with pytest.raises(InvalidRequest, match="models come and go where the server was started"):
        await engine.unload_model("second")
    await engine.stop()
    engine = placing(resident_sets=1)
    with pytest.raises(InvalidRequest, match="do not come and go with sets that come and go"):
        await engine.load_model("third", "there")
    await engine.stop()


async def test_what_goes_wrong_while_a_model_is_written_ends_its_arrival_alone():
    engine = placing()

    def broken(number, model):
        raise OSError("no memory is left")

    engine.executor.install, install = broken, engine.executor.install
    with pytest.raises(RequestFailed, match="not loaded: no memory is left"):
        await engine.load_model("third", "there")
    assert engine.names == ["counter", "second", ""]
    assert tokens(await collect(engine, [7], 3)) == [8, 9, 10]
    engine.executor.install = install
    await engine.load_model("third", "there")
    assert tokens(await collect(engine, [7], 3, model="third")) == [10, 13, 16]
    await engine.stop()


OF_WAYS = {Kind(way, "visits"): (0.1,) * 101 for way in (2, 4)}


async def bounded(curves, reading=lambda: None):
    """Returns an engine of ways 2 and 4 whose next model has these curves; `reading` is called, in
    a thread, once it was checked a first time.
    """
    brownout = BrownoutConfig(way=2, keep="visits", strategy="partial", salc=False)
    engine = placing(ways=(2, 4), brownout=brownout)
    for number in range(3):
        engine.slo.losses.put(number, OF_WAYS)

    def slowly(*of_model):
        found = read(*of_model, curves=curves)
        reading()
        return found

    engine.models._read = slowly
    return engine


@pytest.mark.parametrize("known", [2, 4])
async def test_a_bound_asks_for_the_loss_of_the_way_that_comes_next(known):
    kind = Kind(known, "visits")
    engine = await bounded({kind: OF_WAYS[kind]})
    engine.loader.advance, advance = lambda *_: None, engine.loader.advance
    await engine.set_brownout(BrownoutChange(max_expected_loss=0.5))
    changing = asyncio.create_task(engine.set_brownout(BrownoutChange(way=4)))
    while not engine.loader.busy:
        await asyncio.sleep(0)
    loading = asyncio.create_task(engine.load_model("third", "there"))
    if known == 2:
        why = "max_expected_loss is 0.5, and model 'third' has no expected loss of way 4 by visits"
        with pytest.raises(InvalidRequest, match=why):
            await asyncio.wait_for(loading, 60)
    engine.loader.advance = advance
    await asyncio.gather(changing, *([] if known == 2 else [loading]))
    assert engine.names == ["counter", "second", "" if known == 2 else "third"]
    assert engine.get_brownout().way == 4
    await engine.stop()


async def test_a_change_of_way_that_ends_while_a_model_is_checked_fails_nothing():
    """Wherever the check looks at pending changes in a thread of its own, the last of them ends."""
    engine = await bounded(OF_WAYS)
    loop, here, looked = asyncio.get_running_loop(), threading.get_ident(), []
    layers, engine.loader.advance = engine.loader.advance, lambda *_: None

    class Ending(list):
        def __len__(self):
            length = super().__len__()
            if threading.get_ident() != here and length:
                looked.append(length)
                ended = threading.Event()
                loop.call_soon_threadsafe(lambda: (resume(), ended.set()))
                assert ended.wait(60)
            return length

    def resume():
        engine.loader.advance = layers
        while engine.loader.busy:
            layers(0.0)

    engine.loader._pending = Ending()
    await engine.set_brownout(BrownoutChange(max_expected_loss=0.5))
    changing = asyncio.create_task(engine.set_brownout(BrownoutChange(way=4)))
    while not engine.loader.busy:
        await asyncio.sleep(0)
    loading = asyncio.create_task(engine.load_model("third", "there"))
    if not looked:
        while not engine.models.busy and not loading.done():
            await asyncio.sleep(0)
        resume()
    await asyncio.wait_for(asyncio.gather(changing, loading), 60)
    assert engine.names == ["counter", "second", "third"]
    assert engine.get_brownout().way == 4
    await engine.stop()


@pytest.mark.parametrize("change", [{"max_expected_loss": 0.5}, {"way": 4, "keep": "visits"}])
async def test_what_is_set_while_a_model_is_written_counts_for_it(change):
    engine = await bounded(
        {Kind(2, "visits"): OF_WAYS[Kind(2, "visits")]} if "way" in change else {}
    )
    if "way" in change:
        await engine.set_brownout(BrownoutChange(max_expected_loss=0.5))
    engine.models.advance, advance = lambda: None, engine.models.advance
    loading = asyncio.create_task(engine.load_model("third", "there"))
    while not engine.models.busy:
        await asyncio.sleep(0)
    why = "max_expected_loss is 0.5, and model 'third' has no expected loss of way"
    with pytest.raises(InvalidRequest, match=why):
        await engine.set_brownout(BrownoutChange(**change))
    engine.models.advance = advance
    await loading
    with pytest.raises(InvalidRequest, match=why):
        await engine.set_brownout(BrownoutChange(**change))
    assert engine.get_brownout().way == 2
    await engine.unload_model("third")
    await engine.set_brownout(BrownoutChange(**change))
    await engine.stop()


async def test_a_bound_that_is_set_while_a_model_is_read_counts_for_it():
    reading, bound = threading.Event(), threading.Event()
    engine = await bounded({}, lambda: (reading.set(), bound.wait(60)))
    loading = asyncio.create_task(engine.load_model("third", "there"))
    await asyncio.to_thread(reading.wait, 60)
    await engine.set_brownout(BrownoutChange(max_expected_loss=0.5))
    bound.set()
    fix = "is 0.5, and model 'third' has no expected loss of way 2 .*; `jmoe evaluate --keep visits"
    with pytest.raises(InvalidRequest, match=fix):
        await loading
    assert engine.names == ["counter", "second", ""]
    assert engine.family.vacant == {2}
    await engine.set_brownout(BrownoutChange(max_expected_loss=0.0))
    await engine.load_model("third", "there")
    assert tokens(await collect(engine, [7], 3, model="third")) == [10, 13, 16]
    await engine.stop()


async def test_an_engine_that_stops_gives_up_the_model_that_is_coming():
    engine = placing()
    engine.models.advance = lambda: None  # never written
    loading = asyncio.create_task(engine.load_model("third", "there"))
    while not engine.models.busy:
        await asyncio.sleep(0)
    await engine.stop()
    assert isinstance((await asyncio.gather(loading, return_exceptions=True))[0], BaseException)
    assert not engine.models.busy


async def test_an_engine_that_fails_while_a_model_is_read_says_so():
    engine = placing()
    reading, failed = threading.Event(), threading.Event()

    def slowly(*of_model):
        reading.set()
        assert failed.wait(60)
        return read(*of_model)

    engine.models._read = slowly
    loading = asyncio.create_task(engine.load_model("third", "there"))
    await asyncio.to_thread(reading.wait, 60)
    engine._fail("the device is gone")
    failed.set()
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable, match="the engine failed: the device is gone"):
            await loading
    assert not engine.models.busy
    await engine.stop()


async def test_over_the_admin_service_the_list_of_models_follows():
    models = ("counter=counter", "second=second")
    config = ServerConfig(port=0, engine=EngineConfig(models=models, spare_models=1))
    async with HttpSetup(config) as s:
        s.engine = placing()
        await s.ready()

        async def listed():
            found = [one["id"] for one in (await s.http.get("/v1/models")).json()["data"]]
            info = await s.stub.GetServerInfo(pb.GetServerInfoRequest())
            assert list(info.models) == found
            return found

        assert await listed() == ["counter", "second"]
        told = await s.admin.LoadModel(pb.LoadModelRequest(name="third", directory="there"))
        assert (list(told.names), told.num_vacant) == (["counter", "second", "third"], 0)
        assert await listed() == ["counter", "second", "third"]
        error = await failure(s.admin.LoadModel(pb.LoadModelRequest(name="x", directory="nowhere")))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        asked = pb.GenerateRequest(tokens=pb.TokenIds(ids=[4]), model="third")
        asked.sampling.max_new_tokens = 2
        found = [t for m in await messages_of(s.stub.Generate(asked)) for t in m.token_ids]
        assert found == [7, 10]
        own = pb.SetBrownoutRequest(model="third", itl_slo_s=0.5, floor_percent=60)
        state = await s.admin.SetBrownout(own)
        bounds = {"itl_slo_s": 0.5, "floor_percent": 60, "ceiling_percent": 100}
        assert state.models[2] == pb.ModelBrownout(name="third", **bounds)
        told = s.server.events[-1].text
        assert "itl_slo_s of model 'third' from 0 to 0.5, floor_percent of model" in told
        told = await s.admin.UnloadModel(pb.UnloadModelRequest(name="third"))
        assert (list(told.names), told.num_vacant, told.num_ended) == (["counter", "second"], 1, 0)
        assert await listed() == ["counter", "second"]
        assert (await failure(s.stub.Generate(asked))).code() == grpc.StatusCode.NOT_FOUND
        state = await s.admin.GetBrownout(pb.GetBrownoutRequest())
        assert [own.name for own in state.models] == ["counter", "second"]
        error = await failure(s.admin.SetBrownout(own))
        assert error.code() == grpc.StatusCode.NOT_FOUND
        await s.admin.LoadModel(pb.LoadModelRequest(name="third", directory="there"))
        state = await s.admin.GetBrownout(pb.GetBrownoutRequest())
        assert state.models[2] == pb.ModelBrownout(name="third", ceiling_percent=100)


# ---- weights -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    where = tmp_path_factory.mktemp("family")
    made = {
        "base": variant(GOLDEN, where / "base", 0),
        "law": variant(GOLDEN, where / "law", 1),
        "code": variant(GOLDEN, where / "code", 2),
    }
    made["near"] = variant(made["base"], where / "near", 3, only="self_attn")  # experts as base's
    for seed, path in enumerate(made.values()):
        add_united(path, (2,), seed)
    return made


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("programs"))


PROMPT = [5, 9, 33, 2, 7]
SAMPLING = SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(directories):
    """What the notebook writes with each; made before an engine counts compilations."""
    models = {name: jmoe.load(path, "float32") for name, path in directories.items()}
    return {
        name: jmoe.generate(model, [PROMPT], max_new_tokens=6).tokens[0]
        for name, model in models.items()
    }


async def started(directories, cache, names=("base", "law"), **changes):
    given = {name: directories[name] for name in names}
    return await Engine.start(settings_of(given, cache, **{"spare_models": 1, **changes}))


def free_slots(family):
    models = [model for at, model in enumerate(family) if at not in family.vacant]
    experts = family.config.num_experts
    used = {int(s) for m in models for s in np.asarray(m.table.slots)[:, :experts].ravel()}
    return family.routed_slots - len(used)


def moved(link, directories):
    link.unlink()
    link.symlink_to(directories["code"])


def overwritten(link, directories):
    for file in directories["code"].glob("model*.safetensors"):
        (link / file.name).write_bytes(file.read_bytes())


def gone(link, directories):
    shutil.rmtree(link.resolve())


@pytest.mark.parametrize("change", [moved, overwritten, gone])
def test_experts_are_shared_by_what_was_read_of_a_served_model(change, directories, tmp_path):
    """Not by what its directory holds by now: that may be the new model's own files."""
    link = tmp_path / "latest"
    link.symlink_to(shutil.copytree(directories["base"], tmp_path / "v1"))
    family = jmoe.load_family({"prod": link}, dtype="float32", spare_models=1)
    family = replace(family, models=tuple(m.with_kv_cache_dtype("fp8") for m in family))
    assert not read_arrival(family, "canary", directories["near"]).pieces  # all are shared
    change(link, directories)
    arrival = read_arrival(family, "canary", directories["code"])
    held = family[0].resident.held
    while arrival.pieces:
        arrival.write_piece(held)
    alone = jmoe.load(directories["code"], "float32")
    routed = slice(family.config.num_experts)
    found = held.pool.read(arrival.table[:, routed].reshape(-1))
    wanted = alone.pool.read(np.asarray(alone.table.slots)[:, routed].reshape(-1))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_it_joins_a_family_that_has_a_strategy_of_a_users_own(directories):
    family = jmoe.load_family({"base": directories["base"]}, dtype="float32", spare_models=1)
    own = Own(LowestGate(), guarded=True)
    models = [replace(model, config=replace(model.config, strategy=own)) for model in family]
    family = replace(family, models=tuple(models))
    assert read_arrival(family, "code", directories["code"]).config.strategy == own


def test_expected_loss_is_checked_before_weights_are_read(directories, tmp_path):
    path, known = shutil.copytree(directories["code"], tmp_path / "code"), Kind(0, "visits")
    table = ExpectedLoss(known, (Point(0, 0.1, 0.1, 0.1),))
    expected_loss.write(path / expected_loss.FILE, [table], beside.digest_of(path))
    family = jmoe.load_family({"base": directories["base"]}, dtype="float32")  # of no vacant place

    def check(curves):
        assert list(curves) == [known]
        raise InvalidRequest("no")

    with pytest.raises(InvalidRequest, match="no"):
        arriving(EngineConfig(), family, Placing, "code", str(path), check)


@pytest.mark.deep
@pytest.mark.parametrize("quantize", ["int4", "mxfp4"])
def test_its_experts_are_kept_as_the_familys_are(directories, quantize):
    known = {name: directories[name] for name in ("base", "law", "code")}
    family = jmoe.load_family(
        {"base": known["base"], "law": known["law"]},
        dtype="float32",
        quantize=quantize,
        spare_models=1,
    )
    arrival = read_arrival(family, "code", known["code"])
    held = family[0].resident.held
    while arrival.pieces:
        arrival.write_piece(held)
    whole = jmoe.load_family(known, dtype="float32", quantize=quantize)
    routed = slice(family.config.num_experts)
    found = held.pool.read(arrival.table[:, routed].reshape(-1))
    wanted = whole[2].pool.read(np.asarray(whole[2].table.slots)[:, routed].reshape(-1))
    assert found.format == quantize
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.deep
@pytest.mark.usefixtures("compiled_in_a_hurry")
async def test_a_loaded_model_writes_what_it_writes_alone(directories, alone, cache):
    """Exactly, under brownout after another way of united experts, in another's place, and where it
    shares all experts with one that is served; without a compilation that a step waits for.
    """
    brownout = BrownoutConfig(strategy="partial", salc=False, way=2, prefill_threshold_percent=30)
    engine = await started(directories, cache, brownout=brownout)
    everything = free_slots(engine.family)
    cfg = engine.family.config
    assert everything == cfg.num_moe_layers * cfg.num_experts
    busy = asyncio.create_task(_keep_asking(engine))
    try:
        for name in ("code", "near", "code"):
            await engine.load_model(name, str(directories[name]))
            shared = name == "near"
            assert free_slots(engine.family) == everything * shared
            found, *_ = await answer(engine, PROMPT, SAMPLING, name, allow_brownout=False)
            assert found == alone[name], name
            if name == "code":
                with pytest.raises(InvalidRequest, match="all 3 places for models are taken"):
                    await engine.load_model("more", str(directories["near"]))
            assert await engine.unload_model(name) == 0
            assert free_slots(engine.family) == everything
        assert await engine.unload_model("law", drain_s=30) == 0
        await engine.load_model("code", str(directories["code"]))
        assert engine.names == ["base", "code", ""]
        found, *_ = await answer(engine, PROMPT, SAMPLING, "code", allow_brownout=False)
        assert found == alone["code"]
    finally:
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        stats = engine.stats()
        await engine.stop()
    assert stats.compilations_since_ready == 0
    assert stats.requests_failed == 0


@pytest.mark.deep
@pytest.mark.usefixtures("compiled_in_a_hurry")
async def test_a_loaded_model_has_levels_of_its_own(directories, cache, tmp_path):
    """A model without any is refused where programs go by them."""
    known = {name: shutil.copytree(directories[name], tmp_path / name) for name in ("base", "code")}
    each = np.stack([np.maximum(np.arange(101), 90), np.arange(101) // 3], axis=1)
    each[100] = 100
    for name, rows in (("base", each), ("code", each[:, ::-1])):
        table = Levels(2, "weight", tuple(map(tuple, rows.tolist())))
        levels.write(known[name] / levels.FILE, [table], beside.digest_of(known[name]))
    brownout = BrownoutConfig(
        salc=False,
        way=2,
        keep="weight",
        levels=True,
        prefill_threshold_percent=50,
        decode_threshold_percent=50,
    )
    model = jmoe.load(known["code"], "float32")
    want = jmoe.generate(
        model, [PROMPT], 6, jmoe.Brownout("partial", 50, 2, "weight", True), stop_token_ids=()
    )
    engine = await started(known, cache, ("base",), brownout=brownout, prefix_reuse="off")
    try:
        with pytest.raises(InvalidRequest, match=r"law has no levels\.json"):
            await engine.load_model("law", str(directories["law"]))
        await engine.load_model("code", str(known["code"]))
        tokens, _, degraded = await answer(engine, PROMPT, SAMPLING, "code")
        assert (tokens, degraded) == (want.tokens[0], want.degraded_visits[0])
        stats = engine.stats()
    finally:
        await engine.stop()
    assert stats.compilations_since_ready == 0


async def _keep_asking(engine):
    expected = None
    while True:
        found, *_ = await answer(engine, PROMPT, SAMPLING, "base", allow_brownout=False)
        assert found == (expected := expected or found)


@pytest.mark.deep
@pytest.mark.usefixtures("compiled_in_a_hurry")
async def test_what_does_not_fit_is_refused_before_it_is_read(directories, cache, monkeypatch):
    engine = await started(directories, cache)
    try:
        with pytest.raises(InvalidRequest, match="of one architecture"):
            await engine.load_model("other", str(GOLDEN.with_name("mixtral")))
        monkeypatch.setattr("serving.startup.arrivals.free_host_bytes", lambda: 1000)
        with pytest.raises(InvalidRequest, match=r"GiB of the host's memory, and .* are free"):
            await engine.load_model("code", str(directories["code"]))
        monkeypatch.undo()
        await engine.load_model("code", str(directories["code"]))
    finally:
        await engine.stop()


@pytest.mark.exhaustive
async def test_fifty_loads_under_load_leave_no_memory_and_disturb_nobody(directories, alone, cache):
    """The P95 of other models' inter-token latencies is at most 1.5 of what it was before."""
    engine = await started(directories, cache)
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
    gaps: list[float] = []

    async def ask(model):
        while True:
            at = None
            async for _ in engine.generate(PROMPT, sampling, model=model):
                now = time.monotonic()
                if at is not None:
                    gaps.append(now - at)
                at = now

    asking = [asyncio.create_task(ask(model)) for model in ("base", "law")]
    arrays = []
    try:
        ratios = []
        for at in range(50):
            gaps.clear()
            while len(gaps) < 300:
                await asyncio.sleep(0.05)
            before = np.percentile(gaps, 95)
            gaps.clear()
            name = ("code", "near")[at % 2]
            await engine.load_model(name, str(directories[name]))
            found, *_ = await answer(engine, PROMPT, SAMPLING, name)
            assert found == alone[name]
            await engine.unload_model(name)
            while len(gaps) < 300:
                await asyncio.sleep(0.05)
            ratios.append(np.percentile(gaps, 95) / before)
            arrays.append(sum(array.nbytes for array in jax.live_arrays()))
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        stats = engine.stats()
        engine.scheduler.check_idle()
        await engine.stop()
    assert stats.compilations_since_ready == 0
    assert arrays[-1] <= arrays[9] * 1.01
    assert np.median(ratios) <= 1.5, ratios


@pytest.mark.parametrize(
    ("names", "model", "number"),
    [(["a", "b"], "", 0), (["", "b", "c"], "", 1), (["", "b", "c"], "c", 2)],
)
def test_a_request_that_names_no_model_gets_the_first_served(names, model, number):
    assert number_of(model, names) == number
