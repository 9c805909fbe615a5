"""The small number formats checkpoints are made of: E2M1, E4M3, E8M0 and bfloat16.

Every decode is exact in float64. Arrays keep their shape unless a docstring says otherwise.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "E2M1_MAGNITUDES",
    "E2M1_VALUES",
    "E4M3_MAX",
    "E4M3_VALUES",
    "bf16_to_float32",
    "e8m0_to_float64",
    "float32_to_bf16",
    "float64_to_e4m3",
    "join_nibbles",
    "split_nibbles",
]


def _e4m3_values() -> NDArray[np.float64]:
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    subnormal = np.ldexp(mantissa / 8, -6)
    magnitude = np.where(exponent > 0, normal, subnormal)
    magnitude[(byte & 0x7F) == 0x7F] = np.nan
    return np.where(byte & 0x80, -magnitude, magnitude)


def _constant(values: ArrayLike) -> NDArray[np.float64]:
    array = np.array(values, dtype=np.float64)
    array.flags.writeable = False
    return array


E2M1_MAGNITUDES = _constant([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Magnitude of each 3-bit index; bit 3 of a nibble is the sign."""

E2M1_VALUES = _constant(np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES]))
"""Value of each nibble; nibble 8 is -0.0."""

E4M3_MAX = 448.0

E4M3_VALUES = _constant(_e4m3_values())
"""Value of each byte of E4M3 ("fn": no infinity, 0x7F and 0xFF are NaN)."""


def split_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack uint8 [N, K/2] into nibbles uint8 [N, K]; the low nibble is the even column."""
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1)
    return nibbles.reshape(*packed.shape[:-1], -1)


def join_nibbles(nibbles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack nibbles uint8 [N, K] (values 0..15, K even) into uint8 [N, K/2]."""
    return np.bitwise_or(nibbles[..., 0::2], nibbles[..., 1::2] << 4)


def e8m0_to_float64(scale: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Decode E8M0 bytes: 2**(byte - 127); 0xFF is NaN, which `sources.validate` refuses."""
    value = np.ldexp(1.0, scale.astype(np.int32) - 127)
    return np.where(scale == 0xFF, np.nan, value)


def float64_to_e4m3(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Round to the nearest E4M3 byte, ties to even; beyond 448 saturates, NaN becomes 0x7F.

    A float64 is scaled by a power of two so that E4M3's step becomes 1, which is exact, and
    rounded there. With q the rounded significand (8..16, or 0..8 when subnormal) and E its
    exponent, the byte is 8 * (E + 7) + q - 8 in every case: a carry to 16 is the next exponent.
    """
    magnitude = np.minimum(np.abs(values), E4M3_MAX)
    exponent = np.frexp(np.maximum(magnitude, 2.0**-6))[1] - 1
    significand = np.rint(np.ldexp(magnitude, 3 - exponent))
    byte = 8 * (exponent + 7) + np.nan_to_num(significand).astype(np.int32) - 8
    byte = np.where(np.isnan(values), 0x7F, byte)
    return (byte | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def bf16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Decode bfloat16 bit patterns (uint16)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to bfloat16 bit patterns (uint16), ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
