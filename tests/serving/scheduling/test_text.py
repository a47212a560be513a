"""Incremental text and stop strings, against decoding and cutting the whole text."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_of_kinds import byte_fallback

import jmoe
from jmoe.tokenizer import TextStream, Tokenizer
from serving.request import MAX_STOP_CHARS, SamplingParams
from serving.scheduling.sequence import Detokenizer


class Letters:
    """A tokenizer whose tokens are letters."""

    def stream(self, skip_special_tokens=True):
        return TextStream(lambda tokens: "".join(map(chr, tokens)))


def cut(text, stop, ignored=0, includes=False):
    """Returns the text before the stop string that is complete first, the longest of several; those
    complete within the first `ignored` characters do not count (the oracle).
    """
    for end in range(ignored + 1, len(text) + 1):
        if complete := [s for s in stop if text[:end].endswith(s)]:
            return text[: end - (0 if includes else max(map(len, complete)))], True
    return text, False


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=6), max_size=4),
    st.integers(0, 4),
    st.booleans(),
)
def test_stop_strings_cut_where_the_whole_text_would_be_cut(pieces, stop, least, includes):
    """However the text is cut into tokens, of which each may complete several stop strings."""
    stream = SimpleNamespace(push=lambda i: pieces[i], finish=lambda: "")
    tokenizer = SimpleNamespace(stream=lambda *_: stream)
    sampling = SamplingParams(stop=tuple(stop), min_new_tokens=least, include_stop=includes)
    out = Detokenizer(tokenizer, sampling)
    got, stopped = "", False
    for i in range(len(pieces)):
        text, stopped = out.push(i)
        got += text
        if stopped:
            break
    wanted = cut("".join(pieces), stop, len("".join(pieces[:least])), includes)
    assert (got + ("" if stopped else out.finish()), stopped) == wanted


def test_what_was_held_is_released_at_the_end():
    out = Detokenizer(Letters(), SamplingParams(stop=("ab",)))
    assert out.push(ord("a")) == ("", False)
    assert out.finish() == "a"


def test_stop_strings_cost_the_same_at_every_token():
    """64 of the longest ones, all but complete all the time, at 2,000 tokens and at 8,000."""
    stop = tuple("a" * (MAX_STOP_CHARS - 1) + chr(0x100 + i) for i in range(64))

    def steps(num_tokens):
        out, count = Detokenizer(Letters(), SamplingParams(stop=stop)), 0

        def count_lines(frame, event, _):
            nonlocal count
            count += event == "line"
            return count_lines

        for _ in range(num_tokens - 20):
            out.push(ord("a"))
        sys.settrace(count_lines)
        try:
            for _ in range(20):
                assert out.push(ord("a")) == ("a", False)
        finally:
            sys.settrace(None)
        return count

    assert steps(8_000) == steps(2_000) < 20 * 64 * 40


def test_special_tokens_are_in_the_text_where_they_are_wanted():
    tokens = BUNDLED.encode("a <|im_start|>b<|im_end|> c")
    texts = {}
    for skip in (True, False):
        detokenizer = Detokenizer(BUNDLED, SamplingParams(skip_special_tokens=skip))
        pieces = [detokenizer.push(token)[0] for token in tokens]
        texts[skip] = "".join([*pieces, detokenizer.finish()])
    assert texts == {True: "a b c", False: "a <|im_start|>b<|im_end|> c"}


BYTE_FALLBACK = byte_fallback()
BUNDLED = Tokenizer.load(Path(jmoe.__file__).parent / "bundled")


def streamed(tokenizer, tokens):
    stream = tokenizer.stream()
    return "".join([*map(stream.push, tokens), stream.finish()])


@given(st.lists(st.integers(0, 511), max_size=40))
def test_streamed_text_is_that_of_all_tokens(tokens):
    assert streamed(BUNDLED, tokens) == BUNDLED.decode(tokens)


@given(st.text(st.sampled_from("the sun \u4e00\u4e01\u00e9\U0001f600."), max_size=20))
def test_streamed_text_is_that_of_all_tokens_with_byte_fallback(text):
    tokens = []
    for character in text:
        word = BYTE_FALLBACK.backend.token_to_id(character.replace(" ", "\u2581"))
        raw = [3 + b for b in character.encode()]
        tokens += raw if word is None else [word]
    assert streamed(BYTE_FALLBACK, tokens) == BYTE_FALLBACK.decode(tokens)


@given(st.lists(st.integers(0, 266), max_size=60))
def test_no_tokens_break_a_byte_fallback_stream(tokens):
    """The library's own stream raises on some of these."""
    text, got = BYTE_FALLBACK.decode(tokens), streamed(BYTE_FALLBACK, tokens)
    if "\ufffd" not in text:
        assert got == text
    words = [BYTE_FALLBACK.decode([2, t]).strip() for t in tokens if t > 3 + 0xFF + 1]
    at = 0
    for word in words:  # every one, in order, whatever the bytes between them
        at = got.index(word, at) + len(word)


def test_a_character_that_the_decoder_takes_back_is_not_an_error():
    a, broken, word = 3 + 0x41, 3 + 0xFF, BYTE_FALLBACK.backend.token_to_id("\u2581the")
    assert BYTE_FALLBACK.decode([a, broken, word]) == "\ufffd\ufffd the"
    assert streamed(BYTE_FALLBACK, [a, broken, word]) == "A\ufffd the"


@pytest.mark.parametrize("token", [1, 3 + 0xFF, 3 + 0x41])  # special, a broken byte, a letter
def test_decoding_looks_at_few_tokens_at_a_time(token):
    seen = []

    def decode(tokens):
        seen.append(len(tokens))
        return BYTE_FALLBACK.decode(tokens)

    stream = TextStream(decode)
    for _ in range(500):
        stream.push(token)
    assert max(seen) <= 32


def test_others_run_while_a_long_text_is_tokenized():
    """Held throughout, the interpreter's lock would let this thread look once or twice."""
    tokenizer = Tokenizer.load(Path(jmoe.__file__).parent / "bundled")
    assert tokenizer is not None
    text = "a b c 1 2 3 " * 30_000
    tokens = []
    thread = threading.Thread(target=lambda: tokens.extend(tokenizer.encode(text)))
    thread.start()
    looks = 0
    while thread.is_alive():
        time.sleep(0.001)
        looks += 1
    assert looks > 20
    assert tokenizer.decode(tokens) == text
