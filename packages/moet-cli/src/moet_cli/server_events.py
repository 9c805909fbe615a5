"""Reads the event lines in a server's output; see `moet_vllm.events`."""

import re
from typing import TypeAlias

import msgspec

from moet_cli.guard import ServerEnded
from moet_vllm.events import MARKER, Converted, Pool, ProcessEnded

__all__ = ["ServerEvent", "parse_event"]

ServerEvent: TypeAlias = Converted | Pool | ProcessEnded | ServerEnded

# vLLM puts "(Worker_TP0 pid=12) " before what its processes write. Nothing else may come first:
# a log line can quote a prompt, and a prompt must not be able to pose as an event.
_LINE = re.compile(r"(?:\([^()]*\) )*" + re.escape(MARKER) + r"(.*)")


def parse_event(line: str) -> ServerEvent | None:
    """Return the event in a line, None if it is an ordinary line."""
    found = _LINE.fullmatch(line.rstrip())
    if found is None:
        return None
    try:
        return msgspec.json.decode(found.group(1), type=ServerEvent)
    except msgspec.DecodeError:
        return None  # a torn line; what it would have said is then missing, which is noticed
