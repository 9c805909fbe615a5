"""One transcript of the corpus, and the tools its requests declare."""

from typing import Any

import msgspec

from moet_vllm.parsers import Message, Thinking, ToolChoice


class Want(msgspec.Struct, frozen=True):
    """A call the transcript must give: JSON text of its arguments, byte for byte."""

    name: str
    arguments: str
    complete: bool = True


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A transcript and what must come out of it.

    Attributes:
        sound: the transcript is what the family's own template writes; if not, it is one of the
            faults that models make.
    """

    name: str
    family: str
    text: str
    thinking: Thinking = Thinking.OFF
    choice: ToolChoice = ToolChoice()
    reasoning: str = ""
    content: str = ""
    calls: tuple[Want, ...] = ()
    sound: bool = True


def outcome(message: Message) -> tuple[str, str, tuple[Want, ...]]:
    """What of a message a client sees, but for ids."""
    calls = tuple(Want(call.name, call.arguments, call.complete) for call in message.calls)
    return message.reasoning, message.content, calls


def wanted(case: Case) -> tuple[str, str, tuple[Want, ...]]:
    return case.reasoning, case.content, case.calls


def tool(name: str, properties: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties or {}, **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


STRING = {"type": "string"}
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}

TOOLS: list[dict[str, Any]] = [
    tool("clock"),
    tool("mcp__mail-box__list_rules"),
    tool("forecast", {"town": STRING, "days": {"type": "integer"}, "scale": {"enum": ["C", "F"]}}),
    tool("save", {"path": STRING, "body": STRING}),
    tool(
        "run_in_terminal",
        {
            "command": STRING,
            "seconds": {"type": "number"},
            "detached": {"type": "boolean"},
            "env": {"type": "object"},
        },
    ),
    tool("run", {"command": STRING}),
    tool(
        "find_mail",
        {
            "text": STRING,
            "labels": {"type": "array", "items": STRING},
            "limit": {"type": ["integer", "null"]},
            "sender": OPTIONAL,
            "code": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        },
    ),
    tool(
        "move",
        {"to": {"$ref": "#/$defs/Point"}, "x-speed": {"type": "number"}},
        **{"$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}}}}},
    ),
    {"type": "function", "function": {"name": "anything"}},
]
