"""The chat format: special tokens, the template for serving, and the same rendering for training.

The format is GLM-4.7's. `render` returns what the template returns, in parts that say which text
the assistant wrote, so that training can weight it; a test holds the two together.
"""

import json
from typing import Any, NamedTuple

__all__ = ["SPECIAL", "STOPS", "TEMPLATE", "Part", "render"]

END, START, USER, ASSISTANT = "<|endoftext|>", "[gMASK]<sop>", "<|user|>", "<|assistant|>"
SYSTEM, OBSERVATION = "<|system|>", "<|observation|>"
# Never part of an answer's text, and part of it: parsers of tool calls and thinking look for these.
SPECIAL = (END, "[gMASK]", "<sop>", SYSTEM, USER, ASSISTANT, OBSERVATION)
TAGS = tuple(
    f"<{slash}{name}>"
    for name in ("think", "tool_call", "arg_key", "arg_value", "tool_response", "tools")
    for slash in ("", "/")
)
STOPS = (END, USER, OBSERVATION)

TEMPLATE = """\
[gMASK]<sop>
{%- if tools -%}
<|system|># Tools

You can call these functions:
<tools>
{% for tool in tools -%}
{%- set f = tool.function or tool -%}
{{ {"name": f.name, "description": f.description, "parameters": f.parameters} | tojson }}
{% endfor -%}
</tools>
Call one as <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
<|assistant|><think>{{ message.reasoning_content or "" }}</think>{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
{%- set f = call.function or call -%}
<tool_call>{{ f.name }}
{%- for key, value in f.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>
{{- value if value is string else value | tojson }}</arg_value>
{%- endfor -%}
</tool_call>
{%- endfor -%}
{%- elif message.role == "tool" -%}
{%- if loop.first or loop.previtem.role != "tool" -%}<|observation|>{%- endif -%}
<tool_response>{{ message.content }}</tool_response>
{%- else -%}
<|{{ message.role }}|>{{ message.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|><think>{%- if not enable_thinking -%}</think>{%- endif -%}
{%- endif -%}
"""

Message = dict[str, Any]


class Part(NamedTuple):
    """A piece of a rendered conversation; `answer` if the assistant writes it."""

    text: str
    answer: bool


def render(messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[Part]:
    """Render a conversation that ends with an assistant's message.

    The token that ends an assistant's message (the next role's) counts as
    the assistant's.
    """
    parts = [Part(START, False)]
    if tools:
        listed = "".join(_tool_text(tool["function"]) + "\n" for tool in tools)
        parts.append(
            Part(
                f"{SYSTEM}# Tools\n\nYou can call these functions:\n<tools>\n{listed}"
                "</tools>\nCall one as <tool_call>name<arg_key>key</arg_key>"
                "<arg_value>value</arg_value></tool_call>",
                False,
            )
        )
    for index, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        answered = index > 0 and messages[index - 1]["role"] == "assistant"
        if role == "assistant":
            thought = message.get("reasoning_content")
            calls = "".join(_call_text(call["function"]) for call in message.get("tool_calls", []))
            opening = f"{ASSISTANT}<think>" if thought else f"{ASSISTANT}<think></think>"
            written = f"{thought}</think>{content}{calls}" if thought else content + calls
            parts += [Part(opening, False), Part(written, True)]
        elif role == "tool":
            if messages[index - 1]["role"] != "tool":
                parts.append(Part(OBSERVATION, answered))
            parts.append(Part(f"<tool_response>{content}</tool_response>", False))
        else:
            parts += [Part(f"<|{role}|>", answered), Part(content, False)]
    return [*parts, Part(OBSERVATION if messages[-1].get("tool_calls") else USER, True)]


def _tool_text(function: dict[str, Any]) -> str:
    wanted = {key: function[key] for key in ("name", "description", "parameters")}
    return json.dumps(wanted, ensure_ascii=False)


def _call_text(function: dict[str, Any]) -> str:
    arguments = "".join(
        f"<arg_key>{key}</arg_key><arg_value>"
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</arg_value>"
        for key, value in function["arguments"].items()
    )
    return f"<tool_call>{function['name']}{arguments}</tool_call>"
