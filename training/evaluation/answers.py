"""Greedy answers to many prompts, as a server under full load gives them.

`batch` slots decode together. A sequence that ends frees its slot, and the prompts next in line go
in as soon as they fill a prefill step or a quarter of the slots is free. So nearly every decode
step has nearly `batch` rows: brownout plans over the rows of a step, which makes the batch a part
of the setting, and a batch that is left to run dry would measure many settings at once.

There are two shapes and so two compiled programs, whatever the prompts and the setting.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jmoe.api import Model
from jmoe.brownout import Brownout
from jmoe.packed_rows import KV_LEN, Q_LEN, SLOT, empty_rows
from jmoe.stepper import Stepper
from jmoe.steps import StepOutput

MAX_PREFILL_SEQS = 16


@dataclass(frozen=True)
class Answers:
    """What `answer` returns: new tokens of each prompt, an end token included, their
    log-probabilities; and visits.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    degraded_visits: int
    expert_visits: int


def answer(
    model: Model,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    brownout: Brownout | None = None,
    *,
    batch: int = 64,
    chunk: int = 256,
    progress: Callable[[int], None] = lambda ended: None,
) -> Answers:
    """Continues every prompt greedily, up to an end token or its limit.

    Args:
        model: as `jmoe.load` returns it.
        prompts: token lists, none empty.
        limits: most new tokens of each prompt, at least 1.
        brownout: of prefill and decode; None is none.
        batch: slots that decode together.
        chunk: tokens of a prefill step; at least the longest prompt.
        progress: called with the number of prompts that ended since the last call.

    Raises ValueError for a way the model does not have.
    """
    run = _Run(model, prompts, limits, brownout, batch, chunk)
    left = len(prompts)
    while left:
        ended = run.step()
        left -= ended
        if ended:
            progress(ended)
    visits = sum(len(p) + len(out) - 1 for p, out in zip(prompts, run.out, strict=True))
    per_token = model.config.num_moe_layers * model.config.experts_per_token
    return Answers(run.out, run.logprobs, run.degraded, visits * per_token)


class _Run:
    """Slots and the prompts in them; -1 in `owner` is a free slot."""

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        brownout: Brownout | None,
        batch: int,
        chunk: int,
    ) -> None:
        longest = max(len(p) + limit for p, limit in zip(prompts, limits, strict=True))
        self.stepper = Stepper(model, brownout, num_slots=batch, max_len=longest)
        self.prompts, self.limits = prompts, limits
        self.stops = set(model.config.eos_token_ids)
        self.chunk = max(chunk, max(map(len, prompts)))
        self.waiting = deque(range(len(prompts)))
        self.owner = np.full(batch, -1, np.int32)
        self.kv_len = np.zeros(batch, np.int32)
        self.out: list[list[int]] = [[] for _ in prompts]
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        self.degraded = 0

    def step(self) -> int:
        """Runs a prefill step where it is time for one, else a decode step. Returns how many
        prompts end with it.
        """
        entering = self._entering()
        return self._prefill(entering) if entering else self._decode()

    def _entering(self) -> list[int]:
        """Returns the prompts of the next prefill step; none while it should wait for more of
        them.
        """
        free = int((self.owner < 0).sum())
        most = min(free, MAX_PREFILL_SEQS)
        chosen, tokens, full = [], 0, False
        for prompt in self.waiting:
            tokens += len(self.prompts[prompt])
            if tokens > self.chunk or len(chosen) == MAX_PREFILL_SEQS:
                full = True
                break
            if len(chosen) == most:
                break
            chosen.append(prompt)
        return chosen if full or 4 * free >= len(self.owner) else []

    def _prefill(self, entering: list[int]) -> int:
        slots = np.flatnonzero(self.owner < 0)[: len(entering)]
        rows = empty_rows(min(len(self.owner), MAX_PREFILL_SEQS))
        tokens = np.zeros(self.chunk, np.int32)
        at = 0
        for row, (slot, index) in enumerate(zip(slots, entering, strict=True)):
            prompt = self.prompts[self.waiting.popleft()]
            tokens[at : at + len(prompt)] = prompt
            at += len(prompt)
            rows[row, [SLOT, KV_LEN, Q_LEN]] = slot, len(prompt), len(prompt)
            self.owner[slot], self.kv_len[slot] = index, len(prompt)
        return self._accept(slots, self.stepper.prefill(tokens, rows))

    def _decode(self) -> int:
        rows = empty_rows(len(self.owner))
        live = np.flatnonzero(self.owner >= 0)
        self.kv_len[live] += 1
        rows[: len(live), SLOT] = live
        rows[: len(live), KV_LEN] = self.kv_len[live]
        rows[: len(live), Q_LEN] = 1
        return self._accept(live, self.stepper.decode(rows))

    def _accept(self, slots: np.ndarray, output: StepOutput) -> int:
        """Takes a new token for each slot; row r of the step was that of `slots[r]`. Returns how
        many prompts end.
        """
        ended = 0
        tokens, logprobs = (np.asarray(a).tolist() for a in (output.tokens, output.logprobs))
        self.degraded += int(np.asarray(output.degraded)[: len(slots)].sum())
        for slot, token, logprob in zip(slots, tokens, logprobs, strict=False):
            index = int(self.owner[slot])
            out = self.out[index]
            out.append(token)
            self.logprobs[index].append(logprob)
            if token in self.stops or len(out) == self.limits[index]:
                self.owner[slot] = -1
                ended += 1
        return ended
