"""Models of a family as they are with shared experts: by a map, averaged, or with residuals."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jmoe.api import Model
from jmoe.experts import ExpertPool
from jmoe.sharing import MERGED
from training.consolidate.residuals import low_rank

Owners = Int[np.ndarray, "n L m"]


@dataclass(frozen=True)
class Members:
    """Models of one architecture, each loaded by itself, and their experts in host memory."""

    models: tuple[Model, ...]

    @cached_property
    def experts(self) -> dict[str, Float[np.ndarray, "N L m a b"]]:
        """Float32 weights of all models' routed experts."""
        found = []
        for model in self.models:
            slots = model.table.slots[:, : model.config.num_experts]
            found.append(model.pool.read(slots).plain().arrays)
        return {
            key: np.stack([np.asarray(own[key], np.float32) for own in found]) for key in found[0]
        }

    def with_experts(self, number: int, experts: dict[str, np.ndarray]) -> Model:
        """Returns model `number` with other routed experts `[L, m, a, b]`."""
        model, leaves = self.models[number], {}
        slots = np.asarray(model.table.slots)[:, : model.config.num_experts]
        order = np.argsort(slots.ravel())
        for key, leaf in experts.items():
            flat = leaf.reshape(-1, *leaf.shape[2:])[order]
            leaves[key] = jnp.asarray(flat).astype(model.dtype)
        return model.with_weights(pool=ExpertPool(**leaves))

    def mapped(self, group: Sequence[int], owners: Owners, at: int) -> Model:
        """Returns the `at`-th model of a group whose experts are shared as `owners` say."""
        return self.with_experts(group[at], self._chosen(group, owners[at]))

    def _chosen(self, group: Sequence[int], owners: Int[np.ndarray, "L m"]) -> dict:
        """Returns each position's expert by its owner; `MERGED` is the mean of the group's."""
        layers, experts = np.indices(owners.shape)
        numbers, merged = np.array(group)[np.maximum(owners, 0)], owners == MERGED
        found = {}
        for key, leaf in self.experts.items():
            found[key] = leaf[numbers, layers, experts]
            if merged.any():
                found[key][merged] = leaf[list(group)][:, merged].mean(axis=0)
        return found

    def averaged(self, group: Sequence[int]) -> Model:
        """Returns one model for all of a group: the mean of every weight, experts or not."""
        experts = {key: leaf[list(group)].mean(axis=0) for key, leaf in self.experts.items()}
        params = jax.tree.map(
            lambda *leaves: jnp.mean(
                jnp.stack([leaf.astype(jnp.float32) for leaf in leaves]), axis=0
            ).astype(leaves[0].dtype),
            *(self.models[number].params for number in group),
        )
        return self.with_experts(group[0], experts).with_weights(params=params)

    def with_residuals(
        self, group: Sequence[int], owners: Owners, at: int, ranks: Sequence[int]
    ) -> dict[int, tuple[Model, int]]:
        """Returns, by rank, the `at`-th model with a low-rank difference to each shared expert that
        is not its own, and the bytes that those differences take in 16 bits.
        """
        shared = self._chosen(group, owners[at])
        foreign = owners[at] != at
        factors = {
            key: low_rank(leaf[group[at]][foreign] - shared[key][foreign], max(ranks))
            for key, leaf in self.experts.items()
        }
        found = {}
        for rank in ranks:
            experts, size = {}, 0
            for key, (left, right) in factors.items():
                left, right = left[..., :rank], right[..., :rank, :]
                experts[key] = shared[key].copy()
                experts[key][foreign] += _rounded(left) @ _rounded(right)
                size += 2 * (left.size + right.size)
            found[rank] = self.with_experts(group[at], experts), size
        return found


def _rounded(factor: np.ndarray) -> np.ndarray:
    """Returns a factor rounded to bfloat16, as it would be stored."""
    return factor.astype(jnp.bfloat16).astype(np.float32)
