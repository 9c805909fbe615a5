"""Encoded experts as the kernels see them."""

from typing import NamedTuple

from torch import Tensor

from moet_core.row import RowLayout

__all__ = ["RowConstants", "Tier", "row_constants"]

RowConstants = tuple[str, int, int, int, int, int, int]


def row_constants(layout: RowLayout) -> RowConstants:
    """Return what kernels know of rows when they are compiled.

    That is codec, row bytes, and the offsets of codes13, scales13, codes2, scales2 and
    tensor_scales.
    """
    return (
        layout.codec,
        layout.row_bytes,
        layout.codes13.offset,
        layout.scales13.offset,
        layout.codes2.offset,
        layout.scales2.offset,
        layout.tensor_scales.offset,
    )


class Tier(NamedTuple):
    """Encoded experts: rows uint8 [slots, row_bytes] and the slot int32 [E] of each, -1 if none."""

    pool: Tensor
    slot_of: Tensor
    layout: RowLayout
