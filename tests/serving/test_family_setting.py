"""What can be wrong with a family that is to be served."""

import pytest

from serving.engine import Engine
from serving.errors import SettingsError
from tests.serving.families import GOLDEN, NAMES, settings_of

DIRECTORIES = dict.fromkeys(NAMES, GOLDEN)


async def starts(directories=DIRECTORIES, **changes):
    await Engine.start(settings_of(directories, "", **changes))


async def test_a_mesh_of_several_models():
    with pytest.raises(SettingsError, match=r"mesh is 'ep=2'; it must be left out with several"):
        await starts(mesh="ep=2")


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
