"""A call whose parameters are marked one by one (GLM, DSML)."""

from enum import Enum, auto
from typing import Any

from moet_vllm.parsers.events import FaultKind
from moet_vllm.parsers.grammar import Grammar, Mark
from moet_vllm.parsers.json_scanner import quoted_part
from moet_vllm.parsers.lexer import Pattern, pattern_of
from moet_vllm.parsers.names import PARTED, name_and_key, plain_name
from moet_vllm.parsers.schema import tool_or_unknown
from moet_vllm.parsers.tail import Tail
from moet_vllm.parsers.values import Value
from moet_vllm.parsers.writer import Writer

__all__ = ["TaggedCall"]

MAX_HEAD = 512


class _State(Enum):
    HEAD = auto()  # the name; nothing is written yet
    KEY = auto()
    AFTER_KEY = auto()
    VALUE = auto()
    BETWEEN = auto()  # after a value
    BROKEN = auto()  # something of the arguments is lost: no more of them is written


class TaggedCall:
    """One call while it arrives.

    Attributes:
        started: its beginning is written.
        over: the call has ended, or was given up.
        given_up: the text of one that was given up.
    """

    def __init__(self, grammar: Grammar, writer: Writer, found: Any) -> None:
        """Begin a call at the marker that opens it; DSML has the name there."""
        self._writer = writer
        self._name = found.groupdict().get("tool")
        self._any = pattern_of(grammar, Mark)
        self._in_value = pattern_of(
            grammar, (Mark.VALUE_CLOSE, Mark.CALL_CLOSE, Mark.SECTION_CLOSE)
        )
        self._state = _State.HEAD
        self._text = ""
        self._tail = Tail()
        self._value: Value | None = None
        self._parameters = 0
        self.started = self.over = False
        self.given_up = ""

    @property
    def pattern(self) -> Pattern:
        """The markers that mean something at this place."""
        return self._in_value if self._state is _State.VALUE else self._any

    def text(self, text: str) -> int:
        """Take text; return how much of it was used."""
        if self._state is _State.VALUE:
            if not self._tail.absorb(text):
                self._value_text(self._tail.take() + text)
        elif self._state is _State.AFTER_KEY:
            blanks = len(text) - len(text.lstrip())
            if blanks < len(text):
                self._writer.fault(FaultKind.MISSING_MARKER, "before a value")
                self._begin_value(self._text, None)
            return blanks
        elif self._state is not _State.BROKEN:
            self._text += text
            if len(self._text) > MAX_HEAD:
                if self._state is _State.HEAD:
                    self._give_up()
                else:
                    self._break(self._text)
        return len(text)

    def mark(self, found: Any) -> bool:
        """Take a marker; false if the call is over and it belongs to what follows."""
        mark = Mark(found.lastgroup)
        match self._state:
            case _State.VALUE:
                if mark is Mark.VALUE_CLOSE:
                    self._value_text(self._tail.take())
                    self._end_value()
                else:
                    self._value_text(self._tail.mark(found.group()))
                return True
            case _State.HEAD if mark not in (Mark.THINK_OPEN, Mark.THINK_CLOSE, Mark.NOISE):
                return self._head_mark(mark, found)
            case _State.HEAD:
                self._text += PARTED
        match mark:
            case Mark.CALL_CLOSE:
                self._close()
            case Mark.SECTION_CLOSE | Mark.CALL_OPEN | Mark.SECTION_OPEN:
                self._writer.fault(FaultKind.MISSING_MARKER, "after a call")
                self._close()
                return False
            case Mark.KEY_OPEN if self._state is _State.BETWEEN:
                self._drop_text()
                self._state = _State.KEY
            case Mark.KEY_OPEN if self._state is _State.AFTER_KEY:
                self._break(self._text)
            case Mark.KEY_CLOSE if self._state in (_State.KEY, _State.BETWEEN):
                if self._state is _State.BETWEEN:
                    self._writer.fault(FaultKind.MISSING_MARKER, "before a parameter")
                self._end_key()
            case Mark.VALUE_OPEN if self._state is not _State.BROKEN:
                self._open_value(found)
            case Mark.VALUE_CLOSE if self._state is _State.AFTER_KEY:
                self._writer.fault(FaultKind.MISSING_MARKER, "before a value")
                self._begin_value(self._text, None)
                self._end_value()
            case Mark.VALUE_CLOSE | Mark.KEY_OPEN if self._state is _State.KEY and (
                mark is Mark.VALUE_CLOSE or self._text.strip()
            ):
                self._break(self._text)
            case Mark.VALUE_CLOSE if self._state is _State.BETWEEN and self._text.strip():
                # The value went on after its end, or lost its beginning.
                self._break(self._text)
            case Mark.MANGLED if self._state is not _State.BROKEN:
                self._break(found.group())
            case _:
                self._writer.fault(FaultKind.STRAY_MARKER, found.group())
        return True

    def finish(self) -> None:
        """End the reply within this call."""
        if self._state is _State.HEAD:
            self._give_up()
            return
        if self._state is _State.VALUE and self._tail.take():
            self._writer.fault(FaultKind.MISSING_MARKER, "after a value")
            self._end_value()
        if self._state is _State.BETWEEN:
            self._writer.fault(FaultKind.MISSING_MARKER, "after a call")
            self._close()
            return
        self._writer.fault(FaultKind.CUT_OFF, self._name or "")
        self._end(complete=False)

    def _head_mark(self, mark: Mark, found: Any) -> bool:
        tagged = self._name is not None
        if mark in (Mark.KEY_OPEN, Mark.CALL_CLOSE, Mark.SECTION_CLOSE) or (
            mark in (Mark.VALUE_OPEN, Mark.MANGLED) and tagged
        ):
            name = plain_name(self._name if tagged else self._text, self._writer.tools)
            if name is None:
                self._give_up()
                return mark is Mark.CALL_CLOSE
            text = self._text.strip() if tagged else ""
            self._start(name)
            if text and mark in (Mark.CALL_CLOSE, Mark.SECTION_CLOSE):
                # Whatever was meant as its arguments is not one of its parameters.
                self._break(text)
            elif text:
                self._writer.fault(FaultKind.STRAY_TEXT, text)
            return self.mark(found)
        if mark in (Mark.KEY_CLOSE, Mark.VALUE_OPEN):
            parts = name_and_key(self._text, self._writer.tools) if self._name is None else None
            if parts is None:
                self._give_up()
                return True
            name, self._text = parts
            key = self._text
            self._writer.fault(FaultKind.NAME_RECOVERED, name)
            self._start(name)
            self._text = key
            self._state = _State.AFTER_KEY
            if mark is Mark.VALUE_OPEN:
                self._begin_value(key, None)
            return True
        if mark is Mark.CALL_OPEN and self._name is None and not self._text.strip():
            self._writer.fault(FaultKind.STRAY_MARKER, found.group())
            return True
        self._give_up()
        return False

    def _start(self, name: str) -> None:
        self._name = name
        self._writer.start(name)
        self.started = True
        self._text = ""
        self._state = _State.BETWEEN

    def _give_up(self) -> None:
        self._writer.fault(FaultKind.MALFORMED_CALL, self._name or self._text)
        self.given_up = self._text.replace(PARTED, "")
        self.over = True

    def _break(self, detail: str) -> None:
        self._writer.fault(FaultKind.MALFORMED_CALL, detail)
        self._state = _State.BROKEN
        self._text = ""

    def _drop_text(self) -> None:
        if self._text.strip():
            self._writer.fault(FaultKind.STRAY_TEXT, self._text)
        self._text = ""

    def _end_key(self) -> None:
        self._text = self._text.strip()
        if self._text:
            self._state = _State.AFTER_KEY
        else:
            self._break("a parameter without a name")

    def _open_value(self, found: Any) -> None:
        groups = found.groupdict()
        if groups.get("parameter") is not None:
            self._drop_text()
            string = groups.get("string")
            is_string = None if string is None else string.lower() == "true"
            self._begin_value(groups["parameter"], is_string)
            return
        if self._state is not _State.AFTER_KEY:
            self._writer.fault(FaultKind.MISSING_MARKER, "after the name of a parameter")
            self._end_key()
        if self._state is _State.AFTER_KEY:
            self._begin_value(self._text, None)

    def _begin_value(self, key: str, is_string: bool | None) -> None:
        tool = tool_or_unknown(self._writer.tools, self._name or "")
        self._writer.arguments(f'{", " if self._parameters else "{"}"{quoted_part(key)}": ')
        self._parameters += 1
        self._value = Value(tool.types(key), is_string)
        self._text = ""
        self._state = _State.VALUE

    def _value_text(self, text: str) -> None:
        if text and self._value is not None:
            self._writer.arguments(self._value.add(text))

    def _end_value(self) -> None:
        assert self._value is not None
        converted = self._value.end()
        if not converted.fits:
            self._writer.fault(FaultKind.VALUE_NOT_OF_SCHEMA, converted.text)
        self._writer.arguments(converted.text)
        self._value = None
        self._state = _State.BETWEEN

    def _close(self) -> None:
        """End the call where it says so; it is complete only between two parameters."""
        if self._state is _State.BETWEEN:
            self._drop_text()
            self._writer.arguments("}" if self._parameters else "{}")
            self._end(complete=True)
            return
        if self._state is not _State.BROKEN:
            self._break("a parameter without a value")
        self._end(complete=False)

    def _end(self, *, complete: bool) -> None:
        if not complete and not self._parameters:
            # Nothing at all is what many clients take for no arguments.
            self._writer.arguments("{")
        self._writer.end(complete=complete)
        self.over = True
