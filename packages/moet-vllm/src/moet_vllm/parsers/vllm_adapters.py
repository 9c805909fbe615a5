"""The parsers as vLLM knows them; the only module here that imports vLLM.

vLLM reads a reply in two stages, a reasoning parser and a tool parser, each with a method for
whole replies and one for deltas. Both are our own stages behind those methods: what the first
does not use of a delta, the second gets.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from vllm.entrypoints.openai.engine.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.reasoning import ReasoningParser
from vllm.tool_parsers.abstract_tool_parser import ToolParser

from moet_core.errors import ConfigError
from moet_vllm.parsers.effort import asked_to_think
from moet_vllm.parsers.events import Event, collect
from moet_vllm.parsers.grammar import FAMILIES, Grammar, Mark
from moet_vllm.parsers.parser import Parser, ToolChoice, make_ids
from moet_vllm.parsers.schema import read_tools
from moet_vllm.parsers.shapes import chat_delta, read_choice
from moet_vllm.parsers.thinking import Thinking, ThinkingStage, default_thinking

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class MoetReasoningParser(ReasoningParser):
    """The first stage. Subclasses set `grammar`."""

    grammar: ClassVar[Grammar]
    engine_based_streaming = True

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        settings = kwargs.get("chat_template_kwargs") or {}
        self._open = self.vocab.get(THINK_OPEN)
        self._close = self.vocab.get(THINK_CLOSE)
        self._turn = self.vocab.get(self.grammar.turn)
        spelled = (self.grammar.spelling.get(m) for m in (Mark.SECTION_OPEN, Mark.CALL_OPEN))
        ids = (self.vocab.get(text) for text in spelled if text)
        self._ends = {token for token in (self._close, *ids) if token is not None}
        # A model whose vocabulary has no such tokens was not taught to think.
        self._thinks = self._open is not None and self._close is not None
        self._default = default_thinking(self.grammar, asked_to_think(settings))
        self._prompt: Thinking | None = None
        self._stage: ThinkingStage | None = None

    @property
    def reasoning_start_str(self) -> str | None:
        """The marker that opens thinking."""
        return THINK_OPEN if self._thinks else None

    @property
    def reasoning_end_str(self) -> str | None:
        """The marker that closes thinking."""
        return THINK_CLOSE if self._thinks else None

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether thinking is over at the end of these tokens.

        vLLM asks this of the prompt first; the answer says how the reply begins.
        """
        found = self._thinking_of(input_ids)
        if self._prompt is None:
            self._prompt = found
        return found is Thinking.OFF

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """Whether thinking ends within the tokens that were added last."""
        return not self._thinks or any(token in self._ends for token in delta_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Return the tokens after the thinking, none if it is not over."""
        if not self._thinks:
            return input_ids
        if self._close not in input_ids:
            return []
        return input_ids[len(input_ids) - input_ids[::-1].index(self._close) :]

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Count the tokens of a reply that are thinking, without the markers around it."""
        if not self._thinks:
            return 0
        count, inside = 0, self._start() is Thinking.PROMPT
        for token in token_ids:
            if token == self._open:
                inside = True
            elif token in self._ends:
                inside = False
            else:
                count += inside
        return count

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Part a whole reply into thinking and what follows."""
        choice = _choice(request)
        start = self._start()
        if self._prompt is None:
            start = _start_of_whole(model_output, start, choice)
        stage = ThinkingStage(self.grammar, start)
        first, last = stage.feed(model_output), stage.finish()
        rest = first.rest + last.rest
        if choice.kind == "none":
            # vLLM does not show such a reply to the tool parser, except in a stream.
            rest = _content(self.grammar, rest)
        return (first.reasoning + last.reasoning) or None, rest or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """Part a delta; its content is what the tool parser gets next."""
        if self._stage is None:
            self._stage = ThinkingStage(self.grammar, self._start())
        split = self._stage.feed(delta_text)
        return _delta(split.reasoning, split.rest)

    def has_engine_confirmed_reasoning_end(self) -> bool:
        """Whether the stream is past its thinking."""
        return self._stage is not None and self._stage.done

    def finish_streaming(self) -> DeltaMessage | None:
        """End the stream; return what was held back."""
        if self._stage is None:
            return None
        split = self._stage.finish()
        return _delta(split.reasoning, split.rest)

    def adjust_request(self, request: Any) -> Any:
        """Have markers that are special tokens shown in the text."""
        request.skip_special_tokens = False
        return request

    def _start(self) -> Thinking:
        if not self._thinks:
            return Thinking.OFF
        return self._default if self._prompt is None else self._prompt

    def _thinking_of(self, tokens: Sequence[int]) -> Thinking:
        if not self._thinks:
            return Thinking.OFF
        for token in reversed(tokens):
            if token == self._open:
                return Thinking.PROMPT
            if token == self._close:
                return Thinking.OFF
            if token == self._turn:
                return Thinking.MODEL
        return self._default


class MoetToolParser(ToolParser):
    """The second stage. Subclasses set `grammar`."""

    grammar: ClassVar[Grammar]
    engine_based_streaming = True
    # vLLM constrains a demanded call to JSON, which is read here, in linear time. It could be
    # constrained to the family's own format (`structural_tag_model`), but v0.24.0's guidance
    # backend, which it may choose, takes the engine down with it.
    supports_required_and_named = False

    def __init__(self, tokenizer: Any, tools: list[Any] | None = None) -> None:
        super().__init__(tokenizer, tools)
        self._tools = read_tools(tools)
        self._parser: Parser | None = None

    def adjust_request(self, request: Any) -> Any:
        """Constrain the output if a call is demanded, and have markers shown in the text.

        Raises:
            ValueError: a `tool_choice` that is not read; vLLM answers it as the client's mistake.
        """
        try:
            _choice(request)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        request = super().adjust_request(request)
        request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Part a whole reply into content and calls."""
        parser = self._make_parser(request)
        message = collect([*parser.feed(model_output), *parser.finish()])
        calls = [
            ToolCall(
                id=call.id,
                type="function",
                function=FunctionCall(id=call.id, name=call.name, arguments=call.arguments),
            )
            for call in message.calls
        ]
        # vLLM uses our content only where calls were found or markup was taken out.
        changed = bool(calls) or message.content != model_output
        return ExtractedToolCallInformation(
            tools_called=changed, tool_calls=calls, content=message.content or None
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """Part a delta into content and pieces of calls."""
        if self._parser is None:
            self._parser = self._make_parser(request)
        return _delta_of(self._parser.feed(delta_text))

    def finish_streaming(self) -> DeltaMessage | None:
        """End the stream; return what was held back."""
        return None if self._parser is None else _delta_of(self._parser.finish())

    def _make_parser(self, request: Any) -> Parser:
        return Parser(
            self.grammar,
            self._tools,
            choice=_choice(request),
            thinking=Thinking.OFF,
            make_id=make_ids(self.grammar, _earlier_ids(request)),
        )


def _choice(request: Any) -> ToolChoice:
    return read_choice(request.tool_choice, has_tools=bool(request.tools))


def _start_of_whole(reply: str, start: Thinking, choice: ToolChoice) -> Thinking:
    """Correct by the whole reply how it began, where the prompt was not seen."""
    before, closed, _ = reply.partition(THINK_CLOSE)
    if start is Thinking.MODEL and closed and THINK_OPEN not in before:
        # Only the prompt can have opened what the reply closes.
        return Thinking.PROMPT
    demanded = choice.kind in ("required", "named")
    if start is Thinking.PROMPT and demanded and not closed and reply.lstrip()[:1] in ("[", "{"):
        # vLLM constrains only what is no thinking, so there was none.
        return Thinking.OFF
    return start


def _earlier_ids(request: Any) -> list[str]:
    """Return the ids of the calls in a request's history."""
    found = []
    for message in getattr(request, "messages", None) or ():  # Chat Completions
        found += [str(_get(call, "id")) for call in _get(message, "tool_calls") or ()]
    items = getattr(request, "input", None)  # Responses
    for item in items if isinstance(items, list) else ():
        if _get(item, "type") == "function_call":
            found.append(str(_get(item, "call_id")))
    return found


def _get(item: Any, key: str) -> Any:
    return item.get(key) if isinstance(item, dict) else getattr(item, key, None)


def _content(grammar: Grammar, text: str) -> str:
    parser = Parser(grammar, choice=ToolChoice("none"), thinking=Thinking.OFF)
    return collect([*parser.feed(text), *parser.finish()]).content


def _delta(reasoning: str, content: str) -> DeltaMessage | None:
    # A field that is not set is not sent.
    fields = {"reasoning": reasoning, "content": content}
    said = {key: text for key, text in fields.items() if text}
    return DeltaMessage(**said) if said else None


def _delta_of(events: list[Event]) -> DeltaMessage | None:
    delta = chat_delta(events)
    if delta is None:
        return None
    if "tool_calls" in delta:
        delta["tool_calls"] = [
            DeltaToolCall(**{**call, "function": DeltaFunctionCall(**call["function"])})
            for call in delta["tool_calls"]
        ]
    return DeltaMessage(**delta)


# vLLM looks parsers up by module and class name.
for _name, _grammar in FAMILIES.items():
    globals()[f"ReasoningParser_{_name}"] = type(
        f"ReasoningParser_{_name}",
        (MoetReasoningParser,),
        {"grammar": _grammar, "__module__": __name__},
    )
    globals()[f"ToolParser_{_name}"] = type(
        f"ToolParser_{_name}",
        (MoetToolParser,),
        {"grammar": _grammar, "__module__": __name__},
    )
