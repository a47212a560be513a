"""Libra's prefill times: fitted to its Table 2, held to its Tables 4 to 13, carried to 512 devices.

Run: `python -m benchmarks.balance.paper_times`. Arithmetic only: nothing is measured, and the same
figures come out on every machine. What is fitted and what is assumed stands in `paper_layer`, the
exchanges and their links in `exchanges`, the paper's numbers in `libra_paper.json`.

Nothing of Tables 4 to 13 is fitted, neither their level nor the imbalance of GLM-4.5: the paper
prints none, so it is taken to be Qwen3MoE's. Their column of output length 1 is compared, since
that is one prefill step. Steps smaller than the one of Table 2 are reported apart.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.balance import exchanges, paper_layer
from benchmarks.balance.paper_layer import RATES, SCHEMES, Geometry, Rates, Scheme
from benchmarks.harness.command import markdown, write_figures

ROWS, LENGTH = 4096, 1024  # a device and a sequence; Table 2's
OTHER_RATES = (
    Rates(dense_flops_per_s=600e12),
    Rates(attention_flops_per_s=400e12),
    Rates(dense_flops_per_s=600e12, attention_flops_per_s=400e12),
    Rates(dense_flops_per_s=989e12, attention_flops_per_s=700e12),
)
"""Slower and faster than is assumed: how much the errors owe to that."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Prints the tables, and writes all figures to the JSON file that is asked for."""
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "benchmarks.balance.paper_times", description=__doc__, formatter_class=words
    )
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument(
        "--rows", type=int, default=ROWS, help=f"a device, where it scales (default: {ROWS})"
    )
    args = parser.parse_args(arguments)
    if args.rows < 1:
        parser.error(f"--rows is {args.rows}; it must be 1 or more")
    found = simulate(args.rows)
    print("\n".join(table(found)))
    if args.json:
        write_figures(args.json, found)
    return found


def simulate(rows_per_device: int = ROWS) -> dict[str, Any]:
    """Returns all figures: `fitted`, `breakdown`, `steps`, `errors`, `speed_up`, `scaling`."""
    paper = paper_layer.read_paper()
    schemes, models = paper_layer.fit(paper), paper_layer.geometries(paper)
    steps = list(compare(paper, schemes, models))
    whole = paper["breakdown"]["batch"] * paper["breakdown"]["input_length"]
    libra = schemes["Libra"]
    scaling = {
        name: exchanges.scaling(libra, geometry, rows_per_device, LENGTH)
        for name, geometry in models.items()
    }
    return {
        "assumed": {
            **RATES._asdict(),
            "libra_imbalance": paper_layer.LIBRA_IMBALANCE,
            "nic_bytes_per_s": exchanges.NIC_BYTES_PER_S,
            "rows_per_device": rows_per_device,
            "length": LENGTH,
        },
        "fitted": {name: scheme._asdict() for name, scheme in schemes.items()},
        "breakdown": breakdown(paper, schemes, models),
        "steps": steps,
        "small_below_rows": whole,
        "errors": errors(steps, whole),
        "errors_by_rates": [
            rates._asdict() | _whole_errors(paper, schemes, models, rates)
            for rates in (RATES, *OTHER_RATES)
        ],
        "speed_up": [speed_up(steps, model, whole) for model in models],
        "scaling": scaling,
        "scales_to": {
            name: {way: exchanges.scales_to(sizes, way) for way in exchanges.WAYS}
            for name, sizes in scaling.items()
        },
    }


def compare(
    paper: dict[str, Any],
    schemes: dict[str, Scheme],
    models: dict[str, Geometry],
    rates: Rates = RATES,
) -> Iterator[dict[str, Any]]:
    """Returns every step of Tables 4 to 13 that ran: what is printed and what the model says, in
    s.
    """
    for row in paper["prefill_s"]:
        rows, length = row["batch"] * row["input_length"], row["input_length"]
        for name in SCHEMES:
            if row[name] is None:
                continue
            geometry = models[row["model"]]
            model_s = paper_layer.step_s(schemes[name], geometry, rows, length, rates=rates)
            yield {
                "table": row["table"],
                "model": row["model"],
                "scheme": name,
                "input_length": length,
                "batch": row["batch"],
                "rows": rows,
                "paper_s": row[name],
                "model_s": model_s,
                "error": model_s / row[name] - 1,
            }


def breakdown(
    paper: dict[str, Any], schemes: dict[str, Scheme], models: dict[str, Geometry]
) -> list[dict[str, Any]]:
    """Returns table 2's totals, which the fit must give back, and what attention
    adds to them; ms.
    """
    at = paper["breakdown"]
    own = at["batch"] * at["input_length"] / paper_layer.NUM_DEVICES
    found = []
    for name, scheme in schemes.items():
        times = paper_layer.layer_times(scheme, models[at["model"]], own, at["input_length"])
        found.append(
            {
                "scheme": name,
                "paper_ms": at[name]["total"],
                "model_ms": 1e3 * times.moe,
                "attention_ms": 1e3 * times.attention,
            }
        )
    return found


