"""Bytes of single tokens: joined, they are the text's."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jmoe.pieces import Pieces
from jmoe.tokenizer import Tokenizer

BUNDLED = Path(__file__).parents[2] / "jmoe" / "bundled"


@pytest.mark.parametrize("text", ["add 47 + 38", "é\n\t€ \U0001f600", " a  b", "\x00\x7f\xad\xa0"])
def test_byte_level_pieces_join_to_the_text(text):
    tokenizer = Tokenizer.load(BUNDLED)
    tokens = tokenizer.encode(text)
    assert b"".join(tokenizer.pieces[token] for token in tokens).decode() == text


def test_every_byte_has_a_token_of_byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.decoder = decoders.ByteLevel()
    pieces = Pieces(backend)
    assert sorted(pieces[token] for token in range(256)) == [bytes([n]) for n in range(256)]


def test_special_tokens_have_their_names():
    tokenizer = Tokenizer.load(BUNDLED)
    assert tokenizer.pieces[0] == b"<|endoftext|>"
    assert tokenizer.pieces[10**6] == b""


def test_words_with_a_mark_for_the_space_and_bytes():
    vocab = {"<0x0A>": 0, "\u2581the": 1, "sun": 2, "<0xE2>": 3}
    backend = Backend(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    pieces = Pieces(backend)
    assert [pieces[token] for token in range(4)] == [b"\n", b" the", b"sun", b"\xe2"]
