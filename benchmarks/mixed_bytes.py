"""The ceiling that bytes set to mixed decode steps, on paper: `python -m benchmarks.mixed_bytes`.

A decode step is bound by the weights it reads. All of a step's rows, of one model or of several,
are counted against one model's step with as many rows; a model of the family reads its own weights
beside experts, but for embeddings, of which a step reads a row a token. Routing is even: the more
uneven it is, the fewer experts a step visits, of one model or of several.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from jmoe.config import ModelConfig
from serving.cli.info import expert_parameters, load_model_config, num_parameters

MODELS = ("mixtral-8x7b", "qwen3-30b-a3b")
ROWS = (4, 16, 64, 256)  # of all models together
BYTES = 2  # a weight, in bfloat16


class Ceiling(NamedTuple):
    """Bytes that a step with some rows reads, or all steps that give each row one token."""

    single: float  # one model has all rows
    mixed: float  # the models have equal parts of them, in one step
    alternating: float  # the same parts, in a step for each model

    @property
    def of_single(self) -> float:
        """Throughput of mixed steps, of one model's with as many rows."""
        return self.single / self.mixed

    @property
    def over_alternating(self) -> float:
        """Throughput of mixed steps over alternating ones."""
        return self.alternating / self.mixed


def ceiling(cfg: ModelConfig, rows: float, shared: float, num_models: int = 2) -> Ceiling:
    """Weights alone. Of a layer's positions, the share `shared` has one expert for all models.

    A model that saturates has so many `rows` that every expert is visited: infinity is allowed.
    """
    experts = cfg.num_moe_layers * cfg.num_experts * expert_parameters(cfg) * BYTES
    own = num_parameters(cfg, 0) * BYTES
    if not cfg.tie_embeddings:
        own -= cfg.vocab_size * cfg.d_model * BYTES

    def visited(count: float) -> float:
        return 1 - (1 - cfg.experts_per_token / cfg.num_experts) ** count

    whole, part = visited(rows), visited(rows / num_models)
    single = own + experts * whole
    mixed = num_models * own + experts * (shared * whole + (1 - shared) * num_models * part)
    return Ceiling(single, mixed, num_models * (own + experts * part))


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=2)
    parser.add_argument("--shared-percent", type=int, default=75)
    args = parser.parse_args()
    table = Table("model", "rows", "of one model's throughput", "over alternating")
    for name in MODELS:
        cfg = load_model_config(Path(name))
        for rows in (*ROWS, float("inf")):
            found = ceiling(cfg, rows, args.shared_percent / 100, args.models)
            label = "saturated" if rows == float("inf") else str(rows)
            table.add_row(name, label, f"{found.of_single:.2f}", f"{found.over_alternating:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
