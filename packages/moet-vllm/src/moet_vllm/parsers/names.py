"""Finds the name of a tool in what a model wrote where the name belongs."""

import re

from moet_vllm.parsers.grammar import Grammar
from moet_vllm.parsers.schema import Tools

__all__ = ["PARTED", "name_and_key", "name_of_head", "plain_name"]

# A blank that stands where a marker was left out of a head, so that what the marker parts is not
# read as one name; models do not write it.
PARTED = "\x1f"

_PLAIN = re.compile(r"\w(?:[\w.:/-]{0,126}\w)?")
_FENCE = re.compile(r"\s*(?:```[a-z]*)?\s*")
_FENCED = re.compile(r"\s*```[a-z]*\s*(?:```\s*)?$")
_ID = re.compile(r"(?:functions?[.:])?(?P<name>.+?)(?::[0-9]+)?", re.DOTALL)
_MANGLED_ID = re.compile(r"(?:functions?[.:_]?)?(?P<name>.+?)[:_#]?[0-9]*", re.DOTALL)


def is_fence(text: str) -> bool:
    """Whether text around JSON is only layout: blanks and a code fence."""
    return _FENCE.fullmatch(text) is not None


def plain_name(text: str, tools: Tools) -> str | None:
    """Return the name that `text` is, blanks around it gone; None if it is none."""
    name = text.strip()
    short = name.removeprefix("functions.")
    if name not in tools and short in tools:
        return short
    return name if name in tools or _PLAIN.fullmatch(name) else None


def name_of_head(grammar: Grammar, head: str, before_json: str, tools: Tools) -> str | None:
    """Return the name in the head of a call whose arguments are JSON; None if there is none.

    Args:
        grammar: of the family.
        head: text before the separator.
        before_json: text from there to the arguments.
        tools: of the request; an id that is not of the usual form must hold one of their names,
            or there must be only one tool.
    """
    after = _FENCED.sub("", before_json).strip()
    # V3 and V3.1 differ in the side of the name, and their models mix them up.
    if grammar.head == "after":
        return plain_name(after or (head if head.strip() in tools else ""), tools)
    if grammar.head == "name" and head.strip() == "function" and after in tools:
        return after
    if not is_fence(before_json):
        return None
    if grammar.head == "name":
        return plain_name(head, tools)
    text = head.strip()
    usual = _ID.fullmatch(text)
    if usual is None:
        return None
    name = usual["name"]
    if name in tools or not tools:
        return plain_name(name, tools)
    mangled = _MANGLED_ID.fullmatch(text)
    if mangled is not None and mangled["name"] in tools:
        return mangled["name"]
    if name != text:  # of the usual form: the model means a tool that is not there
        return plain_name(name, tools)
    return next(iter(tools)) if len(tools) == 1 and _PLAIN.fullmatch(text) else None


def name_and_key(text: str, tools: Tools) -> tuple[str, str] | None:
    """Part a name from the parameter that follows it without a marker.

    Returns:
        The longest name of a tool that `text` begins with, one that has such a parameter first,
        and the rest; None if no tool matches, or the rest is several words and no parameter.
    """
    glued = text.strip()
    found = [
        (tool.has(glued[len(name) :].strip()), len(name), name)
        for name, tool in tools.items()
        if glued.startswith(name) and glued[len(name) :].strip()
    ]
    if not found:
        return None
    known, length, name = max(found)
    key = glued[length:].strip()
    return (name, key) if known or len(key.split()) == 1 else None
