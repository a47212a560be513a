"""What can be wrong with a family that is to be served."""

import pytest

from serving.engine import Engine
from serving.settings import SettingsError
from tests.jmoe.conftest import add_united
from tests.serving.families import GOLDEN, NAMES, settings_of
from tests.variants import variant


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


async def test_a_negative_number_of_models(config, directories):
    with pytest.raises(SettingsError, match=r"engine.mixed_models is -1; it must be 0 or more"):
        await Engine.start(config(directories, mixed_models=-1))
