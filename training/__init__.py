"""Training: distillation, consolidation, the bundled models (`jmoe[train]`)."""

from jmoe.extras import need

need("train", "flax", "optax", "orbax", "scipy", "rich")
