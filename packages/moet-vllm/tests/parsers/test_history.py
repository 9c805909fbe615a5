"""Earlier calls go back into the prompt as the model wrote them."""

import json

import pytest
from parsers.corpus.case import TOOLS, Case
from parsers.corpus.table import sound_cases

from moet_core.errors import ConfigError
from moet_vllm.parsers import family, parse
from moet_vllm.parsers.history import (
    deepseek_v4_messages,
    parameters,
    render_calls,
    template_messages,
    with_tools,
)
from moet_vllm.parsers.shapes import chat_message

WITH_CALLS = [case for case in sound_cases() if case.calls and not case.reasoning]


@pytest.mark.parametrize("case", WITH_CALLS, ids=lambda case: case.name)
def test_a_reply_that_is_read_and_written_again_is_the_same_bytes(case: Case) -> None:
    message = parse(case.text, case.family, TOOLS)
    said = chat_message(message)
    again = (said["content"] or "") + render_calls(family(case.family), said["tool_calls"])
    assert again == case.text


def test_numbers_and_blanks_keep_their_spelling() -> None:
    assert parameters('{"a": 1e5,"b":[1,2], "c":"x\\n"}') == [
        ("a", "1e5", False),
        ("b", "[1,2]", False),
        ("c", "x\n", True),
    ]


@pytest.mark.parametrize("arguments", ['{"town": "Os', "[1]", "no"])
def test_half_a_call_in_the_history_is_no_error(arguments: str) -> None:
    assert parameters(arguments) == [("arguments", arguments, True)]


def call(call_id: str, name: str) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_tools_belong_to_the_system_message_of_the_conversation() -> None:
    found = with_tools([{"role": "system", "content": "Be brief."}], TOOLS[:1])
    assert found == [{"role": "system", "content": "Be brief.", "tools": TOOLS[:1]}]


def test_tools_make_a_system_message_where_there_is_none() -> None:
    found = with_tools([{"role": "user", "content": "hi"}], TOOLS[:1])
    assert [message["role"] for message in found] == ["system", "user"]


def test_results_follow_the_order_of_their_calls() -> None:
    found = deepseek_v4_messages(
        [
            {"role": "assistant", "content": None, "tool_calls": [call("a", "x"), call("b", "y")]},
            {"role": "tool", "tool_call_id": "b", "content": "2"},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
        ]
    )
    assert [message["content"] for message in found[1:]] == ["1", "2"]


def test_thinking_is_found_by_either_name() -> None:
    (found,) = deepseek_v4_messages([{"role": "assistant", "reasoning_content": "hm"}])
    assert found["reasoning"] == "hm"


def test_content_in_parts_is_joined_before_the_calls() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (found,) = deepseek_v4_messages(
        [{"role": "assistant", "content": parts, "tool_calls": [call("a", "x")]}]
    )
    assert found["content"] == "a\nb" + render_calls(family("deepseek_v4"), [call("a", "x")])


def test_a_template_that_writes_values_gets_each_as_text() -> None:
    it = call("a", "x")
    it["function"]["arguments"] = '{"n":1e5,"o":{"p":1},"s":"\\u00e9"}'
    (found,) = template_messages(family("glm47"), [{"role": "assistant", "tool_calls": [it]}])
    assert found["tool_calls"][0]["function"]["arguments"] == {
        "n": "1e5",
        "o": '{"p":1}',
        "s": "\u00e9",
    }


@pytest.mark.parametrize("text", ['{"a":1e5}', '{"a": "Os'])
def test_a_template_that_writes_arguments_gets_them_as_text(text: str) -> None:
    it = call("a", "x")
    it["function"]["arguments"] = text
    (found,) = template_messages(family("kimi_k2"), [{"role": "assistant", "tool_calls": [it]}])
    assert json.loads(found["tool_calls"][0]["function"]["arguments"]) == text


def test_a_template_that_takes_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="found deepseek_v31"):
        template_messages(family("deepseek_v31"), [])
