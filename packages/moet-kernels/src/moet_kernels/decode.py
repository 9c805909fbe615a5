"""Decoding expert rows into matrices a plain matrix product can use."""

from math import gcd

import numpy as np
import torch
from torch import Tensor

from moet_core.codecs import get_codec
from moet_core.floats import E2M1_VALUES, E4M3_VALUES, e8m0_to_float64
from moet_core.layout import CODE_BLOCK, NIBBLE_BLOCK, SCALE_BLOCK
from moet_core.quantise import W2_LEVELS
from moet_core.row import RowLayout

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
    """
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
    values, block = _code_values(codec)
    group = get_codec(codec).scale_group
    weights = _from_fragments(_look_up(values, codes, dtype), n, k, block)
    scale = _look_up(_scale_values(group), scales, dtype)
    groups = gcd(k, SCALE_BLOCK) // group
    scale = scale.view(len(codes), n // 16, -1, 16, groups).transpose(2, 3)
    weights.view(len(codes), n // 16, 16, -1, groups, group).mul_(scale.unsqueeze(5))
    return weights


def _code_values(codec: str) -> tuple[Tensor, int]:
    """Return the weights in each code byte, float64 [256, 4 or 2], and the plane's block."""
    byte = torch.arange(256)
    if codec == "w2":
        fields = torch.stack([byte >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
        return torch.tensor(W2_LEVELS)[fields], CODE_BLOCK
    fields = torch.stack([byte & 15, byte >> 4], dim=1)
    return torch.tensor(E2M1_VALUES)[fields], NIBBLE_BLOCK


def _scale_values(group: int) -> Tensor:
    """Return the value of each scale byte, float64 [256]."""
    if group == 16:
        return torch.tensor(E4M3_VALUES)
    return torch.tensor(e8m0_to_float64(np.arange(256, dtype=np.uint8)))


def _look_up(values: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    table = values.to(index.device, dtype)
    return table.index_select(0, index.reshape(-1).int()).view(*index.shape, *table.shape[1:])


def _from_fragments(fields: Tensor, n: int, k: int, block: int) -> Tensor:
    """Bring weights [matrices, ...] from fragment order (see `moet_core.layout`) to [., n, k]."""
    matrices, width = len(fields), gcd(k, block) // 32
    #                              nb       kb  g  t  k32   half j tile
    axes = fields.view(matrices, n // 16, -1, 8, 4, width, 2, 4, 2)
    return axes.permute(0, 1, 8, 3, 2, 5, 6, 4, 7).reshape(matrices, n, k)
