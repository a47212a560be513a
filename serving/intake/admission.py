"""Admission control: decides which requests an engine takes, as early and cheaply as possible, and
ends those whose time runs out.

It checks, in this order, the queue's length, before the request is read; the prompt's size, before
it is copied or tokenized; and, once its tokens are known, whether the request fits the model and
the KV pages.
"""

import asyncio
import contextlib
import math
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from jmoe.api import Model
from jmoe.family import Family
from jmoe.tokenizer import Tokenizer, lacking
from serving.config import EngineConfig
from serving.errors import (
    NOT_OURS,
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    QueuedTooLong,
    RequestFailed,
    TooLong,
    shown,
)
from serving.intake.chat_templates import ChatTemplate
from serving.intake.sampling_defaults import sampling_defaults
from serving.intake.structure import Structures
from serving.plan import Limits
from serving.request import (
    Bounds,
    Chat,
    Priority,
    Request,
    SamplingParams,
    check_count,
)
from serving.scheduling.sequence import SequenceState

if TYPE_CHECKING:
    from serving.scheduling.scheduler import Scheduler


LONG_TEXT = 16_384
"""Characters above which a prompt is tokenized in a thread: 4 ms with the bundled tokenizer."""
RETRY_AFTER_S = 0.5
"""The retry time that an overloaded engine reports before it knows its own speed."""
FAIR_ROOM = 0.5
"""Share of the queue that a key may fill which has more than its share of what is under way: the
rest stays for the others."""
ACTIVE_S = 60.0
"""So long a key that asks for nothing more has some of the queue kept for it."""


class Capacity:
    """Estimates how long a queue takes, from how long recent requests held a slot.

    If all slots are taken, one is freed every (time that a request holds a slot) / (slots) on
    average. This measures the engine's capacity, whatever its recent load.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._held_s: deque[float] = deque(maxlen=64)

    def observe(self, held_s: float) -> None:
        """Notes that a finished request held a slot for `held_s`."""
        self._held_s.append(held_s)

    def drain_s(self, num_waiting: int, unknown_s: float = RETRY_AFTER_S) -> float:
        """Returns how long (s) until a queue of this length has got its slots; `unknown_s` before
        any request has finished.
        """
        if not self._held_s:
            return unknown_s
        return fmean(self._held_s) / self._num_slots * num_waiting


def _written(tokenizer: Tokenizer) -> tuple[object, ...]:
    """Returns what a chat's text depends on."""
    return *tokenizer.chat_templates.items(), None, *tokenizer.special_tokens.items()


