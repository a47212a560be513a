"""What stages take: the roofline by hand, and measured times from a file."""

import json

import numpy as np
import pytest

from jmoe.parallel.cost import H200
from jmoe.parallel.stage_times import Geometry, measured, roofline, sequences_that_fit

SMALL = Geometry("small", 2, 4, 2, 10, 1000, 500, 16, 8, 100)


def test_roofline_by_hand():
    device = H200._replace(flops_per_s=1e6, memory_bytes_per_s=1e4, fixed_s=0.01)
    times = roofline(device, SMALL, 200, context=5.0)
    # One row: 2,000 bytes of weights and 160 of KV at 1e4 a second; products 2,000 + 160 at 1e6.
    assert times.attention_s[1] == pytest.approx(0.01 + 0.216)
    assert times.attention_s[200] == pytest.approx(0.01 + max(200 * 2160 / 1e6, 34000 / 1e4))
    assert times.first_s[1] - times.attention_s[1] == pytest.approx(0.2)
    found = times.experts_s(np.array([0, 2, 400]), np.array([0, 2, 4]))
    np.testing.assert_allclose(found, [0, 0.01 + 0.2, 0.01 + 0.4])
    # 1,000 bytes; weights of attention and embeddings twice, experts once; 64 bytes a token's KV.
    room = H200._replace(memory_bytes=20_000)
    assert sequences_that_fit(room, SMALL, 10.0, 2, 0) == (2 * 12000 - 8000) // 640
    assert sequences_that_fit(room, SMALL, 10.0, 1, 1) == 12000 // 640
    assert sequences_that_fit(room._replace(memory_bytes=8_001), SMALL, 10.0, 2, 0) == 0


def test_bandwidth_is_of_all_destinations():
    assert H200.bandwidth(8) == pytest.approx(H200.link_bytes_per_s)
    seven, eight = 7 / H200.link_bytes_per_s, 8 / H200.nic_bytes_per_s
    assert H200.bandwidth(16) == pytest.approx(15 / (seven + eight))


def test_measured_times_are_read(tmp_path):
    points = {"rows": [1, 3], "seconds": [1.0, 2.0]}
    file = tmp_path / "times.json"
    found = {
        "fixed_s": 0.5,
        "first": points,
        "attention": points,
        "experts": {"visits": [1, 3], "seconds": [1.0, 2.0]},
        "reads": {"experts": [1, 4], "seconds": [0.7, 1.0]},
    }
    file.write_text(json.dumps(found))
    times = measured(file, SMALL, 10)
    assert times.attention_s[2] == pytest.approx(1.5)
    assert times.attention_s[5] == pytest.approx(3.0)
    assert times.experts_s(np.array([1.0]), np.array([4.0]))[0] == pytest.approx(1.0)
    del found["reads"]
    file.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="reads"):
        measured(file, SMALL, 10)
