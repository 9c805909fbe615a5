"""The expert operation: every token through its routed experts, straight from encoded rows.

`torch.ops.moet.experts` is the registered form; `experts` calls it. The reference backend is
plain torch on any device, and the oracle of every other one. The portable backend is Triton. The
sm120 backend is hand-written for that architecture; what it has no kernel for is portable.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the name the whole field uses)
from torch import Tensor

from moet_core.errors import ConfigError
from moet_core.row import RowLayout, row_layout
from moet_kernels.arch import choose_backend
from moet_kernels.decode import decode_rows, tensor_scales
from moet_kernels.portable.tier import Tier

__all__ = ["Tier", "add_parts", "combine_parts", "experts"]

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
    fine: Tier | None = None,
    backend: str | None = None,
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
        fine: A second tier, preferred for experts that have a slot in it; present experts of the
            pool serve the others.
        backend: "reference", "portable", "sm120" or "sm120-e4m3"; by default, for bfloat16, sm120
            on sm_120 and portable on other NVIDIA GPUs of sm_80 and newer, else reference. Rows
            that sm120 has no kernel for are portable's by default; asked for by name, it refuses
            them. It rounds activations to E4M3, but those of w2 rows in steps of up to 16 tokens;
            sm120-e4m3 rounds these too.

    Only the reference waits for the device: the others cannot refuse ids out of range, but such
    an id adds to `missing` as an absent expert does.

    Raises:
        ConfigError: Unknown codec, impossible sizes, or a backend that cannot run here.
        ValueError: Tensors that do not fit together, or ids out of range.
    """
    if swiglu_limit is not None and swiglu_limit <= 0:
        raise ValueError(f"swiglu_limit must be positive or None, got {swiglu_limit}")
    return torch.ops.moet.experts(
        x,
        topk_weights,
        topk_ids,
        pool,
        slot_of,
        missing,
        wanted,
        hidden,
        intermediate,
        codec,
        swiglu_limit or 0.0,
        fine.pool if fine else None,
        fine.slot_of if fine else None,
        fine.layout.codec if fine else "",
        backend or "",
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
    backend: str | None = None,
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
        backend: As for `experts`.
    """
    layout = row_layout(codec, hidden, intermediate)
    topk_ids = _whole_words(topk_ids)
    if choose_backend(x, backend) != "reference":
        _check(x, topk_ids, pool, slot_of, layout)
        tier = Tier(pool, slot_of.contiguous(), layout)
        on_gpu = _gpu_layer(x, topk_ids, (layout,), backend)
        on_gpu.add_parts(
            parts,
            x.contiguous(),
            topk_ids,
            tier,
            None,
            swiglu_limit=swiglu_limit or 0.0,
        )
        return
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


def combine_parts(
    parts: Tensor, topk_weights: Tensor, dtype: torch.dtype, *, backend: str | None = None
) -> Tensor:
    """Return the weighted sum [T, H] in `dtype` of parts float32 [T * k, H], k ascending.

    Every part counts: those that no `add_parts` has set are zero. `backend` is as for `experts`;
    all of them give the same bits.
    """
    if choose_backend(parts.new_empty(0, dtype=dtype), backend) != "reference":
        from moet_kernels.portable import layer

        return layer.combine_all(parts, topk_weights.float().contiguous())
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
    missing: Tensor | None,
    wanted: Tensor | None,
    hidden: int,
    intermediate: int,
    codec: str,
    swiglu_limit: float,
    fine_pool: Tensor | None = None,
    fine_slot_of: Tensor | None = None,
    fine_codec: str = "",
    backend: str = "",
) -> Tensor:
    base = Tier(pool, slot_of.contiguous(), row_layout(codec, hidden, intermediate))
    fine = None
    if fine_pool is not None and fine_slot_of is not None:
        layout = row_layout(fine_codec, hidden, intermediate)
        fine = Tier(fine_pool, fine_slot_of.contiguous(), layout)
    _check_all(x, topk_weights, topk_ids, base, fine, missing, wanted)
    compute = _reference_layer
    if choose_backend(x, backend or None) != "reference":
        layouts = (base.layout,) if fine is None else (base.layout, fine.layout)
        compute = _gpu_layer(x, topk_ids, layouts, backend or None).expert_layer
    return compute(
        x.contiguous(),
        topk_weights.float().contiguous(),
        _whole_words(topk_ids),
        base,
        fine,
        swiglu_limit=swiglu_limit,
        missing=missing,
        wanted=wanted,
    )


@_experts_op.register_fake
def _(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    pool: Tensor,
    slot_of: Tensor,
    missing: Tensor | None,
    wanted: Tensor | None,
    hidden: int,
    intermediate: int,
    codec: str,
    swiglu_limit: float,
    fine_pool: Tensor | None = None,
    fine_slot_of: Tensor | None = None,
    fine_codec: str = "",
    backend: str = "",
) -> Tensor:
    return x.new_empty(x.shape)


def _gpu_layer(
    x: Tensor, topk_ids: Tensor, layouts: tuple[RowLayout, ...], backend: str | None
) -> Any:
    """Return what computes a layer on a GPU: add_parts and expert_layer of sm120 or portable.

    Both are imported here: that takes a second which only their users should wait.
    """
    from moet_kernels.portable import layer as portable

    if choose_backend(x, backend) == "portable":
        return portable
    from moet_kernels.sm120.trust import layer_on

    sm120 = layer_on(x.device)
    if sm120 is not None and backend == "sm120-e4m3":
        sm120 = sm120.quantising()
    refusal: str | None = "has no kernel that may be used"
    if sm120 is not None:
        refusal = sm120.refusal(topk_ids, *layouts)
    if refusal and backend is not None:
        raise ConfigError(f"The backend {backend} {refusal}. Usable here: portable, reference.")
    return portable if refusal or sm120 is None else sm120


def _whole_words(topk_ids: Tensor) -> Tensor:
    """Return ids as kernels and indexing read them: contiguous, of one or two words each."""
    if topk_ids.element_size() < 4 and not topk_ids.is_floating_point():
        topk_ids = topk_ids.int()
    return topk_ids.contiguous()


def _reference_layer(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    base: Tier,
    fine: Tier | None,
    *,
    swiglu_limit: float,
    missing: Tensor | None,
    wanted: Tensor | None,
) -> Tensor:
    """Return the weighted sum of each token's experts; arguments of the portable twin."""
    _check_values(topk_ids, base)
    routed = topk_ids.unique()
    if wanted is not None:
        wanted[routed] = 1
    parts = x.new_zeros(topk_ids.numel(), base.layout.hidden, dtype=torch.float32)
    tiers, slots = [base], base.slot_of
    if fine is not None:
        _check_values(topk_ids, fine)
        in_fine = fine.slot_of >= 0
        slots = torch.where(in_fine, fine.slot_of, base.slot_of)
        tiers = [fine, base._replace(slot_of=torch.where(in_fine, -1, base.slot_of))]
    if missing is not None:
        missing += (slots[routed] < 0).sum()
    for tier in tiers:
        add_parts(
            parts,
            x,
            topk_ids,
            tier.pool,
            tier.slot_of,
            hidden=tier.layout.hidden,
            intermediate=tier.layout.intermediate,
            codec=tier.layout.codec,
            swiglu_limit=swiglu_limit,
            backend="reference",
        )
    return combine_parts(parts, topk_weights, x.dtype, backend="reference")


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


def _check_all(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    base: Tier,
    fine: Tier | None,
    missing: Tensor | None,
    wanted: Tensor | None,
) -> None:
    """Check what can be checked without waiting for the device."""
    for tier in (base, fine) if fine else (base,):
        _check(x, topk_ids, tier.pool, tier.slot_of, tier.layout)
    if fine is not None and fine.slot_of.shape != base.slot_of.shape:
        raise ValueError(
            f"the fine tier's slot_of must be {list(base.slot_of.shape)} as the base's, "
            f"got {list(fine.slot_of.shape)}"
        )
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights and topk_ids must be [{len(x)}, k], "
            f"got {list(topk_weights.shape)} and {list(topk_ids.shape)}"
        )
    if missing is not None and (
        missing.dtype not in (torch.int32, torch.int64) or missing.shape != (1,)
    ):
        raise ValueError(
            f"missing must be int32 or int64 [1], got {missing.dtype} {list(missing.shape)}"
        )
    if wanted is not None and (wanted.dtype != torch.uint8 or wanted.shape != base.slot_of.shape):
        raise ValueError(
            f"wanted must be uint8 {list(base.slot_of.shape)}, "
            f"got {wanted.dtype} {list(wanted.shape)}"
        )


