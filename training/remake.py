"""Remake the bundled model from nothing: data, tokenizer, training, export, united experts, tasks.

`python -m training.remake --out DIR` writes every file of `jmoe/bundled`. On two cores with bf16
matrix units it takes about an hour, nearly all of it training; an interrupted run goes on from its
newest checkpoint. Two runs with one seed and machine give the same files; another CPU rounds
differently, so it gives a model as good but not the same bytes. `--geometry second` makes a model
of 8 layers and 32 experts, 2 a token, instead.
"""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from jmoe.checkpoint import UNITED_FILE
from jmoe.config import from_hf
from training.distill import DistillConfig, distill
from training.export import export_hf
from training.geometry import GEOMETRIES
from training.progress import bars
from training.tasks import write_jsonl
from training.train import TrainConfig, train

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


def restart_with_allocator(module: str) -> None:
    """Starts the command line of a module again with the settings of ALLOCATOR, if it lacks any."""
    if any(os.environ.get(key) != value for key, value in ALLOCATOR.items()):
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **ALLOCATOR})


def remake(
    out: Path, run: Path, geometry: str, config: TrainConfig, distillation: DistillConfig
) -> None:
    """Trains, exports and distils.

    Args:
        out: model directory to write.
        run: directory for checkpoints, of training and of distillation.
        geometry: one of `GEOMETRIES`.
        config: of the training; its seed is of the data, too.
        distillation: of the united experts.
    """
    began = time.monotonic()
    params = train(config, run)
    export_hf(GEOMETRIES[geometry], params, run, out)
    trained = time.monotonic()
    write_jsonl(out / "tasks.jsonl", "eval", EVAL_ITEMS, config.seed)
    data, united = run / "distill.jsonl", run / "united"
    write_jsonl(data, "train", DISTILL_ITEMS, config.seed + 1)
    with bars() as progress:
        layers, refined = distill(out, WAYS, [data], united, distillation, progress)
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
    parser.add_argument("--geometry", choices=GEOMETRIES, default="bundled")
    for name in ("seed", "steps", "rows"):
        parser.add_argument(f"--{name}", type=int, default=getattr(TrainConfig, name))
    for name, of in (("--distill-steps", "steps"), ("--refine-steps", "refine_steps")):
        parser.add_argument(name, type=int, default=getattr(DistillConfig, of))
    args = parser.parse_args()
    restart_with_allocator("training.remake")
    run = args.run or args.out.with_name(args.out.name + "-run")
    model = from_hf(GEOMETRIES[args.geometry])
    config = TrainConfig(model, args.seed, args.steps, args.rows)
    distillation = DistillConfig(steps=args.distill_steps, refine_steps=args.refine_steps)
    remake(args.out, run, args.geometry, config, distillation)


if __name__ == "__main__":
    main()
