"""A tokenizer with ids that the model has no embedding for is refused when the model is loaded."""

import json

import pytest

import jmoe
from jmoe.tokenizer import TokenizerError


def write_tokenizer(directory, words, added=()):
    tokens = [
        {"id": i, "content": word, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, word in added
    ]
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "model": model, "added_tokens": tokens}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def words(count):
    return {f"w{i}": i for i in range(count)}


@pytest.mark.parametrize("count", [90, 97])
def test_ids_within_the_vocabulary_are_fine(count, copy):
    """Published Qwen models have fewer ids than rows in the embedding, Mixtral as many."""
    directory = copy("qwen2_moe")
    write_tokenizer(directory, words(count))
    assert jmoe.load(directory).tokenizer.encode("w1") == [1]


def test_the_first_token_without_a_row_is_named(copy):
    directory = copy("qwen2_moe")
    write_tokenizer(directory, words(120))
    with pytest.raises(TokenizerError) as caught:
        jmoe.load(directory)
    message = str(caught.value)
    assert str(directory / "tokenizer.json") in message
    assert "'w97' with id 97" in message
    assert "a vocabulary of 120" in message
    assert "vocab_size is 97" in message


def test_added_tokens_count(copy):
    directory = copy("qwen2_moe")
    write_tokenizer(directory, words(97), [(97, "<|pad|>")])
    with pytest.raises(TokenizerError, match=r"'<\|pad\|>' with id 97.* of 98, .* is 97"):
        jmoe.load(directory)


def test_jmoes_own_format_is_checked_too(copy, tmp_path):
    saved = tmp_path / "saved"
    jmoe.save(jmoe.load(copy("qwen2_moe")), saved)
    write_tokenizer(saved, words(98))
    with pytest.raises(TokenizerError, match="'w97' with id 97"):
        jmoe.load(saved)
