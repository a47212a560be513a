"""Metrics of a mesh, by hand."""

from types import SimpleNamespace

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jmoe.experts import ExpertPool
from serving.frontend.metrics import MeshLoad
from serving.plan import Copies, Phase


def load_of():
    return MeshLoad()


def read(device_rows, copies=None, padded_share=0.0):
    rows = None if device_rows is None else np.array(device_rows, np.int32)
    return SimpleNamespace(device_rows=rows, copies=copies, padded_share=padded_share)


class Collected:
    def __init__(self, load, engine):
        self.load, self.engine = load, engine

    def collect(self):
        return self.load.collect(self.engine)


def samples(load, engine=None):
    registry = CollectorRegistry()
    registry.register(Collected(load, engine))
    text = generate_latest(registry).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_one_device_has_none():
    load = load_of()
    load.step_read(Phase.DECODE, 3, read(None))
    assert samples(load) == {}


def test_what_two_devices_computed():
    load = load_of()
    copies = Copies(np.array([0, 9]), np.array([0, 3]))
    load.step_read(Phase.PREFILL, 6, read([[6, 2], [8, 4]], copies, padded_share=0.25))
    load.step_read(Phase.DECODE, 4, read([[2, 2], [3, 1]]))
    load.step_read(Phase.DECODE, 4, read([[0, 0], [0, 0]]))  # all dropped: no imbalance
    found = samples(load)
    assert found["jmoe_device_expert_rows_total", "0", "1"] == 11  # device, layer
    assert found["jmoe_device_expert_rows_total", "1", "0"] == 4
    # (6 + 8) / (4 + 6) and (2 + 3) / (2 + 2)
    assert found["jmoe_imbalance_ratio_sum", "prefill"] == 1.4
    assert found["jmoe_imbalance_ratio_sum", "decode"] == 1.25
    assert found["jmoe_imbalance_ratio_count", "decode"] == 1
    assert found["jmoe_imbalance_ratio_bucket", "1.5", "prefill"] == 1
    assert found["jmoe_expected_visits_total",] == 12  # of the layer that copies were made for
    assert found["jmoe_expected_visits_right_total",] == 9
    assert found["jmoe_experts_copied_total",] == 3
    assert found["jmoe_padded_rows_perc",] == 2 / 16


def test_bytes_and_copies_that_stay():
    load = load_of()
    load.step_read(Phase.PREFILL, 1, read([[1, 1]], Copies(np.array([1]), np.array([5]))))
    leaf = SimpleNamespace(nbytes=4000, shape=(10, 2))
    mover = SimpleNamespace(experts_copied=2, imbalances=lambda: [1.0, 1.5], failure="")
    engine = SimpleNamespace(
        loader=SimpleNamespace(mover=mover), model=SimpleNamespace(pool=ExpertPool(leaf, leaf))
    )
    found = samples(load, engine)
    assert found["jmoe_expert_copy_bytes_total",] == 7 * 800
    assert found["jmoe_experts_placed_total",] == 2
    assert found["jmoe_placement_imbalance_ratio",] == 1.25
    assert found["jmoe_placement_failed",] == 0
    mover.failure = "RuntimeError: out of memory"
    assert samples(load, engine)["jmoe_placement_failed",] == 1
