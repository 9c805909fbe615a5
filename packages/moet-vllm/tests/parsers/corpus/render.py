"""Writes replies as the templates of the families do; knows nothing of the parser."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Calls = Sequence[tuple[str, Mapping[str, Any]]]


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dump(value)


def _glm45(calls: Calls) -> str:
    return "".join(
        f"\n<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def _glm47(calls: Calls) -> str:
    return "".join(
        f"<tool_call>{name}"
        + "".join(
            f"<arg_key>{key}</arg_key><arg_value>{_text(value)}</arg_value>"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def _kimi_k2(calls: Calls) -> str:
    body = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>"
        f"{dump(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def _deepseek_v3(calls: Calls) -> str:
    body = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dump(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls) -> str:
    body = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dump(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def _dsml(block: str) -> Callable[[Calls], str]:
    def parameter(key: str, value: Any) -> str:
        kind = dump(isinstance(value, str))
        tag = f'<｜DSML｜parameter name="{key}" string="{kind}">'
        return f"{tag}{_text(value)}</｜DSML｜parameter>\n"

    def write(calls: Calls) -> str:
        body = "".join(
            f'<｜DSML｜invoke name="{name}">\n'
            + "".join(parameter(key, value) for key, value in arguments.items())
            + "</｜DSML｜invoke>\n"
            for name, arguments in calls
        )
        return f"\n\n<｜DSML｜{block}>\n{body}</｜DSML｜{block}>"

    return write


CALLS: dict[str, Callable[[Calls], str]] = {
    "glm45": _glm45,
    "glm47": _glm47,
    "kimi_k2": _kimi_k2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
}

# What closes a value in a family of marked values: the one text such a value cannot hold.
VALUE_CLOSE = {
    "glm45": "</arg_value>",
    "glm47": "</arg_value>",
    "deepseek_v32": "</｜DSML｜parameter>",
    "deepseek_v4": "</｜DSML｜parameter>",
}


def reply(family: str, content: str = "", calls: Calls = ()) -> str:
    return content + (CALLS[family](calls) if calls else "")
