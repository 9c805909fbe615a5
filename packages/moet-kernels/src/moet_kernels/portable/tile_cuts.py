"""How the CUDA kernels of prefill are cut, and the parameters that they take."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from moet_core.row import RowLayout
from moet_kernels.portable.cuts import packed_multipliers

__all__ = ["TILE_CUTS", "TileCut", "include_text", "pack_order", "pack_tiles", "tile_cut"]

_CHUNK_BYTES = {"w2": 576, "fp4-mx": 1088, "fp4-nv": 1152}
"""Codes and scales of 16 rows and 128 columns."""

_PAIRS_OF_16, _PAIRS_OF_32, _PAIRS_OF_64 = 12, 28, 48
"""Pairs an expert, on average, up to which groups of 16, of 32, and narrow ones of 64 are fastest
on an H200 (`moet bench kernels --cuts`)."""


class TileCut(NamedTuple):
    """How a kernel is cut; the template parameters of tiles.cuh.

    Attributes:
        name: The kernel's.
        down: Down, else gate and up.
        codec: Codec of the rows.
        vectors: Vectors of a group, all of one expert.
        row_tiles: Tiles of 64 rows a warpgroup computes; gate and up share them.
        warpgroups: Of a block, each with rows of its own.
        stages: Places in shared memory that a block copies to, in turn.
        resident: Blocks of a processor at a time; bounds registers.
    """

    name: str
    down: bool
    codec: str
    vectors: int
    row_tiles: int
    warpgroups: int
    stages: int
    resident: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.warpgroups

    @property
    def tile_rows(self) -> int:
        """Rows of the result that a block computes."""
        return self.warpgroups * self.row_tiles * (64 if self.down else 32)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: stages, and the word behind them."""
        weights = 4 * self.warpgroups * self.row_tiles * _CHUNK_BYTES[self.codec]
        return self.stages * (256 * self.vectors + weights) + 16


def _cuts_of(codec: str) -> list[TileCut]:
    short = codec.replace("-", "_")
    shapes = [(16, 2, 2, 3, 2), (32, 2, 2, 3, 2), (64, 1, 4, 3, 1)]
    if codec == "w2":
        shapes = [(16, 2, 2, 4, 2), (32, 2, 2, 4, 2), (64, 2, 2, 4, 2), (64, 2, 4, 4, 1)]
    return [
        TileCut(f"{what}_{short}_{shape[0]}_{shape[2]}", what == "down", codec, *shape)
        for shape in shapes
        for what in ("gate_up", "down")
    ]


TILE_CUTS = tuple(cut for codec in _CHUNK_BYTES for cut in _cuts_of(codec))
"""The result of a pair does not depend on which of a codec's kernels computes it."""


def tile_cut(layout: RowLayout, pairs: int, experts: int, *, down: bool) -> TileCut | None:
    """Choose the kernel for a number of pairs; None if none computes rows of such sizes.

    Gate-up and down get the same number of vectors.
    """
    per_expert = pairs / experts
    vectors = 16 if per_expert <= _PAIRS_OF_16 else 32 if per_expert <= _PAIRS_OF_32 else 64
    wide = per_expert > _PAIRS_OF_64
    of_codec = [cut for cut in TILE_CUTS if cut.codec == layout.codec and cut.vectors == vectors]
    for warpgroups in sorted({cut.warpgroups for cut in of_codec}, reverse=wide):
        both = {cut.down: cut for cut in of_codec if cut.warpgroups == warpgroups}
        if _divide(layout, both[False], both[True]):
            return both[down]
    return None


def _divide(layout: RowLayout, gate_up: TileCut, down: TileCut) -> bool:
    whole = layout.intermediate % gate_up.tile_rows == 0 and layout.hidden % down.tile_rows == 0
    return whole and layout.intermediate % 128 == 0


def include_text(cuts: Sequence[TileCut] = TILE_CUTS) -> str:
    """Return tiles.inc, which tiles.cu makes its kernels from."""
    lines = ["// Written by moet_kernels.portable.build from tile_cuts.py."]
    for cut in cuts:
        codec, down = cut.codec.upper().replace("-", "_"), str(cut.down).lower()
        lines.append(f"TILES({cut.name}, {down}, {codec}, {', '.join(map(str, cut[3:]))})")
    return "\n".join(lines) + "\n"


def pack_tiles(
    pointers: Sequence[int], row_bytes: int, numbers: Sequence[int], limit: float
) -> bytes:
    """Pack `TileArgs` of tiles.cuh: 7 pointers, row_bytes, 6 numbers, the limit."""
    packed = struct.pack("<7Qq6if", *pointers, row_bytes, *numbers, limit) + packed_multipliers()
    return packed + bytes(-len(packed) % 8)


def pack_order(x: int, out: int, columns: int, codec: str) -> bytes:
    """Pack `OrderArgs` of tiles.cu."""
    return struct.pack("<2Q2i", x, out, columns, codec == "w2")
