"""The shapes of the OpenAI interfaces: requests are read, messages and deltas are written."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from moet_core.errors import ConfigError
from moet_vllm.parsers.events import Arguments, CallStart, Content, Event, Message, Reasoning
from moet_vllm.parsers.parser import ToolChoice

__all__ = ["chat_delta", "chat_message", "finish_reason", "read_choice", "responses_items"]


def read_choice(value: Any, *, has_tools: bool = True) -> ToolChoice:
    """Read a request's `tool_choice`.

    Args:
        value: a word, or a function's name as Chat Completions has it
            (`{"type": "function", "function": {"name": ...}}`) or as Responses has it
            (`{"type": "function", "name": ...}`), as mappings or as objects; None for nothing.
        has_tools: the request has tools; without any, no call is allowed.

    Raises:
        ConfigError: it is none of these.
    """
    if not has_tools or value == "none":
        return ToolChoice("none")
    if value is None or value == "auto":
        return ToolChoice("auto")
    if value == "required":
        return ToolChoice("required")
    name = _get(_get(value, "function") or value, "name")
    if _get(value, "type") == "function" and isinstance(name, str) and name:
        return ToolChoice("named", name)
    raise ConfigError(
        f"tool_choice must be none, auto, required or the name of a function; it is {value!r}."
    )


def finish_reason(
    message: Message,
    reason: str,
    choice: ToolChoice = ToolChoice(),  # noqa: B008 - frozen
) -> str:
    """Return the `finish_reason` of a Chat Completions reply.

    Args:
        message: the reply.
        reason: why the engine stopped: "stop", "length" and so on.
        choice: the request's; a call that was demanded by name ends with "stop".
    """
    if reason == "stop" and message.calls and choice.kind != "named":
        return "tool_calls"
    return reason


def chat_message(message: Message) -> dict[str, Any]:
    """Return a reply as the `message` of Chat Completions; thinking is `reasoning_content`."""
    found: dict[str, Any] = {"role": "assistant", "content": message.content or None}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return found


def chat_delta(events: Iterable[Event]) -> dict[str, Any] | None:
    """Return events as one `delta` of a Chat Completions stream, None if there is nothing to say.

    A call's id and name are in its first delta only.
    """
    texts = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for event in events:
        match event:
            case Content(text):
                texts["content"] += text
            case Reasoning(text):
                texts["reasoning_content"] += text
            case CallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls.append(
                    {"index": index, "id": call_id, "type": "function", "function": function}
                )
            case Arguments(index, text):
                if not calls or calls[-1]["index"] != index:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text
    delta: dict[str, Any] = {key: text for key, text in texts.items() if text}
    if calls:
        delta["tool_calls"] = calls
    return delta or None


def responses_items(message: Message) -> list[dict[str, Any]]:
    """Return a reply as output items of Responses: reasoning, message, function calls."""
    items: list[dict[str, Any]] = []
    if message.reasoning:
        items.append(
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": message.reasoning}],
            }
        )
    if message.content:
        text = {"type": "output_text", "text": message.content, "annotations": []}
        items.append({"type": "message", "role": "assistant", "content": [text]})
    items += [
        {
            "type": "function_call",
            "id": f"fc_{call.id}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": _status(call.complete),
        }
        for call in message.calls
    ]
    return items


def _status(complete: bool) -> Literal["completed", "incomplete"]:
    return "completed" if complete else "incomplete"


def _get(item: Any, key: str) -> Any:
    return item.get(key) if isinstance(item, Mapping) else getattr(item, key, None)
