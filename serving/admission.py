"""Admission: what an engine takes, decided as early and as cheaply as can be.

In order: the queue's length, before anything is looked at; the prompt's size, before it is copied
or tokenized; and, when its tokens are known, whether the request fits the model and the KV pages.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from jmoe.family import Family
from jmoe.tokenizer import Tokenizer
from serving.config import EngineConfig
from serving.errors import NOT_OURS, InvalidRequest, Overloaded, RequestFailed, shown
from serving.plan import Limits
from serving.request import MAX_REQUEST_ID_CHARS, Bounds, Priority, Request, check_count

if TYPE_CHECKING:
    from serving.scheduling.scheduler import Scheduler

LONG_TEXT = 16_384
"""Characters above which a prompt is tokenized in a thread: 4 ms with the bundled tokenizer."""
RETRY_AFTER_S = 0.5
"""What an overloaded engine tells a caller before it knows its own speed."""


class Capacity:
    """How long a queue takes, by how long recent requests held a slot.

    With every slot taken, a slot is free again once in (time that a request holds one) / (slots):
    a measure of what the engine can do, whatever was asked of it lately.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._held_s: deque[float] = deque(maxlen=64)

    def observe(self, held_s: float) -> None:
        """A request finished after holding a slot for so long."""
        self._held_s.append(held_s)

    def drain_s(self, num_waiting: int, unknown_s: float = RETRY_AFTER_S) -> float:
        """Seconds until a queue of this length has got its slots; `unknown_s` before any request
        finished.
        """
        if not self._held_s:
            return unknown_s
        return fmean(self._held_s) / self._num_slots * num_waiting


