"""`consolidate`: a map of the experts that models of one architecture share, and its file."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmoe import layout
from jmoe.checkpoint import HFLayers, save_tensors, weights_digest
from jmoe.config import ModelConfig
from jmoe.digests import sha256_of
from jmoe.family import check_family, stored_alike
from jmoe.layers import Layers
from jmoe.sharing import MERGED, WEIGHTS_FILE, Sharing, write_sharing
from jmoe.tokenizer import Tokenizer
from training.consolidate.budget import slots_of_budget, slots_of_share
from training.consolidate.measure import Differences, measure
from training.consolidate.residuals import Tensors, layer_residuals, mean_experts
from training.consolidate.rules import (
    Owners,
    losses_of,
    owners_functional,
    owners_paper,
    owners_random,
    owners_within,
)
from training.distill.data import pack_files
from training.distill.stream import layers_dtype
from training.packing import Batch
from training.progress import Progress, counted

RULES = ("functional", "paper", "random", "average")
ALL = ""
"""In data by model's name: texts of all models."""


@dataclass(frozen=True)
class ConsolidateConfig:
    """How a family is consolidated; one of `share`, `budget`, `max_loss`, `lossless` is given."""

    rule: str = "functional"
    share: float | None = None  # percent
    budget: str | None = None  # slots, or bytes with their unit
    data: Mapping[str, Sequence[Path]] = field(default_factory=dict)  # by model, or ALL
    rows: int = 16_384  # captured, tokens a model
    length: int = 128  # tokens a packed row
    residual_rank: int = 0  # of the differences that are kept from shared experts; 0: none are
    seed: int = 0  # of the rows that are captured, and of the random rule
    allow_unknown_config: tuple[str, ...] = ()  # as of `jmoe.load`
    max_loss: float | None = None  # of any model, as `Consolidation.losses` has them
    lossless: bool = False  # experts are shared that are equal

    def __post_init__(self) -> None:
        """Raises ValueError for settings that cannot be."""
        if self.rule not in RULES:
            raise ValueError(f"rule is {self.rule!r}; it must be one of {', '.join(RULES)}")
        given = [self.share, self.budget, self.max_loss, self.lossless or None]
        if sum(value is not None for value in given) != 1:
            raise ValueError(
                "give one of --share PERCENT, --budget SLOTS (or bytes: 12GiB), --max-loss LOSS "
                "and --lossless"
            )
        if self.max_loss is not None:
            if not 0 <= self.max_loss < math.inf:
                raise ValueError(f"max_loss is {self.max_loss}; it must be 0 or more")
            if self.rule != "functional":
                raise ValueError(
                    f"max_loss is given and the rule {self.rule}; only the functional rule knows "
                    "what sharing loses"
                )
        if self.lossless and (self.data or self.residual_rank or self.rule != "functional"):
            raise ValueError(
                "lossless shares experts that are stored byte for byte alike; leave out --data, "
                "--rule and --residual-rank"
            )
        if self.rule == "functional" and not (self.data or self.lossless):
            raise ValueError(
                "the functional rule measures what each model's own rows lose, and no texts are "
                "given; name some with --data, or choose --rule paper, which needs none"
            )
        for name, low in {"rows": 1, "length": 2, "seed": 0, "residual_rank": 0}.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")


@dataclass(frozen=True)
class Consolidation:
    """A map, and what each model loses by it as `Differences` says, summed over layers; None
    without data, and where experts are merged. Differences that are kept are not reckoned with.
    """

    sharing: Sharing
    losses: Mapping[str, float] | None
    residual_bytes: int = 0  # of all models' differences


