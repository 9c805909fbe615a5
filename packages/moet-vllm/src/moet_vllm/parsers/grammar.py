"""The reply formats of the model families, as data: which text marks what.

Every family has the same few kinds of marker; the parser knows those and no family.
"""

from enum import StrEnum
from typing import Literal

import msgspec
import regex

from moet_core.errors import ConfigError

__all__ = ["FAMILIES", "Grammar", "Mark", "family"]


class Mark(StrEnum):
    """The kinds of marker."""

    THINK_OPEN = "think_open"
    THINK_CLOSE = "think_close"
    SECTION_OPEN = "section_open"  # around all calls of a reply
    SECTION_CLOSE = "section_close"
    CALL_OPEN = "call_open"
    CALL_CLOSE = "call_close"
    SEPARATOR = "separator"  # between a call's head and its JSON
    KEY_OPEN = "key_open"
    KEY_CLOSE = "key_close"
    VALUE_OPEN = "value_open"
    VALUE_CLOSE = "value_close"
    MANGLED = "mangled"  # opens a call or a value, but does not say which
    NOISE = "noise"  # means nothing in a reply: turn and end tokens, mangled tags


class Grammar(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The reply format of a family.

    Attributes:
        name: of the family.
        marks: kind of marker to regular expression. Every match begins with `<`, ends with `>`,
            is at most `MAX_MARK` characters long, and contains no other `<`. What a tag says of
            itself is in the groups `tool`, `parameter` (their names) and `string` ("true" or
            "false").
        spelling: how a template writes the markers that open and close things around values.
        arguments: "tagged" (one marked value for each parameter) or "json" (one JSON object).
        head: where the name of a JSON call is: "name" (all before the separator), "id" (an id
            that holds the name, before the separator) or "after" (after the separator).
        turn: what the prompt ends with before the reply, apart from thinking markers.
        thinks: the default of models of this family: "prompt" (the prompt opens the thinking),
            "model" (the model does, or does not) or "never" (unless the request turns it on).
    """

    name: str
    marks: dict[Mark, str]
    spelling: dict[Mark, str]
    arguments: Literal["tagged", "json"]
    head: Literal["name", "id", "after"] = "name"
    turn: str
    thinks: Literal["prompt", "model", "never"]


MAX_MARK = 640


def _literals(marks: dict[Mark, str | tuple[str, ...]]) -> dict[Mark, str]:
    """Turn the spellings of markers into expressions."""
    as_tuples = {mark: (it,) if isinstance(it, str) else it for mark, it in marks.items()}
    return {mark: "|".join(map(regex.escape, it)) for mark, it in as_tuples.items()}


_THINK: dict[Mark, str | tuple[str, ...]] = {
    Mark.THINK_OPEN: "<think>",
    Mark.THINK_CLOSE: "</think>",
}

_GLM = _literals(
    {
        **_THINK,
        Mark.CALL_OPEN: "<tool_call>",
        Mark.CALL_CLOSE: "</tool_call>",
        Mark.KEY_OPEN: "<arg_key>",
        Mark.KEY_CLOSE: "</arg_key>",
        Mark.VALUE_OPEN: "<arg_value>",
        Mark.VALUE_CLOSE: "</arg_value>",
        Mark.NOISE: ("<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
    }
)

_KIMI = _literals(
    {
        **_THINK,
        Mark.SECTION_OPEN: ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        Mark.SECTION_CLOSE: ("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        Mark.CALL_OPEN: ("<|tool_call_begin|>", "<|func_start|>"),
        Mark.CALL_CLOSE: ("<|tool_call_end|>", "<|func_end|>"),
        Mark.SEPARATOR: "<|tool_call_argument_begin|>",
        Mark.NOISE: "<|im_end|>",
    }
)

_DEEPSEEK_TURNS = ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")

_DEEPSEEK_V3 = _literals(
    {
        **_THINK,
        Mark.SECTION_OPEN: "<｜tool▁calls▁begin｜>",
        Mark.SECTION_CLOSE: "<｜tool▁calls▁end｜>",
        Mark.CALL_OPEN: "<｜tool▁call▁begin｜>",
        Mark.CALL_CLOSE: "<｜tool▁call▁end｜>",
        Mark.SEPARATOR: "<｜tool▁sep｜>",
        Mark.NOISE: _DEEPSEEK_TURNS,
    }
)


def _dsml() -> dict[Mark, str]:
    """DSML tags as models write them: full-width or ASCII pipes, one or two, blanks around."""
    bar = r" {0,2}[|｜]{1,2} {0,2}"
    lead, end = f"<{bar}DSML{bar}", " {0,4}>"
    close = f"< ?/{bar}DSML{bar}"
    section = "(?:tool_calls|function_calls|tool_use)"

    def attribute(name: str, value: str) -> str:
        return rf"""\s{{1,4}}{name} ?= ?["']{value}["']"""

    text = r"""[^"'<>\n]{1,256}"""
    short = text.replace("256", "32")
    other = attribute("[a-z_]{1,12}", short)
    kind = attribute("string", "(?P<string>[Tt]rue|[Ff]alse)")
    kinds = f"(?:{kind}|{other}){{0,2}}"
    # Of a tag that is none of the others: whatever follows its first attribute.
    loose = r"(?:\s{1,4}\w{1,20} ?=[^<>]{0,400})? {0,4}/?>"
    return {
        **_literals(_THINK),
        Mark.SECTION_OPEN: f"{lead}{section}{end}",
        Mark.SECTION_CLOSE: f"{close}{section}{end}",
        Mark.CALL_OPEN: (
            f"{lead}invoke(?:{other}){{0,2}}{attribute('name', f'(?P<tool>{text})')}"
            f"(?:{other}){{0,2}}{end}"
        ),
        Mark.CALL_CLOSE: f"{close}invoke{end}",
        Mark.VALUE_OPEN: (
            f"{lead}parameter{kinds}{attribute('name', f'(?P<parameter>{text})')}{kinds}{end}"
        ),
        Mark.VALUE_CLOSE: f"{close}parameter{end}",
        Mark.MANGLED: f"{lead}(?:invoke|parameter){loose}",
        Mark.NOISE: "|".join(
            [*map(regex.escape, _DEEPSEEK_TURNS), rf"<(?: ?/)?{bar}DSML{bar}\w{{0,20}}{loose}"]
        ),
    }


_GLM_SPELLING = {
    Mark.CALL_OPEN: "<tool_call>",
    Mark.CALL_CLOSE: "</tool_call>",
    Mark.VALUE_CLOSE: "</arg_value>",
}
_DEEPSEEK_V3_SPELLING = {
    Mark.SECTION_OPEN: "<｜tool▁calls▁begin｜>",
    Mark.CALL_OPEN: "<｜tool▁call▁begin｜>",
    Mark.CALL_CLOSE: "<｜tool▁call▁end｜>",
}
_DSML_SPELLING = {
    Mark.VALUE_CLOSE: "</｜DSML｜parameter>",
    Mark.CALL_CLOSE: "</｜DSML｜invoke>",
}

FAMILIES: dict[str, Grammar] = {
    grammar.name: grammar
    for grammar in (
        Grammar(
            name="glm45",
            marks=_GLM,
            spelling=_GLM_SPELLING,
            arguments="tagged",
            turn="<|assistant|>",
            thinks="model",
        ),
        Grammar(
            name="glm47",
            marks=_GLM,
            spelling=_GLM_SPELLING,
            arguments="tagged",
            turn="<|assistant|>",
            thinks="prompt",
        ),
        Grammar(
            name="kimi_k2",
            marks=_KIMI,
            spelling={
                Mark.SECTION_OPEN: "<|tool_calls_section_begin|>",
                Mark.CALL_OPEN: "<|tool_call_begin|>",
                Mark.CALL_CLOSE: "<|tool_call_end|>",
            },
            arguments="json",
            head="id",
            turn="<|im_middle|>",
            thinks="model",
        ),
        Grammar(
            name="deepseek_v3",
            marks=_DEEPSEEK_V3,
            spelling=_DEEPSEEK_V3_SPELLING,
            arguments="json",
            head="after",
            turn="<｜Assistant｜>",
            thinks="model",
        ),
        Grammar(
            name="deepseek_v31",
            marks=_DEEPSEEK_V3,
            spelling=_DEEPSEEK_V3_SPELLING,
            arguments="json",
            turn="<｜Assistant｜>",
            thinks="never",
        ),
        Grammar(
            name="deepseek_v32",
            marks=_dsml(),
            spelling=_DSML_SPELLING,
            arguments="tagged",
            turn="<｜Assistant｜>",
            thinks="never",
        ),
        Grammar(
            name="deepseek_v4",
            marks=_dsml(),
            spelling=_DSML_SPELLING,
            arguments="tagged",
            turn="<｜Assistant｜>",
            thinks="never",
        ),
    )
}


def family(name: str) -> Grammar:
    """Return the grammar of a family.

    Raises:
        ConfigError: no such family.
    """
    try:
        return FAMILIES[name]
    except KeyError:
        raise ConfigError(
            f"There is no reply format {name!r}; there are {', '.join(FAMILIES)}."
        ) from None
