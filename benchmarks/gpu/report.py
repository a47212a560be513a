"""Tables and figures of what is stored: `python -m benchmarks.gpu --report`.

Prints Markdown, each table with the command that makes its numbers, and writes `figure-<n>.png`
beside the JSON files. What is not stored is named as missing, never guessed. Needs no device.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.sizes import EAGER, SETTINGS, ZERO, Sizes
from benchmarks.harness.command import markdown
from benchmarks.harness.store import Store

Records = Mapping[str, Mapping[str, Any]]
GAIN_TARGET = 0.9  # of the ratio that the byte floors give


def main(folder: Path, sizes: Sizes, out: Any = None) -> int:
    """Prints the report of a folder; 0 if there is anything in it, else 1."""
    kept = Store(folder, {})
    stored = {part: kept.records(part) for part in TABLES}
    print(text(stored, sizes), file=out or sys.stdout)
    for path in figures(stored, sizes, folder):
        print(f"\nfigure: {path}", file=out or sys.stdout)
    return int(not any(stored.values()))


def text(stored: Mapping[str, Records], sizes: Sizes) -> str:
    """Returns the whole report as Markdown."""
    lines = [*heading(stored)]
    for part, table in TABLES.items():
        lines += ["", f"## {part}", f"`python -m benchmarks.gpu --parts {part}`", ""]
        if not stored[part]:
            lines.append("Nothing is stored.")
            continue
        try:
            lines += table(stored, sizes)
        except KeyError as error:
            lines.append(f"Stored in an older form, without {error}: measure it again.")
        failed = {n: r["failed"] for n, r in stored[part].items() if "failed" in r}
        lines += [f"- FAILED {name}: {why}" for name, why in failed.items()]
        lines += _missing(part, stored[part], sizes)
    return "\n".join(lines)


def _missing(part: str, records: Records, sizes: Sizes) -> list[str]:
    from benchmarks.gpu.run import module

    absent = [case.name for case in module(part).cases(sizes) if case.name not in records]
    return [f"- not measured: {', '.join(absent)}"] if absent else []


def heading(stored: Mapping[str, Records]) -> Iterator[str]:
    """Returns device, versions and commits of the records, and what their weights are."""
    records = [r for found in stored.values() for r in found.values()]
    yield "# Measured on a GPU"
    if not records:
        yield "No figure is stored yet: nothing has been run."
        return
    for key, values in (
        ("device", {r["machine"]["device"] for r in records}),
        ("driver", {r["machine"].get("driver", "?") for r in records}),
        ("jax", {r["machine"].get("jax", "?") for r in records}),
        ("commit", {r["commit"][:12] for r in records}),
        ("date", {r["date"][:10] for r in records}),
        ("weights", {f"{r['weights']} (skew {r['skew']:g})" for r in records}),
    ):
        yield f"- {key}: {', '.join(sorted(values))}"


# -- tables ---------------------------------------------------------------------------------------


def _n(value: float | None, digits: int = 2, scale: float = 1.0) -> str | None:
    return None if value is None else f"{value * scale:,.{digits}f}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} %"


def _verdict(target: Mapping[str, Any] | None) -> str:
    return "" if not target else ("met" if target["met"] else "MISSED")


def light(stored: Mapping[str, Records], sizes: Sizes) -> list[str]:
    """Returns what each case's process came to."""
    rows = [[name, r.get("figures", {}).get("verdict")] for name, r in stored["light"].items()]
    return markdown(["case", "verdict"], rows)


def tests(stored: Mapping[str, Records], sizes: Sizes) -> list[str]:
    """Returns counts by file."""
    rows = [
        [name, *(r.get("figures", {}).get(key) for key in ("passed", "failed", "skipped"))]
        for name, r in stored["tests"].items()
    ]
    return markdown(["file", "passed", "failed", "skipped"], rows)


def layers(stored: Mapping[str, Records], sizes: Sizes) -> list[str]:
    """Returns errors against PyTorch in float32, and PyTorch's own in bfloat16."""
    rows = []
    for name, record in stored["layers"].items():
        for check in record.get("checks", []):
            for what, e in check["errors"].items():
                shape = f"{check['batch']} x {check['length']}"
                pairs = [f"{e['jmoe'][q]:.2g} / {e['torch_bfloat16'][q]:.2g}" for q in e["jmoe"]]
                far = f"{e['far_off']['jmoe']} / {e['far_off']['torch_bfloat16']}"
                passed = "yes" if e["passed"] else "NO"
                rows.append([name, shape, what, *pairs, f"{far} of {e['rows']}", passed])
    columns = ["model", "tokens", "what", "median error", "third quartile", "far off", "passed"]
    note = "Errors of rows against PyTorch in float32: jmoe / PyTorch in bfloat16."
    return [note, "", *markdown(columns, rows)]


