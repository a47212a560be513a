"""The forecast of asynchronous expert parallelism: by hand, what always holds, and the advice."""

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.mesh.aep import DESIGNED, by_transport
from benchmarks.mesh.forecast import accuracy, case_of, compare
from jmoe.config import from_hf
from jmoe.parallel import asynchronous
from jmoe.parallel.asynchronous import (
    MARGIN,
    MOST_DEVICES,
    NO_OVERHEADS,
    Deployment,
    Late,
    Overheads,
    advise,
    exchange_s,
    forecast,
    forecasts,
    synchronous_tokens_per_s,
)
from jmoe.parallel.cost import H200
from jmoe.parallel.stage_times import Geometry, StageTimes

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "async-expert-parallelism.md").read_text(encoding="utf-8")
FORECAST = json.loads(
    (ROOT / "benchmarks" / "results" / "aep_forecast.json").read_text(encoding="utf-8")
)
SIMULATED = json.loads(
    (ROOT / "benchmarks" / "results" / "aep_simulated.json").read_text(encoding="utf-8")
)
SAME = ("model", "top_k", "devices", "in_flight", "skew", "same")
PUBLISHED = ROOT / "tests" / "published_configs"
MIXTRAL = from_hf(json.loads((PUBLISHED / "Mixtral-8x7B-v0.1.json").read_text()))
TINY = Geometry("tiny", 2, 4, 1, 8, 100, 50, 16, 8, 100)
# Links and memory that nothing has to wait for.
FREE = H200._replace(link_bytes_per_s=1e30, nic_bytes_per_s=1e30, memory_bytes=1e18)


def straight(rows, attention=1.0, product=1.0, read=0.0, fixed=0.0, top_k=1, experts=4):
    """Times that grow straight with rows."""
    return StageTimes(
        fixed + attention * np.arange(rows + 1.0),
        fixed + attention * np.arange(rows + 1.0),
        product * np.arange(rows * top_k + 1.0),
        read * np.arange(experts + 1.0),
        fixed,
    )


def tiny(devices=2, in_flight=12, times=None, overheads=NO_OVERHEADS, **more):
    times = times or straight(in_flight)
    return Deployment(TINY, devices, in_flight, times, FREE, overheads=overheads, **more)


def test_by_hand_where_stages_cost_the_same_by_row():
    """Twelve tokens, two layers, one worker of each kind, a second a row at either. A stage of n
    rows has n seconds: with no cost to a batch, both workers are always busy, and a token passes a
    layer in 12 s. Its way there is 2 n s in stages and 2 n s of waiting: n = 3."""
    found = forecast(tiny(), 1)
    assert (found.attention_devices, found.expert_devices) == (1, 1)
    assert found.itl_s == pytest.approx(24.0)
    assert found.tokens_per_s == pytest.approx(12 / 24)
    assert (found.whole_attention_s, found.whole_experts_s) == (12.0, 12.0)


def test_by_hand_where_the_way_decides():
    """A stage takes 1 s whatever it holds, a host 2 s and a message 3 + 0.5 s. A token's way is
    2 x (2 + 1 + 3.5) and a wait of 2 s at each worker: 17 s a layer. A host launches a stage in
    2 s, so that each has 12 x 2 / 17 rows: two, since rows are whole."""
    times = straight(12, attention=0.0, product=0.0, fixed=1.0)
    found = forecast(tiny(times=times, overheads=Overheads(2.0, 2.0, 3.0, 0.5)), 1)
    assert found.itl_s == pytest.approx(2 * 17.0)
    assert (found.attention_rows, found.expert_visits) == (2, 2)
    assert (found.attention_s, found.experts_s) == (1.0, 1.0)
    assert found.batches == pytest.approx(6.0)


