"""Many sign-magnitude numbers in one int64 word.

E2M1, E4M3, bfloat16 and float32 share one property: with the sign bit off, their bit patterns as
integers are ordered like their magnitudes. A 64-bit word is therefore 16, 8, 4 or 2 lanes, and
"magnitude >= T" is one addition for all of them: add `bias = 2**(width - 1) - T` to the
magnitudes, and each lane's top bit is the answer. No sum leaves its lane. So the whole
requantisation grid runs on integers, eight bytes at a time, on any device.

Words are int64 with the lane of the lowest column in the lowest bits. A bias is an int64 word with
T's bias in each lane, or a tensor of them that broadcasts against the words.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Lanes",
    "alternate_zeros",
    "as_words",
    "count_zeros",
    "lanes_of",
    "to_codes",
    "to_nibble_bytes",
    "to_nibbles",
]


class Lanes(NamedTuple):
    """Constants of one lane width, as signed 64-bit numbers."""

    width: int
    ones: int
    """The lowest bit of every lane."""
    sign: int
    """The highest bit of every lane."""
    magnitude: int
    """All bits below it."""
    odd_sign: int
    """The highest bit of every odd lane."""


def _signed(word: int) -> int:
    return word - 2**64 if word >> 63 else word


def _make(width: int) -> Lanes:
    ones = sum(1 << lane for lane in range(0, 64, width))
    odd = sum(1 << lane for lane in range(width, 64, 2 * width))
    sign = ones << (width - 1)
    return Lanes(width, ones, _signed(sign), 2**64 - 1 - sign, _signed(odd << (width - 1)))


_LANES = {width: _make(width) for width in (4, 8, 16, 32)}
_DTYPES = {8: torch.int8, 16: torch.int16, 32: torch.int32}


def lanes_of(width: int) -> Lanes:
    """Return the constants of lanes of 4, 8, 16 or 32 bits."""
    return _LANES[width]


def as_words(matrix: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """View the bytes of a matrix [rows, .] as wider integers, copying only if it must."""
    matrix = matrix.contiguous()
    if matrix.storage_offset() * matrix.element_size() % dtype.itemsize:
        matrix = matrix.clone()
    return matrix.view(dtype)


def to_codes(words: Tensor, bias: Tensor | int, lanes: Lanes) -> Tensor:
    """Return the w2 code of every lane in its two lowest bits; lanes at or above T are big.

    Codes 0..3 are -big, -small, +small, +big: bit 1 is "not negative", bit 0 "negative xor big".
    """
    mixed = words & lanes.magnitude
    mixed += bias
    mixed ^= words
    mixed >>= lanes.width - 1
    mixed &= lanes.ones
    positive = ~words
    positive >>= lanes.width - 2
    positive &= lanes.ones << 1
    mixed |= positive
    return mixed


def to_nibbles(words: Tensor, biases: list[Tensor], lanes: Lanes) -> Tensor:
    """Return in the four lowest bits of every lane: sign, and how many of the Ts it reaches."""
    magnitude = words & lanes.magnitude
    nibbles = words >> (lanes.width - 4)
    nibbles &= lanes.ones << 3 if lanes.width > 4 else lanes.sign
    for bias in biases:
        reached = magnitude + bias
        reached >>= lanes.width - 1
        reached &= lanes.ones
        nibbles += reached
    return nibbles


def alternate_zeros(words: Tensor, lanes: Lanes) -> Tensor:
    """Return the words with zeros made positive in even lanes and negative in odd ones."""
    zero = words & lanes.magnitude
    zero += lanes.magnitude
    zero.bitwise_not_()
    zero &= lanes.sign
    return (words & ~zero) | (zero & lanes.odd_sign)


def count_zeros(words: Tensor, lanes: Lanes) -> tuple[int, int]:
    """Return how many lanes are zero, and how many of them are negative."""
    if lanes.width == 4:
        pairs = torch.bincount(words.view(torch.uint8).flatten(), minlength=256).view(16, 16)
        positive = int(pairs[0].sum() + pairs[:, 0].sum())
        negative = int(pairs[8].sum() + pairs[:, 8].sum())
    else:
        values = words.view(_DTYPES[lanes.width])
        positive = values.numel() - int(torch.count_nonzero(values))
        negative = values.numel() - int(torch.count_nonzero(values ^ -(2 ** (lanes.width - 1))))
    return positive + negative, negative


def to_nibble_bytes(words: Tensor, lanes: Lanes) -> Tensor:
    """Join the four lowest bits of all lanes, other bits being zero: uint8 [rows, lanes / 2]."""
    match lanes.width:
        case 32:
            words = (words | words >> 28).to(torch.uint8)
        case 16:
            words = words | words >> 12
            words &= 0x000000FF000000FF
            words = (words | words >> 24).to(torch.int16)
        case 8:
            words = words | words >> 4
            words &= 0x00FF00FF00FF00FF
            words |= words >> 8
            words &= 0x0000FFFF0000FFFF
            words = (words | words >> 16).to(torch.int32)
    return words.view(torch.uint8)
