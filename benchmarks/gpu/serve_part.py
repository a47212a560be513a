"""The paper's figures 8 and 9: throughput over request rate, by brownout setting and length mix.

The real server in one process, the open-loop load generator in this one. Rates are shares of the
capacity without brownout, which the first cases measure; every point has a ramp and a window, and
what came in the window counts. Settings are switched while the server runs.
"""

import asyncio
import itertools
from typing import Any

import numpy as np

from benchmarks.gpu.live import ENGINE, Live, between, on_a_server, requests
from benchmarks.gpu.part import Case, Context
from benchmarks.gpu.sizes import SETTINGS, ZERO, Mix, Setting, Sizes
from serving.bench.calibrate import full_batch
from serving.bench.loadgen import play, saturate
from serving.bench.results import Run
from serving.bench.workload import Arrival, poisson_times, schedule

DEPENDS = ENGINE
START_S = 150.0  # cold; a third of it with compiled programs at hand
PERCENTILES = (50, 90, 99)


def cases(sizes: Sizes) -> list[Case]:
    """Returns capacities, points from the highest load down, and offline runs."""
    point_s = sizes.ramp_s + sizes.window_s + 4
    found = [
        Case(f"capacity/{m.name}", sizes.capacity_s + 15, _about(m, ZERO)) for m in sizes.mixes
    ]
    found += [
        Case(
            f"point/{mix.name}/{setting.name}/load{load:g}",
            point_s,
            {**_about(mix, setting), "load": load},
        )
        for load in sizes.loads
        for mix in sizes.mixes
        for setting in SETTINGS
    ]
    found += [
        Case(f"offline/{mix.name}/{setting.name}", 30.0, _about(mix, setting))
        for mix in sizes.mixes
        for setting in (ZERO, SETTINGS[-1])
    ]
    return found


def _about(mix: Mix, setting: Setting) -> dict[str, Any]:
    return {"mix": mix._asdict(), "setting": setting.name, **setting._asdict()}


def _mix(case: Case) -> Mix:
    return Mix(**case.about["mix"])


def _setting(case: Case) -> Setting:
    return Setting(case.about["way"], case.about["threshold_percent"])


async def capacity(context: Context, server: Live, case: Case) -> dict[str, Any]:
    """Measures requests and tokens a second of a full batch without brownout."""
    sizes = context.sizes
    await server.use(ZERO)
    samples = itertools.cycle(requests(sizes, _mix(case), 2048))
    before = await server.probe()
    run = await saturate(
        server.client, samples, concurrency=sizes.batch, duration_s=sizes.capacity_s
    )
    seen = between(before, await server.probe())
    batch = full_batch(run, 0.3 * sizes.capacity_s, sizes.capacity_s)
    tokens_s = window(run, 0.3 * sizes.capacity_s, sizes.capacity_s)["output_tokens_s"]
    return {
        "figures": {
            "requests_s": batch.capacity_per_s,
            "output_tokens_s": tokens_s,
            "itl_p90_ms": 1e3 * batch.itl_p90_s,
        },
        "server_steps": seen,
    }


async def _point(context: Context, server: Live, case: Case) -> dict[str, Any]:
    """Plays one rate under one setting."""
    sizes, mix = context.sizes, _mix(case)
    full = context.needed("serve", f"capacity/{mix.name}")
    rate = case.about["load"] * full["figures"]["requests_s"]
    duration_s = sizes.ramp_s + sizes.window_s
    await server.use(_setting(case))
    arrivals = arriving(sizes, mix, rate, duration_s)
    span_s = sizes.ramp_s, duration_s - 0.1
    run, ((before, _), (after, _)), of_run = await played(server, arrivals, duration_s, *span_s)
    steps = between(before, after)
    return {
        "figures": {
            "rate_s": rate,
            **window(run, sizes.ramp_s, duration_s),
            "active_experts": steps["decode"]["active_experts"],
            "host_idle_share": steps["host_idle_share"],
            "compilations_since_ready": steps["compilations_since_ready"],
        },
        "server_steps": steps,
        **of_run,
    }


