"""Tokenizer files of a Hugging Face directory, through the `tokenizers` library."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

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


TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
"""All that is read here, as patterns below a model's directory."""
DEFAULT, TOOL_USE = "default", "tool_use"
"""Of several chat templates, the names of that for chats and that for chats with tools."""
SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Tokens that every model may name, as `bos_token` and so on."""
_OWN_TOKENS = ("extra_special_tokens", "model_specific_special_tokens")
"""Settings that may hold an object of a model's own special tokens, by name."""
_UNNAMED_TOKENS = ("extra_special_tokens", "additional_special_tokens")
"""Settings that may hold a list of further ones."""
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
"""What an object may say of a token beside its content."""
ADDS_TOKENS = dict.fromkeys(("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")) | {
    "GPTNeoXTokenizer": False,
    "CohereTokenizer": True,
}
"""Classes of transformers, with `Fast` or without, that heed `add_bos_token` and `add_eos_token`.
None: beside what tokenizer.json adds; else in place of it, and this is `add_bos_token` where it is
not given. With others tokenizer.json alone counts."""
_REMEMBERED_TOKENS = 1 << 14
_NAMED = ("name", "template")
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
    """`tokenizer.json` with the special tokens and chat templates of the files beside it."""

    def __init__(self, backend: Backend, settings: Mapping[str, Any]) -> None:
        """`settings` are those of `tokenizer_config.json`. Raises TokenizerError for some that
        cannot be.
        """
        self.backend = backend
        self.special_tokens: Mapping[str, str] = _special_tokens(settings)
        """Special tokens by the names that chat templates know them by; without a beginning or an
        end, these are empty."""
        self.chat_templates: Mapping[str, str] = _templates(settings.get("chat_template"))
        """Chat templates by name; a single one is `default`."""

    @classmethod
    def load(cls, directory: Path, chat_template: str | Path = "") -> "Tokenizer | None":
        """Loads a tokenizer; None where there is no `tokenizer.json`. Raises TokenizerError for a
        broken one.

        `chat_template` is a file in place of the model's own templates.
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
            _mark_special(backend, settings)
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
        from jmoe.chat_template import ChatTemplate, ChatTemplateError

        options = self.checked_options(options or {})
        name = self.chat_template_name(options)
        try:
            if name not in self._compiled:  # which takes as long as a long prompt
                made = ChatTemplate(self.chat_templates[name], self.special_tokens)
                self._compiled[name] = made
            return self._compiled[name].render(messages, options)
        except ChatTemplateError as error:
            raise TokenizerError(f"the chat template failed: {error}") from None

    def checked_options(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns `options` of a chat. Raises TokenizerError for names that the template gets from
        the server, and for a model that has no template.
        """
        if taken := sorted(options.keys() & _FROM_THE_SERVER):
            raise TokenizerError(f"the chat template gets {taken[0]} from the server; leave it out")
        if self.chat_template(options):
            return options
        if not self.chat_templates or DEFAULT in self.chat_templates:
            raise TokenizerError("this model has no chat template; send plain text")
        have = ", ".join(sorted(self.chat_templates))
        tools = "send tools, or " * (TOOL_USE in self.chat_templates)
        raise TokenizerError(
            f"this model's chat templates are {have}, and none is {DEFAULT}; {tools}give it a "
            "template (engine.chat_template)"
        )

    def chat_template_name(self, options: Mapping[str, Any]) -> str:
        """Returns the name of the chat template that a chat with `options` gets, as transformers
        does: with tools, be they none, the one for these where there is one.
        """
        has_tools = options.get("tools") is not None and TOOL_USE in self.chat_templates
        return TOOL_USE if has_tools else DEFAULT

    def chat_template(self, options: Mapping[str, Any]) -> str:
        """Returns the text of the chat template that a chat with `options` gets; empty: there is
        none.
        """
        return self.chat_templates.get(self.chat_template_name(options), "")

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Tokens beside the vocabulary's, special or not, by their text."""
        added = self.backend.get_added_tokens_decoder().items()
        return {one.content: token for token, one in added}

    @cached_property
    def _compiled(self) -> "dict[str, ChatTemplate]":
        """The templates that a chat has used, by name."""
        return {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns special tokens by name: those of every model, and a model's own, whose names end in
    `_token` or stand in an object. Raises TokenizerError.
    """
    found = {"bos_token": "", "eos_token": ""}
    of_every_model = {f"{name}_token" for name in SPECIAL_TOKENS}
    own = [settings.get(name) for name in _OWN_TOKENS]
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    for objects in (one for one in own if isinstance(one, Mapping)):
        named |= objects
    for name, value in named.items():
        text = _content(value)
        if text is not None:
            found[name] = text
        elif value is not None and name in of_every_model:
            raise TokenizerError(
                f"{name} is {json.dumps(value)[:99]}; it must be text, or an object with content"
            )
    return found


def _content(token: object) -> str | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _mark_special(backend: Backend, settings: Mapping[str, Any]) -> None:
    """Marks tokens as special that the settings name so and `tokenizer.json` has among its words
    alone: a text is split at them. Those without an id stay unknown.
    """
    lists = (settings.get(name) for name in _UNNAMED_TOKENS)
    tokens = [one for some in lists if isinstance(some, list) for one in some]
    names = _special_tokens(settings)
    tokens += [token if _content(token := settings.get(name)) else names[name] for name in names]
    known = {one.content for one in backend.get_added_tokens_decoder().values()}
    for token in tokens:
        text = _content(token)
        if text and text not in known and backend.token_to_id(text) is not None:
            flags = token if isinstance(token, Mapping) else {}
            given = {name: flags[name] is True for name in _FLAGS if name in flags}
            backend.add_special_tokens([AddedToken(text, special=True, **given)])


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
    named = _special_tokens(settings)
    template, added, own = ["$A"], [], backend.encode("").ids
    for name, at in (("bos", 0), ("eos", 1)):
        wanted = settings.get(f"add_{name}_token") is True
        text = named[f"{name}_token"] if wanted else ""
        token = backend.token_to_id(text)
        if token is not None and token not in own:
            template.insert(at * len(template), text)
            added.append((text, token))
    if added:
        last = processors.TemplateProcessing(single=template, special_tokens=added)
        first = backend.post_processor
        backend.post_processor = last if first is None else processors.Sequence([first, last])


def read_settings(directory: Path, chat_template: str | Path = "") -> dict[str, Any]:
    """Returns the settings of `tokenizer_config.json` and the files beside it, with the texts of
    chat templates by name, a single one `default`, as `chat_template`. Raises TokenizerError.

    What is said twice is as transformers takes it. `special_tokens_map.json` wins unless
    `tokenizer_config.json` has `added_tokens_decoder`; then it is not read. Templates in files of
    their own win over all in `tokenizer_config.json`. Without any, there is `chat_template.json`
    beside models that see images, which transformers reads with what prepares these.
    """
    settings = _settings(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= _settings(directory / "special_tokens_map.json")
    files = {path.stem: path for path in (directory / "additional_chat_templates").glob("*.jinja")}
    if (single := directory / "chat_template.jinja").exists():
        files = {DEFAULT: single} | files
    if chat_template:
        files = {DEFAULT: Path(chat_template)}
    if settings.get("chat_template") is None and not files:
        settings |= _settings(directory / "chat_template.json")
    if files:
        settings["chat_template"] = {name: _text(path) for name, path in files.items()}
    try:
        settings["chat_template"] = _templates(settings.get("chat_template"))
        _special_tokens(settings)
    except TokenizerError as error:
        raise TokenizerError(f"{directory}: {error}") from None
    return settings


def copy_tokenizer(directory: Path, to: Path) -> None:
    """Copies a model's tokenizer, special tokens and chat templates into another directory."""
    for path in (path for pattern in TOKENIZER_FILES for path in directory.glob(pattern)):
        target = to / path.relative_to(directory)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


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


def _templates(given: object) -> dict[str, str]:
    """Returns chat templates by name, a single one as `default`. Raises TokenizerError."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {DEFAULT: given}
    if given == []:
        raise TokenizerError("chat_template is an empty list; give it a template, or leave it out")
    if isinstance(given, Mapping):
        given = [{"name": name, "template": text} for name, text in given.items()]
    if not isinstance(given, list):
        raise TokenizerError(f"chat_template is a {type(given).__name__}; it must be text")
    found = {}
    for at, one in enumerate(given):
        name, text = (one.get(key) if isinstance(one, Mapping) else None for key in _NAMED)
        if not (isinstance(name, str) and isinstance(text, str)):
            raise TokenizerError(f"chat_template.{at} must have texts, name and template")
        found[name] = text
    return found
