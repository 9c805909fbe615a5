"""The second stage: parts the answer from the tool calls in it."""

from moet_vllm.parsers.events import FaultKind
from moet_vllm.parsers.grammar import Grammar, Mark
from moet_vllm.parsers.json_call import JsonCall
from moet_vllm.parsers.lexer import Lexer, Pattern, is_cut_marker, pattern_of
from moet_vllm.parsers.tagged import TaggedCall
from moet_vllm.parsers.writer import Writer

__all__ = ["CallStage"]

MAX_SECTION_TEXT = 4096


class CallStage:
    """Takes what follows the thinking, as it arrives."""

    def __init__(self, grammar: Grammar, writer: Writer) -> None:
        self._grammar = grammar
        self._writer = writer
        self._lexer = Lexer()
        self._any = pattern_of(grammar, Mark)
        self._call: TaggedCall | JsonCall | None = None
        self._in_section = False
        self._section_text = ""  # of a section without a call so far
        self._section_has_call = False

    def feed(self, text: str) -> None:
        """Take more text."""
        self._lexer.push(text)
        self._run()

    def finish(self) -> None:
        """End the reply."""
        held = self._lexer.rest()
        if is_cut_marker(held):
            self._cut(held)
        elif held:
            self._text(held)
        if self._call is not None:
            self._call.finish()
            self._forget_call()
        self._end_section()
        self._writer.end_content()

    @property
    def _pattern(self) -> Pattern:
        return self._any if self._call is None else self._call.pattern

    def _run(self) -> None:
        while True:
            text = self._lexer.text(self._pattern)
            if text:
                self._lexer.skip(self._text(text))
            elif not self._mark():
                return

    def _text(self, text: str) -> int:
        if self._call is not None:
            used = self._call.text(text)
            self._forget_call()
            return used
        if not self._in_section:
            self._writer.content(text)
        elif self._section_has_call:
            if text.strip():
                self._writer.fault(FaultKind.STRAY_TEXT, text)
        else:
            self._section_text += text
            if len(self._section_text) > MAX_SECTION_TEXT:
                self._end_section()
        return len(text)

    def _mark(self) -> bool:
        """Use a marker; false if none is there yet."""
        found = self._lexer.mark(self._pattern)
        if found is None:
            return False
        if self._call is not None:
            if not self._call.mark(found):
                self._lexer.untake(found)
            self._forget_call()
            return True
        match Mark(found.lastgroup):
            case Mark.CALL_OPEN:
                self._writer.end_content(call_follows=True)
                if self._grammar.arguments == "tagged":
                    self._call = TaggedCall(self._grammar, self._writer, found)
                else:
                    self._call = JsonCall(self._grammar, self._writer)
            case Mark.SECTION_OPEN if not self._in_section:
                self._writer.end_content(call_follows=True)
                self._in_section = True
            case Mark.SECTION_CLOSE if self._in_section:
                self._end_section()
            case _:
                self._writer.fault(FaultKind.STRAY_MARKER, found.group())
        return True

    def _cut(self, held: str) -> None:
        """Treat a marker cut by the end of the reply: one that closes something closes it."""
        self._writer.fault(FaultKind.CUT_MARKER, held)
        for mark in (Mark.VALUE_CLOSE, Mark.CALL_CLOSE) if self._call is not None else ():
            spelling = self._grammar.spelling.get(mark)
            if spelling and pattern_of(self._grammar, (mark,)).fullmatch(held, partial=True):
                self._lexer.push(spelling)
                self._run()
                return

    def _forget_call(self) -> None:
        if self._call is None:
            return
        if self._call.started and not self._section_has_call:
            self._section_has_call = True
            text, self._section_text = self._section_text, ""
            if text.strip():
                self._writer.fault(FaultKind.STRAY_TEXT, text)
        if self._call.over:
            if not self._call.started:
                # It was none: its text is content, after what stands before it.
                text, self._section_text = self._section_text, ""
                self._writer.content(text + self._call.given_up)
            self._call = None

    def _end_section(self) -> None:
        """End a section; what stands in one that has no call is content."""
        text, self._section_text = self._section_text, ""
        self._section_has_call = False
        self._in_section = False
        if text.strip():
            self._writer.fault(FaultKind.MALFORMED_CALL, text)
            self._writer.content(text)
