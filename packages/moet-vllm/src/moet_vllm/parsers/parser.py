"""Reads a model's reply, whole or as it arrives: thinking, answer and tool calls."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from moet_vllm.parsers.calls import CallStage
from moet_vllm.parsers.events import Event, Message, collect
from moet_vllm.parsers.forced import ForcedStage
from moet_vllm.parsers.grammar import Grammar, Mark, family
from moet_vllm.parsers.lexer import pattern_of
from moet_vllm.parsers.schema import Tools, read_tools
from moet_vllm.parsers.thinking import Split, Thinking, ThinkingStage
from moet_vllm.parsers.writer import MakeId, Writer, native_ids, random_ids

__all__ = ["Parser", "ToolChoice", "make_ids", "parse"]


class ToolChoice(msgspec.Struct, frozen=True):
    """What the request says of calls; `name` goes with "named" only."""

    kind: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None


def make_ids(grammar: Grammar, earlier: Iterable[str] = ()) -> MakeId:
    """Return the maker of ids that suits a family.

    Args:
        grammar: of the family.
        earlier: the ids of the conversation's calls so far.
    """
    return native_ids(earlier) if grammar.head == "id" else random_ids()


class Parser:
    """Reads one reply.

    The same text gives the same message however it is cut, and each character of it is looked
    at a bounded number of times. What is held back is bounded too, except a value that is not
    certain to be a string before it ends.
    """

    def __init__(
        self,
        grammar: Grammar,
        tools: Tools | None = None,
        *,
        choice: ToolChoice = ToolChoice(),  # noqa: B008 - frozen
        thinking: Thinking = Thinking.MODEL,
        make_id: MakeId | None = None,
    ) -> None:
        """Begin a reply.

        Args:
            grammar: of the model's family.
            tools: of the request, see `read_tools`.
            choice: the request's `tool_choice`.
            thinking: who opens the thinking, see `thinking_of_prompt`.
            make_id: makes the ids of calls; by default as `make_ids` does.
        """
        named = choice.name if choice.kind == "named" else None
        self._writer = Writer(
            pattern_of(grammar, Mark),
            tools or {},
            make_id or make_ids(grammar),
            calls_allowed=choice.kind != "none",
        )
        self._thinking = ThinkingStage(grammar, thinking)
        calls = CallStage(grammar, self._writer)
        self._calls: CallStage | ForcedStage = calls
        if choice.kind in ("required", "named"):
            self._calls = ForcedStage(calls, self._writer, named)

    def feed(self, text: str) -> list[Event]:
        """Take more of the reply; return what is certain of it and was not returned before."""
        self._take(self._thinking.feed(text))
        return self._writer.take()

    def finish(self) -> list[Event]:
        """End the reply; return what was not returned before."""
        self._take(self._thinking.finish())
        self._calls.finish()
        return self._writer.take()

    def _take(self, split: Split) -> None:
        for fault in split.faults:
            self._writer.fault(fault.kind, fault.detail)
        self._writer.reasoning(split.reasoning)
        if split.rest:
            self._calls.feed(split.rest)


def parse(
    text: str,
    grammar: Grammar | str,
    tools: Iterable[Any] | None = None,
    *,
    choice: ToolChoice = ToolChoice(),  # noqa: B008 - frozen
    thinking: Thinking = Thinking.MODEL,
    make_id: MakeId | None = None,
) -> Message:
    """Read a whole reply; the arguments are those of `Parser`.

    Args:
        text: the reply.
        grammar: of the model's family, or the family's name.
        tools: of the request, in any shape that `read_tools` takes.
        choice: the request's `tool_choice`.
        thinking: who opens the thinking.
        make_id: makes the ids of calls.

    Raises:
        ConfigError: no such family, or a tool without a name.
    """
    if isinstance(grammar, str):
        grammar = family(grammar)
    parser = Parser(grammar, read_tools(tools), choice=choice, thinking=thinking, make_id=make_id)
    return collect([*parser.feed(text), *parser.finish()])
