"""The figures in tables."""

from collections import Counter
from typing import Any

from benchmarks.harness.command import markdown
from jmoe.parallel.stage_times import NODE

SYSTEMS = ("synchronous", "half batches", "libra", "libra, half batches", "async")
BUILT = ("synchronous", "libra", "async")
CLOSE = 0.05  # ways within it of the fastest count as equal: the simpler is taken


def all_of(found: dict[str, Any]) -> list[str]:
    """Of every part that is there."""
    lines: list[str] = []
    for name, table in (("eight", by_case), ("more", by_case), ("host", host), ("paper", paper)):
        if name in found:
            lines += ["", *table(found[name])]
    if "eight" in found:
        cases = found["eight"] + found.get("more", [])
        lines += ["", *ways(cases), "", *advice(cases)]
    return lines


def by_case(cases: list[dict[str, Any]]) -> list[str]:
    """Thousands of tokens a second, and the asynchronous one's ratios."""
    rows = []
    for case in cases:
        systems = case["systems"]
        cells = [f"{systems[name]['tokens_per_s'] / 1e3:,.1f}" for name in SYSTEMS]
        bare = systems.get("async, no replicas")
        cells.append(f"{bare['tokens_per_s'] / 1e3:,.1f}" if bare else "-")
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
    """Returns ratio to ideal synchronous by what a launch costs."""
    costs = list(dict.fromkeys(row["host_us"] for row in rows))
    cells = [
        [model, *(f"{r['ratio']:.2f}" for r in rows if r["model"] == model)]
        for model in dict.fromkeys(row["model"] for row in rows)
    ]
    return markdown(["host, us a stage", *map(str, costs)], cells)


BASELINE = 256, 0.25
"""Rows of a step of all devices, and host milliseconds a layer, that come to the paper's 2.7 with
top-1 and the same order in every layer: fitted, as the paper prints neither."""


def paper(found: dict[str, Any]) -> list[str]:
    """Returns the paper's machine: its ratio in parts, then by cap and overhead of the baseline."""
    rows = []
    for one in found["decomposed"]:
        rates = {(s["cap"], s["layer_overhead_ms"]): s["tokens_per_s"] for s in one["synchronous"]}
        ideal, capped, slow = rates[None, 0.0], rates[BASELINE[0], 0.0], rates[BASELINE]
        free, real = (one["async"][f"{way}, 0 spare"]["tokens_per_s"] for way in WAYS)
        level = one["async"]["paper's, 2 spare"]["tokens_per_s"]
        parts = (free / ideal, real / free, ideal / capped, capped / slow, real / slow)
        cells = [f"{part:.2f}" for part in (*parts, level / real)]
        rows.append([_title(one), f"{ideal:,.0f}", *cells])
    heads = ["", "ideal synchronous, tokens/s", "asynchrony itself", "its host", "baseline's cap"]
    heads += ["baseline's host", "in all", "two copies a device would add"]
    lines = markdown(heads, rows)
    for one in found["decomposed"]:
        reference = one["async"]["paper's, 0 spare"]["tokens_per_s"]
        extras = list(dict.fromkeys(s["layer_overhead_ms"] for s in one["synchronous"]))
        rows = []
        for cap in dict.fromkeys(s["cap"] for s in one["synchronous"]):
            of_cap = [s["tokens_per_s"] for s in one["synchronous"] if s["cap"] == cap]
            rows.append([cap or "none", *(f"{reference / rate:.2f}" for rate in of_cap)])
        heads = [f"{extra:g} ms a layer" for extra in extras]
        lines += ["", f"{_title(one)}: asynchronous over synchronous", ""]
        lines += markdown(["cap, rows a step", *heads], rows)
    return lines


WAYS = ("free", "paper's")


def _title(one: dict[str, Any]) -> str:
    return f"top-{one['top_k']}, {'same' if one['same'] else 'different'}"


def advice(cases: list[dict[str, Any]]) -> list[str]:
    """Returns which to take: the simplest within 5 % of the fastest that fits; of all, of what is
    built.
    """
    found: dict[tuple[Any, ...], dict[int, str]] = {}
    for case in cases:
        order = "uniform" if not case["skew"] else "same" if case["same"] else "different"
        key = f"{case['model']} top-{case['top_k']}", case["devices"], f"{case['skew']:g} {order}"
        every = _best(case, SYSTEMS)
        built = _best(case, BUILT)
        words = every if every == built else f"{every} (else {built})"
        found.setdefault(key, {})[case["in_flight"]] = words
    loads = sorted({load for row in found.values() for load in row})
    rows = [[*key, *(row.get(load) for load in loads)] for key, row in found.items()]
    return markdown(["model", "devices", "skew", *(f"{load:,}" for load in loads)], rows)


def _best(case: dict[str, Any], names: tuple[str, ...]) -> str:
    rates = {name: case["systems"][name]["tokens_per_s"] for name in names}
    if case["sequences_that_fit_async"] < case["in_flight"]:
        del rates["async"]
    return next(n for n in rates if rates[n] >= (1 - CLOSE) * max(rates.values()))


def ways(cases: list[dict[str, Any]]) -> list[str]:
    """Returns the same, counted: in how many cases each way is taken, by size, load and skew."""
    found: dict[tuple[str, ...], dict[str, Counter[str]]] = {}
    for case in sorted(cases, key=lambda case: (case["devices"] > NODE, case["in_flight"])):
        size = "one node" if case["devices"] <= NODE else "several nodes"
        experts = "large" if case["model"].startswith("mixtral") else "small"
        key = size, experts, f"{case['in_flight']:,}"
        kind = "even" if not case["skew"] else "uneven"
        row = found.setdefault(key, {})
        for of, names in (("all", SYSTEMS), ("built", BUILT)):
            row.setdefault(f"{kind}, {of}", Counter())[_best(case, names)] += 1
    columns = [f"{kind}, {of}" for kind in ("even", "uneven") for of in ("all", "built")]
    rows = [[*key, *(_counts(row.get(column)) for column in columns)] for key, row in found.items()]
    heads = ["devices", "experts", "in flight"]
    heads += [
        f"{kind}: {of}" for kind in ("even", "uneven") for of in ("all ways", "what is built")
    ]
    return markdown(heads, sorted(rows, key=lambda row: row[:2]))


def _counts(chosen: Counter[str] | None) -> str | None:
    """Returns one way alone by its name, several with how many cases take each."""
    if not chosen:
        return None
    if len(chosen) == 1:
        return next(iter(chosen))
    return "; ".join(f"{name} {count}" for name, count in chosen.most_common())
