"""`jmoe bench balance`: how even the devices of a mesh are, without and with copies of experts.

A server for each variant gets the same requests, prompts of few task families, so that some experts
are visited far more than others. A part of the load is played first, for the copies that stay to
find their places; what is measured is the rest, by the server's own metrics.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop
from jaxtyping import Float

from serving.bench.facts import facts
from serving.bench.launch import ready_server, set_flags
from serving.bench.loadgen import play
from serving.bench.results import summarize
from serving.bench.scrape import Samples, free_port, scrape, value
from serving.bench.workload import BUNDLED_TASKS, Arrival, WorkloadError, load_tasks
from serving.client import Client
from serving.settings.reading import mesh_devices

PER_PAIR = 2  # copies of a layer that one device sends another
NEW_TOKENS = 8  # each request, so that decode steps are measured as well
PROMPT_TASKS = 3  # joined to a prompt, the last one without its answer
FIRST_SHARE = 0.5  # of the requests: played besides, before the measured ones
TIME_LIMIT_S = 1800.0
PHASES = ("prefill", "decode")
MEGABYTE = 1e6


class Variant(NamedTuple):
    """One way to copy experts."""

    name: str
    words: str
    replicas: bool
    spare_slots: bool


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("none", "no copies", False, False),
        Variant("replicas", "copies while a step runs", True, False),
        Variant("spare", "copies that stay", False, True),
        Variant("both", "both kinds of copies", True, True),
    )
}

SMALL = {
    "dtype": "float32",
    "max_model_len": "256",
    "page_size": "16",
    "max_prefill_tokens": "256",
    "max_prefill_seqs": "4",
    "prefill_buckets": "256",
    "threshold_buckets_percent": "100",
    "brownout.ways": "8",
}
"""The bundled model's sizes: one program a phase, and prefill steps of a thousand tokens. United
experts of one way alone: they are placed like others, and without brownout nothing visits them."""


@dataclass(frozen=True)
class BalanceBenchConfig:
    """What is played.

    Raises ValueError for what leaves nothing to compare: an unknown variant, a mesh of one device,
    fewer requests than devices, more copies than there are other devices' experts.
    """

    model: str = "bundled"  # or a directory
    mesh: str = "ep=8"
    variants: tuple[str, ...] = tuple(VARIANTS)
    families: tuple[str, ...] = ("fact",)  # of the bundled tasks; the fewer, the more uneven
    requests: int = 256
    seed: int = 0
    replicas: int = 4  # a layer and device, where copies are made while a step runs
    spare_slots: int = 2  # a layer and device, where copies stay
    out: Path = Path("out")  # table, picture, JSON, server logs
    server: tuple[str, ...] = ("-m", "serving.cli", "serve", "--port", "0")
    server_args: tuple[str, ...] = ()  # more flags for the server
    startup_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        """Checks what needs no model."""
        for name in self.variants:
            if name not in VARIANTS:
                raise ValueError(f"variant {name!r} is unknown; there are {', '.join(VARIANTS)}")
        if not self.variants:
            raise ValueError(f"variants is empty; name some of {', '.join(VARIANTS)}")
        if self.num_devices < 2:
            raise ValueError(
                f"mesh is {self.mesh!r}; it must be ep=N with 2 devices or more: there is nothing "
                "to balance on one"
            )
        if self.requests < self.num_devices:
            raise ValueError(
                f"requests is {self.requests}; a mesh of {self.num_devices} devices needs as many "
                "or more"
            )
        for name in ("replicas", "spare_slots"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be 1 or more. The variant that has "
                    "no copies is none (--variants none)"
                )

    @property
    def num_devices(self) -> int:
        """Devices of the mesh; 1 without a mesh."""
        return mesh_devices(self.mesh)

    def check_experts(self, num_experts: int) -> None:
        """Raises ValueError for more copies than a model of `num_experts` has use for."""
        from jmoe.parallel.cost import check_copies

        check_copies(
            num_experts,
            self.num_devices,
            replicas=self.replicas,
            per_pair=PER_PAIR,
            spare_slots=self.spare_slots,
        )


def run_balance(config: BalanceBenchConfig, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Plays every variant; prints and stores table, picture and JSON.

    Raises ValueError where the model has too few experts, CheckpointError where it is none,
    LaunchError where a server does not come up, or WorkloadError for families that are none.
    """
    from jmoe.api import resolve
    from jmoe.checkpoint import config_of

    config.check_experts(config_of(resolve(config.model)).num_experts)
    return uvloop.run(_run(config, say))


