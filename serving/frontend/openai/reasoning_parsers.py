"""What a model writes while it thinks, read apart from its answer, piece by piece."""

from collections.abc import Callable

from serving.frontend.openai.tool_parsers import Delta, Harmony, Kimi, Reading, ToolParser


class Think(ToolParser):
    """`<think>...</think>` before the answer: Qwen3, DeepSeek-R1, GLM-4.5, MiniMax-M2. White space
    around the thoughts is dropped. An output that begins with no tag is an answer, unless the
    prompt has opened it.
    """

    opening, closing = "<think>", "</think>"
    calls = ""  # marker at which calls begin, and thoughts end; empty: `closing` alone ends them

    def __init__(self, before: str) -> None:
        """`before` is how the prompt ends."""
        self._opened = before.rstrip().endswith(self.opening)
        super().__init__({})

    def read(self) -> Reading:
        """See ToolParser."""
        if (yield from self.skip(self.opening)) or self._opened:
            yield from self.peek()
            ends = filter(None, (self.closing, self.calls))
            yield from self.until(*ends, take=self.think, stay=True)
            self.accept(self.closing)
            yield from self.peek()
        yield from self.answer()

    def answer(self) -> Reading:
        """Reads what comes behind the thoughts."""
        while True:
            if text := self._consume(len(self._left)):
                self._deltas.append(Delta(text))
            if self._ended:
                return
            yield


class KimiThink(Think):
    """Kimi-K2-Thinking, which at times calls before it has ended its thoughts."""

    calls = Kimi.opening


class ErnieThink(Think):
    """ERNIE-4.5: an answer, but not a call, is in `<response>...</response>`."""

    def answer(self) -> Reading:
        """See Think."""
        if (yield from self.skip("<response>")):
            yield from self.peek()
            if (yield from self.until("</response>", take=self.say)):
                self._space = ""
                yield from self.peek()
        yield from super().answer()


class Channels(Harmony):
    """gpt-oss: what it writes to the channel `analysis`."""

    def __init__(self, before: str) -> None:
        """`before` is how the prompt ends."""
        super().__init__({})


Thinks = Callable[[str], ToolParser]
"""Makes a parser of one output, given how the prompt ends."""

PARSERS: dict[str, Thinks] = {
    "deepseek_r1": Think,
    "ernie45": ErnieThink,
    "glm45": Think,
    "kimi_k2": KimiThink,
    "minimax_m2": Think,
    "openai_gptoss": Channels,
    "qwen3": Think,
}
"""By vLLM's names."""


def parser_of(template: str) -> Thinks | None:
    """Returns the format in which a chat template's model thinks; None: none of these."""
    if "<|channel|>" in template:
        return Channels
    if "<global_setting>" in template:  # ERNIE-4.5's alone
        return ErnieThink
    if Think.closing not in template:
        return None
    return KimiThink if Kimi.opening in template else Think
