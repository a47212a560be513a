"""Chat templates: compiles and renders those of Hugging Face directories, as transformers does.

A template is a program of whoever made the model: compiling or rendering it can take for ever and
fill the memory. A server leaves both to another process (`serving.templates`), which imports this
file without the package around it: nothing here needs jax.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """A template that does not compile, or cannot render a chat."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, text: str, special_tokens: Mapping[str, Any]) -> None:
        """`special_tokens` are names for the template, such as `bos_token`.

        Raises ChatTemplateError if it does not compile.
        """
        self._special_tokens = special_tokens
        try:
            self._compiled = _environment().from_string(text)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(f"line {error.lineno}: {error.message}") from None
        except MemoryError:
            raise
        except Exception as error:
            raise ChatTemplateError(_said(error)) from None

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Returns the text of a chat, with the generation prompt. `options` are further names that
        the template may use. Raises ChatTemplateError.
        """
        return "".join(self.pieces(messages, options))

    def pieces(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yields the text of `render` piece by piece. Raises ChatTemplateError."""
        names = {"tools": None, "documents": None, **self._special_tokens, **options}
        given = {"messages": list(messages), "add_generation_prompt": True}
        try:
            yield from self._compiled.generate(names | given)
        except (GeneratorExit, MemoryError):
            raise
        except Exception as error:
            raise ChatTemplateError(_said(error)) from None


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


class _Generation(Extension):
    """`{% generation %}` marks what training learns; a server renders it as it stands."""

    tags = {"generation"}  # noqa: RUF012, as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Returns a scope of its own, as transformers does: what is set in it ends with it."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns a sandbox in which templates only read what they get, with the extensions of
    transformers.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    return environment


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON; jinja2's own filter writes `<` and `'` as for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