class Admission:
    """The checks of one engine, and its tokenizers' thread."""

    def __init__(self, config: EngineConfig, limits: Limits, family: Family | None) -> None:
        """`family` None (tests) takes token prompts only."""
        self._config, self._limits = config, limits
        self._tokenizers = [None] if family is None else [model.tokenizer for model in family]
        self._eos = [()] if family is None else [model.config.eos_token_ids for model in family]
        self.capacity = {priority: Capacity(limits.decode_rows) for priority in Priority}
        self.num_tokenizing = Counter[Priority]()  # long texts, waiting for their tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jmoe-tokenize")
        most = config.max_model_len - 1
        longest = max(1 if one is None else one.longest_token for one in self._tokenizers)
        vocab_size = 0 if family is None else family.config.vocab_size
        self.bounds = Bounds(most, most * longest, vocab_size)

    def tokenizer(self, request: Request) -> Tokenizer | None:
        """Of the model that a request asks; None: it takes token ids only."""
        return self._tokenizers[request.model]

    def stop_token_ids(self, request: Request) -> frozenset[int]:
        """Tokens that end a request: its own, and its model's unless it ignores those."""
        sampling = request.sampling
        own = () if sampling.ignore_eos else self._eos[request.model]
        return frozenset((*sampling.stop_token_ids, *own))

    def check_queue(
        self, priority: Priority, scheduler: "Scheduler", ttft_slo_s: float = math.inf
    ) -> None:
        """Raises Overloaded where more requests of a class wait than the settings allow, or so many
        that one more would get its first token later than `ttft_slo_s` (`admission: objective`).
        """
        most, best_effort = self._config.max_queue_len, priority is Priority.BEST_EFFORT
        waiting = len(scheduler.queues[priority]) + self.num_tokenizing[priority]
        if best_effort:
            most = self._config.max_best_effort_queue_len or most
        queued, own = waiting - scheduler.num_free_slots(priority), self.capacity[priority]
        if queued < most:
            late_s = own.drain_s(queued + 1, 0.0) - ttft_slo_s
            if self._config.admission == "objective" and late_s > 0 and queued >= 0:
                raise Overloaded(
                    f"{waiting} requests wait already: a first token would come {late_s:.2g} s "
                    f"later than the objective of {ttft_slo_s:g} s allows; try again later",
                    late_s,
                )
            return
        drain_s = own.drain_s(waiting)
        if best_effort:
            ls = Priority.LATENCY_SENSITIVE
            drain_s += self.capacity[ls].drain_s(len(scheduler.queues[ls]), 0.0)
        raise Overloaded(f"{waiting} requests wait already; try again later", drain_s)

    def check_size(self, request: Request) -> None:
        """Looks at sizes and types only. Raises InvalidRequest for what can never be served."""
        bounds, prompt, timeout_s = self.bounds, request.prompt, request.timeout_s
        tokenizer = self.tokenizer(request)
        check_count("characters of request_id", len(request.request_id), MAX_REQUEST_ID_CHARS)
        if timeout_s is not None and not (
            isinstance(timeout_s, int | float) and math.isfinite(timeout_s)
        ):
            raise InvalidRequest(f"timeout_s is {shown(timeout_s)}; it must be a number of seconds")
        if isinstance(prompt, str):
            if tokenizer is None:
                raise InvalidRequest("this model has no tokenizer; send token ids")
            if len(prompt) > bounds.max_prompt_chars:
                raise InvalidRequest(
                    f"the prompt has {len(prompt)} characters; "
                    f"{bounds.max_prompt_tokens} tokens, this server's longest prompt, have "
                    f"{bounds.max_prompt_chars} at most"
                )
        elif isinstance(prompt, bytes) or not isinstance(prompt, Sized):
            kind = type(prompt).__name__
            raise InvalidRequest(f"the prompt is of type {kind}; send text or token ids")
        elif len(prompt) > bounds.max_prompt_tokens:
            raise self._too_long(len(prompt), request)
        if request.sampling.stop and tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer; this model has none")
        for token in request.sampling.stop_token_ids:
            if token < 0 or (bounds.vocab_size and token >= bounds.vocab_size):
                raise InvalidRequest(
                    f"stop_token_ids has {shown(token)}, which is no token of this model; "
                    f"ids are between 0 and {bounds.vocab_size - 1}"
                )

    async def tokenize(self, request: Request) -> list[int]:
        """Token ids of a prompt whose size was checked. Raises InvalidRequest."""
        prompt = request.prompt
        if isinstance(prompt, str):
            tokenizer = self.tokenizer(request)
            assert tokenizer is not None  # its size was checked
            tokens = await self._encode(tokenizer, prompt, request.priority)
        else:
            tokens = _ids(prompt)
        if not tokens:
            raise InvalidRequest("the prompt is empty; send at least one token")
        return tokens

    def check_fit(self, request: Request, tokens: list[int]) -> None:
        """Raises InvalidRequest where prompt and output exceed what the server can hold."""
        total = len(tokens) + request.sampling.max_new_tokens
        if total > self._config.max_model_len:
            raise self._too_long(len(tokens), request)
        limits, vocab = self._limits, self.bounds.vocab_size
        wrong = next((t for t in tokens if t < 0 or (vocab and t >= vocab)), None)
        if wrong is not None:
            raise InvalidRequest(f"token {shown(wrong)} is outside the vocabulary of {vocab}")
        if limits.pages_for(total) > limits.pages_per_rank:
            raise InvalidRequest(
                f"{total} positions need {limits.pages_for(total)} KV pages; "
                f"this server has {limits.pages_per_rank}"
            )

    def close(self) -> None:
        """Ends the thread; prompts that wait for it get a cancellation."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _too_long(self, num_tokens: int, request: Request) -> InvalidRequest:
        new = request.sampling.max_new_tokens
        return InvalidRequest(
            f"prompt ({num_tokens} tokens) and max_new_tokens ({new}) make {num_tokens + new} "
            f"positions; this server has {self._config.max_model_len}"
        )

    async def _encode(self, tokenizer: Tokenizer, text: str, priority: Priority) -> list[int]:
        try:
            if len(text) <= LONG_TEXT:
                return tokenizer.encode(text)
            # Others' steps go on meanwhile; one such text at a time.
            job = self._thread.submit(tokenizer.encode, text)
            self.num_tokenizing[priority] += 1
            try:
                return await asyncio.wrap_future(job)
            finally:
                self.num_tokenizing[priority] -= 1
        except NOT_OURS:
            raise
        except Exception as error:  # half a surrogate pair, or what else a library refuses
            raise InvalidRequest(f"the prompt cannot be tokenized: {error}") from None
        except BaseException as error:  # a panic of an extension module is no Exception
            raise RequestFailed(f"the tokenizer failed: {error}") from None


def _ids(prompt: Sequence[int]) -> list[int]:
    try:
        array = np.asarray(prompt)
    except (ValueError, TypeError, OverflowError):
        array = None  # rows of different lengths, for one
    if array is None or array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequest(f"the prompt is {shown(prompt)}; send text or one list of token ids")
    return array.tolist()
