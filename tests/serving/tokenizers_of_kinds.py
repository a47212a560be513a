"""Small tokenizers of the kinds that models come with."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from jmoe.tokenizer import Tokenizer


def byte_fallback():
    """Returns a tokenizer of Mixtral's kind: words with a mark for the space, and 256 bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words += ["\u2581", "\u2581the", "\u2581sun", "s", "un", "\u2581a", "\u4e00", "."]
    vocab = {word: i for i, word in enumerate(words)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, {})


def characters(template=None):
    """Returns a tokenizer whose tokens are the characters up to U+00FF, by their numbers; a text
    begins with token 1. `template`: of chats.
    """
    backend = Backend(models.WordLevel({chr(i): i for i in range(256)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="\x01 $A", special_tokens=[("\x01", 1)]
    )
    return Tokenizer(backend, {"chat_template": template, "bos_token": "\x01"})
