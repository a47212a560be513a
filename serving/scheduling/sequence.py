"""The state of a request while the engine works on it, and the text of its tokens."""

import asyncio
import enum
import logging
import math
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from jmoe.packed_rows import EXEMPT, NEXT_TOKEN, REFUSES, SPARED, pack_row, pack_shape
from jmoe.tokenizer import Tokenizer
from serving.errors import NOT_OURS, RequestFailed, ServingError, shown
from serving.plan import Phase, Seat
from serving.request import Output, Priority, Request, SamplingParams, ThresholdSpan, Usage
from serving.scheduling.prefixes import Prefix

if TYPE_CHECKING:
    from serving.intake.structure import Matcher
    from serving.scheduling.step import ScheduledStep


class StopString:
    """Finds a string in a text that arrives character by character (Knuth, Morris and Pratt 1977).

    A character takes amortized constant time. The table of borders is built on demand.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._borders = [0]  # [n]: longest proper prefix of text[:n + 1] that also ends it
        self.num_matched = 0  # length of the longest prefix that the text read so far ends with

    def push(self, character: str) -> bool:
        """Takes the text's next character; returns True if it completes the string."""
        matched = self.num_matched
        while matched and (matched == len(self._text) or self._text[matched] != character):
            matched = self._borders[matched - 1]
        if self._text[matched] == character:
            matched += 1
        self.num_matched = matched
        self._extend_borders()
        return matched == len(self._text)

    def _extend_borders(self) -> None:
        """Extends the border table to the matched length."""
        while len(self._borders) < self.num_matched:
            border, character = self._borders[-1], self._text[len(self._borders)]
            while border and self._text[border] != character:
                border = self._borders[border - 1]
            self._borders.append(border + (self._text[border] == character))


class Detokenizer:
    """Text of one sequence; what may be the start of a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams) -> None:
        """Without a tokenizer, all text is empty. No stop string ends one that has no more than
        `min_new_tokens`.
        """
        self._least, self._includes = sampling.min_new_tokens, sampling.include_stop
        skips = sampling.skip_special_tokens
        self._stream = None if tokenizer is None else tokenizer.stream(skips)
        self._stop = [StopString(text) for text in sampling.stop]
        self._held, self._num_tokens = "", 0

    def push(self, token: int) -> tuple[str, bool]:
        """Takes a token; returns the text to release, and whether a stop string ended it.

        The stop string is left out of the text, unless that includes it. The one completed first
        counts; if several are completed at once, the longest.
        """
        self._num_tokens += 1
        return ("", False) if self._stream is None else self._take(self._stream.push(token))

    def finish(self) -> str:
        """Returns the text that was held back, when no token follows."""
        if self._stream is None:
            return ""
        text, stopped = self._take(self._stream.finish())
        if not stopped:
            text, self._held = text + self._held, ""
        return text

    def _take(self, piece: str) -> tuple[str, bool]:
        if not self._stop:
            return piece, False
        before = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            # Push the character to all stop strings, even after one is complete.
            complete = [stop.num_matched for stop in self._stop if stop.push(character)]
            if complete and self._num_tokens > self._least:
                self._held = ""
                return before[: end - (0 if self._includes else max(complete))], True
        num_held = max(stop.num_matched for stop in self._stop)
        cut = len(before) - num_held
        self._held = before[cut:]
        return before[:cut], False


log = logging.getLogger(__name__)


class SequenceStatus(enum.Enum):
    """A sequence's status. It holds pages and a slot in PREFILL and DECODE only."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


