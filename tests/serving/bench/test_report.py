import struct

import pytest
from rich.console import Console

from serving.bench.report import draw, latency_series, table, verdict
from serving.bench.results import Record


def record(at_s, *token_s, code="OK"):
    return Record("f", at_s, token_s=list(token_s), end_s=at_s, code=code)


def burst(ttft_rate, itl_rate):
    return {
        **{f"p{p}_{m}_ms": 12.0 for p in (50, 90, 99) for m in ("ttft", "itl")},
        "ttft_violation_rate": ttft_rate,
        "itl_violation_rate": itl_rate,
        "degraded_share": 0.2,
        "accuracy": 0.9,
        "mean_thresholds_percent": {"prefill": 60.0, "decode": 50.0},
    }


def result(zero=(0.9, 0.8), brownout=(0.02, 0.05), ttft_s=40.0):
    def run(rates):
        return {
            "completed": 10,
            "failed": 1,
            "request_throughput": 2.0,
            "output_throughput": 20.0,
            "accuracy": 0.95,
            "latest_send_ms": 3.0,
            "steady": burst(0.0, None),
            "burst": burst(*rates),
            "series": {
                "end_s": [1.5, 3.0, 4.5],
                "ttft_s": [0.05, None, ttft_s],
                "itl_s": [0.01, 0.02, 0.03],
            },
            "samples": {
                "at_s": [0.0, 2.0],
                "prefill_threshold_percent": [100.0, 60.0],
                "decode_threshold_percent": [100.0, 50.0],
            },
        }

    return {
        "slo": {"ttft_s": 0.1, "itl_s": 0.02, "warning_factor": 0.8},
        "duration_s": 4.5,
        "burst_at_s": 1.5,
        "steady_rate_per_s": 5.0,
        "burst_rate_per_s": 10.0,
        "other_cpu_share": {"calibration": None, "zero": 0.01, "brownout": 0.02},
        "machine_speed": {"calibration": 1.0, "zero": 0.97, "brownout": 1.04},
        "runs": {"zero": run(zero), "brownout": run(brownout)},
    }


def test_series_by_hand():
    records = [
        record(0.1, 0.3, 0.4),  # window 0: TTFT 0.2, and a gap of 0.1 at 0.4
        record(0.9, 1.3, 1.6),  # due in window 0: TTFT 0.4; its gap of 0.3 came in window 1
        record(3.5, code="RESOURCE_EXHAUSTED"),  # as late as the run is long
    ]
    series = latency_series(records, duration_s=4.0, window_s=1.0, percentile=50)
    assert series["end_s"] == [1.0, 2.0, 3.0, 4.0]
    assert series["ttft_s"] == [pytest.approx(0.3), None, None, 4.0]
    assert series["itl_s"] == [pytest.approx(0.1), pytest.approx(0.3), None, None]


def test_series_of_nothing():
    assert latency_series([], 3.0)["ttft_s"] == [None, None]


@pytest.mark.parametrize("ttft_s", [0.2, 40.0])  # a linear axis, and a log axis that is cut off
def test_picture_has_its_size(tmp_path, ttft_s):
    path = tmp_path / "new" / "demo.png"
    draw(result(ttft_s=ttft_s), path)
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1600, 900)


def test_table_shows_both_runs():
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(result()))
    text = console.export_text()
    for part in (
        "without brownout",
        "with brownout",
        "90.0 %",
        "2.0 %",
        "60 % / 50 %",
        "12 / 12 / 12",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("zero", "brownout", "opening"),
    [
        ((0.9, 0.8), (0.02, 0.1), "Brownout held the SLO"),
        ((0.9, 0.8), (0.02, 0.3), "Brownout did not hold the SLO: ITL missed, though by less"),
        ((0.9, 0.8), (0.95, 0.85), "Brownout did not hold the SLO: TTFT and ITL missed, no better"),
        ((0.05, 0.02), (0.0, 0.0), "Nothing to prove"),
        ((0.9, None), (0.02, None), "Brownout held the SLO"),
    ],
)
def test_verdict_is_honest(zero, brownout, opening):
    assert verdict(result(zero, brownout)).startswith(opening)


def test_a_busy_machine_is_told():
    assert "Caution" not in verdict(result())
    starved = result()
    starved["runs"]["zero"]["latest_send_ms"] = 2100.0
    assert "left up to 2.10 s late" in verdict(starved)
    busy = result()
    busy["other_cpu_share"]["brownout"] = 0.4
    assert "up to 40 % of this machine" in verdict(busy)
    slow = result()
    slow["machine_speed"]["brownout"] = 0.7
    assert "did 0.70 to 1.00 times the work" in verdict(slow)