def step(stored: Mapping[str, Records], sizes: Sizes) -> list[str]:
    """Returns decode over its floor, brownout over its own zero brownout, and prefill."""
    found = {name: r for name, r in stored["step"].items() if "figures" in r}
    rows, gains = [], []
    labels = {setting.name: setting.label for setting in SETTINGS}
    for name, label in {**labels, ZERO.name + EAGER: "zero, no graphs"}.items():
        for batch in sorted(sizes.batches):
            record = found.get(f"decode/{name}/b{batch}")
            if record is None:
                continue
            f = record["figures"]
            row = [label, batch, _n(f["active_experts"], 1), _n(f["span_us"], 0)]
            row += [_n(f["kernels_us"], 0), _n(f["floor_us"], 0), _n(f["over_floor"])]
            rows.append([*row, _verdict(record.get("target"))])
            gain = _gain(found, name, batch) if name in labels else None
            if gain is not None:
                met = "met" if gain["share"] >= GAIN_TARGET else "MISSED"
                cells = [_n(gain["measured"], 3), _n(gain["floors"], 3), _percent(gain["share"])]
                gains.append([label, batch, *cells, met])
    prefill = [
        [name.split("/")[1], r["case"]["tokens"], _n(f["tokens_s"], 0), _n(f["tflop_s"], 0)]
        for name, r in found.items()
        if name.startswith("prefill/")
        for f in [r["figures"]]
    ]
    graphs = [
        [batch, _n(eager["figures"]["span_us"] / graph["figures"]["span_us"], 3)]
        for batch in sorted(sizes.batches)
        if (eager := found.get(f"decode/{ZERO.name}{EAGER}/b{batch}")) is not None
        and (graph := found.get(f"decode/{ZERO.name}/b{batch}")) is not None
    ]
    ceilings = next((r["ceilings"] for r in found.values() if "ceilings" in r), None)
    note = f"Context {sizes.context}; microseconds from one step to the next ('step') and of the "
    note += (
        "kernels alone; the floor is the bytes of active experts, other weights and KV over the "
    )
    note += "copy bandwidth"
    note += f" of {ceilings['copy_tb_s']:.2f} TB/s." if ceilings else "."
    decode = ["setting", "batch", "active experts", "step", "kernels", "floor", "ratio", "target"]
    ratio = ["setting", "batch", "zero over brownout", "by the floors", "share", ">= 90 %"]
    return [
        note,
        "",
        *markdown(decode, rows),
        "",
        *markdown(ratio, gains),
        "",
        *markdown(["batch", "step without graphs over step"], graphs),
        "",
        *markdown(["setting", "prefill tokens", "tokens/s", "TFLOP/s"], prefill),
    ]


def _gain(found: Records, name: str, batch: int) -> dict[str, float] | None:
    zero, way = (found.get(f"decode/{n}/b{batch}") for n in (ZERO.name, name))
    if name == ZERO.name or zero is None or way is None:
        return None
    measured, floors = (
        zero["figures"][key] / way["figures"][key] for key in ("span_us", "floor_us")
    )
    return {"measured": measured, "floors": floors, "share": measured / floors}


def serve(stored: Mapping[str, Records], sizes: Sizes) -> list[str]:
    """Returns figures 8 and 9 as a table."""
    rows = []
    for name, record in sorted(stored["serve"].items()):
        if not name.startswith("point/") or "figures" not in record:
            continue
        f, seen, about = record["figures"], record["server_steps"], record["case"]
        row = [about["mix"]["name"], about["setting"], _n(about["load"]), _n(f["rate_s"], 1)]
        row += [_n(f["output_tokens_s"], 0), _n(f["ttft_p90_ms"], 0), _n(f["itl_p90_ms"], 1)]
        row += [_n(seen["decode"]["active_experts"], 1), _percent(f["degraded_share"])]
        rows.append([*row, _percent(seen["host_idle_share"]), seen["compilations_since_ready"]])
    columns = ["mix", "setting", "load", "req/s", "tokens/s", "P90 TTFT, ms", "P90 ITL, ms"]
    columns += ["active experts", "degraded", "no step under way", "compiled"]
    lines = markdown(columns, rows)
    profile = stored["serve"].get("kernels", {}).get("figures")
    if profile:
        share = _percent(profile.get("kernel_busy_share")) or "an unknown share"
        lines.append(f"\nKernels were running {share} of the time in a full batch.")
    return lines


