"""Launches for more tokens than the decode kernels take: pairs sorted by expert, then tiles.

The tiles are CUDA's on sm_90, for rows that they divide, and Triton's elsewhere.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from moet_kernels import arch
from moet_kernels.portable import grouping, prefill, ptx
from moet_kernels.portable.native_tiles import CutsOfTiers, Tiles, cuts_for, tiles_for
from moet_kernels.portable.tier import Tier, row_constants

__all__ = [
    "TileShape",
    "many_parts",
    "mark_routed",
    "native_parts",
    "native_tiles_of",
    "tile_shape",
]

_SCAN_BLOCK = 1024
_ARRANGE_BLOCK = 1024


class TileShape(NamedTuple):
    """How large tiles are: pairs of a group, row blocks and warps of each kernel, stages."""

    group: int
    gate_up_blocks: int
    gate_up_warps: int
    down_blocks: int
    down_warps: int
    stages: int


def tile_shape(number: int, pairs: int, experts: int) -> TileShape:
    """Choose tiles for an architecture (90 for sm_90) and a number of pairs.

    The number of blocks is that of warps (or of pairs of them), so that operands stay in the
    registers that decoded them. The result of a pair does not depend on the choice.
    """
    roomy = arch.shared_memory_bytes(number) > 128 * 1024
    large = roomy and arch.has_async_matrix_units(number) and pairs > 64 * experts
    # On an H200 under Triton 3.6, down tiles of 8 blocks in 3 stages gave wrong sums and NaN with
    # fp4-mx, on the same inputs that 1 and 2 stages, and 4 blocks in 3 stages, compute rightly.
    return TileShape(128, 4, 4, 8, 8, 2) if large else TileShape(64, 4, 4, 4, 4, 3 if roomy else 2)


def mark_routed(
    topk_ids: Tensor,
    base: Tier,
    fine: Tier | None,
    missing: Tensor | None,
    wanted: Tensor | None,
) -> None:
    """Set `wanted` of every expert routed to, and count the distinct absent ones in `missing`."""
    if missing is None and wanted is None:
        return
    experts = len(base.slot_of)
    grouping.mark[(experts + 1,)](
        topk_ids,
        base.slot_of,
        (fine or base).slot_of,
        topk_ids if missing is None else missing,  # not touched then
        topk_ids if wanted is None else wanted,
        topk_ids.numel(),
        experts,
        FINE=fine is not None,
        COUNT=missing is not None,
        MARK=wanted is not None,
        BLOCK=_SCAN_BLOCK,
    )


def many_parts(
    parts: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    base: Tier,
    fine: Tier | None,
    swiglu_limit: float,
    shape: TileShape | None = None,
) -> None:
    """Set the rows of parts float32 [T * k, H] whose expert is present; see `layer.add_parts`.

    `shape` asks for Triton's kernels; None leaves the choice to this function.
    """
    pairs, experts = topk_ids.numel(), len(base.slot_of)
    found = native_tiles_of(x.device, pairs, experts, base, fine) if shape is None else None
    if found is not None:
        native_parts(*found, parts, x, topk_ids, base, fine, swiglu_limit)
        return
    hidden, intermediate = base.layout.hidden, base.layout.intermediate
    top_k = topk_ids.shape[1]
    shape = shape or tile_shape(_architecture(x.device), pairs, experts)
    order, expert_of = _sorted(topk_ids, base, fine, shape.group)
    other = fine or base
    base_x = _arranged(x, base)
    fine_x = base_x if _spread(other) == _spread(base) else _arranged(x, other)
    activated = torch.empty(pairs, intermediate, dtype=torch.bfloat16, device=x.device)
    tables = (order, expert_of, base.slot_of, base.pool, other.slot_of, other.pool)
    constants: dict[str, Any] = {
        "HIDDEN": hidden,
        "INTERMEDIATE": intermediate,
        "BASE": row_constants(base.layout),
        "FINE": row_constants(fine.layout) if fine else (),
        "GROUP": shape.group,
        "num_stages": shape.stages,
    }
    tiles = triton.cdiv(intermediate, 16 * shape.gate_up_blocks)
    prefill.gate_up_tiles[(tiles, len(expert_of))](
        base_x,
        fine_x,
        *tables,
        activated,
        experts,
        ptx.W2_LEVELS,
        swiglu_limit,
        TOP_K=top_k,
        CLAMP=swiglu_limit > 0,
        BLOCKS=shape.gate_up_blocks,
        num_warps=shape.gate_up_warps,
        **constants,
    )
    tiles = triton.cdiv(hidden, 16 * shape.down_blocks)
    prefill.down_tiles[(tiles, len(expert_of))](
        activated,
        *tables,
        parts,
        experts,
        ptx.W2_LEVELS,
        BLOCKS=shape.down_blocks,
        num_warps=shape.down_warps,
        **constants,
    )


def native_tiles_of(
    device: torch.device, pairs: int, experts: int, base: Tier, fine: Tier | None
) -> tuple[Tiles, CutsOfTiers] | None:
    """Return the CUDA kernels that compute so many pairs, None if Triton's do."""
    cuts = cuts_for(pairs, experts, base.layout, fine.layout if fine else None)
    native = tiles_for(device) if cuts else None
    return None if native is None or cuts is None else (native, cuts)


def native_parts(
    native: Tiles,
    cuts: CutsOfTiers,
    parts: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    base: Tier,
    fine: Tier | None,
    swiglu_limit: float,
) -> None:
    """Do what `many_parts` does in CUDA."""
    groups = _sorted(topk_ids, base, fine, cuts[base.layout.codec][0].vectors)
    native.add_parts(parts, x, topk_ids.shape[1], groups, cuts, base, fine, swiglu_limit)


def _architecture(device: torch.device) -> int:
    major, minor = arch.capability(device) or (8, 0)  # the interpreter has no shared memory
    return 10 * major + minor


def _sorted(topk_ids: Tensor, base: Tier, fine: Tier | None, group: int) -> tuple[Tensor, Tensor]:
    """Return `order` and `expert_of` of `grouping.sort`."""
    pairs, experts = topk_ids.numel(), len(base.slot_of)
    groups = min(pairs, triton.cdiv(pairs, group) + experts)
    counts, order, expert_of = (
        torch.empty(length, dtype=torch.int32, device=topk_ids.device)
        for length in (experts, groups * group, groups)
    )
    grouping.count[(experts,)](
        topk_ids,
        base.slot_of,
        (fine or base).slot_of,
        counts,
        pairs,
        experts,
        FINE=fine is not None,
        BLOCK=_SCAN_BLOCK,
    )
    grouping.sort[(experts,)](
        topk_ids,
        counts,
        order,
        expert_of,
        pairs,
        experts,
        groups,
        GROUP=group,
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK=_SCAN_BLOCK,
    )
    return order, expert_of


def _spread(tier: Tier) -> bool:
    return tier.layout.codec != "w2"


def _arranged(x: Tensor, tier: Tier) -> Tensor:
    """Return x with columns in the order that the tier's operands have."""
    out, hidden = torch.empty_like(x), x.shape[1]
    tiles = triton.cdiv(hidden, _ARRANGE_BLOCK)
    prefill.arrange[(len(x), tiles)](
        x, out, HIDDEN=hidden, SPREAD=_spread(tier), BLOCK=_ARRANGE_BLOCK
    )
    return out
