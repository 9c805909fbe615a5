"""Feeds transcripts in pieces, and checks what holds for every cut."""

import json
import random
from collections.abc import Iterable, Iterator

from parsers.corpus.case import TOOLS, Case

from moet_vllm.parsers import (
    Arguments,
    CallEnd,
    CallStart,
    Event,
    Mark,
    Message,
    Parser,
    collect,
    family,
    read_tools,
)
from moet_vllm.parsers.lexer import pattern_of

TOOLS_READ = read_tools(TOOLS)


def events_of(case: Case, pieces: Iterable[str]) -> list[Event]:
    parser = Parser(
        family(case.family),
        TOOLS_READ,
        choice=case.choice,
        thinking=case.thinking,
        make_id=lambda index, name, _written: f"{name}#{index}",
    )
    found: list[Event] = []
    for piece in pieces:
        found += parser.feed(piece)
    return found + parser.finish()


def message_of(case: Case, pieces: Iterable[str]) -> Message:
    """The message without what may depend on the cuts: how often text is stray, not where."""
    message = collect(events_of(case, pieces))
    return Message(message.reasoning, message.content, message.calls)


def token_like(text: str, seed: int) -> Iterator[str]:
    """Cut as a tokenizer might: markers whole, other text in pieces of one to six characters."""
    pick = random.Random(seed)
    at = 0
    while at < len(text):
        end = text.find(">", at) + 1
        size = end - at if text[at] == "<" and 0 < end - at < 40 else pick.randint(1, 6)
        yield text[at : at + size]
        at += size


def bunched(text: str, seed: int) -> Iterator[str]:
    """Cut into few large pieces, as speculative decoding may: several markers in one delta."""
    pick = random.Random(seed)
    at = 0
    while at < len(text):
        size = pick.randint(20, 200)
        yield text[at : at + size]
        at += size


def assert_sound_stream(case: Case, events: list[Event]) -> None:
    """What a client relies on: order of events, valid JSON, no markup in texts."""
    open_call = -1
    for event in events:
        match event:
            case CallStart(index):
                assert index == open_call + 1
                open_call = index
            case Arguments(index) | CallEnd(index):
                assert index == open_call
    message = collect(events)
    marks = pattern_of(family(case.family), Mark)
    assert not marks.search(message.content)
    assert not marks.search(message.reasoning)
    assert len({call.id for call in message.calls}) == len(message.calls)
    for call in message.calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)
        else:
            assert not is_json(call.arguments)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
