"""Incremental text with stop strings, against cutting the whole text."""

import threading
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import jmoe
from jmoe.tokenizer import Tokenizer
from serving.sequence import TextOut


class Letters:
    """A tokenizer whose tokens are letters."""

    def stream(self):
        return self

    def push(self, token):
        return chr(token)


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_where_the_whole_text_would_be_cut(text, stop):
    out = TextOut(Letters(), tuple(stop))
    got, stopped = "", False
    for letter in text:
        piece, stopped = out.push(ord(letter), final=False)
        got += piece
        if stopped:
            break
    # The stop string that is complete first wins; of several, the one that starts first.
    ends = [end for end in range(1, len(text) + 1) if any(s in text[:end] for s in stop)]
    if ends:
        seen = text[: ends[0]]
        assert stopped
        assert got == seen[: min(seen.find(s) for s in stop if s in seen)]
    else:
        assert not stopped
        assert got + out.flush() == text


def test_an_end_token_has_no_text_and_releases_what_was_held():
    out = TextOut(Letters(), ("ab",))
    assert out.push(ord("a"), final=False) == ("", False)
    assert out.push(ord("x"), final=True) == ("a", False)


def test_others_run_while_a_long_text_is_tokenized():
    """Held throughout, the interpreter's lock would let this thread look once or twice."""
    tokenizer = Tokenizer.load(Path(jmoe.__file__).parent / "bundled")
    assert tokenizer is not None
    text = "a b c 1 2 3 " * 100_000
    tokens = []
    thread = threading.Thread(target=lambda: tokens.extend(tokenizer.encode(text)))
    thread.start()
    looks = 0
    while thread.is_alive():
        time.sleep(0.001)
        looks += 1
    assert looks > 20
    assert tokenizer.decode(tokens) == text
