"""Plays asynchronous beside synchronous expert parallelism: sizes, skew and load; the paper's 2.7
times, in parts.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from math import inf
from typing import Any

from benchmarks.harness.store import markdown
from benchmarks.mesh import cases, synchronous
from benchmarks.mesh.cases import PAPER, Case, play
from benchmarks.mesh.compare import PAPERS
from benchmarks.mesh.core import UNLIMITED
from benchmarks.mesh.rates import NODE
from jmoe.parallel.asynchronous import DEFAULT_OVERHEADS, NO_OVERHEADS, ON_TIME, Late, Overheads

MODELS = (("mixtral-8x7b", 1), ("mixtral-8x7b", 2), ("qwen3-30b-a3b", 8))
SKEWS = ((0.0, False), (0.5, True), (0.5, False), (1.0, False))
LOADS = (256, 2048, 8192, 32768)
DESIGNED = Overheads(100e-6, 100e-6, 100e-6, 5e-6, inf)
"""Rows from GPU to GPU as fast as links are, and hosts that launch 10,000 stages a second."""
PAPER_OVERHEADS = Overheads(2.0e-3, 0.3e-3, 100e-6, 10e-6, inf)
"""Figure 13: an attention step takes 2.7 ms and an expert step 0.8 ms in all. What of it is host's
is in the picture alone; taken is about what the roofline leaves of them at some 200 rows."""
CAP, LAYER_OVERHEAD_S = 256, 0.25e-3
"""Of the paper's baseline: rows of a step of all devices, and the host's time a layer, that come to
the paper's 2.7 with top-1 and the same order in every layer: fitted, as it prints neither."""
REGIME = Case("mixtral-8x7b", 2, 16, 16384, 0.5, False)
HICCUPS = Late(10.0, 0.02)
TRANSPORTS = {
    "as built: 1.3 GB/s, hosts of 1.3 and 0.6 ms": DEFAULT_OVERHEADS,
    "as built, links' rate": replace(DEFAULT_OVERHEADS, bytes_per_s=inf),
    "1.3 GB/s, hosts of 0.1 ms": replace(DESIGNED, bytes_per_s=1.3e9),
    "20 GB/s, hosts of 0.1 ms": replace(DESIGNED, bytes_per_s=20e9),
    "links' rate, hosts of 0.3 ms": replace(
        DESIGNED, attention_host_s=300e-6, expert_host_s=300e-6
    ),
    "links' rate, hosts of 0.1 ms": DESIGNED,
    "links' rate, hosts and messages of 0.02 ms": Overheads(20e-6, 20e-6, 20e-6, 2e-6, inf),
}
SYSTEMS = ("synchronous", "half batches", "libra", "libra, half batches", "async")
CLOSE = 0.05  # ways within it of the fastest count as equal: the simpler is taken


def eight_devices(dry: bool) -> list[dict[str, Any]]:
    """Compares models, skews and loads on eight devices."""
    if dry:
        return compare_all([Case("mixtral-8x7b", 2, 4, 16, 0.5, False)])
    return compare_all(
        Case(model, top_k, 8, in_flight, skew, same)
        for model, top_k in MODELS
        # Of a row with eight picks the simulator has four times the work: two skews will do.
        for skew, same in (SKEWS if top_k < 8 else SKEWS[::2])
        for in_flight in LOADS
    )


def more_devices(_: bool) -> list[dict[str, Any]]:
    """Compares on meshes of up to 512; as many experts as devices, where a model has fewer."""
    sizes = [(16, 8192), (16, 32768), (32, 32768), (64, 8192), (64, 32768)]
    some = [Case("mixtral-8x7b", k, d, n, 0.5, False) for d, n in sizes for k in (1, 2)]
    some += [Case("mixtral-8x7b", 2, 64, 32768, 0.5, True)]
    some += [Case("qwen3-30b-a3b", 8, 16, 8192, 0.5, False)]
    return compare_all(
        [*some, *(Case("mixtral-8x7b", 1, d, 32768, 0.5, False) for d in (128, 512))]
    )


def compare_all(some: Iterable[Case]) -> list[dict[str, Any]]:
    """Compares the systems on each case and says so in a line."""
    found = []
    for case in some:
        found.append(cases.compare(case, DESIGNED))
        rates = {k: round(v["tokens_per_s"]) for k, v in found[-1]["systems"].items()}
        print(f"{_name(found[-1])}, {case.in_flight} in flight: {rates}", flush=True)
    return found


def paper(_: bool) -> dict[str, Any]:
    """Returns the paper's machine: its 2.7 times in parts."""
    parts = []
    for top_k in (1, 2):
        for same in (True, False):
            case = replace(PAPER, top_k=top_k, same=same)
            mesh = case.mesh(0)
            slow = replace(mesh, layer_overhead_s=LAYER_OVERHEAD_S)
            ideal, itl_s = synchronous.tokens_per_s(mesh, case.in_flight)
            rates = {
                "ideal": ideal,
                "capped": synchronous.tokens_per_s(mesh, CAP)[0],
                "baseline": synchronous.tokens_per_s(slow, CAP)[0],
            }
            for name, over in (("async", NO_OVERHEADS), ("async with its host", PAPER_OVERHEADS)):
                # Four and four, as in the paper; attention takes all rows that there are.
                system = replace(case.system(4, 0, over), max_attention_rows=UNLIMITED)
                run = play(system, case.in_flight, cases.pickers_of(system, case.in_flight), itl_s)
                rates[name] = run.tokens_per_s
            parts.append({"top_k": top_k, "same": same} | rates)
            print(f"paper top-{top_k} same {same}: {rates}", flush=True)
    return {"parts": parts}


