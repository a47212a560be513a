"""Fine-tuning of the bundled model: a new skill, and some of what the model was trained on; and of
its united experts for such a variant.
"""

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

import jmoe
from jmoe.api import Model
from jmoe.config import ModelConfig
from jmoe.experts import UnitedExperts
from training.distill import DistillConfig
from training.distill.refine import begin, freeze, refine
from training.family.skills import skill_tasks
from training.geometry import BUNDLED
from training.log import text_of
from training.network import Params
from training.packing import Batch, Encoded, encode_task, pack, training_items
from training.progress import Progress
from training.train import TrainConfig, make_optimizer, train_step


@dataclass(frozen=True)
class TuneConfig:
    """What decides a variant besides its skill. A step has `rows` packed rows of 128 tokens."""

    model: ModelConfig = BUNDLED
    seed: int = 1
    steps: int = 220
    rows: int = 32
    peak_lr: float = 1.2e-3
    old_share: float = 0.35  # of the items: as the bundled model was trained on
    united_steps: int = 120  # of united experts, end to end

    def __post_init__(self) -> None:
        """Raises ValueError for a number out of range."""
        if min(self.steps, self.rows, self.united_steps) < 1 or self.seed < 0:
            raise ValueError(
                f"steps are {self.steps}, rows {self.rows}, united_steps {self.united_steps}, seed "
                f"{self.seed}; the seed must be at least 0, the others at least 1"
            )
        if not 0 <= self.old_share < 1:
            raise ValueError(f"old_share is {self.old_share}; it must be at least 0 and below 1")

    @property
    def train(self) -> TrainConfig:
        """The trainer's settings; equal for all variants, so that one program trains them."""
        return TrainConfig(
            model=self.model,
            seed=self.seed,
            steps=self.steps,
            rows=self.rows,
            peak_lr=self.peak_lr,
            warmup=max(1, self.steps // 10),
        )


def read_params(directory: str | Path) -> Params:
    """Returns the float32 parameters of a model whose layers are all MoE, as `training.network` has
    them.

    Raises as `jmoe.load`.
    """
    model = jmoe.load(directory, "float32", ways=())
    slots = model.table.slots[:, : model.config.num_experts]
    return {**model.params, "experts": model.pool.read(slots).plain().arrays}


def tune(
    params: Params,
    tokenizer: Tokenizer,
    skill: str,
    config: TuneConfig,
    progress: Progress,
) -> Params:
    """Returns the parameters after `config.steps` on the skill; `params` stay as they are."""
    train = config.train
    params = jax.tree.map(jnp.copy, params)  # a step donates what it is given
    state = make_optimizer(train).init(params)
    for step in range(config.steps):
        batch = tuning_batch(tokenizer, skill, config, step, train.length)
        params, state, metrics = train_step(params, state, batch.arrays(), train)
        note = f"loss {float(metrics['loss']):.3f}"
        progress(f"teach {skill}", step + 1, config.steps, note)
    return params


def unite(
    model: Model,
    skill: str,
    start: UnitedExperts,
    config: TuneConfig,
    progress: Progress,
) -> dict[str, np.ndarray]:
    """Returns united experts `[L, U, ...]` of a variant, float32, trained end to end from another
    model's, on half its skill and half what the bundled model was trained on. The variant's arrays
    are not to be used any more.

    Raises ValueError for a model without a tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer")
    length, cfg = config.train.length, model.config
    own = dataclasses.replace(config, rows=24 * config.rows, old_share=0.5)
    data = tuning_batch(model.tokenizer.backend, skill, own, config.steps, length)
    settings = DistillConfig(
        refine_steps=config.united_steps, refine_rows=config.rows, length=length, seed=config.seed
    )
    at = begin(start.experts.arrays, settings, cfg.d_model)
    key = jax.random.key(config.seed)

    def note(done: int, total: int, losses: dict[str, float]) -> None:
        progress(f"unite {skill}", done, total, text_of(losses))

    frozen = freeze(model, start.groups)
    return refine(cfg, frozen, at, data, key, settings, save=lambda at: None, note=note)[0]


def tuning_batch(
    tokenizer: Tokenizer, skill: str, config: TuneConfig, step: int, length: int
) -> Batch:
    """Returns the batch of a step, the same in every run with this seed."""
    return pack(_items(tokenizer, skill, config, step), config.rows, length)


def _items(tokenizer: Tokenizer, skill: str, config: TuneConfig, step: int) -> Iterator[Encoded]:
    rng = random.Random(f"tune/{skill}/{config.seed}/{step}")
    old = training_items(tokenizer, config.seed + 1000, step)
    new = skill_tasks(skill, "train", rng.getrandbits(60))
    while True:
        is_old = rng.random() < config.old_share
        yield next(old) if is_old else encode_task(tokenizer, next(new))
