"""What a parser says about a reply: a stream of events, or the message they add up to."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

__all__ = [
    "Arguments",
    "Call",
    "CallEnd",
    "CallStart",
    "Content",
    "Event",
    "Fault",
    "FaultKind",
    "Message",
    "Reasoning",
    "collect",
]


class FaultKind(StrEnum):
    """What was wrong with a reply, and with that what was done about it (docs/parsers.md)."""

    STRAY_MARKER = "stray_marker"  # a marker where none belongs: left out
    CUT_MARKER = "cut_marker"  # the reply ends within a marker: its beginning left out
    STRAY_TEXT = "stray_text"  # text between the parts of a call: left out
    MALFORMED_CALL = "malformed_call"  # no call can be made of it: its text is content
    UNKNOWN_TOOL = "unknown_tool"  # well-formed, but no tool of the request has that name
    CALL_NOT_ALLOWED = "call_not_allowed"  # the request wanted none: left out
    MISSING_MARKER = "missing_marker"  # recovered without it
    NAME_RECOVERED = "name_recovered"  # the name was found by the tools of the request
    VALUE_NOT_OF_SCHEMA = "value_not_of_schema"  # passed on as a string
    INVALID_JSON = "invalid_json"  # passed on as it is, the call is not complete
    CUT_OFF = "cut_off"  # the reply ends within a call: the call is not complete
    TOO_MANY_FAULTS = "too_many_faults"  # no further ones are reported


class Reasoning(msgspec.Struct, frozen=True):
    """More of the model's thinking."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """More of the answer."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A tool call begins; `index` counts the calls of the reply from 0."""

    index: int
    id: str
    name: str


class Arguments(msgspec.Struct, frozen=True):
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """A call ends; if `complete`, its arguments are one JSON object."""

    index: int
    complete: bool


class Fault(msgspec.Struct, frozen=True):
    """Something was wrong; `detail` is the piece of the reply, shortened."""

    kind: FaultKind
    detail: str = ""


Event = Reasoning | Content | CallStart | Arguments | CallEnd | Fault


class Call(msgspec.Struct, frozen=True):
    """A tool call.

    Attributes:
        id: unique within the conversation.
        name: of the tool.
        arguments: JSON text of an object if `complete`; else what the model wrote of it, which is
            deliberately left without its end, so that no client runs half a call.
        complete: the model finished the call.
    """

    id: str
    name: str
    arguments: str
    complete: bool


class Message(msgspec.Struct, frozen=True):
    """A whole reply; texts are empty where there are none."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()
    faults: tuple[Fault, ...] = ()


def collect(events: Iterable[Event]) -> Message:
    """Add up the events of one reply."""
    reasoning: list[str] = []
    content: list[str] = []
    starts: list[CallStart] = []
    arguments: list[list[str]] = []
    complete: list[bool] = []
    faults: list[Fault] = []
    for event in events:
        match event:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case CallStart():
                starts.append(event)
                arguments.append([])
                complete.append(False)
            case Arguments(index, text):
                arguments[index].append(text)
            case CallEnd(index, whole):
                complete[index] = whole
            case Fault():
                faults.append(event)
    calls = tuple(
        Call(start.id, start.name, "".join(parts), whole)
        for start, parts, whole in zip(starts, arguments, complete, strict=True)
    )
    return Message("".join(reasoning), "".join(content), calls, tuple(faults))
