"""What a tokenizer's files say beside its words: ids that a model has no embedding for are refused
when it is loaded, and a text has the tokens that it has for transformers.
"""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers, processors

import jmoe
from jmoe.tokenizer import Tokenizer, TokenizerError


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


def test_a_file_that_truncates_and_pads_does_neither_to_a_prompt(tmp_path):
    """As transformers and vLLM read it: a training run leaves both behind."""
    write_tokenizer(tmp_path, words(97))
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8, pad_id=3)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    tokenizer.backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert tokenizer.encode("w1 w2 w4 w5") == [1, 2, 4, 5]
    assert tokenizer.encode("w1", special_tokens=False) == [1]


@pytest.mark.parametrize(
    ("settings", "own", "want"),
    [
        ({"add_bos_token": True}, processors.ByteLevel(), [90, 1, 2]),  # DeepSeek's files
        ({"add_bos_token": True}, None, [90, 1, 2]),
        ({"add_bos_token": True, "add_eos_token": True}, None, [90, 1, 2, 91]),
        ({"add_eos_token": True, "bos_token": None}, None, [1, 2, 91]),
        ({"add_bos_token": True, "tokenizer_class": "LlamaTokenizer"}, "template", [90, 1, 2]),
        ({"add_bos_token": False}, None, [1, 2]),
        # tokenizer.json does not count, which of OLMo adds an end.
        ({"tokenizer_class": "GPTNeoXTokenizerFast"}, "template", [1, 2]),
        ({"add_bos_token": False, "tokenizer_class": "GPTNeoXTokenizer"}, "template", [1, 2]),
        ({"add_bos_token": True, "tokenizer_class": "GPTNeoXTokenizerFast"}, None, [90, 1, 2]),
        ({"add_eos_token": True, "tokenizer_class": "GPTNeoXTokenizer"}, "template", [1, 2, 91]),
        ({"tokenizer_class": "CohereTokenizerFast"}, None, [90, 1, 2]),
        ({"tokenizer_class": "CohereTokenizer"}, "template", [90, 1, 2]),
        ({"add_bos_token": False, "tokenizer_class": "CohereTokenizerFast"}, "template", [1, 2]),
        ({}, None, [1, 2]),
        ({"add_bos_token": True, "bos_token": None}, None, [1, 2]),
        ({"add_bos_token": True, "bos_token": "<none>"}, None, [1, 2]),
        # These leave it to tokenizer.json.
        ({"add_bos_token": True, "tokenizer_class": "Llama"}, None, [1, 2]),
        ({"add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}, None, [1, 2]),
        ({"add_bos_token": True, "tokenizer_class": None}, None, [1, 2]),
    ],
)
def test_a_text_begins_and_ends_as_the_settings_ask(settings, own, want, tmp_path):
    write_tokenizer(tmp_path, words(90), [(90, "<s>"), (91, "</s>")])
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if own == "template":
        own = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 90)])
    if own is not None:
        backend.post_processor = own
    backend.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    named["tokenizer_class"] = "LlamaTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named | settings))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("w1 w2") == want
    assert tokenizer.encode("w1 w2", special_tokens=False) == [1, 2]
