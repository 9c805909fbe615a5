"""Sound transcripts: each scenario of a short table, in every family, with and without thinking."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from parsers.corpus.case import Case, Want
from parsers.corpus.render import CALLS, dump, reply

from moet_vllm.parsers import Thinking

Call = tuple[str, Mapping[str, Any]]


class Scenario(msgspec.Struct, frozen=True):
    name: str
    content: str = ""
    calls: Sequence[Call] = ()


CODE = "def area(r):\n    if r < 0:\n        return None\n    return 3.14 * r ** 2\n"
SCENARIOS = (
    Scenario("answer", "The bridge opened in 1932."),
    Scenario("paragraphs", "First line.\n\n  - an item\n\tindented\n\nLast line.\n"),
    Scenario("angles", "if a < b && c > d: <div class='x'><b>hi</b></div> <<>> < <"),
    Scenario("unicode", "naïve café — 東京 👩‍👩‍👧 e\u0301 ｜ ▁ «»"),
    Scenario(
        "near markers", "<tool_cal <thinking> </thinks> <|tool_calls| <arg_keys> <｜DSM <｜tool."
    ),
    Scenario("ends in angle", "and so x <"),
    Scenario("no arguments", calls=[("clock", {})]),
    Scenario("dashed name", calls=[("mcp__mail-box__list_rules", {})]),
    Scenario("one string", calls=[("forecast", {"town": "Oslo"})]),
    Scenario("code", calls=[("save", {"path": "src/area.py", "body": CODE})]),
    Scenario("outer blanks", calls=[("save", {"path": "  a b ", "body": "\n\n  x\n \n"})]),
    Scenario("number in string", calls=[("save", {"path": "10001", "body": "-1.50"})]),
    Scenario("words in string", calls=[("save", {"path": "true", "body": "null"})]),
    Scenario("json in string", calls=[("save", {"path": "a.json", "body": '{"a": [1, 2]}'})]),
    Scenario("quotes", calls=[("run", {"command": 'echo "a\\tb" \'c\' | grep "\\\\d"'})]),
    Scenario("windows path", calls=[("run", {"command": "dir 'C:\\new\\_tmp.bin' | Sort-Object"})]),
    Scenario(
        "html in string", calls=[("save", {"path": "p", "body": "<div>\n<p>1 < 2</p></div>"})]
    ),
    Scenario("think in string", calls=[("save", {"path": "p", "body": "a<think>b</think>c"})]),
    Scenario("unicode in string", calls=[("forecast", {"town": "São Tomé 🌦️ 東京"})]),
    Scenario("empty string", calls=[("save", {"path": "empty", "body": ""})]),
    Scenario("integer", calls=[("forecast", {"town": "Rome", "days": -3})]),
    Scenario("number", calls=[("run_in_terminal", {"command": "ls", "seconds": 2.5})]),
    Scenario("boolean", calls=[("run_in_terminal", {"command": "ls", "detached": True})]),
    Scenario("array", calls=[("find_mail", {"text": "x", "labels": ["a", "b ]", 'c"']})]),
    Scenario("empties", calls=[("find_mail", {"labels": []}), ("run_in_terminal", {"env": {}})]),
    Scenario(
        "nested object",
        calls=[("run_in_terminal", {"env": {"A": {"b": [1, {"c": "}}"}]}, "D": None}})],
    ),
    Scenario("null", calls=[("find_mail", {"text": "t", "limit": None, "sender": None})]),
    Scenario("optional string", calls=[("find_mail", {"sender": "Smith", "limit": 5})]),
    Scenario("nullish string", calls=[("find_mail", {"sender": "nullable n", "text": "n"})]),
    Scenario(
        "number or string", calls=[("find_mail", {"code": 12}), ("find_mail", {"code": "x1"})]
    ),
    Scenario("reference", calls=[("move", {"to": {"x": 1.5, "y": -2}, "x-speed": 3})]),
    Scenario("no schema", calls=[("anything", {"n": 7, "s": "7 up", "o": {"k": [True]}})]),
    Scenario("two calls", calls=[("clock", {}), ("forecast", {"town": "Lima", "days": 2})]),
    Scenario("same tool thrice", calls=[("run", {"command": c}) for c in ("pwd", "ls", "id")]),
    Scenario("answer and call", "Let me look.", [("forecast", {"town": "Bonn"})]),
    Scenario("long string", calls=[("save", {"path": "long", "body": CODE * 6})]),
    Scenario(
        "enumeration",
        "I'll check:\n1. now",
        [("forecast", {"town": "Kyiv", "days": 1, "scale": "C"})],
    ),
)
THOUGHTS = (
    ("plain", "The user wants a fact."),
    ("lines", "First:\n- a < b\n- <thinking> <tool_cal\n\nDone."),
    ("unicode", "東京 👩‍👩‍👧 ｜▁"),
)
ANSWER = ("Seven.", [])
CALL = ("", [("forecast", {"town": "Bern", "days": 4})])
BOTH = ("I'll look.", [("clock", {}), ("run", {"command": "ls <dir>"})])


def wants(calls: Sequence[Call]) -> tuple[Want, ...]:
    return tuple(Want(name, dump(arguments)) for name, arguments in calls)


def sound_cases() -> Iterator[Case]:
    """Every scenario in every family, then the ways of thinking."""
    for family in CALLS:
        for scenario in SCENARIOS:
            yield Case(
                name=f"{family}: {scenario.name}",
                family=family,
                text=reply(family, scenario.content, scenario.calls),
                content=scenario.content,
                calls=wants(scenario.calls),
            )
        for thinking, opening in ((Thinking.PROMPT, ""), (Thinking.MODEL, "<think>")):
            for (name, thought), (content, calls) in zip(
                THOUGHTS, (ANSWER, CALL, BOTH), strict=True
            ):
                yield Case(
                    name=f"{family}: {name} thinking opened by the {thinking}",
                    family=family,
                    text=f"{opening}{thought}</think>{reply(family, content, calls)}",
                    thinking=thinking,
                    reasoning=thought,
                    content=content,
                    calls=wants(calls),
                )
