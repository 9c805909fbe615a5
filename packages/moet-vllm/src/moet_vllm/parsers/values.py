"""Turns the text of a tagged parameter into JSON, by the types its schema allows."""

import re

import msgspec

from moet_vllm.parsers.json_scanner import as_json, quoted_part

__all__ = ["MAX_HELD", "Value"]

# A value of more characters than this is a string if it may be one: what else is that long is
# better streamed than held.
MAX_HELD = 1 << 20

_HEAD = 8
_INTEGRAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.0+)?")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_WORDS = {"t": "true", "f": "false", "n": "null"}
_STARTS = {
    "{": {"object"},
    "[": {"array"},
    "t": {"boolean"},
    "f": {"boolean"},
    "n": {"null"},
    **{first: {"number", "integer"} for first in "-0123456789"},
}


class Converted(msgspec.Struct, frozen=True):
    """JSON text of a value; `fits` if the schema allows it."""

    text: str
    fits: bool = True


class Value:
    """One parameter's value while it arrives.

    A value that must be a string is passed on as it comes. Any other is held until it ends, for
    only its end shows what it is: text that is JSON of an allowed type is passed on as it
    stands, byte for byte, everything else becomes a string.
    """

    def __init__(self, types: frozenset[str], is_string: bool | None = None) -> None:
        """Begin a value.

        Args:
            types: the JSON types the schema allows.
            is_string: what the model said of it (the attribute `string` of DSML), None if it
                has no way to say.
        """
        self._types = types
        self._quoted_json = is_string is False
        self._is_string = "string" in types and (
            is_string is True or (types == {"string"} and is_string is None)
        )
        self._opened = False
        self._held: list[str] = []
        self._length = 0
        self._head = ""

    def add(self, text: str) -> str:
        """Take more of the value; return what of its JSON is certain."""
        if not self._is_string:
            self._held.append(text)
            self._length += len(text)
            if len(self._head) < _HEAD:
                self._head = (self._head + text).lstrip()[:_HEAD]
            self._is_string = (
                "string" in self._types
                and not self._quoted_json
                and (self._length > MAX_HELD or self._cannot_be_json())
            )
            if not self._is_string:
                return ""
            text = "".join(self._held)
            self._held = []
        opening = "" if self._opened else '"'
        self._opened = True
        return opening + quoted_part(text)

    def end(self) -> Converted:
        """End the value; return the rest of its JSON."""
        if self._is_string:
            return Converted(self.add("") + '"')
        return convert("".join(self._held), self._types, quoted_json=self._quoted_json)

    def _cannot_be_json(self) -> bool:
        """Whether its beginning already rules out JSON of an allowed type that is no string."""
        if not self._head:
            return False
        first = self._head[0]
        word = self._head.rstrip()
        return not _STARTS.get(first, set()) & self._types or (
            first in _WORDS and not _WORDS[first].startswith(word)
        )


def convert(text: str, types: frozenset[str], *, quoted_json: bool = False) -> Converted:
    """Turn a whole value into JSON.

    Args:
        text: as the model wrote it.
        types: the JSON types the schema allows.
        quoted_json: strings are written as JSON strings, with their quotes.
    """
    stripped = text.strip()
    candidate = _PYTHON.get(stripped, stripped) if "string" not in types else stripped
    found = as_json(candidate)
    if found is not None and _fits(found, types, quoted_json):
        return Converted(found)
    if "string" not in types and found is not None and found[0] == '"':
        # The model put quotes around something that is no string: "10" for 10.
        inner = as_json(msgspec.json.decode(found))
        if inner is not None and _fits(inner, types, quoted_json=False):
            return Converted(inner)
    return Converted(f'"{quoted_part(text)}"', fits="string" in types and not quoted_json)


def _fits(text: str, types: frozenset[str], quoted_json: bool) -> bool:
    """Whether JSON text is of one of the types; a string is one only where it has quotes."""
    if text[0] == '"':
        return quoted_json and "string" in types
    kinds = _STARTS[text[0]] & types
    return bool(kinds) and (kinds != {"integer"} or _INTEGRAL.fullmatch(text) is not None)
