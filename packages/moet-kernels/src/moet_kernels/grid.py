"""The requantisation grid on torch: sources as lanes, E8M0 scales and thresholds.

A reader is made once for a source and then reads ranges of its rows. What it returns is enough
for w2 and fp4-mx, and exact, so that results equal `moet_core.quantise`:

    words   the weights as lanes (`moet_kernels.lanes`), signs and zeros of scales folded in
    grid    the E8M0 byte of every 32 columns, and for each threshold of the e2m1 grid the
            smallest magnitude pattern above it, as a bias for these lanes
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moet_core.floats import E2M1_MAGNITUDES, E4M3_MAX, E4M3_VALUES
from moet_core.quantise import ROUND_UP_MANTISSA, block_exponents
from moet_core.sources import FloatSource, Fp8Source, Nvfp4Source, tensor_scale_of
from moet_kernels.lanes import Lanes, as_words, lanes_of

__all__ = ["Grid", "Reader", "float_reader", "fp8_reader", "nvfp4_reader"]


class Grid(NamedTuple):
    """Scales and thresholds of some rows."""

    scales: Tensor
    """E8M0 bytes uint8 [rows, K/32]."""
    bias: Callable[[float], Tensor]
    """The bias for "greater than this multiple of the block's scale", broadcasting to words."""


class Reader(NamedTuple):
    """How to read rows start..stop of one source; `grid` takes the words of the same rows."""

    lanes: Lanes
    words: Callable[[int, int], Tensor]
    grid: Callable[[int, int, Tensor], Grid]


def float_reader(source: FloatSource[Any]) -> Reader:
    """Read finite bfloat16, float32 or (as float32) float16 [N, K]; words are [rows, K/32, .]."""
    half = source.weight.dtype == torch.bfloat16
    dtype, integer = (torch.bfloat16, torch.int16) if half else (torch.float32, torch.int32)
    lanes = lanes_of(16 if half else 32)
    top = 2 ** (lanes.width - 1)

    def words(start: int, stop: int) -> Tensor:
        rows = as_words(source.weight[start:stop].to(dtype))
        return rows.view(stop - start, -1, lanes.width // 2)

    def grid(start: int, stop: int, words: Tensor) -> Grid:
        amax = (words.view(integer) & (top - 1)).amax(2).view(dtype)
        exponents = _block_exponents(amax.double())

        def bias(threshold: float) -> Tensor:
            limit = (threshold * _power_of_two(exponents)).to(dtype)
            above = limit.view(integer).long() + 1
            return ((top - above) * lanes.ones).unsqueeze(2)

        return Grid((exponents + 127).to(torch.uint8), bias)

    return Reader(lanes, words, grid)


def fp8_reader(source: Fp8Source[Any]) -> Reader:
    """Read E4M3 bytes uint8 [N, K] with finite float32 block scales; words are [rows, K/32, 4].

    A run is as many columns as divide 32 and surely share a scale.
    """
    lanes = lanes_of(8)
    k = source.weight.shape[1]
    block_rows, block_columns = source.block
    run = int(np.gcd(block_columns, 32))
    device = source.weight.device
    values = torch.tensor(E4M3_VALUES[:127], device=device)
    scale_of_run = source.scale[:, torch.arange(0, k, run, device=device) // block_columns]
    plain = bool((source.scale > 0).all())

    def scale_rows(start: int, stop: int) -> Tensor:
        block = torch.arange(start, stop, dtype=torch.int32, device=device) // block_rows
        return scale_of_run.index_select(0, block)

    def words(start: int, stop: int) -> Tensor:
        rows = source.weight[start:stop]
        if not plain:
            scale = scale_rows(start, stop).repeat_interleave(run, 1)
            rows = torch.where(torch.signbit(scale), rows ^ 0x80, rows)
            rows = torch.where(scale == 0, rows & 0x80, rows)
        return as_words(rows).view(stop - start, -1, 4)

    def grid(start: int, stop: int, words: Tensor) -> Grid:
        scale = scale_rows(start, stop).double().abs()
        magnitude = (words & lanes.magnitude).view(torch.uint8)
        amax = magnitude.view(stop - start, -1, run).amax(2)
        peak = _take(values, amax.int()) * scale
        if run != 32:
            peak = peak.view(stop - start, -1, 32 // run).amax(2)
        exponents = _block_exponents(peak)

        def bias(threshold: float) -> Tensor:
            # Rounding this quotient cannot carry it past an E4M3 value: value * scale has at most
            # 28 significant bits, so that it equals the limit or differs from it by far more.
            limit = threshold * _power_of_two(exponents)
            if run != 32:
                limit = limit.repeat_interleave(32 // run, 1)
            bias = 0x7F - _e4m3_floor(limit / scale)
            if run == 32:
                return (bias * lanes.ones).unsqueeze(2)
            spread = bias.to(torch.uint8).repeat_interleave(run, 1)
            return spread.view(torch.int64).view(words.shape)

        return Grid((exponents + 127).to(torch.uint8), bias)

    return Reader(lanes, words, grid)


def nvfp4_reader(source: Nvfp4Source[Any]) -> Reader:
    """Read NVFP4, nibbles uint8 [N, K/2] and E4M3 scales uint8 [N, K/16]; words are [rows, K/16].

    A word is one scale group. What a group contributes depends only on its scale byte and its
    largest nibble, so that tables made once by the golden functions replace all arithmetic.
    """
    lanes = lanes_of(4)
    tensor_scale = tensor_scale_of(source)
    device = source.nibbles.device
    plain = tensor_scale > 0 and bool(source.scale.view(torch.int8).min() > 0)
    group_scale = np.abs(np.nan_to_num(E4M3_VALUES) * tensor_scale)
    peak = E2M1_MAGNITUDES[:, None] * group_scale
    scale_byte = block_exponents(peak) + 127
    highest = int(scale_byte.max())
    lowest = int(scale_byte[peak > 0].min(initial=highest))
    exponents = np.arange(lowest, highest + 1) - 127
    scale_table = torch.tensor(scale_byte.reshape(-1).astype(np.uint8), device=device)

    @cache
    def bias_table(threshold: float) -> Tensor:
        not_above = peak[:, :, None] <= np.ldexp(threshold, exponents)
        words = (8 - not_above.sum(axis=0)) * lanes.ones
        return torch.tensor(words.reshape(-1), device=device)

    def words(start: int, stop: int) -> Tensor:
        words = as_words(source.nibbles[start:stop])
        if not plain:
            scale = source.scale[start:stop]
            negative = (scale >= 0x80) != bool(np.signbit(tensor_scale))
            zero = (scale & 0x7F) == 0 if tensor_scale else torch.full_like(scale, 1).bool()
            words = torch.where(negative, words ^ lanes.sign, words)
            words = torch.where(zero, words & lanes.sign, words)
        return words

    def grid(start: int, stop: int, words: Tensor) -> Grid:
        scale = source.scale[start:stop].int()
        entry = scale + 7 * 256
        other = _groups_without_largest(words)
        if other.numel():
            entry.view(-1)[other] -= (7 - _largest_nibble(words.view(-1)[other]).int()) * 256
        of_group = _take(scale_table, entry)
        pairs = of_group.view(torch.int16)
        of_neighbour = (pairs << 8 | pairs >> 8 & 0xFF).view(torch.uint8)
        of_block = torch.maximum(of_group, of_neighbour)
        index = scale.mul_(len(exponents)).add_((of_block.int() - lowest).clamp_(min=0))
        return Grid(of_block[:, ::2], lambda threshold: _take(bias_table(threshold), index))

    return Reader(lanes, words, grid)


def _block_exponents(amax: Tensor) -> Tensor:
    """Twin of `moet_core.quantise.block_exponents`: float64 [.] not negative in, int64 out.

    On bit patterns: the exponent field is e + 1022, and a significand at or above the bound
    carries into it. Zero and subnormals end at the lower clamp, as they must.
    """
    return ((amax.view(torch.int64) + _CARRY_AT_BOUND) >> 52).sub_(1026).clamp_(-127, 127)


_CARRY_AT_BOUND = 2**52 - int(np.float64(ROUND_UP_MANTISSA).view(np.int64)) % 2**52


def _e4m3_floor(values: Tensor) -> Tensor:
    """Return the byte of the largest E4M3 number not above each float64 >= 0, as int64."""
    values = values.clamp(max=E4M3_MAX)
    normal = (values.view(torch.int64) >> 49) - (1023 - 7 << 3)
    return torch.where(values < 2.0**-6, (values * 2.0**9).long(), normal)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2**exponents as float64, put together from bits and so exact everywhere."""
    return ((exponents + 1023) << 52).view(torch.float64)


def _groups_without_largest(words: Tensor) -> Tensor:
    """Return the flat indices of words without a magnitude 7 (6.0); scales make them rare."""
    lanes = lanes_of(4)
    seven = words & lanes.magnitude
    seven += lanes.ones
    seven &= lanes.sign
    return (seven.view(-1) == 0).nonzero()[:, 0]


def _largest_nibble(words: Tensor) -> Tensor:
    """Return the largest 3-bit magnitude among the 16 nibbles of each word, int64.

    Bit by bit from the top: nibbles that lack a bit another one has are out of the race.
    """
    racing = torch.full_like(words, lanes_of(4).ones)
    largest = torch.zeros_like(words)
    for bit in (2, 1, 0):
        have = words >> bit & racing
        racing = torch.where(have != 0, have, racing)
        largest = largest * 2 + (have != 0)
    return largest


def _take(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.view(-1)).view(index.shape)