def late(dry: bool) -> list[dict[str, Any]]:
    """Compares transports on sixteen devices, none of whose stages is late, and some."""
    found = []
    for late in (HICCUPS,) if dry else (ON_TIME, HICCUPS):
        case = replace(REGIME, late=late, **({"devices": 4, "in_flight": 16} if dry else {}))
        systems = cases.together(case)
        best = max(one["tokens_per_s"] for one in systems.values())
        for name, over in TRANSPORTS.items():
            guess_s, least = systems["synchronous"]["itl_ms"] / 1e3, cases.least_attention(case)
            run = cases.best_async(case, guess_s, over, least=least)
            ratio = run["tokens_per_s"] / best
            made = {"device": case.device.name, "transport": name, "ratio_to_best": ratio}
            found.append(asdict(case) | made | {"systems": systems | {"async": run}})
            print(f"{late}, {name}: {ratio:.2f}", flush=True)
    return found


PARTS: dict[str, Callable[[bool], Any]] = {
    "eight": eight_devices,
    "more": more_devices,
    "paper": paper,
    "late": late,
}
DRY = ("eight", "late")
"""The parts of a dry run; of a study without it, all."""


def table(found: dict[str, Any]) -> list[str]:
    """Returns the tables of every part that is there."""
    rows = [*found.get("eight", []), *found.get("more", [])]
    lines = [*by_case(rows), "", *ways(rows)] if rows else []
    for name, part in (("paper", _paper), ("late", by_transport)):
        if name in found:
            lines += ["", *part(found[name])]
    return lines


def _name(row: dict[str, Any]) -> str:
    order = "uniform" if not row["skew"] else "same" if row["same"] else "different"
    return f"{row['model']} top-{row['top_k']}, {row['devices']} devices, {row['skew']:g} {order}"


def by_case(rows: list[dict[str, Any]]) -> list[str]:
    """Returns thousands of tokens a second, and the asynchronous one's ratios."""
    cells = []
    for row in rows:
        systems, at = row["systems"], row["systems"]["async"]
        rates = [f"{systems[name]['tokens_per_s'] / 1e3:,.1f}" for name in SYSTEMS]
        ratios = [f"{row[key]:.2f}" for key in ("ratio", "ratio_to_best")]
        itls = f"{systems['synchronous']['itl_ms']:.0f}, {at['itl_ms']:.0f}"
        fits = "" if row["sequences_that_fit_async"] >= row["in_flight"] else " †"
        split = f"{at['attention_devices']}, {at['wait_ms']:g}"
        cells.append([_name(row), f"{row['in_flight']:,}{fits}", *rates, *ratios, itls, split])
    heads = ["case (†: its KV does not fit)", "in flight", *SYSTEMS, "async / synchronous"]
    heads += ["async / best other", "ITL ms: sync, async", "attention devices, wait ms"]
    return markdown(heads, cells)


def ways(rows: list[dict[str, Any]]) -> list[str]:
    """Returns how often each way is the simplest within 5 % of the fastest that fits."""
    found: dict[tuple[str, ...], tuple[Counter[str], Counter[str]]] = {}
    for row in sorted(rows, key=lambda row: (row["devices"] > NODE, row["in_flight"])):
        rates = {name: row["systems"][name]["tokens_per_s"] for name in SYSTEMS}
        if row["sequences_that_fit_async"] < row["in_flight"]:
            del rates["async"]
        way = next(n for n in rates if rates[n] >= (1 - CLOSE) * max(rates.values()))
        size = "one node" if row["devices"] <= NODE else "several nodes"
        experts = "large" if row["model"].startswith("mixtral") else "small"
        key = size, experts, f"{row['in_flight']:,}"
        found.setdefault(key, (Counter(), Counter()))[bool(row["skew"])][way] += 1
    cells = [
        [*key, *("; ".join(f"{way} {n}" for way, n in one.most_common()) for one in counts)]
        for key, counts in found.items()
    ]
    return markdown(["devices", "experts", "in flight", "even", "uneven"], cells)


def by_transport(rows: list[dict[str, Any]]) -> list[str]:
    """Returns what asynchrony makes over the best synchronous way, by transport; ITL beside it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        own = row["systems"]["async"]
        said = f"{row['ratio_to_best']:.2f} ({own['itl_ms']:.0f} ms)"
        found.setdefault(row["transport"], []).append(said)
    for name in SYSTEMS[:-1]:
        each = {tuple(row["late"]): row["systems"] for row in rows}.values()
        bests = [max(v["tokens_per_s"] for k, v in all.items() if k != "async") for all in each]
        found[name] = [
            f"{all[name]['tokens_per_s'] / best:.2f} ({all[name]['itl_ms']:.0f} ms)"
            for all, best in zip(each, bests, strict=True)
        ]
    lates = dict.fromkeys(tuple(row["late"]) for row in rows)
    heads = ["rows travel at, hosts take", *(_lateness(late) for late in lates)]
    return markdown(heads, [[name, *said] for name, said in found.items()])


def _lateness(late: tuple[float, float]) -> str:
    factor, share = late
    return f"{100 * share:g} % of stages take {factor:g} times as long" if share else "none late"


def _paper(found: dict[str, Any]) -> list[str]:
    """Returns the paper's machine: its ratio in parts."""
    rows = []
    for one in found["parts"]:
        free, real = one["async"], one["async with its host"]
        ideal, capped, slow = one["ideal"], one["capped"], one["baseline"]
        parts = (free / ideal, real / free, ideal / capped, capped / slow, real / slow)
        name = f"top-{one['top_k']}, {'same' if one['same'] else 'different'}"
        rows.append([name, *(f"{part:.2f}" for part in parts)])
    heads = ["", "asynchrony itself", "its host", "baseline's cap", "baseline's host"]
    return markdown([*heads, f"in all; printed: {PAPERS['aep']['speed_up']}"], rows)
