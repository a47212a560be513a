"""A family on the real engine: each model's answers are those it gives on an engine of its own."""

import asyncio
import random

import pytest

import jmoe
from jmoe.checkpoint import weights_digest
from jmoe.family import load_family
from jmoe.sharing import Sharing, write_sharing
from serving.cli import main as cli
from serving.client import Client
from serving.config import BrownoutConfig, ServerConfig
from serving.engine import Engine
from serving.errors import NotFound
from serving.frontend.metrics import Metrics
from serving.frontend.server import Server
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.request import BrownoutChange, SamplingParams
from serving.settings import SettingsError
from tests.jmoe.conftest import add_united
from tests.serving.families import GOLDEN, NAMES, answer, requests, settings_of
from tests.variants import variant

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    where = tmp_path_factory.mktemp("served")
    own = {name: variant(GOLDEN, where / name, seed) for seed, name in enumerate(NAMES)}
    for seed, directory in enumerate(own.values()):
        add_united(directory, seed=seed)
    return own


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Makes settings whose programs are compiled once for all engines of one shape."""
    cache = str(tmp_path_factory.mktemp("programs"))

    def make(directories, **changes):
        return settings_of(directories, cache, **changes)

    return make


@pytest.mark.deep
@pytest.mark.parametrize("resident_sets", [0, 2])
async def test_answers_are_those_of_each_model_alone(config, directories, resident_sets):
    """Alternating, parked between layers, and with sets of weights that come and go."""
    asked = list(requests(random.Random(0), 36))
    family = await Engine.start(
        config(
            directories,
            policy="restless:Restless",
            resident_sets=resident_sets,
            model_stay_s=0.02 if resident_sets else 0.0,
        )
    )
    try:
        together = await asyncio.gather(*(answer(family, *r[:3], priority=r[3]) for r in asked))
        family.scheduler.check_idle()
        assert family.runner.compilations_since_ready == 0
        assert family.scheduler.num_parks > 0
        assert (family.registry.num_swaps > 0) == bool(resident_sets)
        evicted = sum(family.scheduler.num_evictions.values())
        assert resident_sets or not evicted
        with pytest.raises(NotFound, match="model 'tax' is not served; 'base', 'law', 'code' are"):
            await answer(family, [1], SamplingParams(), "tax")
    finally:
        await family.stop()
    for name in NAMES:
        alone = await Engine.start(config({}, model=str(directories[name])))
        try:
            own = [at for at, request in enumerate(asked) if request[2] == name]
            found = await asyncio.gather(*(answer(alone, *asked[at][:2]) for at in own))
        finally:
            await alone.stop()
        assert len(own) > 5
        for at, want in zip(own, found, strict=True):
            got = together[at]
            if not evicted:
                assert got == want
            assert got[0] == want[0]  # what was evicted and computed again, to 1e-4
            assert got[1] == pytest.approx(want[1], abs=1e-4)


@pytest.mark.deep
async def test_under_brownout_each_has_its_own_united_experts(config, directories):
    """One at a time, so that what is degraded depends on nobody else."""
    brownout = BrownoutConfig("partial", 2, (), 30, 30, salc=False)
    asked = [([5, 9, 2, 40], SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=True))] * 3
    family = await Engine.start(config(directories, brownout=brownout))
    try:
        found = {name: await answer(family, *asked[0], name) for name in NAMES}
        changed = await family.set_brownout(BrownoutChange(way=3))
        assert changed.way == 3
        other = {name: await answer(family, *asked[0], name) for name in NAMES}
        assert family.runner.compilations_since_ready == 0
    finally:
        await family.stop()
    for name in NAMES:
        model = {"model": str(directories[name])}
        alone = await Engine.start(config({}, **model, brownout=brownout))
        try:
            assert found[name] == await answer(alone, *asked[0])
            assert found[name][2] > 0
            await alone.set_brownout(BrownoutChange(way=3))
            assert other[name] == await answer(alone, *asked[0])
        finally:
            await alone.stop()


@pytest.fixture
def asked_for(directories, tmp_path, monkeypatch):
    """Engine settings of `jmoe serve NAME=DIR NAME=DIR --family FILE` under fixed brownout."""
    owners = Sharing.none(NAMES, 2, 7).owners
    owners[:, :, ::2] = 1
    prints, file = tuple(map(weights_digest, directories.values())), tmp_path / "family.json"
    write_sharing(file, Sharing(NAMES, owners, prints))
    started = []

    def serve(settings, *_):
        started.append(settings)
        return asyncio.sleep(0)

    monkeypatch.setattr("serving.frontend.server.serve", serve)
    models = [f"{name}={path}" for name, path in directories.items()]
    flags = "--way 2 --prefill-threshold 30 --decode-threshold 30 --no-salc"
    words = ["serve", *models, "--family", str(file), *flags.split()]
    monkeypatch.setattr("sys.argv", ["jmoe", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    return started[0].engine


@pytest.mark.deep
async def test_over_a_socket_with_shared_experts_under_brownout(config, directories, asked_for):
    """What `family.json` says is served, each model by its name and with its own united experts."""
    given = asked_for
    settings = config({}, models=given.models, family=given.family, brownout=given.brownout)
    metrics = Metrics()
    server = Server(ServerConfig(port=0, engine=settings), metrics)
    await server.start()
    engine = await Engine.start(settings, observer=metrics)
    await server.attach(engine)
    try:
        async with Client(server.address) as client:
            info = await client.server_info()
            assert (info.model, list(info.models)) == ("base", list(NAMES))
            assert (await client.model_info("law")).name == "law"
            assert (await client.model_info()).name == "base"
            sampling = pb.SamplingParams(max_new_tokens=5)
            served = {}
            for name in ("", *NAMES):
                assert list((await client.model_info(name)).united_ways) == [2, 3]
                outs = [out async for out in client.generate([3, 1, 4], sampling, model=name)]
                assert outs[-1].usage.degraded_visits > 0
                served[name] = [token for out in outs for token in out.token_ids]
    finally:
        await server.stop()
    assert served[""] == served["base"]
    brownout = jmoe.Brownout("partial", 30, 2)
    for model in load_family(directories, given.family, "float32"):
        found = jmoe.generate(model, [[3, 1, 4]], max_new_tokens=5, brownout=brownout)
        assert served[model.name] == found.tokens[0]
    lines = {f.name: f for f in metrics.by_model.collect(engine)}
    finished = lines["jmoe_requests_finished_by_model"].samples
    assert {s.labels["model"]: s.value for s in finished} == {"base": 2, "law": 1, "code": 1}
    generated = lines["jmoe_generation_tokens_by_model"].samples
    assert [s.value for s in generated] == [10, 5, 5]


# ---- what is refused at the start ----


async def test_a_mesh_of_several_models(config, directories):
    with pytest.raises(SettingsError, match=r"mesh is 'ep=2'; it must be left out with several"):
        await Engine.start(config(directories, mesh="ep=2"))


async def test_a_map_without_models(config):
    with pytest.raises(SettingsError, match=r"engine\.family is 'x.json'; it must be empty unless"):
        await Engine.start(config({}, model=str(GOLDEN), family="x.json"))


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (("base",), "NAME=DIR of each model with a printable name, and one is 'base'"),
        (("base=", "b=x"), "one is 'base='"),
        (("a=x", "a=y"), "'a' is there twice"),
    ],
)
async def test_models_that_are_not_named(config, models, words):
    with pytest.raises(SettingsError, match=words):
        await Engine.start(config({}, models=models))


async def test_more_sets_than_models(config, directories):
    with pytest.raises(SettingsError, match=r"engine.resident_sets is 4; .*number of models, 3"):
        await Engine.start(config(directories, resident_sets=4))
