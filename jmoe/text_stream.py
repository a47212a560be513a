"""Incremental decoding: the text of tokens that come one by one."""

from collections.abc import Callable, Sequence

_OPEN = "\ufffd"
"""What a decoder writes for bytes that are no whole character (yet)."""

_MAX_PENDING = 16
"""Tokens without a whole character that are waited for; a character has four bytes at most."""


class TextStream:
    """Releases text once its characters are whole.

    A token's text depends on its neighbours (a character's bytes may be spread over tokens, some
    decoders strip the first space), so each new token is decoded behind those that were released
    last, and what these alone give is cut off. The pieces joined, `finish` included, are what
    decoding all tokens at once gives, except where a byte-fallback decoder takes a character back
    that it had written before: of a run of byte tokens that is not valid as a whole it writes every
    byte as U+FFFD. What was released stays, and the stream goes on with the bytes that are new.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        decode_one: Callable[[int], str] | None = None,
    ) -> None:
        """`decode` gives the text of a list of token ids, and `decode_one`, if given, that of one
        alone, which it may remember.
        """
        self._decode = decode
        self._decode_one = decode_one or (lambda token: decode([token]))
        self._tokens: list[int] = []  # those released last, then the pending ones
        self._num_released = 0  # of `_tokens`

    def push(self, token: int) -> str:
        """Returns the text that `token` completes; empty while a character is still open."""
        self._tokens.append(token)
        text = self._pending_text()
        too_long = len(self._tokens) - self._num_released >= _MAX_PENDING
        if text and (too_long or not text.endswith(_OPEN)):
            del self._tokens[: self._num_released]
            self._num_released = len(self._tokens)
            return text
        if too_long:  # special tokens, which have no text: forget them
            del self._tokens[self._num_released :]
        return ""

    def finish(self) -> str:
        """Returns the text of the bytes that are still open when no token follows."""
        text = self._pending_text()
        self._tokens, self._num_released = [], 0
        return text

    def _pending_text(self) -> str:
        count, tokens = self._num_released, self._tokens
        released = self._decode_one(tokens[0]) if count == 1 else self._decode(tokens[:count])
        text = self._decode(tokens)
        return text[len(released) :] if text.startswith(released) else self._decode(tokens[count:])