def errors(steps: list[dict[str, Any]], whole: int) -> list[dict[str, Any]]:
    """Returns mean absolute and mean error by model, scheme (and all of them) and size of the
    step.
    """
    found = []
    for model in dict.fromkeys(step["model"] for step in steps):
        for scheme in (*SCHEMES, "all"):
            for size in ("small", "whole"):
                chosen = [
                    step["error"]
                    for step in steps
                    if step["model"] == model
                    and scheme in (step["scheme"], "all")
                    and (step["rows"] < whole) == (size == "small")
                ]
                found.append(
                    {
                        "model": model,
                        "scheme": scheme,
                        "size": size,
                        "steps": len(chosen),
                        "mean_absolute": fmean(map(abs, chosen)),
                        "mean": fmean(chosen),
                        "worst": max(chosen, key=abs),
                    }
                )
    return found


def _whole_errors(
    paper: dict[str, Any], schemes: dict[str, Scheme], models: dict[str, Geometry], rates: Rates
) -> dict[str, float]:
    """Returns mean absolute error by model, of all schemes' steps that are not small, with other
    rates.
    """
    whole = paper["breakdown"]["batch"] * paper["breakdown"]["input_length"]
    found = errors(list(compare(paper, schemes, models, rates)), whole)
    return {
        error["model"]: error["mean_absolute"]
        for error in found
        if (error["scheme"], error["size"]) == ("all", "whole")
    }


def speed_up(steps: list[dict[str, Any]], model: str, whole: int) -> dict[str, Any]:
    """SGLang's and Lina's time over Libra's, mean of the steps that both ran and are not small."""
    times = {
        (step["input_length"], step["batch"], step["scheme"]): step
        for step in steps
        if step["model"] == model and step["rows"] >= whole
    }
    found: dict[str, Any] = {"model": model}
    for other in ("Lina", "SGLang"):
        pairs = [
            (step, times[length, batch, other])
            for (length, batch, scheme), step in times.items()
            if scheme == "Libra" and (length, batch, other) in times
        ]
        for by in ("paper", "model"):
            found[f"{other}_{by}"] = fmean(b[f"{by}_s"] / a[f"{by}_s"] for a, b in pairs)
    return found


def table(found: dict[str, Any]) -> list[str]:
    """Returns the figures in words and tables."""
    lines = ["Table 2, ms a layer: as printed, as fitted, and attention beside it", ""]
    rows = [
        [r["scheme"], *(f"{r[key]:.2f}" for key in ("paper_ms", "model_ms", "attention_ms"))]
        for r in found["breakdown"]
    ]
    lines += markdown(["", "paper", "model", "attention"], rows)
    lines += ["", "Tables 4 to 13, not fitted: mean absolute error (mean error; steps)", ""]
    by = {(e["model"], e["scheme"], e["size"]): e for e in found["errors"]}
    heads = ["model", "steps", *SCHEMES, "all"]
    rows = []
    for size, words in (("whole", "{:,} rows or more"), ("small", "fewer")):
        for model in found["scaling"]:
            cells = [_error(by[model, scheme, size]) for scheme in heads[2:]]
            rows.append([model, words.format(found["small_below_rows"]), *cells])
    lines += markdown(heads, sorted(rows, key=lambda row: row[0], reverse=True))
    lines += ["", "The same with other rates for what Table 2 leaves out, in TFLOP/s", ""]
    models = list(found["scaling"])
    rows = []
    for by_rates in found["errors_by_rates"]:
        tflops = [by_rates[f"{kind}_flops_per_s"] / 1e12 for kind in ("dense", "attention")]
        rows.append(
            [*(f"{t:.0f}" for t in tflops), *(f"{100 * by_rates[m]:.1f} %" for m in models)]
        )
    lines += markdown(["dense", "attention", *models], rows)
    lines += ["", "Time over Libra's: paper / model", ""]
    rows = [
        [r["model"], *(f"{r[f'{o}_paper']:.2f} / {r[f'{o}_model']:.2f}" for o in SCHEMES[1:])]
        for r in found["speed_up"]
    ]
    lines += markdown(["model", *SCHEMES[1:]], rows)
    for model, sizes in found["scaling"].items():
        lines += _scaling_table(model, sizes, found)
    return lines


def _error(error: dict[str, Any]) -> str:
    return f"{100 * error['mean_absolute']:.1f} % ({100 * error['mean']:+.1f}; {error['steps']})"


def _scaling_table(model: str, sizes: list[dict[str, Any]], found: dict[str, Any]) -> list[str]:
    """Returns one line a size: bytes between devices and ms a layer of each way."""
    own = found["assumed"]["rows_per_device"]
    lines = ["", f"{model}, {own:,} rows a device, balanced; MB to a device, of them by NIC;"]
    lines += ["ms there + back; ms a layer", ""]
    rows = []
    for size in sizes:
        cells = [size["devices"], f"{size['all_gather_over_direct']:.1f}"]
        for way in exchanges.WAYS:
            w = size["ways"][way]
            cells.append(
                f"{w['mbytes']:,.0f}, {w['nic_mbytes']:,.0f}; "
                f"{w['dispatch_ms']:.2f} + {w['combine_ms']:.2f}; {w['layer_ms']:.1f}"
            )
        rows.append([*cells, size["chosen"]])
    heads = ["devices", "all-gather's bytes over direct's", *exchanges.WAYS, "chosen"]
    lines += markdown(heads, rows)
    ends = ", ".join(f"{way} {n}" for way, n in found["scales_to"][model].items())
    worth = f"{exchanges.WORTH} times the rows/s"
    return [*lines, "", f"Largest size that brought {worth} of half of it: {ends}"]


if __name__ == "__main__":
    main()
