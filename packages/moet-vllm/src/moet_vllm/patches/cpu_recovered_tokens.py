"""Lets vLLM's CPU build sample after a rejected draft."""

from typing import Any

from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.utils import cpu_triton_utils

from moet_core.errors import ConfigError
from moet_vllm.patches.patch import Patch

__all__ = ["PATCH"]


def _applies(vllm_config: Any) -> bool:
    # With a Triton that compiles for CPUs, vLLM runs its Triton kernel, which takes the argument.
    speculates = vllm_config.speculative_config is not None
    return speculates and current_platform.is_cpu() and not HAS_TRITON


def _apply(vllm_config: Any) -> None:
    if vllm_config.model_config.use_fp64_gumbel:
        raise ConfigError(
            "vLLM's CPU build samples recovered tokens in float32: --use-fp64-gumbel cannot be "
            "honoured beside speculative decoding. Leave one of them out."
        )
    # The runner hands out this wrapper before a model is made, so its content is exchanged.
    cpu_triton_utils.sample_recovered_tokens_kernel.func = _sample_recovered_tokens


def _sample_recovered_tokens(*args: Any, USE_FP64_GUMBEL: bool, **kwargs: Any) -> None:
    assert not USE_FP64_GUMBEL
    cpu_triton_utils._sample_recovered_tokens_kernel_impl(*args, **kwargs)


PATCH = Patch(
    name="cpu-recovered-tokens",
    target="vllm.utils.cpu_triton_utils:_sample_recovered_tokens_kernel_impl",
    reason="the CPU build's sampler of recovered tokens lacks the argument USE_FP64_GUMBEL that "
    "the rejection sampler passes, so that speculative decoding cannot start",
    upstream="https://github.com/vllm-project/vllm/pull/46069",
    sha256="71da1b958a0a2d6123fc83fc09b48dcc1e54b6aa8f5d7d7dfe342c7c550ceac7",
    applies=_applies,
    apply=_apply,
)
