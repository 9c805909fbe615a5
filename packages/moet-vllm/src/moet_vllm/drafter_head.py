"""The out-of-tree ParallelLMHead: a drafter's is quantised as the model's own.

vLLM gives each MTP layer a head of its own, loads the model's `lm_head` into it, and puts the
model's own head in its place once everything is loaded. Until then it must have the model's head's
precision. vLLM asks the checkpoint's list of unquantised layers for it by another name
(`model.layers.92.head`), which such lists do not hold, and then builds an NVFP4 head that bf16
weights do not fit into (https://github.com/vllm-project/vllm/issues/57532).
"""

import re
from typing import Any

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from moet_vllm.routed_experts import has_settings

__all__ = ["MoetParallelLMHead", "is_drafter_head"]

_DRAFTER_HEAD = re.compile(r"(^|\.)layers\.\d+\.(shared_head\.)?head$")


def is_drafter_head(prefix: str) -> bool:
    """Tell a head inside a layer, which only MTP layers have, from the model's own."""
    return _DRAFTER_HEAD.search(prefix) is not None


class MoetParallelLMHead(ParallelLMHead):
    """ParallelLMHead that goes by the name of the model's head where it only stands in for it."""

    def __init__(self, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        if has_settings(get_current_vllm_config()) and is_drafter_head(prefix):
            prefix = "lm_head"
        super().__init__(*args, prefix=prefix, **kwargs)
