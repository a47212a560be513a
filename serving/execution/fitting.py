"""Settings as a model is served with them, and the sizes that follow."""

import logging
from dataclasses import replace

from jmoe.api import Model
from serving.config import EngineConfig
from serving.execution.buckets import with_default_buckets
from serving.plan import Limits

log = logging.getLogger(__name__)


def limits_of(config: EngineConfig, num_layers: int = 1, num_ranks: int = 1) -> Limits:
    """Sizes of a configuration; `num_pages` 0 means enough for `max_num_seqs` at full length.

    Ranks get equal parts of sequences, slots and pages, rounded up.
    """
    blocks = -(-config.max_model_len // config.page_size)
    seqs = -(-config.max_num_seqs // num_ranks)
    reserved = -(-config.reserved_ls_seqs // num_ranks)
    reserved = max(1, seqs // 8) if config.reserved_ls_seqs < 0 else reserved
    return Limits(
        num_slots=num_ranks * (seqs + reserved),
        max_decode_seqs=num_ranks * seqs,
        num_layers=num_layers,
        prefill_buckets=with_default_buckets(config).prefill_buckets,
        num_pages=num_ranks * (-(-config.num_pages // num_ranks) or blocks * seqs),
        page_size=config.page_size,
        max_prefill_tokens=config.max_prefill_tokens,
        max_prefill_seqs=min(config.max_prefill_seqs, seqs),
        num_ranks=num_ranks,
    )


def num_ranks_of(model: Model) -> int:
    """Devices that a model is spread over."""
    return 1 if model.home is None else model.home.mesh.size


def fit_to_model(config: EngineConfig, model: Model, num_ranks: int = 0) -> EngineConfig:
    """`config` as it is served: what it leaves open is chosen, and `max_model_len` cut to the
    positions that the model was made for. `num_ranks` 0: those of the model.
    """
    most = model.config.max_position
    config = with_default_buckets(config, num_ranks or num_ranks_of(model))
    if config.max_model_len <= most:
        return config
    log.warning(
        "max_model_len is %d; %s has %d positions, and serves those",
        config.max_model_len,
        model.name,
        most,
    )
    return replace(config, max_model_len=most)
