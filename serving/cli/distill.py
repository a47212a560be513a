"""`jmoe distill`: flags for `training.distill`."""

import dataclasses
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serving.cli.options import AllowUnknownConfig, HubRevision, of_fields
from serving.telemetry import logs
from serving.telemetry.progress import progress_bar

if TYPE_CHECKING:
    from training.distill import DistillConfig


def distill(
    model: Annotated[str, typer.Option()],
    data: list[Path] | None = None,
    out: Path | None = None,
    sampled: int | None = None,
    ways: str | None = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "--plan")] = False,
    device_memory_gib: float = 0.0,
    devices: int = 0,
    objective: str = "combined",
    start: str = "most_used",
    grouping: str = "index",
    rows: int = 65_536,
    steps: int = 600,
    batch: int = 4096,
    decode_batch: int = 64,
    learning_rate: float = 0.0,
    held_out: float = 0.05,
    patience: int = 4,
    eval_every: int = 100,
    refine_steps: int = 600,
    refine_rows: int = 32,
    refine_learning_rate: float = 0.0,
    length: int = 128,
    dtype: str = "bfloat16",
    optimizer: str = "adam",
    schedule: str = "cosine",
    log_dir: Path | None = None,
    levels_items: int = 0,
    coordinator: str = "",
    num_processes: int = 1,
    process_index: int = 0,
    hub_revision: HubRevision = "",
    seed: int = 0,
    allow_unknown_config: AllowUnknownConfig = None,
) -> None:
    """Distils united experts for serving under brownout.

    Prints what the run will take, and begins. Killed at any moment, the same command goes on where
    it was; a finished run is left as it is. The last line is the command that serves the result.

    Args:
        model: Model directory, or OWNER/NAME of the Hub.
        data: Texts: JSON lines or Parquet with prompt and answer, with text or with messages, or
            plain text. May be repeated.
        out: Folder for united.safetensors and the report.
        sampled: Number of texts that the model writes itself, of up to 80 tokens, to train on
            beside --data (in --out). Default: 10000 if a device holds the model whole.
        ways: Ways, separated by commas. Default: those of 2,4,8 that fit.
        dry_run: Print what the run will take, and exit. Needs no weights.
        device_memory_gib: With --dry-run: plan for GPUs with this much memory. 0: this machine.
        devices: With --dry-run: plan for this many devices. 0: those of this machine.
        objective: Training objective: combined, routed, or equation4 (the paper's).
        start: What united experts start from: most_used, mean or aligned.
        grouping: How experts are grouped: index, similarity or coactivation.
        rows: Number of captured rows (tokens) per layer.
        steps: Most training steps per layer and way.
        batch: Number of rows in a training step.
        decode_batch: Number of rows among which brownout chooses, as in a decode step.
        learning_rate: Learning rate. 0: 0.034 / sqrt(d_model).
        held_out: Share of rows held out to measure.
        patience: Number of evaluations without gain that end a layer. 0: no limit.
        eval_every: Number of steps between evaluations.
        refine_steps: Number of end-to-end steps per way. 0: none.
        refine_rows: Number of packed rows in an end-to-end step.
        refine_learning_rate: Learning rate of end-to-end steps. 0: two thirds of the layers'.
        length: Number of tokens in a packed row.
        dtype: Data type of matrix products: bfloat16 or float32.
        optimizer: Optimizer: adam, adamw, lion or sgd.
        schedule: Learning rate after the warmup: cosine, linear or constant.
        log_dir: Folder for the losses: JSON lines, and events for TensorBoard.
        levels_items: Then measure what to expect brownout to cost (expected_loss.json) on twice as
            many tasks of the first --data, and search thresholds by layer (levels.json) on half of
            them: some 170 passes over them a way. 0: do not.
        coordinator: HOST:PORT of process 0, where several processes, on one machine or more, train
            together; each reads the model and the data, and --out is one folder for all.
        num_processes: With --coordinator: how many.
        process_index: With --coordinator: which this is, from 0.
        seed: Seed of rows and of their order.
    """
    flags = locals()
    from training.evaluation.items import integers, read_tasks

    numbers = None if ways is None else integers("ways", ways)
    if device_memory_gib and not dry_run:
        raise ValueError("--device-memory-gib is for --dry-run; a run uses the memory there is")
    if devices and not dry_run:
        raise ValueError("--devices is for --dry-run; a run uses the devices that jax sees")
    if device_memory_gib < 0 or devices < 0:
        raise ValueError(
            f"--device-memory-gib is {device_memory_gib:g} and --devices {devices}; neither can be "
            "negative"
        )
    if not coordinator and (num_processes, process_index) != (1, 0):
        raise ValueError(
            f"--num-processes is {num_processes} and --process-index {process_index}: name "
            "--coordinator, too"
        )
    from training.distill import DistillConfig
    from training.distill.parallel import join

    config = of_fields(DistillConfig, flags)
    if coordinator:
        join(coordinator, num_processes, process_index)
    allowed = tuple(allow_unknown_config or ())
    from jmoe.api import resolve

    if dry_run:
        if sampled != 0:
            logs.say("texts that the model will write itself are not in these figures")
        directory = resolve(model, hub_revision, weights=False)
        _plan(directory, numbers, data or [], out, config, allowed, device_memory_gib, devices)
        return
    if not data or out is None:
        missing = "--out" if data else "--data"
        raise ValueError(f"{missing} is missing; only --dry-run does without it")
    if levels_items < 0:
        raise ValueError(f"--levels-items is {levels_items}; it must be 0 or more")
    # Before hours of training.
    if levels_items and (found := len(read_tasks(data[0]))) < 2 * levels_items:
        raise ValueError(
            f"--levels-items is {levels_items} and takes {2 * levels_items} tasks; {data[0]} "
            f"holds {found}"
        )
    directory = resolve(model, hub_revision)
    made = _run(directory, numbers, data, out, config, allowed, log_dir)
    if process_index > 0:
        return
    if levels_items:
        _measure(directory, made, data[0], out, levels_items, dtype, allowed)
    print(_serve_command(directory, out, allowed, with_tables=levels_items > 0))