async def _run(config: BalanceBenchConfig, say: Callable[[str], None]) -> dict[str, Any]:
    tasks = of_families(load_tasks(BUNDLED_TASKS), config.families)
    first = prompts(tasks, int(FIRST_SHARE * config.requests), config.seed + 1)
    measured = prompts(tasks, config.requests, config.seed)
    config.out.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {}
    runs = []
    for name in config.variants:
        say(f"{VARIANTS[name].words}: {config.requests} requests")
        metrics_port = free_port()
        async with _server(config, VARIANTS[name], metrics_port) as client:
            known = known or await facts(client)
            await play(client, first, time_limit_s=TIME_LIMIT_S)
            before = await scrape(metrics_port)
            run = await play(client, measured, time_limit_s=TIME_LIMIT_S)
            after = await scrape(metrics_port)
        summary = summarize(run)
        words = {"variant": name, "words": VARIANTS[name].words, "failed": summary["failed"]}
        rate = {"tokens_per_s": summary["total_token_throughput"]}
        runs.append(words | between(before, after) | rate)
    keys = ("model", "mesh", "variants", "families", "requests", "seed", "replicas", "spare_slots")
    result = {
        **known,
        "date": datetime.now().isoformat(timespec="seconds"),
        "config": {key: asdict(config)[key] for key in keys},
        "runs": runs,
    }
    (config.out / "balance_served.json").write_text(json.dumps(result, indent=1) + "\n")
    (config.out / "balance_served.txt").write_text(table(result) + "\n")
    say(table(result))
    draw(result, config.out / "balance_served.png")
    say(f"picture: {config.out / 'balance_served.png'}")
    return result


def of_families(tasks: Sequence[Arrival], families: Sequence[str]) -> list[Arrival]:
    """Returns the tasks of some families. Raises WorkloadError for an unknown family."""
    known = sorted({task.family for task in tasks})
    for family in families:
        if family not in known:
            raise WorkloadError(f"task family {family!r} is unknown; there are {', '.join(known)}")
    if not families:
        raise WorkloadError(f"no task family is named; there are {', '.join(known)}")
    return [task for task in tasks if task.family in families]


def prompts(tasks: Sequence[Arrival], num: int, seed: int) -> list[Arrival]:
    """Returns `num` requests, all at once: solved tasks and an unsolved one, drawn by the seed."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num):
        *solved, last = (tasks[i] for i in rng.integers(len(tasks), size=PROMPT_TASKS))
        texts = [*(f"{task.prompt}{task.answer}" for task in solved), last.prompt]
        text = "\n".join(map(str, texts))
        found.append(Arrival(text, NEW_TOKENS, family=last.family, ignore_eos=True))
    return found


def variant_settings(config: BalanceBenchConfig, variant: Variant) -> dict[str, str]:
    """Returns the settings of a variant's server.

    No brownout, which changes who is visited; whole steps, which count as one each; and a mover
    that has looked before the first requests are over.
    """
    settings = {"model": config.model, "mesh": config.mesh, "max_queue_len": "1000000"}
    settings |= {"brownout.strategy": "zero", "part_layers": "1000000"}
    if config.model == "bundled":
        settings |= SMALL | {"max_num_seqs": str(4 * config.num_devices), "decode_buckets": "4"}
    if variant.replicas:
        settings |= {"balance.replicas": str(config.replicas)}
        settings |= {"balance.replicas_per_pair": str(PER_PAIR)}
    settings |= {"balance.spare_slots": str(config.spare_slots if variant.spare_slots else 0)}
    settings |= {"balance.interval_s": "1"} if variant.spare_slots else {}
    settings = {f"engine.{key}": value for key, value in settings.items()}
    own = {flag.partition("=")[0] for flag in config.server_args}
    return {key: value for key, value in settings.items() if key not in own}


def _server(
    config: BalanceBenchConfig, variant: Variant, metrics_port: int
) -> AbstractAsyncContextManager[Client]:
    settings: dict[str, object] = {**variant_settings(config, variant)}
    settings |= {"metrics_port": metrics_port, "max_concurrent_calls": 100_000}
    command = [*config.server, *set_flags(settings), *config.server_args]
    log = config.out / f"server-{variant.name}.log"
    return ready_server(command, log, config.startup_timeout_s)


# -- what a server's metrics say of its mesh between two scrapes -----------------------------------


def rows_by_device(samples: Samples) -> Float[np.ndarray, "layers D"]:
    """Returns the rows that each device's experts computed, by MoE layer; [0, 0] without a mesh."""
    found = {
        (int(dict(labels)["layer"]), int(dict(labels)["device"])): rows
        for (name, labels), rows in samples.items()
        if name == "jmoe_device_expert_rows_total"
    }
    rows = np.zeros([max((at[axis] for at in found), default=-1) + 1 for axis in (0, 1)])
    for at, count in found.items():
        rows[at] = count
    return rows