def burst(stored: Mapping[str, Records], sizes: Sizes) -> list[str]:
    """Violations by phase, and thresholds: figures 12 and 13 as a table."""
    rows = []
    for name, record in stored["burst"].items():
        if name.startswith("calibration/") or "run" not in record:
            continue
        f, slo = record["figures"], record["slo"]
        leg, mix = name.split("/")
        row = [mix, leg, _n(slo["ttft_s"], 0, 1e3), _n(slo["itl_s"], 1, 1e3)]
        for phase in ("steady", "burst"):
            row += [_percent(f[f"{phase}_{m}_violation_rate"]) for m in ("ttft", "itl")]
        row += [_n(f[f"burst_{p}_threshold_percent"], 0) for p in ("prefill", "decode")]
        rows.append([*row, _verdict(record.get("target"))])
    columns = ["mix", "leg", "TTFT SLO, ms", "ITL SLO, ms", "steady: late first", "late others"]
    columns += ["burst: late first", "late others", "threshold prefill", "decode", "<= 5 %"]
    return markdown(columns, rows)


def priority(stored: Mapping[str, Records], sizes: Sizes) -> list[str]:
    """Returns the first tokens of the latency-sensitive, and what best effort gets, by load and
    policy.
    """
    rows = []
    found = {n: r for n, r in stored["priority"].items() if "load" in r["case"] and "figures" in r}
    for name, record in sorted(found.items(), key=lambda item: item[1]["case"]["load"]):
        f, load = record["figures"], record["case"]["load"]
        row = [_n(load, 1), name.partition("/")[0], _n(f["ls_ttft_p50_ms"], 1)]
        row += [_n(f["ls_ttft_p99_ms"], 1), _n(f.get("ttft_p99_to_alone")), _n(f["be_tokens_s"], 0)]
        row += [f["parks"], _n(f["preemption_p50_ms"], 2), _n(f["preemption_p99_ms"], 2)]
        rows.append([*row, _verdict(record.get("target"))])
    columns = ["load", "policy", "LS P50 TTFT, ms", "LS P99 TTFT, ms", "P99 over alone"]
    columns += ["BE tokens/s", "parks", "preemption P50, ms", "preemption P99, ms", "<= 1.5"]
    return markdown(columns, rows)


def family(stored: Mapping[str, Records], sizes: Sizes) -> list[str]:
    """Returns the mixed steps beside steps in turn, and what the engine chose."""
    rows, choice = [], stored["family"].get("choice", {}).get("figures", {})
    for batch in sorted(sizes.family_batches):
        f = stored["family"].get(f"decode/b{batch}", {}).get("figures")
        if f is None:
            continue
        row = [batch, _n(f["mixed_us"], 0), _n(f["mixed_over_floor"]), _n(f["alternating_us"], 0)]
        row += [_n(f["alternating_over_floor"]), _n(f["mixed_over_alternating"], 3)]
        row.append(_n(f["floors_mixed_over_alternating"], 3))
        mixes = choice.get(f"mixes_b{batch}")
        rows.append([*row, None if mixes is None else ("mixed" if mixes else "in turn")])
    columns = ["rows of both", "mixed, us", "over its floor", "in turn, us", "over its floor"]
    return markdown([*columns, "mixed over in turn", "by the floors", "engine's choice"], rows)


def mesh(stored: Mapping[str, Records], sizes: Sizes) -> list[str]:
    """Returns steps over a mesh of one device beside plain ones."""
    rows = []
    for batch in sorted(sizes.mesh_batches):
        f = stored["mesh"].get(f"decode/b{batch}", {}).get("figures")
        if f is not None:
            row = [batch, _n(f["plain_us"], 0), _n(f["mesh_us"], 0), _n(f["mesh_over_plain"], 3)]
            rows.append([*row, _n(f["plain_over_floor"]), _n(f["mesh_over_floor"])])
    columns = ["batch", "plain, us", "over ep=1, us", "ratio", "plain over floor"]
    return markdown([*columns, "ep=1 over floor"], rows)


def against_transformers(stored: Mapping[str, Records], sizes: Sizes) -> list[str]:
    """Returns the tokens a second beside jmoe's offline cases."""
    record = next(iter(stored["transformers"].values()))
    rows = []
    for mix in sizes.mixes:
        theirs = record.get("figures", {}).get(f"{mix.name}_tokens_s")
        row = [mix.name, _n(theirs, 0)]
        for setting in (ZERO, SETTINGS[-1]):
            ours = stored["serve"].get(f"offline/{mix.name}/{setting.name}", {}).get("figures")
            ours_s = ours["output_tokens_s"] if ours else None
            row += [_n(ours_s, 0), _n(ours_s / theirs) if ours_s and theirs else None]
        rows.append(row)
    columns = ["mix", "transformers, tokens/s", "jmoe, zero", "ratio"]
    return markdown([*columns, f"jmoe, {SETTINGS[-1].label}", "ratio"], rows)


