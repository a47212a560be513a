"""What the host reads of a step, in the step's own order and without padding."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jmoe.steps import StepOutput
from serving.execution.buckets import Buckets, Key
from serving.execution.ranks import ByRank
from serving.plan import Copies, StepResult


class Results:
    """Reads the outputs of one model's programs."""

    def __init__(self, buckets: Buckets, moe_layers: Sequence[bool], num_ranks: int) -> None:
        """`moe_layers` says of each layer whether it has experts."""
        self._buckets, self._moe_layers, self._num_ranks = buckets, moe_layers, num_ranks

    def start(self, out: StepOutput, key: Key, step: ByRank) -> Callable[[], StepResult]:
        """Starts the copies of what the host reads; returns a function that waits for them."""
        out = out._replace(logits=None, hidden=None)
        for leaf in jax.tree.leaves(out):
            leaf.copy_to_host_async()
        row_at, token_at = step.row_at(self._buckets.rows(key)), step.token_at(key.size)
        num_ranks, plan = self._num_ranks, step.plan

        def read() -> StepResult:
            read = jax.device_get(out)
            none = [0] * len(row_at)
            by_rank = read.expert_rows.reshape(num_ranks, -1, read.expert_rows.shape[-1])
            copies = None
            if read.balance is not None:  # every rank says the same
                ranks = (part.reshape(num_ranks, -1)[0] for part in read.balance)
                copies = Copies(*(self._of_all(part, plan.first_layer) for part in ranks))
            return StepResult(
                none if read.tokens is None else read.tokens[row_at].tolist(),
                none if read.logprobs is None else read.logprobs[row_at].tolist(),
                read.degraded[row_at].tolist(),
                self._of_all(by_rank.sum(0), plan.first_layer),
                None if read.prompt_logprobs is None else read.prompt_logprobs[token_at],
                self._of_all(by_rank.sum(-1).T, plan.first_layer) if num_ranks > 1 else None,
                copies,
                None if read.needed is None else self._of_all(read.needed, plan.first_layer),
                1 - plan.size / (step.num_ranks * key.size),
                None if read.top_ids is None else read.top_ids[row_at],
                None if read.top_logprobs is None else read.top_logprobs[row_at],
            )

        return read

    def _of_all(self, found: np.ndarray, first_layer: int) -> np.ndarray:
        """Returns a value for all MoE layers, though a part of a step has only its own."""
        count = sum(self._moe_layers)
        if len(found) == count:
            return found
        every = np.zeros((count, *found.shape[1:]), found.dtype)
        before = sum(self._moe_layers[:first_layer])
        every[before : before + len(found)] = found
        return every
