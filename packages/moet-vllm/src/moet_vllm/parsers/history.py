"""Writes earlier calls back into a prompt, byte for byte as the model wrote them.

A prompt that differs from what the model generated in one blank is another prefix: nothing of
the cache after it can be used. vLLM decodes the arguments of earlier calls and encodes them
anew, which changes numbers (`1e5`), blanks (`{"a":1}`) and fails where a client returns a call
that was cut off. Here the text of every value is kept.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from moet_core.errors import ConfigError
from moet_vllm.parsers.grammar import Grammar, family

__all__ = [
    "TEMPLATE_FAMILIES",
    "deepseek_v4_messages",
    "parameters",
    "render_calls",
    "template_messages",
    "with_tools",
]

# Families whose own chat template can be made to write arguments as they stand.
TEMPLATE_FAMILIES = ("glm45", "glm47", "kimi_k2")

# Holds the arguments of a call that are no JSON object, where a format has named values only.
BROKEN_ARGUMENTS = "arguments"


def parameters(arguments: str | Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """Part a call's arguments into name, text and whether the text is a string.

    Args:
        arguments: JSON text, or a mapping where only that is left.
    """
    text = arguments if isinstance(arguments, str) else _dump(arguments)
    try:
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeError):
        return [(BROKEN_ARGUMENTS, text, True)]
    return [(name, *_value(bytes(raw))) for name, raw in found.items()]


def render_calls(grammar: Grammar, calls: Sequence[Mapping[str, Any]]) -> str:
    """Write the calls of an assistant message as a model of this family does.

    Args:
        grammar: of the family.
        calls: `tool_calls` of a Chat Completions message.

    Returns:
        What follows the message's content.
    """
    if not calls:
        return ""
    functions = [call["function"] for call in calls]
    pairs = [(it["name"], it.get("arguments") or "{}") for it in functions]
    match grammar.name:
        case "glm45" | "glm47":
            return "".join(_glm(name, text, grammar.name == "glm45") for name, text in pairs)
        case "kimi_k2":
            ids = [
                call.get("id") or f"functions.{it['name']}:{i}"
                for i, (call, it) in enumerate(zip(calls, functions, strict=True))
            ]
            body = "".join(
                f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{_text(text)}<|tool_call_end|>"
                for call_id, (_, text) in zip(ids, pairs, strict=True)
            )
            return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"
        case "deepseek_v3":
            body = "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_text(text)}\n```"
                "<｜tool▁call▁end｜>"
                for name, text in pairs
            )
            return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"
        case "deepseek_v31":
            body = "".join(
                f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_text(text)}<｜tool▁call▁end｜>"
                for name, text in pairs
            )
            return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"
    block = "function_calls" if grammar.name == "deepseek_v32" else "tool_calls"
    body = "".join(_dsml(name, text) for name, text in pairs)
    return f"\n\n<｜DSML｜{block}>\n{body}</｜DSML｜{block}>"


def template_messages(
    grammar: Grammar, messages: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Prepare a conversation for the chat template of a checkpoint.

    The template stays as it is; what it is given makes it write every value as it stands. GLM's
    writes strings as they are and everything else as JSON: each value becomes the string of its
    own JSON text. Kimi's writes arguments that are a string as they are: vLLM decodes arguments
    once, so they are encoded once more.

    Args:
        grammar: of the family, one of `TEMPLATE_FAMILIES`.
        messages: of a Chat Completions request, arguments as the client sent them.

    Returns:
        Copies; the request's messages stay as they are.
    """
    if grammar.name not in TEMPLATE_FAMILIES:
        raise ConfigError(
            f"Earlier calls: wanted a family of {', '.join(TEMPLATE_FAMILIES)}, found"
            f" {grammar.name}, whose template takes no arguments as text."
        )
    spell = _encoded if grammar.name == "kimi_k2" else _spelled
    return [_with_arguments(message, spell) for message in messages]


def deepseek_v4_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Prepare a conversation for DeepSeek-V4's encoder.

    Calls become part of the content of their message, byte for byte; results are put in the
    order of their calls; thinking is `reasoning`, by whichever name it comes.

    Args:
        messages: of a Chat Completions request, arguments as the client sent them.

    Returns:
        Copies; the request's messages stay as they are.
    """
    grammar = family("deepseek_v4")
    found: list[dict[str, Any]] = []
    order: dict[str, int] = {}
    for message in messages:
        copy = dict(message)
        if "reasoning_content" in copy:
            copy.setdefault("reasoning", copy.pop("reasoning_content"))
        calls = list(copy.get("tool_calls") or ())
        if calls and all(map(_is_call, calls)):
            del copy["tool_calls"]
            copy["content"] = _content(copy.get("content")) + render_calls(grammar, calls)
            order = {call.get("id", ""): i for i, call in enumerate(calls)}
        found.append(copy)
        if copy.get("role") == "tool":
            start = len(found)
            while start and found[start - 1].get("role") == "tool":
                start -= 1
            found[start:] = sorted(
                found[start:], key=lambda result: order.get(result.get("tool_call_id", ""), 0)
            )
    return found


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Give DeepSeek-V4's tools to the conversation's own system message, after its text.

    Args:
        messages: of a conversation.
        tools: of the request.
    """
    found = [dict(message) for message in messages]
    if tools:
        if not found or found[0].get("role") != "system":
            found.insert(0, {"role": "system", "content": ""})
        found[0]["tools"] = [dict(tool) for tool in tools]
    return found


def _with_arguments(message: Mapping[str, Any], spell: Callable[[Any], Any]) -> dict[str, Any]:
    copy = dict(message)
    if copy.get("tool_calls"):
        copy["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": spell(call["function"].get("arguments") or "{}"),
                },
            }
            if _is_call(call)
            else call
            for call in copy["tool_calls"]
        ]
    return copy


def _is_call(call: Any) -> bool:
    """Return whether this is the call of a function; vLLM refuses whatever else it may be."""
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _spelled(arguments: str | Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name, text, _ in parameters(arguments)}


def _encoded(arguments: str | Mapping[str, Any]) -> str:
    return _dump(_text(arguments))


def _content(content: Any) -> str:
    """Join the texts of a content that comes in parts, as vLLM does."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content if part.get("type") == "text")


def _value(raw: bytes) -> tuple[str, bool]:
    text = raw.decode()
    return (msgspec.json.decode(raw), True) if text.startswith('"') else (text, False)


def _text(arguments: str | Mapping[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else _dump(arguments)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _glm(name: str, arguments: str | Mapping[str, Any], lines: bool) -> str:
    end = "\n" if lines else ""
    body = "".join(
        f"<arg_key>{key}</arg_key>{end}<arg_value>{text}</arg_value>{end}"
        for key, text, _ in parameters(arguments)
    )
    return f"{end}<tool_call>{name}{end}{body}</tool_call>"


def _dsml(name: str, arguments: str | Mapping[str, Any]) -> str:
    body = "".join(
        f'<｜DSML｜parameter name="{key}" string="{_dump(is_string)}">{text}</｜DSML｜parameter>\n'
        for key, text, is_string in parameters(arguments)
    )
    return f'<｜DSML｜invoke name="{name}">\n{body}</｜DSML｜invoke>\n'
