"""The expert operation: every token through its routed experts, straight from encoded rows.

`torch.ops.moet.experts` is the registered form; `experts` calls it. The reference backend is
plain torch on any device, and the oracle of every other one.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (the name the whole field uses)
from torch import Tensor

from moet_core.row import RowLayout, row_layout
from moet_kernels.decode import decode_rows, tensor_scales

__all__ = ["add_parts", "combine_parts", "experts"]

_DECODED_BYTES = 2**28
"""Bound on decoded weights held at a time; at least one expert is."""


def experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    pool: Tensor,
    slot_of: Tensor,
    *,
    hidden: int,
    intermediate: int,
    codec: str = "w2",
    swiglu_limit: float | None = None,
    missing: Tensor | None = None,
    wanted: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, [T, H] in x's dtype.

    For one expert: y = down(silu(gate(x)) * up(x)), the activation in float32 and rounded to x's
    dtype. An expert without a slot contributes exactly zero. The sum runs over k in ascending
    order in float32, so that the result depends on neither slots nor residency of other experts.

    Args:
        x: bfloat16 or float32 [T, H].
        topk_weights: float32 [T, k].
        topk_ids: integer [T, k], each in 0..E-1.
        pool: uint8 [slots, row_bytes], rows of `codec`.
        slot_of: int32 [E], the slot of each expert or -1 if it is absent.
        hidden: H.
        intermediate: I of this tensor-parallel rank.
        codec: Codec of the pool's rows.
        swiglu_limit: L > 0 clamps gate to at most L and up to -L..L; None does not clamp.
        missing: int32 or int64 [1]; the number of distinct absent experts routed to is added.
        wanted: uint8 [E]; set to 1 for every expert routed to, absent or not.

    Raises:
        ConfigError: Unknown codec or impossible sizes.
        ValueError: Tensors that do not fit together, or ids out of range.
    """
    if swiglu_limit is not None and swiglu_limit <= 0:
        raise ValueError(f"swiglu_limit must be positive or None, got {swiglu_limit}")
    counter = missing if missing is not None else torch.zeros(1, dtype=torch.int64, device=x.device)
    marks = wanted if wanted is not None else torch.zeros_like(slot_of, dtype=torch.uint8)
    return torch.ops.moet.experts(
        x,
        topk_weights,
        topk_ids,
        pool,
        slot_of,
        counter,
        marks,
        hidden,
        intermediate,
        codec,
        swiglu_limit or 0.0,
    )


