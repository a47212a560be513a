"""Tokenizer files of a Hugging Face directory, through the `tokenizers` library."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from jmoe.text_stream import TextStream


class TokenizerError(ValueError):
    """Tokenizer files that are missing or broken, or a request they cannot serve."""


class Tokenizer:
    """`tokenizer.json` with the special tokens and chat template of `tokenizer_config.json`."""

    def __init__(self, backend: Backend, settings: Mapping[str, Any]) -> None:
        self.backend = backend
        self._settings = settings
        self._template = settings.get("chat_template")

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer | None":
        """None where there is no `tokenizer.json`. Raises TokenizerError for a broken one."""
        path = directory / "tokenizer.json"
        if not path.exists():
            return None
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path} is not readable: {error}") from None
        settings = _settings(directory / "tokenizer_config.json")
        template = directory / "chat_template.jinja"
        if template.exists():
            settings["chat_template"] = _text(template)
        settings["chat_template"] = _one_template(settings.get("chat_template"), directory)
        return cls(backend, settings)

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer itself adds.

        Other threads run meanwhile: the library holds the interpreter's lock in `encode`, and gives
        it back for batches.
        """
        return self.backend.encode_batch_fast([text])[0].ids

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

    def stream(self) -> TextStream:
        """A decoder for tokens that come one by one."""
        return TextStream(self.decode)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The chat template applied, with the generation prompt. Raises TokenizerError."""
        if not self._template:
            raise TokenizerError("this model has no chat template; send plain text")
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def text(name: str) -> str:
            token = self._settings.get(name)
            return token.get("content", "") if isinstance(token, Mapping) else token or ""

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            return environment.from_string(self._template).render(
                messages=list(messages),
                add_generation_prompt=True,
                bos_token=text("bos_token"),
                eos_token=text("eos_token"),
            )
        except TemplateError as error:
            raise TokenizerError(f"the chat template failed: {error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
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
    """The template itself, or of several named ones the one named `default`."""
    if isinstance(template, list):
        named = [one for one in template if isinstance(one, dict) and one.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        kind = type(template).__name__
        raise TokenizerError(f"{directory}: chat_template is a {kind}; it must be text")
    return template
