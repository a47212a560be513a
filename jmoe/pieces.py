"""What each token stands for: its bytes, whatever stands beside it in a text."""

import re

from tokenizers import Tokenizer as Backend

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for.

    Visible characters of Latin-1 stand for themselves, and those from U+0100 on for the other
    bytes, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    found = {chr(byte): byte for byte in visible}
    return found | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class Pieces:
    """Bytes by token id, of one tokenizer."""

    def __init__(self, backend: Backend) -> None:
        """By the tokenizer's decoder: of byte level, or of words with a mark for the space."""
        decoder = backend.decoder
        self._backend = backend
        state = b"" if decoder is None else decoder.__getstate__()
        self._alphabet = _byte_alphabet() if b"ByteLevel" in state else None
        self._added = {
            token: added.content for token, added in backend.get_added_tokens_decoder().items()
        }
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        """Returns the bytes of a token, of a special one its name; nothing for an id that the
        vocabulary does not have.
        """
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._bytes(token)
        return known

    def _bytes(self, token: int) -> bytes:
        if (added := self._added.get(token)) is not None:
            return added.encode()
        spelling = self._backend.id_to_token(token) or ""
        if self._alphabet is not None and all(c in self._alphabet for c in spelling):
            return bytes(self._alphabet[c] for c in spelling)
        if byte := _BYTE.fullmatch(spelling):
            return bytes([int(byte[1], 16)])
        return spelling.replace(_SPACE, " ").encode()
