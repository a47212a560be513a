"""Two classes of requests: what best effort costs the latency-sensitive, by policy.

A fifth of the requests is latency-sensitive and arrivals are Poisson, as `jmoe bench priority` has
it. Each load is played three times with the same arrivals: its latency-sensitive requests alone,
and both classes under the default policy and under `fcfs`, the baseline. There is no brownout. The
preemption latency is the time from when a latency-sensitive request has its slot and pages until
the device begins with it: what is left of the step, or of the part of a step, that it interrupts.
"""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.gpu.live import ENGINE, Live, between, live
from benchmarks.gpu.part import Case, Context, RunCase
from benchmarks.gpu.serve_part import arriving, capacity, played, window
from benchmarks.gpu.sizes import ZERO, Mix, Sizes
from serving.bench.priority import PriorityConfig
from serving.bench.results import Run
from serving.bench.workload import two_classes
from serving.config import EngineConfig

DEPENDS = (*ENGINE, "benchmarks/gpu/serve_part.py")
START_S = 180.0  # programs for parts of steps are compiled as well
RESTART_S = 60.0  # another policy is another server, which finds its programs compiled
TARGET = 1.5  # P99 TTFT of the latency-sensitive beside best effort, over theirs alone
LS_SHARE = PriorityConfig.ls_share
POLICY, BASELINE = EngineConfig.policy, "fcfs"
PERCENTILES = (50, 99)


def cases(sizes: Sizes) -> list[Case]:
    """Returns the capacity case, then all cases of the default policy's server, then the
    baseline's.
    """
    mix = sizes.mixes[0]
    about = {"mix": mix._asdict(), "policy": POLICY}
    point_s = 2 * sizes.ramp_s + sizes.priority_window_s + 5
    found = [Case("capacity", sizes.capacity_s + 15, about)]
    for name, policy in (("alone", POLICY), (POLICY, POLICY), (BASELINE, BASELINE)):
        for load in sizes.priority_loads:
            own = {**about, "policy": policy, "load": load, "ls_only": name == "alone"}
            estimate_s = point_s + (RESTART_S if policy == BASELINE else 0.0)
            found.append(Case(f"{name}/load{load:g}", estimate_s, own))
    return found


@contextmanager
def session(context: Context) -> Iterator[RunCase]:
    """Yields what runs a case; neighbouring cases of one policy share a server."""
    with contextlib.ExitStack() as stack:
        serving: list[tuple[str, Live]] = []

        def run(case: Case) -> dict[str, Any]:
            policy = case.about["policy"]
            if not serving or serving[0][0] != policy:
                serving.clear()
                stack.close()  # two servers would not fit the device's memory
                more = {"engine.policy": policy}
                server = stack.enter_context(live(context, f"priority-{policy}", more=more))
                serving.append((policy, server))
            measure = capacity if case.name == "capacity" else _point
            server = serving[0][1]
            found = server.run(measure(context, server, case))
            # Of this server: a record has those of the one before, if it was begun with that.
            return {**found, "server": context.facts["server"], "startup": server.started}

        yield run


async def _point(context: Context, server: Live, case: Case) -> dict[str, Any]:
    """Plays one load under one policy. Arrivals go on after the window, so that its last requests
    have company, and time to be answered.
    """
    sizes, mix, load = context.sizes, Mix(**case.about["mix"]), case.about["load"]
    rate = load * context.needed("priority", "capacity")["figures"]["requests_s"]
    window_s = sizes.ramp_s, sizes.ramp_s + sizes.priority_window_s
    duration_s = window_s[1] + sizes.ramp_s
    await server.use(ZERO)
    arrivals = arriving(sizes, mix, rate, duration_s)
    arrivals = two_classes(arrivals, 1 - LS_SHARE, sizes.seed)
    if case.about["ls_only"]:
        arrivals = [one for one in arrivals if not one.best_effort]

    run, ((before, stats), (after, later)), of_run = await played(
        server, arrivals, duration_s, *window_s
    )
    ls, best_effort = (window(_of_class(run, best_effort=own), *window_s) for own in (False, True))
    waits_ms = 1e3 * np.array(after["ls_waits_s"][len(before["ls_waits_s"]) :])
    if not ls["requests_due"] or not waits_ms.size:
        raise RuntimeError("no latency-sensitive request was due, and begun, in the window")
    figures = {
        "rate_s": rate,
        "ls_requests": ls["requests_due"],
        **{f"ls_ttft_p{p}_ms": ls[f"ttft_p{p}_ms"] for p in PERCENTILES},
        "ls_tokens_s": ls["output_tokens_s"],
        "be_tokens_s": best_effort["output_tokens_s"],
        **{f"preemption_p{p}_ms": float(np.percentile(waits_ms, p)) for p in PERCENTILES},
        **{
            key: getattr(later, key) - getattr(stats, key)
            for key in ("parks", "joins", "evictions")
        },
    }
    record = {
        "figures": figures,
        "classes": {"ls": ls, "best_effort": best_effort},
        "server_steps": between(before, after),
        **of_run,
    }
    return record if case.about["ls_only"] else _beside_alone(context, case, record)


def _of_class(run: Run, *, best_effort: bool) -> Run:
    return replace(run, records=[r for r in run.records if r.best_effort == best_effort])


def _beside_alone(context: Context, case: Case, record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record with its ratio to the same requests without best effort; a policy's own
    has a target, the baseline's none.
    """
    alone = context.needed("priority", f"alone/load{case.about['load']:g}")
    key = "ls_ttft_p99_ms"
    ratio = record["figures"][key] / alone["figures"][key]
    due = case.about["policy"] == POLICY
    return {
        **record,
        "figures": {**record["figures"], "ttft_p99_to_alone": ratio},
        "target": {"ttft_p99_to_alone": TARGET, "met": ratio <= TARGET} if due else None,
    }
