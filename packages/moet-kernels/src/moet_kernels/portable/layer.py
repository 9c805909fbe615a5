"""Launches of the portable kernels for one expert layer; nothing here waits for the device."""

from typing import Any

import torch
import triton
from torch import Tensor

from moet_kernels.portable import decode
from moet_kernels.portable.few import DECODE_TOKENS, few_parts, native_kernels
from moet_kernels.portable.many import many_parts, mark_routed
from moet_kernels.portable.tier import Tier

__all__ = ["add_parts", "combine_all", "combine_parts", "expert_layer"]

_COMBINE_BLOCK = 1024

_PARTS_BYTES = 2**30
"""Bound on the parts held at a time; more tokens are computed in portions."""


def add_parts(
    parts: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    base: Tier,
    fine: Tier | None,
    *,
    swiglu_limit: float,
    missing: Tensor | None = None,
    wanted: Tensor | None = None,
) -> None:
    """Set the rows of parts whose expert is present; see `moet_kernels.experts.add_parts`.

    Args:
        parts: float32 [T * k, H].
        x: bfloat16 [T, H].
        topk_ids: int32 or int64 [T, k], contiguous. Ids outside 0..E-1 count as absent experts.
        base: Tier of experts that are not in `fine`.
        fine: Tier that is preferred where it has an expert, or None.
        swiglu_limit: As for `experts`, 0 for none.
        missing: int32 or int64 [1]; the number of distinct absent experts is added.
        wanted: uint8 [E]; set to 1 for every expert routed to.
    """
    if not topk_ids.numel():
        return
    if len(x) <= DECODE_TOKENS:
        few_parts(parts, x, topk_ids, base, fine, swiglu_limit, missing, wanted)
    else:
        mark_routed(topk_ids, base, fine, missing, wanted)
        many_parts(parts, x, topk_ids, base, fine, swiglu_limit)


def expert_layer(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    base: Tier,
    fine: Tier | None,
    *,
    swiglu_limit: float,
    missing: Tensor | None = None,
    wanted: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, bfloat16 [T, H]; see `add_parts`."""
    tokens, top_k = topk_ids.shape
    at_a_time = max(DECODE_TOKENS, _PARTS_BYTES // (4 * base.layout.hidden * max(top_k, 1)))
    if tokens <= at_a_time:
        parts = torch.empty(tokens * top_k, x.shape[1], dtype=torch.float32, device=x.device)
        options: dict[str, Any] = {
            "swiglu_limit": swiglu_limit,
            "missing": missing,
            "wanted": wanted,
        }
        native = native_kernels(x, topk_ids, base, fine) if tokens <= DECODE_TOKENS else None
        if native is not None and topk_ids.numel():
            native.add_parts(parts, x, topk_ids, base, fine, **options)
            out = torch.empty_like(x)
            native.combine(out, parts, topk_weights, topk_ids, base, fine, after=True)
            return out
        add_parts(parts, x, topk_ids, base, fine, **options)
        return combine_parts(parts, topk_weights, topk_ids, base, fine)
    mark_routed(topk_ids, base, fine, missing, wanted)  # of all portions, so that none counts twice
    out = torch.empty_like(x)
    portion = -(-tokens // -(-tokens // at_a_time))  # as few as possible, of equal size
    for start in range(0, tokens, portion):
        part = slice(start, start + portion)
        ids = topk_ids[part]
        parts = torch.empty(ids.numel(), x.shape[1], dtype=torch.float32, device=x.device)
        many_parts(parts, x[part], ids, base, fine, swiglu_limit)
        out[part] = combine_parts(parts, topk_weights[part], ids, base, fine)
    return out


def combine_parts(
    parts: Tensor, topk_weights: Tensor, topk_ids: Tensor, base: Tier, fine: Tier | None
) -> Tensor:
    """Return the weighted sum bfloat16 [T, H] of the parts of present experts, k ascending."""
    fine_slots = None if fine is None else fine.slot_of
    return _combine(parts, topk_weights, topk_ids, base.slot_of, fine_slots)


def combine_all(parts: Tensor, topk_weights: Tensor) -> Tensor:
    """Return the weighted sum bfloat16 [T, H] of all parts, those of absent experts being zero."""
    options: dict[str, Any] = {"dtype": torch.int32, "device": parts.device}
    present = torch.zeros(1, **options)
    return _combine(parts, topk_weights, torch.zeros(topk_weights.shape, **options), present, None)


def _combine(
    parts: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    base_slots: Tensor,
    fine_slots: Tensor | None,
) -> Tensor:
    tokens, top_k = topk_ids.shape
    hidden = parts.shape[1]
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=parts.device)
    if tokens:
        block = min(_COMBINE_BLOCK, triton.next_power_of_2(hidden))
        decode.combine[(tokens, triton.cdiv(hidden, block))](
            parts,
            topk_weights,
            topk_ids,
            base_slots,
            base_slots if fine_slots is None else fine_slots,
            out,
            len(base_slots),
            HIDDEN=hidden,
            TOP_K=top_k,
            FINE=fine_slots is not None,
            BLOCK=block,
            enable_fp_fusion=False,  # multiplied, then added: what plain torch does
        )
    return out