def add_parts(
    parts: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    pool: Tensor,
    slot_of: Tensor,
    *,
    hidden: int,
    intermediate: int,
    codec: str = "w2",
    swiglu_limit: float | None = None,
) -> None:
    """Compute what the present experts give each token routed to them, before weighting.

    `experts` is `add_parts` over zeros followed by `combine_parts`. Calling `add_parts` several
    times, each with other experts present, gives the same bits as once with all of them: layers
    whose experts do not fit into the pool at the same time are computed that way.

    Args:
        parts: float32 [T * k, H], zeros at first; the rows of present experts are set.
        x: bfloat16 or float32 [T, H].
        topk_ids: integer [T, k], each in 0..E-1.
        pool: uint8 [slots, row_bytes], rows of `codec`.
        slot_of: int32 [E], the slot of each expert or -1 if it is absent.
        hidden: H.
        intermediate: I of this tensor-parallel rank.
        codec: Codec of the pool's rows.
        swiglu_limit: As for `experts`.
    """
    layout = row_layout(codec, hidden, intermediate)
    top_k = topk_ids.shape[1]
    routed = topk_ids.unique()
    slots = slot_of[routed]
    present, slots = routed[slots >= 0], slots[slots >= 0]
    flat_ids = topk_ids.reshape(-1)
    at_a_time = max(1, _DECODED_BYTES // (3 * hidden * intermediate * 4))
    for start in range(0, len(present), at_a_time):
        rows = pool[slots[start : start + at_a_time].long()]
        w13, w2 = decode_rows(rows, layout, torch.float32)
        scales = tensor_scales(rows, layout)
        for i, expert in enumerate(present[start : start + at_a_time]):
            places = (flat_ids == expert).nonzero()[:, 0]
            scale = None if scales is None else scales[i]
            parts[places] = _expert(x[places // top_k], w13[i], w2[i], scale, swiglu_limit or 0.0)


def combine_parts(parts: Tensor, topk_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weighted sum [T, H] in `dtype` of parts float32 [T * k, H], k ascending."""
    tokens, top_k = topk_weights.shape
    by_token = parts.view(tokens, top_k, parts.shape[1])
    total = torch.zeros_like(by_token[:, 0])
    for k in range(top_k):
        total += by_token[:, k] * topk_weights[:, k, None]
    return total.to(dtype)


@torch.library.custom_op("moet::experts", mutates_args={"missing", "wanted"})
def _experts_op(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    pool: Tensor,
    slot_of: Tensor,
    missing: Tensor,
    wanted: Tensor,
    hidden: int,
    intermediate: int,
    codec: str,
    swiglu_limit: float,
) -> Tensor:
    layout = row_layout(codec, hidden, intermediate)
    _check(x, topk_weights, topk_ids, pool, slot_of, layout)
    if wanted.dtype != torch.uint8 or wanted.shape != slot_of.shape:
        raise ValueError(
            f"wanted must be uint8 {list(slot_of.shape)}, got {wanted.dtype} {list(wanted.shape)}"
        )
    routed = topk_ids.unique()
    wanted[routed] = 1
    missing += (slot_of[routed] < 0).sum()
    parts = x.new_zeros(topk_ids.numel(), hidden, dtype=torch.float32)
    add_parts(
        parts,
        x,
        topk_ids,
        pool,
        slot_of,
        hidden=hidden,
        intermediate=intermediate,
        codec=codec,
        swiglu_limit=swiglu_limit,
    )
    return combine_parts(parts, topk_weights, x.dtype)


@_experts_op.register_fake
def _(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    pool: Tensor,
    slot_of: Tensor,
    missing: Tensor,
    wanted: Tensor,
    hidden: int,
    intermediate: int,
    codec: str,
    swiglu_limit: float,
) -> Tensor:
    return torch.empty_like(x)


def _expert(x: Tensor, w13: Tensor, w2: Tensor, scales: Tensor | None, limit: float) -> Tensor:
    """Return one expert's output float32 [tokens, H]; weights are float32, so products are too."""
    gate, up = (x.float() @ w13.T).chunk(2, dim=1)
    if scales is not None:
        gate, up = gate * scales[0], up * scales[1]
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    activated = (F.silu(gate) * up).to(x.dtype)
    down = activated.float() @ w2.T
    return down if scales is None else down * scales[2]


def _check(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    pool: Tensor,
    slot_of: Tensor,
    layout: RowLayout,
) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x must be bfloat16 or float32, got {x.dtype}")
    if x.ndim != 2 or x.shape[1] != layout.hidden:
        raise ValueError(f"x must be [tokens, {layout.hidden}], got {list(x.shape)}")
    if topk_weights.shape != topk_ids.shape or len(topk_ids) != len(x):
        raise ValueError(
            f"topk_weights and topk_ids must be [{len(x)}, k], "
            f"got {list(topk_weights.shape)} and {list(topk_ids.shape)}"
        )
    if pool.dtype != torch.uint8 or pool.shape[1:] != (layout.row_bytes,):
        raise ValueError(
            f"pool must be uint8 [slots, {layout.row_bytes}], got {pool.dtype} {list(pool.shape)}"
        )
    if topk_ids.numel() and not 0 <= topk_ids.min() <= topk_ids.max() < len(slot_of):
        raise ValueError(
            f"topk_ids must be in 0..{len(slot_of) - 1}, "
            f"got {int(topk_ids.min())}..{int(topk_ids.max())}"
        )
    if slot_of.numel() and slot_of.max() >= len(pool):
        raise ValueError(f"slot_of names slot {int(slot_of.max())}, the pool has {len(pool)}")
