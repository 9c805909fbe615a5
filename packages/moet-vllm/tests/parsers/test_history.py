"""Earlier calls go back into the prompt as the model wrote them."""

import pytest
from parsers.corpus.case import TOOLS, Case
from parsers.corpus.table import sound_cases

from moet_vllm.parsers import family, parse
from moet_vllm.parsers.history import deepseek_v4_messages, parameters, render_calls
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
    found = deepseek_v4_messages([{"role": "system", "content": "Be brief."}], TOOLS[:1])
    assert found == [{"role": "system", "content": "Be brief.", "tools": TOOLS[:1]}]


def test_tools_make_a_system_message_where_there_is_none() -> None:
    found = deepseek_v4_messages([{"role": "user", "content": "hi"}], TOOLS[:1])
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