def startup(stored: Mapping[str, Records], sizes: Sizes) -> list[str]:
    """Returns seconds to readiness, and what compiled afterwards."""
    rows = []
    for name, record in stored["startup"].items():
        f = record.get("figures")
        if f is None:
            continue
        cold = f.get("cold_s", f.get("first_s"))
        row = [name, _n(cold, 1), _n(f["warm_s"], 1), f["cache_entries"]]
        rows.append([*row, f["compilations_since_ready"], _verdict(record.get("target"))])
    columns = ["weights", "cold, s", "warm, s", "cache entries", "compiled after", "warm <= 60 s"]
    return markdown(columns, rows)


def distill(stored: Mapping[str, Records], sizes: Sizes) -> list[str]:
    """Returns one layer's rows captured and a training step, by model and way."""
    rows = []
    for name, record in stored["distill"].items():
        if f := record.get("figures"):
            row = [
                name,
                f"{f['rows']:,}",
                _n(f["capture_s"]),
                _n(f["step_ms"]),
                _n(f["layer_s"], 0),
            ]
            rows.append([*row, _n(f["peak_gib"], 1)])
    columns = ["model, way", "rows", "capture, s", "step, ms", "whole layer, s", "peak, GiB"]
    return markdown(columns, rows)


def kernels(stored: Mapping[str, Records], sizes: Sizes) -> list[str]:
    """Returns cases and targets by op; the figures themselves are in the ops' own files."""
    rows = []
    for name, record in stored["kernels"].items():
        if f := record.get("figures"):
            met = f"{f['targets_met']} of {f['targets']}"
            rows.append([name, f["stored"], f["failed_cases"], met])
    return markdown(["op", "cases", "failed", "targets met"], rows)


TABLES: dict[str, Callable[[Mapping[str, Records], Sizes], list[str]]] = {
    "light": light,
    "tests": tests,
    "layers": layers,
    "step": step,
    "serve": serve,
    "burst": burst,
    "priority": priority,
    "family": family,
    "mesh": mesh,
    "transformers": against_transformers,
    "startup": startup,
    "distill": distill,
    "kernels": kernels,
}

# -- figures --------------------------------------------------------------------------------------

_COLORS = ("#444444", "#1b7f5c", "#2563eb", "#d95f02")


def figures(stored: Mapping[str, Records], sizes: Sizes, folder: Path) -> list[Path]:
    """Draws what there are records for; the files."""
    drawn = []
    points = {n: r for n, r in stored["serve"].items() if n.startswith("point/") and "figures" in r}
    if points:
        draw = _throughput(points, sizes)
        drawn.append(_picture(folder / "figure-throughput.png", len(sizes.mixes), draw))
    for mix in sizes.mixes:
        legs = {leg: stored["burst"].get(f"{leg}/{mix.name}", {}) for leg in ("zero", "brownout")}
        if all("run" in record for record in legs.values()):
            drawn.append(_burst_picture(legs, folder / f"figure-burst-{mix.name}.png"))
    return drawn


def _picture(path: Path, columns: int, draw: Callable[[Any], None]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(1, columns, figsize=(7 * columns, 5), dpi=100, squeeze=False)
        draw(axes[0])
        figure.tight_layout()
        figure.savefig(path)
        plt.close(figure)
    return path


def _throughput(points: Records, sizes: Sizes) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        for axis, mix in zip(axes, sizes.mixes, strict=True):
            for setting, color in zip(SETTINGS, _COLORS, strict=True):
                names = [f"point/{mix.name}/{setting.name}/load{load:g}" for load in sizes.loads]
                found = [points[name]["figures"] for name in names if name in points]
                pairs = sorted((f["rate_s"], f["output_tokens_s"]) for f in found)
                if pairs:
                    label = "zero brownout" if setting == ZERO else f"(way, t) = {setting.label}"
                    axis.plot(*zip(*pairs, strict=True), "o-", color=color, lw=2.2, label=label)
            axis.set_title(f"{mix.name} lengths", loc="left", fontweight="bold")
            axis.set_xlabel("requests a second")
            axis.set_ylabel("output tokens a second")
            axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
            axis.grid(color="#dddddd", lw=0.7)
            axis.legend(loc="lower right")

    return draw


def _burst_picture(legs: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """Returns the demo's picture, of these legs."""
    from serving.bench.report import draw

    shared = ("duration_s", "burst_at_s", "steady_rate_per_s", "burst_rate_per_s", "slo")
    runs = {leg: record["run"] for leg, record in legs.items()}
    draw({**{key: legs["brownout"][key] for key in shared}, "runs": runs}, path)
    return path
