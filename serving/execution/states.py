"""The device state of a runner: made, or only described, for given limits."""

from functools import partial
from typing import NamedTuple

import jax

from jmoe.api import Model
from jmoe.parallel.steps import abstract_states, make_shapings, make_states
from jmoe.shaping import Shaping, make_shaping
from jmoe.steps import State, make_state
from serving.config import EngineConfig
from serving.plan import Limits


class States(NamedTuple):
    """Makes the state of one model, or of the first of a family."""

    model: Model
    config: EngineConfig
    runs_parts: bool  # whether steps run in parts, whose rows wait between two

    def make(self, limits: Limits) -> State:
        """Makes the state, on the devices."""
        make, home = self._maker(limits), self.model.home
        return make() if home is None else make_states(home.mesh, make)

    def shaping(self, limits: Limits) -> Shaping:
        """Makes the per-slot state of requests whose logits are changed, on the devices."""
        make, home = self._shaping_maker(limits), self.model.home
        return make() if home is None else make_shapings(home.mesh, make)

    def shaping_bytes(self, limits: Limits) -> int:
        """Returns the bytes of one device's part of `shaping`."""
        shapes = jax.eval_shape(self._shaping_maker(limits))
        return sum(one.size * one.dtype.itemsize for one in shapes)

    def shapes(self, limits: Limits) -> State:
        """Returns the state's shapes, dtypes and shardings; nothing is allocated."""
        make, home = self._maker(limits), self.model.home
        return jax.eval_shape(make) if home is None else abstract_states(home.mesh, make)

    def _shaping_maker(self, limits: Limits) -> partial[Shaping]:
        return partial(make_shaping, limits.slots_per_rank, self.model.config.vocab_size)

    def _maker(self, limits: Limits) -> partial[State]:
        return partial(
            make_state,
            self.model.config,
            num_slots=limits.slots_per_rank,
            num_pages=limits.group_pages,
            page_size=limits.page_size,
            max_blocks=limits.pages_for(self.config.max_model_len),
            dtype=self.model.dtype,
            num_hidden=limits.hidden_per_rank if self.runs_parts else 0,
        )