def consolidate(
    directories: Mapping[str, str | Path],
    out: Path,
    config: ConsolidateConfig,
    progress: Progress = lambda *args: None,
    say: Callable[[str], None] = lambda line: None,
) -> Consolidation:
    """Chooses which experts the models share, and writes `out` (merged experts and differences
    beside it).

    Reads a layer of each model at a time. Nothing is written before all is known.

    Args:
        directories: Hugging Face directories of one architecture by the models' names, at least
            two. Their order is that of the paper's rule's turns.
        out: the map to write, as `family.json`; its directory is made if absent.
        config: rule, budget and data.
        progress: called as layers of models are done.
        say: called with each warning.

    Raises ValueError for settings, data and budgets that cannot be used, ConfigError and
    TokenizerError for models that cannot lie over one pool, and CheckpointError.
    """
    found, cfgs, tokenizers = check_family(directories, config.allow_unknown_config)
    if len(found) < 2:
        raise ValueError(
            f"{', '.join(found)} is one model, which has nobody to share experts with; name at "
            "least two with --model NAME=DIR"
        )
    if out.suffix != ".json":
        raise ValueError(f"out is {out}; name a file such as {out / 'family.json'}")
    cfg = next(iter(cfgs.values()))
    slots = _slots(config, cfg, len(found), say)
    _check_rank(config, cfg)
    data = read_data(config, cfg, tokenizers)
    prints = _fingerprints(found)
    allowed = config.allow_unknown_config
    models = [Layers(path, layers_dtype(), allow_unknown_config=allowed) for path in found.values()]
    passes = 2 if config.rule == "average" or config.residual_rank else 1
    total = passes * len(found) * cfg.num_layers
    advance = counted(partial(progress, "consolidate"), total)
    if config.lossless:
        kind = jnp.dtype(layers_dtype())
        files = {name: HFLayers(path, cfg, kind) for name, path in found.items()}
        owners, costs = stored_alike(files, cfg).owners, None
    else:
        measured = measure(models, data, advance)
        costs = measured.costs
        if config.max_loss is None:
            owners = choose(config.rule, measured, slots, config.seed)
        else:
            assert costs is not None
            owners = owners_within(costs, config.max_loss)
    merged: Tensors = {}
    residuals: Tensors = {}
    if passes > 1:
        merged, residuals = _weights(config, models, owners, prints, advance)
    losses = None
    if costs is not None and not merged:
        losses = dict(zip(found, losses_of(costs, owners).tolist(), strict=True))
    draft = Sharing(
        tuple(found), owners, prints, directory=out.parent, residual_rank=config.residual_rank
    )
    sharing = replace(draft, facts=_facts(config, draft, losses, data))
    out.parent.mkdir(parents=True, exist_ok=True)
    if merged or residuals:
        save_tensors(out.parent / WEIGHTS_FILE, merged | residuals)
        say(f"merged experts and differences: {out.parent / WEIGHTS_FILE}")
    write_sharing(out, sharing)
    return Consolidation(sharing, losses, sum(tensor.nbytes for tensor in residuals.values()))


def _slots(
    config: ConsolidateConfig, cfg: ModelConfig, count: int, say: Callable[[str], None]
) -> int:
    """Returns the most slots that the family may take; all where that is not what bounds it."""
    positions = cfg.num_moe_layers * cfg.num_experts
    if config.share is not None:
        return slots_of_share(config.share, count, positions)
    if config.budget is None:
        return count * positions
    expert_bytes = 2 * layout.expert_parameters(cfg)  # as served, in 16 bits
    slots = slots_of_budget(config.budget, count, positions, expert_bytes)
    if slots >= count * positions:
        say(
            f"warning: a budget of {config.budget} holds {slots:,} experts, and all of {count} "
            f"models' are {count * positions:,}: nothing is shared"
        )
    return min(slots, count * positions)


def _fingerprints(directories: Mapping[str, Path]) -> tuple[str, ...]:
    """Returns the models' fingerprints. Raises ValueError for one model under two names: a map
    could not tell them apart.
    """
    prints: dict[str, str] = {}
    for name, path in directories.items():
        found = weights_digest(path)
        if found in prints:
            raise ValueError(
                f"{name} and {prints[found]} have the same weights; name this model once"
            )
        prints[found] = name
    return tuple(prints)


