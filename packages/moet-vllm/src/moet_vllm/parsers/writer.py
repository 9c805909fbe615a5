"""Writes the events of one reply: numbers and names its calls, and counts its faults."""

import re
import secrets
from collections.abc import Callable, Iterable

from moet_vllm.parsers.channel import Channel
from moet_vllm.parsers.events import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Fault,
    FaultKind,
    Reasoning,
)
from moet_vllm.parsers.lexer import Pattern
from moet_vllm.parsers.schema import Tools
from moet_vllm.parsers.seam import Seam

__all__ = ["MakeId", "Writer", "native_ids", "random_ids"]

MAX_FAULTS = 100
MAX_DETAIL = 80

MakeId = Callable[[int, str, str], str]
"""Makes a call's id of its index, its name and what the model wrote as its id ("" if nothing)."""


def random_ids() -> MakeId:
    """Return a maker of random ids."""
    return lambda _index, _name, _written: f"call_{secrets.token_hex(12)}"


def native_ids(earlier: Iterable[str] = ()) -> MakeId:
    """Return a maker of ids as Kimi models know them: `functions.NAME:N`.

    What the model wrote is kept if it has that form and is new; else N goes on counting.

    Args:
        earlier: the ids of the conversation's calls so far.
    """
    used = set(before := list(earlier))
    number = len(before)

    def make(index: int, name: str, written: str) -> str:
        nonlocal number
        own = re.fullmatch(re.escape(f"functions.{name}:") + "[0-9]{1,9}", written)
        if not own or written in used:
            number = max(number, len(before) + index)
            # It never goes back, so that a reply full of doubles costs no more than its length.
            while (written := f"functions.{name}:{number}") in used:
                number += 1
        used.add(written)
        return written

    return make


class Writer:
    """Collects events until they are taken.

    Attributes:
        tools: of the request.
    """

    def __init__(
        self, marks: Pattern, tools: Tools, make_id: MakeId, *, calls_allowed: bool
    ) -> None:
        """Begin a reply; no match of `marks` is written as content."""
        self.tools = tools
        self._seam = Seam(marks)
        self._make_id = make_id
        self._allowed = calls_allowed
        self._channel = Channel()
        self._events: list[Event] = []
        self._calls = -1
        self._faults = 0

    def take(self) -> list[Event]:
        """Return the events since the last time."""
        events, self._events = self._events, []
        return events

    def reasoning(self, text: str) -> None:
        """Write thinking."""
        if text:
            self._events.append(Reasoning(text))

    def content(self, text: str) -> None:
        """Write text of the answer."""
        self._content(self._channel.add(text))

    def end_content(self, *, call_follows: bool = False) -> None:
        """Settle the blanks at the end of the text so far."""
        self._content(self._channel.end(drop=call_follows))

    def start(self, name: str, written_id: str = "") -> None:
        """Begin a call."""
        self._calls += 1
        if not self._allowed:
            self.fault(FaultKind.CALL_NOT_ALLOWED, name)
            return
        if self.tools and name not in self.tools:
            self.fault(FaultKind.UNKNOWN_TOOL, name)
        call_id = self._make_id(self._calls, name, written_id)
        self._events.append(CallStart(self._calls, call_id, name))

    def arguments(self, text: str) -> None:
        """Write more of the arguments of the call that was begun last."""
        if self._allowed and text:
            self._events.append(Arguments(self._calls, text))

    def end(self, *, complete: bool) -> None:
        """End the call that was begun last."""
        if self._allowed:
            self._events.append(CallEnd(self._calls, complete))

    def fault(self, kind: FaultKind, detail: str = "") -> None:
        """Report that something was wrong."""
        self._faults += 1
        if self._faults == MAX_FAULTS:
            kind, detail = FaultKind.TOO_MANY_FAULTS, ""
        if self._faults <= MAX_FAULTS:
            shown = detail if len(detail) <= MAX_DETAIL else detail[:MAX_DETAIL] + "…"
            self._events.append(Fault(kind, shown))

    def _content(self, text: str) -> None:
        joined = self._seam.add(text)
        if len(joined) < len(text):
            self.fault(FaultKind.STRAY_MARKER, text)
        if joined:
            self._events.append(Content(joined))
