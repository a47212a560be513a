"""A distillation of seconds, and where published geometries are."""

from pathlib import Path

from training.distill import DistillConfig

QUICK = DistillConfig(
    rows=1024,
    steps=30,
    batch=128,
    decode_batch=32,
    eval_every=10,
    refine_steps=4,
    refine_rows=2,
    length=64,
    learning_rate=2e-3,
    dtype="float32",
    sampled=0,
)

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
