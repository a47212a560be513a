"""Quality of service of several models on one machine: Multi-MoE's Figure 4 and Tables 1 and 2.

`python -m benchmarks.family_qos --family DIR [--json FILE] [--picture FILE]`, where DIR is what
`python -m training.family --restore DIR` writes. Two models, then four, are asked by Poisson
arrivals at several rates, each request of as many tokens as the paper's and to a model that is
drawn by seed. The same trace is played against each alternative, one right after another, in an
order that changes:

- *one model alone*: all requests to the first model, which has the machine to itself.
- *one pool, all sets resident*: all models in one server, three quarters of what sharing experts
  can save is saved; and with *half of the sets resident* (`engine.resident_sets`), so that a model
  may be asked whose weights beside experts have to be copied first.
- *time sharing*, what a user without families would do: a server for each model, of which one
  works at a time. Real: the servers, each a process that may use the whole machine, and that what
  is under way finishes before another model's turn. A stand-in: all of them stay started, idle but
  for the one whose turn it is, and the benchmark copies as many bytes as the next model's weights
  take on the device, in fresh memory of its own, before that model's requests go on; a user would
  have the server copy them, or start a server. So what starting would take is not counted.
- *space sharing*: a server for each model, held to an equal part of the cores and of the slots and
  KV pages. With fewer cores than models several share a core. Memory bandwidth and caches are not
  split, as NVIDIA MIG would.

One client, one request at a time, says what sharing costs with nothing beside: against one model
alone, request by request; and with half of the sets, by whether one was copied (a change of
`jmoe_model_swaps_total` says so). The paper's Table 1 has experts that were not there; here all
experts are in the pool, and what may be missing is a model's other weights.

The load generator takes processor time from what it measures, as much from each alternative.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.family_qos.config import QosConfig
from benchmarks.family_qos.figures import tables
from benchmarks.family_qos.picture import draw
from benchmarks.family_qos.play import measure
from benchmarks.harness.command import write_figures
from serving.bench.calibrate import CalibrationError
from serving.bench.launch import LaunchError


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, writes the JSON file and the picture that are asked for, and prints the tables."""
    args = vars(_parser().parse_args(arguments))
    figures, picture = args.pop("json"), args.pop("picture")
    try:
        config = QosConfig(**{**args, "server_args": tuple(args["server_args"])})
        found = uvloop.run(measure(config, lambda text: print(text, file=sys.stderr, flush=True)))
    except (CalibrationError, LaunchError, ValueError) as error:
        sys.exit(f"family_qos failed: {error}")
    if figures:
        write_figures(figures, found)
    if picture:
        draw(found, picture)
    print("\n".join(tables(found)))
    return found


def _parser() -> argparse.ArgumentParser:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.family_qos", description=__doc__, formatter_class=words
    )

    def numbers(kind: type) -> Any:
        return lambda text: tuple(kind(part) for part in text.split(","))

    parser.add_argument("--family", type=Path, required=True, help="folder of the models")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--picture", type=Path, help="PNG")
    parser.add_argument("--out", type=Path, default=QosConfig.out, help="folder of server logs")
    for name, kind, about in (
        ("sizes", int, "numbers of models, with commas"),
        ("loads", float, "shares of what one model alone can do, with commas"),
    ):
        default = getattr(QosConfig, name)
        parser.add_argument(f"--{name}", type=numbers(kind), default=default, help=about)
    for name, about in (
        ("duration_s", "of arrivals, for each alternative, load and round"),
        ("rounds", "a trace each; figures are over all of them"),
        ("singles", "requests one at a time"),
        ("capacity_s", "of full batches of one model alone"),
        ("quantum_s", "of a model's term, where time is shared"),
        ("share", "percent of what sharing experts can save"),
        ("rows", "tokens a model that choose the shared experts"),
        ("slots", "sequences decoded together on the whole machine"),
        ("threads", "of XLA on the whole machine; 0: all cores but one"),
        ("prompt_tokens", "of a request"),
        ("output_tokens", "of its answer"),
        ("seed", "of prompts, arrivals and models"),
    ):
        default = getattr(QosConfig, name)
        flag = f"--{name.replace('_', '-')}"
        about = f"{about} (default: {default})"
        parser.add_argument(flag, type=type(default), default=default, help=about)
    parser.add_argument("server_args", nargs="*", help="after --: more flags of every server")
    return parser


if __name__ == "__main__":
    main()
