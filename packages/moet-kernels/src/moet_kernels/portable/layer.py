"""Launches of the portable kernels for one expert layer; nothing here waits for the device."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from moet_core.row import RowLayout
from moet_kernels.portable import decode, ptx

__all__ = ["DECODE_TOKENS", "Tier", "add_parts", "combine_parts"]

DECODE_TOKENS = 16
"""Most tokens that the decode kernels take; a token's result is the same for every number."""

_GATE_UP = {"BLOCKS": 2, "WARPS": 4, "num_warps": 4, "num_stages": 1}
_DOWN = {"BLOCKS": 4, "WARPS": 4, "num_warps": 4, "num_stages": 1}
_COMBINE_BLOCK = 1024


class Tier(NamedTuple):
    """Encoded experts: rows uint8 [slots, row_bytes] and the slot int32 [E] of each, -1 if none."""

    pool: Tensor
    slot_of: Tensor
    layout: RowLayout

    @property
    def constants(self) -> tuple[Any, ...]:
        """What kernels know of rows when they are compiled."""
        layout = self.layout
        return (
            layout.codec,
            layout.row_bytes,
            layout.codes13.offset,
            layout.scales13.offset,
            layout.codes2.offset,
            layout.scales2.offset,
            layout.tensor_scales.offset,
        )


def add_parts(
    parts: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    base: Tier,
    fine: Tier | None,
    *,
    swiglu_limit: float,
    missing: Tensor,
    wanted: Tensor,
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
    if topk_ids.numel():
        _decode_parts(parts, x, topk_ids, base, fine, swiglu_limit, missing, wanted)


def combine_parts(
    parts: Tensor, topk_weights: Tensor, topk_ids: Tensor, base: Tier, fine: Tier | None
) -> Tensor:
    """Return the weighted sum bfloat16 [T, H] of the parts of present experts, k ascending."""
    tokens, top_k = topk_ids.shape
    hidden = parts.shape[1]
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=parts.device)
    if tokens:
        block = min(_COMBINE_BLOCK, triton.next_power_of_2(hidden))
        decode.combine[(tokens, triton.cdiv(hidden, block))](
            parts,
            topk_weights,
            topk_ids,
            base.slot_of,
            (fine or base).slot_of,
            out,
            len(base.slot_of),
            HIDDEN=hidden,
            TOP_K=top_k,
            FINE=fine is not None,
            BLOCK=block,
            enable_fp_fusion=False,  # multiplied, then added: what plain torch does
        )
    return out


def _decode_parts(
    parts: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    base: Tier,
    fine: Tier | None,
    swiglu_limit: float,
    missing: Tensor,
    wanted: Tensor,
) -> None:
    hidden, intermediate = base.layout.hidden, base.layout.intermediate
    pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    activated = torch.empty(pairs, intermediate, dtype=torch.bfloat16, device=x.device)
    other = fine or base
    tables = (topk_ids, base.slot_of, base.pool, other.slot_of, other.pool)
    counts = (pairs, len(base.slot_of), ptx.W2_LEVELS)
    constants = {
        "HIDDEN": hidden,
        "INTERMEDIATE": intermediate,
        "BASE": base.constants,
        "FINE": fine.constants if fine else (),
        # one size for all numbers of tokens, so that there is one kernel
        "PAIRS": triton.next_power_of_2(DECODE_TOKENS * top_k),
    }
    tiles = triton.cdiv(intermediate, 16 * _GATE_UP["BLOCKS"])
    decode.gate_up[(tiles, pairs)](
        x,
        *tables,
        activated,
        missing,
        wanted,
        *counts,
        swiglu_limit,
        TOP_K=top_k,
        CLAMP=swiglu_limit > 0,
        **constants,
        **_GATE_UP,
    )
    tiles = triton.cdiv(hidden, 16 * _DOWN["BLOCKS"])
    decode.down[(tiles, pairs)](activated, *tables, parts, *counts, **constants, **_DOWN)
