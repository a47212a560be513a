"""Copies of experts while a step runs: in which programs, how many, and by whose guess."""

import logging
from collections.abc import Sequence

from jmoe.api import Model
from jmoe.parallel.cost import replicas_that_fit
from jmoe.parallel.home import Home
from jmoe.parallel.probe import PROBE_FILE, Probe, load_probes
from jmoe.parallel.replicas import Replication
from pallas_kernels.backend import backend
from serving.config import BalanceConfig
from serving.errors import SettingsError

log = logging.getLogger(__name__)


def replication_of(
    config: BalanceConfig, model: Model, sizes: Sequence[int]
) -> dict[int, Replication]:
    """Returns how prefill steps copy experts while they run, by tokens a device; sizes that are not
    there copy none.

    On a GPU, unless the settings say from which size on, in as many as can be hidden behind the
    layer before (`jmoe.parallel.cost`); a CPU has nothing to hide them behind, and copies always.
    """
    if not config.replicas or model.home is None:
        return {}
    if backend() != "cpu":
        _warn_of_loops(config, model.config.num_experts + model.num_united_slots, model.home)
    asked = Replication(config.replicas, config.replicas_per_pair, config.replicas_local_share)
    if config.replicas_min_tokens or backend() == "cpu":
        return {size: asked for size in sizes if size >= config.replicas_min_tokens}
    found, reason = {}, ""
    for size in sizes:
        fit = replicas_that_fit(
            model.config,
            model.home.mesh.size,
            size,
            model.dtype.itemsize,
            asked.per_pair,
            alpha=asked.alpha,
        )
        reason = fit.reason
        if fit.num_replicas:
            most = min(asked.num_replicas, fit.num_replicas)
            found[size] = asked._replace(num_replicas=most, per_pair=fit.per_pair)
    if not found:
        log.warning(
            "engine.balance.replicas is %d, and no prefill step is large enough to hide copies: in "
            "one of %d tokens a device, %s; raise engine.max_prefill_tokens, or set "
            "engine.balance.replicas_min_tokens",
            config.replicas,
            sizes[-1],
            reason,
        )
    return found


def _warn_of_loops(config: BalanceConfig, num_experts: int, home: Home) -> None:
    """Warns where planning has no kernel on a GPU."""
    from pallas_kernels.planning import mosaic  # Pallas is not imported where it is unused

    if not mosaic.supports(num_experts, home.mesh.size):
        log.warning(
            "engine.balance.replicas is %d: for %d experts on %d devices planning copies is loops "
            "that wait for the host in every layer; copies that stay (engine.balance.spare_slots) "
            "cost a step nothing",
            config.replicas,
            num_experts,
            home.mesh.size,
        )


def probes_of(config: BalanceConfig, model: Model) -> Probe | None:
    """Returns what guesses the next layer's routing while a step runs; None: that layer's router,
    or no copies are made. Raises SettingsError for probes that are asked for and not there, or no
    probes.
    """
    if not config.replicas or config.predictor == "router" or model.home is None:
        return None
    try:
        found = load_probes(model.path, model.config)
    except ValueError as error:
        raise SettingsError(f"engine.balance.predictor is {config.predictor!r}: {error}") from None
    if found is None and config.predictor == "probe":
        raise SettingsError(
            f"engine.balance.predictor is 'probe', and no {PROBE_FILE} is in {model.path}; fit one "
            "with `python -m training.lookahead`, or take auto"
        )
    return None if found is None else model.home.whole(found)
