"""What is asked of the simulator: sizes, skew and load; host costs; the paper's 2.7; waves."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.aep_simulator import synchronous
from benchmarks.aep_simulator.asynchronous import Simulation, Traffic
from benchmarks.aep_simulator.core import NOW, PRODUCED
from benchmarks.aep_simulator.study import (
    PAPER,
    SPARE,
    Case,
    all_of,
    best_async,
    figures,
    mesh_of,
    play,
    split,
    system_of,
)
from jmoe.parallel.asynchronous import NO_OVERHEADS, Overheads
from serving.scheduling.layers.picker import LayerPicker, Waiting, make_picker

MODELS = (("mixtral-8x7b", 1), ("mixtral-8x7b", 2), ("qwen3-30b-a3b", 8))
SKEWS = ((0.0, False), (0.5, True), (0.5, False), (1.0, False))
LOADS = (256, 2048, 8192, 32768)
RULES = ("mtfs", "flfs", "defrag")
PAPER_OVERHEADS = Overheads(2.0e-3, 0.3e-3, 100e-6, 10e-6)
"""Figure 13: an attention step takes 2.7 ms and an expert step 0.8 ms in all. What of it is host's
is in the picture alone; taken is about what the roofline leaves of them at some 200 rows."""
CAPS = (None, 1280, 512, 256, 128)  # rows of a step, all devices together
LAYER_OVERHEADS_S = (0.0, 0.25e-3, 0.5e-3, 1e-3)  # of the baseline's host, a layer


def eight_devices(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns models, skews and loads on eight devices."""
    return all_of(_eight(), say, no_replicas_at=8192)


def _eight() -> Iterator[Case]:
    for model, top_k in MODELS:
        # Of a row with eight picks the simulator has four times the work: two skews will do.
        for skew, same in SKEWS if top_k < 8 else (SKEWS[0], SKEWS[2]):
            for in_flight in LOADS:
                yield Case(model, top_k, 8, in_flight, skew, same)


