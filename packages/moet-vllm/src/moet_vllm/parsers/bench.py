"""What reading a reply costs: time a delta, and how it grows with the length."""

import time
from collections.abc import Callable, Sequence

from moet_core.results import Measurement, measurement
from moet_vllm.parsers.grammar import FAMILIES, Grammar, family
from moet_vllm.parsers.parser import Parser, ToolChoice
from moet_vllm.parsers.schema import read_tools
from moet_vllm.parsers.thinking import Thinking

__all__ = ["NOTES", "measure_parsers", "replies"]

DELTA = 4  # characters, about a token
SIZES = (25_000, 400_000)
SIZE = 100_000
NOTES = (
    f"a delta is {DELTA} characters; CPU time of one thread, from the construction of the parser "
    "to its end, over the number of deltas",
    f"content, value: {SIZE // 1000} KB of prose and of one string argument; calls: as much in "
    "short calls; angles: as much of '<', which may always begin a marker",
    "growth: time a delta at 400 KB over that at 25 KB, 1 for a reader that is linear",
)
TOOLS = read_tools(
    [
        {
            "name": "save",
            "parameters": {"properties": {"path": {"type": "string"}, "body": {"type": "string"}}},
        }
    ]
)
PROSE = "She looks at x < y, then says: it <b>works</b> - 3 out of 4 times.\n"


def call(grammar: Grammar, body: str) -> str:
    """Return a call of `save` as the family writes it."""
    text = body.replace("\n", "\\n")
    match grammar.name:
        case "glm45" | "glm47":
            return (
                f"<tool_call>save<arg_key>body</arg_key><arg_value>{body}</arg_value></tool_call>"
            )
        case "kimi_k2":
            begin = "<|tool_call_begin|>functions.save:0<|tool_call_argument_begin|>"
            return f'{begin}{{"body": "{text}"}}<|tool_call_end|>'
        case "deepseek_v3":
            begin = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>save\n```json\n"
            return f'{begin}{{"body": "{text}"}}\n```<｜tool▁call▁end｜>'
        case "deepseek_v31":
            begin = "<｜tool▁call▁begin｜>save<｜tool▁sep｜>"
            return f'{begin}{{"body": "{text}"}}<｜tool▁call▁end｜>'
    tag = '<｜DSML｜parameter name="body" string="true">'
    inner = f"{tag}{body}</｜DSML｜parameter>\n"
    return f'<｜DSML｜invoke name="save">\n{inner}</｜DSML｜invoke>\n'


def replies(grammar: Grammar, size: int) -> dict[str, str]:
    """Return replies of `size` characters or a little more, by what they are made of."""
    prose = PROSE * (size // len(PROSE) + 1)
    short = call(grammar, "ls -l")
    return {
        "content": prose[:size],
        "thinking": "<think>" + prose[:size] + "</think>",
        "value": call(grammar, prose[:size]),
        "calls": short * (size // len(short) + 1),
        "angles": "<" * size,
    }


def seconds_a_delta(grammar: Grammar, text: str) -> float:
    """Return the CPU time of reading a reply, over its number of deltas."""
    pieces = [text[at : at + DELTA] for at in range(0, len(text), DELTA)]
    started = time.process_time()
    parser = Parser(grammar, TOOLS, choice=ToolChoice("auto"), thinking=Thinking.MODEL)
    for piece in pieces:
        parser.feed(piece)
    parser.finish()
    return (time.process_time() - started) / len(pieces)


def measure_parsers(
    runs: int, say: Callable[[str], None], families: Sequence[str] = tuple(FAMILIES)
) -> list[Measurement]:
    """Measure every family.

    Args:
        runs: how often each reply is read.
        say: told what is measured next.
        families: which ones.
    """
    found: list[Measurement] = []
    for name in families:
        grammar = family(name)
        say(f"{name}: {runs} runs of {SIZE // 1000} KB")
        for what, text in replies(grammar, SIZE).items():
            samples = [seconds_a_delta(grammar, text) * 1e6 for _ in range(runs)]
            found.append(measurement(f"{name}: {what}", "us/delta", samples))
        lengths = {size: replies(grammar, size)["value"] for size in (SIZES[0], SIZES[-1])}
        ratios = [
            seconds_a_delta(grammar, lengths[SIZES[-1]])
            / seconds_a_delta(grammar, lengths[SIZES[0]])
            for _ in range(runs)
        ]
        found.append(measurement(f"{name}: growth", "ratio", ratios))
    return found
