"""Codes in MMA fragment order: the torch twin of `moet_core.layout`.

Packing takes "nibble bytes", uint8 [N, K/2]: one weight a nibble, even column low, whatever its
width in the plane. N is a multiple of 16 and K of 32. `out` is a uint8 1-D tensor of the
plane's length on any device; rows of 16 are outermost in every plane, so that a part of the rows
fills a part of the plane.
"""

from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from moet_core.layout import CODE_BLOCK, NIBBLE_BLOCK, SCALE_BLOCK
from moet_kernels.lanes import as_words

__all__ = ["pack_codes2", "pack_nibbles", "pack_scales", "unpack_codes2", "unpack_nibbles"]


def pack_codes2(codes: Tensor, out: Tensor) -> None:
    """Store 2-bit codes, given in the low bits of nibble bytes, as a plane uint8 [N*K/4]."""
    words = as_words(codes)
    tiles = words.view(-1, 2, 8, words.shape[1])
    quads = tiles[:, 0] | tiles[:, 1] << 2
    _scatter(quads.view(torch.int16), CODE_BLOCK, out)


def pack_nibbles(nibbles: Tensor, out: Tensor) -> None:
    """Store nibble bytes as a plane uint8 [N*K/2]."""
    wide = as_words(nibbles).view(torch.int16).to(torch.int32)
    wide &= 0xFFFF
    wide = wide | wide << 8
    wide &= 0x00FF00FF
    wide = wide | wide << 4
    wide &= 0x0F0F0F0F
    tiles = wide.view(-1, 2, 8, wide.shape[1])
    _scatter(tiles[:, 0] | tiles[:, 1] << 4, NIBBLE_BLOCK, out)


def pack_scales(scales: Tensor, group: int, out: Tensor) -> None:
    """Store scale bytes uint8 [N, K/group] as a plane uint8 [N*K/group]."""
    n, groups = scales.shape
    block = gcd(groups * group, SCALE_BLOCK) // group
    # The bytes of a block are neighbours in both orders: they move as one number.
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[block]
    blocks = as_words(scales, whole).view(n // 16, 16, -1).transpose(1, 2)
    out.view(whole).view(blocks.shape).copy_(blocks)


def unpack_codes2(planes: Tensor, n: int, k: int) -> Tensor:
    """Read planes uint8 [matrices, n*k/4] as nibble quads int32 [matrices, n, k/4].

    A quad is four weights, one a nibble, the lowest column in the lowest bits.
    """
    quads = _gather(planes, torch.int16, k, CODE_BLOCK)
    tiles = torch.stack([quads & 0x3333, quads >> 2 & 0x3333], dim=1)
    return tiles.int().view(len(planes), n, k // 4)


def unpack_nibbles(planes: Tensor, n: int, k: int) -> Tensor:
    """Read planes uint8 [matrices, n*k/2] as nibble quads int32 [matrices, n, k/4]."""
    quads = _gather(planes, torch.int32, k, NIBBLE_BLOCK)
    tiles = torch.stack([quads & 0x0F0F0F0F, quads >> 4 & 0x0F0F0F0F], dim=1)
    tiles |= tiles >> 4
    tiles &= 0x00FF00FF
    tiles |= tiles >> 8
    tiles &= 0xFFFF
    return tiles.view(len(planes), n, k // 4)


def _scatter(quads: Tensor, block: int, out: Tensor) -> None:
    """Write quads [N/16, 8, K/4], the same four j of both tiles, into a plane."""
    index = _fragment_order(quads.shape[0], quads.shape[2] * 4, block, quads.device)
    out.copy_(quads.view(-1).index_select(0, index).view(torch.uint8))


def _gather(planes: Tensor, dtype: torch.dtype, k: int, block: int) -> Tensor:
    """Read the quads [matrices * n/16, 8, k/4] of planes; 16 rows at a time have one order."""
    quads = as_words(planes, dtype).view(-1, 2 * k)
    return quads[:, _matrix_order(k, block, quads.device)].view(-1, 8, k // 4)


@lru_cache(maxsize=16)
def _fragment_order(nb: int, k: int, block: int, device: torch.device) -> Tensor:
    """Return where each quad of a plane comes from; a CPU gathers faster than it permutes."""
    width = gcd(k, block) // 32
    #                                                     nb  g  kb  k32   half t
    source = torch.arange(nb * 2 * k, dtype=torch.int32).view(nb, 8, -1, width, 2, 4)
    return source.permute(0, 2, 1, 5, 3, 4).reshape(-1).to(device)


@lru_cache(maxsize=16)
def _matrix_order(k: int, block: int, device: torch.device) -> Tensor:
    """Return where each quad of 16 rows lies in their part of a plane."""
    return _fragment_order(1, k, block, device).argsort()
