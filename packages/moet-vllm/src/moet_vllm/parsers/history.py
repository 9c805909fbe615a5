"""Writes earlier calls back into a prompt, byte for byte as the model wrote them.

A prompt that differs from what the model generated in one blank is another prefix: nothing of
the cache after it can be used. vLLM decodes the arguments of earlier calls and encodes them
anew, which changes numbers (`1e5`), blanks (`{"a":1}`) and fails where a client returns a call
that was cut off. Here the text of every value is kept.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from moet_vllm.parsers.grammar import Grammar, family

__all__ = ["deepseek_v4_messages", "parameters", "render_calls"]

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


def deepseek_v4_messages(
    messages: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Prepare a conversation for DeepSeek-V4's encoder.

    Calls become part of the content of their message, byte for byte; results are put in the
    order of their calls; tools belong to the conversation's own system message, if it has one,
    after its text; thinking is `reasoning`, by whichever name it comes.

    Args:
        messages: of a Chat Completions request, arguments as the client sent them.
        tools: of the request.
    """
    grammar = family("deepseek_v4")
    found: list[dict[str, Any]] = []
    order: dict[str, int] = {}
    for message in messages:
        copy = dict(message)
        if "reasoning_content" in copy:
            copy.setdefault("reasoning", copy.pop("reasoning_content"))
        calls = copy.pop("tool_calls", None) or []
        if calls:
            copy["content"] = (copy.get("content") or "") + render_calls(grammar, calls)
            order = {call.get("id", ""): i for i, call in enumerate(calls)}
        found.append(copy)
        if copy.get("role") == "tool":
            start = len(found)
            while start and found[start - 1].get("role") == "tool":
                start -= 1
            found[start:] = sorted(
                found[start:], key=lambda result: order.get(result.get("tool_call_id", ""), 0)
            )
    if tools:
        if not found or found[0].get("role") != "system":
            found.insert(0, {"role": "system", "content": ""})
        found[0]["tools"] = [dict(tool) for tool in tools]
    return found


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
