import struct

import pytest
from rich.console import Console

from serving.bench.report import (
    _headline,
    _subtitle,
    draw,
    latency_series,
    median_pair,
    pair_line,
    table,
    verdict,
)
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
        "gain": 1.4,
        "runs": (runs := {"zero": run(zero), "brownout": run(brownout)}),
        "pairs": [{"runs": runs, "why_not": ""}],
    }


def of_pairs(*rates, why_not=()):
    """Makes a result of several pairs, by the late first tokens of each with brownout."""
    found = [result(brownout=(rate, 0.0)) for rate in rates]
    pairs = [
        {"runs": one["runs"], "why_not": "busy" if number in why_not else ""}
        for number, one in enumerate(found)
    ]
    return found[0] | {"pairs": pairs}


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


def test_the_verdict_is_that_of_the_median_of_pairs_that_count():
    told = verdict(of_pairs(0.02, 0.9, 0.08, 0.04, why_not=(1,)))
    assert told.startswith("Brownout held the SLO")
    assert "4.0 % (2.0 % to 8.0 %) of first tokens" in told
    assert told.endswith("3 of 4 pairs count.")
    assert verdict(of_pairs(0.02, 0.9, 0.5)).startswith(
        "Brownout did not hold the SLO: TTFT missed"
    )


def test_a_machine_that_lets_no_two_pairs_count_is_too_busy_to_tell():
    told = verdict(of_pairs(0.02, 0.01, 0.0, why_not=(0, 2)))
    assert told.startswith("This machine is too busy to tell: 1 of 3 pairs count")
    assert "`jmoe demo --simulated`" in told
    assert "held" not in told


def test_what_was_simulated_says_so():
    simulated = result() | {"simulated": True}
    assert verdict(simulated).startswith("Simulated: Brownout held the SLO")
    assert str(table(simulated).title).startswith("Simulated: SLO")
    busy = verdict(of_pairs(0.02, 0.01, why_not=(0, 1)) | {"simulated": True})
    assert busy.startswith("Simulated: This machine is too busy to tell")
    assert "--simulated" not in busy  # no offer of what was played
    for run in simulated["runs"].values():
        run["burst"]["accuracy"] = None  # a simulated answer is neither right nor wrong
    assert "right answers" not in verdict(simulated)
    for label, drawn in (("Simulated: ", simulated), ("", result())):
        assert _headline(drawn).startswith(f"{label}Load doubles")
    assert "right answers" not in _subtitle(simulated)


def test_where_brownout_buys_too_little_nothing_is_held():
    told = verdict(result(brownout=(0.0, 0.0)) | {"gain": 1.1})
    assert "too little" in told
    assert "1.10 times as many" in told
    assert "held" not in told


def test_the_median_pair_is_one_that_counts():
    pairs = of_pairs(0.5, 0.02, 0.9, 0.04, why_not=(0, 2))["pairs"]
    assert median_pair(pairs) == 1
    assert median_pair(of_pairs(0.5, 0.02, 0.9, why_not=(0, 1, 2))["pairs"]) == 0


def test_the_median_pair_is_not_one_whose_burst_was_light():
    """It has the middle of late tokens with brownout, and shows nothing of what brownout does."""
    pairs = of_pairs(0.02, 0.08, 0.09)["pairs"]
    light = result(zero=(0.07, 0.0), brownout=(0.08, 0.0))
    assert median_pair([pairs[0], {**pairs[1], "runs": light["runs"]}, pairs[2]]) == 2


def test_a_pair_says_why_it_does_not_count():
    pairs = of_pairs(0.02, 0.04, why_not=(1,))["pairs"]
    assert pair_line(1, pairs[0]).endswith("2.0 % / 0.0 % with")
    assert pair_line(2, pairs[1]).endswith("; does not count: busy")
