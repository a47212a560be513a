"""Remake the bundled model from nothing: data, tokenizer, training, export, united experts, tasks.

`python -m training.remake --out DIR` writes every file of `jmoe/bundled`. On two cores with bf16
matrix units it takes about an hour, nearly all of it training; an interrupted run goes on from its
newest checkpoint. Two runs with one seed and machine give the same files; another CPU rounds
differently, so it gives a model as good but not the same bytes.
"""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

WAYS = (2, 4, 8)
EVAL_ITEMS = 2000
DISTILL_ITEMS = 20_000

# glibc gives freed buffers back to the system and asks for them again every step; keeping them, in
# huge pages, makes a training step a third faster. Read at process start only.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "1000000000",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def remake(out: Path, run: Path, seed: int, steps: int | None) -> None:
    """Trains, exports and distils.

    Args:
        out: model directory to write.
        run: directory for checkpoints, of training and of distillation.
        seed: of everything.
        steps: training steps; None for the bundled model's.
    """
    from rich.progress import Progress, TaskID

    from jmoe.checkpoint import UNITED_FILE
    from training.distill import DistillConfig, distill
    from training.export import export_hf
    from training.geometry import HF_CONFIG
    from training.tasks import write_jsonl
    from training.train import TrainConfig, train

    began = time.monotonic()
    config = TrainConfig(seed=seed) if steps is None else TrainConfig(seed=seed, steps=steps)
    params = train(config, run)
    export_hf(HF_CONFIG, params, run, out)
    trained = time.monotonic()
    write_jsonl(out / "tasks.jsonl", "eval", EVAL_ITEMS, seed)
    data, united = run / "distill.jsonl", run / "united"
    write_jsonl(data, "train", DISTILL_ITEMS, seed + 1)
    with Progress() as bar:
        jobs: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int, text: str) -> None:
            if what not in jobs:
                jobs[what] = bar.add_task(what)
            bar.update(jobs[what], completed=done, total=total, description=f"{what} {text}")

        layers, refined = distill(out, WAYS, [data], united, DistillConfig(), progress)
    shutil.copyfile(united / UNITED_FILE, out / UNITED_FILE)
    for r in layers:
        print(f"way {r.way} layer {r.layer}: error {r.error_before:.3f} -> {r.error_after:.3f}")
    for r in refined:
        print(f"way {r.way}: divergence {r.before:.4f} -> {r.after:.4f} nats a token")
    print(f"training {trained - began:.0f} s, the rest {time.monotonic() - trained:.0f} s")


def main() -> None:
    """Runs the command line; restarts itself once with the allocator settings."""
    parser = argparse.ArgumentParser(prog="python -m training.remake", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", type=Path, help="checkpoints; default: OUT-run beside OUT")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=None)
    args = parser.parse_args()
    if any(os.environ.get(key) != value for key, value in ALLOCATOR.items()):
        command = [sys.executable, "-m", "training.remake", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **ALLOCATOR})
    run = args.run or args.out.with_name(args.out.name + "-run")
    remake(args.out, run, args.seed, args.steps)


if __name__ == "__main__":
    main()
