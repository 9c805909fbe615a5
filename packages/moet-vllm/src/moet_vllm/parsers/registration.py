"""Tells vLLM the names of our parsers and chat encodings; each is imported when it is used."""

import sys

from moet_vllm.parsers.grammar import FAMILIES
from moet_vllm.parsers.history import TEMPLATE_FAMILIES

__all__ = ["register_encodings", "register_parsers"]

_ADAPTERS = "moet_vllm.parsers.vllm_adapters"
_CHAT = "moet_vllm.parsers.vllm_chat"
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


def register_encodings() -> None:
    """Register `moet_FAMILY` as tokenizer mode, for the families whose history is our own."""
    from vllm.tokenizers.registry import TokenizerRegistry

    modes = {f"moet_{name}": "CachedHfTokenizer" for name in TEMPLATE_FAMILIES}
    modes["moet_deepseek_v4"] = "DeepseekV4Tokenizer"
    for mode, tokenizer in modes.items():
        if mode not in TokenizerRegistry.tokenizers:
            TokenizerRegistry.register(mode, _CHAT, tokenizer)