def read_data(
    config: ConsolidateConfig, cfg: ModelConfig, tokenizers: Mapping[str, Tokenizer | None]
) -> list[Batch] | None:
    """Returns the packed rows of each model's texts, its own or those of all; None where none are
    given.

    Raises ValueError for texts of a model that is none of these, for a model without any, and for
    data that cannot be used.
    """
    if not config.data:
        return None
    if unknown := set(config.data) - set(tokenizers) - {ALL}:
        raise ValueError(
            f"--data is given for {', '.join(sorted(unknown))}; the models are "
            f"{', '.join(tokenizers)}"
        )
    batches = []
    for name, tokenizer in tokenizers.items():
        files = [*config.data.get(ALL, ()), *config.data.get(name, ())]
        if not files:
            raise ValueError(
                f"no texts are given for {name}; add --data {name}=FILE, or --data FILE for all"
            )
        corpus = pack_files(files, cfg, tokenizer, config.length, config.seed)
        batches.append(corpus.first(config.rows))
    return batches


def choose(rule: str, measured: Differences, slots: int, seed: int) -> Owners:
    """Chooses owners by a rule; `seed` is of the random one. Raises ValueError as
    `owners_functional`.
    """
    if rule == "functional":
        assert measured.costs is not None
        return owners_functional(measured.costs, slots)
    if rule == "random":
        return owners_random(measured.distances.shape[1:], slots, seed)
    return owners_paper(measured.distances, slots, merged=rule == "average")


def _check_rank(config: ConsolidateConfig, cfg: ModelConfig) -> None:
    most = min(cfg.d_model, cfg.d_ff_expert)
    if config.residual_rank and cfg.expert_bias:
        raise ValueError(
            f"residual_rank is {config.residual_rank}; differences of experts with biases are not "
            "kept: set it to 0"
        )
    if config.residual_rank > most:
        raise ValueError(
            f"residual_rank is {config.residual_rank}; it must be at most {most}, the smaller side "
            "of these experts' matrices, and pays where it is far below"
        )


def _weights(
    config: ConsolidateConfig,
    models: Sequence[Layers],
    owners: np.ndarray,
    prints: Sequence[str],
    advance: Callable[[int], None],
) -> tuple[Tensors, Tensors]:
    """Returns merged experts, and differences from those that are shared."""
    merged: Tensors = {}
    residuals: Tensors = {}
    for layer, index in enumerate(np.flatnonzero(models[0].cfg.moe_layers).tolist()):
        pools = [pool for model in models if (pool := model.layer(index)[1]) is not None]
        here = owners[:, layer]
        merged |= mean_experts(layer, pools, np.flatnonzero(here[0] == MERGED).tolist())
        if config.residual_rank:
            residuals |= layer_residuals(layer, pools, here, merged, prints, config.residual_rank)
        advance(len(models))
    return merged, residuals


def _facts(
    config: ConsolidateConfig,
    sharing: Sharing,
    losses: Mapping[str, float] | None,
    data: Sequence[Batch] | None,
) -> dict[str, Any]:
    """Returns what `family.json` says of how it was made."""
    facts: dict[str, Any] = {
        "rule": "lossless" if config.lossless else config.rule,
        "slots": sharing.num_slots,
        "shared_percent": round(sharing.shared_percent, 2),
        "seed": config.seed,
    }
    if losses is not None:
        facts["loss"] = {name: round(loss, 8) for name, loss in losses.items()}
    if data is not None:
        rows = [int(np.count_nonzero(batch.items)) for batch in data]
        facts["rows"] = dict(zip(sharing.names, rows, strict=True))
        facts["data"] = {
            f"{name}={path.name}" if name else path.name: sha256_of(path)[:16]
            for name, paths in config.data.items()
            for path in paths
        }
    return facts
