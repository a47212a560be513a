"""A worker reads of the checkpoint what it keeps, and keeps what it would of a whole one."""

import re

import jax
import numpy as np
import pytest

from jmoe.checkpoint import TensorFiles
from serving.config import AsynchronousConfig, BrownoutConfig, EngineConfig
from serving.pipeline.devices import ExpertDevice
from serving.pipeline.messages import ATTENTION, EXPERTS
from serving.pipeline.worker_process import Assignment
from serving.startup import worker
from serving.startup.asynchronous import crew_of

OWN = AsynchronousConfig(attention=1, experts=3, copies=2, workers="processes")
CONFIG = EngineConfig(
    mode="aep", asynchronous=OWN, dtype="float32", brownout=BrownoutConfig(ways=(4,))
)
EXPERT = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.")


@pytest.fixture
def read(monkeypatch):
    """The names of tensors that were read."""
    names, raw = [], TensorFiles.raw

    def noting(self, name, *args):
        names.append(name)
        return raw(self, name, *args)

    monkeypatch.setattr(TensorFiles, "raw", noting)
    return names


@pytest.mark.sized(deep=("attention-0", "experts-0"))
@pytest.mark.parametrize(("kind", "number"), [(ATTENTION, 0), (EXPERTS, 0), (EXPERTS, 2)])
def test_a_worker_reads_its_own_experts_alone(read, kind, number):
    assignment = Assignment(kind, number, "tcp://nowhere", CONFIG, "00" * 32)
    device = jax.local_devices()[0]
    made, _ = worker._worker_of(assignment, lambda *_: None, device, lambda *_: None)
    got = {tuple(map(int, found.groups())) for name in read if (found := EXPERT.search(name))}
    others = {name for name in read if not EXPERT.search(name)}
    read.clear()
    crew = crew_of(CONFIG, None, lambda *_: None)
    cfg, hosted = crew.model.config, crew.hosts[:, :, number]
    layers = [layer for layer, is_moe in enumerate(cfg.moe_layers) if is_moe]
    wanted = {
        (layers[layer], expert)
        for layer, expert in np.argwhere(hosted[:, : cfg.num_experts]).tolist()
        if kind == EXPERTS
    }
    assert got == wanted
    assert len(got) < len(layers) * cfg.num_experts
    assert others == {name for name in read if not EXPERT.search(name)}
    if kind == EXPERTS:
        whole = ExpertDevice(crew.model, crew.ways, hosted, 8, device)
        for ours, theirs in zip(
            jax.tree.leaves(made.device._pool), jax.tree.leaves(whole._pool), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
