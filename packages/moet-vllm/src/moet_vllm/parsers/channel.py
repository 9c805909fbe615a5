"""One channel of text, content or reasoning: keeps back blanks that may turn out to be markup."""

__all__ = ["MAX_BLANKS", "Channel"]

MAX_BLANKS = 64


class Channel:
    """Passes text on, but never blanks that end where markup begins.

    Blanks are held until more text shows that they belong to it. What is between two markers
    and all blank is layout, not text.
    """

    def __init__(self) -> None:
        self._blanks = ""
        self.has_text = False

    def add(self, text: str) -> str:
        """Take more text; return what is to be passed on."""
        stripped = text.rstrip()
        if stripped:
            self.has_text = True
            out, self._blanks = self._blanks + stripped, text[len(stripped) :]
        else:
            out, self._blanks = "", self._blanks + text
        # Longer runs are nobody's layout, and are not held without bound.
        excess = len(self._blanks) - MAX_BLANKS
        if excess > 0:
            self.has_text = True
            out, self._blanks = out + self._blanks[:excess], self._blanks[excess:]
        return out

    def end(self, *, drop: bool = False) -> str:
        """End the text; return the blanks at its end if they are part of it.

        Args:
            drop: they are not, a call follows.
        """
        out = self._blanks if self.has_text and not drop else ""
        self._blanks, self.has_text = "", False
        return out
