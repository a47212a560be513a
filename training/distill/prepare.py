"""What happens before a distillation: its data is read, its plan made, its ways chosen."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jmoe.api import resolve
from jmoe.checkpoint import config_of
from jmoe.config import ModelConfig
from jmoe.experts import groups_by_index
from jmoe.tokenizer import Tokenizer
from training.distill.config import DistillConfig
from training.distill.data import Corpus, check_trains, pack_files
from training.distill.plan import (
    ENOUGH_VISITS,
    LEAST_VISITS,
    Amount,
    RunPlan,
    choose,
)
from training.distill.room import Room, existing, folder_bytes, room_here
from training.distill.store import WORK

DEFAULT_WAYS = (2, 4, 8)


def prepare(
    model_dir: Path,
    ways: Sequence[int] | None,
    data: Sequence[Path],
    out: Path | None,
    config: DistillConfig,
    allow_unknown_config: Sequence[str] = (),
    *,
    need_data: bool = True,
    room: Room | None = None,
    more: Callable[[], Sequence[Path]] = tuple,
) -> tuple[Corpus | None, RunPlan]:
    """Checks a run and plans it, without its weights: `config.json` and, for data, the tokenizer.
    Returns the data in packed rows, None where none was given, and the plan.

    Args:
        model_dir: model directory.
        ways: None for those of DEFAULT_WAYS that the model can have and this machine can hold.
        data: files of texts.
        out: directory of the run; None where the disk does not matter.
        config: settings.
        allow_unknown_config: as of `jmoe.load`.
        need_data: False plans without data, too, for as much as the settings want.
        room: what is free; None looks at this machine.
        more: called once the data is read; the texts of its files fill half of the rows, alone.

    Raises ValueError for ways that cannot be, for rows that do not divide by the devices, and for
    data that cannot be used or is too little; ConfigError and TokenizerError.
    """
    directory = resolve(model_dir)
    cfg = config_of(directory, allow_unknown_config=allow_unknown_config)
    chosen = _checked(cfg, ways)
    check_trains(cfg, config.length)
    corpus, amount, warnings = None, Amount.assumed(config), ()
    if data or need_data:
        tokenizer = Tokenizer.load(directory)
        folder = None if out is None else existing(out)
        corpus = pack_files(data, cfg, tokenizer, config.length, config.seed, folder, more)
        amount = _amount(corpus, config)
        warnings = _check_amount(amount, cfg, config)
    there = 0 if out is None else folder_bytes(out / WORK)
    room = room or room_here(out)
    config.check_devices(room.num_devices, cfg.d_model)
    plan = RunPlan(cfg, config, chosen, amount, room, there, tuple(warnings))
    return corpus, choose(plan, named=ways is not None)


def _checked(cfg: ModelConfig, ways: Sequence[int] | None) -> tuple[int, ...]:
    if ways is None:
        return tuple(way for way in DEFAULT_WAYS if way <= cfg.num_experts) or (cfg.num_experts,)
    if not ways or len(set(ways)) != len(ways):
        raise ValueError(f"ways are {list(ways)}; give at least one, each once")
    for way in ways:
        groups_by_index(cfg.num_experts, way)  # raises for a way that cannot be
    return tuple(ways)


def _amount(data: Corpus, config: DistillConfig) -> Amount:
    captured = data.first(config.rows)
    own = int(np.count_nonzero(captured.items))
    return Amount(data.num_tokens, len(data), own, len(captured))


def _check_amount(amount: Amount, cfg: ModelConfig, config: DistillConfig) -> list[str]:
    """Returns warnings of too little data. Raises ValueError where it cannot train anything."""
    visits = amount.captured_tokens * cfg.experts_per_token / cfg.num_experts

    def tokens_for(wanted: int) -> int:
        return -(-wanted * cfg.num_experts // cfg.experts_per_token)

    have = f"the data holds {amount.tokens:,} tokens"
    if amount.tokens > amount.captured_tokens:
        have += f", of which {amount.captured_tokens:,} are captured (--rows {config.rows})"
    each = (
        f"each of the {cfg.num_experts} experts of a layer is visited {visits:,.0f} times on "
        "average"
    )
    fix = "give more --data" if amount.tokens < config.rows else "raise --rows"
    if visits < LEAST_VISITS:
        raise ValueError(
            f"{have}: {each}. At least {tokens_for(LEAST_VISITS):,} tokens are needed "
            f"({LEAST_VISITS} visits) and {config.rows:,} wanted; {fix}"
        )
    warnings = []
    if amount.tokens < config.rows:
        warnings.append(
            f"{have} and --rows wants {config.rows:,}: all of them are captured. Give more --data, "
            "or name a smaller --rows"
        )
    if visits < ENOUGH_VISITS:
        warnings.append(
            f"{have}: {each}, which is little; {tokens_for(ENOUGH_VISITS):,} tokens would give "
            f"{ENOUGH_VISITS}: {fix}"
        )
    return warnings