async def played(
    server: Live, arrivals: list[Arrival], duration_s: float, start_s: float, end_s: float
) -> tuple[Run, list[tuple[dict[str, Any], Any]], dict[str, float]]:
    """Plays arrivals; returns the run, counters and statistics of the server at the start and end
    of a window, and whether the client kept up.
    """

    async def seen_at(at_s: float) -> tuple[dict[str, Any], Any]:
        await asyncio.sleep(at_s)
        return await server.probe(), await server.client.stats()

    async with asyncio.TaskGroup() as group:
        seen = [group.create_task(seen_at(at_s)) for at_s in (start_s, end_s)]
        playing = group.create_task(play(server.client, arrivals, time_limit_s=duration_s))
    run = playing.result()
    of_run = {
        "latest_send_ms": 1e3 * max((r.sent_s - r.at_s for r in run.records), default=0.0),
        "client_cpu_share": run.client_cpu_s / run.duration_s,
    }
    return run, [task.result() for task in seen], of_run


async def _offline(context: Context, server: Live, case: Case) -> dict[str, Any]:
    """Plays all requests at once, a batch in flight at most, as the `transformers` part does."""
    sizes, mix = context.sizes, _mix(case)
    samples = requests(sizes, mix, sizes.transformers_requests)
    await server.use(_setting(case))
    run = await play(server.client, samples, time_limit_s=300, max_concurrency=sizes.batch)
    failed = [r for r in run.records if not r.ok]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0].code} {failed[0].error}")
    tokens = sum(len(r.token_s) for r in run.records)
    return {
        "figures": {
            "requests": len(samples),
            "output_tokens": tokens,
            "duration_s": run.duration_s,
            "output_tokens_s": tokens / run.duration_s,
        }
    }


def arriving(sizes: Sizes, mix: Mix, rate_s: float, duration_s: float) -> list[Arrival]:
    """Returns requests that arrive by Poisson's law for `duration_s`, the same ones every time."""
    times = poisson_times(int(rate_s * duration_s * 1.2) + 20, rate_s, sizes.seed)
    times = [at for at in times if at < duration_s]
    return schedule(requests(sizes, mix, len(times)), times)


def window(run: Run, start_s: float, end_s: float) -> dict[str, Any]:
    """Returns figures of [start_s, end_s): tokens a second, and latencies of what was due or came
    then.

    A request that had no first token when the run ended counts in `unanswered`, and its waiting
    time so far as its time to first token: above capacity, leaving it out would flatter.
    """
    tokens = [at for r in run.records for at in r.token_s if start_s <= at < end_s]
    due = [r for r in run.records if start_s <= r.at_s < end_s]
    ttft_ms = [1e3 * ((r.token_s[0] if r.token_s else end_s) - r.at_s) for r in due]
    gaps_ms = [
        1e3 * gap
        for r in run.records
        for at, gap in zip(r.token_s[1:], r.itls_s, strict=True)
        if start_s <= at < end_s
    ]
    done = [r for r in run.records if r.ok and start_s <= r.end_s < end_s]
    tpot_ms = [1e3 * r.tpot_s for r in done if r.tpot_s is not None]
    visits = sum(r.expert_visits for r in run.records)
    degraded = sum(r.degraded_visits for r in run.records)
    found: dict[str, Any] = {
        "output_tokens_s": len(tokens) / (end_s - start_s),
        "requests_done_s": len(done) / (end_s - start_s),
        "requests_due": len(due),
        "unanswered": sum(not r.token_s for r in due),
        "degraded_share": degraded / visits if visits else None,
    }
    for name, values in (("ttft", ttft_ms), ("itl", gaps_ms), ("tpot", tpot_ms)):
        for percent in PERCENTILES:
            key = f"{name}_p{percent}_ms"
            found[key] = float(np.percentile(values, percent)) if values else None
    return found


KINDS = {"capacity": capacity, "point": _point, "offline": _offline}
session = on_a_server("serve", lambda case: KINDS[case.name.partition("/")[0]])
