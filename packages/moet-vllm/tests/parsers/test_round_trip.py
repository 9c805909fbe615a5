"""Replies drawn from each family's grammar come back as what they were written from."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsers.corpus.case import Case, Want
from parsers.corpus.render import CALLS, VALUE_CLOSE, dump, reply
from parsers.cutting import message_of

from moet_vllm.parsers import Mark, Thinking, family
from moet_vllm.parsers.lexer import pattern_of

SCHEMA_OF = {
    "forecast": {"town": st.text(max_size=40), "days": st.integers(-(10**20), 10**20)},
    "save": {"path": st.text(max_size=12), "body": st.text(max_size=120)},
    "run_in_terminal": {
        "command": st.text(max_size=40),
        "seconds": st.floats(allow_nan=False, allow_infinity=False),
        "detached": st.booleans(),
        "env": st.dictionaries(
            st.text(max_size=6),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.text(max_size=8),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=4), inner, max_size=3)
                ),
                max_leaves=6,
            ),
            max_size=3,
        ),
    },
    "clock": {},
}
PIECES = st.sampled_from(
    [
        "<",
        "</",
        "<|",
        "<｜",
        "<tool",
        "</arg_va",
        "<think",
        "｜DSML｜",
        "\n",
        " ",
        ">",
        '"',
        "\\",
        "{",
        "}",
    ]
)


def prose(family_name: str) -> st.SearchStrategy[str]:
    """Text that is no markup in this family, and does not end like the beginning of some."""
    pattern = pattern_of(family(family_name), Mark)

    def clean(text: str) -> str:
        while (found := pattern.search(text, partial=True)) and found.group():
            text = text[: found.start()] + text[found.end() :]
        return text.strip()

    return st.lists(st.text(max_size=12) | PIECES, max_size=8).map("".join).map(clean)


@st.composite
def replies(draw: st.DrawFn, family_name: str) -> Case:
    thinking = draw(st.sampled_from(Thinking))
    thought, content = draw(prose(family_name)), draw(prose(family_name))
    calls: list[tuple[str, dict[str, Any]]] = []
    for name in draw(st.lists(st.sampled_from(sorted(SCHEMA_OF)), max_size=3)):
        keys = (
            draw(st.lists(st.sampled_from(sorted(SCHEMA_OF[name])), unique=True))
            if SCHEMA_OF[name]
            else []
        )
        calls.append((name, {key: draw(SCHEMA_OF[name][key]) for key in keys}))
    close = VALUE_CLOSE.get(family_name)
    if close is not None:
        calls = [
            (name, arguments)
            for name, arguments in calls
            if not any(
                pattern_of(family(family_name), (Mark.VALUE_CLOSE,)).search(str(v))
                for v in arguments.values()
            )
        ]
    opening = {
        Thinking.OFF: "",
        Thinking.PROMPT: f"{thought}</think>",
        Thinking.MODEL: f"<think>{thought}</think>",
    }
    return Case(
        name="drawn",
        family=family_name,
        text=opening[thinking] + reply(family_name, content, calls),
        thinking=thinking,
        reasoning="" if thinking is Thinking.OFF else thought,
        content=content,
        calls=tuple(Want(name, dump(arguments)) for name, arguments in calls),
    )


@pytest.mark.parametrize("family_name", CALLS)
@settings(max_examples=100)
@given(data=st.data())
def test_replies_come_back(family_name: str, data: st.DataObject) -> None:
    case = data.draw(replies(family_name))
    cuts = data.draw(st.lists(st.integers(0, len(case.text)), max_size=6).map(sorted))
    edges = [0, *cuts, len(case.text)]
    pieces = [case.text[a:b] for a, b in itertools.pairwise(edges)]
    whole, streamed = message_of(case, [case.text]), message_of(case, pieces)
    assert streamed == whole
    assert (whole.reasoning, whole.content) == (case.reasoning, case.content)
    assert [call.name for call in whole.calls] == [call.name for call in case.calls]
    assert all(call.complete for call in whole.calls)
    found = [json.loads(call.arguments) for call in whole.calls]
    assert found == [json.loads(call.arguments) for call in case.calls]


@pytest.mark.parametrize("family_name", CALLS)
@settings(max_examples=100)
@given(data=st.data())
def test_any_text_reads_the_same_however_it_is_cut(family_name: str, data: st.DataObject) -> None:
    marks = family(family_name).marks
    spelled = st.sampled_from(sorted(marks)).flatmap(
        lambda mark: st.from_regex(
            marks[mark]
            .replace("(?P<string>", "(?:")
            .replace("(?P<tool>", "(?:")
            .replace("(?P<parameter>", "(?:"),
            fullmatch=True,
        )
    )
    parts = st.lists(
        spelled | PIECES | st.sampled_from(["clock", "forecast", "town", '{"town": "', '"}']),
        max_size=14,
    )
    text = "".join(data.draw(parts))
    thinking = data.draw(st.sampled_from(Thinking))
    case = Case(name="drawn", family=family_name, text=text, thinking=thinking)
    whole = message_of(case, [text])
    assert message_of(case, text) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert message_of(case, [text[:cut], text[cut:]]) == whole