def _check(x: Tensor, topk_ids: Tensor, pool: Tensor, slot_of: Tensor, layout: RowLayout) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x must be bfloat16 or float32, got {x.dtype}")
    if x.ndim != 2 or x.shape[1] != layout.hidden:
        raise ValueError(f"x must be [tokens, {layout.hidden}], got {list(x.shape)}")
    if topk_ids.ndim != 2 or len(topk_ids) != len(x) or topk_ids.is_floating_point():
        raise ValueError(
            f"topk_ids must be integers [{len(x)}, k], got {topk_ids.dtype} {list(topk_ids.shape)}"
        )
    if pool.dtype != torch.uint8 or pool.shape[1:] != (layout.row_bytes,):
        raise ValueError(
            f"pool must be uint8 [slots, {layout.row_bytes}], got {pool.dtype} {list(pool.shape)}"
        )
    if not pool.is_contiguous():
        raise ValueError("pool must be contiguous")
    if slot_of.dtype != torch.int32 or slot_of.ndim != 1:
        raise ValueError(f"slot_of must be int32 [E], got {slot_of.dtype} {list(slot_of.shape)}")


def _check_values(topk_ids: Tensor, tier: Tier) -> None:
    slot_of, pool = tier.slot_of, tier.pool
    if topk_ids.numel() and not 0 <= topk_ids.min() <= topk_ids.max() < len(slot_of):
        raise ValueError(
            f"topk_ids must be in 0..{len(slot_of) - 1}, "
            f"got {int(topk_ids.min())}..{int(topk_ids.max())}"
        )
    if slot_of.numel() and slot_of.max() >= len(pool):
        raise ValueError(f"slot_of names slot {int(slot_of.max())}, the pool has {len(pool)}")
