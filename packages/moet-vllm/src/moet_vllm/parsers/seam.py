"""Joins texts that markup has parted, so that no marker comes about where they meet."""

from moet_vllm.parsers.grammar import MAX_MARK
from moet_vllm.parsers.lexer import Pattern

__all__ = ["Seam"]


class Seam:
    """Passes on the pieces of one text, each of them free of markers.

    `<tool_</think>call>` without the marker in the middle would be a marker again. Of such a
    one the last character is left out.
    """

    def __init__(self, pattern: Pattern) -> None:
        """Begin a text that must not contain a match of `pattern`."""
        self._pattern = pattern
        self._tail = ""  # of what was passed on, from its last "<"

    def add(self, text: str) -> str:
        """Take the next piece; return what of it is to be passed on."""
        out: list[str] = []
        at = 0
        while self._tail and (end := text.find(">", at)) >= 0 and text.find("<", at, end) < 0:
            # A marker that begins before this piece ends at its first ">", if anywhere.
            self._tail += text[at:end]
            whole = self._pattern.fullmatch(self._tail + ">")
            out.append(text[at : end + (whole is None)])
            at = end + 1
            if whole is None:
                self._tail = ""
        out.append(text[at:])
        opening = text.rfind("<", at)
        if opening >= 0:
            self._tail = "" if text.find(">", opening) >= 0 else text[opening:]
        elif self._tail:
            self._tail += text[at:]
        if len(self._tail) > MAX_MARK:
            self._tail = ""
        return "".join(out)
