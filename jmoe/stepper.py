"""Step programs over slots that own fixed pages: what runs a model without a server's scheduler."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jmoe.api import Model
from jmoe.attention import page_windows
from jmoe.brownout import Brownout
from jmoe.packed_rows import empty_deltas, sampling_mode
from jmoe.steps import (
    StepOutput,
    compiler_options,
    decode_step,
    make_state,
    prefill_step,
    sample_step,
)


class Stepper:
    """The device state of one run. Slot s always owns the same pages, enough for `max_len`; over a
    window they are used in turn.

    Args:
        model: as `jmoe.load` returns it.
        brownout: of every step; None is none.
        num_slots: sequences there can be.
        max_len: positions of the longest.
        page_size: positions a KV page.
        max_chunk: positions that a sequence goes on by in a step, at most, each once; None: any
            number, over positions that were there before, too, and no page is used again.

    Raises ValueError for a way the model does not have, and for a model that is spread over a mesh;
    its steps do where a user's own strategy fails.
    """

    def __init__(
        self,
        model: Model,
        brownout: Brownout | None,
        *,
        num_slots: int,
        max_len: int,
        page_size: int = 16,
        max_chunk: int | None = None,
    ) -> None:
        if model.home is not None:
            raise ValueError(
                f"{model.name} is spread over {model.home.mesh.size} devices, and generate runs on "
                "one; load it without a mesh, or use serving.Engine"
            )
        blocks = -(-max_len // page_size)
        self.model = model
        self.use(brownout)
        self._no_deltas = jnp.asarray(empty_deltas(1))
        slots, each = np.arange(num_slots, dtype=np.int32)[:, None], []
        for window in page_windows(model.config):
            reached = window + max_chunk - 1 if window and max_chunk else max_len
            each.append(min(blocks, -(-(reached - 1) // page_size) + 1))
        state = make_state(
            model.config,
            num_slots=num_slots,
            num_pages=tuple(num_slots * count for count in each),
            page_size=page_size,
            max_blocks=blocks,
            dtype=model.dtype,
        )
        tables = [slots * count + np.arange(blocks, dtype=np.int32) % count for count in each]
        table = np.stack(tables, axis=-1).reshape(num_slots, -1)
        self._state = state._replace(block_table=jnp.asarray(table))

    def use(self, brownout: Brownout | None) -> None:
        """Runs further steps under another setting. Raises ValueError as when this is made."""
        control = self.model.prepare(brownout)
        self._control = jnp.stack([control.threshold_percent, control.strategy])
        self._config = self.model.config_under(brownout)

    def prefill(self, tokens: Int[np.ndarray, " T"], rows: Int[np.ndarray, "R c"]) -> StepOutput:
        """Runs one `prefill_step`: a row a chunk, as `jmoe.steps.pack_row` packs it."""
        return self._sampled(self._call(programs()[0], tokens, rows), rows)

    def decode(self, rows: Int[np.ndarray, "R c"]) -> StepOutput:
        """Runs one `decode_step`: a row a sequence."""
        return self._sampled(self._call(programs()[1], rows), rows)

    def _sampled(self, out: StepOutput, rows: Int[np.ndarray, "R c"]) -> StepOutput:
        if (mode := sampling_mode(rows)) == "greedy":
            return out
        last, tokens, logprobs = _sample(
            self._state.last_token, out.logits, jnp.asarray(rows), truncate=mode == "truncate"
        )
        self._state = self._state._replace(last_token=last)
        return out._replace(tokens=tokens, logprobs=logprobs)

    def _call(self, step: Callable[..., tuple], *arrays: np.ndarray) -> StepOutput:
        model = self.model
        self._state, out = step(
            self._config,
            model.weights,
            self._state,
            *map(jnp.asarray, arrays),
            self._no_deltas,
            self._control,
            max_active=model.config.num_experts,
        )
        if self._config.strategy is not None:
            self._config.strategy.check(out.wrong)
        return out


@cache
def programs() -> tuple[Callable[..., tuple], Callable[..., tuple]]:
    """Returns `prefill_step` and `decode_step`, jitted; the options depend on the backend there
    is.
    """
    jit = partial(
        jax.jit,
        static_argnums=0,
        static_argnames="max_active",
        donate_argnums=2,
        compiler_options=compiler_options() or None,
    )
    return jit(prefill_step), jit(decode_step)


_sample = jax.jit(sample_step, static_argnames="truncate", donate_argnums=0)
