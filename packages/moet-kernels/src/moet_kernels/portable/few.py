"""Launches of the decode kernels, for at most 16 tokens: CUDA where it is right, else Triton."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from moet_core.row import RowLayout
from moet_kernels.portable import decode, ptx
from moet_kernels.portable.native import Native, native_for, takes
from moet_kernels.portable.tier import Tier, row_constants

__all__ = [
    "DECODE_TOKENS",
    "DOWN_SHAPE",
    "GATE_UP_SHAPE",
    "StreamShape",
    "few_parts",
    "launch_down",
    "launch_gate_up",
    "launch_options",
    "native_kernels",
    "native_kernels_of",
]

DECODE_TOKENS = 16
"""Most tokens that the decode kernels take; a token's result is the same for every number."""

MOST_TOP_K = 64
"""Experts of a token: what the CUDA kernels' division is exact for."""


class StreamShape(NamedTuple):
    """How a decode kernel is cut.

    Attributes:
        blocks: Row blocks of 16 a program computes, of each of gate and up for those two.
        warps: Warps of a program, each with its own part of the columns. The order of sums
            follows from it.
        stages: Loads under way at a time, 1 for those of one iteration.
        registers: Most registers of a thread; 4 programs of 4 warps share a processor with 128.
        registers_of_two: The same for kernels of two tiers. Without a bound the compiler aims at
            less than it needs, and spills.
    """

    blocks: int
    warps: int
    stages: int = 1
    registers: int = 128
    registers_of_two: int = 168


GATE_UP_SHAPE = StreamShape(2, 4)
DOWN_SHAPE = StreamShape(2, 4)


def few_parts(
    parts: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    base: Tier,
    fine: Tier | None,
    swiglu_limit: float,
    missing: Tensor | None = None,
    wanted: Tensor | None = None,
) -> None:
    """Set the rows of parts whose expert is present; see `layer.add_parts`."""
    native = native_kernels(x, topk_ids, base, fine)
    if native is not None:
        native.add_parts(parts, x, topk_ids, base, fine, swiglu_limit, missing, wanted)
        return
    activated = launch_gate_up(x, topk_ids, base, fine, swiglu_limit, missing, wanted)
    launch_down(parts, activated, topk_ids, base, fine)


def native_kernels(x: Tensor, topk_ids: Tensor, base: Tier, fine: Tier | None) -> Native | None:
    """Return the CUDA kernels if they compute such a layer, None if Triton's do."""
    layouts = [tier.layout for tier in (base, fine) if tier is not None]
    return native_kernels_of(x.device, topk_ids.shape[1], *layouts)


def native_kernels_of(device: torch.device, top_k: int, *layouts: RowLayout) -> Native | None:
    """Return the CUDA kernels if they compute layers of such rows, None if Triton's do."""
    if top_k > MOST_TOP_K or not takes(*layouts):
        return None
    return native_for(device)


def launch_gate_up(
    x: Tensor,
    topk_ids: Tensor,
    base: Tier,
    fine: Tier | None,
    swiglu_limit: float,
    missing: Tensor | None = None,
    wanted: Tensor | None = None,
    shape: StreamShape = GATE_UP_SHAPE,
) -> Tensor:
    """Return silu(gate(x)) * up(x) of each pair, bfloat16 [T * k, I]; absent experts' are unset."""
    intermediate, top_k = base.layout.intermediate, topk_ids.shape[1]
    pairs = topk_ids.numel()
    activated = torch.empty(pairs, intermediate, dtype=torch.bfloat16, device=x.device)
    decode.gate_up[(triton.cdiv(intermediate, 16 * shape.blocks), pairs)](
        x,
        *_tables(topk_ids, base, fine),
        activated,
        topk_ids if missing is None else missing,  # not touched then
        topk_ids if wanted is None else wanted,
        pairs,
        len(base.slot_of),
        ptx.W2_LEVELS,
        swiglu_limit,
        TOP_K=top_k,
        CLAMP=swiglu_limit > 0,
        COUNT=missing is not None,
        MARK=wanted is not None,
        **_constants(topk_ids, base, fine),
        **launch_options(shape, two_tiers=fine is not None),
    )
    return activated


def launch_down(
    parts: Tensor,
    activated: Tensor,
    topk_ids: Tensor,
    base: Tier,
    fine: Tier | None,
    shape: StreamShape = DOWN_SHAPE,
) -> None:
    """Set the rows of parts float32 [T * k, H] whose expert is present."""
    pairs = topk_ids.numel()
    decode.down[(triton.cdiv(base.layout.hidden, 16 * shape.blocks), pairs)](
        activated,
        *_tables(topk_ids, base, fine),
        parts,
        pairs,
        len(base.slot_of),
        ptx.W2_LEVELS,
        **_constants(topk_ids, base, fine),
        **launch_options(shape, two_tiers=fine is not None),
    )


def launch_options(shape: StreamShape, *, two_tiers: bool) -> dict[str, Any]:
    """Return the arguments of a launch that follow from a shape."""
    return {
        "BLOCKS": shape.blocks,
        "WARPS": shape.warps,
        "num_warps": shape.warps,
        "num_stages": shape.stages,
        "maxnreg": shape.registers_of_two if two_tiers else shape.registers,
    }


def _tables(topk_ids: Tensor, base: Tier, fine: Tier | None) -> tuple[Tensor, ...]:
    other = fine or base
    return topk_ids, base.slot_of, base.pool, other.slot_of, other.pool


def _constants(topk_ids: Tensor, base: Tier, fine: Tier | None) -> dict[str, Any]:
    return {
        "HIDDEN": base.layout.hidden,
        "INTERMEDIATE": base.layout.intermediate,
        "BASE": row_constants(base.layout),
        "FINE": row_constants(fine.layout) if fine else (),
        # one size for all numbers of tokens, so that there is one kernel
        "PAIRS": triton.next_power_of_2(DECODE_TOKENS * topk_ids.shape[1]),
    }
