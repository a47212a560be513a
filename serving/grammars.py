"""What llguidance makes of a structure and a vocabulary; imported by the server and by the process
that reads structures before it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_ERROR_CHARS = 300
STEP_ITEMS, STEP_FUEL, START_FUEL = 5_000, 5_000, 100_000
"""Bounds of one mask: a fortieth of llguidance's own, with which one may take a second, in which
nobody else gets a token. Structures that people write take a hundredth of these.
"""

JSON_OPTIONS: Any = {"whitespace_flexible": False}
"""Where a model may write any whitespace between tokens of JSON, small ones write nothing else. A
schema changes it by its own `x-guidance`.
"""


class Vocabulary:
    """Of one model."""

    def __init__(self, tokenizer: str, vocab_size: int, eos: Sequence[int]) -> None:
        """`tokenizer` is the text of a `tokenizer.json`. Tokens from `vocab_size` on, and such as
        the tokenizer does not know, are never drawn.
        """
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos))
        self._limits = LLParserLimits(
            step_max_items=STEP_ITEMS,
            step_lexer_fuel=STEP_FUEL,
            initial_lexer_fuel=START_FUEL,
        )

    def read(self, kind: str, text: str) -> tuple[Any, str | None]:
        """llguidance's matcher at its start, and why it cannot be used; one of the two is None."""
        make = {
            "json_schema": partial(LLMatcher.grammar_from_json_schema, defaults=JSON_OPTIONS),
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
        }[kind]
        try:
            matcher = LLMatcher(self._tokenizer, make(text), log_level=0, limits=self._limits)
        except ValueError as error:
            return None, said(str(error))
        if matcher.is_error():
            return None, said(matcher.get_error())
        return matcher, None


def said(error: str) -> str:
    """An error of llguidance on one line; what follows `<state>` is for its own developers."""
    return " ".join(error.partition("<state>")[0].split())[:MAX_ERROR_CHARS]
