"""Choices, and the endpoint of completions: prompts in, choices out. That of chats is in `chats`.

A stream sends one event per token. So all bytes of an event except the text are prepared before the
first token, and as few objects as possible are made per token.
"""

import asyncio
import time
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import orjson

from serving.errors import InvalidRequest, TooLong, shown
from serving.frontend.openai import logprobs
from serving.frontend.openai.errors import HttpError
from serving.frontend.openai.sampling import priority, sampling
from serving.frontend.openai.schemas import (
    DEFAULT_MAX_TOKENS,
    MAX_SEQUENCES,
    CompletionRequest,
    Sampled,
)
from serving.request import Bounds, Chat, Output, SamplingParams

if TYPE_CHECKING:
    from jmoe.tokenizer import Tokenizer
    from serving.engine import Engine


LogprobsFormat = logprobs.Chat | logprobs.Completion


class Choice:
    """One choice in progress. Subclasses define its JSON format."""

    content: tuple[bytes, bytes]  # what surrounds the text of an event
    first_content: bytes  # what precedes the text of the first event
    whole_content: tuple[bytes, bytes]  # what surrounds the text of an answer that is not streamed
    has_prompt = False  # the prompt's tokens are among its own fields, not the call's

    def __init__(
        self,
        index: int,
        prompt: str | list[int] | Chat,
        sampling: SamplingParams,
        shown: LogprobsFormat,
        echo: str = "",
    ) -> None:
        """`index` is the choice's index in the call, and `echo` is text to put before the
        answer.
        """
        self.index, self.prompt, self.sampling, self.echo = index, prompt, sampling, echo
        self.last: Output | None = None
        self.waited_s = 0.0  # seconds in which the engine made the prompt's tokens
        self.reasoning_tokens: int | None = None  # None: thoughts are not told apart
        self.scores_alone = False  # the prompt is scored, and nothing is added to it
        self.prompt_ids: bytes | None = None  # the prompt's tokens as JSON, if ids are asked for
        self._token_ids: list[int] = []  # drawn, if they are
        self._has_told = False  # the prompt's
        self._texts: list[str] = []
        self._format = shown
        self._logprobs = [bytearray() for _ in shown.starts]  # the lists so far, as JSON

    @property
    def prompt_tokens(self) -> int:
        """The number of the prompt's tokens; 0 where the engine will encode it."""
        return len(self.prompt) if isinstance(self.prompt, list) else 0

    def explained(self, error: InvalidRequest) -> InvalidRequest:
        """Returns what refuses the request in the client's terms: here, as it is."""
        return error

    async def take_prompt(self, out: Output) -> None:
        """Formats the log-probabilities of the prompt, which are in the first output, in parts
        between which other tasks run.
        """
        assert isinstance(self._format, logprobs.Completion)  # the only one with `echo`
        assert isinstance(self.prompt, list)  # `choices` encoded it
        values = (None, *out.prompt_logprobs)  # the first token has none
        tops = (None, *out.prompt_top_logprobs)
        for at in range(0, len(self.prompt), logprobs.PROMPT_PIECE):
            part = slice(at, at + logprobs.PROMPT_PIECE)
            self._append(self._format.of_tokens(self.prompt[part], values[part], tops[part]))
            await asyncio.sleep(0)

    def _append(self, lists: logprobs.Lists) -> None:
        for so_far, new in zip(self._logprobs, lists, strict=True):
            if so_far and new:
                so_far += b","
            so_far += new

    def _taken(self) -> list[bytes | bytearray]:
        """Returns the pieces of the `logprobs` object of what was appended, and forgets that."""
        if not self.sampling.logprobs:
            return [b"null"]
        lists, self._logprobs = self._logprobs, [bytearray() for _ in self._logprobs]
        return [
            *chain.from_iterable(zip(self._format.starts, lists, strict=True)),
            self._format.end,
        ]

    # ---- not streaming ----------------------------------------------------------------------

    def take(self, out: Output) -> None:
        """Stores an output for `whole`."""
        if self.last is None and self.echo:
            self._texts.append(self.echo)
        self._texts.append(out.text)
        if self.sampling.logprobs:
            self._append(self._format.of(out))
        if self.prompt_ids is not None:
            self._token_ids += out.token_ids
        self.last = out

    def whole(self) -> list[bytes | bytearray]:
        """Returns the choice for a response that is not streamed, as pieces of JSON."""
        assert self.last is not None  # it is whole
        before, after = self.whole_content
        return [
            b'{"index":%d,%b%b%b,"logprobs":' % (self.index, before, self.text(), after),
            *self._taken(),
            b',"finish_reason":' + self.finish(self.last),
            *self._id_fields(self._token_ids),
            b"}",
        ]

    def _id_fields(self, drawn: Sequence[int]) -> list[bytes]:
        """Returns the fields of the choice that have token ids: none unless they are asked for."""
        if self.prompt_ids is None:
            return []
        ids = [b',"token_ids":', orjson.dumps(drawn)]
        return [*ids, *self.told_prompt()] if self.has_prompt else ids

    def told_prompt(self) -> list[bytes]:
        """Returns the field of the prompt's token ids, if they are asked for, the first time."""
        if self.prompt_ids is None or self._has_told:
            return []
        self._has_told = True
        return [b',"prompt_token_ids":', self.prompt_ids]

    def text(self) -> bytes:
        """Returns what stands between `whole_content`, as JSON."""
        return orjson.dumps("".join(self._texts))

    def finish(self, out: Output) -> bytes:
        """Returns the finish reason of an output, as JSON."""
        return orjson.dumps(out.finish_reason)

    # ---- streaming --------------------------------------------------------------------------

    def prepare(self, head: bytes, null_usage: bytes) -> None:
        """Prepares the parts that all events of this choice share.

        `head` has the JSON fields of the call. `null_usage` ends an event that reports no usage.
        """
        before, after = self.content
        begin = b'data: {%b,"choices":[{"index":%d,' % (head, self.index)
        self._before = begin + before
        self._first = begin + self.first_content
        self._after = after + b',"logprobs":'
        self._null_usage = null_usage
        self._begun = False
        self._plain = self._after + b'null,"finish_reason":null}]' + null_usage + b"}\n\n"

    def event(self, out: Output, usage: bytes = b"") -> bytes:
        """Returns the event for an output. Its text is empty while a character is incomplete, or a
        stop string may have begun.
        """
        is_first, self._begun, self.last = not self._begun, True, out
        before = self._before
        text = out.text
        if is_first:
            before = self._first
            text = self.echo + text
        is_full = self.sampling.logprobs or usage or self.prompt_ids is not None
        if out.finish_reason is None and not is_full:
            return before + orjson.dumps(text) + self._plain
        return self.full_event(before, orjson.dumps(text), out, usage)

    def full_event(self, before: bytes, text: bytes, out: Output, usage: bytes) -> bytes:
        """Returns an event with all that may be in it."""
        if self.sampling.logprobs:
            self._append(self._format.of(out))
        return b'%b%b%b%b,"finish_reason":%b%b}]%b%b}\n\n' % (
            before,
            text,
            self._after,
            b"".join(self._taken()),
            self.finish(out),
            b"".join(self._id_fields(out.token_ids)),
            b"".join(self.told_prompt()),
            usage or self._null_usage,
        )