class Admission:
    """An engine's admission checks, and the thread that tokenizes long prompts."""

    def __init__(self, config: EngineConfig, limits: Limits, family: Family | None) -> None:
        """Without `family` (in tests), only prompts of token ids are taken."""
        self._config, self._limits = config, limits
        self._models: list[Model] = [] if family is None else list(family)  # by place
        read = cache(self._read_defaults)  # once for places of one model
        self._defaults: list[Mapping[str, Any]] = [read(one.path) for one in self._models] or [{}]
        self._structures = list(map(Structures, self._models))
        self.capacity = {priority: Capacity(limits.decode_rows) for priority in Priority}
        self.num_tokenizing = Counter[Priority]()  # chats and long texts, waiting for their tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jmoe-tokenize")
        cfg = None if family is None else family.config
        self._vocab_size = cfg.vocab_size if cfg else 0
        self.visits_per_token = cfg.num_moe_layers * cfg.experts_per_token if cfg else 1
        self.bounds = self._bounds()
        self._templates: dict[tuple[object, ...], ChatTemplate] = {}
        self._asked_at: dict[str, float] = {}  # by API key, the longest ago first

    async def put(self, number: int, model: Model) -> None:
        """Makes a model the one that requests to `number` are for; what only the one before needed
        is ended.
        """
        before, self._models[number] = self._structures[number], model
        self._defaults[number] = self._read_defaults(model.path)
        self._structures[number] = Structures(model)
        self.bounds = self._bounds()
        used = {_written(one.tokenizer) for one in self._models if one.tokenizer is not None}
        gone = [self._templates.pop(what) for what in list(self._templates) if what not in used]
        for limited in (before, *gone):
            await limited.close()

    def _bounds(self) -> Bounds:
        tokenizers = [one.tokenizer for one in self._models]
        longest = max((one.longest_token for one in tokenizers if one is not None), default=1)
        most, most_logprobs = self._config.max_model_len - 1, self._config.max_logprobs_per_call
        return Bounds(most, most * longest, self._vocab_size, most_logprobs)

    def _template(self, tokenizer: Tokenizer) -> ChatTemplate:
        """Returns a model's chat templates; models that have the same ones share them."""
        what = _written(tokenizer)
        if what not in self._templates:
            self._templates[what] = ChatTemplate(tokenizer, self.bounds)
        return self._templates[what]

    def _read_defaults(self, directory: Path) -> dict[str, Any]:
        return sampling_defaults(directory) if self._config.generation_config == "auto" else {}

    def with_defaults(self, sampling: SamplingParams, model: int) -> SamplingParams:
        """Returns parameters with the defaults of the model of this number for what the request
        left out.
        """
        return sampling.with_defaults(self._defaults[model])

    def tokenizer(self, request: Request) -> Tokenizer | None:
        """Returns the tokenizer of a request's model; None if that takes token ids only."""
        return self._models[request.model].tokenizer if self._models else None

    def stop_token_ids(self, request: Request) -> frozenset[int]:
        """Returns the tokens that end a request: its own, and the model's unless it ignores
        them.
        """
        sampling = request.sampling
        ends = self._models[request.model].config.eos_token_ids if self._models else ()
        own = () if sampling.ignore_eos else ends
        return frozenset((*sampling.stop_token_ids, *own))

    async def sequence(self, request: Request, arrived_at: float) -> SequenceState:
        """Checks and tokenizes a request; returns a sequence that is ready to be scheduled.

        Raises InvalidRequest, and RequestFailed if the tokenizer fails.
        """
        self.check_size(request)
        prompt = await self.tokenize(request)
        request = self.fitted(request, prompt)
        self.check_fit(request, prompt)
        sampling = request.sampling
        matcher = None
        if sampling.structure is not None:
            if not self._structures:
                raise InvalidRequest(
                    "structured output needs a model; this engine runs without one", "structure"
                )
            async with _in_time(request, "the structure was not read"):
                matcher = await self._structures[request.model].matcher(sampling.structure)
        return SequenceState(
            request,
            prompt,
            seed=random.getrandbits(64) if sampling.seed is None else sampling.seed,
            arrived_at=arrived_at,
            stop_token_ids=self.stop_token_ids(request),
            tokenizer=self.tokenizer(request),
            matcher=matcher,
            visits_per_token=self.visits_per_token,
        )

    def room(self, key: str, under_way: Counter[str], now: float) -> float:
        """Returns the share of the queue up to which a key's requests may join it: all of it, but
        `FAIR_ROOM` for one that has more than its share of the requests `under_way` (a count by
        key) while others ask, too.
        """
        self._asked_at.pop(key, None)
        self._asked_at[key] = now
        while now - (oldest := next(iter(self._asked_at.items())))[1] > ACTIVE_S:
            del self._asked_at[oldest[0]]
        if len(self._asked_at) == 1:
            return 1.0
        # Who has nothing under way may want something.
        sharers = max(2, len(under_way) + (key not in under_way))
        return FAIR_ROOM if under_way[key] * sharers > under_way.total() else 1.0

    def check_queue(
        self,
        priority: Priority,
        scheduler: "Scheduler",
        ttft_slo_s: float = math.inf,
        prompts_s: float = 0.0,
        steps_s: float = 0.0,
        room: float = 1.0,
        caution: float = 1.0,
    ) -> None:
        """Raises Overloaded if the queue of a class is full, or if so many requests wait that
        another one would get its first token later than `ttft_slo_s`. `prompts_s` is what the
        prompts that wait take at least, and `steps_s` what one takes that waits no more. With
        `room` below 1 that share of the queue counts as all of it, and with `caution` that share of
        the time that is left for waiting.
        """
        most, best_effort = self._config.max_queue_len, priority is Priority.BEST_EFFORT
        waiting = len(scheduler.queues[priority]) + self.num_tokenizing[priority]
        if best_effort:
            most = self._config.max_best_effort_queue_len or most
        queued, own = waiting - scheduler.num_free_slots(priority), self.capacity[priority]
        others = f"{waiting} requests wait already; keys with fewer under way come first"
        if queued < room * most:
            slots_s = own.drain_s(queued + 1, 0.0) if queued >= 0 else 0.0
            waits_s = max(slots_s, prompts_s)
            late_s = waits_s - room * caution * (ttft_slo_s - steps_s)
            if waits_s > 0 and late_s > 0:
                said = (
                    f"{waiting} requests wait already: a first token would come {late_s:.2g} s "
                    f"later than the objective of {ttft_slo_s:g} s allows"
                )
                raise Overloaded(f"{said if room == 1 else others}; try again later", late_s)
            return
        drain_s = own.drain_s(waiting)
        if best_effort:
            ls = Priority.LATENCY_SENSITIVE
            drain_s += self.capacity[ls].drain_s(len(scheduler.queues[ls]), 0.0)
        said = f"{waiting} requests wait already" if room == 1 else others
        raise Overloaded(f"{said}; try again later", drain_s)

    def check_size(self, request: Request) -> None:
        """Checks sizes and types only. Raises InvalidRequest for what can never be served."""
        bounds, prompt, tokenizer = self.bounds, request.prompt, self.tokenizer(request)
        if self._config.resident_experts and 0 < request.max_degraded_percent < 100:
            raise InvalidRequest(
                f"max_degraded_percent is {request.max_degraded_percent}; with experts in host "
                "memory (engine.resident_experts), whose visits go to substitutes, it must be 0 "
                "(no brownout) or 100",
                "max_degraded_percent",
            )
        if isinstance(prompt, str | Chat):
            if tokenizer is None:
                has = lacking(self._models[request.model].path) if self._models else "no tokenizer"
                raise InvalidRequest(f"this model has {has}; send token ids", "prompt")
            if isinstance(prompt, Chat):
                num_messages = len(prompt.messages)
                check_count("messages", num_messages, bounds.max_prompt_tokens, "prompt")
            bounds.check_chars(prompt.num_chars if isinstance(prompt, Chat) else len(prompt))
        elif isinstance(prompt, bytes) or not isinstance(prompt, Sized):
            kind = type(prompt).__name__
            raise InvalidRequest(f"the prompt is of type {kind}; send text or token ids", "prompt")
        else:
            bounds.check_tokens(len(prompt))
        if request.sampling.stop and tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer; this model has none", "stop")
        bounds.check_ids("stop_token_ids", request.sampling.stop_token_ids)
        bounds.check_ids("logit_bias", [token for token, _ in request.sampling.logit_bias])

    async def tokenize(
        self, request: Request, *, special_tokens: bool = True, waits: bool = True
    ) -> list[int]:
        """Returns the token ids of a prompt whose size was checked; of a text with the tokens that
        the tokenizer puts around it, if it is to. `waits`: the request counts in its class's queue.
        Raises InvalidRequest, and DeadlineExceeded for a chat.
        """
        prompt = request.prompt
        if isinstance(prompt, str | Chat):
            tokenizer = self.tokenizer(request)
            assert tokenizer is not None  # its size was checked
            self.num_tokenizing[request.priority] += waits
            try:
                tokens = await self._encode(tokenizer, request, special_tokens)
            finally:
                self.num_tokenizing[request.priority] -= waits
        else:
            tokens = _ids(prompt)
        if not tokens:
            raise InvalidRequest("the prompt is empty; send at least one token", "prompt")
        return tokens

    def fitted(self, request: Request, tokens: list[int]) -> Request:
        """Returns the request with `max_new_tokens` set: if it names none, `default_new_tokens`, or
        fewer if no more fit.
        """
        sampling = request.sampling
        if sampling.max_new_tokens is not None:
            return request
        most = min(self._config.max_model_len, self._limits.most_positions)
        left = max(1, most - len(tokens))
        most_new = min(left, sampling.default_new_tokens or left)
        return replace(request, sampling=replace(sampling, max_new_tokens=most_new))

    def check_fit(self, request: Request, tokens: list[int]) -> None:
        """Raises InvalidRequest if prompt and output exceed what the server can hold.

        The request must come from `fitted`.
        """
        least, most_new = request.sampling.min_new_tokens, request.sampling.max_new_tokens or 1
        if least > most_new:
            raise InvalidRequest(
                f"at least {least} new tokens are asked for, and {most_new} at most; ask for fewer "
                "at least, or for more at most",
                "min_new_tokens",
            )
        bounds, limits, total = self.bounds, self._limits, len(tokens) + most_new
        bounds.check_tokens(len(tokens))
        if total > self._config.max_model_len:
            raise TooLong(
                f"the prompt has {len(tokens)} tokens and up to {most_new} new ones are asked for: "
                f"{total} in all; the context length is {self._config.max_model_len} "
                "(engine.max_model_len)",
                "max_new_tokens",
            )
        bounds.check_logprobs([(request.sampling, len(tokens))])
        bounds.check_ids("prompt", tokens)
        if total > limits.most_positions:
            raise TooLong(
                f"{total} positions need {limits.pages_for(total)} KV pages; "
                f"this server has {limits.pages_per_rank}",
                "prompt" if len(tokens) >= limits.most_positions else "max_new_tokens",
            )

    async def close(self) -> None:
        """Ends the thread, and the processes of structures and templates; prompts that wait to be
        tokenized are cancelled.
        """
        self._thread.shutdown(wait=False, cancel_futures=True)
        for limited in (*self._structures, *self._templates.values()):
            await limited.close()

    async def _encode(
        self, tokenizer: Tokenizer, request: Request, special_tokens: bool
    ) -> list[int]:
        text, from_template = request.prompt, isinstance(request.prompt, Chat)
        if isinstance(text, Chat):
            async with _in_time(request, "the chat was not rendered"):
                text = await self._template(tokenizer).render(text)
        assert isinstance(text, str)
        encode = partial(
            tokenizer.encode, text, special_tokens=special_tokens and not from_template
        )
        try:
            if len(text) <= LONG_TEXT:
                return encode()
            return await self._in_thread(encode)
        except (Aborted, *NOT_OURS):
            raise
        except Exception as error:  # e.g. an unpaired surrogate that a library refuses
            raise InvalidRequest(f"the prompt cannot be tokenized: {error}", "prompt") from None
        except BaseException as error:  # a panic of an extension module is no Exception
            raise RequestFailed(f"the tokenizer failed: {error}") from None

    async def _in_thread(self, encode: Callable[[], list[int]]) -> list[int]:
        """Encodes one text at a time, so that steps go on meanwhile. Raises Aborted after `close`,
        or where it comes first.
        """
        stopped = Aborted("the engine stopped")
        try:
            encoding = self._thread.submit(encode)
        except RuntimeError:
            raise stopped from None
        try:
            return await asyncio.wrap_future(encoding)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise stopped from None


