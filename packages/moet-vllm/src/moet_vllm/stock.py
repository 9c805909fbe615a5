"""vLLM's own FP4 expert layer, to measure ours against: Marlin, what it selects on sm_90."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__all__ = ["check", "marlin_layer"]

_NVFP4_GROUP, _MXFP4_GROUP = 16, 32


def check() -> None:
    """See whether vLLM's kernels are here.

    Raises:
        ImportError: vLLM is not installed, or as a build without GPU kernels.
    """
    from vllm import _custom_ops  # noqa: F401 - registers the kernels

    if not hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm"):
        raise ImportError("the vLLM that is installed has no GPU kernels")


def marlin_layer(
    mxfp4: bool, hidden: int, intermediate: int, experts: int, swiglu_limit: float | None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a layer of random experts as vLLM 0.24.0 serves them, on the current GPU.

    Args:
        mxfp4: MXFP4 (DeepSeek-V4) instead of modelopt NVFP4.
        hidden: H.
        intermediate: I of a rank.
        experts: E.
        swiglu_limit: Clamp of gate and up, None without one.

    Returns:
        A function of x bfloat16 [T, H], weights float32 [T, k] and ids int32 [T, k].
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.scalar_type import scalar_types

    w13, w2, scales13, scales2, global13, global2 = (
        _mxfp4(hidden, intermediate, experts) if mxfp4 else _nvfp4(hidden, intermediate, experts)
    )

    def layer(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.empty_like(x)
        fused_marlin_moe(
            hidden_states=x,
            w1=w13,
            w2=w2,
            bias1=None,
            bias2=None,
            w1_scale=scales13,
            w2_scale=scales2,
            topk_weights=weights,
            topk_ids=ids,
            quant_type_id=scalar_types.float4_e2m1f.id,
            global_num_experts=experts,
            global_scale1=global13,
            global_scale2=global2,
            moe_sum=ops.moe_sum,
            output=out,
            clamp_limit=swiglu_limit,
        )
        return out

    return layer


def _nibbles(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")


def _described(hidden: int, intermediate: int, experts: int) -> Any:
    """Return what vLLM's preparation reads of a layer."""
    return SimpleNamespace(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size_per_partition=intermediate,
        params_dtype=torch.bfloat16,
    )


def _nvfp4(hidden: int, intermediate: int, experts: int) -> tuple[Any, ...]:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
        prepare_nvfp4_moe_layer_for_marlin,
    )

    layer = _described(hidden, intermediate, experts)

    def scales(*shape: int) -> Tensor:
        return torch.randint(40, 73, shape, device="cuda").byte().view(torch.float8_e4m3fn)

    w13, scales13, global13, w2, scales2, global2 = prepare_nvfp4_moe_layer_for_marlin(
        layer,
        w13=_nibbles(experts, 2 * intermediate, hidden // 2),
        w13_scale=scales(experts, 2 * intermediate, hidden // _NVFP4_GROUP),
        w13_scale_2=torch.full((experts,), 0.01, device="cuda"),
        w2=_nibbles(experts, hidden, intermediate // 2),
        w2_scale=scales(experts, hidden, intermediate // _NVFP4_GROUP),
        w2_scale_2=torch.full((experts,), 0.01, device="cuda"),
        is_act_and_mul=True,
    )
    return w13, w2, scales13, scales2, global13, global2


def _mxfp4(hidden: int, intermediate: int, experts: int) -> tuple[Any, ...]:
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
        prepare_moe_mxfp4_layer_for_marlin,
    )

    def scales(*shape: int) -> Tensor:
        return torch.randint(118, 125, shape, device="cuda").byte()

    w13, w2, scales13, scales2, _, _ = prepare_moe_mxfp4_layer_for_marlin(
        _described(hidden, intermediate, experts),
        w13=_nibbles(experts, 2 * intermediate, hidden // 2),
        w2=_nibbles(experts, hidden, intermediate // 2),
        w13_scale=scales(experts, 2 * intermediate, hidden // _MXFP4_GROUP),
        w2_scale=scales(experts, hidden, intermediate // _MXFP4_GROUP),
        w13_bias=None,
        w2_bias=None,
    )
    return w13, w2, scales13, scales2, None, None
