"""What must hold, the figure seen, and whether it holds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness.store import markdown
from benchmarks.hostile.probes import Samples, between, latencies

MOST_HEALTH_S, MOST_HEALTH_RATIO, MOST_CALM_RATIO = 0.1, 3.0, 5.0
MOST_GAP_RATIO, MOST_COMPANY_RATIO = 3.0, 1.5
MOST_BATCH_RATIO = 30.0
"""Of a full batch's step time to that of one row."""
MOST_GROWTH, MOST_PEAK = 1.05, 1.3

Spans = dict[str, list[tuple[float, float]]]
"""When the server was "idle", under hostile "load" and under "polite" load."""


@dataclass(frozen=True)
class Line:
    """One thing that must hold. `ok` is None where it could not be measured.

    `by_machine` marks times and memory: a busy machine or a short run can fail them though the
    server does nothing wrong.
    """

    name: str
    must: str
    seen: str
    ok: bool | None
    by_machine: bool = False


def must_be(name: str, wanted: object, seen: object) -> Line:
    """Returns the line of something that has one right value."""
    return Line(name, f"{wanted}", f"{seen}", wanted == seen)


def at_most(
    name: str,
    value: float | None,
    base: float | None,
    of: str,
    most: float,
    unit: Callable[[float], str],
) -> Line:
    """Returns the line of a ratio that the machine has a share in."""
    must = f"at most {most:g} x {of}"
    if not value or not base:
        return Line(name, must, "not measured", None, by_machine=True)
    seen = f"{unit(value)}, {value / base:.3f} x {unit(base)}"
    return Line(name, must, seen, value / base <= most, by_machine=True)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


def probed(
    measured: Mapping[str, tuple[Samples, list[str]]],
    marks: Spans,
    ended_at: list[float],
) -> tuple[list[Line], dict[str, Any]]:
    """Returns what must hold beside the load, and the figures.

    The server does not grow or burst; a health check is answered, and a polite stream goes on,
    about as beside as many polite clients. What is slow beside those as well is found by what an
    idle server, and most of the stream's gaps, take. So a slow machine fails none of it; but for an
    idle server's checks, of which half are answered at once on any. Where polite parts differ, the
    machine was busy with something else: the load may do as the worst does, and of what depends on
    no other time the calmest counts.
    """
    stalled, (checks, failed) = measured["stalls"][0], measured["health"]
    memory = _memory(measured["memory"][0], marks, ended_at)
    health, gaps = (
        {name: latencies(_within(samples, spans), stalled) for name, spans in marks.items()}
        for samples in (checks, measured["stream"][0])
    )
    checks_of, gaps_of = (
        [latencies(between(samples, *span), stalled) for span in marks["polite"]]
        for samples in (checks, measured["stream"][0])
    )
    idle_s = health["idle"].get("p50_s")
    size = {name.removesuffix("_bytes"): found for name, found in memory.items()}
    calm_check, calm_gap = _calmest(checks_of), _calmest(gaps_of)
    # Of health checks, and of the polite stream's gaps.
    idle, polite, load = ((health[name].get, gaps[name].get) for name in ("idle", "polite", "load"))
    worst_check_s, worst_gap_s = _worst(checks_of, "p999_s"), _worst(gaps_of, "p99_s")
    check, gap = "health check beside polite clients, P99", "gap beside polite clients"
    times = (
        ("health check under load, P99.9", load[0]("p999_s"), MOST_HEALTH_RATIO, worst_check_s),
        ("longest gap of a polite stream", load[1]("max_s"), MOST_GAP_RATIO, polite[1]("max_s")),
        ("P99 gap of a polite stream", load[1]("p99_s"), MOST_COMPANY_RATIO, worst_gap_s),
        (check, calm_check("p99_s"), MOST_CALM_RATIO, idle[0]("p99_s")),
        (f"longest {gap}", polite[1]("max_s"), MOST_GAP_RATIO, polite[1]("p99_s")),
        (f"P99 {gap}", calm_gap("p99_s"), MOST_CALM_RATIO, calm_gap("p50_s")),
        (f"median {gap}", polite[1]("p50_s"), MOST_BATCH_RATIO, idle[1]("p50_s")),
    )
    beside = ("polite load",) * 3 + ("idle", "its P99", "its median", "idle")
    seen = "not measured" if idle_s is None else _ms(idle_s)
    is_prompt = None if idle_s is None else idle_s <= MOST_HEALTH_S
    must = f"at most {_ms(MOST_HEALTH_S)}"
    lines = [
        *(
            at_most(f"resident memory, {name}", size.get(value), size.get(base), base, most, _mib)
            for name, value, base, most in (
                ("last requests", "last", "first", MOST_GROWTH),
                ("peak", "peak", "idle", MOST_PEAK),
            )
        ),
        Line("health check of an idle server, median", must, seen, is_prompt, by_machine=True),
        must_be("health checks that failed", 0, len(failed)),
        *(
            at_most(name, value, base, of, most, _ms)
            for (name, value, most, base), of in zip(times, beside, strict=True)
        ),
    ]
    during = _within(stalled, marks["load"])
    return lines, {
        "load_s": sum(end - begin for begin, end in marks["load"]),
        "memory": memory,
        "health": health | {"failures": failed[:20]},
        "stream": gaps | {"failures": measured["stream"][1][:20]},
        "polite_parts": {"health": checks_of, "stream": gaps_of},
        "machine_stalls": {"count": len(during), "total_s": sum(b - a for a, b in during)},
    }


def _worst(parts: list[dict[str, Any]], key: str) -> float | None:
    return max((found[key] for found in parts if key in found), default=None)


def _calmest(parts: list[dict[str, Any]]) -> Callable[[str], float | None]:
    """Returns the figures of the part whose P99 is nearest to its median."""
    known = [found for found in parts if found.get("p50_s")]
    return min(known, key=lambda found: found["p99_s"] / found["p50_s"], default={}).get


def _within(samples: Samples, spans: list[tuple[float, float]]) -> Samples:
    """Returns the samples that began in one of these times."""
    return [sample for span in spans for sample in between(samples, *span)]


def _memory(samples: Samples, marks: Spans, ended_at: list[float]) -> dict[str, Any]:
    """Returns the server's resident bytes: idle, as first and last requests ended, and peak."""
    part = max(1, min(1000, len(ended_at) // 5))
    spans = {"idle": marks["idle"]}
    if ended_at:
        spans["first"] = [(marks["load"][0][0], ended_at[part - 1])]
        spans["last"] = [(ended_at[-part], marks["load"][-1][1])]
    sizes = {name: [size for _, size in _within(samples, each)] for name, each in spans.items()}
    found = {f"{name}_bytes": median(values) for name, values in sizes.items() if values}
    if under_load := [size for _, size in _within(samples, marks["load"])]:
        found["peak_bytes"] = max(under_load)
        # A server that has just started still holds what compiling took.
        found["idle_bytes"] = min(found.get("idle_bytes", math.inf), *under_load)
    return {"requests_in_first_and_last": part, "samples": len(samples), **found}


def table(lines: list[Line]) -> list[str]:
    """Returns a table of the lines."""
    verdicts = {True: "ok", False: "FAILED", None: "not measured"}
    rows = [[line.name, line.must, line.seen, verdicts[line.ok]] for line in lines]
    return markdown(["what", "must be", "seen", ""], rows)
