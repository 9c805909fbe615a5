"""The requantisation grid on torch: sources to lanes, E8M0 scales and thresholds.

A "reader" is made once for a source and then reads ranges of its rows. What it returns is enough
for w2 and fp4-mx: the weights as lanes with the signs and zeros of their scales folded in, the
E8M0 byte of every 32, and for each threshold of the e2m1 grid the smallest magnitude pattern
above it, as a bias (see `moet_kernels.lanes`). All of it is exact, and equal to
`moet_core.quantise`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moet_core.floats import E2M1_MAGNITUDES, E4M3_VALUES
from moet_core.quantise import ROUND_UP_MANTISSA, block_exponents
from moet_core.sources import FloatSource, Fp8Source, Nvfp4Source, tensor_scale_of
from moet_kernels.lanes import Lanes, as_words, flip_signs, lanes_of, zero_where

__all__ = ["Grid", "Reader", "float_reader", "fp8_reader", "nvfp4_reader"]


class Grid(NamedTuple):
    """Some rows of a source on the requantisation grid."""

    words: Tensor
    """int64 words of lanes; the leading dimension is the row."""
    lanes: Lanes
    scales: Tensor
    """E8M0 bytes uint8 [rows, K/32]."""
    bias: Callable[[float], Tensor]
    """The bias for "greater than this multiple of the block's scale", broadcasting to words."""


Reader = Callable[[int, int], Grid]


def float_reader(source: FloatSource[Any]) -> Reader:
    """Read bfloat16, float32 or float16 (as float32) [N, K]; NaN and infinity must be ruled out."""
    narrow = source.weight.dtype == torch.bfloat16
    dtype, integer = (torch.bfloat16, torch.int16) if narrow else (torch.float32, torch.int32)
    lanes = lanes_of(16 if narrow else 32)

    def read(start: int, stop: int) -> Grid:
        rows = source.weight[start:stop].to(dtype).contiguous()
        blocks = rows.view(integer).view(stop - start, -1, 32)
        amax = (blocks & (2 ** (lanes.width - 1) - 1)).amax(2)
        exponents = _block_exponents(amax.view(dtype).double())

        def bias(threshold: float) -> Tensor:
            limit = threshold * _power_of_two(exponents)
            start_of_bigger = limit.to(dtype).view(integer).long() + 1
            return _fill(start_of_bigger, lanes).unsqueeze(2)

        words = as_words(rows).view(stop - start, amax.shape[1], -1)
        return Grid(words, lanes, _scale_bytes(exponents), bias)

    return read


def fp8_reader(source: Fp8Source[Any]) -> Reader:
    """Read uint8 E4M3 [N, K] with float32 block scales.

    Magnitudes are compared within runs of `run` columns that share a scale, a divisor of 32.
    """
    lanes = lanes_of(8)
    k = source.weight.shape[1]
    rows_of_block, columns = source.block
    run = int(np.gcd(columns, 32))
    device = source.weight.device
    values = torch.tensor(E4M3_VALUES[:127], device=device)
    column_block = torch.arange(0, k, run, device=device) // columns

    def read(start: int, stop: int) -> Grid:
        row_block = torch.arange(start, stop, device=device) // rows_of_block
        scale = source.scale[row_block][:, column_block]
        rows = source.weight[start:stop].contiguous()
        amax = (rows & 0x7F).view(stop - start, -1, run).amax(2)
        peak = values[amax.long()] * scale.double().abs()
        exponents = _block_exponents(peak.view(stop - start, k // 32, 32 // run).amax(2))
        words = as_words(rows)
        if (scale <= 0).any():
            spread = scale.repeat_interleave(run, 1)
            words = as_words(_fold_scale_signs(rows, spread))

        def bias(threshold: float) -> Tensor:
            limit = threshold * _power_of_two(exponents)
            # The quotient is rounded, yet on the right side of every E4M3 value or equal to it:
            # value * scale has 28 bits, so that it cannot be close to the limit without equality.
            quotient = limit.repeat_interleave(32 // run, 1) / scale.double().abs()
            start_of_bigger = torch.bucketize(quotient, values, right=True)
            narrow = (0x80 - start_of_bigger).to(torch.uint8).unsqueeze(2)
            return narrow.expand(-1, -1, run).contiguous().view(stop - start, k).view(torch.int64)

        return Grid(words, lanes, _scale_bytes(exponents), bias)

    return read


def nvfp4_reader(source: Nvfp4Source[Any]) -> Reader:
    """Read NVFP4: nibbles uint8 [N, K/2], E4M3 scales uint8 [N, K/16].

    A word is one scale group. What a group contributes depends only on its scale byte and its
    largest nibble, so that tables made once from the golden functions replace all arithmetic.
    """
    lanes = lanes_of(4)
    tensor_scale = tensor_scale_of(source)
    device = source.nibbles.device
    group_scale = np.abs(np.nan_to_num(E4M3_VALUES[:128]) * tensor_scale)
    peak = group_scale[:, None] * E2M1_MAGNITUDES
    scale_bytes = block_exponents(peak) + 127
    scale_table = torch.tensor(scale_bytes.reshape(-1).astype(np.uint8), device=device)
    highest = int(scale_bytes.max())
    lowest = int(scale_bytes[peak > 0].min(initial=highest))
    exponents = np.arange(lowest, highest + 1) - 127

    @cache
    def bias_table(threshold: float) -> Tensor:
        limit = np.ldexp(threshold, exponents)
        not_above = peak[:, None, :] <= limit[:, None]
        words = (8 - not_above.sum(axis=2)) * lanes.ones
        return torch.tensor(words.reshape(-1), device=device)

    def read(start: int, stop: int) -> Grid:
        words = as_words(source.nibbles[start:stop])
        scale = source.scale[start:stop].long()
        if tensor_scale <= 0 or ((scale == 0) | (scale >= 0x80)).any():
            dead = (scale & 0x7F) == 0 if tensor_scale else torch.ones_like(scale, dtype=torch.bool)
            negative = (scale >= 0x80) != (np.signbit(tensor_scale).item())
            words = zero_where(flip_signs(words, negative, lanes), dead, lanes)
        magnitude = scale & 0x7F
        peaks = _take(scale_table, magnitude * 8 + _largest_nibble(words))
        scales = peaks.view(stop - start, -1, 2).amax(2)
        column = (scales.long() - lowest).clamp_(min=0).repeat_interleave(2, 1)
        index = magnitude * len(exponents) + column
        return Grid(words, lanes, scales, lambda threshold: _take(bias_table(threshold), index))

    return read


def _block_exponents(amax: Tensor) -> Tensor:
    """Twin of `moet_core.quantise.block_exponents`: float64 in, int32 out."""
    mantissa, exponent = torch.frexp(amax)
    rounded = (exponent - 3 - (mantissa < ROUND_UP_MANTISSA).int()).clamp_(-127, 127)
    return rounded.masked_fill_(amax == 0, -127)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2**exponents as float64, put together from bits and so exact everywhere."""
    return ((exponents.long() + 1023) << 52).view(torch.float64)


def _scale_bytes(exponents: Tensor) -> Tensor:
    return (exponents + 127).to(torch.uint8)


def _fill(start_of_bigger: Tensor, lanes: Lanes) -> Tensor:
    """Return the bias of a magnitude pattern, repeated in every lane of a word."""
    return (2 ** (lanes.width - 1) - start_of_bigger) * lanes.ones


def _fold_scale_signs(rows: Tensor, scale: Tensor) -> Tensor:
    """Return E4M3 bytes [rows, K] with the sign of a scale folded in and a zero scale's effect."""
    flipped = torch.where(torch.signbit(scale), rows ^ 0x80, rows)
    return torch.where(scale == 0, flipped & 0x80, flipped)


def _largest_nibble(words: Tensor) -> Tensor:
    """Return the largest 3-bit magnitude among the 16 nibbles of each word, int64.

    Bit by bit from the top: nibbles that lack a bit another one has are out of the race.
    """
    racing: Tensor | int = lanes_of(4).ones
    largest = torch.zeros_like(words)
    for bit in (2, 1, 0):
        have = (words >> bit if bit else words) & racing
        some = have != 0
        racing = torch.where(some, have, racing)
        largest += largest
        largest += some
    return largest


def _take(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.view(-1)).view(index.shape)
