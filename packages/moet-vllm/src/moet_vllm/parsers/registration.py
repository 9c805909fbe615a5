"""Tells vLLM the names of our parsers; nothing is imported before one is used."""

import sys

from moet_vllm.parsers.grammar import FAMILIES

__all__ = ["register_parsers"]

_ADAPTERS = "moet_vllm.parsers.vllm_adapters"
_TOOL_PARSERS = "vllm.tool_parsers.abstract_tool_parser"


def register_parsers() -> None:
    """Register `moet_FAMILY` as reasoning parser and as tool parser, for every family."""
    from vllm.reasoning import ReasoningParserManager

    for name in FAMILIES:
        ReasoningParserManager.register_lazy_module(
            f"moet_{name}", _ADAPTERS, f"ReasoningParser_{name}"
        )
    # The processes that serve have imported this before they load plugins. The others have no
    # use for it, and importing it takes seconds.
    tool_parsers = sys.modules.get(_TOOL_PARSERS)
    if tool_parsers is not None:
        for name in FAMILIES:
            tool_parsers.ToolParserManager.register_lazy_module(
                f"moet_{name}", _ADAPTERS, f"ToolParser_{name}"
            )