def test_synchronous_by_hand():
    """Two devices of six rows each: attention 6 s; six visits each, or nine on the fuller one; and
    two collectives. Two layers."""
    collectives = 2 * asynchronous.COLLECTIVE_S
    even = synchronous_tokens_per_s(tiny())
    assert even == pytest.approx(12 / (2 * (6 + 6 + collectives)))
    uneven = tiny(imbalance=1.5, imbalance_with_copies=1.25)
    found = synchronous_tokens_per_s(uneven)
    assert found == pytest.approx(12 / (2 * (6 + 9 + collectives)))
    with_copies = synchronous_tokens_per_s(uneven, copies=True)
    assert with_copies == pytest.approx(12 / (2 * (6 + 7.5 + collectives)))
    # Copies that level nothing are not made, and so not read.
    reads = straight(12, read=100.0)
    one = tiny(times=reads)
    assert synchronous_tokens_per_s(one, copies=True) == synchronous_tokens_per_s(one)
    assert exchange_s(4.0, np.array([6.0]), 2, 0.5, 1.0) == pytest.approx(1 + 6 * 0.5 * 0.5)
    assert exchange_s(4.0, np.array([6.0]), 1, 0.5, 1.0) == 0


@pytest.mark.parametrize(("factor", "share"), [(1.0, 0.3), (10.0, 0.0), (4.0, 0.25), (2.0, 1.0)])
@pytest.mark.parametrize("fullest_s", [1.0, 1.5, 6.0])
def test_the_last_of_some_devices_is_the_mean_over_all_ways_to_be_late(factor, share, fullest_s):
    stage_s, mean_s = [fullest_s, 1.0, 1.0, 1.0], 0.0
    for late in itertools.product((False, True), repeat=4):
        chance = np.prod([share if each else 1 - share for each in late])
        mean_s += chance * max(
            s * (factor if each else 1) for s, each in zip(stage_s, late, strict=True)
        )
    assert Late(factor, share).last_s(fullest_s, 1.0, 4) == pytest.approx(mean_s)


def test_late_is_what_takes_three_times_the_median_of_its_kind():
    """Of stages of one kind; too few, or such as take no time on their clock, say nothing."""
    usual, late = [1.0] * 37 + [2.9], [3.0, 9.0]
    found = Late.measured([usual + late, [0.0] * 30, [7.0] * 19])
    assert (found.factor, found.share) == (6.0, 2 / 40)
    assert Late.measured([usual]) == Late()
    with pytest.raises(ValueError, match="no 20 stages of one kind"):
        Late.measured([[0.0] * 30, [7.0] * 19])


def test_late_stages_cost_workers_their_mean_and_a_mesh_its_last():
    """Stages of a second, a quarter of which takes five: 2 s on average. Two devices in step wait
    for the later one, 1 + 4 (1 - 0.75^2) = 2.75 s."""
    times, late = straight(12, attention=0.0, product=0.0, fixed=1.0), Late(5.0, 0.25)
    one = replace(tiny(times=times), late=late)
    slow = straight(12, attention=0.0, product=0.0, fixed=2.0)
    assert forecast(one, 1).tokens_per_s == forecast(tiny(times=slow), 1).tokens_per_s
    layer_s = 2 * 2.75 + 2 * asynchronous.COLLECTIVE_S
    assert synchronous_tokens_per_s(one) == pytest.approx(12 / (2 * layer_s))


def test_rows_between_workers_go_at_the_transports_rate_and_others_at_the_links():
    """Sixteen bytes a row at 8 B/s: twelve rows hold a link up for 24 s."""
    slow = tiny(overheads=replace(NO_OVERHEADS, bytes_per_s=8.0))
    assert forecast(slow, 1).itl_s / 2 >= 24
    assert synchronous_tokens_per_s(slow) == synchronous_tokens_per_s(tiny())


def test_messages_to_many_workers_hold_a_stage_up():
    """A stage of 4 rows to 3 experts' workers sends 3 x (1 - (2/3)^4) messages on average."""
    d = tiny(devices=4, in_flight=4, overheads=replace(NO_OVERHEADS, message_s=100.0))
    found = forecast(d, 1)
    assert found.itl_s / 2 >= 100 * 3 * (1 - (2 / 3) ** found.attention_rows)
    assert found.tokens_per_s < forecast(tiny(devices=4, in_flight=4), 1).tokens_per_s


deployments = st.builds(
    lambda devices, in_flight, host, uneven, attention, product, fixed: tiny(
        devices,
        in_flight,
        straight(in_flight, attention, product, 0.3, fixed),
        Overheads(host, host, 0.2, 0.01),
        imbalance=1 + (devices - 1) * uneven,
    ),
    st.integers(2, 6),
    st.integers(1, 200),
    st.floats(0, 3),
    st.floats(0, 1),
    st.floats(0.01, 2),
    st.floats(0.01, 2),
    st.floats(0.01, 5),
)


