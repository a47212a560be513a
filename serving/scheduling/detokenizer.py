"""Turns sampled tokens into text for the client: incremental detokenization and stop strings."""

from collections.abc import Sequence

from jmoe.tokenizer import Tokenizer


class StopString:
    """Finds a string in a text that arrives character by character (Knuth, Morris and Pratt 1977).

    A character takes amortized constant time. The table of borders is built on demand.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._borders = [0]  # [n]: longest proper prefix of text[:n + 1] that also ends it
        self.num_matched = 0  # length of the longest prefix that the text read so far ends with

    def push(self, character: str) -> bool:
        """Takes the text's next character; returns True if it completes the string."""
        matched = self.num_matched
        while matched and self._text[matched] != character:
            matched = self._borders[matched - 1]
        if self._text[matched] == character:
            matched += 1
        self.num_matched = matched
        self._extend_borders()
        return matched == len(self._text)

    def _extend_borders(self) -> None:
        """Extends the border table to the matched length."""
        while len(self._borders) < self.num_matched:
            border, character = self._borders[-1], self._text[len(self._borders)]
            while border and self._text[border] != character:
                border = self._borders[border - 1]
            self._borders.append(border + (self._text[border] == character))


class Detokenizer:
    """Text of one sequence; what may be the start of a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str]) -> None:
        """Without a tokenizer, all text is empty."""
        self._stream = None if tokenizer is None else tokenizer.stream()
        self._stop = [StopString(text) for text in stop]
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """Takes a token; returns the text to release, and whether a stop string ended it.

        The stop string is left out of the text. The one completed first counts; if several are
        completed at once, the longest.
        """
        return ("", False) if self._stream is None else self._take(self._stream.push(token))

    def finish(self) -> str:
        """Returns the text that was held back, when no token follows."""
        if self._stream is None:
            return ""
        text, stopped = self._take(self._stream.finish())
        if not stopped:
            text, self._held = text + self._held, ""
        return text

    def _take(self, piece: str) -> tuple[str, bool]:
        if not self._stop:
            return piece, False
        before = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            # Push the character to all stop strings, even after one is complete.
            complete = [stop.num_matched for stop in self._stop if stop.push(character)]
            if complete:
                self._held = ""
                return before[: end - max(complete)], True
        num_held = max(stop.num_matched for stop in self._stop)
        cut = len(before) - num_held
        self._held = before[cut:]
        return before[:cut], False