class SequenceState:
    """Tokens, pages and statistics of one request.

    `num_sampled` counts tokens that launched steps sample, and `len(tokens)` those that were read;
    the difference is in flight (at most one). Positions `[0, num_computed)` are written to pages.
    """

    def __init__(
        self,
        request: Request,
        prompt: list[int],
        *,
        seed: int,
        arrived_at: float,
        stop_token_ids: frozenset[int],
        tokenizer: Tokenizer | None,
        matcher: "Matcher | None" = None,
        visits_per_token: int = 1,
    ) -> None:
        """`matcher` is that of a structured output; a token visits `visits_per_token` experts, over
        all MoE layers.
        """
        sampling = request.sampling
        assert sampling.max_new_tokens is not None  # admission has set it
        self.max_new_tokens = sampling.max_new_tokens
        self.request = request
        self.prompt = prompt
        self.arrived_at = arrived_at
        self.stop_token_ids = stop_token_ids
        self.status = SequenceStatus.WAITING
        self.tokens: list[int] = []
        self.logprobs: list[float] = []  # of tokens, as they were drawn
        self.num_sampled = 0
        self.num_computed = 0
        self.slot = -1
        self.pages: list[dict[int, int]] = []  # by group of layers and block; ascending
        self.room = 0  # positions up to which it has pages
        self.prefix = Prefix()
        self.cached_tokens = 0  # context tokens found in the prefix cache at first admission
        self.row = pack_row(
            -1,
            kv_len=0,
            exempt=0 if request.allow_brownout else REFUSES,
            seed=(seed ^ (seed >> 32)) & 0xFFFFFFFF,
            top_k=sampling.top_k,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_prompt=sampling.top_prompt_logprobs,
        )
        self.shape = None  # how its logits are changed before a token is drawn
        if sampling.shapes:
            self.shape = pack_shape(
                min_p=sampling.min_p,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                repetition_penalty=sampling.repetition_penalty,
            )
        self.matcher = matcher
        self.detokenizer = Detokenizer(tokenizer, sampling)
        self.started_at = math.nan  # when its first step was launched
        self.began_at = math.nan  # when the device began that step
        self.first_at = math.nan  # when its first token arrived
        self.previous_at = math.nan  # ... and its newest
        self.visits_per_token = visits_per_token
        self.degraded_visits = 0
        self.visited_tokens = 0
        self.expected_nats = 0.0  # expected loss of its tokens; NaN: not known of all
        self.planned_tokens = 0  # of steps, read or not; counted where there is a bound
        self.bounds_degraded = request.allow_brownout and 0 < request.max_degraded_percent < 100
        self.spared = False  # its last planned step was exact, to stay within the bound
        self.spans: dict[Phase, ThresholdSpan] = {}
        self.step: "ScheduledStep | None" = None  # the step under way that contains it
        self.unread = False  # its last step must be read before its next one (`ExactRows`)
        self.priority = request.priority  # best effort that has waited too long is promoted
        self.waiting_since = arrived_at  # when its last step began, or it arrived
        self.ready_at = math.nan  # when a slot and pages for its first step were available
        self.prompt_logprobs: list[float] = []
        self.prompt_best: list[float] = []  # those of the likeliest tokens there
        self.prompt_top: list[tuple[tuple[int, float], ...]] = []  # several, with their ids
        self._outputs = deque[Output | Exception]()  # that its caller has not taken yet
        self._taker: asyncio.Future[None] | None = None  # the caller waits on it for another
        self.deadline: asyncio.TimerHandle | None = None

    @property
    def context(self) -> list[int]:
        """Tokens whose keys and values must be computed before the next token can be sampled."""
        return self.prompt + self.tokens

    @property
    def in_flight(self) -> bool:
        """Whether a token was sampled, or is being sampled, that was not read yet."""
        return self.num_sampled > len(self.tokens)

    @property
    def done(self) -> bool:
        """Whether it finished or was aborted."""
        return self.status is SequenceStatus.DONE

    @property
    def exhausted(self) -> bool:
        """Whether all tokens that it may have are sampled already."""
        return self.num_sampled >= self.max_new_tokens

    @property
    def barred_token_ids(self) -> frozenset[int]:
        """Tokens that may not come next, since the output would end too early."""
        is_early = len(self.tokens) < self.request.sampling.min_new_tokens
        return self.stop_token_ids if is_early else frozenset()

    @property
    def is_held(self) -> bool:
        """Whether some tokens may not come next."""
        return self.matcher is not None or bool(self.barred_token_ids)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are computed as it is prefilled."""
        return self.request.sampling.prompt_logprobs and not self.tokens

    def reset_for_recompute(self) -> None:
        """Resets the computed state after an eviction took pages and slot away."""
        self.status = SequenceStatus.WAITING
        self.num_computed = 0
        self.slot = -1
        self.pages, self.room = [], 0
        self.prefix = self.prefix.anew()
        self.step = None

    def run_again(self, q_len: int, sampled: bool) -> None:
        """Undoes a step that was read: its `q_len` positions are computed once more, as a prefill
        chunk.
        """
        self.num_sampled -= sampled
        if self.status is not SequenceStatus.WAITING:  # otherwise evicted: it recomputes all
            self.num_computed -= q_len
            self.status = SequenceStatus.PREFILL

    def note_start(self, launched_at: float) -> None:
        """Notes when the sequence's first step is launched; later calls do nothing."""
        if math.isnan(self.started_at):
            self.started_at = launched_at

    def note_threshold(self, phase: Phase, percent: int) -> None:
        """Widens the span of thresholds that the request has seen."""
        span = self.spans.get(phase)
        if span is None:
            self.spans[phase] = ThresholdSpan(percent, percent)
        elif not span.min_percent <= percent <= span.max_percent:
            self.spans[phase] = ThresholdSpan(
                min(span.min_percent, percent), max(span.max_percent, percent)
            )

    def deliver(self, output: Output | Exception) -> None:
        """Hands an output, or the error that ends the request, to the caller of `next_output`."""
        self._outputs.append(output)
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    def drop_outputs(self) -> None:
        """Forgets outputs that nobody will take."""
        self._outputs.clear()

    async def next_output(self) -> Output:
        """Returns the next output; raises the error instead where that is next."""
        while not self._outputs:
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
        output = self._outputs.popleft()
        if isinstance(output, Exception):
            raise output
        return output

    def accept(self, token: int, logprob: float, top: tuple[tuple[int, float], ...] = ()) -> Output:
        """Takes a sampled token that a device returned, and returns the output for the client.

        `top` has the likeliest tokens in its place, as many as were asked for.

        Raises RequestFailed if its log-probability is NaN or it cannot be turned into text, and
        InvalidRequest if its structured output takes too much work.
        """
        if math.isnan(logprob):
            raise RequestFailed(
                f"the model's logits at position {len(self.context)} are not numbers (NaN); its "
                "activations may exceed the range of its dtype"
            )
        try:
            text, reason = self._take(token, logprob)
        except (*NOT_OURS, ServingError):
            raise
        except BaseException as error:  # a panic of an extension module is no Exception
            own = self.request.request_id
            log.exception("request %s failed", shown(own), extra={"request_id": own})
            raise RequestFailed(f"token {token} could not be turned into text: {error}") from None
        request, spans, count = self.request, self.spans, len(self.tokens)
        sampling, visits = request.sampling, self.visited_tokens * self.visits_per_token
        return Output(  # by place, which takes half the time that names take
            request.request_id,
            text,
            (token,),
            (logprob,) if sampling.logprobs else (),
            Usage(
                len(self.prompt),
                count,
                visits,
                self.degraded_visits,
                self.cached_tokens,
                self.expected_nats / count,
            ),
            reason,
            tuple(self.prompt_logprobs) if count == 1 else (),
            spans.get(Phase.PREFILL),
            spans.get(Phase.DECODE),
            (top,) if sampling.top_logprobs else (),
            tuple(self.prompt_top) if count == 1 else (),
        )

    def _take(self, token: int, logprob: float) -> tuple[str, str | None]:
        """Takes a token; returns the text to release, and why the request ends with it, if so."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        ended = token in self.stop_token_ids
        sampling = self.request.sampling
        is_text = not ended or (sampling.include_stop and token in sampling.stop_token_ids)
        text, stopped = self.detokenizer.push(token) if is_text else ("", False)
        complete = self.matcher is not None and not ended and self.matcher.take(token)
        reason = "stop" if ended or stopped or complete else None
        if reason is None and len(self.tokens) >= self.max_new_tokens:
            reason = "length"
        if reason is not None and not stopped:
            text += self.detokenizer.finish()
        return text, reason

    def seat(self) -> Seat:
        """Returns what the device must know before it samples a token in this slot."""
        biases = self.request.sampling.logit_bias
        return Seat(self.slot, self.prompt, tuple(self.tokens), biases)

    def mapped(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Returns deltas of the block table for its blocks `[start, stop)`, up to which the device
        knows its pages then.
        """
        self.prefix.num_mapped, count = stop, len(self.pages)
        return [
            (self.slot, block * count + group, held[block])
            for group, held in enumerate(self.pages)
            for block in range(start, stop)
            if block in held
        ]

    def plan_degraded(self, q_len: int) -> None:
        """Exempts the row from brownout in a step that is being planned if the request could pass
        `max_degraded_percent`, were all visits of this step, and of those not read, degraded.
        """
        self.planned_tokens += q_len
        unread = (self.planned_tokens - self.visited_tokens) * self.visits_per_token
        planned = self.planned_tokens * self.visits_per_token
        most = self.request.max_degraded_percent * planned
        self.spared = 100 * (self.degraded_visits + unread) > most
        self.row[EXEMPT] = SPARED if self.spared else 0

    def packed(self, q_len: int) -> np.ndarray:
        """Returns the sequence's row for a step that computes its positions up to
        `num_computed`.
        """
        self.row[:3] = self.slot, self.num_computed, q_len
        if self.bounds_degraded:
            self.plan_degraded(q_len)
        if self.num_computed < len(self.prompt):
            self.row[NEXT_TOKEN] = self.prompt[self.num_computed]
        return self.row


def is_best_effort(sequence: SequenceState) -> bool:
    """Returns whether the request is best effort, even if it has been promoted."""
    return sequence.request.priority is Priority.BEST_EFFORT
