"""The bundled model's tokenizer: byte-level BPE of 512 entries, digits one by one."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "<|im_start|>{{ message['content'] }}<|im_end|>"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] }}<|endoftext|>"
    "{% endif %}{% endfor %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 512) -> Tokenizer:
    """Trains byte-level BPE over `texts`; covers every byte, so any UTF-8 text round-trips.

    A single letter, alone or after a space, is always one token, and so is a digit: tasks about
    lists then see one symbol a token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r" ?[A-Za-z]+|[0-9]| ?[^A-Za-z0-9\s]|\s"), behavior="isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path, max_position: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` as Hugging Face directories have them."""
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
