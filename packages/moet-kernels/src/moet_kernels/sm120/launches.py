"""Launches of the kernels around the expert kernels: what they take, and as what they take it."""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moet_kernels.portable.tier import Tier
from moet_kernels.sm120.activations import steps_of
from moet_kernels.sm120.cases import PREFILL, THREADS
from moet_kernels.sm120.driver import Driver

__all__ = [
    "Vectors",
    "address",
    "launch_combine",
    "launch_mark",
    "launch_prepare",
    "launch_sort",
    "log2",
    "tiles_of",
]

_COLUMNS = 4 * THREADS  # of a block that quantises or combines
_MARK_THREADS = 1024


class Vectors(NamedTuple):
    """Activations as a kernel takes or makes them.

    Attributes:
        values: bfloat16 [V, K] in column order, or uint8 [V, K], E4M3 in fragment order.
        scales: uint8 [V, K / 32] of E4M3, None of bfloat16.
    """

    values: Tensor
    scales: Tensor | None


def launch_prepare(
    driver: Driver,
    function: Any,
    x: Tensor,
    topk_ids: Tensor,
    tiers: Sequence[Tier],
    groups: Sequence[Tensor],
    present: Tensor,
    quantised: Vectors | None,
    *,
    missing: Tensor | None,
    wanted: Tensor | None,
) -> None:
    """Group the pairs by expert and, where a tier takes it in E4M3, quantise x.

    Args:
        driver: What launches.
        function: The kernel `prepare`.
        x: bfloat16 [T, H], at an address divisible by 8.
        topk_ids: int32 or int64 [T, k]. Ids outside 0..E-1 count as absent experts.
        tiers: Base, and fine if there is one.
        groups: For each, uint8 [T * k, 80], set to groups of DECODE.
        present: uint8 [T * k], set to whether the expert of each pair is present.
        quantised: Set to x in E4M3, or None.
        missing: int32 or int64 [1]; the number of distinct absent experts is added.
        wanted: uint8 [E]; set to 1 for every expert routed to.
    """
    top_k = topk_ids.shape[1]
    values, scales = quantised or (None, None)
    parameters = struct.pack(
        "<2Q64s5Q7I",
        x.data_ptr(),
        topk_ids.data_ptr(),
        _described(tiers, groups),
        *(address(tensor) for tensor in (values, scales, present, wanted, missing)),
        topk_ids.element_size() // 4,
        1 if missing is None else missing.element_size() // 4,
        topk_ids.numel(),
        65536 // top_k + 1,
        len(tiers[0].slot_of),
        x.shape[1],
        log2(steps_of(x.shape[1])),
    )
    tensors = [x, topk_ids, *groups, present, *(t.slot_of for t in tiers)]
    tensors += [tensor for tensor in (values, scales, missing, wanted) if tensor is not None]
    # Blocks behind the first quantise; the first of the first token makes the groups.
    grid = (1, 1, 1) if quantised is None else (1 + -(-x.shape[1] // _COLUMNS), len(x), 1)
    driver.launch(function, grid, THREADS, parameters, tensors)


def launch_sort(
    driver: Driver,
    function: Any,
    x: Tensor,
    topk_ids: Tensor,
    tiers: Sequence[Tier],
    tiles: Sequence[Tensor],
    present: Tensor,
    quantised: Vectors | None,
) -> None:
    """Sort the pairs of a prefill step into tiles by expert, and quantise x.

    Args:
        driver: What launches.
        function: The kernel `sort`.
        x: bfloat16 [T, H], at an address divisible by 8.
        topk_ids: int32 or int64 [T, k]. Ids outside 0..E-1 count as absent experts.
        tiers: Base, and fine if there is one.
        tiles: For each, uint8 [`tiles_of`, 144], set to groups of PREFILL.
        present: uint8 [T * k], set to whether the expert of each pair is present.
        quantised: Set to x in E4M3.
    """
    assert quantised is not None, "prefill kernels take E4M3 alone"
    values, scales = quantised
    assert scales is not None, "E4M3 has scales"
    tokens, top_k = topk_ids.shape
    experts, hidden = len(tiers[0].slot_of), x.shape[1]
    parameters = struct.pack(
        "<2Q64s3Q6I",
        x.data_ptr(),
        topk_ids.data_ptr(),
        _described(tiers, tiles),
        *(address(tensor) for tensor in (values, scales, present)),
        topk_ids.element_size() // 4,
        tokens,
        top_k,
        experts,
        hidden,
        log2(steps_of(hidden)),
    )
    tensors = [x, topk_ids, *tiles, present, values, scales, *(t.slot_of for t in tiers)]
    grid = 1 + -(-hidden // _COLUMNS), max(tokens, experts + 1), 1
    driver.launch(function, grid, THREADS, parameters, tensors)


def tiles_of(pairs: int, experts: int) -> int:
    """Return how many tiles `launch_sort` makes, those that stay empty included."""
    return pairs // PREFILL.vectors + experts


def launch_mark(
    driver: Driver,
    function: Any,
    topk_ids: Tensor,
    tiers: Sequence[Tier],
    *,
    missing: Tensor | None,
    wanted: Tensor | None,
) -> None:
    """Mark the experts of a prefill step.

    Args:
        driver: What launches.
        function: The kernel `mark`.
        topk_ids: int32 or int64 [T, k]. All ids outside 0..E-1 count as one absent expert.
        tiers: Base, and fine if there is one.
        missing: int32 or int64 [1]; the number of distinct absent experts is added.
        wanted: uint8 [E]; set to 1 for every expert routed to.
    """
    experts = len(tiers[0].slot_of)
    seen = driver.empty((experts + 1,), torch.uint8)
    slots = [tier.slot_of for tier in tiers]
    parameters = struct.pack(
        "<6Q4I",
        topk_ids.data_ptr(),
        slots[0].data_ptr(),
        slots[1].data_ptr() if len(slots) > 1 else 0,
        *(address(tensor) for tensor in (seen, wanted, missing)),
        topk_ids.element_size() // 4,
        1 if missing is None else missing.element_size() // 4,
        topk_ids.numel(),
        experts,
    )
    tensors = [topk_ids, *slots, seen]
    tensors += [tensor for tensor in (missing, wanted) if tensor is not None]
    driver.launch(function, (1, 1, 1), _MARK_THREADS, parameters, tensors)


def launch_combine(
    driver: Driver, function: Any, parts: Tensor, weights: Tensor, present: Tensor, out: Tensor
) -> None:
    """Set out bfloat16 [T, H] to the weighted sums of present parts, k ascending, in float32.

    Args:
        driver: What launches.
        function: The kernel `combine`.
        parts: float32 [T * k, H].
        weights: float32 [T, k].
        present: uint8 [T * k].
        out: bfloat16 [T, H].
    """
    tensors = (parts, weights, present, out)
    pointers = (tensor.data_ptr() for tensor in tensors)
    hidden = out.shape[1]
    parameters = struct.pack("<4Q2I", *pointers, hidden, weights.shape[1])
    grid = -(-hidden // _COLUMNS), len(out), 1
    driver.launch(function, grid, THREADS, parameters, tensors)


def _described(tiers: Sequence[Tier], groups: Sequence[Tensor]) -> bytes:
    """Two tiers with their groups as the kernels take them, zeros for one that is not there."""
    described = b""
    for tier, group in zip(tiers, groups, strict=True):
        pointers = tier.slot_of.data_ptr(), tier.pool.data_ptr()
        described += struct.pack("<4Q", *pointers, tier.layout.row_bytes, group.data_ptr())
    return described.ljust(64, b"\0")


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor, 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def log2(number: int) -> int:
    """Return the logarithm of a power of two."""
    return number.bit_length() - 1
