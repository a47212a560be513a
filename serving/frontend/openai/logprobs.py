"""Formats log-probabilities as the two endpoints return them: as JSON, piece by piece.

An answer has up to `engine.max_logprobs_per_call` of them, so no objects are kept for them, and no
step of the event loop formats more than those of one output or of `PROMPT_PIECE` prompt tokens.
"""

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import orjson

from serving.request import Output

if TYPE_CHECKING:
    from jmoe.pieces import Pieces
    from jmoe.tokenizer import Tokenizer

PROMPT_PIECE = 512
"""Prompt tokens that are formatted at a time."""
_LEAST = -9999.0
"""Replaces a log-probability that JSON cannot represent, such as -inf."""
_CACHED_TOKENS = 4096

Top = Sequence[tuple[int, float]]
"""Likeliest tokens and their log-probabilities."""
Lists = tuple[bytes, ...]
"""What is appended to each list of a `logprobs` object: elements as JSON, with commas between."""


class Texts:
    """Text and bytes of tokens, as they are shown to clients."""

    def __init__(self, tokenizer: "Tokenizer | None", by_id: bool = False) -> None:
        """Without a tokenizer, or `by_id`, tokens are shown by their ids."""
        self.tokenizer = tokenizer
        pieces = None if tokenizer is None else tokenizer.pieces
        self._shown = None if by_id else pieces
        self._ends = lru_cache(_CACHED_TOKENS)(partial(_ends, pieces, self._shown))

    def text(self, token: int) -> str:
        """Returns the text of a token; bytes that do not form whole characters appear as U+FFFD."""
        return _text(self._shown, token)

    def entry(self, token: int, logprob: float) -> bytes:
        """Returns a chat's entry for a token, without its closing brace."""
        before, after = self._ends(token)
        return before + orjson.dumps(_told(logprob)) + after


def _text(pieces: "Pieces | None", token: int) -> str:
    """Returns a token's text; its id if it is in no vocabulary, so that no two are the same."""
    own = b"" if pieces is None else pieces[token]
    return own.decode("utf-8", "replace") or f"token_id:{token}"


def _ends(pieces: "Pieces | None", shown: "Pieces | None", token: int) -> tuple[bytes, bytes]:
    """Returns what surrounds the log-probability in a token's entry, whose text is by `shown`. The
    bytes may be only part of a UTF-8 character; they are null without a tokenizer.
    """
    own = None if pieces is None else list(pieces[token])
    text = orjson.dumps(_text(shown, token))
    return b'{"token":%b,"logprob":' % text, b',"bytes":' + orjson.dumps(own)


class Chat:
    """Makes `choices[].logprobs` of a chat: one list with an entry per token."""

    starts: tuple[bytes, ...] = (b'{"content":[',)
    end = b'],"refusal":null}'

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    def of(self, out: Output) -> Lists:
        """Returns the entries for an output's tokens."""
        entry, content = self._texts.entry, []
        for at, (token, logprob) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
            top = out.top_logprobs[at] if out.top_logprobs else ()
            likeliest = b",".join([entry(*one) + b"}" for one in top])
            content.append(entry(token, logprob) + b',"top_logprobs":[%b]}' % likeliest)
        return (b",".join(content),)


class Completion:
    """Makes `choices[].logprobs` of a completion: lists with one entry per token."""

    def __init__(self, texts: Texts, wants_top: bool) -> None:
        self._texts, self._wants_top = texts, wants_top
        self._offset = 0  # where the next token begins in the text, which is decoded as it is sent
        self._stream = None if texts.tokenizer is None else texts.tokenizer.stream()
        self._has_begun = False  # the answer, whose text is decoded by itself
        self.starts = b'{"tokens":[', b'],"token_logprobs":[', b'],"text_offset":['
        self.end = b'],"top_logprobs":null}'
        if wants_top:
            self.starts, self.end = (*self.starts, b'],"top_logprobs":['), b"]}"

    def of_tokens(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Top | None],
    ) -> Lists:
        """Returns the entries for tokens of an output, or for a part of an echoed prompt, whose
        first token has neither log-probability nor likeliest ones. `top_logprobs` includes the
        token.
        """
        texts, offsets = [self._texts.text(token) for token in tokens], []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += 0 if self._stream is None else len(self._stream.push(token))
        told = [None if one is None else _told(one) for one in logprobs]
        lists = [texts, told, offsets]
        if self._wants_top:
            found = []
            for text, own, top in zip(texts, told, tops, strict=True):
                found.append(None if own is None else {text: own})
                for other, its in top or ():  # of equal texts the likelier counts
                    other = self._texts.text(other)
                    found[-1][other] = max(_told(its), found[-1].get(other, _LEAST))
            lists.append(found)
        return tuple(orjson.dumps(one)[1:-1] for one in lists)

    def of(self, out: Output) -> Lists:
        """Returns the entries for an output's tokens."""
        if self._stream is not None and not self._has_begun:
            self._offset += len(self._stream.finish())
        self._has_begun = True
        tops = out.top_logprobs or [()] * len(out.token_ids)
        return self.of_tokens(out.token_ids, out.logprobs, tops)


def _told(logprob: float) -> float:
    return max(logprob, _LEAST) if math.isfinite(logprob) else _LEAST
