"""Decoding expert rows into matrices a plain matrix product can use."""

from functools import lru_cache
from math import gcd

import numpy as np
import torch
from torch import Tensor

from moet_core.codecs import get_codec
from moet_core.floats import E2M1_VALUES, E4M3_VALUES, e8m0_to_float64
from moet_core.layout import SCALE_BLOCK
from moet_core.quantise import W2_LEVELS
from moet_core.row import RowLayout
from moet_kernels.fragments import unpack_codes2, unpack_nibbles

__all__ = ["decode_rows", "tensor_scales"]


def decode_rows(rows: Tensor, layout: RowLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Decode rows into w13 [n, 2I, H] (gate on top of up) and w2 [n, H, I].

    The values are exact in bfloat16 and in float32, because fp4-nv's tensor scales are left out:
    multiply a product's float32 result by `tensor_scales`. A w2 or fp4-mx scale byte above 252
    can overflow to infinity.

    Args:
        rows: uint8 [n, row_bytes], of experts encoded as `layout` says.
        layout: Codec and sizes.
        dtype: torch.bfloat16 or torch.float32.

    Raises:
        ValueError: Another dtype, whose range is too small for the scales.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"rows decode to bfloat16 or float32, not to {dtype}")
    hidden, intermediate = layout.hidden, layout.intermediate
    codes13, scales13 = rows[:, layout.codes13.slice], rows[:, layout.scales13.slice]
    codes2, scales2 = rows[:, layout.codes2.slice], rows[:, layout.scales2.slice]
    w13 = _decode(layout.codec, codes13, scales13, 2 * intermediate, hidden, dtype)
    return w13, _decode(layout.codec, codes2, scales2, hidden, intermediate, dtype)


def tensor_scales(rows: Tensor, layout: RowLayout) -> Tensor | None:
    """Return the tensor scales of rows, float32 [n, 3] for gate, up and down; None without any."""
    if not layout.tensor_scales.length:
        return None
    return rows[:, layout.tensor_scales.slice].contiguous().view(torch.float32)[:, :3]


def _decode(
    codec: str, codes: Tensor, scales: Tensor, n: int, k: int, dtype: torch.dtype
) -> Tensor:
    unpack = unpack_codes2 if codec == "w2" else unpack_nibbles
    quads = unpack(codes, n, k)
    weights = _quad_values(codec, dtype, codes.device).index_select(0, quads.view(-1))
    group = get_codec(codec).scale_group
    groups = gcd(k, SCALE_BLOCK) // group
    scale = _scale_values(group, dtype, codes.device)[scales.int()]
    scale = scale.view(len(codes), n // 16, -1, 16, groups).transpose(2, 3)
    weights = weights.view(len(codes), n // 16, 16, -1, groups, group)
    return weights.mul_(scale.unsqueeze(5)).view(len(codes), n, k)


@lru_cache
def _quad_values(codec: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the four weights of every nibble quad, [65536, 4]; w2 uses two bits of a nibble."""
    values = np.resize(W2_LEVELS, 16) if codec == "w2" else E2M1_VALUES
    quads = np.arange(2**16)[:, None] >> np.array([0, 4, 8, 12]) & 15
    return torch.tensor(values[quads], dtype=dtype, device=device)


@lru_cache
def _scale_values(group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the value of each scale byte, [256]."""
    e8m0 = e8m0_to_float64(np.arange(256, dtype=np.uint8))
    return torch.tensor(E4M3_VALUES if group == 16 else e8m0, dtype=dtype, device=device)
