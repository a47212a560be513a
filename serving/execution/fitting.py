"""Settings as they apply to a model, and the sizes that follow."""

import logging
from dataclasses import replace

from jmoe.api import Model
from jmoe.attention import page_windows
from jmoe.config import ModelConfig
from serving.config import EngineConfig
from serving.errors import SettingsError
from serving.execution.buckets import with_default_buckets
from serving.plan import Limits

log = logging.getLogger(__name__)

DEFAULT_MODEL_LEN = 2048
"""Positions of a sequence where the settings leave them open and the model has as many."""


def limits_of(
    config: EngineConfig,
    num_layers: int = 1,
    num_ranks: int = 1,
    windows: tuple[int, ...] = (0,),
    recurrent: bool = False,
) -> Limits:
    """Returns the sizes of a configuration; `num_pages` 0 means enough for `max_num_seqs` at full
    length. `windows` are those of `page_windows`, where one that no sequence exceeds is none, and
    `recurrent` is as of `jmoe.attention.is_recurrent`.

    Ranks get equal parts of sequences, slots and pages, rounded up.
    """
    seqs = -(-config.max_num_seqs // num_ranks)
    reserved = -(-config.reserved_ls_seqs // num_ranks)
    reserved = max(1, seqs // 8) if config.reserved_ls_seqs < 0 else reserved
    sized = with_default_buckets(config, num_ranks)
    limits = Limits(
        num_slots=num_ranks * (seqs + reserved),
        max_decode_seqs=num_ranks * seqs,
        num_layers=num_layers,
        prefill_buckets=tuple(sorted({*sized.prefill_buckets, *sized.late_prefill_buckets})),
        num_pages=0,
        page_size=config.page_size,
        max_prefill_tokens=config.max_prefill_tokens,
        max_prefill_seqs=min(config.max_prefill_seqs, seqs),
        num_ranks=num_ranks,
        windows=tuple(window * (window < config.max_model_len) for window in windows),
        recurrent=recurrent,
    )
    pages = -(-config.num_pages // num_ranks) or limits.most_pages(config.max_model_len, seqs)
    return replace(limits, num_pages=num_ranks * pages)


def num_ranks_of(model: Model) -> int:
    """Returns how many devices a model is spread over."""
    return 1 if model.home is None else model.home.mesh.size


def fit_to_model(config: EngineConfig, model: Model, num_ranks: int = 0) -> EngineConfig:
    """Returns `config` as it is served: what it leaves open is chosen. `num_ranks` 0: those of the
    model.

    Raises SettingsError as `served_len`, and for what does not go with layers that keep something
    outside pages.
    """
    if config.reuses_prefixes and not all(k.shares_pages for k in model.config.attention_kinds):
        if config.prefix_reuse != "auto":
            raise SettingsError(
                f"engine.prefix_reuse is {config.prefix_reuse!r}; {model.name} has layers whose "
                "cache lies outside pages, so that prompts can share none; set it to 'auto' or "
                "'off'"
            )
        config = replace(config, prefix_reuse="off")
    num_ranks = num_ranks or num_ranks_of(model)
    length = served_len(config, model.config, model.name, num_ranks)
    is_open = not (config.max_model_len or config.num_pages)
    if is_open and length < model.config.max_position:
        log.warning(
            "sequences are served up to %d tokens, of %s's %d: --max-model-len serves longer ones",
            *(length, model.name, model.config.max_position),
        )
    return replace(with_default_buckets(config, num_ranks), max_model_len=length)


def served_len(config: EngineConfig, cfg: ModelConfig, name: str, num_ranks: int = 1) -> int:
    """Returns `max_model_len` as the model called `name` is served with it.

    Raises SettingsError for more positions than the model has, or than its KV pages hold.
    """
    length, most = config.max_model_len, cfg.max_position
    if length > most:
        raise SettingsError(
            f"engine.max_model_len is {length}; {name} has {most} positions; "
            f"pass --max-model-len {most} or less, or leave it out"
        )
    if not config.num_pages:
        return length or min(most, DEFAULT_MODEL_LEN)
    held = Limits(
        num_slots=num_ranks,
        num_pages=num_ranks * -(-config.num_pages // num_ranks),
        page_size=config.page_size,
        max_prefill_tokens=config.max_prefill_tokens,
        max_prefill_seqs=1,
        num_ranks=num_ranks,
        windows=page_windows(cfg),
    ).most_positions
    if length > held:
        raise SettingsError(
            f"engine.num_pages is {config.num_pages}; it must be 0, or enough for one sequence of "
            f"max_model_len {length}: they hold {held} positions of {name}"
        )
    return length or min(most, DEFAULT_MODEL_LEN, held)
