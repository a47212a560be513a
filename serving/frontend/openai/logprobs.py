"""Formats log-probabilities as the two endpoints return them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from serving.request import Output

if TYPE_CHECKING:
    from jmoe.tokenizer import Tokenizer

_LEAST = -9999.0
"""Replaces a log-probability that JSON cannot represent, such as -inf."""


class Texts:
    """Text and bytes of tokens, as they are shown to clients."""

    def __init__(self, tokenizer: "Tokenizer | None") -> None:
        """Without a tokenizer tokens are shown by their ids."""
        self._pieces = None if tokenizer is None else tokenizer.pieces

    def text(self, token: int) -> str:
        """Returns the text of a token; bytes that do not form whole characters appear as U+FFFD."""
        if self._pieces is None:
            return f"token_id:{token}"
        return self._pieces[token].decode("utf-8", "replace")

    def bytes(self, token: int) -> list[int] | None:
        """Returns the token's bytes, maybe only part of a UTF-8 character; None without a
        tokenizer.
        """
        return None if self._pieces is None else list(self._pieces[token])


def chat(out: Output, texts: Texts) -> dict[str, Any]:
    """Returns `choices[].logprobs` of a chat."""
    content = []
    for at, (token, logprob) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
        top = out.top_logprobs[at] if out.top_logprobs else ()
        content.append(
            {**_entry(token, logprob, texts), "top_logprobs": [_entry(*one, texts) for one in top]}
        )
    return {"content": content, "refusal": None}


def _entry(token: int, logprob: float, texts: Texts) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": _told(logprob), "bytes": texts.bytes(token)}


class Completion:
    """Makes `choices[].logprobs` of a completion: lists with one entry per token."""

    def __init__(self, texts: Texts, wants_top: bool) -> None:
        self._texts, self._wants_top = texts, wants_top
        self._offset = 0  # where the next token begins in the text of all tokens

    def of_prompt(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        """Returns the lists for an echoed prompt, whose first token has no log-probability."""
        found = self._lists(tokens, (None, *logprobs))
        return found | {"top_logprobs": None}

    def of(self, out: Output) -> dict[str, Any]:
        """Returns the lists for an output's tokens. `top_logprobs` includes the sampled token."""
        found = self._lists(out.token_ids, out.logprobs)
        if not self._wants_top:
            return found | {"top_logprobs": None}
        tops = []
        for at, (token, logprob) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
            top = {self._texts.text(token): _told(logprob)}
            for other, its in out.top_logprobs[at] if out.top_logprobs else ():
                top.setdefault(self._texts.text(other), _told(its))  # equal texts: keep the first
            tops.append(top)
        return found | {"top_logprobs": tops}

    def _lists(self, tokens: Sequence[int], logprobs: Sequence[float | None]) -> dict[str, Any]:
        texts, offsets = [self._texts.text(token) for token in tokens], []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if one is None else _told(one) for one in logprobs],
            "text_offset": offsets,
        }


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenates the logprobs of several outputs. Keys without lists stay None."""
    found: dict[str, Any] = dict.fromkeys(parts[0])
    for part in parts:
        for key, values in part.items():
            if values is not None:
                found[key] = [*(found[key] or ()), *values]
    return found


def _told(logprob: float) -> float:
    return max(logprob, _LEAST) if math.isfinite(logprob) else _LEAST
