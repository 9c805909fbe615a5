"""Checks JSON while it arrives, without recursion: where a value ends, and where it goes wrong."""

import json
import re
from enum import Enum, auto

__all__ = ["JsonScanner", "as_json", "quoted_part"]

MAX_DEPTH = 512
MAX_SCALAR = 4096

_BLANK = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = ("true", "false", "null")


def quoted_part(text: str) -> str:
    """Return `text` as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return where the match at `at` ends; the patterns here match the empty text too."""
    found = pattern.match(text, at)
    assert found is not None
    return found.end()


class _Wants(Enum):
    """What may come next, outside of strings and scalars."""

    VALUE = auto()
    FIRST_ITEM = auto()  # a value or ]
    FIRST_KEY = auto()  # a key or }
    KEY = auto()
    COLON = auto()
    NEXT = auto()  # a comma or the end of the container
    NOTHING = auto()  # the value is complete


class JsonScanner:
    """Follows one JSON value.

    One liberty: control characters inside strings, which models write and JSON forbids, are
    escaped; `take` returns the text with that done.

    Attributes:
        in_string: the text so far ends within a string.
        failed: the text so far is no beginning of a JSON value.
    """

    def __init__(self) -> None:
        self._wants = _Wants.VALUE
        self._closers: list[str] = []
        self._scalar: str | None = None
        self._escape = ""
        self._is_key = False
        self.in_string = False
        self.failed = False

    @property
    def done(self) -> bool:
        """The value is complete; a number at the top is only when something follows it."""
        return self._wants is _Wants.NOTHING and not self.in_string and self._scalar is None

    def take(self, text: str) -> tuple[str, int]:
        """Follow more text.

        Returns:
            What of it belongs to the value, control characters escaped, and how many characters
            were used: all, unless the value ended or went wrong at that place.
        """
        out: list[str] = []
        at = 0
        while at < len(text) and not self.failed and not self.done:
            start = at
            at = self._step(text, at)
            piece = text[start:at]
            if self.in_string and len(piece) == 1 and piece < " ":
                piece = quoted_part(piece)
            out.append(piece)
        return "".join(out), at

    def finish(self) -> bool:
        """End the text; return whether the value is complete."""
        if self._scalar is not None:
            self._end_scalar()
        return self.done and not self.failed

    def _step(self, text: str, at: int) -> int:
        if self.in_string:
            return self._string(text, at)
        if self._scalar is not None:
            end = _end_of(_SCALAR, text, at)
            self._scalar += text[at:end]
            if len(self._scalar) > MAX_SCALAR:
                self.failed = True
            elif end < len(text):
                self._end_scalar()
            return end
        end = _end_of(_BLANK, text, at)
        return end if end > at else self._structure(text[at], at)

    def _string(self, text: str, at: int) -> int:
        char = text[at]
        if self._escape:
            self._escape += char
            if len(self._escape) == 2:
                if char == "u":
                    return at + 1
                self.failed = char not in '"\\/bfnrt'
            elif char not in "0123456789abcdefABCDEF":
                self.failed = True
            elif len(self._escape) < 6:
                return at + 1
            self._escape = ""
            return at if self.failed else at + 1
        if char == "\\":
            self._escape = char
            return at + 1
        if char == '"':
            self.in_string = False
            self._wants = _Wants.COLON if self._is_key else self._after_value()
            return at + 1
        if char < " ":
            return at + 1
        return _end_of(_PLAIN, text, at)

    def _structure(self, char: str, at: int) -> int:
        wants = self._wants
        if wants in (_Wants.VALUE, _Wants.FIRST_ITEM) and self._value(char):
            return at + 1
        if char == '"' and wants in (_Wants.KEY, _Wants.FIRST_KEY):
            self.in_string = self._is_key = True
        elif char == ":" and wants is _Wants.COLON:
            self._wants = _Wants.VALUE
        elif char == "," and wants is _Wants.NEXT:
            self._wants = _Wants.KEY if self._closers[-1] == "}" else _Wants.VALUE
        elif (
            wants in (_Wants.NEXT, _Wants.FIRST_ITEM, _Wants.FIRST_KEY)
            and char == self._closers[-1]
        ):
            self._closers.pop()
            self._wants = self._after_value()
        else:
            self.failed = True
            return at
        return at + 1

    def _value(self, char: str) -> bool:
        """Begin a value if `char` can."""
        if char == '"':
            self.in_string, self._is_key = True, False
        elif char in "{[" and len(self._closers) < MAX_DEPTH:
            self._closers.append("}" if char == "{" else "]")
            self._wants = _Wants.FIRST_KEY if char == "{" else _Wants.FIRST_ITEM
        elif char in "-0123456789tfn":
            self._scalar = char
        else:
            return False
        return True

    def _end_scalar(self) -> None:
        scalar, self._scalar = self._scalar or "", None
        if scalar in _WORDS or _NUMBER.fullmatch(scalar):
            self._wants = self._after_value()
        else:
            self.failed = True

    def _after_value(self) -> _Wants:
        return _Wants.NEXT if self._closers else _Wants.NOTHING


def as_json(text: str) -> str | None:
    """Return the one JSON value that `text` is, blanks around it gone; None if it is none."""
    scanner = JsonScanner()
    stripped = text.strip(" \t\n\r")
    taken, used = scanner.take(stripped)
    return taken if scanner.finish() and used == len(stripped) else None
