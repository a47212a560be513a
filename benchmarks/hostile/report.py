"""What must hold, the figure seen, and whether it holds."""

import importlib.metadata
import math
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hostile.attempts import GROUPS
from benchmarks.hostile.fuzz import BAD_CODES, FuzzResult
from benchmarks.hostile.load import HUNG, LoadResult
from benchmarks.hostile.probes import Samples, apart, between, percentile
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.telemetry.version import jmoe_version

HEALTH_P999_S, MOST_GAP_RATIO = 0.1, 3.0
MOST_GROWTH, MOST_PEAK = 1.05, 1.3
MOST_COMPANY_RATIO = 1.5


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


@dataclass(frozen=True)
class Marks:
    """When the server was idle, under hostile and under polite load, on the monotonic clock."""

    idle: tuple[float, float]
    load: tuple[float, float]
    polite: tuple[float, float]


def load_lines(load: LoadResult, num_requests: int) -> list[Line]:
    """Everyone is answered, and rightly."""
    ended, hung = len(load.ended_at), load.count(HUNG)
    unknown, internal = load.count("UNKNOWN"), load.count("INTERNAL")
    return [
        Line(
            "requests that ended",
            f"{num_requests}",
            f"{ended - hung}",
            ended - hung == num_requests,
        ),
        Line("UNKNOWN or INTERNAL", "0", f"{unknown + internal}", not unknown + internal),
        Line("codes not allowed", "0", f"{load.num_wrong_codes}", not load.num_wrong_codes),
        Line("broken streams", "0", f"{load.num_broken_streams}", not load.num_broken_streams),
    ]


def stats_lines(when: str, stats: pb.Stats | None) -> list[Line]:
    """Nothing is left behind. `stats` is None where the server did not say."""
    if stats is None:
        return [Line(f"stats after {when}", "an answer", "none", False)]
    left = stats.num_running + stats.num_waiting
    pages, compiled = stats.kv_pages_used, stats.compilations_since_ready
    return [
        Line(f"requests left after {when}", "0", f"{left}", left == 0),
        Line(f"KV pages used after {when}", "0", f"{pages}", pages == 0),
        Line(f"compilations by the end of {when}", "0", f"{compiled}", compiled == 0),
    ]


