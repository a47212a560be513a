"""Whether what an answer is held to lets the bundled model's tokens write a text."""

from pathlib import Path

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

import jmoe
from jmoe.tokenizer import Tokenizer
from serving.intake.grammars import Vocabulary
from serving.intake.structure import Matcher

FOLDER = Path(jmoe.__file__).parent / "bundled"
END = "<|endoftext|>"


def tokenizer_of(template: str, markers: list[str]) -> Tokenizer:
    backend = Backend.from_file(str(FOLDER / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, special=True) for text in markers])
    return Tokenizer(backend, {"chat_template": template})


def lets_write(structure, tokenizer, text):
    backend = tokenizer.backend
    size, end = backend.get_vocab_size(), backend.token_to_id(END)
    vocabulary = Vocabulary(backend.to_str(), size, [end])
    read, error = vocabulary.read(structure.kind.value, structure.text)
    assert error is None, (error, structure.text)
    words = np.zeros((size + 31) // 32, np.int32)
    for token in [*backend.encode(text, add_special_tokens=False).ids, end]:
        words[:] = 0
        Matcher(read, lambda: None).fill(words)
        if not words[token // 32] >> (token % 32) & 1:
            return False
        read.consume_token(token)
    return True
