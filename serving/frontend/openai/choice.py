"""One choice of a call: the request to the engine, and how its outputs are formatted.

A stream sends one event per token. So all bytes of an event except the text are prepared before the
first token, and as few objects as possible are made per token.
"""

import asyncio
from itertools import chain

import orjson

from serving.frontend.openai import logprobs
from serving.request import Chat, Output, SamplingParams

LogprobsFormat = logprobs.Chat | logprobs.Completion

_FINISH = {None: b"null", "stop": b'"stop"', "length": b'"length"'}


class Choice:
    """One choice in progress. Subclasses define its JSON format."""

    content: tuple[bytes, bytes]  # what surrounds the text of an event
    first_content: bytes  # what precedes the text of the first event
    whole_content: tuple[bytes, bytes]  # what surrounds the text of an answer that is not streamed

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
        self._texts: list[str] = []
        self._format = shown
        self._logprobs = [bytearray() for _ in shown.starts]  # the lists so far, as JSON

    @property
    def prompt_tokens(self) -> int:
        """The number of the prompt's tokens; 0 where the engine will encode it."""
        return len(self.prompt) if isinstance(self.prompt, list) else 0

    async def take_prompt(self, out: Output) -> None:
        """Formats the log-probabilities of the prompt, which are in the first output, in parts
        between which other tasks run.
        """
        assert isinstance(self._format, logprobs.Completion)  # the only one with `echo`
        assert isinstance(self.prompt, list)  # `choices` encoded it
        values = (None, *out.prompt_logprobs)  # the first token has none
        for at in range(0, len(self.prompt), logprobs.PROMPT_PIECE):
            part = slice(at, at + logprobs.PROMPT_PIECE)
            self._append(self._format.of_prompt(self.prompt[part], values[part]))
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
        self.last = out

    def whole(self) -> list[bytes | bytearray]:
        """Returns the choice for a response that is not streamed, as pieces of JSON."""
        assert self.last is not None  # it is whole
        before, after = self.whole_content
        text = orjson.dumps("".join(self._texts))
        return [
            b'{"index":%d,%b%b%b,"logprobs":' % (self.index, before, text, after),
            *self._taken(),
            b',"finish_reason":%b}' % _FINISH[self.last.finish_reason],
        ]

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
        """Returns the event for an output; empty if there is nothing to send."""
        is_first, self._begun, self.last = not self._begun, True, out
        before = self._before
        text = out.text
        if is_first:
            before = self._first
            text = self.echo + text
        if out.finish_reason is None and not self.sampling.logprobs and not usage:
            if not text and not is_first:  # a UTF-8 character is still incomplete
                return b""
            return before + orjson.dumps(text) + self._plain
        if self.sampling.logprobs:
            self._append(self._format.of(out))
        return b'%b%b%b%b,"finish_reason":%b}]%b}\n\n' % (
            before,
            orjson.dumps(text),
            self._after,
            b"".join(self._taken()),
            _FINISH[out.finish_reason],
            usage or self._null_usage,
        )
