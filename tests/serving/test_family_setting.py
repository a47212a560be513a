"""What can be wrong with a family that is to be served."""

from dataclasses import replace
from shutil import copyfile

import pytest

import jmoe
from jmoe.checkpoint import weights_digest
from jmoe.config import read_config
from jmoe.sharing import Sharing, write_sharing
from serving.config import BrownoutConfig
from serving.engine import Engine
from serving.errors import SettingsError
from serving.request import BrownoutChange, SamplingParams
from tests.jmoe.conftest import add_united
from tests.serving.families import GOLDEN, NAMES, answer, settings_of
from tests.variants import variant

DIRECTORIES = dict.fromkeys(NAMES, GOLDEN)


async def starts(directories=DIRECTORIES, **changes):
    await Engine.start(settings_of(directories, "", **changes))


async def test_sets_that_come_and_go_over_a_mesh():
    words = r"resident_sets is 1; it must be left out with experts over a mesh: what is spread"
    with pytest.raises(SettingsError, match=words):
        await starts(mesh="ep=2", resident_sets=1)


async def test_experts_in_host_memory_of_recurrent_models(tmp_path):
    golden = GOLDEN.with_name("qwen3_next")
    directories = {name: variant(golden, tmp_path / name, n) for n, name in enumerate(NAMES[:2])}
    words = r"has recurrent layers, which cannot be served with experts in host memory .*first pos"
    with pytest.raises(SettingsError, match=words):
        await starts(directories, resident_experts=30, spare_experts=9)


async def test_a_map_without_models():
    with pytest.raises(SettingsError, match=r"engine\.family is 'x.json'; it must be empty unless"):
        await starts({}, model=str(GOLDEN), family="x.json")


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (("base",), "NAME=DIR of each model with a printable name, and one is 'base'"),
        (("base=", "b=x"), "one is 'base='"),
        (("a=x", "a=y"), "'a' is there twice"),
    ],
)
async def test_models_that_are_not_named(models, words):
    with pytest.raises(SettingsError, match=words):
        await starts({}, models=models)


async def test_more_sets_than_models():
    with pytest.raises(SettingsError, match=r"engine.resident_sets is 4; .*number of models, 3"):
        await starts(resident_sets=4)


async def test_a_negative_number_of_models():
    with pytest.raises(SettingsError, match=r"engine.mixed_models is -1; it must be 0 or more"):
        await starts(mixed_models=-1)


@pytest.mark.deep
async def test_borrowed_united_experts_are_served_in_each_way(tmp_path):
    """One request at a time, so that plans are those of a notebook. The borrowers' directories have
    no united experts; their oracles' have the base's.
    """
    paths = {name: variant(GOLDEN, tmp_path / name, at) for at, name in enumerate(NAMES)}
    add_united(paths["base"])
    cfg = read_config(GOLDEN)
    plain = Sharing.none(NAMES, cfg.num_moe_layers, cfg.num_experts)
    prints = tuple(map(weights_digest, paths.values()))
    write_sharing(
        tmp_path / "family.json", replace(plain, fingerprints=prints, united=(0,) * len(NAMES))
    )
    models = {}
    for name, path in paths.items():
        own = variant(path, tmp_path / f"oracle-{name}", 0, scale=0.0)
        copyfile(paths["base"] / "united.safetensors", own / "united.safetensors")
        models[name] = jmoe.load(own, "float32")
    brownout = BrownoutConfig(
        strategy="partial",
        way=2,
        keep="visits",
        prefill_threshold_percent=30,
        decode_threshold_percent=30,
        salc=False,
    )
    config = settings_of(
        paths, str(tmp_path / "programs"), family=str(tmp_path / "family.json"), brownout=brownout
    )
    prompt, sampling = (
        [3, 17, 60, 5, 41, 22, 9, 70],
        SamplingParams(max_new_tokens=9, ignore_eos=True),
    )
    engine = await Engine.start(config)
    try:
        for way in (2, 3, 2):
            await engine.set_brownout(BrownoutChange(way=way))
            for name, model in models.items():
                setting = jmoe.Brownout("partial", 30, way)
                want = jmoe.generate(
                    model, [prompt], 9, setting, page_size=8, chunk_size=16, stop_token_ids=()
                )
                tokens, _, degraded = await answer(engine, prompt, sampling, name)
                assert tokens == want.tokens[0]
                assert degraded == want.degraded_visits[0] > 0
    finally:
        await engine.stop()