@pytest.mark.deep
@settings(max_examples=60)
@given(deployments, st.floats(0.0, 5.0))
def test_more_host_cost_never_makes_it_pay_more(one, extra):
    over = one.overheads
    slower = replace(
        over,
        attention_host_s=over.attention_host_s + extra,
        expert_host_s=over.expert_host_s + extra,
    )
    before, after = advise(one), advise(replace(one, overheads=slower))
    assert before.pays or not after.pays
    for fast, slow in zip(forecasts(one), forecasts(replace(one, overheads=slower)), strict=True):
        assert slow.tokens_per_s <= fast.tokens_per_s * (1 + 1e-9)


@pytest.mark.deep
@settings(max_examples=60)
@given(deployments)
def test_the_best_split_is_the_best_of_all_whose_stages_are_long_enough(one):
    found, every = advise(one), forecasts(one)
    assert [split.attention_devices for split in every] == list(range(1, one.num_devices))
    host_s = one.overheads.attention_host_s

    def long_enough(split):
        return min(split.whole_attention_s, split.whole_experts_s) >= 5 * host_s

    assert found.forecast in every
    if any(map(long_enough, every)):
        every = [split for split in every if long_enough(split)]
    else:
        assert not found.pays
    assert found.forecast.tokens_per_s == max(split.tokens_per_s for split in every)
    better = max(found.synchronous_tokens_per_s, found.copies_tokens_per_s)
    assert found.ratio == pytest.approx(found.forecast.tokens_per_s / better)
    assert found.pays == (long_enough(found.forecast) and found.ratio >= MARGIN)


@settings(max_examples=60)
@given(deployments)
def test_nobody_is_faster_than_all_workers_at_whole_batches(one):
    for split in forecasts(one):
        cycle_s = split.itl_s / TINY.num_layers
        assert cycle_s >= max(split.whole_attention_s, split.whole_experts_s) * (1 - 1e-9)
        assert split.tokens_per_s == pytest.approx(one.in_flight / split.itl_s)
        assert 1 <= split.attention_rows <= -(-one.in_flight // split.attention_devices)


@settings(max_examples=40)
@given(deployments, st.floats(0, 1))
def test_an_uneven_load_slows_the_synchronous_way_alone(one, share):
    uneven = 1 + share * (one.num_devices - 1)
    level, uneven = replace(one, imbalance=1.0), replace(one, imbalance=uneven)
    assert synchronous_tokens_per_s(uneven) <= synchronous_tokens_per_s(level) * (1 + 1e-9)
    assert advise(uneven).forecast == advise(level).forecast


def test_reasons():
    """Each rule in a sentence with its numbers, in the order of the rules."""
    of = partial(Deployment.of, MIXTRAL, 8, overheads=DESIGNED)
    big = of(32768)
    assert not advise(big).pays
    assert (
        advise(big).reason == "KV of 32,768 sequences fits on no split; most fit on 7 + 1: 25,803"
    )
    short = advise(of(512))
    assert not short.pays
    assert "too short for their hosts on every split that has room: on " in short.reason
    assert "less than 5 times the 0.10 ms that its host takes" in short.reason
    little = advise(of(4096, imbalance=1.7, imbalance_with_copies=1.3))
    assert not little.pays
    assert "times the 120,068 of synchronous with copies; 1.1 times are asked for" in little.reason
    # Copies are no help, and layers have different busy experts.
    one = of(8192, context=64.0, imbalance=2.0, imbalance_with_copies=2.0)
    uneven = replace(one, imbalance_over_layers=1.0)
    assert advise(uneven).pays
    assert advise(uneven).reason.endswith("of synchronous")
    built = advise(replace(uneven, overheads=Overheads()))
    assert not built.pays
    assert "less than 5 times the 1.30 ms" in built.reason
    many = replace(uneven, num_devices=24, overheads=NO_OVERHEADS)
    assert advise(many).ratio >= MARGIN
    assert not advise(many).pays
    assert f"beyond {MOST_DEVICES} devices batches fall into fragments" in advise(many).reason


def test_measured_times_take_the_place_of_the_roofline(tmp_path):
    points = {"seconds": [1.0, 2.0]}
    file = tmp_path / "times.json"
    rows = points | {"rows": [1, 64]}
    file.write_text(
        json.dumps(
            {"fixed_s": 0.5, "attention": rows, "first": rows}
            | {"experts": points | {"visits": [1, 128]}, "reads": points | {"experts": [1, 8]}}
        )
    )
    found = advise(Deployment.of(MIXTRAL, 2, 64, stage_times=file))
    whole_s = found.forecast.whole_attention_s, found.forecast.whole_experts_s
    assert whole_s == (2.0, 2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_devices": 1}, "num_devices is 1; it must be 2 or more"),
        ({"in_flight": 0}, "in_flight is 0; it must be 1 or more"),
        ({"context": 0.0}, "context is 0.0; it must be above 0"),
        ({"imbalance": 0.5}, "imbalance is 0.5; it must be between 1 and the number of devices"),
        ({"imbalance_with_copies": 9.0}, "imbalance_with_copies is 9.0"),
        ({"overheads": Overheads(message_s=-1.0)}, "message_s is -1.0; it must be 0 or more"),
        ({"overheads": Overheads(bytes_per_s=0.0)}, "bytes_per_s is 0.0; it must be above 0"),
        ({"late": Late(0.5, 0.1)}, "late is .0.5, 0.1.; it must be a factor of 1 or more and a sh"),
        ({"late": Late(2.0, 1.5)}, "late is .2.0, 1.5.; it must be a factor of 1 or more and a sh"),
    ],
)
def test_wrong_numbers_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(tiny(), **changes)


