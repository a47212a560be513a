"""A checkpoint one layer at a time, for work that must not hold the whole model on the device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.api import resolve
from jmoe.checkpoint import HFLayers, config_of, is_native, load_native
from jmoe.experts import ExpertPool
from jmoe.host_memory import on_the_host


class Layers:
    """Parameters of a model directory, read when asked for.

    A Hugging Face directory is read tensor by tensor. jmoe's own format is one Orbax tree: it is
    read whole into host memory, and only what is asked for goes to the device.
    """

    def __init__(
        self,
        path: str | Path,
        dtype: str = "float32",
        *,
        check_weights: bool = True,
        allow_unknown_config: Sequence[str] = (),
    ) -> None:
        """Keywords as of `jmoe.load`; `layer` checks the weights that it reads.

        Raises CheckpointError and ConfigError for a directory that cannot be loaded.
        """
        self.directory = resolve(path)
        kind = jnp.dtype(dtype)
        self.cfg = config_of(self.directory, allow_unknown_config=allow_unknown_config)
        if is_native(self.directory):
            with on_the_host():
                _, self._weights = load_native(self.directory, kind, check_weights)
            self._slots = np.asarray(self._weights.table.slots)
            self._files = None
        else:
            self._files = HFLayers(self.directory, self.cfg, kind, check_weights)

    def top(self) -> dict[str, Any]:
        """Returns `embed`, `final_norm` and, untied, `lm_head`."""
        if self._files is not None:
            return self._files.top()
        return {key: leaf for key, leaf in self._weights.params.items() if key != "segments"}

    def layer(self, index: int) -> tuple[dict[str, Any], ExpertPool | None]:
        """Returns one layer's parameters, and its routed experts in order; None for
        a dense layer.
        """
        if self._files is not None:
            params, pool = self._files.layer(index)
            return params, None if pool is None else pool.plain()
        for (is_moe, start, count), segment in zip(
            self.cfg.segments(), self._weights.params["segments"], strict=True
        ):
            if start <= index < start + count:
                at = index - start
                own = jax.tree.map(lambda leaf, at=at: leaf[at], segment)
                return own, self._experts(index) if is_moe else None
        raise IndexError(f"layer {index} of {self.cfg.num_layers}")

    def _experts(self, index: int) -> ExpertPool:
        moe_layer = sum(self.cfg.moe_layers[:index])
        slots = self._slots[moe_layer, : self.cfg.num_experts]
        return self._weights.pool.read(slots).plain()
