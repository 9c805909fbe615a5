"""Reads the replies of GLM, Kimi and DeepSeek models: thinking, answer and tool calls.

It needs no vLLM and no GPU; `vllm_adapters` is what the plugin registers with vLLM.
"""

from moet_vllm.parsers.events import (
    Arguments,
    Call,
    CallEnd,
    CallStart,
    Content,
    Event,
    Fault,
    FaultKind,
    Message,
    Reasoning,
    collect,
)
from moet_vllm.parsers.grammar import FAMILIES, Grammar, Mark, family
from moet_vllm.parsers.parser import Parser, ToolChoice, make_ids, parse
from moet_vllm.parsers.schema import Tool, read_tools
from moet_vllm.parsers.thinking import Thinking, thinking_of_prompt

__all__ = [
    "FAMILIES",
    "Arguments",
    "Call",
    "CallEnd",
    "CallStart",
    "Content",
    "Event",
    "Fault",
    "FaultKind",
    "Grammar",
    "Mark",
    "Message",
    "Parser",
    "Reasoning",
    "Thinking",
    "Tool",
    "ToolChoice",
    "collect",
    "family",
    "make_ids",
    "parse",
    "read_tools",
    "thinking_of_prompt",
]
