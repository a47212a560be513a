"""Tokenizer files of a Hugging Face directory, through the `tokenizers` library."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tokenizers import Tokenizer as Backend

from jmoe.model_files import regular
from jmoe.pieces import Pieces
from jmoe.text_stream import TextStream

if TYPE_CHECKING:
    from jinja2 import Environment, Template


class TokenizerError(ValueError):
    """Tokenizer files that are missing or broken, or a request they cannot serve."""


class Tokenizer:
    """`tokenizer.json` with the special tokens and chat template of `tokenizer_config.json`."""

    def __init__(self, backend: Backend, settings: Mapping[str, Any]) -> None:
        self.backend = backend
        self._settings = settings
        self._template = settings.get("chat_template")

    @classmethod
    def load(cls, directory: Path, chat_template: str | Path = "") -> "Tokenizer | None":
        """None where there is no `tokenizer.json`. Raises TokenizerError for a broken one.

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
        try:
            backend = Backend.from_file(str(regular(path)))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path} is not readable: {error}") from None
        settings = _settings(directory / "tokenizer_config.json")
        template = directory / "chat_template.jinja"
        if template.exists():
            settings["chat_template"] = _own_text(template)
        settings["chat_template"] = _one_template(settings.get("chat_template"), directory)
        if chat_template:
            settings["chat_template"] = _checked_template(Path(chat_template))
        return cls(backend, settings)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the tokenizer itself adds; `special_tokens`
        False: without those, for a text of `chat`, whose template has written them.

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

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return self.backend.decode(list(tokens), skip_special_tokens=True)

    @cached_property
    def pieces(self) -> Pieces:
        """The bytes of each token by itself."""
        return Pieces(self.backend)

    def stream(self) -> TextStream:
        """A decoder for tokens that come one by one."""
        return TextStream(self.decode)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat template applied, with the generation prompt. `options` are further names that
        the template may use. Raises TokenizerError.
        """
        from jinja2.exceptions import TemplateError

        given = {
            "messages": list(messages),
            "add_generation_prompt": True,
            "bos_token": self._special("bos_token"),
            "eos_token": self._special("eos_token"),
        }
        if taken := sorted(given.keys() & (options or {}).keys()):
            raise TokenizerError(f"the chat template gets {taken[0]} from the server; leave it out")
        template = self._compiled
        try:
            return template.render({**(options or {}), **given})
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TokenizerError(f"the chat template failed: {error}") from None

    @cached_property
    def _compiled(self) -> "Template":
        """The template, compiled once: that takes as long as a long prompt."""
        if not self._template:
            raise TokenizerError("this model has no chat template; send plain text")
        from jinja2.exceptions import TemplateError

        try:
            return _environment().from_string(self._template)
        except TemplateError as error:
            raise TokenizerError(f"the chat template failed: {error}") from None

    def _special(self, name: str) -> str:
        token = self._settings.get(name)
        return token.get("content", "") if isinstance(token, Mapping) else token or ""


def _environment() -> "Environment":
    """In which chat templates run: those of strangers, which may read what they get and no more."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse  # as templates call what they refuse with
    return environment


def _checked_template(path: Path) -> str:
    """A template that is given for a model. Raises TokenizerError where it is none."""
    from jinja2.exceptions import TemplateSyntaxError

    template = _text(path)
    try:
        _environment().from_string(template)
    except TemplateSyntaxError as error:
        raise TokenizerError(
            f"{path} is no chat template: line {error.lineno}: {error.message}"
        ) from None
    return template


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} is not readable: {error}") from None


def _own_text(path: Path) -> str:
    """Of a file that the model's directory holds."""
    try:
        return _text(regular(path))
    except OSError as error:
        raise TokenizerError(f"{path} is not readable: {error}") from None


def _settings(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        loaded = json.loads(_own_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise TokenizerError(f"{path} holds a {type(loaded).__name__}, not an object")
    return loaded


def _one_template(template: object, directory: Path) -> str | None:
    """The template itself, or of several named ones the one named `default`."""
    if isinstance(template, list):
        named = [one for one in template if isinstance(one, dict) and one.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        kind = type(template).__name__
        raise TokenizerError(f"{directory}: chat_template is a {kind}; it must be text")
    return template
