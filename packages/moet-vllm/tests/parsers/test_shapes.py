"""The shapes of the OpenAI interfaces."""

from types import SimpleNamespace
from typing import Any

import pytest

from moet_core.errors import ConfigError
from moet_vllm.parsers import ToolChoice, parse, read_tools
from moet_vllm.parsers.events import Arguments, CallStart, Content
from moet_vllm.parsers.schema import ANY
from moet_vllm.parsers.shapes import (
    chat_delta,
    chat_message,
    finish_reason,
    read_choice,
    responses_items,
)

SCHEMA = {"properties": {"n": {"type": "integer"}}}
CALL = "Hi<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>"


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
        {"type": "function", "name": "f", "parameters": SCHEMA},
        SimpleNamespace(type="function", name="f", parameters=SCHEMA),
        SimpleNamespace(type="function", function=SimpleNamespace(name="f", parameters=SCHEMA)),
    ],
)
def test_every_shape_of_a_tool_is_read(tool: Any) -> None:
    assert read_tools([tool])["f"].types("n") == {"integer"}


def test_a_tool_without_a_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match="needs a name"):
        read_tools([{"type": "function", "function": {}}])


def test_a_tool_that_is_no_function_is_passed_over() -> None:
    assert read_tools([{"type": "web_search"}]) == {}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"string", "integer"}),
        ({"oneOf": [{"type": "array"}, {"$ref": "#/$defs/P"}]}, {"array", "object"}),
        ({"allOf": [{"$ref": "#/$defs/P"}]}, {"object"}),
        ({"enum": ["1", "2"]}, {"string"}),
        ({"const": None}, {"null"}),
        ({"$ref": "#/$defs/Loop"}, ANY),
        ({"$ref": "#/nowhere"}, ANY),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"type": "str"}, {"string"}),
        ({"type": "DICT"}, {"object"}),
        ({"type": ["Float", "none"]}, {"number", "integer", "null"}),
        ({"type": "quaternion"}, ANY),
        ({"type": {"not": "a name"}}, ANY),
        ({}, ANY),
        (True, ANY),
    ],
)
def test_types_of_a_schema(schema: Any, types: set[str]) -> None:
    definitions = {"P": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}}
    tool = {"name": "f", "parameters": {"properties": {"p": schema}, "$defs": definitions}}
    assert read_tools([tool])["f"].types("p") == types


@pytest.mark.parametrize(
    "schema",
    [
        {"additionalProperties": {"type": "string"}},
        {"properties": {"q": {}}, "additionalProperties": {"type": "string"}},
        {"$ref": "#/$defs/A"},
        {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"q": {"type": "integer"}}}]},
    ],
)
def test_a_parameter_is_found_beyond_the_properties(schema: dict[str, Any]) -> None:
    definitions = {"A": {"properties": {"p": {"type": "string"}}}}
    tool = {"name": "f", "parameters": {**schema, "$defs": definitions}}
    assert read_tools([tool])["f"].types("p") == {"string"}


def test_a_parameter_that_only_may_be_there_has_no_name() -> None:
    schema = {"properties": {"p": {}}, "additionalProperties": True}
    tool = read_tools([{"name": "f", "parameters": schema}])["f"]
    assert (tool.has("p"), tool.has("q"), tool.types("q")) == (True, False, ANY)


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("named", "f")),
        ({"type": "function", "name": "f"}, ToolChoice("named", "f")),
    ],
)
def test_every_tool_choice_is_read(value: Any, choice: ToolChoice) -> None:
    assert read_choice(value) == choice


def test_without_tools_no_call_is_allowed() -> None:
    assert read_choice("auto", has_tools=False) == ToolChoice("none")


@pytest.mark.parametrize(
    "value",
    ["sometimes", {"type": "allowed_tools", "mode": "auto"}, {"type": "custom", "name": "f"}],
)
def test_another_tool_choice_is_an_error(value: Any) -> None:
    with pytest.raises(ConfigError, match="must be none, auto"):
        read_choice(value)


@pytest.mark.parametrize(
    ("text", "reason", "choice", "wanted"),
    [
        (CALL, "stop", ToolChoice(), "tool_calls"),
        (CALL, "stop", ToolChoice("named", "f"), "stop"),
        (CALL, "length", ToolChoice(), "length"),
        ("Hi", "stop", ToolChoice(), "stop"),
    ],
)
def test_finish_reason(text: str, reason: str, choice: ToolChoice, wanted: str) -> None:
    assert finish_reason(parse(text, "glm47"), reason, choice) == wanted


def test_chat_message_and_responses_items_carry_the_same_call() -> None:
    message = parse(CALL, "glm47")
    (call,) = chat_message(message)["tool_calls"]
    text, item = responses_items(message)
    assert text["content"][0]["text"] == "Hi"
    assert item["call_id"] == call["id"]
    assert (item["name"], item["arguments"], item["status"]) == ("f", '{"n": 1}', "completed")
    assert call["function"] == {"name": "f", "arguments": '{"n": 1}'}


def test_a_call_that_was_cut_off_is_an_incomplete_item() -> None:
    *_, item = responses_items(parse(CALL[:-25], "glm47"))
    assert item["status"] == "incomplete"


def test_a_delta_has_one_piece_for_each_call() -> None:
    delta = chat_delta(
        [Content("a"), Content("b"), CallStart(0, "i", "f"), Arguments(0, "{"), Arguments(0, "}")]
    )
    function = {"name": "f", "arguments": "{}"}
    assert delta == {
        "content": "ab",
        "tool_calls": [{"index": 0, "id": "i", "type": "function", "function": function}],
    }


def test_later_deltas_have_neither_id_nor_name() -> None:
    delta = chat_delta([Arguments(0, "}")])
    assert delta == {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}


def test_nothing_to_say_is_no_delta() -> None:
    assert chat_delta([]) is None
