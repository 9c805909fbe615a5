"""The first stage: parts thinking from what follows it."""

from enum import Enum, StrEnum, auto

import msgspec

from moet_vllm.parsers.channel import MAX_BLANKS, Channel
from moet_vllm.parsers.events import Fault, FaultKind
from moet_vllm.parsers.grammar import Grammar, Mark
from moet_vllm.parsers.lexer import Lexer, is_cut_marker, pattern_of
from moet_vllm.parsers.seam import Seam

__all__ = ["Split", "Thinking", "ThinkingStage", "default_thinking", "thinking_of_prompt"]


class Thinking(StrEnum):
    """Who opens the thinking of a reply."""

    PROMPT = "prompt"  # the prompt does: the reply begins within
    MODEL = "model"  # the model does, if it thinks: the reply may begin with the marker
    OFF = "off"  # nobody: thinking markers mean nothing


class Split(msgspec.Struct, frozen=True):
    """Reasoning, text of the reply after it, markup and all, and what was left out."""

    reasoning: str = ""
    rest: str = ""
    faults: tuple[Fault, ...] = ()


class _State(Enum):
    BEFORE = auto()  # nothing but blanks so far, or since the thinking closed
    INSIDE = auto()
    AFTER = auto()


_CALLS = (Mark.SECTION_OPEN, Mark.CALL_OPEN)


class ThinkingStage:
    """Takes a reply as it arrives.

    Thinking ends with its closing marker, or where a call begins. It may open again, but not
    once an answer or a call has begun.
    """

    def __init__(self, grammar: Grammar, thinking: Thinking) -> None:
        self._pattern = pattern_of(grammar, Mark)
        self._lexer = Lexer()
        self._channel = Channel()
        self._seam = Seam(self._pattern)
        self._reasoning: list[str] = []
        self._faults: list[Fault] = []
        self._blanks = ""
        self._state = {
            Thinking.PROMPT: _State.INSIDE,
            Thinking.MODEL: _State.BEFORE,
            Thinking.OFF: _State.AFTER,
        }[thinking]

    @property
    def done(self) -> bool:
        """Thinking is over: all further text is rest."""
        return self._state is _State.AFTER

    def feed(self, text: str) -> Split:
        """Take more of the reply."""
        if self._state is _State.AFTER:
            return Split(rest=text)
        self._lexer.push(text)
        while self._state is not _State.AFTER:
            run = self._lexer.text(self._pattern)
            if run and self._state is _State.INSIDE:
                self._lexer.skip(len(run))
                self._reason(self._channel.add(run))
            elif run.strip() or len(self._blanks) + len(run) > MAX_BLANKS:
                self._state = _State.AFTER
            elif run:
                self._lexer.skip(len(run))
                self._blanks += run
            elif not self._mark():
                return self._split()
        blanks, self._blanks = self._blanks, ""
        return self._split(blanks + self._lexer.rest())

    def finish(self) -> Split:
        """End the reply."""
        held = self._lexer.rest()
        if is_cut_marker(held):
            self._faults.append(Fault(FaultKind.CUT_MARKER, held))
            held = ""
        if self._state is _State.BEFORE:
            return self._split(self._blanks + held)
        if self._state is _State.INSIDE:
            self._reason(self._channel.add(held) + self._channel.end())
        return self._split()

    def _split(self, rest: str = "") -> Split:
        found = Split("".join(self._reasoning), rest, tuple(self._faults))
        self._reasoning, self._faults = [], []
        return found

    def _reason(self, text: str) -> None:
        joined = self._seam.add(text)
        if len(joined) < len(text):
            self._faults.append(Fault(FaultKind.STRAY_MARKER, text))
        self._reasoning.append(joined)

    def _mark(self) -> bool:
        """Use a marker; false if none is there yet."""
        found = self._lexer.mark(self._pattern)
        if found is None:
            return False
        mark = Mark(found.lastgroup)
        if mark is Mark.THINK_OPEN and self._state is _State.BEFORE:
            self._state = _State.INSIDE
            self._blanks = ""
        elif mark is Mark.THINK_CLOSE:
            self._reason(self._channel.end())
            self._state = _State.BEFORE
            self._blanks = ""
        elif mark in _CALLS or (self._state is _State.BEFORE and mark is not Mark.NOISE):
            self._reason(self._channel.end())
            self._state = _State.AFTER
            self._lexer.untake(found)
        else:
            self._faults.append(Fault(FaultKind.STRAY_MARKER, found.group()))
        return True


def default_thinking(grammar: Grammar, enabled: bool | None) -> Thinking:
    """Return how the thinking of a reply begins where the prompt cannot be seen.

    Args:
        grammar: of the family.
        enabled: what the request says (`enable_thinking`), None if nothing.
    """
    if enabled is False or (enabled is None and grammar.thinks == "never"):
        return Thinking.OFF
    return Thinking.MODEL if grammar.thinks == "model" else Thinking.PROMPT


def thinking_of_prompt(grammar: Grammar, prompt: str) -> Thinking | None:
    """Read off the end of a rendered prompt how the reply's thinking begins.

    Returns:
        PROMPT if the last turn opens it, OFF if the last turn closes it, MODEL if it has no such
        marker, None if there is no turn in the prompt.
    """
    turn = prompt.rfind(grammar.turn)
    if turn < 0:
        return None
    found = list(pattern_of(grammar, (Mark.THINK_OPEN, Mark.THINK_CLOSE)).finditer(prompt, turn))
    if not found:
        return Thinking.MODEL
    return Thinking.PROMPT if found[-1].lastgroup == Mark.THINK_OPEN else Thinking.OFF
