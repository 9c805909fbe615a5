"""Storing codes in MMA fragment order: the torch twin of `moet_core.layout`'s pack functions.

Input is "nibble bytes", uint8 [N, K/2]: one weight a nibble, even column low, whatever a weight's
width in the plane will be. N is a multiple of 16 and K of 32. `out` is a uint8 1-D tensor of the
plane's length, on any device; rows of 16 are outermost in every plane, so that a part of the rows
fills a part of the plane.
"""

from math import gcd

import torch
from torch import Tensor

from moet_core.layout import CODE_BLOCK, NIBBLE_BLOCK, SCALE_BLOCK
from moet_kernels.lanes import as_words

__all__ = ["pack_codes2", "pack_nibbles", "pack_scales"]


def pack_codes2(codes: Tensor, out: Tensor) -> None:
    """Store 2-bit codes, given in the low bits of nibble bytes, as a plane uint8 [N*K/4]."""
    low, high = _tiles(codes)
    quads = low | high << 2
    _scatter(quads.view(torch.int16), codes.shape[1] * 2, CODE_BLOCK, out)


def pack_nibbles(nibbles: Tensor, out: Tensor) -> None:
    """Store nibble bytes as a plane uint8 [N*K/2]."""
    low, high = _tiles(nibbles)
    even = (low & _LOW) | (high & _LOW) << 4
    odd = (low >> 4 & _LOW) | (high & ~_LOW)
    quads = _spread(even)
    quads |= _spread(odd) << 8
    _scatter(quads, nibbles.shape[1] * 2, NIBBLE_BLOCK, out)


def pack_scales(scales: Tensor, group: int, out: Tensor) -> None:
    """Store scale bytes uint8 [N, K/group] as a plane uint8 [N*K/group]."""
    n, groups = scales.shape
    block = gcd(groups * group, SCALE_BLOCK) // group
    blocks = scales.reshape(n // 16, 16, groups // block, block).transpose(1, 2)
    out.view(blocks.shape).copy_(blocks)


_LOW = 0x0F0F0F0F0F0F0F0F


def _tiles(nibbles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the words of rows 0..7 and of rows 8..15 of every 16, int64 [N/16, 8, K/16]."""
    words = as_words(nibbles)
    tiles = words.view(words.shape[0] // 16, 2, 8, words.shape[1])
    return tiles[:, 0], tiles[:, 1]


def _spread(words: Tensor) -> Tensor:
    """Put two bytes a, b of each 16 bits into an int32 as a, 0, b, 0."""
    wide = words.view(torch.int16).to(torch.int32)
    return (wide & 0xFF) | (wide & 0xFF00) << 8


def _scatter(quads: Tensor, k: int, block: int, out: Tensor) -> None:
    """Write quads [N/16, 8, K/4] (four j, both tiles) in the order nb, kb, g, t, k32, half."""
    nb, width = quads.shape[0], gcd(k, block) // 32
    source = quads.view(nb, 8, k // (32 * width), width, 2, 4).permute(0, 2, 1, 5, 3, 4)
    out.view(quads.dtype).view(source.shape).copy_(source)