@contextlib.asynccontextmanager
async def _in_time(request: Request, what: str) -> AsyncIterator[None]:
    """Raises DeadlineExceeded when a request's timeout is over."""
    try:
        async with asyncio.timeout(request.timeout_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded(
            f"{what} within {request.timeout_s} s; others may come first"
        ) from None


def _ids(prompt: Sequence[int]) -> list[int]:
    try:
        array = np.asarray(prompt)
    except (ValueError, TypeError, OverflowError):
        array = None  # rows of different lengths, for one
    if array is None or array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequest(
            f"the prompt is {shown(prompt)}; send text or one list of token ids", "prompt"
        )
    return array.tolist()


class Deadlines:
    """Ends late requests with event loop timers; requests without a timeout have none."""

    def __init__(
        self,
        queue_timeout_s: float,
        clock: Callable[[], float],
        end: Callable[[SequenceState, DeadlineExceeded], None],
    ) -> None:
        """`end` is called with a late sequence and the error.

        Timeouts start at a request's arrival, by `clock`. `queue_timeout_s` 0: requests may wait in
        the queue without limit.
        """
        self._queue_timeout_s = queue_timeout_s or math.inf
        self._clock, self._end = clock, end

    def watch(self, sequence: SequenceState) -> None:
        """Starts a sequence's timer; `forget` cancels it."""
        until = _until(sequence)
        if math.isnan(sequence.started_at):
            until = min(until, sequence.arrived_at + self._queue_timeout_s)
        if until < math.inf:
            left_s = max(0.0, until - self._clock())
            loop = asyncio.get_running_loop()
            sequence.deadline = loop.call_later(left_s, self._late, sequence, until)

    def forget(self, sequence: SequenceState) -> None:
        """Cancels a sequence's timer when its client disconnects or it has ended."""
        if sequence.deadline is not None:
            sequence.deadline.cancel()

    def _late(self, sequence: SequenceState, until: float) -> None:
        if until == _until(sequence):
            request = sequence.request
            why = f"not finished after {request.timeout_s:g} s"
            if request.timeout_is_servers:
                why += " (request_timeout_s: this request named no time of its own)"
            self._end(sequence, DeadlineExceeded(why))
        elif math.isnan(sequence.started_at):
            limit = f"{self._queue_timeout_s:g} s (engine.queue_timeout_s)"
            why = f"not begun after {limit}: the server is busy; try again later"
            self._end(sequence, QueuedTooLong(why))
        else:
            self.watch(sequence)  # it began in time; its own timeout remains


def _until(sequence: SequenceState) -> float:
    timeout_s = sequence.request.timeout_s
    return math.inf if timeout_s is None else sequence.arrived_at + timeout_s
