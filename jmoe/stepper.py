"""Step programs over slots that own fixed pages: what runs a model without a server's scheduler."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from jmoe.api import Model
from jmoe.attention import page_windows
from jmoe.brownout import Brownout
from jmoe.config import ModelConfig
from jmoe.packed_rows import Q_LEN, SLOT, empty_deltas, empty_rows, sampling_mode
from jmoe.parallel import steps as on_mesh
from jmoe.steps import (
    State,
    StepOutput,
    compiler_options,
    decode_step,
    make_state,
    prefill_step,
    sample_step,
)


class _Placed(NamedTuple):
    """A step's arrays as devices take them: each has some of its rows, and tokens of theirs."""

    tokens: Int[np.ndarray, "T"]
    rows: Int[np.ndarray, "R c"]
    at: Int[np.ndarray, "B"] | None  # where each row of the step went; None: where it was


class Stepper:
    """The device state of one run. Slot s always owns the same pages, enough for `max_len`; over a
    window they are used in turn.

    Over a mesh, slot s is on device s modulo their number. A step has the same rows as on one
    device, and so the same plans; its logits are not returned.

    Args:
        model: as `jmoe.load` returns it.
        brownout: of every step; None is none.
        num_slots: sequences there can be.
        max_len: positions of the longest.
        page_size: positions a KV page.
        max_chunk: positions that a sequence goes on by in a step, at most, each once; None: any
            number, over positions that were there before, too, and no page is used again.

    Raises ValueError for a way the model does not have; its steps do where a user's own strategy
    fails.
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
        self._mesh = None if model.home is None else model.home.mesh
        self._num_devices = 1 if self._mesh is None else self._mesh.size
        self._num_slots = -(-num_slots // self._num_devices)
        blocks = -(-max_len // page_size)
        self.model = model
        self.use(brownout)
        self._no_deltas = jnp.asarray(empty_deltas(self._num_devices))
        slots, each = np.arange(self._num_slots, dtype=np.int32)[:, None], []
        for window in page_windows(model.config):
            reached = window + max_chunk - 1 if window and max_chunk else max_len
            each.append(min(blocks, -(-(reached - 1) // page_size) + 1))
        tables = [slots * count + np.arange(blocks, dtype=np.int32) % count for count in each]
        table = np.stack(tables, axis=-1).reshape(self._num_slots, -1)

        def make() -> State:
            state = make_state(
                model.config,
                num_slots=self._num_slots,
                num_pages=tuple(self._num_slots * count for count in each),
                page_size=page_size,
                max_blocks=blocks,
                dtype=model.dtype,
            )
            return state._replace(block_table=jnp.asarray(table))

        self._state = make() if self._mesh is None else on_mesh.make_states(self._mesh, make)

    def use(self, brownout: Brownout | None) -> None:
        """Runs further steps under another setting. Raises ValueError as when this is made."""
        control = self.model.prepare(brownout)
        self._control = jnp.stack([control.threshold_percent, control.strategy])
        self._config = self.model.config_under(brownout)

    def prefill(self, tokens: Int[np.ndarray, " T"], rows: Int[np.ndarray, "R c"]) -> StepOutput:
        """Runs one `prefill_step`: a row a chunk, as `jmoe.steps.pack_row` packs it."""
        placed = self._placed(rows, tokens)
        return self._run(programs(self._mesh)[0], placed, placed.tokens, placed.rows)

    def decode(self, rows: Int[np.ndarray, "R c"]) -> StepOutput:
        """Runs one `decode_step`: a row a sequence."""
        placed = self._placed(rows)
        return self._run(programs(self._mesh)[1], placed, placed.rows)

    def _placed(
        self, rows: Int[np.ndarray, "R c"], tokens: Int[np.ndarray, " T"] | None = None
    ) -> _Placed:
        """Gives each row, and the tokens of its chunk, to the device that has its slot."""
        tokens = np.zeros(0, np.int32) if tokens is None else tokens
        if self._mesh is None:
            return _Placed(tokens, rows, None)
        slot, device = np.divmod(rows[:, SLOT], self._num_devices)
        real = rows[:, SLOT] >= 0
        size = min(len(rows), self._num_slots)
        at, spread = np.zeros(len(rows), np.int32), empty_rows(self._num_devices * size)
        owner = np.repeat(device, rows[:, Q_LEN] * real)[: len(tokens)]  # of each token
        by_device = [tokens[: len(owner)][owner == own] for own in range(self._num_devices)]
        room = bucket(max(map(len, by_device)))
        flat = np.zeros((self._num_devices, room), np.int32)
        for own, part in enumerate(by_device):
            mine = np.flatnonzero(real & (device == own))
            at[mine] = own * size + np.arange(len(mine))
            flat[own, : len(part)] = part
        spread[at[real]] = rows[real]
        spread[at[real], SLOT] = slot[real]
        return _Placed(flat.reshape(-1), spread, at)

    def _run(self, step: Callable[..., tuple], placed: _Placed, *arrays: np.ndarray) -> StepOutput:
        out = self._sampled(self._call(step, *arrays), placed.rows)
        if placed.at is None:
            return out
        # Read, not gathered: programs whose devices wait for one another must not overlap on a CPU.
        out = jax.device_get(out._replace(logits=None, hidden=None))
        by_device = out.expert_rows.reshape(self._num_devices, -1, out.expert_rows.shape[-1])
        own = {name: getattr(out, name)[placed.at] for name in ("tokens", "logprobs", "degraded")}
        return out._replace(expert_rows=by_device.sum(0), **own)

    def _sampled(self, out: StepOutput, rows: Int[np.ndarray, "R c"]) -> StepOutput:
        if (mode := sampling_mode(rows)) == "greedy":
            return out
        sample = programs(self._mesh)[2]
        last, tokens, logprobs = sample(
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


def bucket(count: int) -> int:
    """Returns the next power of two: few shapes, few compilations."""
    return 1 << max(count - 1, 0).bit_length()


@cache
def programs(mesh: Mesh | None) -> tuple[Callable[..., tuple], ...]:
    """Returns `prefill_step`, `decode_step` and `sample_step`, jitted, of one device or all of a
    mesh; the options depend on the backend there is.
    """

    def over(step: Callable[..., tuple], lies: on_mesh.Specs) -> Callable[..., tuple]:
        return step if mesh is None else on_mesh.spread(mesh, step, lies)

    def prefill(cfg: ModelConfig, *arrays: Any, max_active: int) -> tuple:
        step = partial(prefill_step, cfg, max_active=max_active)
        return over(step, on_mesh.STEPS["prefill"])(*arrays)

    def decode(cfg: ModelConfig, *arrays: Any, max_active: int) -> tuple:
        step = partial(decode_step, cfg, max_active=max_active)
        return over(step, on_mesh.STEPS["decode"])(*arrays)

    def sample(*arrays: Any, truncate: bool) -> tuple:
        return over(partial(sample_step, truncate=truncate), on_mesh.SAMPLE)(*arrays)

    jit = partial(
        jax.jit,
        static_argnums=0,
        static_argnames="max_active",
        donate_argnums=2,
        compiler_options=compiler_options() or None,
    )
    return jit(prefill), jit(decode), jax.jit(sample, static_argnames="truncate", donate_argnums=0)
