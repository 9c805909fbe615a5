"""Splits a stream into text and markers, wherever the stream was cut.

The one rule: text that could still become a marker is not given out.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import regex

from moet_vllm.parsers.grammar import MAX_MARK, Grammar, Mark

__all__ = ["Lexer", "Pattern", "is_cut_marker", "pattern_of"]

Pattern = Any  # a compiled expression of `regex`, which has no public type for it

# A cut marker of this many characters is no text that somebody meant.
MIN_CUT = 3


@cache
def pattern_of(grammar: Grammar, marks: Iterable[Mark]) -> Pattern:
    """Return the expression of those of `marks` that the grammar has; its group is the `Mark`.

    Args:
        grammar: of the family.
        marks: `Mark` for all of them, or a tuple of some.
    """
    found = [(mark, grammar.marks[mark]) for mark in marks if mark in grammar.marks]
    return regex.compile("|".join(f"(?P<{mark}>{text})" for mark, text in found))


class Lexer:
    """Holds what has arrived and was not used yet; its owner says what to look for."""

    def __init__(self) -> None:
        self._buffer = ""
        self._at = 0

    def push(self, text: str) -> None:
        """Append what arrived; what is held is shorter than a marker."""
        self._buffer = self._buffer[self._at :] + text if self._at < len(self._buffer) else text
        self._at = 0

    def text(self, pattern: Pattern) -> str:
        """Return what surely is text before the next marker; it stays until `skip`."""
        start = self._buffer.find("<", self._at)
        if start < 0:
            return self._buffer[self._at :]
        if self._buffer.find(">", start) >= 0:
            found = pattern.search(self._buffer, start)
            if found is not None:
                return self._buffer[self._at : found.start()]
        start = max(start, len(self._buffer) - MAX_MARK)
        found = pattern.search(self._buffer, start, partial=True)
        return self._buffer[self._at : found.start() if found else len(self._buffer)]

    def mark(self, pattern: Pattern) -> Any:
        """Return the marker that the held text begins with, taken, or None."""
        if self._buffer.find(">", self._at) < 0:
            return None
        found = pattern.match(self._buffer, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def untake(self, found: Any) -> None:
        """Put back the marker that `mark` returned last."""
        self._at -= found.end() - found.start()

    def skip(self, count: int) -> None:
        """Use up `count` characters of what `text` returned."""
        self._at += count

    def rest(self) -> str:
        """Return, and use up, all that is held."""
        rest, self._buffer, self._at = self._buffer[self._at :], "", 0
        return rest


def is_cut_marker(text: str) -> bool:
    """Whether what is held at the end of a reply is the beginning of a marker, not text."""
    return len(text) >= MIN_CUT
