"""Chat encoding inside vLLM: earlier calls byte for byte, and DeepSeek-V4's reasoning effort.

`--tokenizer-mode moet_FAMILY` selects it. A mode is a tokenizer, which is vLLM's own, and a
renderer, which prepares the messages and leaves the rest to vLLM's. vLLM loads the tokenizer of a
mode first, from here; that registers the renderers, so that processes without chats import none.
"""

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

from vllm.renderers.deepseek_v4 import DeepseekV4Renderer
from vllm.renderers.hf import HfRenderer
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.tokenizers.deepseek_v4 import DeepseekV4Tokenizer
from vllm.tokenizers.deepseek_v4_encoding import (
    REASONING_EFFORT_MAX,
    bos_token,
    encode_messages,
)
from vllm.tokenizers.hf import CachedHfTokenizer
from vllm.transformers_utils.repo_utils import get_hf_file_bytes

from moet_vllm.parsers.effort import (
    ENCODER_FILE,
    Efforts,
    asked_to_think,
    effort_of,
    read_efforts,
)
from moet_vllm.parsers.grammar import Grammar, family
from moet_vllm.parsers.history import (
    TEMPLATE_FAMILIES,
    deepseek_v4_messages,
    template_messages,
    with_tools,
)

__all__ = ["CachedHfTokenizer", "DeepseekV4Tokenizer", "MoetDeepseekV4Renderer", "MoetHfRenderer"]


class MoetHfRenderer(HfRenderer):
    """Has the checkpoint's template write earlier calls as the model did; sets `grammar`."""

    grammar: ClassVar[Grammar]

    def render_messages(self, messages: list[Any], params: Any) -> Any:
        """Render a conversation."""
        return super().render_messages(template_messages(self.grammar, messages), params)

    async def render_messages_async(self, messages: list[Any], params: Any) -> Any:
        """Render a conversation."""
        return await super().render_messages_async(
            template_messages(self.grammar, messages), params
        )


class MoetDeepseekV4Renderer(DeepseekV4Renderer):
    """Encodes earlier calls as the model wrote them, and the effort as the checkpoint says it."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self._efforts = _find_efforts(config.model_config)

    def render_messages(self, messages: list[Any], params: Any) -> Any:
        """Render a conversation."""
        return super().render_messages(deepseek_v4_messages(messages), params)

    async def render_messages_async(self, messages: list[Any], params: Any) -> Any:
        """Render a conversation."""
        return await super().render_messages_async(deepseek_v4_messages(messages), params)

    def _apply_chat_template(
        self,
        conversation: Sequence[Any],
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        tokenize: bool = True,
        **settings: Any,
    ) -> str | list[int]:
        effort = effort_of(settings.get("reasoning_effort"))
        thinks = bool(asked_to_think(settings))
        body = encode_messages(
            with_tools(conversation, tools),
            thinking_mode="thinking" if thinks else "chat",
            drop_thinking=settings.get("drop_thinking", True),
            add_default_bos_token=False,
        )
        prompt = bos_token + (self._efforts.text(effort) if thinks else "") + body
        if not tokenize:
            return prompt
        limits = {key: settings[key] for key in ("truncation", "max_length") if key in settings}
        return self.get_tokenizer().encode(prompt, add_special_tokens=False, **limits)


def _find_efforts(model: Any) -> Efforts:
    source = get_hf_file_bytes(ENCODER_FILE, model.model, model.revision)
    if source is not None:
        return read_efforts(source.decode(), f"{model.model}/{ENCODER_FILE}")
    logging.getLogger("vllm.moet").warning(
        "%s has no %s: reasoning_effort is that of the preview of DeepSeek-V4 (low and high are"
        " the same). Put the file of the original checkpoint there if it is a later one.",
        model.model,
        ENCODER_FILE,
    )
    return Efforts(low="", high="", max=REASONING_EFFORT_MAX, default="high")


def _register_renderers() -> None:
    for name in TEMPLATE_FAMILIES:
        renderer = f"Renderer_{name}"
        globals()[renderer] = type(
            renderer, (MoetHfRenderer,), {"grammar": family(name), "__module__": __name__}
        )
        RENDERER_REGISTRY.register(f"moet_{name}", __name__, renderer)
    RENDERER_REGISTRY.register("moet_deepseek_v4", __name__, MoetDeepseekV4Renderer.__name__)


_register_renderers()