Prompt = str | list[int]


class CompletionChoice(Choice):
    """One text that continues a prompt."""

    content = b'"text":', b""
    first_content = b'"text":'
    whole_content = content
    has_prompt = True
    place: int | None = None  # of its prompt among several

    def explained(self, error: InvalidRequest) -> InvalidRequest:
        """See Choice."""
        return _of_prompt(error, self.place)


class CompletionEndpoint:
    """The completions endpoint."""

    request: type[Any] = CompletionRequest
    operation = "text_completion"  # its name in traces
    id_prefix, object_whole, object_event = "cmpl-", "text_completion", "text_completion"

    async def choices(
        self, body: CompletionRequest, engine: "Engine", tokenizer: "Tokenizer | None"
    ) -> list[Choice]:
        """Returns the choices of a call, prompt by prompt. Raises InvalidRequest."""
        prompts, n = _prompts(body.prompt), body.n or 1
        if len(prompts) * n > MAX_SEQUENCES:
            raise HttpError(
                f"{len(prompts)} prompts times n {n} make {len(prompts) * n} answers; one call has "
                f"{MAX_SEQUENCES} at most; send several calls",
                "prompt" if len(prompts) > 1 else "n",
            )
        if body.best_of not in (None, n):
            raise HttpError(
                f"best_of is {body.best_of} and n {n}; answers are not ranked here, leave best_of "
                "out",
                "best_of",
            )
        if body.max_tokens == 0 and not body.echo:
            raise HttpError(
                "max_tokens is 0; it must be at least 1, or 0 with echo true, which scores the "
                "prompt",
                "max_tokens",
            )
        if body.max_tokens == 0 and body.min_tokens:
            raise HttpError(
                f"min_tokens is {body.min_tokens} and max_tokens 0; leave min_tokens out",
                "min_tokens",
            )
        texts = logprobs.Texts(tokenizer, bool(body.return_tokens_as_token_ids))
        found: list[Choice] = []
        began_s = time.monotonic()
        for at, prompt in enumerate(prompts):
            place = at if len(prompts) > 1 else None
            try:
                prompt, echo = await _read(prompt, body, engine, tokenizer)
            except InvalidRequest as error:
                raise _of_prompt(error, place) from None
            ids = orjson.dumps(prompt) if body.return_token_ids else None
            for i in range(n):
                shown = logprobs.Completion(texts, bool(body.logprobs))
                choice = CompletionChoice(len(found), prompt, sampling(body, i), shown, echo)
                choice.place, choice.scores_alone = place, body.max_tokens == 0
                choice.prompt_ids = ids
                found.append(choice)
        for choice in found:
            choice.waited_s = time.monotonic() - began_s
        return found


