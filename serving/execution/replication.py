"""Copies of experts while a step runs: in which programs, how many, and by whose guess."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Int

from jmoe.api import Model
from jmoe.parallel.cost import MeshStep
from jmoe.parallel.home import Home
from jmoe.parallel.probe import PROBE_FILE, Probe, load_probes
from jmoe.parallel.replicas import Replication
from pallas_kernels.backend import backend
from serving.config import BalanceConfig
from serving.errors import SettingsError
from serving.execution.memory import pairs_that_fit

log = logging.getLogger(__name__)


UNEVEN = 2.0
"""Imbalance that steps seldom have: a size whose copies gain from more has no program for them."""
MARGIN = 0.05
"""What the imbalance has to be above that from which copies gain, for steps to begin with them."""
WEIGHT = 0.1  # of the newest step in a mean


class CopiesRule:
    """Which prefill steps copy experts while they run.

    On a GPU those where that gains (`jmoe.parallel.cost.MeshStep.break_even`) at the imbalance that
    recent prefill steps had, or would have had, without copies; unless the settings say from which
    size on. A CPU has nothing to hide copies behind, and copies always.

    One process decides; steps of other processes are those that it tells them to make.
    """

    def __init__(
        self, replication: Mapping[int, Replication], gains_from: Mapping[int, float]
    ) -> None:
        """`replication` is by tokens a device; a size that is not there copies nothing, and one
        that `gains_from` does not name always copies.
        """
        self.replication, self.gains_from = replication, gains_from
        self.imbalance: float | None = None
        """Mean of the rows of the fullest device over the mean without copies; None: no step was
        read."""
        self.remaining = 1.0  # the same of steps with copies
        self._on = dict.fromkeys(gains_from, False)

    def copies(self, size: int) -> bool:
        """Returns whether a step of this size copies experts."""
        return self._on.get(size, size in self.replication)

    def seen(
        self,
        expert_rows: Int[np.ndarray, "layers E"],
        device_rows: Int[np.ndarray, "layers D"],
        hosts: Bool[np.ndarray, "layers E D"],
        copied: bool,
    ) -> None:
        """Takes a prefill step's rows by expert and by device, and whether it copied experts."""
        if not expert_rows.any():
            return
        shares = expert_rows / hosts.sum(axis=2)
        alone = _imbalance(np.matmul(shares[:, None], hosts)[:, 0])
        self.imbalance = _mean(alone if self.imbalance is None else self.imbalance, alone)
        if copied:
            self.remaining = _mean(self.remaining, _imbalance(device_rows))
        # What is left of it counts against copies: they were reckoned to leave none.
        gained = self.imbalance - self.remaining + 1
        for size, least in self.gains_from.items():
            on = gained > least + MARGIN * (not self._on[size])
            if on != self._on[size]:
                self._on[size] = on
                log.info(
                    "prefill steps of %d tokens a device %s experts: imbalance is %.2f without "
                    "copies and %.2f with them, which gain from %.2f on",
                    size,
                    "copy" if on else "no longer copy",
                    self.imbalance,
                    self.remaining,
                    least,
                )


def _imbalance(rows: np.ndarray) -> float:
    """Returns rows of the fullest device over the mean; each layer waits for its own."""
    return float(rows.max(axis=1).sum() / rows.mean(axis=1).sum())


def _mean(mean: float, newest: float) -> float:
    return mean + WEIGHT * (newest - mean)


def copies_rule(config: BalanceConfig, model: Model, sizes: Sequence[int]) -> CopiesRule:
    """Returns the rule for prefill steps of these tokens a device; none copies unless the settings
    ask for it, and by `auto` none on a CPU.
    """
    if not (home := _home_of_copies(config, model)):
        return CopiesRule({}, {})
    num_experts = model.config.num_experts + model.num_united_slots
    if backend() != "cpu" and _plans_in_loops(config, num_experts, home):
        return CopiesRule({}, {})
    asked, per_pair, alpha = config.replicas, config.replicas_per_pair, config.replicas_local_share
    if asked != "auto" and (config.replicas_min_tokens or backend() == "cpu"):
        always = Replication(asked, per_pair, alpha)
        return CopiesRule({n: always for n in sizes if n >= config.replicas_min_tokens}, {})
    cfg, dtype_bytes, chosen = model.config, model.dtype.itemsize, MeshStep.replicas_that_gain
    if asked == "auto":
        per_pair = pairs_that_fit(cfg, dtype_bytes, home.mesh, per_pair)
        chosen = MeshStep.best_replicas
    found, gains_from = {}, {}
    reason = "be below engine.balance.replicas_min_tokens" if per_pair else "have room for none"
    for size in sizes:
        if size < config.replicas_min_tokens or not per_pair:
            continue
        step = MeshStep(cfg, home.mesh.size, size, dtype_bytes, alpha=alpha)
        fit, least = chosen(step, per_pair)
        reason = f"gain from an imbalance of {least:.2f} on, since {fit.reason}"
        if least <= UNEVEN:
            most = fit.num_replicas if asked == "auto" else min(asked, fit.num_replicas)
            found[size] = Replication(most, fit.per_pair, alpha)
            gains_from[size] = least
            log.info(
                "copies in prefill steps of %d tokens a device, %d on each, %s",
                size,
                most,
                reason,
            )
    if not found:
        log.warning(
            "engine.balance.replicas is %s, and no prefill step is large enough to gain by copies:"
            " one of %d tokens a device would %s; raise engine.max_prefill_tokens, or set %s",
            asked,
            sizes[-1],
            reason,
            "engine.balance.replicas to 0" if asked == "auto" else "replicas_min_tokens beside it",
        )
    return CopiesRule(found, gains_from)


def _home_of_copies(config: BalanceConfig, model: Model) -> Home | None:
    """Returns the mesh whose steps may copy experts; None: none does. A CPU has nothing to hide
    copies behind.
    """
    by_gain = config.replicas == "auto"
    return model.home if config.replicas and not (by_gain and backend() == "cpu") else None


def _plans_in_loops(config: BalanceConfig, num_experts: int, home: Home) -> bool:
    """Warns where planning has no kernel on a GPU; returns whether no step copies for that reason,
    as with `auto`.
    """
    from pallas_kernels.planning import mosaic  # Pallas is not imported where it is unused

    if mosaic.supports(num_experts, home.mesh.size):
        return False
    log.warning(
        "engine.balance.replicas is %s: for %d experts on %d devices planning copies is loops that "
        "wait for the host in every layer%s; copies that stay (engine.balance.spare_slots) cost a "
        "step nothing",
        config.replicas,
        num_experts,
        home.mesh.size,
        ", so that none are made" if config.replicas == "auto" else "",
    )
    return config.replicas == "auto"


def probes_of(config: BalanceConfig, models: Sequence[Model]) -> list[Probe]:
    """Returns what guesses each model's next layer's routing while a step runs; none: that layer's
    router, or no copies are made. Raises SettingsError for probes that are asked for and not there,
    or no probes.
    """
    home, found = _home_of_copies(config, models[0]), list[Probe]()
    if home is None or config.predictor == "router":
        return []
    for model in models:
        try:
            probes = load_probes(model.path, model.config)
        except ValueError as error:
            why = f"engine.balance.predictor is {config.predictor!r}: {error}"
            raise SettingsError(why) from None
        if probes is not None:
            found.append(home.whole(probes))
        elif config.predictor == "probe":
            raise SettingsError(
                f"engine.balance.predictor is 'probe', and no {PROBE_FILE} is in {model.path}; fit "
                "one with `python -m training.lookahead`, or take auto"
            )
    return found if len(found) == len(models) else []  # one program is every model's