def test_a_split_leaves_a_device_for_both():
    for ours in (0, 2):
        with pytest.raises(ValueError, match=f"attention_devices is {ours}; it must be between 1"):
            forecast(tiny(), ours)


@pytest.mark.deep
def test_figures_are_those_of_the_forecast_and_of_the_simulator():
    """Of every case on one node; larger ones take seconds."""
    simulated = {tuple(row[k] for k in SAME): row for row in SIMULATED["eight"] + SIMULATED["more"]}
    assert len(FORECAST["cases"]) == len(simulated)
    for row in FORECAST["cases"]:
        case = simulated[tuple(row[key] for key in SAME)]
        if row["devices"] > 8:
            assert row["simulated"]["async"] == case["systems"]["async"]["tokens_per_s"]
            continue
        again = compare(case, row["imbalances"])
        assert again["best_attention_devices"] == row["best_attention_devices"]
        for way, rate in again["forecast"].items():
            assert rate == pytest.approx(row["forecast"][way], rel=1e-4)
        assert again["ratio"] == pytest.approx(row["ratio"], rel=1e-4)
        assert again["simulated"] == row["simulated"]


@pytest.mark.deep
def test_the_advice_is_no_in_every_simulated_case():
    for row in FORECAST["cases"]:
        if row["devices"] <= MOST_DEVICES:
            case = case_of(row)
            sizes = case.geometry(), case.devices, case.in_flight, case.times()
            one = Deployment(*sizes, **row["imbalances"])
            assert not advise(one).pays


def test_the_page_has_the_table_of_the_regime():
    assert "\n".join(by_transport(SIMULATED["late"])) in PAGE


def test_the_page_says_how_far_forecasts_are_off():
    rows = [line.split("|")[1:-1] for line in accuracy(FORECAST["cases"])[2:]]
    few, many, beyond = (row[5].split()[0] for row in rows)
    same, cases = np.sum([[*map(int, row[6].split(" of "))] for row in rows[:2]], axis=0)
    said = " ".join(PAGE.split())
    assert f"{few} on average to 2,048 in flight and {many} from 8,192, on the same side" in said
    assert f"of 1.1 in {same} of {cases} cases; beyond 16 devices, by {beyond}." in said
    off = [row["forecast"]["async"] / row["simulated"]["async"] for row in FORECAST["late"]]
    assert f"that of asynchrony is up to {max(off):.1f} times too high" in said
