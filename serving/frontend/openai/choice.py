"""One choice of a call: the request to the engine, and how its outputs are formatted.

A stream sends one event per token. So all bytes of an event except the text are prepared before the
first token, and as few objects as possible are made per token.
"""

from typing import Any

import orjson

from serving.request import Chat, Output, SamplingParams

_FINISH = {None: b"null", "stop": b'"stop"', "length": b'"length"'}


class Choice:
    """One choice in progress. Subclasses define its JSON format."""

    content: tuple[bytes, bytes]  # what surrounds the text of an event
    first_content: bytes  # what precedes the text of the first event

    def __init__(
        self, index: int, prompt: str | list[int] | Chat, sampling: SamplingParams, echo: str = ""
    ) -> None:
        """`index` is the choice's index in the call, and `echo` is text to put before the
        answer.
        """
        self.index, self.prompt, self.sampling, self.echo = index, prompt, sampling, echo
        self.last: Output | None = None
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def logprobs_of(self, out: Output, is_first: bool) -> dict[str, Any]:
        """Formats the log-probabilities of an output, if they were asked for."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """Returns the choice for a response that is not streamed."""
        raise NotImplementedError

    # ---- not streaming ----------------------------------------------------------------------

    def take(self, out: Output) -> None:
        """Keeps an output for `whole`."""
        if self.last is None and self.echo:
            self._texts.append(self.echo)
        self._texts.append(out.text)
        if self.sampling.logprobs:
            self._logprobs.append(self.logprobs_of(out, self.last is None))
        self.last = out

    @property
    def text(self) -> str:
        """The text of all outputs taken so far."""
        return "".join(self._texts)

    @property
    def finish_reason(self) -> str | None:
        """Why generation ended; None while it goes on."""
        return None if self.last is None else self.last.finish_reason

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
        told = b"null"
        if self.sampling.logprobs:
            told = orjson.dumps(self.logprobs_of(out, is_first))
        return b'%b%b%b%b,"finish_reason":%b}]%b}\n\n' % (
            before,
            orjson.dumps(text),
            self._after,
            told,
            _FINISH[out.finish_reason],
            usage or self._null_usage,
        )
