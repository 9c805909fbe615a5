"""The parsers as vLLM sees them, without a server."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers.abstract_tool_parser import ToolParserManager

from moet_vllm.parsers import FAMILIES
from moet_vllm.parsers.registration import register_parsers

VOCABULARY = {"<think>": 1, "</think>": 2, "<|assistant|>": 3, "<tool_call>": 4, "x": 5}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {}}}
CALL = "<tool_call>clock</tool_call>"


class Tokenizer:
    def __init__(self, vocabulary: dict[str, int]) -> None:
        self.vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary


def reasoning(name: str = "moet_glm47", *, plain: bool = False, **settings: Any) -> Any:
    register_parsers()
    tokenizer = Tokenizer({"x": 5} if plain else VOCABULARY)
    cls = ReasoningParserManager.get_reasoning_parser(name)
    return cls(tokenizer, chat_template_kwargs=settings)


def request(choice: Any = "auto") -> Any:
    return SimpleNamespace(tools=[TOOL], tool_choice=choice, messages=[])


def test_every_family_is_registered_under_its_name() -> None:
    register_parsers()
    names = {f"moet_{name}" for name in FAMILIES}
    assert names <= set(ReasoningParserManager.list_registered())
    assert names <= set(ToolParserManager.list_registered())
    for name in names:
        assert ToolParserManager.get_tool_parser(name).grammar.name == name.removeprefix("moet_")


def test_upstream_names_are_left_alone() -> None:
    before = dict(ToolParserManager.lazy_parsers), dict(ReasoningParserManager.lazy_parsers)
    register_parsers()
    for old, new in zip(
        before, (ToolParserManager.lazy_parsers, ReasoningParserManager.lazy_parsers), strict=True
    ):
        ours = {name for name in new if name.startswith("moet_")}
        assert {name: new[name] for name in new if name not in ours} == {
            name: old[name] for name in old if name not in ours
        }


@pytest.mark.parametrize(
    ("prompt", "over", "found"),
    [
        ([3, 1], False, ("hi", None)),  # the prompt opens thinking
        ([3, 2], True, (None, "hi")),  # the prompt closes it
        ([3], False, (None, "hi")),  # it is up to the model
        ([3, 1, 5, 2, 5, 3], False, (None, "hi")),  # an earlier turn's markers do not count
    ],
)
def test_the_prompt_says_how_the_reply_begins(
    prompt: Sequence[int], over: bool, found: tuple[str | None, str | None]
) -> None:
    parser = reasoning()
    assert parser.is_reasoning_end(prompt) is over
    assert parser.extract_reasoning("hi", request()) == found


def test_without_a_prompt_the_request_and_the_family_say_it() -> None:
    assert reasoning().extract_reasoning("hi", request()) == ("hi", None)
    assert reasoning(enable_thinking=False).extract_reasoning("hi", request()) == (None, "hi")
    assert reasoning("moet_deepseek_v31").extract_reasoning("hi", request()) == (None, "hi")
    on = reasoning("moet_deepseek_v31", thinking=True)
    assert on.extract_reasoning("a</think>b", request()) == ("a", "b")


def test_a_closing_marker_shows_that_an_unseen_prompt_opened_thinking() -> None:
    assert reasoning("moet_glm45").extract_reasoning("a</think>b", request()) == ("a", "b")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "clock"}}]
)
def test_a_demanded_call_shows_that_an_unseen_prompt_opened_no_thinking(choice: Any) -> None:
    reply = '[{"name": "clock", "parameters": {}}]'
    assert reasoning().extract_reasoning(reply, request(choice)) == (None, reply)
    assert reasoning().extract_reasoning(reply, request()) == (reply, None)
    thought = "[1] first</think>" + reply
    assert reasoning().extract_reasoning(thought, request(choice)) == ("[1] first", reply)


def test_a_vocabulary_without_markers_means_no_thinking() -> None:
    parser = reasoning(plain=True)
    assert parser.is_reasoning_end([5])
    assert parser.reasoning_start_str is None
    assert parser.extract_reasoning("hi", request()) == (None, "hi")


def test_thinking_ends_at_its_marker_or_at_a_call() -> None:
    parser = reasoning()
    assert not parser.is_reasoning_end_streaming([5], [5])
    assert parser.is_reasoning_end_streaming([5, 2], [2])
    assert parser.is_reasoning_end_streaming([5, 4], [4])


def test_tokens_of_thinking_are_counted_without_the_markers() -> None:
    parser = reasoning()
    parser.is_reasoning_end([3, 1])
    assert parser.count_reasoning_tokens([5, 5, 2, 5]) == 2


def test_a_whole_reply_under_none_shows_no_call() -> None:
    parser = reasoning()
    parser.is_reasoning_end([3, 2])
    assert parser.extract_reasoning(f"No.{CALL}", request("none")) == (None, "No.")


def test_a_tool_choice_that_is_not_read_is_the_clients_mistake() -> None:
    register_parsers()
    parser = ToolParserManager.get_tool_parser("moet_glm47")(Tokenizer(VOCABULARY))
    with pytest.raises(ValueError, match="tool_choice must be"):
        parser.adjust_request(request(SimpleNamespace(type="allowed_tools", mode="auto")))


@pytest.mark.parametrize(
    "history",
    [
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "functions.clock:0"}]}]},
        {"input": [{"type": "function_call", "call_id": "functions.clock:0"}, {"type": "x"}]},
        {"input": [SimpleNamespace(type="function_call", call_id="functions.clock:0")]},
    ],
)
def test_ids_are_new_to_the_conversation(history: dict[str, Any]) -> None:
    register_parsers()
    parser = ToolParserManager.get_tool_parser("moet_kimi_k2")(Tokenizer(VOCABULARY))
    asked = SimpleNamespace(tools=[TOOL], tool_choice="auto", **history)
    one = "<|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    found = parser.extract_tool_calls(one + one, asked)
    assert [call.id for call in found.tool_calls] == ["functions.clock:1", "functions.clock:2"]


def test_markup_is_taken_out_of_content_without_a_call() -> None:
    register_parsers()
    cls = ToolParserManager.get_tool_parser("moet_glm47")
    found = cls(Tokenizer(VOCABULARY)).extract_tool_calls("a</arg_value>b", request())
    assert (found.tool_calls, found.content) == ([], "ab")
