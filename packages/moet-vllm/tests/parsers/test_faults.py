"""Nothing is left out, and nothing repaired, without a fault that says so."""

import pytest

from moet_vllm.parsers import FaultKind, Thinking, ToolChoice, parse
from moet_vllm.parsers.seam import Seam

SECTION = "<|tool_calls_section_begin|>so <|tool_call_begin|>functions.f:0"


@pytest.mark.parametrize(
    ("family", "text", "thinking", "kind"),
    [
        ("glm47", "a <arg_key> b</think>c", Thinking.PROMPT, FaultKind.STRAY_MARKER),
        ("glm47", "<think>a</think>b", Thinking.PROMPT, FaultKind.STRAY_MARKER),
        ("glm47", "<|assistant|>a", Thinking.MODEL, FaultKind.STRAY_MARKER),
        ("glm47", "a</thi", Thinking.PROMPT, FaultKind.CUT_MARKER),
        ("glm47", "<thi", Thinking.MODEL, FaultKind.CUT_MARKER),
        ("glm47", "<thi<|user|>nk>", Thinking.PROMPT, FaultKind.STRAY_MARKER),
        ("glm47", "<tool_</think>call>", Thinking.OFF, FaultKind.STRAY_MARKER),
        (
            "kimi_k2",
            SECTION + "<|tool_call_argument_begin|>{}",
            Thinking.OFF,
            FaultKind.STRAY_TEXT,
        ),
    ],
)
def test_what_is_left_out_is_a_fault(
    family: str, text: str, thinking: Thinking, kind: FaultKind
) -> None:
    assert kind in [fault.kind for fault in parse(text, family, thinking=thinking).faults]


def test_a_list_of_demanded_calls_without_an_end_is_a_fault() -> None:
    text = '[{"name": "f", "parameters": {}}'
    found = parse(text, "glm47", thinking=Thinking.OFF, choice=ToolChoice("required"))
    assert [call.complete for call in found.calls] == [True]
    assert [fault.kind for fault in found.faults] == [FaultKind.CUT_OFF]


@pytest.mark.parametrize("tag", ["parameter", 'parameter name="town" string="true"/'])
def test_a_parameter_that_cannot_be_read_leaves_no_whole_call(tag: str) -> None:
    """Not even where it has no text."""
    end = "</｜DSML｜invoke>"
    (call,) = parse(f'<｜DSML｜invoke name="f"><｜DSML｜{tag}>{end}', "deepseek_v4").calls
    assert (call.arguments, call.complete) == ("{", False)


def test_a_sound_reply_has_none() -> None:
    text = "a</think>b<tool_call>f</tool_call>"
    assert parse(text, "glm47", thinking=Thinking.PROMPT).faults == ()


def test_a_seam_costs_no_more_than_its_text() -> None:
    """The last character of a marker is left out however often it comes."""
    import regex

    seam = Seam(regex.compile("<think>"))
    assert seam.add("<thi") + seam.add("nk" + ">" * 300_000 + "x") == "<thinkx"
    assert seam.add(">") == ">"
