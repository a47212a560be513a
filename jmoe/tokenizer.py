"""Tokenizer files of a Hugging Face directory, through the `tokenizers` library."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from jmoe.model_files import read_text, regular
from jmoe.pieces import Pieces

if TYPE_CHECKING:
    from jmoe.chat_template import ChatTemplate


_OPEN = "\ufffd"
"""What a decoder writes for bytes that are no whole character (yet)."""

_MAX_PENDING = 16
"""Tokens without a whole character that are waited for; a character has four bytes at most."""


class TextStream:
    """Releases text once its characters are whole.

    A token's text depends on its neighbours (a character's bytes may be spread over tokens, some
    decoders strip the first space), so each new token is decoded behind those that were released
    last, and what these alone give is cut off. The pieces joined, `finish` included, are what
    decoding all tokens at once gives, except where a byte-fallback decoder takes a character back
    that it had written before: of a run of byte tokens that is not valid as a whole it writes every
    byte as U+FFFD. What was released stays, and the stream goes on with the bytes that are new.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        decode_one: Callable[[int], str] | None = None,
    ) -> None:
        """`decode` gives the text of a list of token ids, and `decode_one`, if given, that of one
        alone, which it may remember.
        """
        self._decode = decode
        self._decode_one = decode_one or (lambda token: decode([token]))
        self._tokens: list[int] = []  # those released last, then the pending ones
        self._num_released = 0  # of `_tokens`

    def push(self, token: int) -> str:
        """Returns the text that `token` completes; empty while a character is still open."""
        self._tokens.append(token)
        text = self._pending_text()
        too_long = len(self._tokens) - self._num_released >= _MAX_PENDING
        if text and (too_long or not text.endswith(_OPEN)):
            del self._tokens[: self._num_released]
            self._num_released = len(self._tokens)
            return text
        if too_long:  # special tokens, which have no text: forget them
            del self._tokens[self._num_released :]
        return ""

    def finish(self) -> str:
        """Returns the text of the bytes that are still open when no token follows."""
        text = self._pending_text()
        self._tokens, self._num_released = [], 0
        return text

    def _pending_text(self) -> str:
        count, tokens = self._num_released, self._tokens
        released = self._decode_one(tokens[0]) if count == 1 else self._decode(tokens[:count])
        text = self._decode(tokens)
        return text[len(released) :] if text.startswith(released) else self._decode(tokens[count:])


SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Tokens that chat templates get from `tokenizer_config.json`, as `bos_token` and so on."""
ADDS_TOKENS = dict.fromkeys(("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")) | {
    "GPTNeoXTokenizer": False,
    "CohereTokenizer": True,
}
"""Classes of transformers, with `Fast` or without, that heed `add_bos_token` and `add_eos_token`.
None: beside what tokenizer.json adds; else in place of it, and this is `add_bos_token` where it is
not given. With others tokenizer.json alone counts."""
_REMEMBERED_TOKENS = 1 << 14
_FROM_THE_SERVER = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token"})


def lacking(directory: Path) -> str:
    """Says what a model without `tokenizer.json` lacks, and how to make that file from a tokenizer
    of another kind in its directory.
    """
    for other in ("tiktoken.model", "tokenizer.model"):
        if (directory / other).exists():
            return (
                f"{other} and no tokenizer.json (where transformers has a fast tokenizer for it, "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) makes the file)"
            )
    return "no tokenizer"


class TokenizerError(ValueError):
    """Tokenizer files that are missing or broken, or a request they cannot serve."""


class Tokenizer:
    """`tokenizer.json` with the special tokens and chat template of `tokenizer_config.json`."""

    def __init__(self, backend: Backend, settings: Mapping[str, Any]) -> None:
        self.backend = backend
        self._settings = settings
        self.chat_template: str | None = settings.get("chat_template")

    @classmethod
    def load(cls, directory: Path, chat_template: str | Path = "") -> "Tokenizer | None":
        """Loads a tokenizer; None where there is no `tokenizer.json`. Raises TokenizerError for a
        broken one.

        `chat_template` is a file in place of the model's own template.
        """
        path = directory / "tokenizer.json"
        if not path.exists():
            if chat_template:
                raise TokenizerError(
                    f"a chat template was given, {chat_template}, and {directory} has no "
                    "tokenizer.json to go with it; leave it out"
                )
            return None
        settings = read_settings(directory, chat_template)
        try:
            backend = Backend.from_file(str(regular(path)))
            backend.no_truncation()  # both are kept of a training, and would change prompts
            backend.no_padding()
            _add_tokens(backend, settings)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path} is not readable: {error}") from None
        return cls(backend, settings)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Returns token ids, with the special tokens that the tokenizer itself adds;
        `special_tokens` False: without those, for a text of `chat`, whose template has written
        them.

        Other threads run meanwhile: the library holds the interpreter's lock in `encode`, and gives
        it back for batches.
        """
        encoded = self.backend.encode_batch_fast([text], add_special_tokens=special_tokens)
        return encoded[0].ids

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text has at most so many for each of its tokens.

        Reckoned from the vocabulary's spelling, in which a byte or a space takes a character or
        more. A normalizer that deletes text could fit more into a token; those of the models that
        are served here do not.
        """
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens, by default without special ones."""
        return self.backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    @cached_property
    def pieces(self) -> Pieces:
        """The bytes of each token by itself."""
        return Pieces(self.backend)

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """Returns a decoder for tokens that come one by one."""
        if not skip_special_tokens:
            return TextStream(lambda tokens: self.decode(tokens, skip_special_tokens=False))
        return TextStream(self.decode, self._decode_one)

    @cached_property
    def _decode_one(self) -> Callable[[int], str]:
        return lru_cache(_REMEMBERED_TOKENS)(lambda token: self.decode([token]))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Applies the chat template, with the generation prompt. `options` are further names that
        the template may use. Raises TokenizerError.

        This runs the template in this process without limits: of a model whose maker you trust.
        """
        from jmoe.chat_template import ChatTemplateError

        options = self.checked_options(options or {})
        try:
            return self._compiled.render(messages, options)
        except ChatTemplateError as error:
            raise TokenizerError(f"the chat template failed: {error}") from None

    def checked_options(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns `options` of a chat. Raises TokenizerError for names that the template gets from
        the server, and for a model that has no template.
        """
        if taken := sorted(options.keys() & _FROM_THE_SERVER):
            raise TokenizerError(f"the chat template gets {taken[0]} from the server; leave it out")
        if not self.chat_template:
            raise TokenizerError("this model has no chat template; send plain text")
        return options

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Tokens beside the vocabulary's, special or not, by their text."""
        added = self.backend.get_added_tokens_decoder().items()
        return {one.content: token for token, one in added}

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by the names that chat templates know them by; without a beginning or an
        end, these are empty.
        """
        named = {name: _special(self._settings, f"{name}_token") for name in SPECIAL_TOKENS}
        always = ("bos", "eos")
        return {f"{name}_token": text for name, text in named.items() if text or name in always}

    @cached_property
    def _compiled(self) -> "ChatTemplate":
        """The template, compiled once: that takes as long as a long prompt."""
        from jmoe.chat_template import ChatTemplate

        return ChatTemplate(self.chat_template or "", self.special_tokens)


def _special(settings: Mapping[str, Any], name: str) -> str:
    token = settings.get(name)
    return token.get("content", "") if isinstance(token, Mapping) else token or ""


def _add_tokens(backend: Backend, settings: Mapping[str, Any]) -> None:
    """Puts a beginning and an end around each text where the settings ask for them and the backend
    adds none, as DeepSeek's do.
    """
    kind = str(settings.get("tokenizer_class")).removesuffix("Fast")
    if kind not in ADDS_TOKENS:
        return
    if (begins := ADDS_TOKENS[kind]) is not None:
        backend.post_processor = None
        settings = {"add_bos_token": begins, **settings}
    template, added, own = ["$A"], [], backend.encode("").ids
    for name, at in (("bos", 0), ("eos", 1)):
        wanted = settings.get(f"add_{name}_token") is True
        text = _special(settings, f"{name}_token") if wanted else ""
        token = backend.token_to_id(text)
        if token is not None and token not in own:
            template.insert(at * len(template), text)
            added.append((text, token))
    if added:
        last = processors.TemplateProcessing(single=template, special_tokens=added)
        first = backend.post_processor
        backend.post_processor = last if first is None else processors.Sequence([first, last])


def read_settings(directory: Path, chat_template: str | Path = "") -> dict[str, Any]:
    """Returns the settings of `tokenizer_config.json`, with the text of the chat template, None
    without one, as `chat_template`. Raises TokenizerError.
    """
    settings = _settings(directory / "tokenizer_config.json")
    template = directory / "chat_template.jinja"
    if template.exists():
        settings["chat_template"] = _text(template)
    settings["chat_template"] = _one_template(settings.get("chat_template"), directory)
    if chat_template:
        settings["chat_template"] = _text(Path(chat_template))
    return settings


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} is not readable: {error}") from None


def _settings(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        loaded = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise TokenizerError(f"{path} holds a {type(loaded).__name__}, not an object")
    return loaded


def _one_template(template: object, directory: Path) -> str | None:
    """Returns the template, or of several named ones the one named `default`."""
    if isinstance(template, list):
        named = [one for one in template if isinstance(one, dict) and one.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        kind = type(template).__name__
        raise TokenizerError(f"{directory}: chat_template is a {kind}; it must be text")
    return template
