"""What a brownout setting costs and saves: divergence from the exact model on given answers, and
active experts, of prefill and decode apart.

Answers are given, token by token, so that every setting is asked the same questions. Decode steps
have `batch` rows as long as items last, since brownout plans over the rows of a step.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jmoe.api import Model
from jmoe.brownout import Brownout
from jmoe.packed_rows import empty_rows, pack_row
from jmoe.stepper import Stepper
from training.evaluation.answers import MAX_PREFILL_SEQS


class Cost(NamedTuple):
    """What one phase under a setting costs and saves."""

    divergence: Float[np.ndarray, " items"]  # KL from the exact model, summed over answer tokens
    rooted: Float[np.ndarray, " items"]
    """Square roots of each token's, summed: a few tokens make most of the divergence, and what
    costs least on them does not on others; of this, all have a say.
    """
    active: Float[np.ndarray, " layers"]  # experts that a layer of a full step computes, mean


class _Step(NamedTuple):
    """Rows of one step: a chunk of an item each."""

    tokens: Int[np.ndarray, " T"]
    rows: Int[np.ndarray, "R c"]
    items: Int[np.ndarray, " R"]  # of each row; -1: padding, or a chunk whose prompt goes on
    is_full: bool


class Divergence:
    """Measures settings on the same items; exact logits are computed once and kept in host memory:
    answer tokens by vocabulary, in float32.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        *,
        batch: int,
        chunk: int,
    ) -> None:
        """Each item keeps its own KV pages. Raises ValueError as Stepper."""
        whole = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
        self.num_tokens = np.array([len(answer) + 1 for answer in answers])  # and what ends it
        self._stepper = Stepper(model, None, num_slots=len(whole), max_len=max(map(len, whole)))
        self._prefill = _prefill_steps(prompts, max(chunk, max(map(len, prompts))))
        self._decode = _decode_steps(whole, list(map(len, prompts)), batch)
        self._exact = [self._logits(steps) for steps in (self._prefill, self._decode)]
        self._holds_exact = True  # keys and values of the prompts

    def decode(self, setting: Brownout | None, levels: np.ndarray | None = None) -> Cost:
        """Returns the cost of answers decoded under a setting, behind exact prompts; `levels` as
        programs read them, in place of those of the model's file.
        """
        if not self._holds_exact:
            self._stepper.use(None)
            self._run(self._prefill, self._exact[0])
            self._holds_exact = True
        self._use(setting, levels)
        return self._run(self._decode, self._exact[1])

    def prefill(self, setting: Brownout | None, levels: np.ndarray | None = None) -> Cost:
        """Returns the cost of prompts under a setting, on answers that are decoded exactly."""
        self._holds_exact = False
        self._use(setting, levels)
        first = self._run(self._prefill, self._exact[0])
        self._stepper.use(None)
        others = self._run(self._decode, self._exact[1])
        return Cost(
            first.divergence + others.divergence, first.rooted + others.rooted, first.active
        )

    def _use(self, setting: Brownout | None, levels: np.ndarray | None) -> None:
        self._stepper.use(setting)
        if levels is not None:
            self._stepper.model.resident.set_levels(levels)

    def _logits(self, steps: Sequence[_Step]) -> list[np.ndarray]:
        found = []
        for step in steps:
            logits = self._stepper.prefill(step.tokens, step.rows).logits
            assert logits is not None
            found.append(np.asarray(logits))
        return found

    def _run(self, steps: Sequence[_Step], exact: Sequence[np.ndarray]) -> Cost:
        found = []
        for step, wanted in zip(steps, exact, strict=True):
            out = self._stepper.prefill(step.tokens, step.rows)
            assert out.logits is not None
            found.append(_compared(out.logits, jnp.asarray(wanted), out.expert_rows))
        sums, active = np.zeros((2, len(self.num_tokens))), []
        any_full = any(step.is_full for step in steps)
        for step, (by_row, by_layer) in zip(steps, found, strict=True):
            counts = step.items >= 0
            np.add.at(sums.T, step.items[counts], np.asarray(by_row, np.float64)[counts])
            if step.is_full or not any_full:
                active.append(np.asarray(by_layer))
        return Cost(sums[0], sums[1], np.mean(active, axis=0))


@jax.jit
def _compared(
    logits: Float[Array, "R V"], exact: Float[Array, "R V"], expert_rows: Int[Array, "layers E"]
) -> tuple[Float[Array, "R 2"], Int[Array, "layers"]]:
    """Returns the divergence of each row, and its root, and each layer's active experts."""
    wanted, found = jax.nn.log_softmax(exact), jax.nn.log_softmax(logits)
    by_row = jnp.maximum(jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1), 0.0)
    by_row = jnp.stack([by_row, jnp.sqrt(by_row)], axis=1)
    return by_row, jnp.sum(expert_rows > 0, axis=1, dtype=jnp.int32)


def _prefill_steps(prompts: Sequence[Sequence[int]], chunk: int) -> list[_Step]:
    """Returns steps of whole prompts, as many as fit."""
    steps, waiting = [], deque(range(len(prompts)))
    while waiting:
        items: list[int] = []
        room = chunk
        while waiting and len(items) < MAX_PREFILL_SEQS and len(prompts[waiting[0]]) <= room:
            items.append(waiting.popleft())
            room -= len(prompts[items[-1]])
        tokens = np.zeros(chunk, np.int32)
        flat = [token for item in items for token in prompts[item]]
        tokens[: len(flat)] = flat
        lens = [len(prompts[item]) for item in items]
        chunks = [(item, size, size) for item, size in zip(items, lens, strict=True)]
        steps.append(_step(tokens, chunks, MAX_PREFILL_SEQS, is_full=bool(waiting)))
    return steps


def _decode_steps(whole: Sequence[Sequence[int]], starts: Sequence[int], batch: int) -> list[_Step]:
    """Returns steps of a token of up to `batch` items each; where one ends, the next one enters."""
    at, steps, waiting = list(starts), [], deque(range(len(whole)))
    live: list[int] = []
    while True:
        live = [item for item in live if at[item] < len(whole[item])]
        while waiting and len(live) < batch:
            item = waiting.popleft()
            live += [item] if at[item] < len(whole[item]) else []
        if not live:
            return steps
        tokens = np.zeros(batch, np.int32)
        tokens[: len(live)] = [whole[item][at[item]] for item in live]
        chunks = [(item, at[item] + 1, 1) for item in live]
        steps.append(_step(tokens, chunks, batch, is_full=len(live) == batch))
        for item in live:
            at[item] += 1


def _step(
    tokens: np.ndarray, chunks: Sequence[tuple[int, int, int]], num_rows: int, *, is_full: bool
) -> _Step:
    """Returns a step of (item, positions with this chunk, its tokens)."""
    rows, items = empty_rows(num_rows), np.full(num_rows, -1, np.int32)
    for at, (item, kv_len, q_len) in enumerate(chunks):
        rows[at], items[at] = pack_row(item, kv_len=kv_len, q_len=q_len), item
    return _Step(tokens, rows, items, is_full)
