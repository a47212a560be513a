"""Hugging Face transformers' continuous batching: the same weights, prompts, lengths and batch.

Its counterpart is the serve part's `offline` cases: all requests at once, a batch in flight.
PyTorch runs in a process of its own (`torch_generate`), and what goes wrong there is kept.
"""

import importlib.util
import itertools
from typing import Any

from benchmarks.gpu import torch_generate
from benchmarks.gpu.live import requests
from benchmarks.gpu.part import Case, Context, alone, in_a_process
from benchmarks.gpu.sizes import SETTINGS, ZERO, Sizes
from benchmarks.gpu.startup_part import checkpoint

DEPENDS = (
    "benchmarks/gpu/hf_dir.py",
    "benchmarks/gpu/torch_generate.py",
    "jmoe/random_model.py",
    "serving/bench/workload.py",
)
START_S = 1.0


def cases(sizes: Sizes) -> list[Case]:
    """Returns a single case, since the model is loaded once for all mixes."""
    return [Case("continuous-batching", 330.0, {"max_batch": sizes.batch})]


def run(context: Context, case: Case) -> dict[str, Any]:
    """Runs PyTorch; returns the record: figures by mix, or why a mix has none."""
    sizes = context.sizes
    if sizes.dry and importlib.util.find_spec("torch") is None:
        return {"figures": {}, "skipped": "a dry run without PyTorch"}
    asked: dict[str, Any] = {
        mix.name: [
            [list(one.prompt), one.max_new_tokens]
            for one in requests(sizes, mix, sizes.transformers_requests)
        ]
        for mix in sizes.mixes
    }
    found = in_a_process(torch_generate.run, checkpoint(context), asked, sizes.batch)
    mixes = {name: found.pop(name) for name in asked}
    record: dict[str, Any] = {
        "figures": {
            f"{name}_tokens_s": mix["output_tokens_s"]
            for name, mix in mixes.items()
            if "error" not in mix
        },
        "mixes": mixes,
        "library": found,
    }
    for name, setting in itertools.product(mixes, (ZERO, SETTINGS[-1])):
        ours = context.kept.records("serve").get(f"offline/{name}/{setting.name}", {})
        theirs_s = record["figures"].get(f"{name}_tokens_s")
        if theirs_s and "figures" in ours:
            ratio = ours["figures"]["output_tokens_s"] / theirs_s
            record["figures"][f"{name}_jmoe_{setting.name}_over_it"] = ratio
    wrong = [f"{name}: {mix['error']}" for name, mix in mixes.items() if "error" in mix]
    if wrong:
        record["failed"] = "; ".join(wrong)
    return record


session = alone(run)
