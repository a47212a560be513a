"""Renders chats in processes with limits: a chat template is a program of whoever made the model,
and how long it takes depends on the caller's messages.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jmoe.tokenizer import DEFAULT, TOOL_USE, Tokenizer, TokenizerError, read_settings
from serving.errors import InvalidRequest, SettingsError
from serving.intake.limited_process import LimitedProcess, LimitExceeded
from serving.request import Bounds, Chat

RENDER_S = 2.0
"""Time limit for compiling a template, and for rendering a chat."""
ROOM_BYTES, ROOM_A_CHAR = 256 << 20, 32
"""Memory that a template may take, and for each character that a prompt may have."""
SHORT_CHARS = 16_384
"""Up to so many characters a chat counts as short."""
_EFFORT, _WORD_CHARS = "reasoning_effort", 16
_CHARS_A_MESSAGE = 64  # that a message counts for beside its content


class ChatTemplate:
    """A model's chat templates, which are neither compiled nor rendered in this process.

    Short chats without names of the caller's for the template, tools and a word for
    `reasoning_effort` apart, have a process of their own: what others send, however long it takes,
    does not delay them.
    """

    def __init__(self, tokenizer: Tokenizer, bounds: Bounds) -> None:
        """Texts longer than `bounds.max_prompt_chars` are refused."""
        self._tokenizer, self._bounds = tokenizer, bounds
        facts = {
            "templates": tokenizer.chat_templates,
            "special_tokens": tokenizer.special_tokens,
            "max_chars": bounds.max_prompt_chars,
        }
        self._short, self._other = _process(facts), _process(facts)

    async def render(self, chat: Chat) -> str:
        """Returns the text of a chat. Raises InvalidRequest."""
        try:
            options = dict(self._tokenizer.checked_options(chat.options))
        except TokenizerError as error:
            raise InvalidRequest(str(error), "prompt") from None
        num_chars = chat.num_chars + _CHARS_A_MESSAGE * len(chat.messages)
        others = options.keys() - ({"tools", _EFFORT} if _is_word(options) else {"tools"})
        usual = num_chars <= SHORT_CHARS and not others
        process = self._short if usual else self._other
        asked = {
            "template": self._tokenizer.chat_template_name(options),
            "messages": [dict(message) for message in chat.messages],
            "options": options,
        }
        try:
            found = await process.ask(asked)
        except (LimitExceeded, TypeError) as error:
            raise InvalidRequest(f"the chat template failed: {error}", "prompt") from None
        if found["error"] is not None:
            raise InvalidRequest(f"the chat template failed: {found['error']}", "prompt")
        self._bounds.check_chars(found["num_chars"])
        return found["text"]

    async def close(self) -> None:
        """Ends the processes."""
        await self._short.close()
        await self._other.close()


def _is_word(options: dict[str, Any]) -> bool:
    effort = options.get(_EFFORT)
    return isinstance(effort, str) and len(effort) <= _WORD_CHARS


def _process(facts: dict[str, Any]) -> LimitedProcess:
    room_bytes = ROOM_BYTES + ROOM_A_CHAR * facts["max_chars"]
    return LimitedProcess("chats", lambda: facts, RENDER_S, room_bytes)


def check_templates(directories: Iterable[Path], chat_template: str) -> None:
    """Compiles the chat templates of models that are about to be loaded, before their weights are
    read; `chat_template` is a file in place of their own. Must not run in an event loop.

    Raises SettingsError for one that does not compile, or not within limits.
    """
    found = {directory: read_settings(directory, chat_template) for directory in directories}
    texts = {
        settings["chat_template"].get(name, ""): (where, name)
        for where, settings in found.items()
        for name in (TOOL_USE, DEFAULT)
    }
    for text, (directory, name) in texts.items():
        if text and (why := asyncio.run(_compiled(text))) is not None:
            which = f"{name} of {directory}" if name != DEFAULT else directory
            raise SettingsError(
                f"{chat_template or which} is no chat template: {why}; name another in "
                "engine.chat_template"
            )


async def _compiled(text: str) -> str | None:
    """Returns why a template does not compile, or None."""
    process = _process({"templates": {DEFAULT: text}, "special_tokens": {}, "max_chars": 0})
    try:
        return (await process.ask({"template": DEFAULT}))["error"]
    except LimitExceeded as error:
        return str(error)
    finally:
        await process.close()
