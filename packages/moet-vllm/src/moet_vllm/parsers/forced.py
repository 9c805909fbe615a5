"""The second stage where the request demands a call and a JSON grammar may enforce it.

A server that constrains the model's output to the JSON schema of the tools gets JSON, not the
family's own format: a list of `{"name": ..., "parameters": {...}}` where any call is required,
the bare arguments where one tool is named. The first character that is not blank tells which;
in the family's own format it is never a bracket.
"""

from enum import Enum, auto

import msgspec
import regex

from moet_vllm.parsers.calls import CallStage
from moet_vllm.parsers.events import FaultKind
from moet_vllm.parsers.json_scanner import JsonScanner
from moet_vllm.parsers.writer import Writer

__all__ = ["ForcedStage"]

MAX_HEAD = 4096

_CALL = regex.compile(
    r"""\s*(?:\[\s*|,\s*)?\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,"""
    r"""\s*"(?:parameters|arguments)"\s*:\s*(?=\{)"""
)
_NEXT = regex.compile(r"\s*\}\s*(?P<next>[,\]])")


class _State(Enum):
    UNDECIDED = auto()
    HEAD = auto()  # of a call in the list
    OBJECT = auto()
    NEXT = auto()  # after a call's arguments
    AFTER = auto()
    NATIVE = auto()  # the family's own format, or an answer


class ForcedStage:
    """Takes what follows the thinking, as it arrives."""

    def __init__(self, calls: CallStage, writer: Writer, named: str | None) -> None:
        """Begin.

        Args:
            calls: takes over if the reply is not the JSON described above.
            writer: of the events.
            named: the tool that must be called, None if any must be.
        """
        self._calls = calls
        self._writer = writer
        self._named = named
        self._scanner = JsonScanner()
        self._state = _State.UNDECIDED
        self._text = ""

    def feed(self, text: str) -> None:
        """Take more text."""
        self._text += text
        while self._text and self._step():
            pass

    def finish(self) -> None:
        """End the reply."""
        if self._state is _State.OBJECT:
            self._writer.fault(FaultKind.CUT_OFF)
            self._writer.end(complete=False)
        elif self._state in (_State.HEAD, _State.NEXT):
            # The list has no end; the calls before are whole.
            self._writer.fault(FaultKind.CUT_OFF, self._text)
        elif self._state is _State.UNDECIDED:
            self._go_native()
        if self._state is _State.NATIVE:
            self._calls.finish()

    def _step(self) -> bool:
        """Use up some of the text; false if more is needed first."""
        match self._state:
            case _State.UNDECIDED:
                return self._decide()
            case _State.HEAD:
                return self._head()
            case _State.OBJECT:
                return self._object()
            case _State.NEXT:
                return self._next()
            case _State.AFTER:
                if self._text.strip():
                    self._writer.fault(FaultKind.STRAY_TEXT, self._text)
                self._text = ""
            case _State.NATIVE:
                text, self._text = self._text, ""
                self._calls.feed(text)
        return False

    def _decide(self) -> bool:
        first = self._text.lstrip()[:1]
        if not first and len(self._text) <= MAX_HEAD:
            return False
        if self._named is not None and first == "{":
            self._writer.start(self._named)
            self._text = self._text.lstrip()
            self._state = _State.OBJECT
        elif self._named is None and first == "[":
            self._state = _State.HEAD
        else:
            self._state = _State.NATIVE
        return True

    def _head(self) -> bool:
        found = _CALL.match(self._text, partial=True)
        if found is None or len(self._text[: found.end()]) > MAX_HEAD:
            self._go_native()
            return True
        if found.partial:
            return False
        try:
            name = msgspec.json.decode(found["name"], type=str)
        except msgspec.DecodeError:
            self._go_native()
            return True
        self._writer.start(name)
        self._text = self._text[found.end() :]
        self._scanner = JsonScanner()
        self._state = _State.OBJECT
        return True

    def _object(self) -> bool:
        taken, used = self._scanner.take(self._text)
        self._writer.arguments(taken)
        self._text = self._text[used:]
        if self._scanner.failed:
            self._writer.fault(FaultKind.INVALID_JSON)
            self._writer.end(complete=False)
            self._go_native()
        elif self._scanner.done:
            self._writer.end(complete=True)
            self._state = _State.AFTER if self._named is not None else _State.NEXT
        return True

    def _next(self) -> bool:
        found = _NEXT.match(self._text, partial=True)
        if found is None or len(self._text) > MAX_HEAD:
            self._go_native()
            return True
        if found.partial:
            return False
        self._text = self._text[found.end() :]
        self._state = _State.HEAD if found["next"] == "," else _State.AFTER
        return True

    def _go_native(self) -> None:
        text, self._text = self._text, ""
        self._calls.feed(text)
        self._state = _State.NATIVE
