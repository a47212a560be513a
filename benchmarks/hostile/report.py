"""What must hold, the figure seen, and whether it holds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.harness.store import markdown
from benchmarks.hostile.probes import Samples, between, latencies

HEALTH_P999_S, MOST_GAP_RATIO, MOST_COMPANY_RATIO = 0.1, 3.0, 1.5
MOST_GROWTH, MOST_PEAK = 1.05, 1.3


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
    marks: dict[str, tuple[float, float]],
    ended_at: list[float],
) -> tuple[list[Line], dict[str, Any]]:
    """Returns what must hold beside the load, and the figures.

    The server does not grow or burst, a health check is answered at once, and a polite stream goes
    on, about as it does beside as many polite clients. `marks` tells when the server was "idle",
    under hostile "load" and under "polite" load. The longest gap of an idle server may be one of
    the machine's; P99 is not.
    """
    stalled, (checks, failed) = measured["stalls"][0], measured["health"]
    memory = _memory(measured["memory"][0], marks, ended_at)
    health, gaps = (
        {name: latencies(between(samples, *span), stalled) for name, span in marks.items()}
        for samples in (checks, measured["stream"][0])
    )
    worst = health["load"].get("p999_s")
    size = {name.removesuffix("_bytes"): found for name, found in memory.items()}
    gap = {name: found.get for name, found in gaps.items()}
    lines = [
        *(
            at_most(f"resident memory, {name}", size.get(value), size.get(base), base, most, _mib)
            for name, value, base, most in (
                ("last requests", "last", "first", MOST_GROWTH),
                ("peak", "peak", "idle", MOST_PEAK),
            )
        ),
        Line(
            *("health check under load, P99.9", f"at most {_ms(HEALTH_P999_S)}"),
            *(("not measured", None) if worst is None else (_ms(worst), worst <= HEALTH_P999_S)),
            by_machine=True,
        ),
        must_be("health checks that failed", 0, len(failed)),
        *(
            at_most(
                f"{name} gap of a polite stream", gap["load"](key), gap[base](key), of, most, _ms
            )
            for name, key, base, of, most in (
                ("longest", "max_s", "idle", "idle", MOST_GAP_RATIO),
                ("P99", "p99_s", "polite", "polite load", MOST_COMPANY_RATIO),
            )
        ),
    ]
    during = between(stalled, *marks["load"])
    return lines, {
        "load_s": marks["load"][1] - marks["load"][0],
        "memory": memory,
        "health": health | {"failures": failed[:20]},
        "stream": gaps | {"failures": measured["stream"][1][:20]},
        "machine_stalls": {"count": len(during), "total_s": sum(b - a for a, b in during)},
    }


def _memory(
    samples: Samples, marks: dict[str, tuple[float, float]], ended_at: list[float]
) -> dict[str, Any]:
    """Returns the server's resident bytes: idle, as first and last requests ended, and peak."""
    part = max(1, min(1000, len(ended_at) // 5))
    spans = {"idle": marks["idle"]}
    if ended_at:
        spans["first"] = (marks["load"][0], ended_at[part - 1])
        spans["last"] = (ended_at[-part], marks["load"][1])
    sizes = {name: [size for _, size in between(samples, *span)] for name, span in spans.items()}
    found = {f"{name}_bytes": median(values) for name, values in sizes.items() if values}
    if under_load := [size for _, size in between(samples, *marks["load"])]:
        found["peak_bytes"] = max(under_load)
        # A server that has just started still holds what compiling took.
        found["idle_bytes"] = min(found.get("idle_bytes", math.inf), *under_load)
    return {"requests_in_first_and_last": part, "samples": len(samples), **found}


def table(lines: list[Line]) -> list[str]:
    """Returns a table of the lines."""
    verdicts = {True: "ok", False: "FAILED", None: "not measured"}
    rows = [[line.name, line.must, line.seen, verdicts[line.ok]] for line in lines]
    return markdown(["what", "must be", "seen", ""], rows)