def more_devices(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Meshes of up to 512; as many experts as devices, where a model has fewer."""
    sizes = [(16, 8192), (16, 32768), (32, 32768), (64, 8192), (64, 32768)]
    cases = [Case("mixtral-8x7b", k, d, n, 0.5, False) for d, n in sizes for k in (1, 2)]
    cases += [Case("mixtral-8x7b", 2, 64, 32768, 0.5, True)]
    cases += [Case("qwen3-30b-a3b", 8, 16, 8192, 0.5, False)]
    cases += [Case("mixtral-8x7b", 1, d, 32768, 0.5, False) for d in (128, 512)]
    return all_of(iter(cases), say)


def host_cost(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns what a launch may cost: a stage's host and a message's way, alike for
    both workers.
    """
    found = []
    for model, top_k in MODELS[1:]:
        case = Case(model, top_k, 8, 8192, 0.5, False)
        rate, itl_s = synchronous.tokens_per_s(mesh_of(case, 0), case.in_flight)
        for micros in (0, 20, 50, 100, 200, 500):
            over = Overheads(micros * 1e-6, micros * 1e-6, micros * 1e-6, min(micros, 5) * 1e-6)
            run = best_async(case, SPARE, itl_s, over)
            found.append(
                {"model": model, "top_k": top_k, "host_us": micros}
                | run
                | {"ratio": run["tokens_per_s"] / rate}
            )
            say(f"host {micros} us, {model}: {found[-1]['ratio']:.2f}")
    return found


def paper(say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the paper's machine: its 2.7 times in parts, and throughput against ITL."""
    found: dict[str, Any] = {"decomposed": [], "curves": []}
    for top_k in (1, 2):
        for same in (True, False):
            case = replace(PAPER, top_k=top_k, same=same)
            ideal = synchronous.tokens_per_s(mesh_of(case, 0), case.in_flight)
            systems = [
                (name, spare, over)
                for name, over in (("free", NO_OVERHEADS), ("paper's", PAPER_OVERHEADS))
                for spare in (0, SPARE)
            ]
            asynchronous = {}
            for name, spare, over in systems:
                # Four and four, as in the paper.
                system = replace(system_of(case, 4, spare, over), max_attention_rows=1 << 60)
                picker = make_picker("defrag", Waiting(max_age_s=1.0))
                run = play(system, case.in_flight, (picker, picker), ideal[1])
                asynchronous[f"{name}, {spare} spare"] = figures(run)
            capped = [
                {"cap": cap, "layer_overhead_ms": 1e3 * extra_s}
                | dict(zip(("tokens_per_s", "itl_s"), _capped(case, cap, extra_s), strict=True))
                for cap in CAPS
                for extra_s in LAYER_OVERHEADS_S
            ]
            found["decomposed"].append(
                {"top_k": top_k, "same": same, "async": asynchronous, "synchronous": capped}
            )
            rates = {k: round(v["tokens_per_s"]) for k, v in asynchronous.items()}
            say(f"paper top-{top_k} same {same}: ideal {ideal[0]:.0f}, async {rates}")
    found["curves"] = [one for rule in RULES for one in _curve(rule)] + _synchronous_curves()
    return found


def _capped(case: Case, cap: int | None, extra_s: float) -> tuple[float, float]:
    mesh = replace(mesh_of(case, 0), layer_overhead_s=extra_s)
    return synchronous.tokens_per_s(mesh, min(case.in_flight, cap or case.in_flight))


def _curve(rule: str) -> Iterator[dict[str, Any]]:
    """Returns throughput and ITL by load, as figures 9 and 11 have them: top-1, layers that
    differ.
    """
    for in_flight in (64, 256, 1024, 2048, 4096, 8192, 16384):
        case = replace(PAPER, same=False, in_flight=in_flight)
        system = system_of(case, 4, SPARE, PAPER_OVERHEADS)
        system = replace(system, max_attention_rows=1 << 60)
        picker = make_picker(rule, Waiting(max_age_s=5.0))
        yield {"system": rule, "in_flight": in_flight} | figures(
            play(system, in_flight, (picker, picker), 0.1)
        )


def _synchronous_curves() -> list[dict[str, Any]]:
    found = []
    for in_flight in (64, 256, 512, 1024, 2048, 4096, 8192, 16384):
        case = replace(PAPER, same=False, in_flight=in_flight)
        rate, itl_s = _capped(case, None, 0.0)
        found.append(
            {"system": "synchronous", "in_flight": in_flight, "tokens_per_s": rate}
            | {"itl_ms": 1e3 * itl_s}
        )
        cap = 512
        if in_flight <= cap:
            rate, itl_s = _capped(case, cap, 0.5e-3)
            found.append(
                {"system": "capped", "in_flight": in_flight, "tokens_per_s": rate}
                | {"itl_ms": 1e3 * itl_s}
            )
    return found


WAVES = Case("mixtral-8x7b", 2, 8, 4096, 0.5, False)


def rates(rule: str, max_age_s: float, load: float) -> dict[str, Any]:
    """Returns the requests that come and go at a steady rate, as the paper's figure 12; eight of
    the layers.

    `load` is of the tokens that Algorithm 1 makes with 4,096 sequences that never end.
    """
    case = replace(WAVES, model="mixtral-8x7b")
    system = _short(case)
    busy = play(system, case.in_flight, _both("defrag", 1.0), 0.02)
    mean_tokens, until_s, bin_s = 20.0, 4.0, 0.1
    rate = load * busy.tokens_per_s / mean_tokens
    rng = np.random.default_rng(12)
    arrivals = np.cumsum(rng.exponential(1 / rate, int(rate * until_s)))
    lengths = rng.integers(10, 31, len(arrivals))
    simulation = Simulation(system, Traffic(30000, arrivals, lengths), _both(rule, max_age_s))
    state, out, before = simulation.state, [], 0
    for step in range(int(until_s / bin_s)):
        simulation.play((step + 1) * bin_s)
        state.seconds[NOW] = (step + 1) * bin_s
        out.append(int(state.numbers[PRODUCED] - before) / bin_s)
        before = int(state.numbers[PRODUCED])
    return {
        "rule": rule,
        "max_age_s": max_age_s,
        "bin_s": bin_s,
        "in_tokens_per_s": rate * mean_tokens,
        "out_tokens_per_s": out,
        "running_at_end": int(state.running.sum()),
        "itl_p99_ms": 1e3 * float(np.quantile(state.itls[state.itls > 0], 0.99)),
    }


def _both(rule: str, max_age_s: float) -> tuple[LayerPicker, LayerPicker]:
    picker = make_picker(rule, Waiting(max_age_s=max_age_s))
    return picker, picker


def _short(case: Case) -> Any:
    system = system_of(case, split(case, SPARE), SPARE)
    routing, placed = system.routing, system.placement
    return replace(
        system,
        routing=routing._replace(popularity=routing.popularity[:8], sets=routing.sets[:8]),
        placement=placed._replace(hosts=placed.hosts[:8], num_hosts=placed.num_hosts[:8]),
        max_attention_rows=1 << 60,
        times=system.times._replace(
            **{k: np.concatenate([getattr(system.times, k), _beyond(getattr(system.times, k))])
               for k in ("first_s", "attention_s", "products_s")}
        ),
    )  # fmt: skip


def _beyond(table: np.ndarray) -> np.ndarray:
    """As many rows again as eight times the table has: an open load has no bound."""
    step = table[-1] - table[-2]
    return table[-1] + step * np.arange(1, 8 * len(table))


def waves(say: Callable[[str], None]) -> dict[str, Any]:
    """Returns rates in and out of an open load, by rule."""
    found = {
        "rates": [
            rates(rule, age, 0.8)
            for rule, age in (("flfs", 100.0), ("flfs", 0.05), ("defrag", 100.0), ("mtfs", 100.0))
        ]
    }
    for one in found["rates"]:
        last = one["out_tokens_per_s"][-10:]
        say(
            f"rates {one['rule']} age {one['max_age_s']}: in {one['in_tokens_per_s']:.0f}, out "
            f"{np.mean(last):.0f}, running {one['running_at_end']}"
        )
    return found
