"""Markers that close a call, found within a value: they close it only if nothing follows."""

__all__ = ["Tail"]

MAX_TAIL = 256


class Tail:
    """Holds closing markers, and blanks after them, until text shows that they are text."""

    def __init__(self) -> None:
        self._held = ""

    def mark(self, marker: str) -> str:
        """Take a closing marker; return what has turned out to be text."""
        self._held += marker
        return self.take() if len(self._held) > MAX_TAIL else ""

    def absorb(self, text: str) -> bool:
        """Hold text if markers are held and it is blank; else it, and what is held, is text."""
        if not self._held or text.strip() or len(self._held) + len(text) > MAX_TAIL:
            return False
        self._held += text
        return True

    def take(self) -> str:
        """Return, and forget, what is held."""
        held, self._held = self._held, ""
        return held
