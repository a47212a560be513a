"""Tokenizer files of a Hugging Face directory, through the `tokenizers` library."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream


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
        settings = directory / "tokenizer_config.json"
        loaded = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
        template = directory / "chat_template.jinja"
        if template.exists():
            loaded["chat_template"] = template.read_text(encoding="utf-8")
        return cls(backend, loaded)

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer itself adds.

        Other threads run meanwhile: the library holds the interpreter's lock in `encode`, and gives
        it back for batches.
        """
        return self.backend.encode_batch_fast([text])[0].ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return self.backend.decode(list(tokens), skip_special_tokens=True)

    def stream(self) -> "TextStream":
        """A decoder for tokens that come one by one."""
        return TextStream(self.backend)

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


class TextStream:
    """Incremental decoding: text is released once its bytes are whole."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token: int) -> str:
        """Text that `token` completes; empty while a character is still open."""
        return self._stream.step(self._backend, token) or ""
