"""The paper's figures 11 to 13: a burst of 250 s without brownout, and under each controller.

Objectives and capacity are calibrated as the demo does it (`serving.bench.calibrate`); every
leg is a case of its own, so that they can be played in several calls. The SLOs of all are those
of the stored calibration.
"""

from dataclasses import asdict
from typing import Any

from benchmarks.gpu.live import ENGINE, Live, between, on_a_server, requests
from benchmarks.gpu.part import Case, Context
from benchmarks.gpu.sizes import Mix, Sizes
from serving.bench.calibrate import calibrate
from serving.bench.demo import run_result, wait_idle
from serving.bench.loadgen import play
from serving.bench.results import Slo
from serving.bench.variants import VARIANTS, use_variant
from serving.bench.workload import burst_pieces, piecewise_poisson_times, schedule

DEPENDS = ENGINE
START_S = 150.0
DRAIN_S = 12.0  # after the last arrival; what is not answered by then has failed
STEADY_LOAD, BURST_LOAD, BURST_AT = 0.55, 1.1, 0.3
"""Shares of the capacity without brownout, and of the time before the burst."""
TARGET = 0.05  # late tokens, each phase, in the burst
LEGS = ("predictive", "zero", "algorithm2")


def cases(sizes: Sizes) -> list[Case]:
    """Returns each mix's calibration and then its legs, those with brownout first."""
    leg_s = sizes.burst_s + DRAIN_S + 5
    found = []
    for mix in sizes.mixes:
        about = {"mix": mix._asdict()}
        found.append(Case(f"calibration/{mix.name}", 6 * sizes.calibration_s + 25, about))
        found += [Case(f"{leg}/{mix.name}", leg_s, {**about, "leg": leg}) for leg in LEGS]
    return found


async def _calibration(context: Context, server: Live, case: Case) -> dict[str, Any]:
    """Measures unloaded and full-batch latencies and the capacity as the demo does."""
    sizes, mix = context.sizes, Mix(**case.about["mix"])
    found = await calibrate(server.client, requests(sizes, mix, 2048), window_s=sizes.calibration_s)
    return {
        "calibration": asdict(found),
        "slo": asdict(found.slo),
        "figures": {
            "ttft_slo_ms": 1e3 * found.slo.ttft_s,
            "itl_slo_ms": 1e3 * found.slo.itl_s,
            "capacity_per_s": found.zero.capacity_per_s,
            "itl_p90_full_over_zero": found.full.itl_p90_s / found.zero.itl_p90_s,
        },
    }


async def _leg(context: Context, server: Live, case: Case) -> dict[str, Any]:
    """Plays one leg of the burst; all legs have the same arrivals."""
    sizes, mix = context.sizes, Mix(**case.about["mix"])
    calibration = context.needed("burst", f"calibration/{mix.name}")
    slo, capacity = Slo(**calibration["slo"]), calibration["figures"]["capacity_per_s"]
    steady, burst = STEADY_LOAD * capacity, BURST_LOAD * capacity
    pieces = burst_pieces(sizes.burst_s, steady, burst, BURST_AT)
    times = piecewise_poisson_times(pieces, sizes.seed)
    arrivals = schedule(requests(sizes, mix, min(len(times), 8192)), times)
    await wait_idle(server.client, 0.5)
    variant, own = VARIANTS[case.about["leg"]], await server.client.get_brownout()
    state = await use_variant(server.client, variant, own, "partial", slo)
    before = await server.probe()
    run = await play(server.client, arrivals, time_limit_s=sizes.burst_s + DRAIN_S)
    burst_at_s = sizes.burst_s * BURST_AT
    result = run_result(run, slo, burst_at_s, sizes.burst_s)
    rates = {m: result["burst"][f"{m}_violation_rate"] for m in ("ttft", "itl")}
    return {
        "duration_s": sizes.burst_s,
        "burst_at_s": burst_at_s,
        "steady_rate_per_s": steady,
        "burst_rate_per_s": burst,
        "slo": {**asdict(slo), "warning_factor": state.warning_factor},
        "run": result,
        "server_steps": between(before, await server.probe()),
        "figures": {
            "ttft_slo_ms": 1e3 * slo.ttft_s,
            "itl_slo_ms": 1e3 * slo.itl_s,
            **{f"burst_{m}_violation_rate": rate for m, rate in rates.items()},
            **{
                f"steady_{m}_violation_rate": result["steady"][f"{m}_violation_rate"] for m in rates
            },
            **{
                f"burst_{phase}_threshold_percent": mean
                for phase, mean in result["burst"]["mean_thresholds_percent"].items()
            },
            "output_tokens_s": result["output_throughput"],
            "degraded_share": result["degraded_share"],
        },
        "target": {
            "violation_rate": TARGET,
            "met": all(rate is not None and rate <= TARGET for rate in rates.values()),
        }
        if variant.with_brownout
        else None,
    }


session = on_a_server("burst", lambda case: _leg if "leg" in case.about else _calibration)
