"""How the CUDA kernels of a decode step are cut, and the parameters that they take."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "CHUNK",
    "CUTS",
    "LIMBED",
    "MULTIPLIERS",
    "Cut",
    "cut_of",
    "include_text",
    "limbed_bytes",
    "pack_arguments",
    "packed_multipliers",
]

CHUNK = 128
"""K must be a multiple: columns that are copied and computed at a time."""

LIMBED = 544
"""Bytes of a chunk of a vector in limbs."""

MULTIPLIERS = (-1, -4, -16, -64, -256, 1, 2, 4, 16, 64, 128, 256, 4096)
"""`Multipliers` of codecs.cuh."""


class Cut(NamedTuple):
    """How a kernel is cut; the template parameters of limbs.cuh (w2) or of stream.cuh (others).

    Attributes:
        name: The kernel's.
        down: Down, else gate and up.
        codec: Codec of the rows.
        row_blocks: Row blocks of 16 a warp computes, half of them gate and half up for those two.
        column_warps: Warps that share the columns of a matrix. The order of sums follows from it
            and from `chunks`.
        row_groups: Groups of that many warps in a block, each with rows of its own.
        chunks: Chunks of 128 columns that a warp copies at a time.
        stages: Places in shared memory that a warp copies to, in turn.
        sums: Places in shared memory to add the warps' sums in, in turn; 1 for w2.
        resident: Blocks of a processor at a time; bounds registers.
    """

    name: str
    down: bool
    codec: str
    row_blocks: int
    column_warps: int
    row_groups: int
    chunks: int
    stages: int
    sums: int
    resident: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.column_warps * self.row_groups

    @property
    def tile_rows(self) -> int:
        """Rows of the result that a block computes at a time."""
        return 16 * self.row_groups * (self.row_blocks if self.down else self.row_blocks // 2)

    def strip(self, rows: int, pairs: int, processors: int) -> int:
        """Choose how many tiles a block computes, one after the other.

        As many as leave all processors busy: a block's first weights take longer than the
        following tiles', which it asks for ahead. No result depends on it.
        """
        tiles = -(-rows // self.tile_rows)
        best, least = 1, tiles * pairs * 2
        for strip in range(1, tiles + 1):
            blocks = pairs * -(-tiles // strip)
            if strip > 1 and blocks < processors * (self.resident - 1):
                break
            longest = -(-blocks // processors) * strip
            if longest <= least:
                best, least = strip, longest
        return best


CUTS = (
    Cut("gate_up_w2", False, "w2", 4, 4, 1, 2, 2, 1, 4),
    Cut("down_w2", True, "w2", 4, 2, 2, 2, 2, 1, 4),
    Cut("gate_up_fp4_mx", False, "fp4-mx", 2, 4, 1, 1, 3, 2, 5),
    Cut("down_fp4_mx", True, "fp4-mx", 2, 4, 1, 1, 3, 2, 5),
    Cut("gate_up_fp4_nv", False, "fp4-nv", 2, 4, 1, 1, 3, 2, 5),
    Cut("down_fp4_nv", True, "fp4-nv", 2, 4, 1, 1, 3, 2, 5),
)
"""One a kernel for all numbers of tokens, since the order of sums follows from it."""


def cut_of(codec: str, cuts: Sequence[Cut] = CUTS, *, down: bool) -> Cut:
    """Return the cut of a codec's kernel."""
    return next(cut for cut in cuts if cut.codec == codec and cut.down == down)


def include_text(cuts: Sequence[Cut] = CUTS) -> str:
    """Return cuts.inc, which stream.cu makes its kernels from."""
    lines = ["// Written by moet_kernels.portable.build from cuts.py."]
    for cut in cuts:
        codec, down = cut.codec.upper().replace("-", "_"), str(cut.down).lower()
        if cut.codec == "w2":
            sizes = (*cut[3:8], cut.resident)
            lines.append(f"INTEGERS({cut.name}, {down}, {', '.join(map(str, sizes))})")
        else:
            lines.append(f"KERNEL({cut.name}, {down}, {codec}, {', '.join(map(str, cut[3:]))})")
    return "\n".join(lines) + "\n"


def pack_arguments(
    pointers: Sequence[int], row_bytes: int, numbers: Sequence[int], limit: float
) -> bytes:
    """Pack `Args` of step.cuh: 8 pointers, row_bytes, 12 numbers, the limit."""
    packed = struct.pack("<8Qq12if", *pointers, row_bytes, *numbers, limit) + packed_multipliers()
    return packed + bytes(-len(packed) % 8)


def packed_multipliers() -> bytes:
    """Pack `Multipliers` of codecs.cuh."""
    return struct.pack(f"<{len(MULTIPLIERS)}i", *MULTIPLIERS)


def limbed_bytes(columns: int) -> int:
    """Bytes of a vector in limbs (limbs.cuh): 4 a column, and 8 scales for every 128 columns."""
    return columns // CHUNK * LIMBED
