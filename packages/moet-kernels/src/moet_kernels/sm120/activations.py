"""Activations of the SM120 kernels: E4M3 with an E8M0 scale per block, in fragment order.

A block is 32 columns, or more of which all share a scale. Its scale is the smallest power of two
that brings the largest magnitude to 448 or below, and at least 2^-126; no value saturates. These
functions are the golden reference of `kernels/prepare.cu` and of the epilogue of gate and up.

Order of a vector of K values: blocks of gcd(K, 128) columns; in each, column 32 s + 16 h + 4 t + j
lies at byte 4 (2 (S t + s) + h) + j, with S = gcd(K, 128) / 32. So lane t of a quad reads what it
holds of operand B in S steps of `m16n8k32` at once.
"""

from math import gcd

import numpy as np
from numpy.typing import NDArray

from moet_core.floats import E4M3_VALUES, e8m0_to_float64, float64_to_e4m3

__all__ = [
    "SCALE_COLUMNS",
    "dequantise",
    "from_fragments",
    "quantise",
    "scale_bytes",
    "steps_of",
    "to_fragments",
]

SCALE_COLUMNS = 32
"""Columns that one scale byte stands for; coarser blocks repeat it."""

Bytes = NDArray[np.uint8]


def steps_of(k: int) -> int:
    """Return how many blocks of 32 columns lie together in a matrix or vector of k columns."""
    return gcd(k, 128) // 32


def scale_bytes(largest: NDArray[np.float32]) -> Bytes:
    """Return the E8M0 bytes of blocks whose largest magnitudes are given."""
    bits = largest.astype(np.float32).view(np.uint32)
    return (np.maximum((bits + np.uint32(0x1FFFFF)) >> np.uint32(23), 9) - 8).astype(np.uint8)


def quantise(x: NDArray[np.float32], block: int = SCALE_COLUMNS) -> tuple[Bytes, Bytes]:
    """Quantise vectors.

    Args:
        x: float32 [T, K], K a multiple of `block`.
        block: Columns that share a scale, a multiple of 32.

    Returns:
        E4M3 bytes uint8 [T, K] in column order, and E8M0 bytes uint8 [T, K / 32].
    """
    blocks = x.astype(np.float32).reshape(len(x), -1, block)
    scales = scale_bytes(np.abs(blocks).max(axis=2))
    codes = float64_to_e4m3(blocks / e8m0_to_float64(scales)[..., None])
    return codes.reshape(x.shape), np.repeat(scales, block // SCALE_COLUMNS, axis=1)


def dequantise(codes: Bytes, scales: Bytes) -> NDArray[np.float64]:
    """Return float64 [T, K] of what `quantise` gave, exactly."""
    return E4M3_VALUES[codes] * np.repeat(e8m0_to_float64(scales), SCALE_COLUMNS, axis=1)


def to_fragments(codes: Bytes) -> Bytes:
    """Put vectors uint8 [T, K] into fragment order."""
    vectors, k = codes.shape
    #                         block  s              h  t  j
    axes = codes.reshape(vectors, -1, steps_of(k), 2, 4, 4)
    return np.ascontiguousarray(axes.transpose(0, 1, 4, 2, 3, 5)).reshape(vectors, k)


def from_fragments(stored: Bytes) -> Bytes:
    """Read vectors uint8 [T, K] back into column order."""
    vectors, k = stored.shape
    axes = stored.reshape(vectors, -1, 4, steps_of(k), 2, 4)
    return np.ascontiguousarray(axes.transpose(0, 1, 3, 4, 2, 5)).reshape(vectors, k)