async def tokenized(prompt: str | list[int] | Chat, body: Sampled, engine: "Engine") -> list[int]:
    """Returns the token ids of a body's prompt. Raises InvalidRequest."""
    if isinstance(prompt, list):
        return prompt
    return await engine.tokenize(
        prompt, body.model or "", priority=priority(body), timeout_s=body.timeout_s
    )


async def truncated[Given: str | list[int] | Chat](
    prompt: Given, body: Sampled, engine: "Engine", max_tokens: int | None
) -> Given | list[int]:
    """Returns a prompt's last tokens, as many as `truncate_prompt_tokens` says (-1: as many as fit
    beside `max_tokens` new ones), or the prompt if it has no more. Raises InvalidRequest.
    """
    most = body.truncate_prompt_tokens
    if not most:
        raise HttpError(
            "truncate_prompt_tokens is 0; a prompt must have a token: send more, or -1 for as many "
            "as fit",
            "truncate_prompt_tokens",
        )
    if most < 0:
        most = max(1, engine.bounds.max_prompt_tokens + 1 - (max_tokens or 1))
    tokens = await tokenized(prompt, body, engine)
    return prompt if len(tokens) <= most else tokens[-most:]


def _prompts(given: Any) -> Sequence[Prompt]:
    """Returns the prompts as a list. Raises HttpError for an empty prompt."""
    is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts = [given] if is_one else given
    if not prompts or not all(prompts):
        raise HttpError(
            f"prompt is {shown(given)}; each prompt must have a character or a token", "prompt"
        )
    return prompts


def _of_prompt(error: InvalidRequest, place: int | None) -> InvalidRequest:
    """Returns the error with the prompt at fault, if that is what is wrong with one of several."""
    if place is None or not (isinstance(error, TooLong) or error.param == "prompt"):
        return error
    return type(error)(f"prompt[{place}]: {error}", error.param)


async def _read(
    prompt: Prompt, body: CompletionRequest, engine: "Engine", tokenizer: "Tokenizer | None"
) -> tuple[Prompt, str]:
    """Returns a prompt as the engine gets it, and what of it is before its answers. Raises
    InvalidRequest.
    """
    if body.truncate_prompt_tokens is not None:
        most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        prompt = await truncated(prompt, body, engine, most)
    echo = await _echo(prompt, engine.bounds, tokenizer) if body.echo else ""
    # The prompt's own log-probabilities are told token by token.
    if body.return_token_ids or (body.echo and body.logprobs is not None):
        prompt = await tokenized(prompt, body, engine)
    return prompt, echo


async def _echo(prompt: Prompt, bounds: Bounds, tokenizer: "Tokenizer | None") -> str:
    if isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise HttpError("echo of token ids needs a tokenizer; this model has none", "echo")
    bounds.check_tokens(len(prompt))
    try:
        return await asyncio.to_thread(tokenizer.decode, prompt)
    except (OverflowError, TypeError, ValueError):
        raise InvalidRequest(
            f"the prompt {shown(prompt)} has numbers that are no tokens", "prompt"
        ) from None