def _plan(
    model: Path,
    ways: list[int] | None,
    data: Sequence[Path],
    out: Path | None,
    config: "DistillConfig",
    allowed: Sequence[str],
    device_memory_gib: float,
    devices: int,
) -> None:
    """Prints what a run would take, here or on so many GPUs with so much memory each."""
    from training.distill.plan import GIB, H200_RATE, measure
    from training.distill.prepare import prepare
    from training.distill.room import Room, room_here

    if device_memory_gib:
        room = Room("gpu", devices or 1, int(device_memory_gib * GIB), None, None)
    else:
        room = room_here(out)
        room = dataclasses.replace(room, num_devices=devices or room.num_devices)
    _, plan = prepare(model, ways, data, out, config, allowed, need_data=False, room=room)
    timing = None
    if not device_memory_gib and not plan.refusal:
        timing = measure(plan, lambda what: logs.say(f"timing {what}"))
    for line in plan.lines(timing, H200_RATE if device_memory_gib else None):
        print(line, flush=True)
    if plan.refusal:
        raise ValueError(plan.refusal)


def _measure(
    model: Path,
    ways: Sequence[int],
    data: Path,
    out: Path,
    count: int,
    dtype: str,
    allowed: Sequence[str],
) -> None:
    """Writes `expected_loss.json`, `levels.json` and `sensitivity.md` of the model with the united
    experts in `out`.
    """
    from jmoe.expected_loss import FILE
    from training.distill import beside
    from training.evaluation.items import grid
    from training.evaluation.run import EvaluateConfig, evaluate
    from training.evaluation.sensitivity import evaluate_levels

    with tempfile.TemporaryDirectory() as folder, progress_bar() as progress:
        both = beside(model, out, Path(folder) / model.name)
        config = EvaluateConfig(
            model=str(both),
            dtype=dtype,
            data=data,
            num=2 * count,
            out=out,
            allow_unknown_config=tuple(allowed),
        )
        settings = grid(ways, range(90, -1, -10), ["partial"], ["weight"])
        priced = dataclasses.replace(config, error_steps=1, out=Path(folder) / "evaluate")
        evaluate(priced, settings, progress)
        shutil.copy(priced.out / FILE, out)
        evaluate_levels(config, ways, "weight", count, progress)


def _serve_command(
    model: Path, out: Path, allowed: Sequence[str], *, with_tables: bool = False
) -> str:
    """Returns the shell command that serves the model with the united experts in `out`."""
    from jmoe import expected_loss, levels
    from jmoe.checkpoint import UNITED_FILE

    unknown = (word for key in allowed for word in ("--allow-unknown-config", key))
    serve = shlex.join(["jmoe", "serve", str(model), *unknown])
    if out.resolve() == model.resolve():
        return serve
    tables = [expected_loss.FILE, levels.FILE] if with_tables else []
    files = [str(out / name) for name in (UNITED_FILE, *tables)]
    return f"{shlex.join(['cp', *files, str(model)])} && {serve}"


def _run(
    model: Path,
    ways: list[int] | None,
    data: Sequence[Path],
    out: Path,
    config: "DistillConfig",
    allowed: Sequence[str],
    log_dir: Path | None,
) -> list[int]:
    """Returns the ways that there are now."""
    from training.distill import DistillError
    from training.distill import distill as run

    say = partial(print, flush=True)
    try:
        with progress_bar() as progress:
            layers, refined = run(model, ways, data, out, config, progress, allowed, say, log_dir)
    except DistillError as error:
        raise ValueError(str(error)) from error
    made = ways or sorted({result.way for result in layers})
    for way in made:
        own = [result for result in layers if result.way == way]
        before = sum(result.error_before for result in own) / len(own)
        after = sum(result.error_after for result in own) / len(own)
        print(f"way {way}: relative error {before:.3f}, after training {after:.3f}")
    for result in refined:
        print(f"way {result.way}: divergence {result.before:.4f}, refined {result.after:.4f}")
    print(f"report: {out / 'distill.md'}")
    return made
