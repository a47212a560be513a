"""Reckons from which imbalance copies of experts while a step runs take less time than they save,
with rows sorted for all visits and with rows sorted in passes. Arithmetic only.

Qwen3-235B-A22B in bfloat16 over eight H200s, by `jmoe.parallel.cost`.
"""

import math
from typing import Any

from benchmarks.harness.store import markdown
from jmoe.parallel.cost import LOOP_S, MeshStep
from serving.cli.model_info import load_model_config

DEVICES, DTYPE_BYTES, PER_PAIR = 8, 2, 2
TOKENS = (4096, 8192, 13_704, 16_384, 28_448, 32_768, 65_536)  # of a step, over all devices
IMBALANCES = (1.1, 1.25, 1.5, 2.0)
FORMS = {"all visits": math.inf, "passes": LOOP_S}
"""What a loop is taken to cost: where it is infinite, there is none."""


def rows(_: bool) -> list[dict[str, Any]]:
    """Returns, by tokens and form, the break-even and the milliseconds that a layer gains."""
    cfg = load_model_config("qwen3-235b-a22b")
    found = []
    for tokens in TOKENS:
        fit = MeshStep(cfg, DEVICES, tokens // DEVICES, DTYPE_BYTES).replicas_that_gain(PER_PAIR)[0]
        for form, loop_s in FORMS.items():
            step = MeshStep(cfg, DEVICES, tokens // DEVICES, DTYPE_BYTES, loop_s=loop_s)
            copying_s = step.layer_s(fit)
            gains = [1e3 * (step.layer_s(imbalance=one) - copying_s) for one in IMBALANCES]
            even = step.break_even(fit)
            shared = {"tokens": tokens, "copies": fit.num_replicas, "form": form}
            found.append(shared | {"break_even": even, "gain_ms": gains})
    return found


PARTS = {"break_even": rows}


def table(found: dict[str, Any]) -> list[str]:
    """Returns a Markdown table."""
    head = ["tokens a step", "copies", "sorted rows for", "break-even"]
    head += [f"ms a layer at {one:g}" for one in IMBALANCES]
    body = [
        [
            f"{row['tokens']:,}",
            row["copies"],
            row["form"],
            f"{row['break_even']:.2f}",
            *(f"{gain:+.2f}" for gain in row["gain_ms"]),
        ]
        for row in found["break_even"]
    ]
    return markdown(head, body)
