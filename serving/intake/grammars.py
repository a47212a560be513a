"""Compiles structures for a vocabulary with llguidance; used by the server and by the process that
checks structures before it.
"""

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from serving.request import SPACED

MAX_ERROR_CHARS = 300
STEP_ITEMS, STEP_FUEL, START_FUEL = 5_000, 5_000, 100_000
"""Bounds on the work for one mask: a fortieth of llguidance's defaults, under which a mask may take
a second, during which no other request gets a token. Structures that people write take a hundredth
of these bounds.
"""


def _json_grammar(schema: str) -> str:
    try:
        is_flexible = bool(json.loads(schema)["x-guidance"]["whitespace_flexible"])
    except (ValueError, LookupError, TypeError, RecursionError):  # llguidance says what is wrong
        is_flexible = False
    # With separators that have a space, flexible white space would be at least that.
    options: Any = {"lenient": True, **({} if is_flexible else SPACED)}  # as in `guided`
    return LLMatcher.grammar_from_json_schema(schema, defaults=options)


class Vocabulary:
    """The vocabulary of one model, for llguidance."""

    def __init__(self, tokenizer: str, vocab_size: int, eos: Sequence[int]) -> None:
        """`tokenizer` is the text of a `tokenizer.json`. Tokens from `vocab_size` on, and those
        that the tokenizer does not know, are never drawn.
        """
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos))
        self._limits = LLParserLimits(
            step_max_items=STEP_ITEMS,
            step_lexer_fuel=STEP_FUEL,
            initial_lexer_fuel=START_FUEL,
        )

    def read(self, kind: str, text: str) -> tuple[Any, str | None]:
        """Returns llguidance's matcher in its initial state, or None and why there is none."""
        make = {
            "json_schema": _json_grammar,
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
    """Shortens an llguidance error to one line, without the debugging text after `<state>`."""
    return " ".join(error.partition("<state>")[0].split())[:MAX_ERROR_CHARS]
