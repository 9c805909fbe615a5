"""Output that no model should write: it costs time in proportion, and memory within bounds."""

import json
import time
import tracemalloc
from collections.abc import Callable

import pytest
from parsers.corpus.case import TOOLS
from parsers.corpus.render import CALLS, reply

from moet_vllm.parsers import (
    FaultKind,
    Mark,
    Message,
    Parser,
    Thinking,
    collect,
    family,
    read_tools,
)
from moet_vllm.parsers.writer import native_ids

MIB = 1 << 20
SMALL, LARGE = MIB // 16, MIB // 2
DELTA = 4096
# What a reader that looks at everything twice for twice the length would exceed by far.
MAX_GROWTH = 2.5 * LARGE / SMALL

everywhere = pytest.mark.parametrize("name", CALLS)


def read(name: str, text: str, thinking: Thinking = Thinking.OFF, delta: int = DELTA) -> Message:
    parser = Parser(family(name), read_tools(TOOLS), thinking=thinking)
    events = [
        event for at in range(0, len(text), delta) for event in parser.feed(text[at : at + delta])
    ]
    return collect([*events, *parser.finish()])


def seconds(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


def repeated(unit: str, size: int) -> str:
    return (unit * (size // len(unit) + 1))[:size]


HOSTILE = {
    "angles": lambda _: "<",
    "unclosed calls": lambda name: reply(name, "", [("clock", {})]).split("clock")[0],
    "closing markers": lambda name: "".join(family(name).spelling.values()),
    "thinking": lambda _: "<think></think>",
    "half markers": lambda name: next(iter(family(name).spelling.values()))[:-1],
}


@pytest.mark.parametrize("what", HOSTILE)
@everywhere
def test_time_grows_with_the_length_and_no_faster(name: str, what: str) -> None:
    unit = HOSTILE[what](name)
    small, large = repeated(unit, SMALL), repeated(unit, LARGE)
    quick = min(seconds(lambda: read(name, small)) for _ in range(2))
    assert seconds(lambda: read(name, large)) < MAX_GROWTH * quick + 0.05


@everywhere
def test_ten_megabytes_of_angles_hold_nothing(name: str) -> None:
    parser = Parser(family(name), read_tools(TOOLS), thinking=Thinking.OFF)
    delta = "<" * DELTA
    tracemalloc.start()
    length = 0
    for _ in range(10 * MIB // DELTA):
        length += len(collect(parser.feed(delta)).content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MIB
    assert length + len(collect(parser.finish()).content) == 10 * MIB


@everywhere
def test_a_stream_of_a_value_holds_nothing(name: str) -> None:
    parser = Parser(family(name), read_tools(TOOLS), thinking=Thinking.OFF)
    head = reply(name, "", [("save", {"body": "@"})]).partition("@")[0]
    parser.feed(head)
    tracemalloc.start()
    for _ in range(2 * MIB // DELTA):
        parser.feed("x" * DELTA)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MIB // 4


@everywhere
def test_ten_thousand_calls(name: str) -> None:
    calls = [("forecast", {"town": f"T{i}", "days": i}) for i in range(10_000)]
    message = read(name, reply(name, "", calls), delta=97)
    assert [json.loads(call.arguments) for call in message.calls] == [args for _, args in calls]
    assert len({call.id for call in message.calls}) == len(calls)


def test_many_double_ids_take_no_search_each() -> None:
    make, count = native_ids(), 20_000
    for i in range(count):
        make(i, "f", f"functions.f:{count + i}")
    started = time.process_time()
    ids = {make(count + i, "f", "functions.f:40000") for i in range(count)}
    assert len(ids) == count
    # A search from the beginning for each takes minutes.
    assert time.process_time() - started < 10


@everywhere
def test_deep_nesting_needs_no_stack(name: str) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    text = reply(name, "", [("anything", {"a": ["@"]})]).replace('["@"]', deep)
    (call,) = read(name, text).calls
    # In a marked value what is no acceptable JSON is a string; in a JSON object it is no object.
    if family(name).arguments == "tagged":
        assert json.loads(call.arguments) == {"a": deep}
    else:
        assert not call.complete


@everywhere
def test_faults_are_not_listed_without_end(name: str) -> None:
    message = read(name, family(name).spelling[Mark.CALL_CLOSE] * 1000)
    assert len(message.faults) == 100
    assert message.faults[-1].kind is FaultKind.TOO_MANY_FAULTS
    assert message.content == ""


def test_a_name_without_end_is_content() -> None:
    text = "<tool_call>" + "n" * MIB
    assert read("glm47", text).content == "n" * MIB


def test_a_section_without_a_call_is_content() -> None:
    text = "<|tool_calls_section_begin|>" + "n" * MIB
    assert read("kimi_k2", text).content == "n" * MIB
