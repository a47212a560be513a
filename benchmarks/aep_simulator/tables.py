"""The figures in tables."""

from typing import Any

from benchmarks.harness.command import markdown

SYSTEMS = ("synchronous", "half batches", "libra", "libra, half batches", "async")
CLOSE = 0.05  # ways within it of the fastest count as equal: the simpler is taken


def all_of(found: dict[str, Any]) -> list[str]:
    """Of every part that is there."""
    lines: list[str] = []
    for name, table in (("eight", by_case), ("more", by_case), ("host", host), ("paper", paper)):
        if name in found:
            lines += ["", *table(found[name])]
    if "eight" in found:
        lines += ["", *advice(found["eight"] + found.get("more", []))]
    return lines


def by_case(cases: list[dict[str, Any]]) -> list[str]:
    """Thousands of tokens a second, and the asynchronous one's ratios."""
    rows = []
    for case in cases:
        systems = case["systems"]
        cells = [f"{systems[name]['tokens_per_s'] / 1e3:,.1f}" for name in SYSTEMS]
        bare = systems.get("async, no replicas")
        cells.append(f"{bare['tokens_per_s'] / 1e3:,.1f}" if bare else None)
        itls = [f"{systems[name]['itl_ms']:.0f}" for name in ("synchronous", "async")]
        at = systems["async"]["attention_devices"]
        fits = "" if case["sequences_that_fit_async"] >= case["in_flight"] else " †"
        order = "uniform" if not case["skew"] else "same" if case["same"] else "different"
        rows.append(
            [
                f"{case['model']} top-{case['top_k']}",
                case["devices"],
                f"{case['skew']:g} {order}",
                f"{case['in_flight']:,}{fits}",
                *cells,
                f"{case['ratio']:.2f}",
                f"{case['ratio_to_best']:.2f}",
                ", ".join(itls),
                f"{at} + {case['devices'] - at}, {systems['async']['wait_ms']:g}",
            ]
        )
    return markdown(
        [
            *("model", "devices", "skew", "in flight", *SYSTEMS, "async, no replicas"),
            *("async / synchronous", "async / best other", "ITL ms: sync, async"),
            "split, wait ms",
        ],
        rows,
    )


def host(rows: list[dict[str, Any]]) -> list[str]:
    """Ratio to ideal synchronous by what a launch costs."""
    costs = list(dict.fromkeys(row["host_us"] for row in rows))
    cells = [
        [model, *(f"{r['ratio']:.2f}" for r in rows if r["model"] == model)]
        for model in dict.fromkeys(row["model"] for row in rows)
    ]
    return markdown(["host, us a stage", *map(str, costs)], cells)


def paper(found: dict[str, Any]) -> list[str]:
    """The paper's machine: asynchronous over synchronous, by cap and overhead of the baseline."""
    lines = []
    for one in found["decomposed"]:
        order = "same" if one["same"] else "different"
        lines += ["", f"top-{one['top_k']}, {order} order; tokens/s asynchronous:"]
        lines += [
            f"- {name}: {run['tokens_per_s']:,.0f}, ITL {run['itl_ms']:.0f} ms"
            for name, run in one["async"].items()
        ]
        reference = one["async"]["paper's, 0 spare"]["tokens_per_s"]
        extras = list(dict.fromkeys(s["layer_overhead_ms"] for s in one["synchronous"]))
        rows = []
        for cap in dict.fromkeys(s["cap"] for s in one["synchronous"]):
            of_cap = [s for s in one["synchronous"] if s["cap"] == cap]
            rates = [
                f"{s['tokens_per_s']:,.0f} ({reference / s['tokens_per_s']:.2f})" for s in of_cap
            ]
            rows.append([cap or "none", *rates])
        heads = [f"{extra:g} ms a layer" for extra in extras]
        lines += markdown(["cap, rows a step", *heads], rows)
    return lines


def advice(cases: list[dict[str, Any]]) -> list[str]:
    """Which to take, by case: the simplest within 5 % of the fastest that fits."""
    rows = []
    for case in cases:
        rates = {name: case["systems"][name]["tokens_per_s"] for name in SYSTEMS}
        if case["sequences_that_fit_async"] < case["in_flight"]:
            del rates["async"]
        best = max(rates.values())
        take = next(name for name in rates if rates[name] >= (1 - CLOSE) * best)
        order = "uniform" if not case["skew"] else "same" if case["same"] else "different"
        rows.append(
            [
                f"{case['model']} top-{case['top_k']}",
                case["devices"],
                f"{case['skew']:g} {order}",
                f"{case['in_flight']:,}",
                take,
            ]
        )
    return markdown(["model", "devices", "skew", "in flight", "take"], rows)
