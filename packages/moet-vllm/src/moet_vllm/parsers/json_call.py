"""A call whose arguments are one JSON object (Kimi, DeepSeek V3 and V3.1)."""

from enum import Enum, auto
from typing import Any

from moet_vllm.parsers.events import FaultKind
from moet_vllm.parsers.grammar import Grammar, Mark
from moet_vllm.parsers.json_scanner import JsonScanner
from moet_vllm.parsers.lexer import Pattern, pattern_of
from moet_vllm.parsers.names import PARTED, is_fence, name_of_head
from moet_vllm.parsers.tail import Tail
from moet_vllm.parsers.writer import Writer

__all__ = ["JsonCall"]

MAX_HEAD = 512


class _State(Enum):
    HEAD = auto()  # before the separator; nothing is written yet
    BEFORE = auto()  # from there to the object; nothing is written yet
    OBJECT = auto()
    RAW = auto()  # what should be JSON is not: it is written as it comes
    AFTER = auto()


class JsonCall:
    """One call while it arrives; the object's text is passed on byte for byte.

    Attributes:
        started: its beginning is written.
        over: the call has ended, or was given up.
        given_up: the text of one that was given up.
    """

    def __init__(self, grammar: Grammar, writer: Writer) -> None:
        self._grammar = grammar
        self._writer = writer
        self._any = pattern_of(grammar, Mark)
        self._in_object = pattern_of(grammar, (Mark.CALL_OPEN, Mark.CALL_CLOSE, Mark.SECTION_CLOSE))
        self._scanner = JsonScanner()
        self._tail = Tail()
        self._state = _State.HEAD
        self._head = ""
        self._text = ""
        self.started = self.over = False
        self.given_up = ""

    @property
    def pattern(self) -> Pattern:
        """The markers that mean something at this place."""
        return self._in_object if self._state in (_State.OBJECT, _State.RAW) else self._any

    def text(self, text: str) -> int:
        """Take text; return how much of it was used."""
        match self._state:
            case _State.HEAD | _State.BEFORE:
                return self._before_object(text)
            case _State.OBJECT:
                return self._object(text)
            case _State.RAW:
                self._writer.arguments(text)
            case _State.AFTER if not is_fence(text) and text.strip("` \t\r\n"):
                self._writer.fault(FaultKind.STRAY_TEXT, text)
        return len(text)

    def mark(self, found: Any) -> bool:
        """Take a marker; false if the call is over and it belongs to what follows."""
        mark = Mark(found.lastgroup)
        match self._state:
            case _State.HEAD | _State.BEFORE:
                return self._head_mark(mark, found)
            case _State.OBJECT if self._scanner.in_string:
                if mark is Mark.CALL_OPEN:
                    self._add_markers(self._tail.take() + found.group())
                else:
                    self._add_markers(self._tail.mark(found.group()))
                return True
        if mark in (Mark.CALL_CLOSE, Mark.CALL_OPEN, Mark.SECTION_CLOSE, Mark.SECTION_OPEN):
            if mark is not Mark.CALL_CLOSE:
                self._writer.fault(FaultKind.MISSING_MARKER, "after a call")
            if self._state is _State.OBJECT:
                self._writer.fault(FaultKind.INVALID_JSON, "arguments without an end")
            self._end()
            return mark is Mark.CALL_CLOSE
        self._writer.fault(FaultKind.STRAY_MARKER, found.group())
        return True

    def finish(self) -> None:
        """End the reply within this call."""
        match self._state:
            case _State.HEAD | _State.BEFORE:
                self._give_up()
                return
            case _State.AFTER:
                self._writer.fault(FaultKind.MISSING_MARKER, "after a call")
            case _:
                self._writer.fault(FaultKind.CUT_OFF)
        self._end()

    def _head_mark(self, mark: Mark, found: Any) -> bool:
        match mark:
            case Mark.SEPARATOR if self._state is _State.HEAD:
                self._head, self._text = self._text, ""
                self._state = _State.BEFORE
            case Mark.CALL_CLOSE:
                # No arguments at all: a call of a tool that takes none, if its name is sure.
                sure = self._state is _State.BEFORE or self._name() in self._writer.tools
                if sure and self._start():
                    self._writer.arguments("{}")
                    self._writer.end(complete=True)
                    self.over = True
                elif not self.over:
                    self._give_up()
            case Mark.SECTION_CLOSE | Mark.CALL_OPEN | Mark.SECTION_OPEN:
                self._give_up()
                return False
            case _:
                self._writer.fault(FaultKind.STRAY_MARKER, found.group())
                self._text += PARTED
        return True

    def _before_object(self, text: str) -> int:
        brace = text.find("{")
        used = len(text) if brace < 0 else brace
        if len(self._head) + len(self._text) + used > MAX_HEAD:
            self._text += text
            self._give_up()
            return len(text)
        self._text += text[:used]
        if brace >= 0 and self._start():
            self._state = _State.OBJECT
        return used

    def _name(self) -> str | None:
        if self._state is _State.HEAD:
            return name_of_head(self._grammar, self._text, "", self._writer.tools)
        return name_of_head(self._grammar, self._head, self._text, self._writer.tools)

    def _start(self) -> bool:
        """Write the beginning of the call, or give it up if it has no name."""
        name = self._name()
        if name is None:
            self._give_up()
            return False
        if self._state is _State.HEAD:
            self._writer.fault(FaultKind.MISSING_MARKER, "before the arguments")
            self._head = self._text
        self._writer.start(name, self._head.strip() if self._grammar.head == "id" else "")
        self.started = True
        return True

    def _object(self, text: str) -> int:
        if self._tail.absorb(text):
            return len(text)
        self._add_markers(self._tail.take())
        return self._scan(text) if self._state is _State.OBJECT else 0

    def _scan(self, text: str) -> int:
        taken, used = self._scanner.take(text)
        self._writer.arguments(taken)
        if self._scanner.failed:
            self._writer.fault(FaultKind.INVALID_JSON)
            self._state = _State.RAW
        elif self._scanner.done:
            self._state = _State.AFTER
        return used

    def _add_markers(self, text: str) -> None:
        """Pass on markers that are part of a string."""
        used = self._scan(text) if text else 0
        self._writer.arguments(text[used:])

    def _give_up(self) -> None:
        self.given_up = (self._head + self._text).replace(PARTED, "")
        self._writer.fault(FaultKind.MALFORMED_CALL, self.given_up)
        self.over = True

    def _end(self) -> None:
        self._writer.end(complete=self._state is _State.AFTER)
        self.over = True
