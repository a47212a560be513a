"""Small tokenizers of the kinds that models come with."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from jmoe.tokenizer import Tokenizer


def byte_fallback():
    """A tokenizer of Mixtral's kind: words with a mark for the space, and 256 bytes."""
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
