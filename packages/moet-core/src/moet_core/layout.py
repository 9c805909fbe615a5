"""MMA fragment order: where each code, nibble and scale byte of a matrix [N, K] is stored.

A warp's MMA instruction works on tiles of 16 rows and 32 columns. Position inside a tile:

    row = 16 * nb + 8 * tile + g                     g in 0..7, tile in 0..1
    k   = 32 * k32 + 16 * half + 4 * t + j           half in 0..1, t in 0..3, j in 0..3

Lane 4 * g + t of the warp owns the 16 elements (half, tile, j). Its fragment register
r = 2 * half + tile is register a_r of `mma.m16n8k32` with 8-bit operands when the weights are A,
and b0, b1 of two n8 tiles when they are B. Planes are stored lane by lane, so that a lane reads
consecutive bytes, in blocks of columns so that it reads 16 of them where K allows it:

    codes   [nb][K block][lane][k32][half][j][tile]   2 bits each, block gcd(K, 128)
    nibbles [nb][K block][lane][k32][half][j][tile]   4 bits each, block gcd(K, 64)
    scales  [nb][K block][row % 16][group]            1 byte each, block gcd(K, 128)

Fields fill little-endian 32-bit words from the lowest bit. In a code word `w`, `w & 0x33333333`
is therefore the byte-permute selectors of registers 0 (low half) and 2 (high half), and
`(w >> 2) & 0x33333333` those of registers 1 and 3: four weights an instruction, no multiply. In a
nibble word of one `half`, `(w << 2) & 0x3C3C3C3C` and `(w >> 2) & 0x3C3C3C3C` are registers
2 * half and 2 * half + 1 as e2m1 operands in 8-bit containers.

N must be a multiple of 16 and K of 32.
"""

from math import gcd

import numpy as np
from numpy.typing import NDArray

from moet_core.errors import TensorError

__all__ = [
    "CODE_BLOCK",
    "FP4_LAYOUT",
    "NIBBLE_BLOCK",
    "SCALE_BLOCK",
    "W2_LAYOUT",
    "check_shape",
    "pack_codes2",
    "pack_nibbles",
    "pack_scales",
    "unpack_codes2",
    "unpack_nibbles",
    "unpack_scales",
]

W2_LAYOUT = "w2-frag16-v1"
FP4_LAYOUT = "fp4-frag16-v1"

CODE_BLOCK = 128
NIBBLE_BLOCK = 64
SCALE_BLOCK = 128

Bytes = NDArray[np.uint8]


def check_shape(n: int, k: int, name: str = "matrix") -> None:
    """Raise TensorError unless a matrix [n, k] can be stored in fragment order."""
    if n <= 0 or k <= 0 or n % 16 or k % 32:
        raise TensorError(
            name,
            wanted="a shape [N, K] with N a positive multiple of 16 and K of 32",
            got=f"[{n}, {k}]",
        )


def pack_codes2(codes: Bytes) -> Bytes:
    """Store 2-bit codes uint8 [N, K] (values 0..3) as a plane uint8 [N*K/4]."""
    quads = _to_fragments(codes, CODE_BLOCK).reshape(-1, 4)
    low, high = quads[:, 0] | quads[:, 1] << 2, quads[:, 2] | quads[:, 3] << 2
    return np.bitwise_or(low, high << 4)


def unpack_codes2(plane: Bytes, n: int, k: int) -> Bytes:
    """Read a plane uint8 [N*K/4] back into codes uint8 [N, K]."""
    _check_length(plane, n, k, n * k // 4)
    fields = np.stack([plane >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    return _from_fragments(fields, n, k, CODE_BLOCK)


def pack_nibbles(nibbles: Bytes) -> Bytes:
    """Store nibbles uint8 [N, K] (values 0..15) as a plane uint8 [N*K/2]."""
    pairs = _to_fragments(nibbles, NIBBLE_BLOCK).reshape(-1, 2)
    return np.bitwise_or(pairs[:, 0], pairs[:, 1] << 4)


def unpack_nibbles(plane: Bytes, n: int, k: int) -> Bytes:
    """Read a plane uint8 [N*K/2] back into nibbles uint8 [N, K]."""
    _check_length(plane, n, k, n * k // 2)
    fields = np.stack([plane & 15, plane >> 4], axis=-1)
    return _from_fragments(fields, n, k, NIBBLE_BLOCK)


def pack_scales(scales: Bytes, group: int) -> Bytes:
    """Store scale bytes uint8 [N, K/group] as a plane uint8 [N*K/group]."""
    n, groups = scales.shape
    check_shape(n, groups * group)
    block = gcd(groups * group, SCALE_BLOCK) // group
    return scales.reshape(n // 16, 16, -1, block).transpose(0, 2, 1, 3).reshape(-1)


def unpack_scales(plane: Bytes, n: int, k: int, group: int) -> Bytes:
    """Read a plane uint8 [N*K/group] back into scale bytes uint8 [N, K/group]."""
    _check_length(plane, n, k, n * k // group)
    block = gcd(k, SCALE_BLOCK) // group
    return plane.reshape(n // 16, -1, 16, block).transpose(0, 2, 1, 3).reshape(n, -1)


def _to_fragments(matrix: Bytes, block: int) -> Bytes:
    n, k = matrix.shape
    check_shape(n, k)
    width = gcd(k, block) // 32
    #                    nb       tile g  kb  k32   half t j
    axes = matrix.reshape(n // 16, 2, 8, -1, width, 2, 4, 4)
    return np.ascontiguousarray(axes.transpose(0, 3, 2, 6, 4, 5, 7, 1))


def _from_fragments(fields: Bytes, n: int, k: int, block: int) -> Bytes:
    width = gcd(k, block) // 32
    #                    nb       kb  g  t  k32   half j tile
    axes = fields.reshape(n // 16, -1, 8, 4, width, 2, 4, 2)
    return axes.transpose(0, 7, 2, 1, 4, 5, 3, 6).reshape(n, k)


def _check_length(plane: Bytes, n: int, k: int, wanted: int) -> None:
    check_shape(n, k)
    if plane.shape != (wanted,):
        raise TensorError(
            "plane",
            wanted=f"{wanted} bytes for a matrix [{n}, {k}]",
            got=f"an array of shape {list(plane.shape)}",
        )
