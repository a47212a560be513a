"""One answer of a call: what is asked of the engine, and what is told of its outputs.

A stream costs an event a token. Of an event's bytes all but the text are there before the first
token, and nothing between the engine and the socket makes an object that could be left out.
"""

from typing import Any

import orjson

from serving.request import Chat, Output, SamplingParams

_FINISH = {None: b"null", "stop": b'"stop"', "length": b'"length"'}


class Choice:
    """An answer under way. Subclasses say how it looks."""

    content: tuple[bytes, bytes]  # around the text of an event
    first_content: bytes  # before the text of the first one

    def __init__(
        self, index: int, prompt: str | list[int] | Chat, sampling: SamplingParams, echo: str = ""
    ) -> None:
        """Of a call's choice `index`. `echo` is text that comes before the answer."""
        self.index, self.prompt, self.sampling, self.echo = index, prompt, sampling, echo
        self.last: Output | None = None
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def logprobs_of(self, out: Output, is_first: bool) -> dict[str, Any]:
        """What is told of an output's log-probabilities, where they are wanted."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that is no stream."""
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
        """All that was taken."""
        return "".join(self._texts)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None before that."""
        return None if self.last is None else self.last.finish_reason

    # ---- streaming --------------------------------------------------------------------------

    def prepare(self, head: bytes, null_usage: bytes) -> None:
        """Makes what every event of it has. `head`: fields of the call, `null_usage`: what an
        event ends with that says nothing of usage.
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
        """The event of an output; nothing where it has nothing to say."""
        is_first, self._begun, self.last = not self._begun, True, out
        before = self._before
        text = out.text
        if is_first:
            before = self._first
            text = self.echo + text
        if out.finish_reason is None and not self.sampling.logprobs and not usage:
            if not text and not is_first:  # a character that is not whole yet
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
