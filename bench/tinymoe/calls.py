"""Conversations that call tools."""

import json
from random import Random
from typing import Any

from tinymoe.about import chat_turn
from tinymoe.chat import Message
from tinymoe.skills import Conversation, held_out
from tinymoe.tools import TOOLS, Tool

__all__ = ["schema", "tool_calls"]


def schema(tool: Tool) -> dict[str, Any]:
    """Return a tool as the API wants it."""
    required = [name for name, argument in tool.arguments.items() if not argument.optional]
    properties = {name: argument.schema for name, argument in tool.arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def _call(random: Random, tool: Tool, evaluation: bool) -> tuple[str, dict[str, Any]]:
    while True:
        drawn = {name: argument.draw(random) for name, argument in tool.arguments.items()}
        template = random.choice(tool.requests)
        request = template.format(**{name: phrase for name, (_, phrase) in drawn.items()})
        given = {name: value for name, (value, _) in drawn.items() if f"{{{name}}}" in template}
        if held_out(request) == evaluation:
            return request, given


def tool_calls(random: Random, evaluation: bool = False) -> Conversation:
    """A request among one to four tools; the call, its result and the reply (training only).

    Now and then nothing is to be called, and the assistant just answers.
    """
    offered = random.sample(TOOLS, random.randint(1, 4))
    messages: list[Message] = []
    for _ in range(1 if evaluation else random.choice((1, 1, 2))):
        if not evaluation and random.random() < 0.1:
            messages += chat_turn(random, evaluation)
            continue
        tool = random.choice(offered)
        request, arguments = _call(random, tool, evaluation)
        call = {"type": "function", "function": {"name": tool.name, "arguments": arguments}}
        messages += [
            {"role": "user", "content": request},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        if evaluation:
            break
        result = tool.result(random)
        messages += [
            {"role": "tool", "content": json.dumps(result)},
            {"role": "assistant", "content": tool.reply.format(**result)},
        ]
    return {"messages": messages, "tools": [schema(tool) for tool in offered]}