def heat(before: Samples, after: Samples) -> Float[np.ndarray, "layers D"]:
    """Returns each device's load between two scrapes over its layer's mean; 1 where a layer had
    none.
    """
    rows, earlier = rows_by_device(after), rows_by_device(before)
    if earlier.size:
        rows = rows - earlier
    mean = rows.mean(axis=1, keepdims=True) if rows.size else rows
    return np.divide(rows, mean, out=np.ones_like(rows), where=mean > 0)


def between(before: Samples, after: Samples) -> dict[str, Any]:
    """Returns the mesh's figures between two scrapes; None for what did not occur.

    `imbalance` is the mean over steps, by phase. Two are since the server's start: `padded_share`,
    as the metric is, and `placed`, as most copies that stay are placed before the first scrape.
    """

    def more(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    imbalance, steps = {}, {}
    for phase in PHASES:
        count = more("imbalance_ratio_count", phase=phase)
        total = more("imbalance_ratio_sum", phase=phase)
        imbalance[phase] = total / count if count else None
        steps[phase] = int(count)
    expected = more("expected_visits_total")
    return {
        "imbalance": imbalance,
        "steps": steps,
        "right_share": more("expected_visits_right_total") / expected if expected else None,
        "copied": int(more("experts_copied_total")),
        "placed": int(value(after, "experts_placed_total")),
        "copy_bytes": int(more("expert_copy_bytes_total")),
        "padded_share": value(after, "padded_rows_perc"),
        "heat": heat(before, after).tolist(),
    }


def table(result: Mapping[str, Any]) -> str:
    """Returns a table with a line for each variant."""
    platform = result["machine"]["platform"].split()[0]
    head = f"{'':10} {'imbalance: prefill':>18} {'decode':>7} {'foreseen right':>14}"
    head += f" {'copied':>8} {'placed':>6} {'copies, MB':>10} {'padded':>7} {'failed':>6}"
    lines = [head + f" {f'tokens/s on this {platform}':>21}"]
    for run in result["runs"]:
        prefill, decode = (_number(run["imbalance"][phase]) for phase in PHASES)
        right = "-" if run["right_share"] is None else f"{100 * run['right_share']:.1f} %"
        lines.append(
            f"{run['variant']:10} {prefill:>18} {decode:>7} {right:>14} {run['copied']:8}"
            f" {run['placed']:6} {run['copy_bytes'] / MEGABYTE:10.1f}"
            f" {100 * run['padded_share']:5.1f} % {run['failed']:6} {run['tokens_per_s']:21.0f}"
        )
    return "\n".join(lines)


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws a heat map for each variant, as PNG: load of each device over the mean, by MoE
    layer.
    """
    from jmoe.extras import pyplot  # not above: it would bring jax

    plt = pyplot()

    runs: Sequence[Mapping[str, Any]] = result["runs"]
    figure, axes = plt.subplots(
        1, len(runs), figsize=(5.2 * len(runs), 4.2), dpi=100, squeeze=False, layout="constrained"
    )
    image = None
    for axis, run in zip(axes[0], runs, strict=True):
        loads = np.array(run["heat"])
        image = axis.imshow(loads, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
        if loads.size <= 128:  # else they would not be read
            for (layer, device), load in np.ndenumerate(loads):
                dark = abs(load - 1) > 0.6
                color = "white" if dark else "black"
                axis.text(device, layer, f"{load:.2f}", ha="center", va="center", color=color)
        ratios = (f"{phase} {_number(run['imbalance'][phase])}" for phase in PHASES)
        axis.set_title(f"{run['words']}\nimbalance: {', '.join(ratios)}", fontsize=11)
        axis.set_xlabel("device")
        axis.set_ylabel("MoE layer")
        axis.set_xticks(range(loads.shape[1]))
        axis.set_yticks(range(loads.shape[0]))
    if image is not None:
        figure.colorbar(image, ax=axes[0].tolist(), label="load over the layer's mean")
    figure.savefig(path)
    plt.close(figure)
