import pytest

from benchmarks import host_path


@pytest.mark.deep
async def test_a_slow_device_is_kept_busy(tmp_path, monkeypatch):
    monkeypatch.setattr(host_path, "RAMP_S", 1.0)
    monkeypatch.setattr(host_path, "WINDOW_S", 2.0)
    found = await host_path._measure(100.0, tmp_path)
    # 64 tokens every 100 ms; prefill steps of 16 requests come between.
    assert 0 < found.tokens_per_s <= 640 * 1.1
    assert found.device_tokens_per_s == 640
    assert -0.1 < found.idle_share < 1
    assert 0 < found.server_cpu_share < 2
    assert 0 < found.client_cpu_share < 1
