"""Golden checkpoints, and copies of them that have united experts beside them."""

import json
import shutil
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
from safetensors.numpy import save_file

import jmoe
from jmoe import layout

GOLDEN = Path(__file__).parents[1] / "golden"
WAYS = (2, 3)


def add_united(directory, ways=WAYS, seed=0):
    """Writes random united experts: groups by index for the first way, mixed for the others."""
    cfg = jmoe.config.read_config(directory)
    rng = np.random.default_rng(seed)
    m, scales = cfg.num_experts, {"gate_up": cfg.d_model**-0.5, "down": cfg.d_ff_expert**-0.5}
    tensors = {}
    for way in ways:
        count = -(-m // way)
        for layer in range(cfg.num_moe_layers):
            groups = np.arange(m) // way
            if way != ways[0]:
                groups = rng.permutation(groups)
            at = f"way{way}.layers.{layer}."
            for key, shape in layout.expert_shapes(cfg).items():
                tensors[at + key] = rng.normal(size=(count, *shape)) * scales.get(key, 0.3)
            tensors[at + "groups"] = groups
    kind = {"groups": np.int32}
    tensors = {k: v.astype(kind.get(k.split(".")[-1], np.float32)) for k, v in tensors.items()}
    save_file(tensors, directory / "united.safetensors")


@pytest.fixture(scope="session")
def united_dirs(tmp_path_factory):
    """Returns a function that makes, once a case, a golden directory with united experts of ways 2
    and 3.
    """
    made = {}

    def directory(case):
        if case not in made:
            made[case] = tmp_path_factory.mktemp("united") / case
            shutil.copytree(GOLDEN / case, made[case])
            add_united(made[case])
        return made[case]

    return directory


@pytest.fixture(scope="session")
def united_models(united_dirs):
    """Returns a function that loads a case of `united_dirs` as float32."""
    loaded = {}

    def model(case):
        if case not in loaded:
            loaded[case] = jmoe.load(united_dirs(case), dtype="float32")
        return loaded[case]

    return model


@pytest.fixture
def copy(tmp_path):
    """Returns a function that copies a golden directory, which a test may damage."""

    def directory(case):
        return Path(shutil.copytree(GOLDEN / case, tmp_path / case))

    return directory


@pytest.fixture
def edit_config():
    def edit(directory, **changes):
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


@pytest.fixture
def without_type_checks():
    """Turns off the type checks of tests, which would be the first to complain of wrong values."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
