"""TinyMoE: a trained Glm4Moe with NVFP4 experts that ships with moet, and its held-out sets.

bench/tinymoe of the repository made both; its README says from what.
"""

from pathlib import Path
from typing import Any

import msgspec

__all__ = ["CHECKPOINT", "Case", "HeldOut", "Text", "held_out"]

CHECKPOINT = Path(__file__).parent / "checkpoint"


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question with one right answer: the text `answer`, or the tool call `call`.

    Attributes:
        skill: "arithmetic", "needle", "tool_calls" or "chat".
        messages: the conversation up to the question.
        answer: the whole reply.
        tools: functions offered, as the chat API wants them.
        call: {"name": ..., "arguments": {...}}, typed.
    """

    skill: str
    messages: list[dict[str, Any]]
    answer: str | None = None
    tools: list[dict[str, Any]] | None = None
    call: dict[str, Any] | None = None


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The beginning of a file that training never saw; `context` is "short" or "2k"."""

    kind: str
    context: str
    text: str


class HeldOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that `moet bench quality` asks."""

    cases: list[Case]
    texts: list[Text]


def held_out() -> HeldOut:
    """Read the held-out sets."""
    data = (Path(__file__).parent / "held_out.json").read_bytes()
    return msgspec.json.decode(data, type=HeldOut)