def memory_figures(samples: Samples, marks: Marks, ended_at: list[float]) -> dict[str, Any]:
    """Returns the resident bytes of the server: idle, while the first and the last requests ended,
    peak.
    """
    part = max(1, min(1000, len(ended_at) // 5))
    spans = {"idle": marks.idle}
    if ended_at:
        spans["first"] = (marks.load[0], ended_at[part - 1])
        spans["last"] = (ended_at[-part], marks.load[1])
    sizes = {name: [size for _, size in between(samples, *span)] for name, span in spans.items()}
    figures = {f"{name}_bytes": median(found) for name, found in sizes.items() if found}
    under_load = [size for _, size in between(samples, *marks.load)]
    if under_load:
        figures |= {"peak_bytes": max(under_load), "lowest_bytes": min(under_load)}
        # A server that has just started still holds what compiling took.
        figures["idle_bytes"] = min(figures.get("idle_bytes", math.inf), figures["lowest_bytes"])
    return {"requests_in_first_and_last": part, "samples": len(samples), **figures}


def memory_lines(found: dict[str, Any]) -> list[Line]:
    """The server does not grow, and does not burst."""

    def line(name: str, value: str, base: str, most: float) -> Line:
        must = f"at most {most:g} x {base}"
        if not (found.get(f"{value}_bytes") and found.get(f"{base}_bytes")):
            return Line(name, must, "not measured", None, by_machine=True)
        ratio = found[f"{value}_bytes"] / found[f"{base}_bytes"]
        seen = f"{found[f'{value}_bytes'] / 2**20:.0f} MiB, {ratio:.3f} x"
        return Line(name, must, seen, ratio <= most, by_machine=True)

    return [
        line("resident memory, last requests", "last", "first", MOST_GROWTH),
        line("resident memory, peak", "peak", "idle", MOST_PEAK),
    ]


def latency_figures(samples: Samples, stalled: Samples) -> dict[str, Any]:
    """Percentiles in seconds of the samples that met no stall of the machine; the others apart."""
    clean, met = apart(samples, stalled)
    names = {"p50_s": 50, "p99_s": 99, "p999_s": 99.9, "max_s": 100} if clean else {}
    found = {name: percentile(clean, percent) for name, percent in names.items()}
    return {
        "count": len(clean),
        **found,
        "in_stalls": len(met),
        "in_stalls_max_s": max(met, default=0.0),
    }


def health_lines(under_load: dict[str, Any], failures: list[str]) -> list[Line]:
    """A health check is answered at once, whatever goes on."""
    seen, most = under_load.get("p999_s"), HEALTH_P999_S
    ok = None if seen is None else seen <= most
    return [
        Line(
            "health check under load, P99.9",
            f"at most {most * 1e3:g} ms",
            _ms(seen),
            ok,
            by_machine=True,
        ),
        Line("health checks that failed", "0", f"{len(failures)}", not failures),
    ]


def stream_lines(
    idle: dict[str, Any], under_load: dict[str, Any], in_company: dict[str, Any]
) -> list[Line]:
    """A polite stream goes on beside the load, about as it does beside as many polite clients.

    The longest gap of an idle server may be one of the machine's; P99 is not.
    """

    def line(name: str, base: dict[str, Any], of: str, key: str, most: float) -> Line:
        must = f"at most {most:g} x {of}"
        if not (base["count"] and under_load["count"]):
            return Line(name, must, "not measured", None, by_machine=True)
        ratio = under_load[key] / base[key]
        seen = f"{_ms(under_load[key])}, {ratio:.1f} x {_ms(base[key])}"
        return Line(name, must, seen, ratio <= most, by_machine=True)

    return [
        line("longest gap of a polite stream", idle, "idle", "max_s", MOST_GAP_RATIO),
        line("P99 gap of a polite stream", in_company, "polite load", "p99_s", MOST_COMPANY_RATIO),
    ]


def fuzz_lines(result: FuzzResult, wanted: int) -> list[Line]:
    """Whatever comes, there is an answer, and a server that goes on."""
    name, bad = f"fuzz {result.service}", result.count(*BAD_CODES)
    kinds = [f"{result.count(code)} {code}" for code in sorted(BAD_CODES) if result.count(code)]
    found = result.num_messages - result.count("UNIMPLEMENTED")
    return [
        Line(
            f"{name}: messages",
            f"{wanted}",
            f"{result.num_messages}",
            result.num_messages == wanted,
        ),
        Line(f"{name}: crashes, hangs, lost answers", "0", ", ".join(kinds) or "0", not bad),
        Line(f"{name}: serving afterwards", "yes", "yes" if result.alive else "no", result.alive),
        Line(f"{name}: the service is there", "yes", "yes" if found else "no", bool(found)),
    ]


def _ms(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds * 1e3:.1f} ms"


def code_table(load: LoadResult) -> list[str]:
    """Codes by kind, one kind a line."""
    kinds = sorted({(group, kind) for group, kind, _ in load.codes}, key=_by_group)
    found = []
    for group, kind in kinds:
        counts = {c: n for (g, k, c), n in load.codes.items() if (g, k) == (group, kind)}
        words = "  ".join(f"{code} {number}" for code, number in sorted(counts.items()))
        found.append(f"{group:10} {kind:36} {words}")
    return found


def _by_group(kind: tuple[str, str]) -> tuple[int, str]:
    return list(GROUPS).index(kind[0]), kind[1]


def table(lines: list[Line]) -> str:
    """Returns the lines as text, in columns."""
    verdicts = {True: "ok", False: "FAILED", None: "not measured"}
    rows = [("what", "must be", "seen", "")]
    rows += [(line.name, line.must, line.seen, verdicts[line.ok]) for line in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join((*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]))
        for row in rows
    )


def surroundings() -> dict[str, Any]:
    """Versions, commit and machine."""
    root = Path(__file__).parents[2]

    def git(*command: str) -> str:
        found = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
        return found.stdout.strip()

    try:
        commit = {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except OSError:  # no git here
        commit = {}
    packages = ("grpcio", "protobuf", "jax", "numpy")
    return {
        "versions": {
            "python": platform.python_version(),
            "jmoe": jmoe_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
        **commit,
        "machine": {"platform": platform.platform(), "cpu_count": os.cpu_count()},
    }
