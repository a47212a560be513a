"""HTTP's cost beside gRPC's: how it is reckoned, and that both are measured."""

import pytest

from benchmarks import host_path_http
from benchmarks.host_path_http import Span, measure, ratio


def spans(*us):
    names = ("http", "grpc", "grpc", "http")
    return [Span(names[i % 4], 1.0, cost, 1.0) for i, cost in enumerate(us)]


def test_the_ratio_is_the_median_pairs():
    # Pairs: 2 / 1, 3 / 6, and, on a machine that was busy meanwhile, 90 / 60.
    assert ratio(spans(2.0, 1.0, 6.0, 3.0, 90.0, 60.0)) == 1.5


@pytest.mark.deep
async def test_both_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(host_path_http, "RAMP_S", 0.5)
    monkeypatch.setattr(host_path_http, "SPAN_S", 3.0)
    found = await measure(32.0, 1, tmp_path)
    assert [span.protocol for span in found] == ["http", "grpc"]
    for span in found:
        # 64 tokens every 32 ms at most.
        assert 0 < span.tokens_per_s <= 2000 * 1.2
        assert 0 < span.server_us_per_token < 5000
